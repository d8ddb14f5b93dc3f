// SPDX-License-Identifier: MIT
#include "multihead/linear/linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "multihead/attention/call.h"
#include "multihead/attention/nonfinite.h"
#include "multihead/linear/onednn.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

using at::Tensor;
using call::is_recorded;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_ours(const Tensor& x) {
  return has_values(x) && !x._fw_grad(/*level=*/0).defined();
}

bool is_ours(const Tensor& a, const Tensor& b) {
  return onednn::why_not().empty() && is_ours(a) && is_ours(b) &&
         onednn::way_of(a, b) == Product::kOneDnn &&
         !at::autocast::is_autocast_enabled(at::kCPU) &&
         !torch::jit::tracer::isTracing();
}

Tensor product(const Tensor& a, const Tensor& b);

/// a·b.
struct MatrixProduct : torch::autograd::Function<MatrixProduct> {
  static Tensor compute(const Tensor& a, const Tensor& b) {
    const at::AutoDispatchBelowADInplaceOrView past_autograd;
    return onednn::multiply(a, b);
  }
  static Tensor forward(AutogradContext* context, const Tensor& a,
                        const Tensor& b) {
    context->save_for_backward({a, b});
    return compute(a, b);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &dout = grads[0];
    if (!dout.defined()) return {Tensor(), Tensor()};
    return {context->needs_input_grad(0) ? product(dout, b.t()) : Tensor(),
            context->needs_input_grad(1) ? product(a.t(), dout) : Tensor()};
  }
};

/// x·Wᵀ + b; b may be undefined.
struct Linear : torch::autograd::Function<Linear> {
  static Tensor compute(const Tensor& rows, const Tensor& weight,
                        const Tensor& bias) {
    const at::AutoDispatchBelowADInplaceOrView past_autograd;
    return bias.defined() ? onednn::multiply_and_add(rows, weight.t(), bias)
                          : onednn::multiply(rows, weight.t());
  }
  static Tensor forward(AutogradContext* context, const Tensor& rows,
                        const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    context->save_for_backward({rows, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return compute(rows, weight, or_undefined(bias));
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &rows = saved[0], &weight = saved[1], &dout = grads[0];
    const bool has_bias = context->saved_data["has_bias"].toBool();
    if (!dout.defined()) return {Tensor(), Tensor(), Tensor()};
    return {context->needs_input_grad(0) ? product(dout, weight) : Tensor(),
            context->needs_input_grad(1) ? product(dout.t(), rows) : Tensor(),
            has_bias && context->needs_input_grad(2) ? dout.sum(0) : Tensor()};
  }
};

Tensor product(const Tensor& a, const Tensor& b) {
  if (!is_ours(a, b)) return at::mm(a, b);
  count_product(Product::kOneDnn);
  return is_recorded(a) || is_recorded(b) ? MatrixProduct::apply(a, b)
                                          : MatrixProduct::compute(a, b);
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const auto pytorchs = [&] {
    return at::linear(input, weight, optional(bias));
  };
  if (!is_ours(input) || input.dim() < 2 || weight.dim() != 2 ||
      input.numel() * weight.size(0) < onednn::kSmallestProduct ||
      !onednn::why_not().empty()) {  // before rows are copied
    return pytorchs();
  }
  const Tensor rows = input.reshape({-1, input.size(-1)});
  const Tensor columns = weight.t();
  if (!is_ours(rows, columns) ||
      (bias.defined() &&
       !(is_ours(bias) && onednn::is_addend(bias, rows, columns)))) {
    return pytorchs();
  }
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  count_product(Product::kOneDnn);
  const bool recorded =
      is_recorded(rows) || is_recorded(weight) || is_recorded(bias);
  return (recorded ? Linear::apply(rows, weight, optional(bias))
                   : Linear::compute(rows, weight, bias))
      .view(sizes);
}

}  // namespace multihead
