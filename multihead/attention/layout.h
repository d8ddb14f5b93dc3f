// SPDX-License-Identifier: MIT
//
// What results look like in memory. Their dimensions lie in the order in which
// those of the query do. Contiguous for a contiguous query; (B, L, H, D) memory
// for such a query, so that merging heads is a view.
#pragma once

#include <ATen/core/Tensor.h>

namespace multihead {

/// (…, D) empty, of query's rank, dtype and device.
at::Tensor empty_in_layout_of(const at::Tensor& query,
                              c10::SymIntArrayRef sizes);

/// (B, H, Lq) empty: float32, float64 for a float64 query.
at::Tensor empty_logsumexp(const at::Tensor& query);

/// `out` with its memory in that order: itself, or a copy.
at::Tensor in_layout_of(const at::Tensor& query, const at::Tensor& out);

}  // namespace multihead
