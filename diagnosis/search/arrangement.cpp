// SPDX-License-Identifier: MIT
// Where heads lie in the tensors of the trace. Splitting and merging move
// numbers and change none, and no two numbers are the same: so that each number
// of the heads can be found in what the code made of them, and in what they
// were made of. A row of features, wherever the code keeps it, holds the
// numbers of one position of one item. Where a row holds those of several, a
// view has taken the place of a transpose.
#include "diagnosis/search/arrangement.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>

#include <ranges>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

Tensor flat(const Tensor& x) { return x.to(at::kDouble).reshape({-1}); }

// Whether the two hold the same numbers, each once, in any order.
bool holds_same(const Tensor& x, const Tensor& sorted) {
  if (x.numel() != sorted.numel()) return false;
  return std::get<0>(flat(x).sort()).equal(sorted);
}

// The places in `from` of the numbers of `to`, in the shape of `to`.
Tensor places(const Tensor& from, const Tensor& to) {
  const Tensor order = std::get<1>(flat(from).sort());
  const Tensor at = std::get<1>(flat(to).sort());
  return at::empty_like(order).scatter(0, at, order).view(to.sizes());
}

// The axis of all features; -1 where there is none, or more than one.
int64_t feature_axis(const Tensor& x, int64_t features) {
  int64_t found = -1;
  for (int64_t axis = 0; axis < x.dim(); ++axis) {
    if (x.size(axis) != features) continue;
    if (found >= 0) return -1;
    found = axis;
  }
  return found;
}

// Whether what lies along the axis is of one position everywhere.
bool is_of_one(const Tensor& positions, int64_t axis) {
  return positions.diff(1, axis).eq(0).all().item<bool>();
}

// The row of features to which each number of `whole` belongs, in its order.
Tensor rows_of(const Tensor& whole, int64_t features) {
  std::vector<int64_t> shape = whole.sizes().vec();
  shape[feature_axis(whole, features)] = 1;
  return at::arange(whole.numel() / features, at::kLong)
      .view(shape)
      .expand(whole.sizes())
      .contiguous();
}

// Of heads (B, H, L, d), or (H, B, L, d) in the same memory: the position of
// each number, in order.
Tensor positions_of(const Tensor& heads, bool heads_first) {
  const int64_t length = heads.size(2), width = heads.size(3);
  const Tensor number = at::arange(heads.numel(), at::kLong);
  const Tensor row = number.floor_divide(length * width);
  const Tensor item = heads_first ? row.remainder(heads.size(0))
                                  : row.floor_divide(heads.size(1));
  return item * length + number.floor_divide(width).remainder(length);
}

Finding finding(std::string_view name, const char* detail) {
  const auto faults = all_faults();
  const auto fault = std::ranges::find(faults, name, &Fault::name);
  return {std::string(name), std::string(name_of(*fault->stage)),
          std::string(fault->sentence), std::string(fault->remedy), detail};
}

// In order: what holds the same numbers as these heads, and has an axis of all
// features; none where a number stands for several.
std::vector<Tensor> like(const ObservedCall& call, const Tensor& heads) {
  const Tensor sorted = std::get<0>(flat(heads).sort());
  std::vector<Tensor> found;
  if (!sorted.diff().gt(0).all().item<bool>()) return found;
  const int64_t features = heads.size(1) * heads.size(3);
  for (const Tensor& x : call.trace) {
    if (feature_axis(x, features) >= 0 && holds_same(x, sorted))
      found.push_back(x);
  }
  return found;
}

// Whether a position has a row in each head, and all of them come of its own.
bool is_split_well(const Tensor& projected, const Tensor& heads,
                   bool heads_first) {
  std::vector<int64_t> shape = heads.sizes().vec();
  if (heads_first) std::swap(shape[0], shape[1]);
  const Tensor rows = rows_of(projected, heads.size(1) * heads.size(3));
  const Tensor row_of =
      rows.view({-1})
          .index_select(0, places(projected, heads).view({-1}))
          .view(shape);
  return is_of_one(row_of, 3) && is_of_one(row_of, heads_first ? 0 : 1);
}

bool is_merged_well(const Tensor& heads, const Tensor& merged,
                    bool heads_first) {
  const Tensor positions =
      positions_of(heads, heads_first)
          .index_select(0, places(heads, merged).view({-1}))
          .view(merged.sizes());
  const int64_t features = heads.size(1) * heads.size(3);
  return is_of_one(positions, feature_axis(merged, features));
}

std::optional<Finding> misplaced(const ObservedCall& call, bool heads_first) {
  constexpr const char* kOf[] = {"It is the queries.", "It is the keys.",
                                 "It is the values."};
  for (int role = 0; role < 3; ++role) {
    // None where they were turned, or scaled, on the way.
    const auto projected = like(call, call.inputs[role]);
    if (!projected.empty() &&
        !is_split_well(projected.front(), call.inputs[role], heads_first)) {
      return finding("heads_not_transposed", kOf[role]);
    }
  }
  // The last of them is projected next.
  const auto merged = like(call, call.out);
  if (!merged.empty() && !is_merged_well(call.out, merged.back(), heads_first))
    return finding("merge_not_transposed", "");
  return std::nullopt;
}

}  // namespace

std::optional<Finding> misplaced(const ObservedCall& call) {
  if (!call.is_core()) return std::nullopt;
  // Which axis counts the heads, what they compute does not tell.
  auto found = misplaced(call, /*heads_first=*/false);
  if (found && !misplaced(call, /*heads_first=*/true)) found.reset();
  return found;
}

}  // namespace multihead::diagnosis
