// SPDX-License-Identifier: MIT
#include "diagnosis/stages/heads.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <vector>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

using at::Tensor;

Tensor split_heads(const Tensor& x, int64_t heads, Split split) {
  const int64_t batch = x.size(0), length = x.size(1);
  require(x.size(2) % heads == 0);
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
  require(x.size(1) == sizes.kv_heads);
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
    require(heads[h] < sizes.kv_heads);
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
      require(!positions_first);
      return context.permute({0, 2, 3, 1}).flatten(2);
    case Merge::kMean:
      return context.mean(1);
    case Merge::kSum:
      return context.sum(1);
  }
  throw Impossible();
}

// ---- Faults ----------------------------------------------------------------

namespace {

template <Split split, bool query, bool key, bool value>
void split_as(Recipe& r) {
  if constexpr (query) r.split[0] = split;
  if constexpr (key) r.split[1] = split;
  if constexpr (value) r.split[2] = split;
}

constexpr std::string_view kSplitRemedy =
    "Cut the features, then exchange: x.view(B, L, H, d).transpose(1, 2). A "
    "view in another order has the right shape and mixes positions with "
    "features.";
constexpr std::string_view kRoleRemedy =
    "Scores are queries times keys, and their weights go to the values: "
    "softmax(q @ k.transpose(-2, -1) / sqrt(d)) @ v.";
constexpr std::string_view kGroupRemedy =
    "Query head h reads key/value head h // (H / G): expand by "
    "repeat_interleave(H // G, dim=1), giving 0 0 1 1 for H = 4 and G = 2.";
constexpr std::string_view kMergeRemedy =
    "Exchange back before the heads are laid side by side: "
    "context.transpose(1, 2).reshape(B, Lq, H * d).";

}  // namespace

const std::vector<Fault> kHeadFaults = {
    {"heads_not_transposed",
     "Heads are split without exchanging positions and heads.",
     kSplitRemedy,
     {{split_as<Split::kNotTransposed, true, true, true>,
       "The features are viewed as (B, H, L, d) at once."},
      {split_as<Split::kHeadsAsPositions, true, true, true>,
       "The heads stay (B, L, H, d): each position attends among its own "
       "heads, and nothing passes between positions."},
      {split_as<Split::kNotTransposed, true, false, false>,
       "It is the queries."},
      {split_as<Split::kNotTransposed, false, true, false>, "It is the keys."},
      {split_as<Split::kNotTransposed, false, false, true>,
       "It is the values."}}},
    {"heads_not_split",
     "The heads are not split: one head attends with all {E} features.",
     kSplitRemedy,
     {{split_as<Split::kOneHead, true, true, true>},
      {[](Recipe& r) {
         split_as<Split::kOneHead, true, true, true>(r);
         r.scale = Scale::kRootOfOneHead;
       },
       "Its scores are divided by sqrt({D})."}}},
    {"heads_interleaved",
     "Heads are interleaved: head h takes the features h, h + H, h + 2H, …",
     kSplitRemedy,
     {{split_as<Split::kFeatureMajor, true, true, true>}}},
    {"groups_tiled",
     "Key/value heads are tiled (0 1 0 1), not repeated (0 0 1 1).",
     kGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kTiled; }}}},
    {"groups_truncated",
     "All query heads read the first key/value head.",
     kGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kFirst; }}}},
    {"groups_clamped",
     "Query heads beyond the number of key/value heads all read the last "
     "one.",
     kGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kClamped; }}}},
    {"group_size_wrong",
     "The number of groups is taken for their size: query head h reads "
     "key/value head h // G.",
     kGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kCountForSize; }},
      {[](Recipe& r) { r.groups = Groups::kCountForSizeClamped; },
       "Beyond the last one it stays there."}}},
    {"values_are_keys",
     "The weights are multiplied with the keys, not with the values.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 1, 1}; }}}},
    {"values_are_queries",
     "The weights are multiplied with the queries, not with the values.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 1, 0}; }}}},
    {"keys_are_values",
     "The scores are queries times values, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 2, 2}; }}}},
    {"keys_are_queries",
     "The scores are queries times queries, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 0, 2}; }}}},
    {"queries_are_keys",
     "The scores are keys times keys, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {1, 1, 2}; }}}},
    {"keys_reshaped",
     "The keys are reshaped to (d, L), not transposed.",
     "`k.transpose(-2, -1)` moves each number; a view or reshape only reads "
     "the same numbers in rows of another length.",
     {{[](Recipe& r) { r.keys_reshaped = true; }}}},
    {"queries_and_keys_exchanged",
     "The scores are keys times queries: their rows are keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {1, 0, 2}; }}}},
    {"keys_and_values_exchanged",
     "The scores are queries times values, and the weights meet the keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 2, 1}; }}}},
    {"merge_not_transposed",
     "Heads are merged without exchanging heads and positions back.",
     kMergeRemedy,
     {{[](Recipe& r) { r.merge = Merge::kNotTransposed; }}},
     Stage::kMerge},
    {"merge_interleaved",
     "Heads are merged feature by feature: 0 of all heads, 1 of all heads, …",
     kMergeRemedy,
     {{[](Recipe& r) { r.merge = Merge::kFeatureMajor; }}},
     Stage::kMerge},
    {"heads_averaged_together",
     "The heads' results are averaged or summed, not laid side by side.",
     kMergeRemedy,
     {{[](Recipe& r) { r.merge = Merge::kMean; }, "They are averaged."},
      {[](Recipe& r) { r.merge = Merge::kSum; }, "They are summed."}},
     Stage::kMerge},
};

}  // namespace multihead::diagnosis
