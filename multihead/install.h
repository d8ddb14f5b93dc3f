// SPDX-License-Identifier: MIT
//
// This library under PyTorch's own names: programs that call PyTorch's
// attention run on the fused kernels as they are.
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] multihead {

struct InstallOptions {
  /// Matrix products too: mm, addmm and what consists of them (linear, its
  /// gradients, transformers' Conv1D, graphs of torch.compile) on float32
  /// matrices, by the oneDNN inside PyTorch instead of MKL, which is slow on
  /// processors of other makers than Intel. Only where why_not_linear() is
  /// empty, and for products of at least 2²⁵ multiply-adds (128 rows, 512 ×
  /// 512) whose sizes are all at least 8; not under
  /// torch.backends.mkldnn.flags(enabled=False). Results differ by rounding:
  /// oneDNN adds in sequence, MKL in blocks; at 3072 summands the largest
  /// error is 3 times MKL's. Sizes that come for the first time cost 0.5 to
  /// 0.8 ms.
  bool linear = false;
  /// torch.nn.attention.varlen on the CPU too, which PyTorch has for GPUs
  /// alone: _flash_attention_forward, _flash_attention_backward and
  /// _flash_attention_forward_no_dropout_inplace on CPU tensors are
  /// varlen_attention, causal from the bottom right as there.
  bool varlen = false;
};

/// Why InstallOptions::linear changes nothing in this process; empty: it does.
/// The rule: an AMD processor with AVX-512 (Zen 4 and later), and a PyTorch
/// with MKL and oneDNN. MKL runs code for AVX2 there. Zen 5, whose units are
/// 512 bits wide, computes such products in half the time then; Zen 4, whose
/// units are 256 bits wide, in 0.8 to 0.95 of it. MULTIHEAD_LINEAR=always in
/// the environment stands for the maker; MULTIHEAD_LINEAR=never means all
/// processors. The projections of this library's layers follow the same rule,
/// installed or not, where their attention runs fused.
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
/// Installing twice is installing once; linear and varlen hold from the first
/// that has them to uninstall().
/// Threads may call while others install. In a process of Python install there,
/// by multihead.install(): torch.compile is not told of an install() of C++,
/// and goes on with what it has compiled.
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
/// leave_installed() throws c10::Error where no such enter_installed() is open.
void enter_installed(InstallOptions options = {});
void leave_installed(InstallOptions options = {});

/// The same for InstallOptions::varlen by itself, as a provider of
/// torch.nn.attention's registry wants it.
void enter_varlen();
void leave_varlen();

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
