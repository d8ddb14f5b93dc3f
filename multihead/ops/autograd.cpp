// SPDX-License-Identifier: MIT
//
// Derivatives of the fused operators. That of fused_attention is
// fused_attention_backward. Where autograd records the latter too, for a second
// derivative, and where a loss uses attention_weights, the definition in ATen
// operations is computed again, with the same dropout, and differentiated
// (definition.h); it forms all weights. fused_attention_summary has no
// derivative.
//
// Operators are handed on with the arguments that came; only what is saved for
// a backward is read here.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "multihead/attention/call.h"
#include "multihead/attention/definition.h"
#include "multihead/attention/varlen.h"
#include "multihead/distributed/ring.h"
#include "multihead/distributed/ulysses.h"
#include "multihead/ops/results.h"

namespace multihead::ops {
namespace {

using at::Tensor;
using call::Gradients;
using call::Needs;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What can have a gradient, in the order of Needs: three tensors of the
// operator's own, then options.
using Inputs = std::array<Tensor, std::tuple_size_v<Needs>>;

Inputs inputs_of(const Tensor& a, const Tensor& b, const Tensor& c,
                 const AttentionOptions& options) {
  Inputs inputs{a, b, c};
  size_t i = 3;
  fields::for_each_differentiable(options,
                                  [&](const Tensor& x) { inputs[i++] = x; });
  return inputs;
}

AttentionOptions with_tensors(AttentionOptions options, const Inputs& inputs) {
  size_t i = 3;
  fields::for_each_differentiable(options, [&](Tensor& x) { x = inputs[i++]; });
  return options;
}

// ---- What a backward finds of its call ------------------------------------

// Numbers, as compiled autograd can compare them.
template <class T>
c10::IValue saved(const T& number) {
  return number;
}
c10::IValue saved(CausalAlignment alignment) {
  return static_cast<int64_t>(alignment);
}
c10::IValue saved(const fields::Window& window) {
  if (!window) return {};
  return c10::ivalue::Tuple::create({(*window)[0], (*window)[1]});
}

template <class T>
void load(const c10::IValue& saved, T& number) {
  number = saved.to<T>();
}
void load(const c10::IValue& saved, CausalAlignment& alignment) {
  alignment = static_cast<CausalAlignment>(saved.toInt());
}
void load(const c10::IValue& saved, fields::Window& window) {
  if (saved.isNone()) return;
  const auto& sizes = saved.toTupleRef().elements();
  window = {sizes[0].toInt(), sizes[1].toInt()};
}

// A call's arguments in the order in which Function::apply takes them: tensors
// of the operator's own, dropout_state, options. Tensors are saved where
// autograd keeps watch over them.
void save(AutogradContext* context, const Tensor& a, const Tensor& b,
          const Tensor& c, const std::optional<Tensor>& dropout_state,
          const AttentionOptions& options, const variable_list& results = {}) {
  variable_list tensors;
  std::vector<c10::IValue> numbers;
  tensors.reserve(4 + fields::kCount + results.size());
  numbers.reserve(fields::kCount);
  tensors.insert(tensors.end(), {a, b, c, or_undefined(dropout_state)});
  fields::for_each([&]<class T>(const fields::Field<T>& field) {
    const T& member = options.*field.member;
    if constexpr (std::is_same_v<T, Tensor>) {
      tensors.push_back(member);
    } else {
      numbers.push_back(saved(member));
    }
  });
  tensors.insert(tensors.end(), results.begin(), results.end());
  context->save_for_backward(std::move(tensors));
  context->saved_data["options"] =
      c10::ivalue::Tuple::create(std::move(numbers));
  context->set_materialize_grads(false);
}

struct SavedCall {
  Inputs inputs;
  Needs needs{};
  std::optional<Tensor> dropout_state;
  AttentionOptions options;
  variable_list results;

