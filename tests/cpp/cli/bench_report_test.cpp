// SPDX-License-Identifier: MIT
//
// What `multihead bench` shows of a run: each form of output against its own
// grammar, with a run made up here.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/bench/report.h"

namespace {

using namespace cli;

// Three cases: one met, one with a contender that is wrong, one not ours.
struct Sample {
  Sample() {
    for (const char* case_name : {"met", "with \"quotes\"", "wrong"})
      cases.push_back(
          {.group = "group",
           .name = case_name,
           .call =
               AttentionCall{
                   .name = "", .B = 2, .H = 4, .Lq = 9, .Lk = 13, .D = 8},
           .target = {.share = 0.5,
                      .ratios = {{Implementation::kSdpa, 2}},
                      .scaling = 1.9,
                      .memory = 5},
           .headline = true});
    run.environment.cpu = "A & <B>";
    run.date = "2026-01-02";
    run.isa = "avx2";
    run.family = "avx2";
    const auto add = [&](int index, int threads, std::vector<Entry> entries) {
      run.measurements.push_back(
          {.test = &cases[index],
           .threads = threads,
           .peak = {"fp32", {100, 98}, {100, index == 1 ? 80. : 99.}},
           .entries = std::move(entries)});
    };
    const Entry ours{.who = Implementation::kOurs,
                     .time = statistics({1e-3, 2e-3}),
                     .rate = 60,
                     .share = 0.6,
                     .ratio = 1,
                     .memory = 3 << 20};
    Entry sdpa = ours;
    sdpa.who = Implementation::kSdpa;
    sdpa.ratio = 1.5;
    sdpa.share = 0.4;
    sdpa.memory = 12 << 20;
    const Entry broken{.who = Implementation::kByHand,
                       .status = Status::kWrong,
                       .fault = "no \"<&"};
    Entry failed = broken;
    failed.who = Implementation::kOurs;
    failed.status = Status::kFailed;
    add(0, 1, {ours, sdpa});
    add(0, 2, {ours, sdpa});
    run.measurements.back().scaling = 1.95;
    add(1, 1, {ours, sdpa, broken});
    add(2, 1, {failed, sdpa});
  }
  std::vector<BenchCase> cases;
  BenchRun run;
};

std::vector<std::string> lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> all;
  for (std::string line; std::getline(stream, line);) all.push_back(line);
  return all;
}

TEST(BenchReport, DemandsAreMetOrNot) {
  const Sample sample;
  const auto& m = sample.run.measurements;
  const auto one = target_results(m[0]);
  ASSERT_EQ(one.size(), 3u);
  EXPECT_TRUE(one[0].met());   // 0.6 of the peak
  EXPECT_FALSE(one[1].met());  // 1.5 times SDPA
  EXPECT_TRUE(one[2].of_memory);
  EXPECT_EQ(one[2].reached, 4);
  const auto two = target_results(m[1]);
  ASSERT_EQ(two.size(), 1u);
  EXPECT_TRUE(two[0].met());
  EXPECT_TRUE(target_results(m[3]).empty());
  EXPECT_FALSE(m[0].peak.noisy());
  EXPECT_TRUE(m[2].peak.noisy());
}

TEST(BenchReport, JsonHasEverything) {
  const Sample sample;
  const auto json = nlohmann::json::parse(to_json(sample.run));
  EXPECT_EQ(json["right"], false);
  EXPECT_EQ(json["isa"], "avx2");
  EXPECT_EQ(json["family"], "avx2");
  ASSERT_EQ(json["measurements"].size(), 4u);
  const auto& first = json["measurements"][0];
  EXPECT_EQ(first["contenders"][0]["seconds"]["best"], 1e-3);
  EXPECT_EQ(first["contenders"][1]["ratio"]["best"], 1.5);
  EXPECT_EQ(first["contenders"][1]["extra_memory_bytes"], 12 << 20);
  EXPECT_EQ(first["pass"], "forward");
  EXPECT_EQ(first["targets"][0]["met"], true);
  EXPECT_EQ(json["measurements"][1]["scaling"], 1.95);
  EXPECT_EQ(json["measurements"][2]["contenders"][2]["fault"], "no \"<&");
  EXPECT_EQ(json["measurements"][3]["contenders"][0]["status"], "failed");
}

TEST(BenchReport, CsvRowsHaveTheColumnsOfTheHeader) {
  const Sample sample;
  const auto rows = lines(to_csv(sample.run));
  ASSERT_EQ(rows.size(), 1u + 2 + 2 + 3 + 2);
  const auto columns = [](const std::string& row) {
    bool quoted = false;
    int count = 1;
    for (const char c : row) {
      if (c == '"') quoted = !quoted;
      count += c == ',' && !quoted;
    }
    EXPECT_FALSE(quoted) << row;
    return count;
  };
  for (const std::string& row : rows) EXPECT_EQ(columns(row), columns(rows[0]));
  EXPECT_NE(rows[5].find("\"with \"\"quotes\"\"\""), std::string::npos);
}

TEST(BenchReport, MarkdownHasOneRowForEachHeadline) {
  const Sample sample;
  const auto rows = lines(to_markdown(sample.run));
  ASSERT_EQ(rows.size(), 2u + 2 + 2);  // header, two right ones, where and when
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(std::ranges::count(rows[i], '|'), 7) << rows[i];
  EXPECT_EQ(rows[2],
            "| met | B2 H4 L9 Lk13 D8 f32 | SDPA 1.00 ms | 1.00 ms | "
            "**1.50** | 60 % |");
  EXPECT_NE(rows.back().find("2026-01-02"), std::string::npos);
}

TEST(BenchReport, SvgIsWellFormed) {
  const Sample sample;
  const std::string svg = to_svg(sample.run);
  std::vector<std::string> open;
  for (size_t at = 0; (at = svg.find('<', at)) != std::string::npos; ++at) {
    const size_t end = svg.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = svg.substr(at + 1, end - at - 1);
    const std::string element = tag.substr(0, tag.find(' '));
    EXPECT_EQ(std::ranges::count(tag, '"') % 2, 0) << tag;
    if (tag.starts_with('/')) {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), tag.substr(1));
      open.pop_back();
    } else if (!tag.ends_with('/')) {
      open.push_back(element);
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_NE(svg.find("A &amp; &lt;B&gt;"), std::string::npos);
  EXPECT_NE(svg.find("with &quot;quotes&quot;"), std::string::npos);
  EXPECT_NE(svg.find("prefers-color-scheme: dark"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(BenchReport, AnEmptyRunIsShownToo) {
  const BenchRun run{.environment = {}, .date = "", .isa = "avx2", .plan = {}};
  EXPECT_TRUE(nlohmann::json::parse(to_json(run))["measurements"].empty());
  EXPECT_TRUE(to_svg(run).ends_with("</svg>\n"));
  EXPECT_EQ(lines(to_csv(run)).size(), 1u);
}

TEST(BenchReport, NumbersHaveThreeDigits) {
  EXPECT_EQ(three_digits(1.284), "1.28");
  EXPECT_EQ(three_digits(128.4), "128");
  EXPECT_EQ(three_digits(0.01284), "0.0128");
  EXPECT_EQ(three_digits(0), "0");
  EXPECT_EQ(duration(12.8e-6), "12.8 µs");
  EXPECT_EQ(duration(1.28e-3), "1.28 ms");
  EXPECT_EQ(duration(2), "2.00 s");
}

}  // namespace
