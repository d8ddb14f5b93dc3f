// SPDX-License-Identifier: MIT
//
// Which way a call goes, and why not to the kernels: functional.h's route, and
// what those need who ask it before they run a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string>

#include "multihead/functional.h"

namespace multihead {

/// The reason under kExact, whatever the call.
inline constexpr auto* kAskedForExact =
    "backend \"exact\" asks for PyTorch's order of operations";

/// What keeps a call with these tensors (of which absent ones keep nothing),
/// and a query of that dtype, from the kernels, whatever it computes; empty:
/// nothing.
std::string kernel_refusal(c10::ArrayRef<const at::Tensor*> tensors,
                           at::ScalarType query_dtype);

/// Whether a transform of torch.func (vmap, grad, jvp, ...) looks at x.
bool is_transformed(const at::Tensor& x);

/// The route of a call that the kernels refuse for `reason`, if there is one:
/// then it goes `otherwise`.
Route route_unless(std::string reason, Way otherwise);

/// Throws, where the call is refused, the reason.
void check_route(const char* function, const Route& route);

/// Warns that a call forms all weights, once per process and kind of reason.
/// Under kAuto only: elsewhere somebody asked for that. The kernels are for the
/// CPU, so on other devices it is no news.
void warn_of_all_weights(const char* function, const at::Tensor& query,
                         const Route& route);

}  // namespace multihead
