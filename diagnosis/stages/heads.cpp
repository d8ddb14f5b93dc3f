// SPDX-License-Identifier: MIT
//
// From features to heads and back, in every way in which it is done wrong.
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <vector>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

Tensor split_by_head(const Tensor& x, int64_t heads) {
  return x.unflatten(2, {heads, -1}).transpose(1, 2);
}

int64_t repeat_groups(int64_t h, const Sizes& n) {
  return h / (n.heads / n.kv_heads);
}

Tensor expand_groups(const Tensor& x, const Sizes& sizes, Groups groups) {
  if (sizes.heads == sizes.kv_heads) return x;
  require(x.size(1) == sizes.kv_heads);
  std::vector<int64_t> heads(sizes.heads);
  for (int64_t h = 0; h < sizes.heads; ++h) {
    heads[h] = groups(h, sizes);
    require(heads[h] < sizes.kv_heads);
  }
  return x.index_select(1, at::tensor(heads, at::kLong));
}

Tensor merge_by_head(const Tensor& context) {
  return context.transpose(1, 2).flatten(2);
}

// Read as (B, L, D, H): head h has features h, h + H, …
Tensor split_by_feature(const Tensor& x, int64_t heads) {
  return x.unflatten(2, {-1, heads}).permute({0, 3, 1, 2});
}

Tensor split_as_viewed(const Tensor& x, int64_t heads) {
  return x.reshape({x.size(0), heads, x.size(1), -1});
}

Tensor merge_by_feature(const Tensor& context) {
  return context.permute({0, 2, 3, 1}).flatten(2);
}

// ---- Faults ----------------------------------------------------------------

