// SPDX-License-Identifier: MIT
#include "multihead/attention/fused.h"

#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <set>

#include "multihead/attention/checks.h"
#include "multihead/ops/rules.h"
#include "multihead/optional_tensor.h"

namespace multihead::fused {
namespace {

using at::Tensor;

// The operator that takes `Leading` and then the rules.
template <class Result, class... Leading>
struct Operator {
  template <class... R>
  static auto find(const char* name, ops::Types<R...>) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .typed<Result(Leading..., R...)>();
  }
};

ops::Rules rules_of(const AttentionOptions& o, const Tensor& dropout_state) {
  const bool bottom_right = o.causal_alignment == CausalAlignment::kBottomRight;
  return {.attn_mask = optional(o.attn_mask),
          .dropout_p = o.dropout_p,
          .is_causal = o.is_causal,
          .scale = o.scale,
          .enable_gqa = o.enable_gqa,
          .causal_alignment = bottom_right ? "bottom_right" : "top_left",
          .query_offset = optional(o.query_offset),
          .window = o.window ? at::OptionalIntArrayRef(*o.window)
                             : at::OptionalIntArrayRef(),
          .key_lengths = optional(o.key_lengths),
          .key_mask = optional(o.key_mask),
          .softcap = o.softcap,
          .alibi_slopes = optional(o.alibi_slopes),
          .sinks = optional(o.sinks),
          .dropout_state = optional(dropout_state)};
}

// What of a call may need a gradient: these tensors, and the rules'.
bool is_recorded_with(const ops::Rules& r,
                      std::initializer_list<const Tensor*> tensors) {
  const auto recorded = [](const std::optional<Tensor>& x) {
    return x && is_recorded({&*x});
  };
  return is_recorded(tensors) || recorded(r.attn_mask) ||
         recorded(r.alibi_slopes) || recorded(r.sinks);
}

template <class Op, class... Leading>
auto call(const Op& op, bool recorded, const ops::Rules& r,
          const Leading&... leading) {
  // Straight to the kernels where autograd has nothing to record.
  std::optional<at::AutoDispatchBelowADInplaceOrView> past_autograd;
  if (!recorded) past_autograd.emplace();
  return op.call(leading..., r.attn_mask, r.dropout_p, r.is_causal, r.scale,
                 r.enable_gqa, r.causal_alignment, r.query_offset, r.window,
                 r.key_lengths, r.key_mask, r.softcap, r.alibi_slopes, r.sinks,
                 r.dropout_state);
}

}  // namespace

kernels::Isa isa() {
  const char* error = nullptr;
  const kernels::Isa isa = kernels::chosen_isa(&error);
  TORCH_CHECK(!error, error, ", got \"", std::getenv("MULTIHEAD_ISA"), "\"");
  return isa;
}

std::optional<std::string> why_not(TensorRefs tensors) {
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper});
  for (const Tensor* x : tensors) {
    if (!x->defined()) continue;
    if (x->key_set().has_any(kTransforms)) {
      return "a transform of torch.func (vmap, grad) is at work";
    }
    if (!x->device().is_cpu()) {
      return c10::str("the kernels run on the CPU, a tensor is on ",
                      x->device());
    }
    if (x->layout() != at::kStrided || x->is_nested()) {
      return x->is_nested()
                 ? "the kernels take dense tensors, one is nested"
                 : c10::str("the kernels take dense tensors, one is ",
                            x->layout());
    }
    if (x->_fw_grad(/*level=*/0).defined()) {
      return "forward-mode differentiation is at work";
    }
  }
  return std::nullopt;
}

bool is_recorded(TensorRefs tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* x) {
    return x->defined() && x->requires_grad();
  });
}

std::optional<std::string> why_not_dtype(at::ScalarType dtype) {
  if (is_fused_dtype(dtype)) return std::nullopt;
  return c10::str(
      "there are kernels for float32, float64, bfloat16 and "
      "float16, query is ",
      dtype);
}

