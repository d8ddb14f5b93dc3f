// SPDX-License-Identifier: MIT
//
// This library under PyTorch's own names: programs that call PyTorch's
// attention run on the fused kernels as they are.
#pragma once

namespace [[gnu::visibility("default")]] multihead {

/// From here on, in every thread of this process, calls of
///   scaled_dot_product_attention         from C++, Python, TorchScript,
///   modules _native_multi_head_attention         the inference path of
///   PyTorch's
///                                        MultiheadAttention and of its encoder
/// on CPU tensors are computed by the fused kernels, forward and backward.
/// What those do not take goes to PyTorch's implementation as before, and
/// stats() tells why: other ranks and dtypes, shapes that need broadcasting,
/// transforms of torch.func, forward-mode derivatives, arguments that PyTorch
/// refuses. torch.nn.attention.sdpa_kernel without FLASH_ATTENTION, and
/// at::globalContext().setSDPUseFlash(false), mean PyTorch's implementation
/// too; so does a BackendGuard with kExact.
///
/// Results are those of backend kAuto: equal to PyTorch's within rounding, 0
/// where a row sees no key, another dropout stream from the same generator.
///
/// Installing twice is installing once. Threads may call while others install.
/// Source of the way in: kernels registered for the dispatch keys AutogradCPU
/// and CPU, of which scaled_dot_product_attention has none of its own.
void install();

/// Takes that back; alive Installed objects keep it until the last one dies.
void uninstall();

bool is_installed();

/// What an Installed object does: each enter_installed() wants its
/// leave_installed(). For callers that have no scopes.
void enter_installed();
void leave_installed();

/// install() for its own lifetime.
class Installed {
 public:
  Installed() { enter_installed(); }
  ~Installed() { leave_installed(); }
  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;
};

}  // namespace multihead
