// SPDX-License-Identifier: MIT
//
// What `multihead bench` finds out of a case.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/case.h"
#include "cli/bench/timing.h"
#include "cli/environment.h"

namespace cli {

enum class Status { kRight, kWrong, kFailed };
/// "ok", "wrong", "failed"
std::string name(Status status);

/// One contender's figures; without `time` unless it is right.
struct Entry {
  Implementation who;
  Status status = Status::kRight;
  std::string fault = {};              ///< what is wrong, or what it threw
  Statistics time = {};                ///< seconds per call
  double rate = 0;                     ///< of the best call, GFLOP/s or GB/s
  double share = 0;                    ///< of the peak
  double ratio = 0;                    ///< its best time over ours; ours: 1
  Statistics paired = {};              ///< its time over ours, round by round
  std::optional<int64_t> memory = {};  ///< bytes; nullopt: not measured
};

/// The limit of a case, measured right before and right after it.
struct Peak {
  std::string unit;                  ///< "fp32 FMA, avx512", "reading memory"
  Rate before, after;                ///< GFLOP/s or GB/s
  std::optional<double> tiles = {};  ///< GFLOP/s of AMX, for bfloat16

  /// Shares are of the best that was seen.
  double value() const { return std::max(before.best, after.best); }
  /// Once, more than a tenth of it was missing: others used the machine.
  bool noisy() const {
    return std::min(before.mean, after.mean) < 0.9 * value();
  }
};

/// One case at one number of threads.
struct Measurement {
  const BenchCase* test;
  int threads;
  Peak peak;
  std::vector<Entry> entries;          ///< ours first
  std::optional<double> scaling = {};  ///< one thread's best time over this

  const Entry& ours() const { return entries.front(); }
  const Entry* find(Implementation who) const;
  bool right() const { return ours().status == Status::kRight; }
};

inline constexpr const char* kShareOfPeak = "share of peak";

/// A target, what came of it, and whether it was met.
struct TargetResult {
  std::string what;  ///< "share of peak", "times SDPA", "two threads over one"
  Implementation who;  ///< whose entry it belongs to
  double wanted = 0, reached = 0;
  bool of_memory = false;
  bool met() const { return reached >= wanted; }
};
/// Those that can be judged: shares and ratios at one thread, scaling at two.
std::vector<TargetResult> target_results(const Measurement& measurement);

struct BenchRun {
  Environment environment;
  std::string date;         ///< "2026-11-21"
  std::string isa;          ///< of our kernels
  std::string family = {};  ///< whose targets are meant (targets.h)
  bool has_tiles = false;   ///< PyTorch may use AMX
  bool same_isa = false;    ///< PyTorch is held to the registers of `isa`
  TimingPlan plan;
  std::vector<Measurement> measurements = {};
};

/// Runs cases: draws them, judges every contender, then times those that are
/// right.
class Runner {
 public:
  Runner(std::string isa, TimingPlan plan, uint64_t seed);

  /// Measures the case at each number of threads, and hands over every
  /// measurement as it comes.
  void run(const BenchCase& test, const std::vector<int>& threads,
           const std::function<void(Measurement)>& done);

 private:
  /// What shares are of, by the unit's name.
  std::pair<std::string, Rate> measure_limit(const BenchCase& test,
                                             int threads);

  std::string isa_;
  TimingPlan plan_;
  uint64_t seed_;
  int all_threads_;  // what comes before the time, float64 above all, uses them
  std::unique_ptr<MemoryReader> reader_;  // made when first asked for
};

}  // namespace cli
