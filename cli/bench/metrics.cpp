// SPDX-License-Identifier: MIT
#include "cli/bench/metrics.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "cli/terminal/format.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

template <std::string (*shown)(double)>
std::string number(const Value& value) {
  return shown(value.get<double>());
}

std::string mebibytes(const Value& bytes) {
  if (bytes.is_null()) return "–";
  const double mebi = bytes.get<double>() / 1048576;
  return mebi < 1 ? "< 1" : format("%.0f", mebi);
}

Value memory(const Measurement&, const Entry& entry) {
  return entry.memory ? Value(*entry.memory) : Value();
}

const Metric kMetrics[] = {
    {.csv = "best_s",
     .json = "/seconds/best",
     .value = [](auto&, auto& e) -> Value { return e.time.best; },
     .column = {.title = "best", .width = 8, .right = true},
     .shown = number<duration>,
     .help = "time of the fastest call"},
    {.csv = "lower_quartile_s",
     .json = "/seconds/lower_quartile",
     .value = [](auto&, auto& e) -> Value { return e.time.lower; }},
    {.csv = "median_s",
     .json = "/seconds/median",
     .value = [](auto&, auto& e) -> Value { return e.time.median; },
     .column = {"median", 8, /*right=*/true, /*dispensable=*/true},
     .shown = number<duration>,
     .help = "of the time of one call",
     .style = Style::kDim},
    {.csv = "upper_quartile_s",
     .json = "/seconds/upper_quartile",
     .value = [](auto&, auto& e) -> Value { return e.time.upper; }},
    {.csv = "rounds",
     .json = "/seconds/rounds",
     .value = [](auto&, auto& e) -> Value { return e.time.count; }},
    {.value = [](auto&, auto& e) -> Value { return e.time.spread(); },
     .column = {"spread", 0, /*right=*/true, /*dispensable=*/true},
     .shown = number<percent>,
     .help = "distance of the quartiles as a share of the median",
     .style = Style::kDim},
    {.csv = "rate",
     .json = "/rate",
     .value = [](auto&, auto& e) -> Value { return e.rate; },
     .column = {"G/s", 5, /*right=*/true, /*dispensable=*/true},
     .shown = number<three_digits>,
     .help = "GFLOP/s of useful work: pairs that a mask hides do not count;\n"
             "GB/s in \"few queries\""},
    {.csv = "rate_unit",
     .value = [](auto& m, auto&) -> Value { return rate_unit(m); }},
    {.csv = "share_of_peak",
     .json = "/share_of_peak",
     .value = [](auto&, auto& e) -> Value { return e.share; },
     .column = {.title = "of peak", .right = true},
     .shown = number<percent>,
     .help = "share of what the processor's multiply-add units (or memory) "
             "gave in\nthe same process right before and after, without AMX"},
    // In the terminal, memory stands before what compares with ours.
    {.value = memory,
     .column = {"MiB", 6, /*right=*/true, /*dispensable=*/true},
     .shown = mebibytes,
     .help = "memory that the first call took, its results included",
     .style = Style::kDim},
    {.csv = "ratio_best",
     .json = "/ratio/best",
     .value = [](auto&, auto& e) -> Value { return e.ratio; },
     .column = {.title = "× best", .width = 6, .right = true},
     .shown = number<times>,
     .help = "their best time over ours",
     .theirs = true},
    {.json = "/ratio/paired/best",
     .value = [](auto&, auto& e) -> Value { return e.paired.best; }},
    {.json = "/ratio/paired/lower_quartile",
     .value = [](auto&, auto& e) -> Value { return e.paired.lower; }},
    {.csv = "ratio_paired",
     .json = "/ratio/paired/median",
     .value = [](auto&, auto& e) -> Value { return e.paired.median; },
     .column = {"× paired", 0, /*right=*/true, /*dispensable=*/true},
     .shown = number<times>,
     .help = "median of their time over ours, round by round",
     .style = Style::kDim,
     .theirs = true},
    {.json = "/ratio/paired/upper_quartile",
     .value = [](auto&, auto& e) -> Value { return e.paired.upper; }},
    {.json = "/ratio/paired/rounds",
     .value = [](auto&, auto& e) -> Value { return e.paired.count; }},
    {.csv = "extra_memory_bytes",
     .json = "/extra_memory_bytes",
     .value = memory},
};

}  // namespace

std::span<const Metric> metrics() { return kMetrics; }

std::string describe_metrics() {
  std::string text;
  for (const Metric& metric : metrics()) {
    if (!metric.help) continue;
    std::istringstream lines(metric.help);
    std::string title = metric.column.title;
    for (std::string line; std::getline(lines, line); title.clear())
      text += "  " + padded(title, 8) + "  " + line + "\n";
  }
  return text;
}

std::string three_digits(double value) {
  if (!(value > 0)) return "0";
  const int digits = 2 - static_cast<int>(std::floor(std::log10(value)));
  return format("%.*f", std::clamp(digits, 0, 6), value);
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return three_digits(seconds * 1e6) + " µs";
  if (seconds < 1) return three_digits(seconds * 1e3) + " ms";
  return three_digits(seconds) + " s";
}

std::string percent(double share) { return format("%.0f %%", 100 * share); }

std::string times(double ratio) { return format("×%.2f", ratio); }

const char* rate_unit(const Measurement& measurement) {
  return measurement.test->memory_bound ? "GB/s" : "GFLOP/s";
}

}  // namespace cli
