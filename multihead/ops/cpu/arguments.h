// SPDX-License-Identifier: MIT
//
// Tensors as the CPU kernels take them: pointers, sizes and strides, and copies
// of what no kernel can read in place.
#pragma once

#include <optional>
#include <vector>

#include "multihead/attention/varlen.h"
#include "multihead/functional.h"
#include "multihead/kernels/kernels.h"

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

/// VarlenRows one after the other: (T, heads, D) with the batch rows' first
/// rows, or pages (P, page, heads, D). The last dimension is dense.
at::Tensor dense_rows(const at::Tensor& x);
/// x in the form of `like`: the same starts, or the same pages.
kernels::StridedRows rows_like(const kernels::StridedRows& like,
                               const at::Tensor& x);
kernels::StridedOutRows out_rows_like(const kernels::StridedRows& like,
                                      const at::Tensor& x);

/// The arguments of a call but for its values, and what they point to.
class AttentionArguments {
 public:
  AttentionArguments(const at::Tensor& query, const at::Tensor& key,
                     const AttentionOptions& options,
                     const std::optional<at::Tensor>& dropout_state);
  /// Of sequences; reads where they lie (varlen.h), and checks it.
  AttentionArguments(const at::Tensor& query, const at::Tensor& key,
                     const VarlenRows& sequences,
                     const AttentionOptions& options,
                     const std::optional<at::Tensor>& dropout_state);
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;

  kernels::AttentionArgs attention;

 private:
  void set_rules(const AttentionOptions& options,
                 const std::optional<at::Tensor>& dropout_state);
  void set_mask(const at::Tensor& attn_mask);
  void set_offsets(CausalAlignment alignment, const at::Tensor& query_offset);
  /// x, as long as the arguments live.
  const at::Tensor& keep(at::Tensor x) {
    return kept_.emplace_back(std::move(x));
  }

  at::Tensor query_, key_;
  VarlenPlaces places_;
  c10::SmallVector<at::Tensor, 4> kept_;
  std::vector<int64_t> offsets_;
};

}  // namespace multihead::ops
