// SPDX-License-Identifier: MIT
//
// The float64 of reference/, for calls as data.
#pragma once

#include "cli/cases/calls.h"
#include "reference/attention.h"
#include "reference/tensors.h"

namespace cli {

using reference::Values;

/// The elements of a tensor; none of an undefined one.
Values values(const at::Tensor& tensor);

/// A golden result and the error allowed for each of its elements, float64 and
/// shaped like the result they judge.
struct Golden {
  at::Tensor value, allowed;
};

struct GoldenAttention {
  Golden out;                               ///< (B, H, Lq, Dv)
  Golden weights;                           ///< (B, H, Lq, Lk)
  Golden logsumexp;                         ///< (B, H, Lq)
  Golden query = {}, key = {}, value = {};  ///< gradients of Σ out·dout
};

struct GoldenLayer {
  Golden out;      ///< like query
  Golden weights;  ///< (B, H, Lq, Lk) or (B, Lq, Lk), as asked for
};

/// What rounding a dtype allows. In a layer, queries, keys and values are
/// stored in the dtype, and in 16 bits that rounding enters the scores.
reference::Precision attention_precision(at::ScalarType dtype);
reference::Precision layer_precision(at::ScalarType dtype);

/// A call as the loops want it.
reference::Attention reference_attention(const AttentionInputs& inputs);

/// Gradients only with dout (B, H, Lq, Dv).
GoldenAttention golden_attention(const AttentionInputs& inputs,
                                 const at::Tensor& dout = {});

GoldenLayer golden_layer(const LayerInputs& inputs);

// --- By matrix products: what a benchmarked call shall return ----------------

using reference::Reference;
using reference::Scaled;

/// The output (B, H, Lq, Dv); with `dout` of that size also the gradients of
/// Σ output·dout: query, key, value. No softcap, ALiBi or sinks. Without
/// dropout.
Reference reference_of(const AttentionInputs& inputs,
                       const at::Tensor& dout = {});

/// The output as the layer returns it, and averaged weights (B, Lq, Lk) if
/// they are needed; with `dout` also the gradients of Σ output·dout: query,
/// in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, for
/// self-attention. Multi-head layers without bias_k and add_zero_attn. Without
/// dropout.
Reference reference_of(const LayerInputs& inputs, const at::Tensor& dout = {});

}  // namespace cli
