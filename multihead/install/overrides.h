// SPDX-License-Identifier: MIT
//
// PyTorch's operators as this library implements them: each is registered by a
// function of its own file while the library is installed.
#pragma once

#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <string>
#include <vector>

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

/// The reason to leave a call to PyTorch that the checks of this library
/// refuse, so that its own error is seen, if it has one.
inline std::string refused(const c10::Error& refusal) {
  return c10::str("multihead refuses the arguments: ",
                  refusal.what_without_backtrace());
}

void scaled_dot_product_attention(Registrations& all);
void native_multi_head_attention(Registrations& all);
void matrix_products(Registrations& all);

}  // namespace multihead::overrides
