// SPDX-License-Identifier: MIT
//
// Philox4x32-10 as its paper defines it (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", 2011), and what kernels.h promises of dropout.
// Shares nothing with the kernels.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "multihead/kernels/kernels.h"

namespace kernel_test {

using Counter = std::array<uint32_t, 4>;

inline Counter philox(Counter counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(second),
               static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(first)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

/// The 16-bit number of the weight at (b, h, i, j) of a call of H heads.
inline uint32_t dropout_number(const multihead::kernels::Dropout& dropout,
                               int64_t H, const std::array<int64_t, 4>& at) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const int64_t heads = dropout.heads > 0 ? dropout.heads : H;
  const int64_t head = (at[0] + dropout.first_batch) * heads + at[1] +
                       dropout.first_head,
                i = at[2] + dropout.first_query, j = at[3] + dropout.first_key;
  const Counter words = philox(
      {low(i), low(j / 8), low(head), low(dropout.offset)},
      {low(dropout.seed), low(dropout.seed >> 32) ^ low(dropout.offset >> 32)});
  return words[j % 8 / 2] >> (j % 2 * 16) & 0xFFFF;
}

/// What dropout multiplies that weight by: 0 or 1 / (1 − p).
inline double dropout_factor(const multihead::kernels::Dropout& dropout,
                             int64_t H, const std::array<int64_t, 4>& at) {
  const double threshold = std::floor(dropout.probability * 65536 + 0.5);
  return dropout_number(dropout, H, at) < threshold
             ? 0
             : 1 / (1 - dropout.probability);
}

}  // namespace kernel_test
