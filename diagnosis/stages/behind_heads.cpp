// SPDX-License-Identifier: MIT
//
// What is done to what the heads return, behind them, without being wrong:
// norms, residual connections, gains.
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// ---- Norms -----------------------------------------------------------------

using enum NormKind;

template <NormKind kind>
Concern norm_of_context(const ObservedCall& call) {
  return norm_of(call, kind, {call.sizes.value_width});
}

template <NormKind kind>
Concern norm_of_merged(const ObservedCall& call) {
  return norm_of(call, kind, {call.sizes.value_width * call.sizes.heads});
}

template <NormKind kind>
Concern norm_of_output(const ObservedCall& call) {
  return norm_of(call, kind, {call.out.size(-1)});
}

Concern norm_by_group(const ObservedCall& call) {
  return maybe(std::ranges::any_of(
      call.norms, [](const Norm& norm) { return norm.groups > 0; }));
}

template <NormKind kind>
void norm_context(Recipe& r) {
  r.context_norm = kind;
}

template <NormKind kind>
void norm_merged(Recipe& r) {
  r.merged_norm = kind;
}

template <NormKind kind, Residual residual = Residual::kNone>
void norm_last(Recipe& r) {
  r.output_norm = kind;
  r.residual = residual;
}

// ---- Residual connections --------------------------------------------------

bool adds_up(const ObservedCall& call) {
  return call.has_weights && call.out.sizes() == call.inputs[0].sizes();
}

Concern residual(const ObservedCall& call) {
  return maybe(adds_up(call) && has_norm(call, call.out.size(-1)));
}

// Where no norm says that this is a whole sublayer.
Concern residual_alone(const ObservedCall& call) {
  return maybe(adds_up(call) && !has_norm(call, call.out.size(-1)));
}

Concern values_added(const ObservedCall& call) {
  return maybe(call.has_weights && shows_its_way(call) &&
               call.sizes.queries == call.sizes.keys);
}

Concern relu_of_sum(const ObservedCall& call) {
  return maybe(adds_up(call) && shows_its_way(call) &&
               call.out.ge(0).all().item<bool>());
}

Concern set_block(const ObservedCall& call) {
  const Tensor& matrix = call.weights.output.weight;
  return maybe(call.has_weights && shows_its_way(call) && matrix.defined() &&
               matrix.dim() == 2 && matrix.size(0) == matrix.size(1));
}

Concern gain(const ObservedCall& call) {
  return maybe(call.has_weights && output_gain(call).defined());
}

Concern gain_and_residual(const ObservedCall& call) {
  return adds_up(call) ? gain(call) : Concern::kNo;
}

template <NormKind kind>
Concern residual_and_norm(const ObservedCall& call) {
  return adds_up(call) ? norm_of_output<kind>(call) : Concern::kNo;
}

// ---- Words -----------------------------------------------------------------

constexpr std::string_view kNormOfContext =
    "What the heads return passes a norm before the output projection.";
constexpr std::string_view kNormLast = "The output passes a norm.";
constexpr std::string_view kPostNorm =
    "The query input is added to the output, and the sum passes a norm: the "
    "residual connection of the block around attention.";
constexpr std::string_view kNormThenSum =
    "The output passes a norm, and the query input is added: the residual "
    "connection of the block around attention.";
}  // namespace

const std::vector<Convention> kBehindHeads = {
    {"norm_of_context", kNormOfContext, "", norm_of_context<kLayer>,
     norm_context<kLayer>, Sign::kContext},
    {"norm_of_context", kNormOfContext, "", norm_of_context<kRms>,
     norm_context<kRms>, Sign::kContext},
    {"norm_of_context", kNormOfContext, "", norm_of_merged<kLayer>,
     norm_merged<kLayer>, Sign::kContext},
    {"norm_of_context", kNormOfContext, "", norm_of_merged<kRms>,
     norm_merged<kRms>, Sign::kContext},
    {"residual_and_norm", kPostNorm, "", residual_and_norm<kLayer>,
     norm_last<kLayer, Residual::kInput>, Sign::kNorm},
    {"residual_and_norm", kPostNorm, "", residual_and_norm<kRms>,
     norm_last<kRms, Residual::kInput>, Sign::kNorm},
    {"residual_and_norm", kPostNorm, "", residual_and_norm<kByHand>,
     norm_last<kByHand, Residual::kInput>, Sign::kNorm},
    {"residual_and_norm", kPostNorm, "", norm_by_group,
     norm_last<kGroup, Residual::kInput>, Sign::kNorm},
    {"norm_and_residual", kNormThenSum, "", residual_and_norm<kLayer>,
     norm_last<kLayer, Residual::kAfterNorm>, Sign::kNorm},
    {"norm_and_residual", kNormThenSum, "", residual_and_norm<kRms>,
     norm_last<kRms, Residual::kAfterNorm>, Sign::kNorm},
    {"norm_last", kNormLast, "", norm_of_output<kLayer>, norm_last<kLayer>,
     Sign::kNorm},
    {"norm_last", kNormLast, "", norm_of_output<kRms>, norm_last<kRms>,
     Sign::kNorm},
    {"values_added",
     "The projected values are added to the output, as a residual connection "
     "that may change the width.",
     "nn.MultiheadAttention returns the output projection alone.", values_added,
     [](Recipe& r) { r.residual = Residual::kValues; }, Sign::kSum},
    {"relu_of_sum",
     "The query input is added to the output, and the ReLU of this sum is what "
     "comes out, as of AutoInt.",
     "nn.MultiheadAttention returns the output projection alone.", relu_of_sum,
     [](Recipe& r) { r.residual = Residual::kThenRelu; }, Sign::kSum,
     "the ReLU of its sum is meant"},
    {"set_attention_block",
     "The projected queries are added to what the heads return, and to this "
     "sum the ReLU of its output projection: a block of the Set Transformer.",
     "nn.MultiheadAttention returns the output projection alone.", set_block,
     [](Recipe& r) { r.residual = Residual::kSetBlock; }, Sign::kSum},
    {"gain_and_residual",
     "The output is multiplied by a learned number, or by one for each "
     "feature, and the query input is added.",
     "", gain_and_residual,
     [](Recipe& r) {
       r.output_gain = true;
       r.residual = Residual::kInput;
     },
     Sign::kSum},
    {"output_gain",
     "The output is multiplied by a learned number, or by one for each "
     "feature.",
     "", gain, [](Recipe& r) { r.output_gain = true; }, Sign::kSum},
    {"residual",
     "The query input is added to the output: the residual connection of the "
     "block around attention.",
     "", residual, [](Recipe& r) { r.residual = Residual::kInput; },
     Sign::kSum},
    {"residual",
     "The input behind its norm is added to the output, as a residual "
     "connection.",
     "", residual, [](Recipe& r) { r.residual = Residual::kNormedInput; },
     Sign::kSum},
    {"residual_inside",
     "The query input is added to the output: the residual connection of the "
     "block around attention, inside of it.",
     "Where the block adds its input, too, it counts twice: add it in one "
     "place.",
     residual_alone, [](Recipe& r) { r.residual = Residual::kInput; },
     Sign::kSum,
     "its residual connection is meant to be inside, and not added again"},
    {"rounded", "The output is rounded to some digits: no gradient passes it.",
     "Round for printing only.",
     [](const ObservedCall& call) {
       return call.digits > 0 ? Concern::kShown : Concern::kNo;
     },
     [](Recipe& r) { r.rounded = true; }},
};

}  // namespace multihead::diagnosis
