// SPDX-License-Identifier: MIT
//
// The shape in which a mask meets the scores. A mistake about a shape leaves
// masks of other shapes as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/observed_call.h"

namespace multihead::diagnosis {

/// (B, Lq, Lk)
bool is_per_item(const GivenMask& mask);

/// (B·H, Lq, Lk)
bool is_per_head(const GivenMask& mask, const Sizes& n);

/// One for each item and none for each head, of any rank.
bool is_of_items(const GivenMask& mask);

/// (B, Lk)
bool is_of_keys(const GivenMask& mask);

/// (H·B, …) → (B, H, …).
at::Tensor heads_first(const at::Tensor& mask, const Sizes& n);

/// For (B·H, …), as if it were for (H·B, …).
at::Tensor repeated_as_a_whole(const GivenMask& mask, const Sizes& n);

/// The other way round.
at::Tensor repeated_item_by_item(const GivenMask& mask, const Sizes& n);

/// Masks of heads folded as (H·B, …), for heads that are (B·H, …).
at::Tensor folded_heads_first(const GivenMask& mask, const Sizes& n);

at::Tensor first_item(const GivenMask& given, const Sizes& n);

/// j − i of query i and key j, (Lq, Lk); kept, as recipes ask for it again.
const at::Tensor& distances(const ObservedCall& call, const at::Tensor& scores);

/// Of masked scores: whether some query sees no key.
bool has_blind_row(const at::Tensor& scores);

/// A padding mask over the rows.
at::Tensor on_queries(const GivenMask& given, const Sizes&);

/// As if each key had the place of the next one, or of the one before.
at::Tensor one_key_later(const GivenMask& given, const Sizes&);
at::Tensor one_key_sooner(const GivenMask& given, const Sizes&);

/// (B, 1, 1, Lk) of keys as (1, 1, B, Lk).
at::Tensor items_as_queries(const GivenMask& mask, const Sizes&);

/// (B, 1, …) as (1, B, …).
template <auto is_of_these>
at::Tensor items_as_heads(const GivenMask& mask, const Sizes&) {
  const at::Tensor& x = mask.numbers;
  return is_of_these(mask) ? x.transpose(0, 1) : x;
}

/// Where there is one of three dimensions for each item, and no other.
template <auto layout>
at::Tensor of_items_only(const GivenMask& mask, const Sizes& n) {
  return is_per_item(mask) ? layout(mask, n) : mask.numbers;
}

}  // namespace multihead::diagnosis
