// SPDX-License-Identifier: MIT
#include "cli/bench/timing.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string>

namespace cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSlowCall = 0.5;  // seconds
constexpr int kFewestRounds = 3;
constexpr int kMostRounds = 200;
constexpr double kShortest = 200e-6;  // of one reading of the clock

double seconds_for(const std::function<void()>& call, int64_t repeats) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < repeats; ++i) call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// values sorted; share in [0, 1]
double quantile(const std::vector<double>& values, double share) {
  const double position = share * (values.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (position - below) * (values[above] - values[below]);
}

// Rounds of a call that takes so many seconds: fewer where it is slow.
int least_rounds(double seconds, int rounds) {
  const int in_time =
      static_cast<int>(rounds * std::min(1., kSlowCall / seconds));
  return std::max(in_time, std::min(kFewestRounds, rounds));
}

// A field of /proc/self/status in bytes, "VmRSS" or "VmHWM".
std::optional<int64_t> status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":"))
      return std::stoll(line.substr(field.size() + 1)) * 1024;
  return std::nullopt;
}

// Forgets the largest resident size so far.
bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

}  // namespace

Statistics statistics(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  return {.best = values.front(),
          .lower = quantile(values, 0.25),
          .median = quantile(values, 0.5),
          .upper = quantile(values, 0.75),
          .count = static_cast<int64_t>(values.size())};
}

std::vector<std::vector<double>> interleave(
    const std::vector<std::function<void()>>& calls, const TimingPlan& plan) {
  struct Series {
    double warm;      // seconds of one call
    int64_t repeats;  // calls between two readings of the clock
    int rounds;
  };
  std::vector<Series> all;
  double round = 0;
  for (const auto& call : calls) {
    const double warm = std::max(seconds_for(call, 1), 1e-9);
    const auto repeats =
        std::max<int64_t>(1, std::llround(std::ceil(kShortest / warm)));
    all.push_back({warm, repeats, 0});
    round += warm * repeats;
  }
  const int affordable =
      static_cast<int>(std::min<double>(kMostRounds, plan.seconds / round));
  int last = 0;
  for (Series& series : all) {
    series.rounds =
        std::max(least_rounds(series.warm, plan.rounds), affordable);
    last = std::max(last, series.rounds);
  }
  std::vector<std::vector<double>> times(calls.size());
  for (int r = 0; r < last; ++r)
    for (size_t turn = 0; turn < calls.size(); ++turn) {
      const size_t i = (turn + r) % calls.size();
      if (r < all[i].rounds)
        times[i].push_back(seconds_for(calls[i], all[i].repeats) /
                           all[i].repeats);
    }
  return times;
}

Statistics paired_ratio(const std::vector<double>& theirs,
                        const std::vector<double>& ours) {
  std::vector<double> ratios;
  for (size_t r = 0; r < std::min(theirs.size(), ours.size()); ++r)
    ratios.push_back(theirs[r] / ours[r]);
  return statistics(std::move(ratios));
}

std::optional<int64_t> extra_memory(const std::function<void()>& call) {
  malloc_trim(0);  // what the process kept would hide what the call needs
  const bool reset = reset_peak();
  const auto before = status("VmRSS");
  call();
  const auto peak = status("VmHWM");
  if (!reset || !before || !peak) return std::nullopt;
  return std::max<int64_t>(0, *peak - *before);
}

}  // namespace cli
