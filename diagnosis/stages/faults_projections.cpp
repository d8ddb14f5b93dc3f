// SPDX-License-Identifier: MIT
//
// Faults of the projections and of the heads that are cut from them.
#include "diagnosis/stages/faults_by_stage.h"

namespace multihead::diagnosis {
namespace {

template <Split split, bool query, bool key, bool value>
void split_as(Recipe& r) {
  if constexpr (query) r.split[0] = split;
  if constexpr (key) r.split[1] = split;
  if constexpr (value) r.split[2] = split;
}

constexpr std::string_view kTransposedRemedy =
    "nn.Linear stores its weight as (out, in) and computes x @ weight.T; a "
    "matrix written for x @ W is (in, out). As the matrix is square, no error "
    "tells.";
constexpr std::string_view kMatrixRemedy =
    "Queries are W_q of the query input, keys W_k of the key input, values W_v "
    "of the value input: three matrices, three roles.";
constexpr std::string_view kInputRemedy =
    "In cross-attention, keys and values come from the other sequence: project "
    "the key input for keys and the value input for values. With one sequence "
    "for all three (self-attention) the slip cannot be seen.";
constexpr std::string_view kBiasRemedy =
    "Add the bias of the layer after its matrix: x @ weight.T + bias. Fresh "
    "layers often have zero biases, which hides it.";

}  // namespace

namespace {

constexpr Stage kProjectionsStage = Stage::kProjections;
const std::vector<Fault> kProjections = {
    {"query_weight_transposed",
     kProjectionsStage,
     "The query matrix W_q is transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed[0] = true; }}}},
    {"key_weight_transposed",
     kProjectionsStage,
     "The key matrix W_k is transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed[1] = true; }}}},
    {"value_weight_transposed",
     kProjectionsStage,
     "The value matrix W_v is transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed[2] = true; }}}},
    {"all_weights_transposed",
     kProjectionsStage,
     "The weight matrices are transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed = {true, true, true, true}; },
       "All four are."},
      {[](Recipe& r) { r.transposed = {true, true, true, false}; },
       "All are but the output matrix."}}},
    {"query_key_swapped",
     kProjectionsStage,
     "Queries are projected by the key matrix, keys by the query matrix.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {1, 0, 2}; }}}},
    {"query_value_swapped",
     kProjectionsStage,
     "Queries are projected by the value matrix, values by the query matrix.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {2, 1, 0}; }}}},
    {"key_value_swapped",
     kProjectionsStage,
     "Keys are projected by the value matrix, values by the key matrix.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 2, 1}; }}}},
    {"projections_rotated",
     kProjectionsStage,
     "The three input matrices are in the wrong order.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {1, 2, 0}; },
       "Queries get W_k, keys W_v, values W_q."},
      {[](Recipe& r) { r.matrices = {2, 0, 1}; },
       "Queries get W_v, keys W_q, values W_k."}}},
    {"one_projection_for_all",
     kProjectionsStage,
     "One matrix projects queries, keys and values.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 0, 0}; }, "It is W_q."},
      {[](Recipe& r) { r.matrices = {1, 1, 1}; }, "It is W_k."},
      {[](Recipe& r) { r.matrices = {2, 2, 2}; }, "It is W_v."}}},
    {"query_weight_for_keys",
     kProjectionsStage,
     "Keys are projected by W_q, not by W_k.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 0, 2}; }}}},
    {"key_weight_for_values",
     kProjectionsStage,
     "Values are projected by W_k, not by W_v.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 1, 1}; }}}},
    {"query_weight_for_values",
     kProjectionsStage,
     "Values are projected by W_q, not by W_v.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 1, 0}; }}}},
    {"key_weight_for_queries",
     kProjectionsStage,
     "Queries are projected by W_k, not by W_q.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {1, 1, 2}; }}}},
    {"value_weight_for_keys",
     kProjectionsStage,
     "Keys are projected by W_v, not by W_k.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 2, 2}; }}}},
    {"value_weight_for_queries",
     kProjectionsStage,
     "Queries are projected by W_v, not by W_q.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {2, 1, 2}; }}}},
    {"value_from_key",
     kProjectionsStage,
     "Values are projected from the key input; the value input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 1, 1}; }}}},
    {"key_from_value",
     kProjectionsStage,
     "Keys are projected from the value input; the key input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 2, 2}; }}}},
    {"key_from_query",
     kProjectionsStage,
     "Keys are projected from the query input; the key input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 0, 2}; }},
      {[](Recipe& r) { r.inputs = {0, 0, 0}; }, "So are the values."}}},
    {"value_from_query",
     kProjectionsStage,
     "Values are projected from the query input; the value input is not "
     "used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 1, 0}; }}}},
    {"query_from_key",
     kProjectionsStage,
     "Queries are projected from the key input; the query input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {1, 1, 2}; }},
      {[](Recipe& r) { r.inputs = {1, 1, 1}; },
       "Everything comes from the key input."}}},
    {"inputs_swapped",
     kProjectionsStage,
     "The inputs are in the wrong order.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 2, 1}; },
       "Keys are projected from the value input, values from the key input."},
      {[](Recipe& r) { r.inputs = {1, 0, 2}; },
       "Queries are projected from the key input, keys from the query "
       "input."}}},
    {"biases_forgotten",
     kProjectionsStage,
     "No bias is added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias = {true, true, true, true}; }}}},
    {"input_biases_forgotten",
     kProjectionsStage,
     "The biases of the query, key and value projections are not added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias = {true, true, true, false}; }}}},
    {"query_bias_forgotten",
     kProjectionsStage,
     "The bias of the query projection is not added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias[0] = true; }}}},
    {"value_bias_forgotten",
     kProjectionsStage,
     "The bias of the value projection is not added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias[2] = true; }}}},
    {"input_projection_forgotten",
     kProjectionsStage,
     "Heads are cut from an input itself, without a projection.",
     "Project first, with W_q, W_k and W_v: it is the projections that make "
     "the heads differ from slices of the input.",
     {{[](Recipe& r) { r.unprojected = {true, true, true}; }},
      {[](Recipe& r) { r.unprojected[0] = true; }, "It is the queries."},
      {[](Recipe& r) { r.unprojected[1] = true; }, "It is the keys."},
      {[](Recipe& r) { r.unprojected[2] = true; }, "It is the values."}}},
    {"batch_and_sequence_exchanged",
     kProjectionsStage,
     "Batch and sequence are exchanged: each position attends to the same "
     "position of the other batch items.",
     "The code takes (L, B, E), as nn.MultiheadAttention does unless "
     "batch_first=True, and gets (B, L, E). Exchange the first two "
     "dimensions "
     "on the way in and out, or state batch_first=False.",
     {{[](Recipe& r) { r.batch_exchanged = true; }}}},
};

}  // namespace

std::span<const Fault> faults_of_projections() { return kProjections; }

namespace {

constexpr Stage kHeadsStage = Stage::kHeads;
constexpr std::string_view kHeadsSplitRemedy =
    "Cut the features, then exchange: x.view(B, L, H, d).transpose(1, 2). A "
    "view in another order has the right shape and mixes positions with "
    "features.";
constexpr std::string_view kHeadsRoleRemedy =
    "Scores are queries times keys, and their weights go to the values: "
    "softmax(q @ k.transpose(-2, -1) / sqrt(d)) @ v.";
constexpr std::string_view kHeadsGroupRemedy =
    "Query head h reads key/value head h // (H / G): expand by "
    "repeat_interleave(H // G, dim=1), giving 0 0 1 1 for H = 4 and G = 2.";
const std::vector<Fault> kHeads = {
    {"heads_not_transposed",
     kHeadsStage,
     "Heads are split without exchanging positions and heads.",
     kHeadsSplitRemedy,
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
     kHeadsStage,
     "The heads are not split: one head attends with all {E} features.",
     kHeadsSplitRemedy,
     {{split_as<Split::kOneHead, true, true, true>},
      {[](Recipe& r) {
         split_as<Split::kOneHead, true, true, true>(r);
         r.scale = Scale::kRootOfOneHead;
       },
       "Its scores are divided by sqrt({D})."}}},
    {"heads_interleaved",
     kHeadsStage,
     "Heads are interleaved: head h takes the features h, h + H, h + 2H, …",
     kHeadsSplitRemedy,
     {{split_as<Split::kFeatureMajor, true, true, true>}}},
    {"groups_tiled",
     kHeadsStage,
     "Key/value heads are tiled (0 1 0 1), not repeated (0 0 1 1).",
     kHeadsGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kTiled; }}}},
    {"groups_truncated",
     kHeadsStage,
     "All query heads read the first key/value head.",
     kHeadsGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kFirst; }}}},
    {"groups_clamped",
     kHeadsStage,
     "Query heads beyond the number of key/value heads all read the last "
     "one.",
     kHeadsGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kClamped; }}}},
    {"group_size_wrong",
     kHeadsStage,
     "The number of groups is taken for their size: query head h reads "
     "key/value head h // G.",
     kHeadsGroupRemedy,
     {{[](Recipe& r) { r.groups = Groups::kCountForSize; }},
      {[](Recipe& r) { r.groups = Groups::kCountForSizeClamped; },
       "Beyond the last one it stays there."}}},
    {"values_are_keys",
     kHeadsStage,
     "The weights are multiplied with the keys, not with the values.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 1, 1}; }}}},
    {"values_are_queries",
     kHeadsStage,
     "The weights are multiplied with the queries, not with the values.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 1, 0}; }}}},
    {"keys_are_values",
     kHeadsStage,
     "The scores are queries times values, not queries times keys.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 2, 2}; }}}},
    {"keys_are_queries",
     kHeadsStage,
     "The scores are queries times queries, not queries times keys.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 0, 2}; }}}},
    {"queries_are_keys",
     kHeadsStage,
     "The scores are keys times keys, not queries times keys.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {1, 1, 2}; }}}},
    {"keys_reshaped",
     kHeadsStage,
     "The keys are reshaped to (d, L), not transposed.",
     "`k.transpose(-2, -1)` moves each number; a view or reshape only reads "
     "the "
     "same numbers in rows of another length.",
     {{[](Recipe& r) { r.keys_reshaped = true; }}}},
    {"queries_and_keys_exchanged",
     kHeadsStage,
     "The scores are keys times queries: their rows are keys.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {1, 0, 2}; }}}},
    {"keys_and_values_exchanged",
     kHeadsStage,
     "The scores are queries times values, and the weights meet the keys.",
     kHeadsRoleRemedy,
     {{[](Recipe& r) { r.roles = {0, 2, 1}; }}}},
};

}  // namespace

std::span<const Fault> faults_of_heads() { return kHeads; }

}  // namespace multihead::diagnosis
