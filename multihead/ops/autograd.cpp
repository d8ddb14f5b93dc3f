// SPDX-License-Identifier: MIT
//
// Derivatives of the fused operators. That of fused_attention is
// fused_attention_backward. Where autograd records the latter too, for a second
// derivative, and where a loss uses attention_weights, the definition in ATen
// operations is computed again, with the same dropout, and differentiated
// (definition.h); it forms all weights. attention_summary has no derivative.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "multihead/attention/definition.h"
#include "multihead/attention/fused.h"
#include "multihead/ops/results.h"
#include "multihead/ops/rules.h"
#include "multihead/optional_tensor.h"

namespace multihead::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What is differentiated, here and in Needs: three tensors of the operator's
// own, then attn_mask, alibi_slopes, sinks.
using Inputs = std::array<Tensor, std::tuple_size_v<Needs>>;

Inputs inputs_of(const Tensor& a, const Tensor& b, const Tensor& c,
                 const AttentionOptions& options) {
  return {a, b, c, options.attn_mask, options.alibi_slopes, options.sinks};
}

AttentionOptions with_tensors(AttentionOptions options, const Inputs& inputs) {
  options.attn_mask = inputs[3];
  options.alibi_slopes = inputs[4];
  options.sinks = inputs[5];
  return options;
}

// ---- What a backward finds of its call ------------------------------------

// Numbers only: tensors are saved where autograd keeps watch over them, and
// compiled autograd wants to compare the rest.
c10::IValue saved_options(const AttentionOptions& o) {
  const auto window = o.window.value_or(std::array<int64_t, 2>{});
  return c10::ivalue::Tuple::create(
      {o.dropout_p, o.is_causal, o.scale, o.enable_gqa,
       o.causal_alignment == CausalAlignment::kBottomRight,
       o.window.has_value(), window[0], window[1], o.softcap});
}

AttentionOptions loaded_options(const c10::IValue& saved) {
  // A copy: g++ 12 warns of indices that the inline storage of three lacks.
  const std::vector<c10::IValue> x = saved.toTupleRef().elements().vec();
  AttentionOptions o{.dropout_p = x[0].toDouble(),
                     .is_causal = x[1].toBool(),
                     .scale = x[2].toOptional<double>(),
                     .enable_gqa = x[3].toBool()};
  if (x[4].toBool()) o.causal_alignment = CausalAlignment::kBottomRight;
  if (x[5].toBool()) o.window = {x[6].toInt(), x[7].toInt()};
  o.softcap = x[8].toOptional<double>();
  return o;
}

void save(AutogradContext* context, const Inputs& inputs,
          const AttentionOptions& options, const Tensor& dropout_state,
          const variable_list& results = {}) {
  variable_list tensors(inputs.begin(), inputs.end());
  tensors.push_back(options.query_offset);
  tensors.push_back(options.key_lengths);
  tensors.push_back(options.key_mask);
  tensors.push_back(dropout_state);
  tensors.insert(tensors.end(), results.begin(), results.end());
  context->save_for_backward(std::move(tensors));
  context->saved_data["options"] = saved_options(options);
  context->set_materialize_grads(false);
}

struct SavedCall {
  Inputs inputs;
  Needs needs{};
  AttentionOptions options;
  Tensor dropout_state;
  variable_list results;

  explicit SavedCall(AutogradContext* context) {
    const variable_list saved = context->get_saved_variables();
    // Absent inputs have no edge.
    size_t edge = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = saved[i];
      needs[i] = saved[i].defined() && context->needs_input_grad(edge++);
    }
    options =
        with_tensors(loaded_options(context->saved_data["options"]), inputs);
    auto rest = saved.begin() + inputs.size();
    options.query_offset = *rest++;
    options.key_lengths = *rest++;
    options.key_mask = *rest++;
    dropout_state = *rest++;
    results.assign(rest, saved.end());
  }
};

// ---- By the definition ---------------------------------------------------

// Gradients of Σ outputs·gradients, undefined where not needed. They can be
// differentiated again where gradients are recorded. Every input that is needed
// becomes a node of its own: it may stand twice in a call, or be computed from
// another.
template <class OutputsOf>
variable_list differentiate(Inputs inputs, const Needs& needs,
                            const variable_list& gradients,
                            const OutputsOf& outputs_of) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode recording(true);
  variable_list wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!needs[i]) continue;
    Tensor& x = inputs[i];
    x = again && x.requires_grad() ? x.view_as(x) : x.detach().requires_grad_();
    wanted.push_back(x);
  }
  variable_list results(inputs.size());
  if (wanted.empty()) return results;
  variable_list outputs = outputs_of(inputs), used, by;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
    used.push_back(outputs[i]);
    by.push_back(gradients[i]);
  }
  variable_list found(wanted.size());
  if (!used.empty()) {
    found = torch::autograd::grad(used, wanted, by, /*retain_graph=*/again,
                                  /*create_graph=*/again,
                                  /*allow_unused=*/true);
  }
  for (size_t i = 0, n = 0; i < inputs.size(); ++i) {
    if (!needs[i]) continue;
    results[i] = found[n].defined() ? found[n] : at::zeros_like(wanted[n]);
    ++n;
  }
  return results;
}

