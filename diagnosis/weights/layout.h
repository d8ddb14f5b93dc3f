// SPDX-License-Identifier: MIT
//
// What the shape of a parameter says.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "diagnosis/weights/alignment.h"

namespace multihead::diagnosis {

/// A projection from width to heads · head_dim, or back.
struct Extents {
  int64_t heads, head_dim, width;
  bool is_output = false;
};

/// What is known of an orientation without the shape. is_certain: the shape
/// must agree; else it only settles what the shape leaves open.
struct Hint {
  Orientation orientation = Orientation::kUnknown;
  bool is_certain = false;
};

struct OrientedMatrix {
  at::Tensor weight;  // (out, in), or as stored
  Orientation orientation;
};

/// weight: (out, in), (in, out), or per head (H, E, D), (H, D, E), (E, H, D).
/// Nothing if it is none of these.
std::optional<OrientedMatrix> orient(const at::Tensor& weight,
                                     const Extents& extents, const Hint& hint);

/// fused: (heads · head_dim, ...), of all parts. Returns query, key and value;
/// or key and value, where queries_per_group is 0.
std::vector<at::Tensor> cut(const at::Tensor& fused, int64_t queries_per_group,
                            int64_t groups, FusedOrder order);

}  // namespace multihead::diagnosis
