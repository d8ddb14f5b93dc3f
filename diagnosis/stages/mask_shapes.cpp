// SPDX-License-Identifier: MIT
#include "diagnosis/stages/mask_shapes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <algorithm>
#include <span>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

using at::Tensor;

bool is_per_item(const GivenMask& mask) {
  return mask.rank == 3 && mask.numbers.size(1) == 1 &&
         mask.numbers.size(0) > 1;
}

bool is_per_head(const GivenMask& mask, const Sizes& n) {
  return mask.rank == 3 && mask.numbers.size(1) == n.heads && n.heads > 1;
}

bool is_of_items(const GivenMask& mask) {
  return mask.numbers.size(1) == 1 && mask.numbers.size(0) > 1;
}

bool is_of_keys(const GivenMask& mask) {
  return mask.rank == 2 && mask.numbers.size(2) == 1;
}

Tensor heads_first(const Tensor& mask, const Sizes& n) {
  return mask.reshape({n.heads, n.batch, mask.size(-2), mask.size(-1)})
      .transpose(0, 1);
}

Tensor repeated_as_a_whole(const GivenMask& mask, const Sizes& n) {
  const Tensor& x = mask.numbers;
  if (!is_of_items(mask)) return x;
  return x.repeat({n.heads, 1, 1, 1})
      .view({n.batch, n.heads, x.size(2), x.size(3)});
}

Tensor repeated_item_by_item(const GivenMask& mask, const Sizes& n) {
  const Tensor& x = mask.numbers;
  return is_of_items(mask) ? heads_first(x.repeat_interleave(n.heads, 0), n)
                           : x;
}

Tensor folded_heads_first(const GivenMask& mask, const Sizes& n) {
  const Tensor& x = mask.numbers;
  return x.expand({n.batch, n.heads, -1, -1})
      .transpose(0, 1)
      .reshape({n.batch, n.heads, x.size(2), x.size(3)});
}

Tensor first_item(const GivenMask& given, const Sizes& n) {
  const Tensor first = given.numbers.slice(0, 0, 1);
  return is_per_head(given, n) ? first.slice(1, 0, 1) : first;
}

Tensor on_queries(const GivenMask& given, const Sizes&) {
  return is_of_keys(given) ? given.numbers.transpose(-2, -1) : given.numbers;
}

Tensor one_key_later(const GivenMask& given, const Sizes&) {
  const Tensor& x = given.numbers;
  return at::cat({x.slice(-1, 0, 1), x.slice(-1, 0, -1)}, -1);
}

Tensor one_key_sooner(const GivenMask& given, const Sizes&) {
  const Tensor& x = given.numbers;
  return at::cat({x.slice(-1, 1), x.slice(-1, -1)}, -1);
}

Tensor items_as_queries(const GivenMask& mask, const Sizes&) {
  return is_of_keys(mask) ? mask.numbers.transpose(0, 2) : mask.numbers;
}

const Tensor& distances(const ObservedCall& call, const Tensor& scores) {
  const int64_t queries = scores.size(2), keys = scores.size(3);
  Tensor& kept = call.distances[{queries, keys}];
  if (!kept.defined()) {
    kept = at::arange(keys, at::kLong) -
           at::arange(queries, at::kLong).unsqueeze(-1);
  }
  return kept;
}

// Mostly the first key of each tells.
bool has_blind_row(const Tensor& scores) {
  const Tensor numbers = scores.contiguous();
  const std::span all(numbers.const_data_ptr<double>(), numbers.numel());
  const size_t keys = numbers.size(-1);
  for (size_t at = 0; at < all.size(); at += keys) {
    if (std::ranges::all_of(all.subspan(at, keys),
                            [](double score) { return score == -kInfinity; })) {
      return true;
    }
  }
  return false;
}

}  // namespace multihead::diagnosis
