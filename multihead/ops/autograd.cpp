// SPDX-License-Identifier: MIT
//
// The derivative of fused_attention is fused_attention_backward. The other
// fused operators have none, and that one has no second: who needs it is told
// so in backward. functional.cpp takes the definition in ATen operations where
// a gradient is needed.
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "multihead/fused.h"
#include "multihead/ops/rules.h"
#include "multihead/optional_tensor.h"

namespace multihead::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a backward call needs beside tensors.
struct SavedOptions : torch::CustomClassHolder {
  explicit SavedOptions(AttentionOptions options)
      : options(std::move(options)) {}
  AttentionOptions options;
};

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& query,
                               const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& attn_mask,
                               const std::optional<Tensor>& alibi_slopes,
                               const std::optional<Tensor>& sinks,
                               AttentionOptions options,
                               const std::optional<Tensor>& state) {
    const Tensor dropout_state = or_undefined(state);
    const auto [out, logsumexp] =
        fused::attention(query, key, value, options, dropout_state);
    context->save_for_backward(
        {query, key, value, options.attn_mask, options.alibi_slopes,
         options.sinks, options.key_lengths, dropout_state, out, logsumexp});
    context->set_materialize_grads(false);
    // Tensors are saved above, where autograd keeps watch over them.
    options.attn_mask = options.alibi_slopes = options.sinks =
        options.key_lengths = Tensor();
    context->saved_data["options"] = c10::IValue::make_capsule(
        c10::make_intrusive<SavedOptions>(std::move(options)));
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2],
                 &state = saved[7], &out = saved[8], &logsumexp = saved[9];
    AttentionOptions options = c10::static_intrusive_pointer_cast<SavedOptions>(
                                   context->saved_data["options"].toCapsule())
                                   ->options;
    options.attn_mask = saved[3];
    options.alibi_slopes = saved[4];
    options.sinks = saved[5];
    options.key_lengths = saved[6];
    std::array<bool, 6> needs{};
    for (size_t i = 0; i < needs.size(); ++i) {
      needs[i] = saved[i].defined() && saved[i].requires_grad();
    }
    const Tensor dout =
        gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    variable_list results = fused::attention_backward(
        dout, gradients[1], {query, key, value, out, logsumexp}, needs, options,
        state);
    results.resize(8);  // options and dropout_state have none
    return results;
  }
};

template <class RuleTypes>
struct Operators;
template <class... R>
struct Operators<Types<R...>> {
  static std::tuple<Tensor, Tensor> fused_attention(const Tensor& query,
                                                    const Tensor& key,
                                                    const Tensor& value,
                                                    R... r) {
    const Rules rules{r...};
    const variable_list results = FusedAttention::apply(
        query, key, value, rules.attn_mask, rules.alibi_slopes, rules.sinks,
        options_of(rules), rules.dropout_state);
    return {results[0], results[1]};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(multihead, Autograd, m) {
  m.impl("fused_attention", &Operators<RuleTypes>::fused_attention);
  for (const char* name :
       {"fused_attention_backward", "attention_weights", "attention_summary"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace multihead::ops
