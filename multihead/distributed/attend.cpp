// SPDX-License-Identifier: MIT
//
// Attention over the tokens of several processes as C++ calls it.
#include "multihead/distributed/attend.h"

#include <utility>

#include "multihead/attention/call.h"
#include "multihead/attention/checks.h"
#include "multihead/attention/fields.h"
#include "multihead/attention/provider.h"
#include "multihead/attention/route.h"
#include "multihead/install/overrides.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

using at::Tensor;
using distributed::Location;
using distributed::Method;
using distributed::OwnCall;
using Results = std::tuple<Tensor, Tensor>;

const char* name_of(Method method) {
  return method == Method::kRing ? "ring_attention" : "ulysses_attention";
}

bool is_traced(const Tensor& x) {
  return x.is_meta() || x.key_set().has(c10::DispatchKey::Python);
}

// Their derivatives would be of this process alone, or none at all.
void check_not_transformed(Method method, const OwnCall& call) {
  const auto check = [&](const Tensor& x) {
    TORCH_CHECK(!x.defined() || !is_transformed(x), name_of(method),
                ": tensors must be ordinary ones, one is in a transform of "
                "torch.func (vmap, grad, jvp)");
  };
  for (const Tensor* x : {&call.query, &call.key, &call.value}) check(*x);
  fields::for_each_tensor(call.options,
                          [&](const auto&, const Tensor& x) { check(x); });
}

Results run(Method method, const OwnCall& call, const Location& location) {
  check_not_transformed(method, call);
  if (method == Method::kRing) return distributed::ring(call, location);
  TORCH_CHECK(!is_traced(call.query), name_of(method),
              ": it cannot be part of a graph, because how many tokens other "
              "processes have is known only while it runs; ring_attention can");
  return distributed::ulysses(call, location);
}

Results attend(Method method, const Tensor& query, const Tensor& key,
               const Tensor& value, const Location& location,
               const AttentionOptions& options,
               const std::optional<Tensor>& dropout_state) {
  check_defined(name_of(method), query, key, value);
  const auto batched = [](const Tensor& x) {
    return call::autocast(x.dim() == 3 ? x.unsqueeze(0) : x);
  };
  const Tensor q = batched(query), k = batched(key), v = batched(value);
  const std::optional<Tensor> none;
  auto [out, logsumexp] =
      run(method, {q, k, v, options, {none, none}, dropout_state}, location);
  if (query.dim() == 3) return {out.squeeze(0), logsumexp.squeeze(0)};
  return {out, logsumexp};
}

// Rows of documents: (T, heads, width).
Results attend_varlen(Method method, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& cu_seqlens_q,
                      const Tensor& cu_seqlens_k, const Location& location,
                      const AttentionOptions& options,
                      const std::optional<Tensor>& dropout_state) {
  const char* fn = name_of(method);
  check_defined(fn, query, key, value);
  const auto heads_first = [&](const Tensor& x) {
    TORCH_CHECK(x.dim() == 3, fn,
                ": query, key and value must be (T, heads, width) with "
                "cu_seqlens, got ",
                x.sizes());
    return call::autocast(x.transpose(0, 1).unsqueeze(0));
  };
  const Tensor q = heads_first(query), k = heads_first(key),
               v = heads_first(value);
  const std::optional<Tensor> cu_q = optional(cu_seqlens_q),
                              cu_k = optional(cu_seqlens_k);
  const auto [out, logsumexp] =
      run(method, {q, k, v, options, {cu_q, cu_k}, dropout_state}, location);
  return {out.squeeze(0).transpose(0, 1), logsumexp.squeeze(0)};
}

AttentionOptions rules_of(Method method, const VarlenOptions& options) {
  TORCH_CHECK(!options.block_table.defined(), name_of(method),
              ": block_table must be None, got one");
  return {.dropout_p = options.dropout_p,
          .is_causal = options.is_causal,
          .scale = options.scale,
          .enable_gqa = true,
          .causal_alignment = options.causal_alignment,
          .window = options.window,
          .key_lengths = options.key_lengths,
          .softcap = options.softcap,
          .alibi_slopes = options.alibi_slopes,
          .sinks = options.sinks};
}

class ContextParallel : public Provider {
 public:
  ContextParallel(std::string group, TokenOrder order, ContextMethod method)
      : location_{std::move(group), order},
        processes_(
            distributed::Group("context_parallel", location_.group).size()),
        method_(method) {}

  std::string name() const override { return "context_parallel"; }

