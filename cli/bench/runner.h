// SPDX-License-Identifier: MIT
//
// Runs one case: draws it, judges every contender, then times them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench/result.h"

namespace cli {

/// What stays the same from case to case.
class Runner {
 public:
  Runner(std::string isa, TimingPlan plan, uint64_t seed);

  /// Measures the case at each number of threads, and hands over every
  /// measurement as it comes.
  void run(const BenchCase& test, const std::vector<int>& threads,
           const std::function<void(Measurement)>& done);

 private:
  struct Limit {
    std::string unit;
    Rate rate;
  };
  Limit measure_limit(const BenchCase& test, int threads);

  std::string isa_;
  TimingPlan plan_;
  uint64_t seed_;
  int all_threads_;  // what comes before the time, float64 above all, uses them
  std::unique_ptr<MemoryReader> reader_;  // made when first asked for
};

}  // namespace cli
