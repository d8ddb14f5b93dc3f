// SPDX-License-Identifier: MIT
//
// What a benchmarked call shall return: the definition in float64, by ATen's
// matrix products, because the loops of golden.h would take minutes at these
// sizes. bench_test holds it against those loops.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cli/cases/attention_call.h"
#include "cli/cases/layer_call.h"
#include "reference/attention.h"

namespace cli {

/// A result in float64 and its condition scale (reference/attention.h).
struct Scaled {
  Scaled() = default;
  /// A given tensor; absolute values are its scale.
  explicit Scaled(const at::Tensor& x)
      : value(x.detach().to(at::kDouble)), scale(value.abs()) {}
  Scaled(at::Tensor value, at::Tensor scale)
      : value(std::move(value)), scale(std::move(scale)) {}

  template <typename View>
  Scaled view(View view) const {
    return {view(value), view(scale)};
  }
  at::Tensor value, scale;
};

/// One output of a call, and the factor c of its budget.
struct Expected {
  std::string name;  ///< "output", "d query"
  Scaled result;
  double reference::Precision::* factor = &reference::Precision::forward;
};

struct Reference {
  std::vector<Expected> parts;
  double lambda = 0;
};

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

/// The largest |x − value| as a share of factor·u·scale + tiny; not at most 1,
/// and infinite for NaN or another shape, where x is wrong.
double budget_share(const at::Tensor& x, const Scaled& expected, double factor,
                    double lambda, const reference::Precision& precision);

/// Why `out` is not what the reference demands; empty: every part is within
/// its budget.
std::string fault(const std::vector<at::Tensor>& out,
                  const Reference& reference,
                  const reference::Precision& precision);

}  // namespace cli
