// SPDX-License-Identifier: MIT
#include "cli/bench/compare.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cli/bench/report.h"
#include "cli/terminal/arguments.h"
#include "cli/terminal/text.h"

namespace cli {
namespace {

// What two runs of one program easily differ by, whatever their rounds say.
constexpr double kLeastChange = 0.02;

[[noreturn]] void refuse_file(const char* condition, const std::string& got) {
  throw std::invalid_argument(std::string("bench: --compare must ") +
                              condition + ", got " + got);
}

// Without the library's "[json.exception.parse_error.101] ".
std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return end == text.npos ? text : text.substr(end + 2);
}

// From a file of any origin, so nothing that would move the cursor.
std::string text_at(const nlohmann::json& object, const char* key) {
  return printable(object.at(key).get<std::string>());
}

// What the first records did not have yet.
std::string text_if_there(const nlohmann::json& object, const char* key) {
  return object.contains(key) ? text_at(object, key) : "";
}

double positive(const nlohmann::json& object, const char* key) {
  const double value = object.at(key).get<double>();
  if (!(value > 0))
    throw std::invalid_argument(std::string(key) + " must be positive, got " +
                                object.at(key).dump());
  return value;
}

BenchRun parse_run(const nlohmann::json& json) {
  const nlohmann::json& environment = json.at("environment");
  BenchRun run{.environment = {}, .date = "", .isa = "", .plan = {}};
  run.environment.version = text_at(environment, "version");
  run.environment.commit = text_if_there(environment, "commit");
  run.environment.torch_running = text_at(environment.at("torch"), "running");
  run.environment.blas = text_at(environment, "blas");
  run.environment.cpu = text_at(environment.at("cpu"), "model");
  run.environment.cpu_id = text_at(environment.at("cpu"), "id");
  run.date = text_at(json, "date");
  run.isa = text_at(json, "isa");
  run.family = text_if_there(json, "family");
  run.same_isa = json.at("pytorch_held_to_isa").get<bool>();
  return run;
}

RecordedCase parse_case(const nlohmann::json& json) {
  RecordedCase found{.group = text_at(json, "group"),
                     .name = text_at(json, "case"),
                     .title = ""};
  found.title = found.group + ": " + found.name + " " + text_at(json, "shapes");
  found.threads = json.at("threads").get<int>();
  for (const nlohmann::json& contender : json.at("contenders")) {
    const std::string who = text_at(contender, "name");
    const bool right = text_at(contender, "status") == name(Status::kRight);
    if (who == name(Implementation::kOurs)) {
      if (!right) return found;
      found.seconds = positive(contender.at("seconds"), "best");
    } else if (right) {
      const nlohmann::json& ratio = contender.at("ratio");
      const nlohmann::json& paired = ratio.at("paired");
      found.rivals.push_back(
          {.name = who,
           .best = positive(ratio, "best"),
           .paired = {.best = positive(paired, "best"),
                      .lower = positive(paired, "lower_quartile"),
                      .median = positive(paired, "median"),
                      .upper = positive(paired, "upper_quartile"),
                      .count = paired.at("rounds").get<int64_t>()}});
    }
  }
  return found;
}

// nullptr: it is not there, or not right.
const RecordedCase::Rival* rival(const RecordedCase& test,
                                 const std::string& who) {
  const auto found =
      std::ranges::find(test.rivals, who, &RecordedCase::Rival::name);
  return found == test.rivals.end() ? nullptr : &*found;
}

const RecordedCase* find_case(const Record& record, const RecordedCase& like) {
  for (const RecordedCase& test : record.cases)
    if (test.title == like.title && test.threads == like.threads) return &test;
  return nullptr;
}

// Names of contenders that are right in both, PyTorch's first.
std::vector<std::string> rivals_of_both(const RecordedCase& then,
                                        const RecordedCase& now) {
  using enum Implementation;
  std::vector<std::string> names = {name(kSdpa), name(kNnModule),
                                    name(kTorchNn)};
  for (const RecordedCase::Rival& r : now.rivals) names.push_back(r.name);
  std::erase_if(names, [&](const std::string& who) {
    return !rival(then, who) || !rival(now, who);
  });
  return names;
}

}  // namespace

std::vector<int> Record::threads_of(const std::string& title) const {
  std::vector<int> found;
  for (const RecordedCase& test : cases)
    if (test.title == title) found.push_back(test.threads);
  return found;
}

void Record::keep(const std::string& filter, const std::vector<int>& threads) {
  std::erase_if(cases, [&](const RecordedCase& test) {
    return test.title.find(filter) == std::string::npos ||
           (!threads.empty() &&
            std::ranges::find(threads, test.threads) == threads.end());
  });
}

Record parse_record(std::string_view text, const std::string& file) {
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    refuse_file("be JSON", file + ": " + reason_of(error));
  }
  try {
    Record record{.file = file, .run = parse_run(json), .cases = {}};
    for (const nlohmann::json& test : json.at("measurements"))
      record.cases.push_back(parse_case(test));
    return record;
  } catch (const std::exception& error) {
    refuse_file("be a record that bench --json wrote",
                file + ": " + reason_of(error));
  }
}

Record read_record(const std::string& file) {
  constexpr const char* kReadable = "name a file that can be read";
  std::error_code none;
  if (std::filesystem::is_directory(file, none))
    refuse_file(kReadable, file + ", a folder");
  std::ifstream stream(file, std::ios::binary);
  if (!stream)
    refuse_file(kReadable, file + ": " +
                               std::generic_category().message(errno) +
                               did_you_mean_file(file));
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  return parse_record(text, file);
}