  Tensor mask_of_all_keys(const Tensor& mask) const override {
    TORCH_CHECK(!call::is_recorded(mask), name(),
                ": a mask of a layer must not require a gradient, got one that "
                "does");
    const distributed::Group group("context_parallel", location_.group);
    distributed::Lengths lengths;
    for (const auto& words : group.all_gather({mask.size(-1)})) {
      lengths.push_back(words[0]);
    }
    return distributed::mask_of_all_keys(group, location_.order, lengths, mask);
  }

  Results attention(const Tensor& query, const Tensor& key, const Tensor& value,
                    const AttentionOptions& options,
                    const std::optional<Tensor>& dropout_state) const override {
    const Method method = method_for(query, key, -3, options);
    return attend(method, query, key, value, location_, options, dropout_state);
  }

  Results varlen_attention(
      const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
      const AttentionOptions& options,
      const std::optional<Tensor>& dropout_state) const override {
    const Method method = method_for(query, key, -2, options);
    return attend_varlen(method, query, key, value, cu_seqlens_q, cu_seqlens_k,
                         location_, options, dropout_state);
  }

 private:
  // See ContextMethod. By what is the same on all processes.
  Method method_for(const Tensor& query, const Tensor& key, int64_t heads_dim,
                    const AttentionOptions& options) const {
    if (method_ == ContextMethod::kRing) return Method::kRing;
    if (method_ == ContextMethod::kUlysses) return Method::kUlysses;
    if (is_traced(query)) return Method::kRing;
    if (query.dim() < -heads_dim || key.dim() < -heads_dim) {
      return Method::kRing;  // refuses them
    }
    const int64_t heads = query.size(heads_dim), groups = key.size(heads_dim);
    const bool divide = heads % processes_ == 0 && groups % processes_ == 0;
    const bool is_less = heads + groups <= processes_ * groups;
    return divide && is_less && !options.attn_mask.defined() ? Method::kUlysses
                                                             : Method::kRing;
  }

  const Location location_;
  const int processes_;
  const ContextMethod method_;
};

}  // namespace

ContextMethod context_method_from_name(std::string_view name) {
  if (name == "auto") return ContextMethod::kAuto;
  if (name == "ring") return ContextMethod::kRing;
  if (name == "ulysses") return ContextMethod::kUlysses;
  TORCH_CHECK_VALUE(
      false,
      "context_parallel: method must be \"auto\", \"ring\" or \"ulysses\", "
      "got \"",
      name, "\"");
}

bool is_context_parallel() { return current_provider() != nullptr; }

ContextParallelGuard::ContextParallelGuard(const std::string& group,
                                           TokenOrder order,
                                           ContextMethod method)
    : provider_(std::make_unique<ContextParallel>(group, order, method)),
      previous_(set_provider(provider_.get())) {
  overrides::enter_redirection();
}

ContextParallelGuard::~ContextParallelGuard() {
  overrides::leave_redirection();
  set_provider(previous_);
}

Results ring_attention_with_lse(const Tensor& query, const Tensor& key,
                                const Tensor& value, const std::string& group,
                                const AttentionOptions& options,
                                TokenOrder order) {
  return attend(Method::kRing, query, key, value, {group, order}, options,
                call::draw_dropout_state(options.dropout_p));
}

Tensor ring_attention(const Tensor& query, const Tensor& key,
                      const Tensor& value, const std::string& group,
                      const AttentionOptions& options, TokenOrder order) {
  return std::get<0>(
      ring_attention_with_lse(query, key, value, group, options, order));
}

Results ring_varlen_attention_with_lse(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const std::string& group, const VarlenOptions& options, TokenOrder order) {
  return attend_varlen(Method::kRing, query, key, value, cu_seqlens_q,
                       cu_seqlens_k, {group, order},
                       rules_of(Method::kRing, options),
                       call::draw_dropout_state(options.dropout_p));
}

Results ulysses_attention_with_lse(const Tensor& query, const Tensor& key,
                                   const Tensor& value,
                                   const std::string& group,
                                   const AttentionOptions& options,
                                   TokenOrder order) {
  return attend(Method::kUlysses, query, key, value, {group, order}, options,
                call::draw_dropout_state(options.dropout_p));
}

Tensor ulysses_attention(const Tensor& query, const Tensor& key,
                         const Tensor& value, const std::string& group,
                         const AttentionOptions& options, TokenOrder order) {
  return std::get<0>(
      ulysses_attention_with_lse(query, key, value, group, options, order));
}

Results ulysses_varlen_attention_with_lse(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const std::string& group, const VarlenOptions& options, TokenOrder order) {
  return attend_varlen(Method::kUlysses, query, key, value, cu_seqlens_q,
                       cu_seqlens_k, {group, order},
                       rules_of(Method::kUlysses, options),
                       call::draw_dropout_state(options.dropout_p));
}

}  // namespace multihead
