// SPDX-License-Identifier: MIT
//
// The order of the backward pass's stages, for whoever runs them.
#pragma once

#include "multihead/kernels/kernels.h"

namespace multihead::kernels {

/// Keys of one split: multiples of it cut the gradients' sums (gradient.h).
inline constexpr int64_t kGradientSplit = 256;

/// At least one: without keys too, queries have their gradient, 0.
inline int64_t splits_of(const AttentionArgs& a) {
  const int64_t splits = (a.Lk + kGradientSplit - 1) / kGradientSplit;
  return splits > 0 ? splits : 1;
}

/// Runs all stages of `b` on up to `threads` threads. allocate(bytes) gives the
/// workspace, which must live until the end, aligned to 64 bytes; run(kernel,
/// arguments) plans with these threads, runs all tasks and returns when they
/// have ended.
template <class Allocate, class Run>
void run_backward(const BackwardStages& stages, BackwardArgs b, int threads,
                  const Allocate& allocate, const Run& run) {
  const AttentionArgs& a = b.attention;
  const int64_t splits = splits_of(a);
  // Four tasks to a thread end together; more would only take memory.
  const int64_t heads = a.B * a.G;
  const int64_t wanted =
      heads > 0 ? (int64_t{4} * threads + heads - 1) / heads : 1;
  b.splits_per_wave = wanted < splits ? wanted : splits;
  const Plan plan = stages.prepare.plan(b, threads);
  if (!plan.split_parallel) b.splits_per_wave = splits;
  b.workspace = allocate(plan.workspace_bytes);
  run(stages.prepare, b);
  for (; b.first_split < splits; b.first_split += b.splits_per_wave) {
    run(stages.keys, b);
    run(stages.queries, b);
  }
  run(stages.heads, b);
  run(stages.bias, b);
}

}  // namespace multihead::kernels
