// SPDX-License-Identifier: MIT
//
// Tensors as the CPU kernels take them: pointers, sizes and strides, and copies
// of what no kernel can read in place.
#pragma once

#include <vector>

#include "multihead/kernels/kernels.h"
#include "multihead/ops/rules.h"

namespace multihead::ops {

/// (H, L, D) → (1, H, L, D), the last dimension dense.
at::Tensor four_dimensional(const at::Tensor& x);

/// Of four dimensions. Batches and heads of size 1, which stand for any number,
/// are walked with stride 0.
kernels::StridedRows rows_of(const at::Tensor& x);
kernels::StridedOutRows out_rows_of(const at::Tensor& x);

/// A tensor of any rank as one over (B, H, Lq, Lk): its strides, 0 where it
/// repeats itself.
kernels::ScoreGradients score_gradients_of(const at::Tensor& x);

/// The arguments of a call but for its values, and what they point to.
class AttentionArguments {
 public:
  AttentionArguments(const at::Tensor& query, const at::Tensor& key,
                     const Rules& rules);
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;

  kernels::AttentionArgs attention;

 private:
  void set_tensors(const Rules& rules);
  void set_offsets(const Rules& rules);
  void set_dropout(const Rules& rules);

  at::Tensor query_, key_, key_lengths_, sinks_, slopes_, mask_, key_mask_;
  std::vector<int64_t> offsets_;
};

}  // namespace multihead::ops
