// SPDX-License-Identifier: MIT
//
// What a benchmarked call shall return: the definition in float64, by ATen's
// matrix products, because the loops of golden.h would take minutes at these
// sizes. bench_test holds it against those loops.
#pragma once

#include <ATen/core/Tensor.h>

#include "cli/attention_call.h"
#include "cli/layer_call.h"
#include "tests/cpp/naive.h"

namespace cli {

/// A result in float64, its condition scale and Λ (tests/cpp/naive.h).
struct Reference {
  at::Tensor out, out_scale;  ///< (B, H, Lq, Dv) or as the layer returns it
  at::Tensor weights;         ///< (B, Lq, Lk), averaged; of layers only
  double lambda = 0;
};

/// No softcap, ALiBi or sinks. Without dropout.
Reference reference_of(const AttentionInputs& inputs);

/// Multi-head layers without bias_k and add_zero_attn. Without dropout.
Reference reference_of(const LayerInputs& inputs);

/// The largest |x − value| as a share of what `precision` allows there; not at
/// most 1, and infinite for NaN or another shape, where x is wrong.
double budget_share(const at::Tensor& x, const at::Tensor& value,
                    const at::Tensor& scale, double lambda,
                    const naive::Precision& precision);

}  // namespace cli
