// SPDX-License-Identifier: MIT
//
// What the lists of cases are written with.
#pragma once

#include <array>
#include <span>

#include "cli/bench/case.h"

namespace cli {

inline constexpr std::array kWidths = {at::kFloat, at::kBFloat16};

/// A share and a ratio to SDPA that squares shall reach, from a length on, up
/// to the next row's. D = 0: of every head width.
struct Goal {
  at::ScalarType dtype;
  bool causal;
  int64_t D, from;
  double share, ratio;
};

Target against_sdpa(double ratio, double share = 0);

/// The last of `goals` that the call meets; none: nothing is demanded.
Target goal(std::span<const Goal> goals, const AttentionCall& call);

/// B1 H8, Lq = Lk = L.
AttentionCall square(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype);
AttentionCall causal(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype);

/// Named after the call and its sizes: "causal d64 L512 f32".
BenchCase attention(std::string group, const AttentionCall& call,
                    Target target = {});

/// The cases of bench_training_cases.cpp.
std::vector<BenchCase> training_cases(const std::string& isa);

}  // namespace cli
