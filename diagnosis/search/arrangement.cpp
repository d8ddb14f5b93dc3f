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

// Of heads (B, H, L, d): the position of each number, in order.
Tensor positions_of(const Tensor& heads) {
  const int64_t length = heads.size(2), width = heads.size(3);
  const Tensor number = at::arange(heads.numel(), at::kLong);
  const Tensor item = number.floor_divide(heads.size(1) * length * width);
  return item * length + number.floor_divide(width).remainder(length);
}

Finding finding(std::string_view name, const char* detail) {
  const auto faults = all_faults();
  const auto fault = std::ranges::find(faults, name, &Fault::name);
  return {std::string(name), std::string(name_of(*fault->stage)),
          std::string(fault->sentence), std::string(fault->remedy), detail};
}

}  // namespace

std::optional<Finding> misplaced(const ObservedCall& call) {
  const Sizes& n = call.sizes;
  if (!call.is_core()) return std::nullopt;

  // Of heads (B, H, L, d): what holds the same numbers, and has an axis of all
  // features, in order; none where a number stands for several.
  const auto like = [&](const Tensor& heads) {
    const Tensor sorted = std::get<0>(flat(heads).sort());
    const bool tells = sorted.diff().gt(0).all().item<bool>();
    const int64_t features = n.heads * heads.size(3);
    std::vector<Tensor> found;
    for (const Tensor& x : call.trace) {
      if (tells && feature_axis(x, features) >= 0 && holds_same(x, sorted))
        found.push_back(x);
    }
    return found;
  };

  constexpr const char* kOf[] = {"It is the queries.", "It is the keys.",
                                 "It is the values."};
  for (int role = 0; role < 3; ++role) {
    const Tensor heads = call.inputs[role];
    const auto projected = like(heads);
    if (projected.empty()) continue;  // they were turned, or scaled, perhaps
    const Tensor rows = rows_of(projected.front(), n.heads * heads.size(3));
    const Tensor row_of =
        rows.view({-1})
            .index_select(0, places(projected.front(), heads).view({-1}))
            .view(heads.sizes());
    // A position has a row in each head, and all of them come of its own.
    if (!is_of_one(row_of, 3) || !is_of_one(row_of, 1))
      return finding("heads_not_transposed", kOf[role]);
  }
  // What comes of the heads, as it is projected next.
  if (const auto merged = like(call.out); !merged.empty()) {
    const Tensor& last = merged.back();
    const Tensor positions =
        positions_of(call.out)
            .index_select(0, places(call.out, last).view({-1}))
            .view(last.sizes());
    const int64_t features = n.heads * call.out.size(3);
    if (!is_of_one(positions, feature_axis(last, features)))
      return finding("merge_not_transposed", "");
  }
  return std::nullopt;
}

}  // namespace multihead::diagnosis
