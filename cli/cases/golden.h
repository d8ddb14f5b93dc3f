// SPDX-License-Identifier: MIT
//
// The float64 loops of reference/attention.h, called with tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "cli/cases/judge.h"
#include "multihead/functional.h"
#include "reference/attention.h"

namespace cli {

/// A golden result and the error allowed for each of its elements, float64 and
/// shaped like the result they judge.
struct Golden {
  at::Tensor value, allowed;
};

struct GoldenAttention {
  Golden out;        ///< (B, H, Lq, Dv)
  Golden weights;    ///< (B, H, Lq, Lk)
  Golden logsumexp;  ///< (B, H, Lq)
};

struct GoldenLayer {
  Golden out;      ///< like query
  Golden weights;  ///< (B, H, Lq, Lk) or (B, Lq, Lk), as asked for
};

struct GoldenGradients {
  Golden query, key, value;
};

/// What rounding a dtype allows. In a layer, queries, keys and values are
/// stored in the dtype, and in 16 bits that rounding enters the scores.
reference::Precision attention_precision(at::ScalarType dtype);
reference::Precision layer_precision(at::ScalarType dtype);

/// A call as the loops want it. query, key, value are 4-D.
reference::Attention reference_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const multihead::AttentionOptions& options);

GoldenAttention golden_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value,
                                 const multihead::AttentionOptions& options);

/// Gradients of Σ out·dout; dout (B, H, Lq, Dv).
GoldenGradients golden_gradients(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value,
                                 const multihead::AttentionOptions& options,
                                 const at::Tensor& dout);

/// Sequences as multi_head_attention_forward takes them. Masks: blocked.
GoldenLayer golden_layer(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value,
                         const multihead::AttentionLayer& layer,
                         const multihead::ForwardOptions& options);

/// One tensor of a comparison; undefined tensors and no golden are absent.
Part make_part(std::string name, const at::Tensor& ours,
               const at::Tensor& pytorch,
               const std::optional<Golden>& golden = {});

}  // namespace cli
