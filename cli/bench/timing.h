// SPDX-License-Identifier: MIT
//
// How long calls take beside each other, what is said of a series of times, and
// how much memory one call needs; and what this machine can do. No torch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace cli {

/// A series in short: its smallest value, its quartiles, how many values.
struct Statistics {
  double best = 0, lower = 0, median = 0, upper = 0;
  int64_t count = 0;
  /// Distance of the quartiles as a share of the median.
  double spread() const { return median > 0 ? (upper - lower) / median : 0; }
};

/// Between two neighbours a quantile is interpolated. Empty → all 0.
Statistics statistics(std::vector<double> values);

struct TimingPlan {
  /// At least. A call that takes n times 0.5 s gets an n-th of them, three at
  /// least.
  int rounds = 10;
  double seconds = 1.0;  ///< of all calls of one case together, roughly
};

/// Seconds per call of each of `calls`, in the order of rounds. In a round each
/// is called once, those that take microseconds many times in a row; who begins
/// changes from round to round. A slow one stops early, so that series have
/// their first rounds in common. Each has been called once before.
std::vector<std::vector<double>> interleave(
    const std::vector<std::function<void()>>& calls, const TimingPlan& plan);

/// Statistics of their time over ours, round by round.
Statistics paired_ratio(const std::vector<double>& theirs,
                        const std::vector<double>& ours);

/// Bytes by which the resident memory of the process grows at most while `call`
/// runs, what it returns included; nullopt where Linux does not say.
std::optional<int64_t> extra_memory(const std::function<void()>& call);

// --- What this machine can do at most ----------------------------------------
// Arithmetic that touches nothing but registers, and reading memory: every
// share that `multihead bench` prints is of one of these, measured beside it.

/// Units of arithmetic: multiply-add in float32 and float64, dot products of
/// bfloat16 pairs (VDPBF16PS), and of bfloat16 tiles (AMX).
enum class Unit { kFloat32, kFloat64, kBFloat16Pairs, kBFloat16Tiles };

/// The best rate that was reached, and the mean. A mean far below the best says
/// that others used the machine meanwhile.
struct Rate {
  double best = 0, mean = 0;
};

/// GFLOP/s of `threads` threads that do nothing else for some 20 ms, a
/// multiply-add counting 2, in vector registers of `bits`: 512 (AVX-512), 256
/// (AVX2 and FMA) or 128 (a multiplication and an addition, any processor).
/// nullopt where this processor has no such unit.
std::optional<Rate> measure_arithmetic(Unit unit, int bits, int threads);

/// Reads memory too large for any cache, which is why it keeps much of it.
class MemoryReader {
 public:
  MemoryReader();
  /// GB/s (10⁹ bytes) of `threads` threads in three passes.
  Rate measure(int threads) const;

 private:
  std::vector<uint64_t> memory_;
};

/// Size of the last-level cache in bytes; 32 MiB where nothing says.
int64_t last_level_cache();

}  // namespace cli
