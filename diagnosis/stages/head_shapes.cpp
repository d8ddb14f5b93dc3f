// SPDX-License-Identifier: MIT
#include "diagnosis/stages/head_shapes.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <vector>

#include "diagnosis/stages/impossible.h"

namespace multihead::diagnosis {

using at::Tensor;

Tensor split_heads(const Tensor& x, int64_t heads, Split split) {
  const int64_t batch = x.size(0), length = x.size(1);
  need(x.size(2) % heads == 0);
  const int64_t width = x.size(2) / heads;
  switch (split) {
    case Split::kByHead:
      return x.view({batch, length, heads, width}).transpose(1, 2);
    case Split::kNotTransposed:
      return x.reshape({batch, heads, length, width});
    case Split::kFeatureMajor:
      return x.view({batch, length, width, heads}).permute({0, 3, 1, 2});
    case Split::kHeadsAsPositions:
      return x.view({batch, length, heads, width});
    case Split::kOneHead:
      return x.unsqueeze(1);
  }
  throw Impossible();
}

Tensor expand_groups(const Tensor& x, const Sizes& sizes, Groups groups) {
  if (sizes.heads == sizes.kv_heads) return x;
  need(x.size(1) == sizes.kv_heads);
  std::vector<int64_t> heads(sizes.heads);
  for (int64_t h = 0; h < sizes.heads; ++h) {
    switch (groups) {
      case Groups::kRepeated:
        heads[h] = h / (sizes.heads / sizes.kv_heads);
        break;
      case Groups::kTiled:
        heads[h] = h % sizes.kv_heads;
        break;
      case Groups::kFirst:
        heads[h] = 0;
        break;
      case Groups::kClamped:
        heads[h] = std::min(h, sizes.kv_heads - 1);
        break;
      case Groups::kCountForSize:
        heads[h] = h / sizes.kv_heads;
        break;
      case Groups::kCountForSizeClamped:
        heads[h] = std::min(h / sizes.kv_heads, sizes.kv_heads - 1);
        break;
    }
    need(heads[h] < sizes.kv_heads);
  }
  return x.index_select(1, at::tensor(heads, at::kLong));
}

Tensor merge_heads(const Tensor& context, const Recipe& recipe) {
  const bool positions_first = recipe.split[0] == Split::kHeadsAsPositions;
  switch (recipe.merge) {
    case Merge::kByHead:
      return (positions_first ? context : context.transpose(1, 2)).flatten(2);
    case Merge::kNotTransposed: {
      const Tensor x = positions_first ? context.transpose(1, 2) : context;
      const int64_t length =
          positions_first ? context.size(1) : context.size(2);
      return x.reshape({x.size(0), length, -1});
    }
    case Merge::kFeatureMajor:
      need(!positions_first);
      return context.permute({0, 2, 3, 1}).flatten(2);
    case Merge::kMean:
      return context.mean(1);
    case Merge::kSum:
      return context.sum(1);
  }
  throw Impossible();
}

}  // namespace multihead::diagnosis
