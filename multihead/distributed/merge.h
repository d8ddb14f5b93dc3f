// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

namespace multihead::distributed {

/// merge_attention into `out` (…, L, Dv) and `lse` (…, L), which are of the
/// compute type.
void merge_into(const at::Tensor& out, const at::Tensor& lse,
                const at::Tensor& other_out, const at::Tensor& other_lse);

}  // namespace multihead::distributed
