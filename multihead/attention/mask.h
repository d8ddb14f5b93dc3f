// SPDX-License-Identifier: MIT
//
// Which keys a query sees, as a value. Causal masks, windows and key lengths
// are ends of one interval of keys per query row; tensors add to that.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>

#include "multihead/functional.h"

namespace multihead {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Key j is visible to query i of batch row b when all of these hold; n is
/// key_lengths[b] or Lk, offset is query_offset[b], or else 0 (kTopLeft) or
/// n − Lq (kBottomRight):
///   j < n;  is_causal: j ≤ i + offset;
///   window (left, right): i + offset − left ≤ j ≤ i + offset + right;
///   key_mask and keep are true there;  bias is not −inf there.
struct Mask {
  bool is_causal = false;
  CausalAlignment alignment = CausalAlignment::kTopLeft;
  at::Tensor query_offset = {};  ///< integers, () or (B)
  std::optional<std::array<int64_t, 2>> window = {};
  at::Tensor key_lengths = {};  ///< int64 (B)
  at::Tensor key_mask = {};     ///< bool (B, Lk)
  at::Tensor keep = {};         ///< bool, broadcastable to (B, H, Lq, Lk)
  at::Tensor bias = {};         ///< float, likewise; added to the scores
};

/// bool says who may attend, floating point is added; nothing else is a mask.
inline bool is_mask_dtype(const at::Tensor& mask) {
  return mask.scalar_type() == at::kBool || mask.is_floating_point();
}

/// Lq and Lk of a call, and where its tensors live.
struct ScoreShape {
  c10::SymInt query_length, key_length;
  at::Device device;
};

/// i + offset, the key at which query i stands: int64 (Lq, 1), or
/// (1 or B, 1, Lq, 1) where the offset is a tensor or depends on key_lengths.
at::Tensor query_positions(const Mask& mask, const ScoreShape& shape);

/// bool, broadcastable to (B, H, Lq, Lk): true where the query sees the key;
/// undefined when nothing is blocked.
at::Tensor visible_keys(const Mask& mask, const ScoreShape& shape);

}  // namespace multihead
