// SPDX-License-Identifier: MIT
#include "multihead/attention/route.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/StringUtil.h>

#include <mutex>
#include <set>

#include "multihead/attention/call.h"
#include "multihead/attention/checks.h"
#include "multihead/attention/count.h"
#include "multihead/attention/provider.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

// Lq = Lk: without key_lengths both alignments are one triangle.
bool has_equal_lengths(const at::Tensor& query, const at::Tensor& key) {
  return !query.is_nested() && !key.is_nested() && query.dim() >= 2 &&
         key.dim() >= 2 && query.sym_size(-2) == key.sym_size(-2);
}

// Whether torch.nn.functional.scaled_dot_product_attention has the call.
bool pytorch_has(const at::Tensor& query, const at::Tensor& key,
                 const AttentionOptions& options, bool with_lse) {
  // All of them: an option that PyTorch would not get must not compile.
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment,
               query_offset, window, key_lengths, key_mask, softcap,
               alibi_slopes, sinks] = options;
  const bool other_positions =
      query_offset.defined() || (alignment == CausalAlignment::kBottomRight &&
                                 !has_equal_lengths(query, key));
  return !with_lse && !(is_causal && other_positions) && !window &&
         !key_lengths.defined() && !key_mask.defined() &&
         softcap.value_or(0.0) == 0.0 && !alibi_slopes.defined() &&
         !sinks.defined();
}

// What the kernels take as little as the definition: ranks other than 3 and 4,
// and what only broadcasting makes fit: ranks that differ, or a batch or heads
// of query that are 1. (A single key/value batch or head for many is no such
// case.)
enum class Shapes { kUsual, kBroadcasting, kOtherRank };

Shapes shapes_of(const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
  const int64_t rank = query.dim();
  for (const auto* x : {&key, &value}) {
    if (x->dim() != rank) return Shapes::kBroadcasting;
    for (int64_t dim = 0; dim < rank - 2; ++dim) {
      if (query.sym_size(dim) == 1 && x->sym_size(dim) != 1) {
        return Shapes::kBroadcasting;
      }
    }
  }
  return rank == 3 || rank == 4 ? Shapes::kUsual : Shapes::kOtherRank;
}

std::string shape_refusal(Shapes shapes, const at::Tensor& query,
                          const at::Tensor& key, const at::Tensor& value) {
  if (shapes == Shapes::kBroadcasting) {
    return "query, key and value need broadcasting" +
           shapes_text(query, key, value);
  }
  if (shapes == Shapes::kOtherRank) {
    return c10::str("the kernels take 3-D and 4-D tensors, query is ",
                    query.dim(), "-D", shapes_text(query, key, value));
  }
  if (key.sym_size(-3) != value.sym_size(-3)) {
    return "key and value have different numbers of heads" +
           shapes_text(query, key, value);
  }
  return {};
}

// Here, and wherever somebody has registered kernels for all four operators.
bool has_kernels(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return device.is_cpu();
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  return call::handle<call::FusedAttention>().hasKernelForDispatchKey(key) &&
         call::handle<call::FusedAttentionBackward>().hasKernelForDispatchKey(
             key) &&
         call::handle<call::AttentionWeights>().hasKernelForDispatchKey(key) &&
         call::handle<call::FusedAttentionSummary>().hasKernelForDispatchKey(
             key);
}

std::string tensor_refusal(const at::Tensor& x) {
  if (is_transformed(x)) {
    return "a transform of torch.func (vmap, grad) is at work";
  }
  if (!has_kernels(x.device())) {
    return c10::str("the kernels run on the CPU, a tensor is on ", x.device());
  }
  if (x.layout() != at::kStrided || x.is_nested()) {
    return x.is_nested() ? "the kernels take dense tensors, one is nested"
                         : c10::str("the kernels take dense tensors, one is ",
                                    x.layout());
  }
  if (x._fw_grad(/*level=*/0).defined()) {
    return "forward-mode differentiation is at work";
  }
  return {};
}

}  // namespace

bool is_transformed(const at::Tensor& x) {
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper});
  return x.key_set().has_any(kTransforms);
}

std::string kernel_refusal(c10::ArrayRef<const at::Tensor*> tensors,
                           at::ScalarType query_dtype) {
  for (const at::Tensor* x : tensors) {
    if (!x->defined()) continue;
    if (std::string reason = tensor_refusal(*x); !reason.empty()) return reason;
  }
  if (is_fused_dtype(query_dtype)) return {};
  return c10::str(
      "there are kernels for float32, float64, bfloat16 and float16, query is ",
      query_dtype);
}

const char* name_of(Way way) {
  switch (way) {
    case Way::kFused:
      return "fused";
    case Way::kDefinition:
      return "definition";
    case Way::kTorchOrder:
      return "torch_order";
    case Way::kPyTorch:
      return "pytorch";
    case Way::kRefused:
      return "refused";
  }
  return "";
}

Route route(const at::Tensor& query, const at::Tensor& key,
            const at::Tensor& value, const AttentionOptions& options,
            bool with_lse) {
  const auto pytorch_or_definition = [&] {
    return pytorch_has(query, key, options, with_lse) ? Way::kPyTorch
                                                      : Way::kDefinition;
  };
  if (current_backend() == Backend::kExact) {
    return route_unless(kAskedForExact, pytorch_or_definition());
  }
  c10::SmallVector<const at::Tensor*, 3 + fields::kCount> tensors{&query, &key,
                                                                  &value};
  fields::for_each_tensor(options, [&](const auto&, const at::Tensor& x) {
    tensors.push_back(&x);
  });
  std::string reason = kernel_refusal(tensors, query.scalar_type());
  const bool is_nested =
      query.is_nested() || key.is_nested() || value.is_nested();
  const Shapes shapes =
      is_nested ? Shapes::kOtherRank : shapes_of(query, key, value);
  if (reason.empty()) reason = shape_refusal(shapes, query, key, value);
  if (reason.empty()) return {};
  // Without a mask and is_causal at once, which PyTorch has in some paths only,
  // its function serves devices for which there are no kernels here.
  const bool pytorch_is_best =
      shapes != Shapes::kUsual ||
      (!query.is_cpu() && !(options.is_causal && options.attn_mask.defined()));
  return route_unless(std::move(reason), pytorch_is_best
                                             ? pytorch_or_definition()
                                             : Way::kDefinition);
}

Route route_unless(std::string reason, Way otherwise) {
  if (reason.empty()) return {};
  const bool must =
      current_backend() == Backend::kFused || current_provider() != nullptr;
  return {must ? Way::kRefused : otherwise, std::move(reason)};
}

void check_route(const char* function, const Route& route) {
  if (route.way != Way::kRefused) return;
  const Provider* provider = current_provider();
  TORCH_CHECK(false, function, ": ",
              provider != nullptr ? provider->name() : "backend \"fused\"",
              " cannot run this call: ", route.reason);
}

void warn_of_all_weights(const char* function, const at::Tensor& query,
                         const Route& route) {
  if (current_backend() != Backend::kAuto || !query.is_cpu()) return;
  const std::string& reason = route.reason;
  const bool is_news = [&] {
    static std::mutex mutex;
    static std::set<std::string> said;
    // Not held while Python warns: its filters may call this library.
    const std::lock_guard lock(mutex);
    return said.emplace(without_shapes(reason)).second;
  }();
  if (!is_news && !c10::WarningUtils::get_warnAlways()) return;
  const std::string message = c10::str(
      function, ": this call forms all attention weights, query length times ",
      "key length, instead of running fused: ", reason,
      ". This is said once; multihead.route tells it of any call.");
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

}  // namespace multihead