namespace {

// Left as (B, L, H, D): heads attend to heads.
Tensor heads_as_positions(const Tensor& x, int64_t heads) {
  return x.unflatten(2, {heads, -1});
}

Tensor one_head(const Tensor& x, int64_t) { return x.unsqueeze(1); }

template <Split split, int... roles>
void split_as(Recipe& r) {
  ((r.split[roles] = split), ...);
}

template <auto groups>
void groups_by(Recipe& r) {
  r.groups = {groups, groups};
}

// In all three ways: of keys and values alike, or of one of them.
template <auto groups>
std::vector<Way> grouped_ways(std::string_view detail = "") {
  return {{groups_by<groups>, detail},
          {[](Recipe& r) { r.groups[0] = groups; }, "It is the keys alone."},
          {[](Recipe& r) { r.groups[1] = groups; }, "It is the values alone."}};
}

int64_t tiled(int64_t h, const Sizes& n) { return h % n.kv_heads; }

int64_t first_of_all(int64_t, const Sizes&) { return 0; }

int64_t clamped(int64_t h, const Sizes& n) {
  return std::min(h, n.kv_heads - 1);
}

// ---- One tensor (B, L, 3·H·D) as heads -------------------------------------

std::array<Tensor, 3> apart(const Tensor& parts, int64_t axis) {
  const std::vector<Tensor> found = parts.unbind(axis);
  return {found[0], found[1], found[2]};
}

// Viewed as (3, B, H, L, D) at once.
std::array<Tensor, 3> viewed_part_first(const Tensor& x, const Sizes& n) {
  return apart(x.reshape({3, x.size(0), n.heads, x.size(1), -1}), 0);
}

// As (B, 3, H, L, D).
std::array<Tensor, 3> viewed_item_first(const Tensor& x, const Sizes& n) {
  return apart(x.reshape({x.size(0), 3, n.heads, x.size(1), -1}), 1);
}

// As (3, B, L, H, D), whose heads are exchanged as they should be.
std::array<Tensor, 3> viewed_before_heads(const Tensor& x, const Sizes& n) {
  return apart(
      x.reshape({3, x.size(0), x.size(1), n.heads, -1}).transpose(2, 3), 0);
}

// As (B, 3, L, H, D), likewise.
std::array<Tensor, 3> viewed_part_before_length(const Tensor& x,
                                                const Sizes& n) {
  return apart(
      x.reshape({x.size(0), 3, x.size(1), n.heads, -1}).transpose(2, 3), 1);
}

// As (B, H, L, 3·D), a third of which is for each.
std::array<Tensor, 3> viewed_head_first(const Tensor& x, const Sizes& n) {
  return apart(x.reshape({x.size(0), n.heads, x.size(1), 3, -1}), 3);
}

// As (B, H, 3, L, D).
std::array<Tensor, 3> viewed_head_and_part_first(const Tensor& x,
                                                 const Sizes& n) {
  return apart(x.reshape({x.size(0), n.heads, 3, x.size(1), -1}), 2);
}

template <auto view>
void fused_viewed(Recipe& r) {
  r.fused_view = view;
}

// (B, H, L, D) viewed as (B, L, H·D).
Tensor merge_as_viewed(const Tensor& c) {
  return c.reshape({c.size(0), c.size(2), -1});
}

// ---- Heads left out --------------------------------------------------------

Tensor without_head(const Tensor& c, int64_t head) {
  require(c.size(1) > 1);
  Tensor kept = c.clone();
  kept.select(1, head).zero_();
  return merge_by_head(kept);
}

Tensor without_last(const Tensor& c) { return without_head(c, -1); }

Tensor without_first(const Tensor& c) { return without_head(c, 0); }

template <int64_t head>
Tensor one_for_all(const Tensor& c) {
  require(c.size(1) > 1);
  return merge_by_head(c.select(1, head).unsqueeze(1).expand_as(c));
}

// ---- Heads and items -------------------------------------------------------

// (B·H, L, D) read as (H, B, L, D).
Tensor items_as_heads(const Tensor& c) {
  return c.reshape({c.size(1), c.size(0), c.size(2), c.size(3)})
      .permute({1, 2, 0, 3})
      .flatten(2);
}

// (H·B, L, D) read as (B, H, L, D).
Tensor heads_as_items(const Tensor& c) {
  return c.transpose(0, 1)
      .reshape({c.size(0), c.size(1), c.size(2), c.size(3)})
      .transpose(1, 2)
      .flatten(2);
}

// (H, B, L, D), or what comes of it by exchanges, viewed as (B, L, H·D).
Tensor heads_before_items(const Tensor& c) {
  return c.transpose(0, 1).reshape({c.size(0), c.size(2), -1});
}

Tensor positions_before_items(const Tensor& c) {
  return c.permute({2, 0, 1, 3}).reshape({c.size(0), c.size(2), -1});
}

// The first head, as often as there are heads.
Tensor split_as_first(const Tensor& x, int64_t heads) {
  require(heads > 1);
  return split_by_head(x, heads).narrow(1, 0, 1).expand({-1, heads, -1, -1});
}

// Whether rotary positions turn queries, keys and values.
template <bool... roles>
void turn(Recipe& r) {
  r.turned = {roles...};
}

template <auto merge>
void merge_by(Recipe& r) {
  r.merge = merge;
}

constexpr std::string_view kSplitRemedy =
    "Cut the features, then exchange: x.view(B, L, H, d).transpose(1, 2). A "
    "view in another order has the right shape and mixes positions with "
    "features.";
constexpr std::string_view kFusedRemedy =
    "View the features alone, then exchange: qkv.view(B, L, 3, H, "
    "d).permute(2, 0, 3, 1, 4). A view can only cut axes, it cannot move them.";
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

Tensor merge_heads(const Tensor& context, const Recipe& recipe,
                   const Sizes& sizes) {
  if (recipe.exchanges_groups) {
    require(sizes.kv_heads > 1 && sizes.kv_heads < context.size(1));
    return context.unflatten(1, {sizes.kv_heads, -1})
        .transpose(1, 2)
        .reshape({context.size(0), context.size(2), -1});
  }
  const bool positions_first = recipe.split[0] == heads_as_positions;
  return recipe.merge(positions_first ? context.transpose(1, 2) : context);
}

const std::vector<Fault> kHeadFaults = {
    {"heads_not_transposed",
     "Heads are split without exchanging positions and heads.",
     kSplitRemedy,
     {{split_as<split_as_viewed, 0, 1, 2>,
       "The features are viewed as (B, H, L, d) at once."},
      {[](Recipe& r) {
         split_as<split_as_viewed, 0, 1, 2>(r);
         r.merge = merge_as_viewed;
       },
       "The features are viewed as (B, H, L, d) at once, and back likewise: "
       "heads attend within pieces of the sequence."},
      {split_as<heads_as_positions, 0, 1, 2>,
       "The heads stay (B, L, H, d): each position attends among its own "
       "heads, and nothing passes between positions."},
      {split_as<split_as_viewed, 0>, "It is the queries."},
      {split_as<split_as_viewed, 1>, "It is the keys."},
      {split_as<split_as_viewed, 2>, "It is the values."}}},
    {"fused_view_without_permute",
     "Queries, keys and values are cut from one tensor (B, L, 3·H·d) by a view "
     "in another order of axes: positions are mixed with features.",
     kFusedRemedy,
     {{fused_viewed<viewed_part_first>, "It is viewed as (3, B, H, L, d)."},
      {fused_viewed<viewed_item_first>, "It is viewed as (B, 3, H, L, d)."},
      {fused_viewed<viewed_before_heads>, "It is viewed as (3, B, L, H, d)."},
      {fused_viewed<viewed_part_before_length>,
       "It is viewed as (B, 3, L, H, d)."},
      {fused_viewed<viewed_head_first>, "It is viewed as (B, H, L, 3·d)."},
      {fused_viewed<viewed_head_and_part_first>,
       "It is viewed as (B, H, 3, L, d)."}}},
    {"heads_not_split",
     "The heads are not split: one head attends with all {E} features.",
     kSplitRemedy,
     {{split_as<one_head, 0, 1, 2>},
      {[](Recipe& r) {
         split_as<one_head, 0, 1, 2>(r);
         r.scale = scale_by_split_width;
       },
       "Its scores are divided by sqrt({D})."}}},
    {"heads_interleaved",
     "Heads are interleaved: head h takes the features h, h + H, h + 2H, …",
     kSplitRemedy,
     {{split_as<split_by_feature, 0, 1, 2>}}},
    {"groups_tiled",
     "Key/value heads are tiled (0 1 0 1), not repeated (0 0 1 1).",
     kGroupRemedy, grouped_ways<tiled>()},
    {"groups_truncated", "All query heads read the first key/value head.",
     kGroupRemedy, grouped_ways<first_of_all>()},
    {"groups_clamped",
     "Query heads beyond the number of key/value heads all read the last "
     "one.",
     kGroupRemedy, grouped_ways<clamped>()},
    {"group_size_wrong",
     "The number of groups is taken for their size: query head h reads "
     "key/value head h // G.",
     kGroupRemedy,
     {{groups_by<[](int64_t h, const Sizes& n) { return h / n.kv_heads; }>},
      {groups_by<[](int64_t h, const Sizes& n) {
         return std::min(h / n.kv_heads, n.kv_heads - 1);
       }>,
       "Beyond the last one it stays there."}}},
    {"values_are_keys",
     "The weights are multiplied with the keys, not with the values.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles[2] = 1; }}}},
    {"values_are_queries",
     "The weights are multiplied with the queries, not with the values.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles[2] = 0; }}}},
    {"keys_are_values",
     "The scores are queries times values, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles[1] = 2; }}}},
    {"keys_are_queries",
     "The scores are queries times queries, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles[1] = 0; }}}},
    {"queries_are_keys",
     "The scores are keys times keys, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles[0] = 1; }}}},
    {"queries_are_values",
     "The scores are values times keys, not queries times keys.",
     kRoleRemedy,
     {{[](Recipe& r) { r.roles[0] = 2; }}}},
    {"keys_reshaped",
     "The keys are reshaped to (d, L), not transposed.",
     "`k.transpose(-2, -1)` moves each number; a view or reshape only reads "
     "the same numbers in rows of another length.",
     {{[](Recipe& r) { r.keys_reshaped = true; }}}},
    {"rotary_misapplied",
     "Rotary positions do not turn queries and keys as they should.",
     "Turn queries and keys, both by their own positions, and leave the values "
     "as they are: only then do scores depend on the distance of a query from "
     "a key.",
     {{turn<true, false, true>, "The values are turned, and the keys are not."},
      {turn<false, true, true>,
       "The values are turned, and the queries are not."},
      {turn<true, false, false>, "The keys are not turned."},
      {turn<false, true, false>, "The queries are not turned."},
      {[](Recipe& r) { r.turned_apart = true; },
       "Queries are turned by other angles than keys of the same positions."},
      {[](Recipe& r) { r.rotary = Rotary::kByHead; },
       "They turn by the number of the head, not by the position."},
      {[](Recipe& r) { r.rotary = Rotary::kMixed; },
       "The tables are laid out for other pairs of features than those that "
       "are turned: (i, i + D/2) here, (2i, 2i + 1) there. Each feature of a "
       "pair gets an angle of its own."}}},
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
     {{merge_by<merge_as_viewed>},
      {merge_by<[](const Tensor& c) {
         return c.transpose(2, 3).reshape({c.size(0), c.size(2), -1});
       }>,
       "Positions and features are exchanged instead."},
      {merge_by<[](const Tensor& c) {
         return c.permute({0, 2, 1, 3})
             .flatten(2)
             .transpose(1, 2)
             .reshape({c.size(0), c.size(2), -1});
       }>,
       "They are, and then positions and features, too."},
      {[](Recipe& r) { r.exchanges_groups = true; },
       "Groups and the heads of each are exchanged instead: (B, G, H / G, L, "
       "d), viewed as (B, L, H·d)."}},
     Stage::kMerge},
    {"head_left_out",
     "One head has no part in the output.",
     "Merge all heads: W_o takes H·d features.",
     {{merge_by<without_last>, "It is the last one."},
      {merge_by<without_first>, "It is the first one."}},
     Stage::kMerge},
    {"one_head_for_all",
     "One head stands in the place of all heads.",
     "Each head has a place of its own: W_o takes H·d features.",
     {{merge_by<one_for_all<0>>, "It is the first one."},
      {merge_by<one_for_all<-1>>, "It is the last one."},
      {split_as<split_as_first, 0, 1, 2>,
       "It is the first one, computed once for each."}},
     Stage::kMerge},
    {"merge_of_batch_and_heads",
     "Batch and heads are exchanged as the heads are merged: numbers of one "
     "item come out in another.",
     "Unfold in the order in which they were folded: (B·H, L, d) as "
     "context.view(B, H, L, d).transpose(1, 2).reshape(B, L, H * d).",
     {{merge_by<items_as_heads>, "(B·H, L, d) is read as (H, B, L, d)."},
      {merge_by<[](const Tensor& c) {
         return c.reshape({c.size(1), c.size(0), c.size(2), c.size(3)})
             .transpose(1, 2)
             .reshape({c.size(0), c.size(2), -1});
       }>,
       "(B·H, L, d) is read as (H, B, L, d), and merged as (B, H, L, d)."},
      {merge_by<heads_as_items>, "(H·B, L, d) is read as (B, H, L, d)."},
      {merge_by<heads_before_items>, "(H, B, L, d) is viewed as (B, L, H·d)."},
      {merge_by<positions_before_items>,
       "(L, B, H, d) is viewed as (B, L, H·d)."}},
     Stage::kMerge},
    {"merge_interleaved",
     "Heads are merged feature by feature: 0 of all heads, 1 of all heads, …",
     kMergeRemedy,
     {{merge_by<merge_by_feature>}},
     Stage::kMerge},
    {"heads_averaged_together",
     "The heads' results are averaged or summed, not laid side by side.",
     kMergeRemedy,
     {{merge_by<[](const Tensor& c) { return c.mean(1); }>,
       "They are averaged."},
      {merge_by<[](const Tensor& c) { return c.sum(1); }>, "They are summed."}},
     Stage::kMerge},
};

}  // namespace multihead::diagnosis
