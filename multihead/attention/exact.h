// SPDX-License-Identifier: MIT
//
// Attention from ATen operations: on any device and dtype, differentiable to
// any order. PyTorch's own order of operations where PyTorch has the call, the
// definition in docs/parity.md where it has not.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "multihead/attention/mask.h"

namespace multihead::exact {

/// The heads of one call, batch and heads in one dimension.
struct Heads {
  at::Tensor query;  ///< (B·H, Lq, D)
  at::Tensor key;    ///< (B·G, Lk, D)
  at::Tensor value;  ///< (B·G, Lk, Dv)
  c10::SymInt batch_size, num_heads, num_kv_heads;
};

/// What happens to the scores between the two products.
struct ScoreRules {
  double scale = 1.0;
  std::optional<double> softcap = {};
  Mask mask = {};
  at::Tensor alibi_slopes = {};  ///< (H) or (B, H)
  at::Tensor sinks = {};         ///< (H)
  double dropout_p = 0.0;
  /// (B, H, Lq, Lk), 0 or 1/(1 − dropout_p): draws that were made before.
  at::Tensor dropout_factors = {};
};

struct Attention {
  at::Tensor out;        ///< (B·H, Lq, Dv)
  at::Tensor weights;    ///< (B·H, Lq, Lk), after dropout
  at::Tensor logsumexp;  ///< (B, H, Lq), when asked for
};

/// The definition: every rule, masked rows 0, NaN in unseen keys and values
/// without effect, 16-bit types computed in float32. In the absence of a mask
/// its operations are those of attention_as_pytorch.
Attention attention(const Heads& heads, const ScoreRules& rules,
                    bool with_logsumexp);

/// exp(scores − logsumexp), (B·H, Lq, Lk), after dropout where its factors are
/// given: the weights of that attention, as a function of logsumexp (B, H, Lq)
/// too. A large logsumexp is taken for that of these scores and sinks, and what
/// it lost in rounding made up for. Values are not looked at.
at::Tensor weights_from_logsumexp(const Heads& heads, const ScoreRules& rules,
                                  const at::Tensor& logsumexp);

/// The order of torch.nn.functional.multi_head_attention_forward with
/// need_weights: bits, NaN rows and dropout stream are PyTorch's. additive_mask
/// (1 or B·H, 1 or Lq, Lk) or undefined; G = H.
Attention attention_as_pytorch(const Heads& heads,
                               const at::Tensor& additive_mask,
                               double dropout_p);

/// (B·H, …) from (B·G, …): each key/value head repeated for its query heads.
at::Tensor expand_groups(const at::Tensor& rows, const Heads& heads);

/// An ordinary tensor: neither traced, vmapped, differentiated by torch.func
/// nor without storage.
bool is_plain(const at::Tensor& tensor);

/// is_plain, and nobody records what happens to it: its values may be read.
bool has_values(const at::Tensor& tensor);

}  // namespace multihead::exact
