// SPDX-License-Identifier: MIT
#include "diagnosis/weights/layout.h"

#include <algorithm>
#include <string_view>

namespace multihead::diagnosis {
namespace {

using enum Orientation;

// Axes: h heads, d head_dim, e width, H heads and head_dim as one. Where
// several fit, the first is taken, but for matrices, whose orientation stays
// open.
constexpr std::string_view kLayouts[] = {"He", "eH", "hde", "hed", "ehd"};

bool fits(const at::Tensor& weight, std::string_view axes, const Extents& x) {
  if (weight.dim() != static_cast<int64_t>(axes.size())) return false;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const int64_t size = axes[axis] == 'h'   ? x.heads
                         : axes[axis] == 'd' ? x.head_dim
                         : axes[axis] == 'e' ? x.width
                                             : x.heads * x.head_dim;
    if (weight.size(static_cast<int64_t>(axis)) != size) return false;
  }
  return true;
}

Orientation orientation_of(std::string_view axes, bool is_output) {
  const bool width_first = axes.find('e') < axes.find_first_of("dH");
  return width_first == is_output ? kOutIn : kInOut;
}

at::Tensor out_in(const at::Tensor& weight, std::string_view axes,
                  const Extents& x) {
  std::vector<int64_t> order;
  for (const char axis : {'h', 'd', 'H', 'e'}) {
    const size_t at = axes.find(axis);
    if (at != axes.npos) order.push_back(static_cast<int64_t>(at));
  }
  const at::Tensor heads_first =
      weight.permute(order).reshape({x.heads * x.head_dim, x.width});
  return x.is_output ? heads_first.t() : heads_first;
}

}  // namespace

std::optional<OrientedMatrix> orient(const at::Tensor& weight,
                                     const Extents& extents, const Hint& hint) {
  std::vector<std::string_view> readings;
  for (const std::string_view axes : kLayouts) {
    if (fits(weight, axes, extents)) readings.push_back(axes);
  }
  if (hint.orientation != kUnknown) {
    auto agreeing = readings;
    std::erase_if(agreeing, [&](std::string_view axes) {
      return orientation_of(axes, extents.is_output) != hint.orientation;
    });
    if (hint.is_certain || !agreeing.empty()) readings = agreeing;
  }
  if (readings.empty()) return std::nullopt;
  if (readings.size() > 1 && weight.dim() == 2) {
    return OrientedMatrix{weight, kUnknown};
  }
  return OrientedMatrix{out_in(weight, readings[0], extents),
                        orientation_of(readings[0], extents.is_output)};
}

std::vector<at::Tensor> cut(const at::Tensor& fused, int64_t queries_per_group,
                            int64_t groups, FusedOrder order) {
  std::vector<int64_t> heads{queries_per_group, 1, 1};
  if (queries_per_group == 0) heads.erase(heads.begin());
  const int64_t heads_per_group = queries_per_group + 2;
  const bool by_head = order == FusedOrder::kHeadByHead;
  if (!by_head) {
    for (int64_t& count : heads) count *= groups;
  }
  std::vector<int64_t> part = fused.sizes().vec();
  part[0] = -1;
  std::vector<int64_t> cutting = part;
  const int64_t head_dim = fused.size(0) / (heads_per_group * groups);
  const int64_t outer = by_head ? groups : 1;
  cutting[0] = head_dim;
  cutting.insert(cutting.begin(), {outer, heads_per_group * groups / outer});
  std::vector<at::Tensor> parts =
      fused.reshape(cutting).split_with_sizes(heads, 1);
  for (at::Tensor& tensor : parts) tensor = tensor.reshape(part);
  return parts;
}

}  // namespace multihead::diagnosis