Change judge_change(const RecordedCase::Rival& then,
                    const RecordedCase::Rival& now) {
  const bool overlap = now.paired.lower <= then.paired.upper &&
                       then.paired.lower <= now.paired.upper;
  const double change = now.paired.median / then.paired.median - 1;
  const double of_best = now.best / then.best - 1;
  if (overlap || std::abs(change) < kLeastChange || change * of_best <= 0)
    return Change::kNoise;
  return change > 0 ? Change::kFaster : Change::kSlower;
}

std::vector<Comparison> compare(const Record& then, const Record& now) {
  std::vector<Comparison> all;
  for (const RecordedCase& test : now.cases) {
    const RecordedCase* before = find_case(then, test);
    if (!before) continue;
    const std::vector<std::string> names = rivals_of_both(*before, test);
    if (names.empty()) continue;
    const RecordedCase::Rival &a = *rival(*before, names[0]),
                              &b = *rival(test, names[0]);
    all.push_back({before, &test, &a, &b, judge_change(a, b)});
  }
  return all;
}

bool same_processor(const Record& then, const Record& now) {
  const Environment &a = then.run.environment, &b = now.run.environment;
  return a.cpu == b.cpu && a.cpu_id == b.cpu_id;
}

// --- The table ---------------------------------------------------------------

namespace {

// "name at 2 threads"; `apart` is false where both runs have it, but no
// contender that is right in both.
std::vector<std::string> without_partner(const Record& record,
                                         const Record& other, bool apart) {
  std::vector<std::string> names;
  for (const RecordedCase& test : record.cases) {
    const RecordedCase* partner = find_case(other, test);
    if (apart ? !partner : partner && rivals_of_both(test, *partner).empty())
      names.push_back(test.name + " at " + plural(test.threads, "thread"));
  }
  return names;
}

std::string signed_percent(double change) {
  return format("%+.0f %%", 100 * change);
}

Cell verdict_of(Change change) {
  switch (change) {
    case Change::kFaster:
      return {"faster", Style::kGood};
    case Change::kSlower:
      return {"slower", Style::kBad};
    case Change::kNoise:
      break;
  }
  return {"noise", Style::kDim};
}

// What the two runs do not have in common, where it changes what ratios mean.
void show_differences(Table& table, const Record& then, const Record& now) {
  const Environment &a = then.run.environment, &b = now.run.environment;
  const auto warn = [&](const std::string& text) {
    table.line(text, Style::kWarning);
  };
  if (!same_processor(then, now))
    warn("Another processor: ratios compare, times do not.");
  if (a.torch_running != b.torch_running || a.blas != b.blas)
    warn("Another PyTorch: a ratio may have changed on its side.");
  if (then.run.same_isa != now.run.same_isa)
    warn("PyTorch is held to our registers (--same-isa) in one of them only.");
}

void show_rows(Table& table, const std::vector<Comparison>& all,
               bool times_too) {
  std::string group;
  for (const Comparison& c : all) {
    if (c.now->group != group) table.line(group = c.now->group, Style::kBold);
    const double faster = c.then->seconds / c.now->seconds;
    table.row({{"  " + c.now->name},
               {std::to_string(c.now->threads), Style::kDim},
               {c.rival_now->name},
               {times(c.rival_then->paired.median)},
               {times(c.rival_now->paired.median)},
               {percent(c.spread()), Style::kDim},
               {signed_percent(c.ratio() - 1)},
               {times_too ? times(faster) : "", Style::kDim},
               {times(c.rival_then->best), Style::kDim},
               {times(c.rival_now->best), Style::kDim},
               verdict_of(c.change)});
  }
}

}  // namespace

void show_comparison(const Record& then, const Record& now) {
  const std::vector<Comparison> all = compare(then, now);
  int width = 0;
  for (const Comparison& c : all)
    width = std::max(width, 2 + columns(c.now->name));
  Table table({{.title = "case", .width = width},
               {.title = "threads", .right = true},
               {.title = "against", .width = 10},
               {.title = "then", .width = 6, .right = true},
               {.title = "now", .width = 6, .right = true},
               {.title = "spread", .right = true},
               {.title = "change", .right = true},
               {"our time", 0, /*right=*/true, /*dispensable=*/true},
               {"best then", 0, /*right=*/true, /*dispensable=*/true},
               {"best now", 0, /*right=*/true, /*dispensable=*/true},
               {.title = "verdict"}});
  table.line("then  " + then.file + ": " + headline(then.run), Style::kBold);
  table.line("now   " + now.file + ": " + headline(now.run), Style::kBold);
  show_differences(table, then, now);
  table.line("");
  if (!all.empty()) table.header();
  show_rows(table, all, same_processor(then, now));

  if (!all.empty()) table.line("");
  for (const auto& [what, names] :
       {std::pair("only then", without_partner(then, now, /*apart=*/true)),
        {"only now", without_partner(now, then, /*apart=*/true)},
        {"not right in both", without_partner(now, then, /*apart=*/false)}})
    if (!names.empty())
      table.line(what + (": " + joined(names, "; ")), Style::kWarning);
  const auto count = [&](Change change) {
    return std::to_string(std::ranges::count(all, change, &Comparison::change));
  };
  table.line(plural(all.size(), "case") + " in both: " +
             count(Change::kFaster) + " faster, " + count(Change::kSlower) +
             " slower, " + count(Change::kNoise) + " within noise.");
}

std::string describe_comparison() {
  return R"(
--compare: "then" and "now" are their time over ours, the median of rounds, so
more is faster; "our time" is what ours took then over now, on one processor.
Noise: the quartiles of both runs overlap, or less than 2 % has changed, or the
best calls say the opposite. It does not change the exit status.
)";
}

}  // namespace cli
