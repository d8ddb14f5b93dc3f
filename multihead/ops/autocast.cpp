// SPDX-License-Identifier: MIT
//
// Under autocast, query, key and value take its dtype, as those of
// torch.nn.functional.scaled_dot_product_attention do; logsumexp, masks and the
// rest stay what they are.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace multihead::ops {
namespace {

// The first kTensors arguments are cast.
template <int kTensors>
void autocast(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::DispatchKey::AutocastCPU);
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < first + kTensors; ++i) {
    (*stack)[i] =
        at::autocast::cached_cast(dtype, (*stack)[i].toTensor(), at::kCPU);
  }
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(multihead, AutocastCPU, m) {
  m.impl("fused_attention",
         torch::CppFunction::makeFromBoxedFunction<&autocast<3>>());
  m.impl("attention_weights",
         torch::CppFunction::makeFromBoxedFunction<&autocast<2>>());
  m.impl("fused_attention_summary",
         torch::CppFunction::makeFromBoxedFunction<&autocast<2>>());
}

}  // namespace multihead::ops
