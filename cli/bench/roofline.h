// SPDX-License-Identifier: MIT
//
// What this machine can do at most: arithmetic that touches nothing but
// registers, and reading memory. Every share that `multihead bench` prints is
// of one of these, measured beside it. No torch.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace cli {

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
