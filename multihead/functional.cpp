// SPDX-License-Identifier: MIT
#include "multihead/functional.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>

#include "multihead/checks.h"
#include "multihead/exact.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

thread_local Backend thread_backend = Backend::kAuto;

// Whether torch.nn.functional.scaled_dot_product_attention has the call.
bool pytorch_has(const AttentionOptions& o, bool with_lse) {
  return !with_lse && !o.window && !o.softcap && !o.key_lengths.defined() &&
         !o.alibi_slopes.defined() && !o.sinks.defined() &&
         !(o.is_causal && o.causal_alignment == CausalAlignment::kBottomRight);
}

// Shapes that only broadcasting makes fit: query's batch or heads are 1, or the
// ranks differ or are neither 3 nor 4. A single key/value batch or head for
// many is no such case, the definition repeats it.
bool needs_broadcasting(const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value) {
  const int64_t rank = query.dim();
  if (rank < 3 || rank > 4) return true;
  bool stretches_query = false;
  for (const auto* x : {&key, &value}) {
    if (x->dim() != rank) return true;
    for (int64_t dim = 0; dim < rank - 2; ++dim) {
      stretches_query |= query.sym_size(dim) == 1 && x->sym_size(dim) != 1;
    }
  }
  return stretches_query;
}

double default_scale(const c10::SymInt& head_dim) {
  const auto width =
      static_cast<double>(head_dim.guard_int(__FILE__, __LINE__));
  return width > 0 ? 1.0 / std::sqrt(width) : 1.0;
}

at::Tensor as_pytorch(const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value, const AttentionOptions& o) {
  return at::scaled_dot_product_attention(
      query, key, value,
      optional(o.attn_mask),
      o.dropout_p, o.is_causal, o.scale, o.enable_gqa);
}

// What autocast does to PyTorch's function it does to ours.
at::Tensor autocast(const at::Tensor& x) {
  const auto device = x.device().type();
  if (!at::autocast::is_autocast_available(device) ||
      !at::autocast::is_autocast_enabled(device)) {
    return x;
  }
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x,
                                   device);
}

// (B, heads, L, X) → (B·heads', L, X) with heads' = `heads` or, for one head
// that stands for all, repeated.
at::Tensor flatten_heads(const at::Tensor& x, const c10::SymInt& batch_size,
                         const c10::SymInt& heads) {
  const at::Tensor full = x.sym_size(0) == batch_size
                              ? x
                              : x.expand_symint({batch_size, -1, -1, -1});
  if (x.sym_size(1) == heads) return full.flatten(0, 1);
  return full.unsqueeze(2)
      .expand_symint({-1, -1, heads / x.sym_size(1), -1, -1})
      .flatten(0, 2);
}

// Contiguous for a contiguous query; (B, L, H, D) memory for such a query, so
// that merging the heads afterwards is a view.
at::Tensor in_layout_of(const at::Tensor& query, const at::Tensor& out) {
  if (query.is_contiguous() || !query.transpose(1, 2).is_contiguous()) {
    return out;
  }
  return out.transpose(1, 2).contiguous().transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> define_attention(const at::Tensor& q,
                                                    const at::Tensor& k,
                                                    const at::Tensor& v,
                                                    const AttentionOptions& o,
                                                    bool with_lse) {
  const at::Tensor query = autocast(q), key = autocast(k), value = autocast(v);
  check_attention(query, key, value, o);
  if (query.dim() == 3) {
    auto [out, lse] = define_attention(query.unsqueeze(0), key.unsqueeze(0),
                                       value.unsqueeze(0), o, with_lse);
    return {out.squeeze(0), with_lse ? lse.squeeze(0) : lse};
  }
  const auto batch_size = query.sym_size(0), num_heads = query.sym_size(1);
  // Keys and values may be grouped differently; then each query head gets its
  // own of both.
  const auto kv_heads =
      key.sym_size(1) == value.sym_size(1) ? key.sym_size(1) : num_heads;
  const exact::Heads heads{flatten_heads(query, batch_size, num_heads),
                           flatten_heads(key, batch_size, kv_heads),
                           flatten_heads(value, batch_size, kv_heads),
                           batch_size,
                           num_heads,
                           kv_heads};
  exact::ScoreRules rules{.softcap = o.softcap,
                          .mask = {.is_causal = o.is_causal,
                                   .alignment = o.causal_alignment,
                                   .window = o.window,
                                   .key_lengths = o.key_lengths},
                          .alibi_slopes = o.alibi_slopes,
                          .sinks = o.sinks,
                          .dropout_p = o.dropout_p};
  rules.scale = o.scale.value_or(default_scale(query.sym_size(-1)));
  if (o.attn_mask.defined()) {
    (o.attn_mask.scalar_type() == at::kBool ? rules.mask.keep
                                            : rules.mask.bias) = o.attn_mask;
  }
  const auto result = exact::attention(heads, rules, with_lse);
  return {in_layout_of(query,
                       result.out.unflatten_symint(0, {batch_size, num_heads})),
          result.logsumexp};
}

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const AttentionOptions& options,
                                          bool with_lse) {
  check_defined("scaled_dot_product_attention", query, key, value);
  check_domains(options);
  const Backend backend = current_backend();
  if (backend == Backend::kFused) {
    const auto reason = why_not_fused(query, key, value, options);
    TORCH_CHECK(!reason,
                "scaled_dot_product_attention: backend \"fused\" "
                "cannot run this call: ",
                reason.value_or(""));
  }
  // Without a mask and is_causal at once, which PyTorch has in some paths only,
  // its function serves devices for which there are no kernels here.
  const bool pytorch_is_best =
      backend == Backend::kExact || needs_broadcasting(query, key, value) ||
      (!query.is_cpu() && !(options.is_causal && options.attn_mask.defined()));
  if (pytorch_is_best && pytorch_has(options, with_lse)) {
    check_lengths(key, value);
    return {as_pytorch(query, key, value, options), {}};
  }
  return define_attention(query, key, value, options, with_lse);
}

}  // namespace

Backend backend_from_name(std::string_view name) {
  if (name == "auto") return Backend::kAuto;
  if (name == "exact") return Backend::kExact;
  if (name == "fused") return Backend::kFused;
  TORCH_CHECK_VALUE(false,
                    "backend must be \"auto\", \"exact\" or \"fused\", got \"",
                    name, "\"");
}

CausalAlignment causal_alignment_from_name(std::string_view name) {
  if (name == "top_left") return CausalAlignment::kTopLeft;
  if (name == "bottom_right") return CausalAlignment::kBottomRight;
  TORCH_CHECK_VALUE(false,
                    "scaled_dot_product_attention: causal_alignment must be "
                    "\"top_left\" or \"bottom_right\", got \"",
                    name, "\"");
}

Backend current_backend() { return thread_backend; }

BackendGuard::BackendGuard(Backend backend) : previous_(thread_backend) {
  thread_backend = backend;
}

BackendGuard::~BackendGuard() { thread_backend = previous_; }

std::optional<std::string> why_not_fused(const at::Tensor&, const at::Tensor&,
                                         const at::Tensor&,
                                         const AttentionOptions&) {
  return "this build has no fused kernels";
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query,
                                        const at::Tensor& key,
                                        const at::Tensor& value,
                                        const AttentionOptions& options) {
  return std::get<0>(attend(query, key, value, options, /*with_lse=*/false));
}

std::tuple<at::Tensor, at::Tensor> scaled_dot_product_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options) {
  return attend(query, key, value, options, /*with_lse=*/true);
}

}  // namespace multihead