  explicit SavedCall(AutogradContext* context) {
    const variable_list tensors = context->get_saved_variables();
    // A copy: g++ 12 warns of indices that the inline storage of three lacks.
    const std::vector<c10::IValue> numbers =
        context->saved_data["options"].toTupleRef().elements().vec();
    auto tensor = tensors.begin();
    auto number = numbers.begin();
    // Absent tensors have no edge.
    size_t edge = 0, input = 0;
    const auto next = [&](bool is_input) -> const Tensor& {
      const bool has_edge = tensor->defined();
      if (is_input) {
        inputs[input] = *tensor;
        needs[input++] = has_edge && context->needs_input_grad(edge);
      }
      edge += has_edge;
      return *tensor++;
    };
    for (int i = 0; i < 3; ++i) next(/*is_input=*/true);
    dropout_state = optional(next(/*is_input=*/false));
    fields::for_each([&]<class T>(const fields::Field<T>& field) {
      if constexpr (std::is_same_v<T, Tensor>) {
        options.*field.member = next(field.is_differentiable);
      } else {
        load(*number++, options.*field.member);
      }
    });
    results.assign(tensor, tensors.end());
  }
};

// The gradients of Inputs as those of apply's arguments; others have none.
variable_list by_argument(const variable_list& gradients) {
  variable_list results;
  results.reserve(5 + fields::kCount);
  results.assign(gradients.begin(), gradients.begin() + 3);
  results.emplace_back();  // dropout_state
  size_t i = 3;
  fields::for_each([&](const auto& field) {
    results.push_back(field.is_differentiable ? gradients[i++] : Tensor());
  });
  return results;
}

variable_list list_of(const Gradients& gradients) {
  return std::apply([](const auto&... x) { return variable_list{x...}; },
                    gradients);
}

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

// attention(inputs, options with their tensors, with_lse) → out, logsumexp.
template <class Attention>
Gradients backward_by_definition(const variable_list& gradients,
                                 const Inputs& inputs, const Needs& needs,
                                 const AttentionOptions& options,
                                 const Attention& attention) {
  const variable_list g = differentiate(
      inputs, needs, gradients, [&](const Inputs& x) -> variable_list {
        const auto [out, logsumexp] =
            attention(x, with_tensors(options, x), gradients[1].defined());
        return {out, logsumexp};
      });
  Inputs results;
  std::copy(g.begin(), g.end(), results.begin());
  return std::tuple_cat(std::move(results));
}

// ---- The operators -------------------------------------------------------

// Past autograd, with the arguments that came.
template <class Operator, class... A>
auto hand_on(const A&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView past_autograd;
  return call::handle<Operator>().call(arguments...);
}

template <class... Options>
AttentionOptions options_of(const Options&... options) {
  return fields::unpack<0>(std::forward_as_tuple(options...));
}

// Whether autograd records a backward, which cannot be differentiated forward.
bool is_recorded(std::initializer_list<const Tensor*> tensors,
                 const AttentionOptions& options) {
  bool recorded = call::is_recorded(options);
  for (const Tensor* x : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !x->defined() || !x->_fw_grad(/*level=*/0).defined(),
        "fused_attention_backward: forward-mode differentiation of a "
        "recorded backward is not implemented");
    recorded = recorded || call::is_recorded(*x);
  }
  return recorded;
}

Needs defined(const Gradients& gradients) {
  return std::apply([](const auto&... x) { return Needs{x.defined()...}; },
                    gradients);
}

// What dropout does to the weights of sequences: (N, H, Lq, Lk) of the longest.
Tensor padded_dropout_factors(const Tensor& query, const Tensor& key,
                              const VarlenRows& sequences,
                              const AttentionOptions& options,
                              const std::optional<Tensor>& dropout_state) {
  if (options.dropout_p == 0.0) return {};
  const VarlenPlaces places = places_of(query, key, sequences, options);
  return call::dropout_factors(
      query.new_empty(
          {places.count(), query.size(1), places.longest_query(), 0}),
      key.new_empty({places.count(), key.size(1), places.longest_key(), 0}),
      options, dropout_state);
}

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  template <class... Options>
  static variable_list forward(AutogradContext* context, const Tensor& query,
                               const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& dropout_state,
                               const Options&... options) {
    const auto [out, logsumexp] = hand_on<call::FusedAttention>(
        query, key, value, options..., dropout_state);
    save(context, query, key, value, dropout_state, options_of(options...),
         {out, logsumexp});
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const SavedCall c(context);
    const Tensor &out = c.results[0], &logsumexp = c.results[1];
    const Tensor dout =
        gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    return by_argument(list_of(call::run<call::FusedAttentionBackward>(
        dout, optional(gradients[1]), c.inputs[0], c.inputs[1], c.inputs[2],
        out, logsumexp, c.needs, c.options, c.dropout_state,
        /*is_part=*/false)));
  }
};