void warn_once_of_all_weights(const char* function, const std::string& reason) {
  // Shapes, which may be others in every call, stand in brackets.
  const bool is_news = [&] {
    static std::mutex mutex;
    static std::set<std::string> said;
    // Not held while Python warns: its filters may call this library.
    const std::lock_guard lock(mutex);
    return said.insert(reason.substr(0, reason.find(" ("))).second;
  }();
  if (!is_news && !c10::WarningUtils::get_warnAlways()) return;
  const std::string message = c10::str(
      function, ": this call forms all attention weights, query length times ",
      "key length, instead of running fused: ", reason,
      ". This is said once; multihead.why_not_fused tells it of any call.");
  // What operators print with TORCH_WARN does not become a warning in Python,
  // so the package implements this one. No mode or transform has a say in it.
  static const auto warn =
      c10::Dispatcher::singleton().findSchemaOrThrow("multihead::warn", "");
  if (!warn.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    TORCH_WARN(message);
    return;
  }
  torch::jit::Stack stack{message};
  warn.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

at::Tensor draw_dropout_state(double dropout_p) {
  if (dropout_p == 0.0) return {};
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, at::kLong);
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query,
                                             const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionOptions& options,
                                             const at::Tensor& dropout_state) {
  static const auto op =
      Operator<std::tuple<Tensor, Tensor>, const Tensor&, const Tensor&,
               const Tensor&>::find("multihead::fused_attention",
                                    ops::RuleTypes{});
  const ops::Rules rules = rules_of(options, dropout_state);
  return call(op, is_recorded_with(rules, {&query, &key, &value}), rules, query,
              key, value);
}

std::vector<at::Tensor> attention_backward(const at::Tensor& dout,
                                           const at::Tensor& dlogsumexp,
                                           const AttentionCall& c,
                                           const std::array<bool, 6>& needs,
                                           const AttentionOptions& options,
                                           const at::Tensor& dropout_state) {
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto op =
      Operator<Results, const Tensor&, const std::optional<Tensor>&,
               const Tensor&, const Tensor&, const Tensor&, const Tensor&,
               const Tensor&,
               std::array<bool, 6>>::find("multihead::fused_attention_backward",
                                          ops::RuleTypes{});
  const ops::Rules rules = rules_of(options, dropout_state);
  const bool recorded =
      is_recorded_with(rules, {&dout, &dlogsumexp, &c.query, &c.key, &c.value});
  const auto [q, k, v, mask, slopes, sinks] =
      call(op, recorded, rules, dout, optional(dlogsumexp), c.query, c.key,
           c.value, c.out, c.logsumexp, needs);
  return {q, k, v, mask, slopes, sinks};
}

at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& logsumexp,
                             const AttentionOptions& options,
                             const at::Tensor& dropout_state, bool average) {
  static const auto op =
      Operator<Tensor, const Tensor&, const Tensor&, const Tensor&, bool>::find(
          "multihead::attention_weights", ops::RuleTypes{});
  const ops::Rules rules = rules_of(options, dropout_state);
  return call(op, is_recorded_with(rules, {&query, &key, &logsumexp}), rules,
              query, key, logsumexp, average);
}

at::Tensor dropout_factors(const at::Tensor& query, const at::Tensor& key,
                           const AttentionOptions& options,
                           const at::Tensor& dropout_state) {
  if (options.dropout_p == 0.0) return {};
  // Of scores 0 whose logsumexp is 0 every weight is 1 before dropout.
  const auto dtype = at::toOpMathType(query.scalar_type());
  const auto without_width = [&](const Tensor& x) {
    return x.detach().narrow(-1, 0, 0).to(dtype);
  };
  const Tensor q = without_width(query);
  auto rows = q.sym_sizes().vec();
  rows.pop_back();
  return attention_weights(
      q, without_width(key), at::zeros_symint(rows, q.options()),
      {.dropout_p = options.dropout_p, .enable_gqa = options.enable_gqa},
      dropout_state, /*average=*/false);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_summary(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& logsumexp,
    const AttentionOptions& options, int64_t count) {
  static const auto op =
      Operator<std::tuple<Tensor, Tensor, Tensor>, const Tensor&, const Tensor&,
               const Tensor&, int64_t>::find("multihead::attention_summary",
                                             ops::RuleTypes{});
  // Nothing in a summary is differentiable.
  return call(op, /*recorded=*/false, rules_of(options, Tensor()), query, key,
              logsumexp, count);
}

}  // namespace multihead::fused
