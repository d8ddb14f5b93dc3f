// SPDX-License-Identifier: MIT
//
// One call of an attention layer as data: what to draw at random.
#pragma once

#include <functional>
#include <string>
#include <tuple>

#include "cli/cases/random.h"
#include "multihead/functional.h"

namespace cli {

/// Which of query, key and value are one tensor.
enum class Inputs { kDistinct, kKeyIsValue, kSelf };

/// Masks in the polarity of nn.MultiheadAttention: true = blocked.
enum class LayerMask {
  kNone,
  kBool,            ///< (Lq, Lk)
  kBoolPerHead,     ///< (B·H, Lq, Lk)
  kFloat,           ///< (Lq, Lk)
  kFloatPerHead,    ///< (B·H, Lq, Lk)
  kPadding,         ///< bool (B, Lk)
  kFloatPadding,    ///< (B, Lk), −inf and finite
  kBoolAndPadding,  ///< (Lq, Lk) and (B, Lk)
  kCausal,          ///< is_causal alone
  kCausalHint,      ///< the causal mask, and is_causal
  kBlockedRow,      ///< bool (Lq, Lk), query 1 sees nothing
};

struct LayerCall {
  std::string name = {};
  int64_t N = 2, Lq = 5, Lk = 7;      ///< self-attention: Lk = Lq
  int64_t E = 16, H = 4, G = 0;       ///< G > 0: grouped-query attention
  int64_t D = 0, kdim = 0, vdim = 0;  ///< 0: E / H, E, E
  at::ScalarType dtype = at::kFloat;
  Inputs inputs = Inputs::kDistinct;
  LayerMask mask = LayerMask::kNone;
  bool bias = true, bias_kv = false, zero_attn = false;
  bool batch_first = true, batched = true;
  double dropout = 0;  ///< > 0: in training
  bool need_weights = true, average = true;
};

struct LayerInputs {
  at::Tensor query, key, value;
  multihead::AttentionLayer layer;
  multihead::ForwardOptions options;
};

/// A module's forward(query, key, value, options): (output, weights).
using Module = std::function<std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const multihead::ForwardOptions&)>;

LayerInputs draw(const LayerCall& call, Random& random);

/// Sequences, parameters and a float mask as leaves; tensors that were one stay
/// one.
LayerInputs leaves(const LayerInputs& inputs);

/// "N2 L5 Lk7 E16 H4 f32"
std::string shapes(const LayerCall& call);

}  // namespace cli
