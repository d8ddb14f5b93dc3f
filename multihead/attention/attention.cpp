// SPDX-License-Identifier: MIT
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "multihead/attention/checks.h"
#include "multihead/attention/definition.h"
#include "multihead/attention/fused.h"
#include "multihead/functional.h"
#include "multihead/optional_tensor.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

thread_local Backend thread_backend = Backend::kAuto;

// Lq = Lk: without key_lengths both alignments are one triangle.
bool has_equal_lengths(const at::Tensor& query, const at::Tensor& key) {
  return !query.is_nested() && !key.is_nested() && query.dim() >= 2 &&
         key.dim() >= 2 && query.sym_size(-2) == key.sym_size(-2);
}

// Whether torch.nn.functional.scaled_dot_product_attention has the call.
bool pytorch_has(const at::Tensor& query, const at::Tensor& key,
                 const AttentionOptions& o, bool with_lse) {
  return !with_lse && !o.window && o.softcap.value_or(0.0) == 0.0 &&
         !o.key_lengths.defined() && !o.key_mask.defined() &&
         !o.alibi_slopes.defined() && !o.sinks.defined() &&
         !(o.is_causal && o.query_offset.defined()) &&
         !(o.is_causal && o.causal_alignment == CausalAlignment::kBottomRight &&
           !has_equal_lengths(query, key));
}

// Shapes that PyTorch's function takes and the definition does not: ranks other
// than 3 and 4, and what only broadcasting makes fit: ranks that differ, or a
// batch or heads of query that are 1. (A single key/value batch or head for
// many is no such case, the definition repeats it.)
std::optional<std::string> unusual_shapes(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value) {
  const int64_t rank = query.dim();
  bool broadcasts = false;
  for (const auto* x : {&key, &value}) {
    broadcasts |= x->dim() != rank;
    for (int64_t dim = 0; !broadcasts && dim < rank - 2; ++dim) {
      broadcasts = query.sym_size(dim) == 1 && x->sym_size(dim) != 1;
    }
  }
  if (broadcasts) {
    return "query, key and value need broadcasting" +
           shapes_text(query, key, value);
  }
  if (rank == 3 || rank == 4) return std::nullopt;
  return c10::str("the kernels take 3-D and 4-D tensors, query is ", rank, "-D",
                  shapes_text(query, key, value));
}

at::Tensor as_pytorch(const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value, const AttentionOptions& o) {
  return at::scaled_dot_product_attention(query, key, value,
                                          optional(o.attn_mask), o.dropout_p,
                                          o.is_causal, o.scale, o.enable_gqa);
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

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const AttentionOptions& options,
                                          bool with_lse) {
  constexpr auto* fn = "scaled_dot_product_attention";
  check_defined(fn, query, key, value);
  check_domains(options);
  const Backend backend = current_backend();
  const auto why_not = [&] {
    return why_not_fused(query, key, value, options);
  };
  if (fused::chosen(fn, why_not)) {
    return fused::attention(query, key, value, options,
                            fused::draw_dropout_state(options.dropout_p));
  }
  // Without a mask and is_causal at once, which PyTorch has in some paths only,
  // its function serves devices for which there are no kernels here.
  const bool is_nested =
      query.is_nested() || key.is_nested() || value.is_nested();
  const bool pytorch_is_best =
      backend == Backend::kExact || is_nested ||
      unusual_shapes(query, key, value) ||
      (!query.is_cpu() && !(options.is_causal && options.attn_mask.defined()));
  if (pytorch_is_best && pytorch_has(query, key, options, with_lse)) {
    if (is_nested) return {as_pytorch(query, key, value, options), {}};
    check_for_pytorch(key, value, options.enable_gqa);
    const at::Tensor out = as_pytorch(query, key, value, options);
    fused::warn_of_all_weights(fn, query, why_not);  // not where it has raised
    return {out, {}};
  }
  const at::Tensor q = autocast(query), k = autocast(key), v = autocast(value);
  check_attention(q, k, v, options);
  fused::warn_of_all_weights(fn, q, why_not);
  return define_attention(q, k, v, options, with_lse);
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

std::optional<std::string> why_not_fused(const at::Tensor& query,
                                         const at::Tensor& key,
                                         const at::Tensor& value,
                                         const AttentionOptions& options) {
  if (auto reason = fused::why_not({&query, &key, &value, &options.attn_mask,
                                    &options.query_offset, &options.key_lengths,
                                    &options.key_mask, &options.alibi_slopes,
                                    &options.sinks})) {
    return reason;
  }
  if (auto reason = fused::why_not_dtype(query.scalar_type())) return reason;
  if (auto reason = unusual_shapes(query, key, value)) return reason;
  if (key.sym_size(-3) != value.sym_size(-3)) {
    return "key and value have different numbers of heads" +
           shapes_text(query, key, value);
  }
  return std::nullopt;
}

std::string kernel_isa() { return kernels::name_of(fused::isa()); }

std::vector<std::string> kernel_isas() {
  std::vector<std::string> names;
  for (const kernels::Isa isa : kernels::kAllIsas) {
    if (kernels::cpu_has(isa)) names.emplace_back(kernels::name_of(isa));
  }
  return names;
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

AttentionSummary attention_summary(const at::Tensor& query,
                                   const at::Tensor& key, int64_t k,
                                   const AttentionOptions& given) {
  check_defined("attention_summary", query, key, key);
  check_count(k);
  TORCH_CHECK_VALUE(given.dropout_p == 0.0,
                    "attention_summary: dropout_p must be 0, got ",
                    given.dropout_p);
  const at::NoGradGuard no_grad;
  const at::Tensor q = autocast(query), rows = autocast(key);
  check_fused_attention(q, rows, rows, given);
  constexpr auto* fn = "attention_summary";
  const auto why_not = [&] { return why_not_fused(q, rows, rows, given); };
  if (!fused::chosen(fn, why_not)) {
    fused::warn_of_all_weights(fn, q, why_not);
    return define_summary(q, rows, given, k);
  }
  // Values without width: logsumexp alone.
  const auto logsumexp =
      std::get<1>(fused::attention(q, rows, rows.narrow(-1, 0, 0), given, {}));
  const auto [weights, keys, entropy] =
      fused::attention_summary(q, rows, logsumexp, given, k);
  return {weights, keys, entropy};
}

}  // namespace multihead
