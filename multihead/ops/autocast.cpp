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
template <at::DeviceType kDevice, int kTensors>
void autocast(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < first + kTensors; ++i) {
    (*stack)[i] =
        at::autocast::cached_cast(dtype, (*stack)[i].toTensor(), kDevice);
  }
  op.callBoxed(stack);
}

template <at::DeviceType kDevice>
void register_all(torch::Library& m) {
  using torch::CppFunction;
  m.impl("fused_attention",
         CppFunction::makeFromBoxedFunction<&autocast<kDevice, 3>>());
  m.impl("fused_ring_attention",
         CppFunction::makeFromBoxedFunction<&autocast<kDevice, 3>>());
  m.impl("fused_varlen_attention",
         CppFunction::makeFromBoxedFunction<&autocast<kDevice, 3>>());
  m.impl("attention_weights",
         CppFunction::makeFromBoxedFunction<&autocast<kDevice, 2>>());
  m.impl("fused_attention_summary",
         CppFunction::makeFromBoxedFunction<&autocast<kDevice, 2>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(multihead, AutocastCPU, m) { register_all<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(multihead, AutocastCUDA, m) { register_all<at::kCUDA>(m); }

}  // namespace multihead::ops
