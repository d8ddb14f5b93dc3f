// SPDX-License-Identifier: MIT
//
// PyTorch's operators as this library implements them: each is registered by a
// function of its own file while the library is installed.
#pragma once

#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "multihead/attention/count.h"
#include "multihead/backend.h"

namespace multihead::overrides {

/// What is registered, and undone when it dies.
using Registrations = std::vector<torch::Library>;

/// Kernels are given to it by TORCH_FN, as functions without state: a thread
/// that calls while the dispatcher's table is written may read the function of
/// one kernel and the state of another.
inline torch::Library& library_for(Registrations& all, c10::DispatchKey key) {
  return all.emplace_back(torch::Library::IMPL, "aten", key, __FILE__,
                          __LINE__);
}

/// Whether somebody has asked for the kernels. Else what is registered serves
/// the threads that have a provider alone, and others see PyTorch's.
inline std::atomic<bool> is_wanted = false;

/// Keeps attention registered for the threads that have a provider; each
/// enter_redirection() wants its leave_redirection().
void enter_redirection();
void leave_redirection();

/// One call of PyTorch's operator. `refusal` says why it stays PyTorch's, or
/// nothing; `ours` computes it here. Arguments that `checks`, those of `ours`,
/// refuse are PyTorch's too, so that its own error is seen, if it has one. They
/// are asked once `ours` has failed: what else fails there, as for want of
/// memory, is the caller's to know.
template <class Refusal, class Ours, class Checks, class PyTorchs>
auto run(const Refusal& refusal, const Ours& ours, const Checks& checks,
         const PyTorchs& pytorchs) {
  // The function of this library asks for PyTorch's, and has counted.
  if (current_backend() == Backend::kExact) return pytorchs();
  const SourceGuard source(Source::kInstalled);
  std::string reason = refusal();
  if (reason.empty()) {
    try {
      return ours();
    } catch (const c10::Error&) {
      try {
        checks();
      } catch (const c10::Error& refused) {
        reason = c10::str("multihead refuses the arguments: ",
                          refused.what_without_backtrace());
      }
      if (reason.empty()) throw;
    }
  }
  count({Way::kPyTorch, std::move(reason)});
  return pytorchs();
}

void scaled_dot_product_attention(Registrations& all);
void native_multi_head_attention(Registrations& all);
void matrix_products(Registrations& all);
void variable_length_attention(Registrations& all);

}  // namespace multihead::overrides