Gradients backward_by_definition(const variable_list& gradients,
                                 const Inputs& inputs, const Needs& needs,
                                 const AttentionOptions& options,
                                 const Tensor& dropout_state) {
  const Tensor factors =
      fused::dropout_factors(inputs[0], inputs[1], options, dropout_state);
  const variable_list g = differentiate(
      inputs, needs, gradients, [&](const Inputs& x) -> variable_list {
        const auto [out, logsumexp] =
            define_attention(x[0], x[1], x[2], with_tensors(options, x),
                             gradients[1].defined(), factors);
        return {out, logsumexp};
      });
  return {g[0], g[1], g[2], g[3], g[4], g[5]};
}

// ---- The operators -------------------------------------------------------

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& query,
                               const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>&,
                               const std::optional<Tensor>&,
                               const std::optional<Tensor>&,
                               const AttentionOptions& options,
                               const std::optional<Tensor>& state) {
    const Tensor dropout_state = or_undefined(state);
    const auto [out, logsumexp] =
        fused::attention(query, key, value, options, dropout_state);
    save(context, inputs_of(query, key, value, options), options, dropout_state,
         {out, logsumexp});
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const SavedCall call(context);
    const auto& [query, key, value, mask, slopes, sinks] = call.inputs;
    const Tensor &out = call.results[0], &logsumexp = call.results[1];
    const Tensor dout =
        gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    variable_list results = fused::attention_backward(
        dout, gradients[1], {query, key, value, out, logsumexp}, call.needs,
        call.options, call.dropout_state);
    results.resize(8);  // options and dropout_state have none
    return results;
  }
};

class FusedWeights : public torch::autograd::Function<FusedWeights> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& query,
                        const Tensor& key, const Tensor& logsumexp,
                        const std::optional<Tensor>&,
                        const std::optional<Tensor>&,
                        const std::optional<Tensor>&,
                        const AttentionOptions& options,
                        const std::optional<Tensor>& state, bool average) {
    const Tensor dropout_state = or_undefined(state);
    save(context, inputs_of(query, key, logsumexp, options), options,
         dropout_state);
    context->saved_data["average"] = average;
    return fused::attention_weights(query, key, logsumexp, options,
                                    dropout_state, average);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const SavedCall call(context);
    const bool average = context->saved_data["average"].toBool();
    const Tensor factors = fused::dropout_factors(
        call.inputs[0], call.inputs[1], call.options, call.dropout_state);
    variable_list results =
        differentiate(call.inputs, call.needs, gradients,
                      [&](const Inputs& x) -> variable_list {
                        return {define_weights(x[0], x[1], x[2],
                                               with_tensors(call.options, x),
                                               factors, average)};
                      });
    results.resize(9);  // nor has average
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

  static Gradients fused_attention_backward(
      const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
      const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& out, const Tensor& logsumexp, Needs needs, R... r) {
    const Rules rules{r...};
    const AttentionOptions options = options_of(rules);
    const Inputs inputs = inputs_of(query, key, value, options);
    const Tensor dlse = or_undefined(dlogsumexp),
                 state = or_undefined(rules.dropout_state);
    const bool recorded =
        fused::is_recorded({&dout, &dlse}) ||
        std::any_of(inputs.begin(), inputs.end(),
                    [](const Tensor& x) { return fused::is_recorded({&x}); });
    for (const Tensor* x : {&dout, &dlse, &query, &key, &value}) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !x->defined() || !x->_fw_grad(/*level=*/0).defined(),
          "fused_attention_backward: forward-mode differentiation of a "
          "recorded backward is not implemented");
    }
    if (!recorded) {
      const variable_list g = fused::attention_backward(
          dout, dlse, {query, key, value, out, logsumexp}, needs, options,
          state);
      return {g[0], g[1], g[2], g[3], g[4], g[5]};
    }
    // For its checks, and for which gradients there are.
    const auto shapes = fused_attention_backward_results(
        dout, dlogsumexp, query, key, value, out, logsumexp, needs, rules);
    needs = std::apply([](const auto&... x) { return Needs{x.defined()...}; },
                       shapes);
    return backward_by_definition({dout, dlse}, inputs, needs, options, state);
  }

  static Tensor attention_weights(const Tensor& query, const Tensor& key,
                                  const Tensor& logsumexp, bool average,
                                  R... r) {
    const Rules rules{r...};
    return FusedWeights::apply(query, key, logsumexp, rules.attn_mask,
                               rules.alibi_slopes, rules.sinks,
                               options_of(rules), rules.dropout_state, average);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(multihead, Autograd, m) {
  using All = Operators<RuleTypes>;
  m.impl("fused_attention", &All::fused_attention);
  m.impl("fused_attention_backward", &All::fused_attention_backward);
  m.impl("attention_weights", &All::attention_weights);
  m.impl("attention_summary",
         torch::autograd::autogradNotImplementedFallback());
}

}  // namespace multihead::ops
