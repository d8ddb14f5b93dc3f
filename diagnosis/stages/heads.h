// SPDX-License-Identifier: MIT
//
// From features to heads and back, in every way in which it is done wrong.
// Throws Impossible where shapes do not allow it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

enum class Split {
  kByHead,            ///< (B, L, H·D) → (B, L, H, D) → (B, H, L, D)
  kNotTransposed,     ///< read as (B, H, L, D) at once
  kFeatureMajor,      ///< read as (B, L, D, H): head h has features h, h+H, …
  kHeadsAsPositions,  ///< left as (B, L, H, D): heads attend to heads
  kOneHead            ///< (B, 1, L, H·D)
};

enum class Merge { kByHead, kNotTransposed, kFeatureMajor, kMean, kSum };

/// Which key/value head query head h reads.
enum class Groups {
  kRepeated,            ///< h / (H / G): 0 0 1 1
  kTiled,               ///< h mod G: 0 1 0 1
  kFirst,               ///< 0
  kClamped,             ///< min(h, G − 1)
  kCountForSize,        ///< h / G
  kCountForSizeClamped  ///< min(h / G, G − 1)
};

/// `roles`: which projected tensor is taken for each.
struct HeadChoices {
  std::array<Split, 3> split = {};
  Groups groups = Groups::kRepeated;
  std::array<int, 3> roles = {0, 1, 2};
  bool keys_reshaped = false;  ///< (L, D) read as (D, L), not transposed
  Merge merge = Merge::kByHead;

  bool operator==(const HeadChoices&) const = default;
};

/// (B, L, heads·D) → (B, heads, L, D).
at::Tensor split_heads(const at::Tensor& x, int64_t heads, Split split);

/// (B, G, L, D) → (B, H, L, D): the key/value head of each query head.
at::Tensor expand_groups(const at::Tensor& x, const Sizes& sizes,
                         Groups groups);

/// (B, H, Lq, D) → (B, Lq, H·D).
at::Tensor merge_heads(const at::Tensor& context, const Recipe& recipe);

extern const std::vector<Fault> kHeadFaults;

}  // namespace multihead::diagnosis