class FusedWeights : public torch::autograd::Function<FusedWeights> {
 public:
  template <class... Options>
  static Tensor forward(AutogradContext* context, const Tensor& query,
                        const Tensor& key, const Tensor& logsumexp,
                        const std::optional<Tensor>& dropout_state,
                        bool average, const Options&... options) {
    save(context, query, key, logsumexp, dropout_state, options_of(options...));
    context->saved_data["average"] = average;
    return hand_on<call::AttentionWeights>(query, key, logsumexp, average,
                                           options..., dropout_state);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const SavedCall c(context);
    const bool average = context->saved_data["average"].toBool();
    const Tensor factors = call::dropout_factors(c.inputs[0], c.inputs[1],
                                                 c.options, c.dropout_state);
    variable_list results = by_argument(differentiate(
        c.inputs, c.needs, gradients, [&](const Inputs& x) -> variable_list {
          return {definition::weights(
              x[0], x[1], x[2], with_tensors(c.options, x), factors, average)};
        }));
    results.insert(results.begin() + 4, Tensor());  // nor has average
    return results;
  }
};

// Where sequences lie: a tensor that nobody differentiates.
struct VarlenBounds {
  Tensor cu_seqlens_q, cu_seqlens_k;
};

class FusedVarlen : public torch::autograd::Function<FusedVarlen> {
 public:
  template <class... Options>
  static variable_list forward(AutogradContext* context, const Tensor& query,
                               const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& dropout_state,
                               const VarlenBounds& bounds,
                               const Options&... options) {
    const auto& [cu_seqlens_q, cu_seqlens_k] = bounds;
    const auto [out, logsumexp] = hand_on<call::FusedVarlenAttention>(
        query, key, value, cu_seqlens_q, optional(cu_seqlens_k),
        std::optional<Tensor>(), options..., dropout_state);
    save(context, query, key, value, dropout_state, options_of(options...),
         {out, logsumexp, cu_seqlens_q, cu_seqlens_k});
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const SavedCall c(context);
    const Tensor &out = c.results[0], &logsumexp = c.results[1];
    const Tensor dout =
        gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    variable_list results =
        by_argument(list_of(call::run<call::FusedVarlenAttentionBackward>(
            dout, optional(gradients[1]), c.inputs[0], c.inputs[1], c.inputs[2],
            out, logsumexp, c.results[2], c.results[3], c.needs, c.options,
            c.dropout_state)));
    results.insert(results.begin() + 4, Tensor());  // the bounds have none
    return results;
  }
};

class FusedRing : public torch::autograd::Function<FusedRing> {
 public:
  template <class... Options>
  static variable_list forward(AutogradContext* context, const Tensor& query,
                               const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& dropout_state,
                               const std::string& group,
                               const std::string& order,
                               const VarlenBounds& bounds,
                               const Options&... options) {
    const auto& [cu_seqlens_q, cu_seqlens_k] = bounds;
    const auto [out, logsumexp, places] = hand_on<call::FusedRingAttention>(
        query, key, value, options..., std::string_view(group),
        std::string_view(order), optional(cu_seqlens_q), optional(cu_seqlens_k),
        dropout_state);
    save(context, query, key, value, dropout_state, options_of(options...),
         {out, logsumexp, places, cu_seqlens_q, cu_seqlens_k});
    context->saved_data["group"] = group;
    context->saved_data["order"] = order;
    context->mark_non_differentiable({places});
    return {out, logsumexp, places};
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const SavedCall c(context);
    const std::string group = context->saved_data["group"].toStringRef();
    const std::string order = context->saved_data["order"].toStringRef();
    const Tensor &out = c.results[0], &logsumexp = c.results[1];
    const Tensor dout =
        gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    variable_list results =
        by_argument(list_of(call::run<call::FusedRingAttentionBackward>(
            dout, optional(gradients[1]), c.inputs[0], c.inputs[1], c.inputs[2],
            out, logsumexp, c.results[2], c.needs, c.options,
            std::string_view(group), std::string_view(order),
            optional(c.results[3]), optional(c.results[4]))));
    results.insert(results.begin() + 4, 3, Tensor());  // names and bounds
    return results;
  }
};

