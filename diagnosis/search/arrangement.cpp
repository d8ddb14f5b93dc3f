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
#include <ATen/ops/searchsorted.h>

#include <ranges>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

Tensor flat(const Tensor& x) { return x.to(at::kDouble).reshape({-1}); }

// The places in `from` of the numbers of `to`, in the shape of `to`; undefined
// where some are not there.
Tensor places(const Tensor& from, const Tensor& to) {
  const auto [sorted, order] = flat(from).sort();
  const Tensor wanted = flat(to);
  const Tensor at =
      at::searchsorted(sorted, wanted).clamp_max(sorted.numel() - 1);
  if (!sorted.index_select(0, at).equal(wanted)) return {};
  return order.index_select(0, at).view(to.sizes());
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

// How heads and items lie in memory: (B / inner, H, inner, L, d), where `inner`
// is 1 if items come first, B if heads do, and between the two if an item has
// been cut into blocks behind its heads.

// The position of each number, in order.
Tensor positions_of(const Tensor& heads, int64_t inner) {
  const int64_t length = heads.size(2), width = heads.size(3);
  const Tensor number = at::arange(heads.numel(), at::kLong);
  const Tensor row = number.floor_divide(length * width);
  const Tensor item =
      row.floor_divide(inner * heads.size(1)) * inner + row.remainder(inner);
  return item * length + number.floor_divide(width).remainder(length);
}

Finding finding(std::string_view name, const char* detail) {
  const auto faults = all_faults();
  const auto fault = std::ranges::find(faults, name, &Fault::name);
  return {std::string(name), std::string(name_of(*fault->stage)),
          std::string(fault->sentence), std::string(fault->remedy), detail};
}

// In order: what holds the numbers of these heads, and has an axis of all
// features, `times` as many; none where a number stands for several.
std::vector<Tensor> like(const ObservedCall& call, const Tensor& heads,
                         int64_t times) {
  std::vector<Tensor> found;
  const Tensor sorted = std::get<0>(flat(heads).sort());
  if (!sorted.diff().gt(0).all().item<bool>()) return found;
  const int64_t features = times * heads.size(1) * heads.size(3);
  for (const Tensor& x : call.trace) {
    if (x.numel() == times * heads.numel() && feature_axis(x, features) >= 0 &&
        places(x, heads).defined())
      found.push_back(x);
  }
  return found;
}

// Whether no other sizes make an axis as long as that of all features, which
// then could not be told from it.
bool is_telling(const Tensor& heads) {
  const int64_t n[] = {heads.size(0), heads.size(1), heads.size(2),
                       heads.size(3)};
  const int64_t features = n[1] * n[3];
  std::vector<int64_t> others = {n[0],        n[2],        n[0] * n[1],
                                 n[0] * n[2], n[1] * n[2], n[2] * n[3]};
  if (n[1] > 1) others.push_back(n[3]);
  return std::ranges::none_of(others, [&](int64_t other) {
    return other == features || other == 3 * features;
  });
}

// Whether a position has a row in each head, and all of them come of its own.
bool is_split_well(const Tensor& projected, const Tensor& heads, int64_t times,
                   int64_t inner) {
  const int64_t features = times * heads.size(1) * heads.size(3);
  const Tensor row_of =
      rows_of(projected, features)
          .view({-1})
          .index_select(0, places(projected, heads).view({-1}))
          .view({-1, heads.size(1), inner, heads.size(2), heads.size(3)});
  return is_of_one(row_of, 4) && is_of_one(row_of, 1);
}

bool is_merged_well(const Tensor& heads, const Tensor& merged, int64_t inner) {
  const Tensor positions =
      positions_of(heads, inner)
          .index_select(0, places(heads, merged).view({-1}))
          .view(merged.sizes());
  const int64_t features = heads.size(1) * heads.size(3);
  return is_of_one(positions, feature_axis(merged, features));
}

// Of (B, L, H·d) or (L, B, H·d): whether each row is of the item that it stands
// for. Positions may have been sorted otherwise.
bool keeps_items(const Tensor& heads, const Tensor& merged, int64_t inner) {
  const int64_t batch = heads.size(0), length = heads.size(2);
  const bool is_batch_first =
      merged.dim() == 3 && merged.size(0) == batch && merged.size(1) == length;
  const bool is_length_first =
      merged.dim() == 3 && merged.size(0) == length && merged.size(1) == batch;
  if (is_batch_first == is_length_first) return true;
  const Tensor items = positions_of(heads, inner)
                           .floor_divide(length)
                           .index_select(0, places(heads, merged).view({-1}))
                           .view(merged.sizes());
  return is_of_one(items, is_batch_first ? 1 : 0);
}

std::optional<Finding> misplaced(const ObservedCall& call, int64_t inner) {
  constexpr const char* kOf[] = {"It is the queries.", "It is the keys.",
                                 "It is the values."};
  for (int role = 0; role < 3; ++role) {
    const Tensor& heads = call.inputs[role];
    // None where they were turned, or scaled, on the way. Queries, keys and
    // values may be projected at once.
    for (const int64_t times : {3, 1}) {
      const auto projected = like(call, heads, times);
      if (!projected.empty() &&
          !is_split_well(projected.front(), heads, times, inner)) {
        return finding("heads_not_transposed", kOf[role]);
      }
      if (!projected.empty()) break;
    }
  }
  // The last of them is projected next.
  const auto merged = like(call, call.out, 1);
  if (merged.empty()) return std::nullopt;
  if (!is_merged_well(call.out, merged.back(), inner))
    return finding("merge_not_transposed", "");
  for (const Tensor& x : merged) {
    if (!keeps_items(call.out, x, inner))
      return finding("merge_of_batch_and_heads", "");
  }
  return std::nullopt;
}

}  // namespace

std::optional<Finding> misplaced(const ObservedCall& call) {
  if (!call.is_core() || call.has_given_scores() || call.is_elsewhere() ||
      !is_telling(call.inputs[0]) || !is_telling(call.inputs[1]) ||
      !is_telling(call.out)) {
    return std::nullopt;
  }
  // Which axes count the heads and the items, what they compute does not tell:
  // of several orders it is the first that splits heads well, if one does.
  const int64_t batch = call.inputs[0].size(0);
  std::optional<Finding> found;
  for (int64_t inner = 1; inner <= batch; ++inner) {
    if (batch % inner != 0) continue;
    std::optional<Finding> other = misplaced(call, inner);
    if (!other) return std::nullopt;
    const bool is_later = found && found->stage == name_of(Stage::kHeads) &&
                          other->stage != found->stage;
    if (!found || is_later) found = other;
  }
  return found;
}

}  // namespace multihead::diagnosis
