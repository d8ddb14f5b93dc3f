// SPDX-License-Identifier: MIT
//
// The fused operators on the CPU: tensors become arguments of the kernels.
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>

#include "multihead/attention/count.h"
#include "multihead/attention/storage.h"
#include "multihead/backend.h"
#include "multihead/ops/cpu/arguments.h"
#include "multihead/ops/cpu/parallel.h"
#include "multihead/ops/results.h"

namespace multihead::ops {
namespace {

using at::Tensor;

// The arguments of a backward call as the kernels take them.
class BackwardCall {
 public:
  BackwardCall(const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
               const Tensor& query, const Tensor& key, const Tensor& value,
               const Tensor& out, const Tensor& logsumexp,
               const AttentionOptions& options,
               const std::optional<Tensor>& dropout_state, bool is_part)
      : call_(query, key, options, dropout_state),
        value_(four_dimensional(value)),
        out_(four_dimensional(out)),
        dout_(four_dimensional(dout)),
        logsumexp_(logsumexp.contiguous()) {
    backward_.attention = call_.attention;
    backward_.attention.value = rows_of(value_);
    backward_.attention.Dv = value_.size(3);
    backward_.out = rows_of(out_);
    backward_.dout = rows_of(dout_);
    backward_.logsumexp = logsumexp_.const_data_ptr();
    backward_.is_part = is_part;
    if (!dlogsumexp) return;
    dlogsumexp_ = dlogsumexp->contiguous();
    backward_.dlogsumexp = dlogsumexp_.const_data_ptr();
  }

  /// Fills what is defined.
  void run(call::Gradients& gradients) {
    auto& [dquery, dkey, dvalue, dmask, dslopes, dsinks] = gradients;
    const kernels::AttentionArgs& a = backward_.attention;
    // One batch of keys or values for many: each batch has its share.
    Tensor key_shares, value_shares;
    const auto rows = [&](const Tensor& x, Tensor& shares) {
      if (!x.defined()) return kernels::StridedOutRows();
      if (x.dim() == 3) return out_rows_of(x.unsqueeze(0));
      if (x.size(0) == a.B) return out_rows_of(x);
      shares = at::empty({a.B, x.size(1), x.size(2), x.size(3)}, x.options());
      return out_rows_of(shares);
    };
    Tensor none;
    backward_.dquery = rows(dquery, none);
    backward_.dkey = rows(dkey, key_shares);
    backward_.dvalue = rows(dvalue, value_shares);
    // Sums in the compute type, rounded once.
    Tensor mask_sums;
    if (dmask.defined()) {
      const auto number = logsumexp_.scalar_type();
      mask_sums = dmask.scalar_type() == number
                      ? dmask
                      : at::empty(dmask.sizes(), logsumexp_.options());
      if (a.B * a.H * a.Lq * a.Lk == 0) {
        mask_sums.zero_();  // nobody adds to it
      } else {
        backward_.dbias = score_gradients_of(mask_sums);
      }
    }
    run_backward(backward_, dslopes, dsinks);
    const auto add_up = [](const Tensor& shares, Tensor& gradient) {
      if (shares.defined()) at::sum_out(gradient, shares, 0, /*keepdim=*/true);
    };
    add_up(key_shares, dkey);
    add_up(value_shares, dvalue);
    if (dmask.defined() && !mask_sums.is_same(dmask)) dmask.copy_(mask_sums);
  }

 private:
  const AttentionArguments call_;
  const Tensor value_, out_, dout_, logsumexp_;
  Tensor dlogsumexp_;
  kernels::BackwardArgs backward_;
};

std::tuple<Tensor, Tensor> fused_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  auto [out, logsumexp] =
      fused_attention_results(query, key, value, options, dropout_state);
  const AttentionArguments call(query, key, options, dropout_state);
  const Tensor values = four_dimensional(value);
  kernels::ForwardArgs forward{call.attention, {}, nullptr};
  forward.attention.value = rows_of(values);
  forward.attention.Dv = width_of(values).expect_int();
  forward.out = out_rows_of(out.dim() == 3 ? out.unsqueeze(0) : out);
  forward.logsumexp = logsumexp.mutable_data_ptr();
  count_fused();
  run_forward(forward);
  return {out, logsumexp};
}

call::Gradients fused_attention_backward(
    const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, call::Needs needs,
    const AttentionOptions& options, const std::optional<Tensor>& dropout_state,
    bool is_part) {
  call::Gradients gradients = fused_attention_backward_results(
      dout, dlogsumexp, query, key, value, out, logsumexp, needs, options,
      dropout_state, is_part);
  BackwardCall call(dout, dlogsumexp, query, key, value, out, logsumexp,
                    options, dropout_state, is_part);
  call.run(gradients);
  return gradients;
}

Tensor attention_weights(const Tensor& query, const Tensor& key,
                         const Tensor& logsumexp, bool average,
                         const AttentionOptions& options,
                         const std::optional<Tensor>& dropout_state) {
  Tensor weights = attention_weights_result(query, key, logsumexp, average,
                                            options, dropout_state);
  const AttentionArguments call(query, key, options, dropout_state);
  const kernels::AttentionArgs& a = call.attention;
  if (a.H == 0) weights.fill_(std::nan(""));  // a mean of nothing
  const Tensor lse = logsumexp.contiguous();
  const Tensor per_head = average ? weights.unsqueeze(-3) : weights;
  const kernels::WeightsArgs arguments{
      a, lse.const_data_ptr(),
      out_rows_of(per_head.dim() == 3 ? per_head.unsqueeze(0) : per_head),
      average};
  run(kernels_of(a).weights, arguments);
  return weights;
}

std::tuple<Tensor, Tensor, Tensor> fused_attention_summary(
    const Tensor& query, const Tensor& key, const Tensor& logsumexp,
    int64_t count, const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  auto [weights, keys, entropy] = fused_attention_summary_results(
      query, key, logsumexp, count, options, dropout_state);
  const AttentionArguments call(query, key, options, dropout_state);
  const Tensor lse = logsumexp.contiguous();
  const kernels::SummaryArgs arguments{call.attention,
                                       lse.const_data_ptr(),
                                       count,
                                       weights.mutable_data_ptr(),
                                       keys.mutable_data_ptr<int64_t>(),
                                       entropy.mutable_data_ptr()};
  run(kernels_of(call.attention).summary, arguments);
  return {weights, keys, entropy};
}

}  // namespace

kernels::Isa current_isa() {
  const char* error = nullptr;
  const kernels::Isa isa = kernels::chosen_isa(&error);
  TORCH_CHECK(!error, error, ", got \"", std::getenv("MULTIHEAD_ISA"), "\"");
  return isa;
}

kernels::Kernels kernels_of(const kernels::AttentionArgs& a) {
  return kernels::kernels_for(current_isa(), a.dtype);
}

TORCH_LIBRARY_IMPL(multihead, CPU, m) {
  using fields::implementation;
  m.impl("fused_attention", implementation<&fused_attention>);
  m.impl("fused_attention_backward", implementation<&fused_attention_backward>);
  m.impl("attention_weights", implementation<&attention_weights>);
  m.impl("fused_attention_summary", implementation<&fused_attention_summary>);
}

}  // namespace multihead::ops

namespace multihead {

std::string kernel_isa() { return kernels::name_of(ops::current_isa()); }

std::vector<std::string> kernel_isas() {
  std::vector<std::string> names;
  for (const kernels::Isa isa : kernels::kAllIsas) {
    if (kernels::cpu_has(isa)) names.emplace_back(kernels::name_of(isa));
  }
  return names;
}

}  // namespace multihead