// Numbers that change their places: the derivative is the way back, of all
// tensors together, whichever of them have one.
template <class There, class Back>
class Exchange : public torch::autograd::Function<Exchange<There, Back>> {
 public:
  static variable_list forward(AutogradContext* context,
                               const at::TensorList& tensors,
                               const std::string& group,
                               const std::string& order,
                               const std::vector<int64_t>& lengths) {
    context->saved_data["group"] = group;
    context->saved_data["order"] = order;
    context->saved_data["lengths"] = lengths;
    const at::AutoDispatchBelowADInplaceOrView past_autograd;
    return distributed::exchange<There>(tensors, group, order, lengths);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    auto& saved = context->saved_data;
    variable_list results = distributed::exchange<Back>(
        gradients, saved["group"].toStringRef(), saved["order"].toStringRef(),
        saved["lengths"].toIntVector());
    results.resize(gradients.size() + 3);  // names and lengths have none
    return results;
  }
};

template <class There, class Back>
std::vector<Tensor> exchange(at::TensorList tensors, std::string_view group,
                             std::string_view order, at::IntArrayRef lengths) {
  return Exchange<There, Back>::apply(tensors, std::string(group),
                                      std::string(order), lengths.vec());
}

// Options: the fields of AttentionOptions, as the dispatcher has them.
template <class Options>
struct Operators;
template <class... Options>
struct Operators<fields::Types<Options...>> {
  static std::tuple<Tensor, Tensor> fused_attention(
      const Tensor& query, const Tensor& key, const Tensor& value,
      Options... options, const std::optional<Tensor>& dropout_state) {
    const variable_list results =
        FusedAttention::apply(query, key, value, dropout_state, options...);
    return {results[0], results[1]};
  }

