// SPDX-License-Identifier: MIT
//
// How queries, keys and values are made of the inputs: which matrix projects
// which input.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>

#include "diagnosis/stages/simulate.h"
#include "multihead/optional_tensor.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// Whether a matrix that nothing says how it is stored is read as (in, out).
bool is_in_out(const Recipe& recipe, int index) {
  const bool otherwise = index == 3 && recipe.output_weight_otherwise;
  return recipe.weights_in_out != otherwise;
}

// project(), remembered where nothing is recorded or rounded. input: of a role.
Tensor project_shared(const ObservedCall& call, const Recipe& recipe, int role,
                      const Tensor& input) {
  const int index = recipe.matrices[role];
  if (at::GradMode::is_enabled() || recipe.narrow != Narrow::kNever) {
    return project(call, recipe, narrowed(input, recipe), index);
  }
  const bool normed = recipe.input_norm != NormKind::kNone;
  Tensor& kept = call.projections[{
      recipe.inputs[role], index, recipe.transposed[index],
      recipe.without_bias[index], is_in_out(recipe, index),
      static_cast<int>(recipe.fused), static_cast<int>(recipe.input_norm),
      normed ? 1 + role + 3 * static_cast<int>(recipe.normed_inputs) : 0,
      role > 0 ? static_cast<int>(recipe.queries_among_keys) : 0}];
  if (!kept.defined()) kept = project(call, recipe, input, index);
  return kept;
}

// The input of a role behind its norm, remembered likewise.
Tensor normed_input(const ObservedCall& call, const Recipe& recipe, int role) {
  const NormKind kind = recipe.input_norm;
  const auto norm = [&] {
    return normalised(call, kind, NormPlace::kInput, role,
                      call.inputs[recipe.inputs[role]]);
  };
  if (kind == NormKind::kNone || at::GradMode::is_enabled()) return norm();
  Tensor& kept =
      call.normed_inputs[{recipe.inputs[role], role, static_cast<int>(kind)}];
  if (!kept.defined()) kept = norm();
  return kept;
}

const AlignedWeights& weights_by(const ObservedCall& call,
                                 const Recipe& recipe) {
  if (recipe.fused == FusedOrder::kPartByPart) return call.weights;
  const auto entry = call.weights_by_order.find(recipe.fused);
  require(entry != call.weights_by_order.end());
  return entry->second;
}

}  // namespace

AlignedWeights::Matrix matrix_by(const ObservedCall& call, const Recipe& recipe,
                                 int index) {
  AlignedWeights::Matrix used = *weights_by(call, recipe).matrices()[index];
  if (!used.weight.defined()) return used;
  if (used.orientation == Orientation::kUnknown && is_in_out(recipe, index)) {
    used.weight = used.weight.t();
  }
  if (recipe.transposed[index]) {
    require(used.weight.size(0) == used.weight.size(1));
    used.weight = used.weight.t();
  }
  if (recipe.without_bias[index]) used.bias = Tensor();
  return used;
}

Tensor project(const ObservedCall& call, const Recipe& recipe,
               const Tensor& input, int index) {
  const auto used = matrix_by(call, recipe, index);
  if (!used.weight.defined()) return input;
  require(used.weight.size(1) == input.size(-1));
  return narrowed(at::linear(input, used.weight, optional(used.bias)), recipe);
}

std::array<Tensor, 3> inputs_of(const ObservedCall& call,
                                const Recipe& recipe) {
  std::array<Tensor, 3> inputs;
  for (int role = 0; role < 3; ++role) {
    const Tensor& input = call.inputs[recipe.inputs[role]];
    const bool normed =
        recipe.normed_inputs == NormedInputs::kAll || role == 0 ||
        (recipe.normed_inputs == NormedInputs::kWithItself &&
         call.same_as[recipe.inputs[role]] == 0 && !call.is_given_keys());
    inputs[role] = normed ? normed_input(call, recipe, role) : input;
  }
  if (recipe.queries_among_keys != QueriesAmongKeys::kNone &&
      call.is_given_keys()) {
    require(!call.is_masked());
    const bool before = recipe.queries_among_keys == QueriesAmongKeys::kBefore;
    for (const int role : {1, 2}) {
      const Tensor& own = inputs[role];
      require(own.size(-1) == inputs[0].size(-1));
      inputs[role] = before ? at::cat({inputs[0], own}, -2)
                            : at::cat({own, inputs[0]}, -2);
    }
  }
  return inputs;
}

std::array<Tensor, 3> project_inputs(const ObservedCall& call,
                                     const Recipe& recipe,
                                     const std::array<Tensor, 3>& inputs) {
  constexpr Detached kInputs[] = {Detached::kQuery, Detached::kKey,
                                  Detached::kValue};
  std::array<Tensor, 3> projected;
  for (int role = 0; role < 3; ++role) {
    projected[role] = call.has_weights && !recipe.unprojected[role]
                          ? project_shared(call, recipe, role, inputs[role])
                          : narrowed(inputs[role], recipe);
    projected[role] = detached(projected[role], recipe, kInputs[role]);
    if (role > 0)
      projected[role] =
          detached(projected[role], recipe, Detached::kKeyAndValue);
    const bool activated =
        recipe.activated != Activated::kNone &&
        (role < 2 || recipe.activated != Activated::kQueryAndKey);
    if (activated) projected[role] = recipe.activation(projected[role]);
  }
  return projected;
}

