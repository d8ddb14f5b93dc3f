// SPDX-License-Identifier: MIT
//
// This library under PyTorch's own names: programs that call PyTorch's
// attention run on the fused kernels as they are.
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] multihead {

struct InstallOptions {
  /// Matrix products too: mm and addmm of float32 matrices, of which linear
  /// and its gradients consist, by the oneDNN inside PyTorch instead of MKL.
  /// MKL runs code for AVX2 on processors of other makers than Intel. Only
  /// where why_not_linear() is empty, for products of at least 2²⁵
  /// multiply-adds (128 rows of 512 × 512), unless
  /// torch.backends.mkldnn.flags(enabled=False) holds; smaller ones gain
  /// nothing. A product with sizes that the process has not met costs 1 ms
  /// once. Sums are of another order: results differ by rounding.
  bool linear = false;
};

/// Why InstallOptions::linear changes nothing in this process; empty: it does.
/// The rule: an AMD processor with AVX-512 (Zen 4 and later), a PyTorch with
/// MKL and oneDNN. On Zen 5 such products take half the time, on Zen 4, which
/// has units of 256 bits, 0.8 to 0.95 of it. MULTIHEAD_LINEAR=always in the
/// environment stands for the maker.
std::string why_not_linear();

/// From here on, in every thread of this process, calls of
///
/// * scaled_dot_product_attention, from C++, Python, TorchScript, modules
/// * _native_multi_head_attention, the inference path of PyTorch's
///   MultiheadAttention and of its encoder
///
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
/// Installing twice is installing once; linear holds when one of them had it.
/// Threads may call while others install.
///
/// Source of the way in: kernels registered for the dispatch keys AutogradCPU
/// and CPU, of which scaled_dot_product_attention has none of its own.
void install(InstallOptions options = {});

/// Takes all of that back; alive Installed objects keep it until the last one
/// dies.
void uninstall();

bool is_installed();

/// What an Installed object does: each enter_installed() wants its
/// leave_installed(), with the same options. For callers that have no scopes.
void enter_installed(InstallOptions options = {});
void leave_installed(InstallOptions options = {});

/// install() for its own lifetime.
class Installed {
 public:
  explicit Installed(InstallOptions options = {}) : options_(options) {
    enter_installed(options_);
  }
  ~Installed() { leave_installed(options_); }
  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;

 private:
  InstallOptions options_;
};

}  // namespace multihead