  static std::tuple<Tensor, Tensor> fused_varlen_attention(
      const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
      const std::optional<Tensor>& block_table, Options... options,
      const std::optional<Tensor>& dropout_state) {
    if (block_table) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !call::is_recorded(query) && !call::is_recorded(key) &&
              !call::is_recorded(value) &&
              !call::is_recorded(options_of(options...)),
          "fused_varlen_attention: block_table must be None where gradients "
          "are recorded, got one");
      return hand_on<call::FusedVarlenAttention>(
          query, key, value, cu_seqlens_q, cu_seqlens_k, block_table,
          options..., dropout_state);
    }
    const variable_list results = FusedVarlen::apply(
        query, key, value, dropout_state,
        VarlenBounds{cu_seqlens_q, or_undefined(cu_seqlens_k)}, options...);
    return {results[0], results[1]};
  }

  static std::tuple<Tensor, Tensor, Tensor> fused_ring_attention(
      const Tensor& query, const Tensor& key, const Tensor& value,
      Options... options, std::string_view group, std::string_view order,
      const std::optional<Tensor>& cu_seqlens_q,
      const std::optional<Tensor>& cu_seqlens_k,
      const std::optional<Tensor>& dropout_state) {
    const variable_list results = FusedRing::apply(
        query, key, value, dropout_state, std::string(group),
        std::string(order),
        VarlenBounds{or_undefined(cu_seqlens_q), or_undefined(cu_seqlens_k)},
        options...);
    return {results[0], results[1], results[2]};
  }

  static Tensor attention_weights(const Tensor& query, const Tensor& key,
                                  const Tensor& logsumexp, bool average,
                                  Options... options,
                                  const std::optional<Tensor>& dropout_state) {
    return FusedWeights::apply(query, key, logsumexp, dropout_state, average,
                               options...);
  }

  static Gradients fused_attention_backward(
      const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
      const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& out, const Tensor& logsumexp, Needs needs,
      Options... options, const std::optional<Tensor>& dropout_state,
      bool is_part) {
    const Tensor dlse = or_undefined(dlogsumexp);
    const AttentionOptions given = options_of(options...);
    if (!is_recorded({&dout, &dlse, &query, &key, &value}, given)) {
      return hand_on<call::FusedAttentionBackward>(
          dout, dlogsumexp, query, key, value, out, logsumexp, needs,
          options..., dropout_state, is_part);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_part,
        "fused_attention_backward: the backward of a part of a call cannot be "
        "differentiated");
    // For its checks, and for which gradients there are.
    const auto shapes = fused_attention_backward_results(
        dout, dlogsumexp, query, key, value, out, logsumexp, needs, given,
        dropout_state, is_part);
    const Tensor factors =
        call::dropout_factors(query, key, given, dropout_state);
    return backward_by_definition(
        {dout, dlse}, inputs_of(query, key, value, given), defined(shapes),
        given, [&](const Inputs& x, const AttentionOptions& o, bool with_lse) {
          return definition::attention(x[0], x[1], x[2], o, with_lse, factors);
        });
  }

  static Gradients fused_varlen_attention_backward(
      const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
      const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& out, const Tensor& logsumexp, const Tensor& cu_seqlens_q,
      const Tensor& cu_seqlens_k, Needs needs, Options... options,
      const std::optional<Tensor>& dropout_state) {
    const Tensor dlse = or_undefined(dlogsumexp);
    const AttentionOptions given = options_of(options...);
    if (!is_recorded({&dout, &dlse, &query, &key, &value}, given)) {
      return hand_on<call::FusedVarlenAttentionBackward>(
          dout, dlogsumexp, query, key, value, out, logsumexp, cu_seqlens_q,
          cu_seqlens_k, needs, options..., dropout_state);
    }
    const auto shapes = fused_varlen_attention_backward_results(
        dout, dlogsumexp, query, key, value, out, logsumexp, cu_seqlens_q,
        cu_seqlens_k, needs, given, dropout_state);
    const VarlenRows sequences{cu_seqlens_q, cu_seqlens_k, {}};
    const Tensor factors =
        padded_dropout_factors(query, key, sequences, given, dropout_state);
    return backward_by_definition(
        {dout, dlse}, inputs_of(query, key, value, given), defined(shapes),
        given, [&](const Inputs& x, const AttentionOptions& o, bool with_lse) {
          return definition::varlen_attention(x[0], x[1], x[2], sequences, o,
                                              with_lse, factors);
        });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(multihead, Autograd, m) {
  using All = Operators<fields::Parameters<const AttentionOptions&>::type>;
  m.impl("fused_attention", &All::fused_attention);
  m.impl("fused_attention_backward", &All::fused_attention_backward);
  m.impl("fused_varlen_attention", &All::fused_varlen_attention);
  m.impl("fused_varlen_attention_backward",
         &All::fused_varlen_attention_backward);
  m.impl("fused_ring_attention", &All::fused_ring_attention);
  m.impl("fused_ring_attention_backward",
         torch::autograd::autogradNotImplementedFallback());
  using distributed::HeadsToTokens;
  using distributed::TokensToHeads;
  m.impl("tokens_to_heads", &exchange<TokensToHeads, HeadsToTokens>);
  m.impl("heads_to_tokens", &exchange<HeadsToTokens, TokensToHeads>);
  m.impl("attention_weights", &All::attention_weights);
  m.impl("fused_attention_summary",
         torch::autograd::autogradNotImplementedFallback());
}

}  // namespace multihead::ops