// ---- Faults ----------------------------------------------------------------

namespace {

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

const std::vector<Fault> kProjectionFaults = {
    {"query_weight_transposed",
     "The query matrix W_q is transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed[0] = true; }}}},
    {"key_weight_transposed",
     "The key matrix W_k is transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed[1] = true; }}}},
    {"value_weight_transposed",
     "The value matrix W_v is transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed[2] = true; }}}},
    {"all_weights_transposed",
     "The weight matrices are transposed.",
     kTransposedRemedy,
     {{[](Recipe& r) { r.transposed = {true, true, true, true}; },
       "All four are."},
      {[](Recipe& r) { r.transposed = {true, true, true, false}; },
       "All are but the output matrix."}}},
    {"query_key_swapped",
     "Queries are projected by the key matrix, keys by the query matrix.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {1, 0, 2}; }}}},
    {"query_value_swapped",
     "Queries are projected by the value matrix, values by the query matrix.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {2, 1, 0}; }}}},
    {"key_value_swapped",
     "Keys are projected by the value matrix, values by the key matrix.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 2, 1}; }}}},
    {"projections_rotated",
     "The three input matrices are in the wrong order.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {1, 2, 0}; },
       "Queries get W_k, keys W_v, values W_q."},
      {[](Recipe& r) { r.matrices = {2, 0, 1}; },
       "Queries get W_v, keys W_q, values W_k."}}},
    {"one_projection_for_all",
     "One matrix projects queries, keys and values.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 0, 0}; }, "It is W_q."},
      {[](Recipe& r) { r.matrices = {1, 1, 1}; }, "It is W_k."},
      {[](Recipe& r) { r.matrices = {2, 2, 2}; }, "It is W_v."}}},
    {"query_weight_for_keys",
     "Keys are projected by W_q, not by W_k.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 0, 2}; }}}},
    {"key_weight_for_values",
     "Values are projected by W_k, not by W_v.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 1, 1}; }}}},
    {"query_weight_for_values",
     "Values are projected by W_q, not by W_v.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 1, 0}; }}}},
    {"key_weight_for_queries",
     "Queries are projected by W_k, not by W_q.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {1, 1, 2}; }}}},
    {"value_weight_for_keys",
     "Keys are projected by W_v, not by W_k.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {0, 2, 2}; }}}},
    {"value_weight_for_queries",
     "Queries are projected by W_v, not by W_q.",
     kMatrixRemedy,
     {{[](Recipe& r) { r.matrices = {2, 1, 2}; }}}},
    {"value_from_key",
     "Values are projected from the key input; the value input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 1, 1}; }}}},
    {"key_from_value",
     "Keys are projected from the value input; the key input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 2, 2}; }}}},
    {"key_from_query",
     "Keys are projected from the query input; the key input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 0, 2}; }},
      {[](Recipe& r) { r.inputs = {0, 0, 0}; }, "So are the values."}}},
    {"value_from_query",
     "Values are projected from the query input; the value input is not "
     "used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 1, 0}; }}}},
    {"query_from_key",
     "Queries are projected from the key input; the query input is not used.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {1, 1, 2}; }},
      {[](Recipe& r) { r.inputs = {1, 1, 1}; },
       "Everything comes from the key input."}}},
    {"inputs_swapped",
     "The inputs are in the wrong order.",
     kInputRemedy,
     {{[](Recipe& r) { r.inputs = {0, 2, 1}; },
       "Keys are projected from the value input, values from the key input."},
      {[](Recipe& r) { r.inputs = {1, 0, 2}; },
       "Queries are projected from the key input, keys from the query "
       "input."}}},
    {"biases_forgotten", "No bias is added.", kBiasRemedy, {{[](Recipe& r) {
       r.without_bias = {true, true, true, true};
     }}}},
    {"input_biases_forgotten",
     "The biases of the query, key and value projections are not added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias = {true, true, true, false}; }}}},
    {"query_bias_forgotten",
     "The bias of the query projection is not added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias[0] = true; }}}},
    {"value_bias_forgotten",
     "The bias of the value projection is not added.",
     kBiasRemedy,
     {{[](Recipe& r) { r.without_bias[2] = true; }}}},
    {"input_projection_forgotten",
     "Heads are cut from an input itself, without a projection.",
     "Project first, with W_q, W_k and W_v: it is the projections that make "
     "the heads differ from slices of the input.",
     {{[](Recipe& r) { r.unprojected = {true, true, true}; }},
      {[](Recipe& r) { r.unprojected[0] = true; }, "It is the queries."},
      {[](Recipe& r) { r.unprojected[1] = true; }, "It is the keys."},
      {[](Recipe& r) { r.unprojected[2] = true; }, "It is the values."}}},
    {"batch_and_sequence_exchanged",
     "Batch and sequence are exchanged: each position attends to the same "
     "position of the other batch items.",
     "The code takes (L, B, E), as nn.MultiheadAttention does unless "
     "batch_first=True, and gets (B, L, E). Exchange the first two "
     "dimensions on the way in and out, or state batch_first=False.",
     {{[](Recipe& r) { r.batch_exchanged = true; }}}},
};

}  // namespace multihead::diagnosis
