// SPDX-License-Identifier: MIT
//
// Which implementation computes attention, and for which instruction set.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] multihead {

/// Which implementation computes attention.
///  kAuto   the fused kernels where they can run, else the definition of
///          docs/parity.md in ATen operations. Rows that see no key give 0.
///  kExact  PyTorch's own order of operations: the same bits as
///          torch.nn.MultiheadAttention, its NaN rows and dropout stream too.
///  kFused  the fused kernels, or an error that says why they cannot run.
enum class Backend { kAuto, kExact, kFused };

/// "auto", "exact" or "fused"; throws c10::ValueError for any other name.
Backend backend_from_name(std::string_view name);

/// The backend of this thread; kAuto unless a BackendGuard is alive.
Backend current_backend();

/// Sets the backend of this thread for its own lifetime.
class BackendGuard {
 public:
  explicit BackendGuard(Backend backend);
  ~BackendGuard();
  BackendGuard(const BackendGuard&) = delete;
  BackendGuard& operator=(const BackendGuard&) = delete;

 private:
  Backend previous_;
};

/// The instruction set that the kernels run with: "avx512". Throws where
/// MULTIHEAD_ISA names none, or one that this CPU lacks.
std::string kernel_isa();

/// Those that this build has kernels for and this CPU can run, by the names
/// that MULTIHEAD_ISA takes.
std::vector<std::string> kernel_isas();

}  // namespace multihead
