// SPDX-License-Identifier: MIT
//
// The same definition by ATen's matrix products in float64, for sizes at which
// the loops of attention.h would take minutes; bench_test holds it against
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "reference/precision.h"

namespace reference {

/// A result in float64 and its condition scale (attention.h).
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
  double Precision::* factor = &Precision::forward;
};

struct Reference {
  std::vector<Expected> parts;
  double lambda = 0;
};

/// query (B, H, Lq, D), key (B, H, Lk, D), value (B, H, Lk, Dv).
struct Heads {
  Scaled query, key, value;
  at::Tensor keep;  ///< bool, broadcasts to (B, H, Lq, Lk)
  at::Tensor bias;  ///< the same in float64
  double scale;
  bool average_weights;
};

/// What attention makes of them.
struct Attended {
  Scaled out;          ///< (B, H, Lq, Dv)
  at::Tensor weights;  ///< (B, Lq, Lk), averaged; where they are asked for
  double lambda = 0;
  Scaled dquery, dkey, dvalue;  ///< where there is a gradient of out
};

/// `dout` without tensors: no gradients.
Attended attend(const Heads& heads, const Scaled& dout);

Scaled matmul(const Scaled& a, const Scaled& b);
/// x · weightᵀ + bias; bias may be undefined.
Scaled linear(const Scaled& x, const at::Tensor& weight,
              const at::Tensor& bias);
/// y = x · weightᵀ + bias: the gradients of weight and bias from that of y.
struct LinearGradients {
  Scaled weight, bias;
};
LinearGradients linear_backward(const Scaled& x, const Scaled& dy);

/// The largest |x − value| as a share of factor·u·scale + tiny; not at most 1,
/// and infinite for NaN or another shape, where x is wrong.
double budget_share(const at::Tensor& x, const Scaled& expected, double factor,
                    double lambda, const Precision& precision);

/// Why `out` is not what the reference demands; empty: every part is within
/// its budget.
std::string fault(const std::vector<at::Tensor>& out,
                  const Reference& reference, const Precision& precision);

}  // namespace reference
