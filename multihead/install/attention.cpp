// SPDX-License-Identifier: MIT
//
// aten::scaled_dot_product_attention. PyTorch has it as a composite of other
// operators alone, for every device; kernels of its own for AutogradCPU and CPU
// come before that. (The latter is asked where autograd is left out, as for
// tensors of inference mode.) What is not taken is handed to the composite as a
// function, not through the dispatcher, which would lead back here.
#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>

#include "multihead/attention/call.h"
#include "multihead/attention/checks.h"
#include "multihead/attention/provider.h"
#include "multihead/attention/route.h"
#include "multihead/attention/storage.h"
#include "multihead/install/overrides.h"
#include "multihead/optional_tensor.h"

namespace multihead::overrides {
namespace {

using at::Tensor;

// A graph that torch.export writes must run where this library is not, so it
// keeps PyTorch's operators. Subclasses of tensors may know no others. Python's
// package can tell.
std::string refusal_in_python(const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& mask) {
  const auto is_pythons = [](const Tensor& x) {
    return x.key_set().has(c10::DispatchKey::Python);
  };
  if (!is_pythons(query) && !is_pythons(key) && !is_pythons(value) &&
      !is_pythons(mask)) {
    return {};
  }
  c10::List<Tensor> tensors;
  for (const Tensor* x : {&query, &key, &value, &mask}) {
    if (is_pythons(*x)) tensors.push_back(*x);
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "multihead::refusal_in_python", "");
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return {};
  torch::jit::Stack stack{std::move(tensors)};
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack.back().toStringRef();
}

// Why a mask is PyTorch's business, though this library has such calls: who
// installed it must see PyTorch's errors, and those depend on its own path
// where is_causal comes with a mask. Empty: it is not.
const char* refusal_of_mask(const Tensor& query, const Tensor& key,
                            const Tensor& value, const Tensor& mask,
                            bool is_causal) {
  if (!mask.defined()) return "";
  if (is_causal) return "attn_mask and is_causal at once";
  const auto dtype = mask.scalar_type();
  const bool is_taken =
      mask.dim() >= 2 && (dtype == at::kBool || dtype == at::kFloat ||
                          dtype == query.scalar_type());
  if (!is_taken) return "PyTorch refuses such an attn_mask";
  const auto is_empty = [](const Tensor& x) { return x.sym_numel() == 0; };
  return call::is_recorded(mask) &&
                 (is_empty(query) || is_empty(key) || is_empty(value))
             ? "PyTorch gives attn_mask no gradient where a tensor is empty"
             : "";
}

std::string refusal(const Tensor& query, const Tensor& key, const Tensor& value,
                    const AttentionOptions& options) {
  if (!at::globalContext().userEnabledFlashSDP()) {
    return "sdpa_kernel leaves out FLASH_ATTENTION";
  }
  if (is_stored(query, key) || is_stored(query, value)) {
    return "PyTorch takes tensors of one dtype";
  }
  std::string reason =
      refusal_of_mask(query, key, value, options.attn_mask, options.is_causal);
  if (reason.empty()) {
    reason = refusal_in_python(query, key, value, options.attn_mask);
  }
  return reason.empty() ? route(query, key, value, options).reason : reason;
}

Tensor run_attention(const Tensor& query, const Tensor& key,
                     const Tensor& value,
                     const std::optional<Tensor>& attn_mask, double dropout_p,
                     bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  const AttentionOptions options{.attn_mask = or_undefined(attn_mask),
                                 .dropout_p = dropout_p,
                                 .is_causal = is_causal,
                                 .scale = scale,
                                 .enable_gqa = enable_gqa};
  if (current_provider() != nullptr) {
    return multihead::scaled_dot_product_attention(query, key, value, options);
  }
  const auto pytorchs = [&] {
    return at::native::scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  };
  if (!is_wanted) return pytorchs();
  return run(
      [&] { return refusal(query, key, value, options); },
      [&] {
        return std::get<0>(call::run<call::FusedAttention>(
            query, key, value, options, call::draw_dropout_state(dropout_p)));
      },
      [&] { check_fused_attention(query, key, value, options); }, pytorchs);
}

}  // namespace

void scaled_dot_product_attention(Registrations& all) {
  for (const auto key :
       {c10::DispatchKey::AutogradCPU, c10::DispatchKey::CPU}) {
    library_for(all, key).impl("scaled_dot_product_attention",
                               TORCH_FN(run_attention));
  }
}

}  // namespace multihead::overrides
