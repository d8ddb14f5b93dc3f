// SPDX-License-Identifier: MIT
//
// What stands beside attention in the same module without being wrong.
#include <ATen/TensorOperators.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/silu.h>

#include <algorithm>
#include <string>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// ---- Norms -----------------------------------------------------------------

using enum NormKind;

// Whether the gains of a norm are around 0, and may be counted from 1.
bool has_gains_from_one(const ObservedCall& call) {
  return std::ranges::any_of(call.norms, [](const Norm& norm) {
    return norm.weight.defined() && norm.weight.mean().item<double>() < 0.5;
  });
}

template <NormKind kind>
Concern norm_of_input(const ObservedCall& call) {
  const bool from_one = kind == kLayerFromOne || kind == kRmsFromOne;
  if (from_one && !has_gains_from_one(call)) return Concern::kNo;
  return norm_of(call, kind, {call.inputs[0].size(-1)});
}

template <NormKind kind>
Concern norm_of_heads(const ObservedCall& call) {
  return norm_of(call, kind, {call.sizes.width});
}

template <NormKind kind>
Concern norm_of_projected(const ObservedCall& call) {
  const Sizes& n = call.sizes;
  return n.heads > 1 ? norm_of(call, kind, {n.width * n.heads}) : Concern::kNo;
}

template <NormKind kind, NormedInputs which = NormedInputs::kAll>
void norm_first(Recipe& r) {
  r.input_norm = kind;
  r.normed_inputs = which;
}

Concern has_other_keys(const ObservedCall& call) {
  return maybe(call.has_weights && shows_its_way(call) &&
               call.is_given_keys() && !call.is_masked());
}

template <QueriesAmongKeys where>
void keys_with(Recipe& r) {
  r.queries_among_keys = where;
}

template <NormKind kind, bool is_wide = false>
void norm_heads(Recipe& r) {
  r.head_norm = kind;
  r.norm_is_wide = is_wide;
}

// ---- Activations -----------------------------------------------------------

Tensor relu(const Tensor& x) { return x.relu(); }
Tensor gelu(const Tensor& x) { return at::gelu(x); }
Tensor gelu_by_tanh(const Tensor& x) { return at::gelu(x, "tanh"); }
Tensor tanh(const Tensor& x) { return x.tanh(); }
Tensor silu(const Tensor& x) { return at::silu(x); }
Tensor elu(const Tensor& x) { return at::elu(x); }
Tensor leaky_relu(const Tensor& x) { return at::leaky_relu(x); }
Tensor sigmoid(const Tensor& x) { return x.sigmoid(); }

template <auto activation, Activated where>
void activate(Recipe& r) {
  r.activation = activation;
  r.activated = where;
}

// Without a trace only the usual one is tried, and for code that is right.
Concern activated(const ObservedCall& call) {
  return !call.has_weights     ? Concern::kNo
         : shows_its_way(call) ? Concern::kMaybe
                               : Concern::kAlone;
}

Concern activated_unusually(const ObservedCall& call) {
  return maybe(call.has_weights && shows_its_way(call));
}

// ---- Positions and scales --------------------------------------------------

Concern rotary(const ObservedCall& call) {
  return maybe(call.cosines.defined() ||
               (shows_its_way(call) && call.sizes.width % 2 == 0));
}

Concern rotary_of_its_own(const ObservedCall& call) {
  return maybe(shows_its_way(call) && !call.is_core());
}

template <Rotary kind>
void rotate(Recipe& r) {
  r.rotary = kind;
}

Concern learned_scale(const ObservedCall& call) {
  return call.numbers.empty()  ? Concern::kNo
         : shows_its_way(call) ? Concern::kMaybe
                               : Concern::kAlone;
}

template <PositionBias kind>
void bias(Recipe& r) {
  r.position_bias = kind;
}

template <LearnedScale scale>
void scale_learned(Recipe& r) {
  r.learned_scale = scale;
}

// By design, where a text that speaks of T5 has learned biases.
Concern unscaled(const ObservedCall& call) {
  const bool is_t5 = call.facts.contains("speaks_of_t5");
  return maybe(shows_its_way(call) && call.may_have_bias() && is_t5);
}

// Perhaps, beside a learned number or a bias.
Concern unscaled_beside_number(const ObservedCall& call) {
  const bool has_bias =
      call.may_have_bias() || call.facts.contains("takes_position_bias");
  const bool has_number = std::ranges::any_of(call.numbers, [](const auto& n) {
    return n.first.find("sink") == std::string::npos;
  });
  const bool is_other = unscaled(call) == Concern::kNo;
  return maybe(shows_its_way(call) && (has_bias || has_number) && is_other);
}

// Learned factors of what norms of queries and keys return.
Concern gains_of_heads(const ObservedCall& call) {
  const int64_t width = call.sizes.width;
  const bool has_gains = std::ranges::any_of(call.norms, [&](const Norm& norm) {
    return norm.weight.defined() && norm.weight.size(-1) == width;
  });
  const bool is_other = unscaled(call) == Concern::kNo;
  return maybe(shows_its_way(call) && has_gains && is_other);
}

Concern traced(const ObservedCall& call) { return maybe(shows_its_way(call)); }

Concern learned_sink(const ObservedCall& call) {
  return maybe(shows_its_way(call) && !call.numbers.empty());
}

Concern stated_bias(const ObservedCall& call) {
  return maybe(shows_its_way(call) &&
               call.facts.contains("says_position_bias"));
}

Concern position_bias(const ObservedCall& call) {
  const bool says_so = call.facts.contains("says_position_bias");
  return maybe((call.may_have_bias() || says_so) && shows_its_way(call));
}

Concern heads_by_feature(const ObservedCall& call) {
  const bool is_possible = call.has_weights && call.sizes.heads > 1;
  return !is_possible          ? Concern::kNo
         : shows_its_way(call) ? Concern::kMaybe
                               : Concern::kAlone;
}

// ---- Shared projections ----------------------------------------------------

// Of queries, keys and values, by the names of one tensor.
Shared shared(const ObservedCall& call) {
  std::array<std::string, 3> first;
  for (int role = 0; role < 3; ++role) {
    first[role] = call.weights.matrices()[role]->name;
    const auto other = call.facts.find("same_as:" + first[role]);
    if (other != call.facts.end()) first[role] = other->second;
  }
  // A fused matrix has one name for its parts.
  if (call.weights.fused != FusedOrder::kNotFused) return Shared::kNothing;
  const auto [query, key, value] = first;
  const bool meet = query == key, feed = key == value;
  return query.empty() || key.empty() || value.empty() ? Shared::kNothing
         : meet && feed                                ? Shared::kAll
         : meet                                        ? Shared::kQueryKey
         : feed                                        ? Shared::kKeyValue
         : query == value                              ? Shared::kQueryValue
                                                       : Shared::kNothing;
}

template <Shared which>
Concern shares(const ObservedCall& call) {
  return shared(call) == which ? Concern::kShown : Concern::kNo;
}

template <Shared which>
void share(Recipe& r) {
  r.shared = which;
}

// ---- Words -----------------------------------------------------------------

constexpr std::string_view kNormFirst =
    "The inputs pass a norm before they are projected.";
constexpr std::string_view kQueryNormFirst =
    "The query input passes a norm before it is projected, the others do not.";
constexpr std::string_view kItsNormFirst =
    "The query input passes a norm before anything is made of it; another "
    "input for keys and values does not.";
constexpr std::string_view kNormOfHeads =
    "Queries and keys pass a norm before they meet.";
constexpr std::string_view kNormOfProjected =
    "Queries and keys pass a norm, each of all its heads together, before they "
    "meet.";
constexpr std::string_view kRotary =
    "Queries and keys are turned by their positions (rotary positions).";
constexpr std::string_view kStraight =
    "A bias is added to the scores that falls with the distance in a straight "
    "line, as ALiBi. Its slopes are not judged, all else is.";
constexpr std::string_view kOneSided =
    "ALiBi subtracts the distance times its slopes, |i - j| where a query sees "
    "what is ahead of it, too.";
constexpr std::string_view kSharedRemedy =
    "nn.MultiheadAttention has a matrix for each. Where sharing was not meant, "
    "look for [layer] * 4, copy.copy, or one layer that is called for several: "
    "copy.deepcopy makes another.";
constexpr std::string_view kSharedMeant =
    "its projections are meant to share a matrix";
constexpr std::string_view kLearnedScale =
    "The scores are scaled by a number that is learned or given.";

}  // namespace

const std::vector<Convention> kStructure = {
    {"shared_matrices",
     "One small matrix projects every head, (d, d) instead of (H·d, E).",
     "nn.MultiheadAttention gives each head a projection of all features.",
     [](const ObservedCall& call) {
       return call.weights.shared ? Concern::kShown : Concern::kNo;
     },
     [](Recipe& r) { r.shared_matrices = true; }},
    {"shared_projections", "One matrix projects queries, keys and values.",
     kSharedRemedy, shares<Shared::kAll>, share<Shared::kAll>, Sign::kNone,
     kSharedMeant},
    {"shared_projections", "One matrix projects queries and keys.",
     kSharedRemedy, shares<Shared::kQueryKey>, share<Shared::kQueryKey>,
     Sign::kNone, kSharedMeant},
    {"shared_projections", "One matrix projects keys and values.",
     kSharedRemedy, shares<Shared::kKeyValue>, share<Shared::kKeyValue>,
     Sign::kNone, kSharedMeant},
    {"shared_projections", "One matrix projects queries and values.",
     kSharedRemedy, shares<Shared::kQueryValue>, share<Shared::kQueryValue>,
     Sign::kNone, kSharedMeant},
    {"heads_by_feature",
     "Heads are cut and merged feature by feature: head h takes the features "
     "h, h + H, h + 2H, …, an order that its matrices have learned.",
     "With weights of nn.MultiheadAttention, whose heads are blocks of "
     "features, it is wrong.",
     heads_by_feature,
     [](Recipe& r) {
       r.split.fill(split_by_feature);
       r.merge = merge_by_feature;
     },
     Sign::kHeads, "its weights were learned in this order of features"},
    {"norm_first", kNormFirst, "", norm_of_input<kLayer>, norm_first<kLayer>,
     Sign::kInputs},
    {"norm_first", kNormFirst, "", norm_of_input<kRms>, norm_first<kRms>,
     Sign::kInputs},
    {"norm_first", kNormFirst, "", norm_of_input<kLayerFromOne>,
     norm_first<kLayerFromOne>, Sign::kInputs},
    {"norm_first", kNormFirst, "", norm_of_input<kRmsFromOne>,
     norm_first<kRmsFromOne>, Sign::kInputs},
    {"norm_first", kNormFirst, "", norm_of_input<kByHand>, norm_first<kByHand>,
     Sign::kInputs},
    {"norm_first",
     "The input passes a norm over groups of features and all positions before "
     "it is projected.",
     "", norm_by_group, norm_first<kGroup>, Sign::kInputs},
    {"norm_of_query_first", kQueryNormFirst, "", norm_of_input<kLayer>,
     norm_first<kLayer, NormedInputs::kQuery>, Sign::kInputs},
    {"norm_of_query_first", kQueryNormFirst, "", norm_of_input<kRms>,
     norm_first<kRms, NormedInputs::kQuery>, Sign::kInputs},
    {"norm_of_query_first", kItsNormFirst, "", norm_of_input<kLayer>,
     norm_first<kLayer, NormedInputs::kWithItself>, Sign::kInputs},
    {"norm_of_query_first", kItsNormFirst, "", norm_of_input<kRms>,
     norm_first<kRms, NormedInputs::kWithItself>, Sign::kInputs},
    {"norm_of_query_first", kItsNormFirst, "", norm_of_input<kLayerFromOne>,
     norm_first<kLayerFromOne, NormedInputs::kWithItself>, Sign::kInputs},
    {"queries_among_keys",
     "The query input is among the keys and values, before the other input.",
     "", has_other_keys, keys_with<QueriesAmongKeys::kBefore>, Sign::kKeys},
    {"queries_among_keys",
     "The query input is among the keys and values, after the other input.", "",
     has_other_keys, keys_with<QueriesAmongKeys::kAfter>, Sign::kKeys},
    {"activated_projections",
     "A ReLU follows the projections, that of the output among them.", "",
     activated, activate<relu, Activated::kInputsAndOutput>, Sign::kHeads},
    {"activated_projections", "A ReLU follows the projections.", "", activated,
     activate<relu, Activated::kInputs>, Sign::kHeads},
    {"activated_projections",
     "A ReLU follows the projections of queries and keys.", "", activated,
     activate<relu, Activated::kQueryAndKey>, Sign::kHeads},
    {"activated_projections", "A GELU follows the projections.", "",
     activated_unusually, activate<gelu, Activated::kInputs>, Sign::kHeads},
    {"activated_projections", "A GELU (by tanh) follows the projections.", "",
     activated_unusually, activate<gelu_by_tanh, Activated::kInputs>,
     Sign::kHeads},
    {"activated_projections", "A tanh follows the projections.", "",
     activated_unusually, activate<tanh, Activated::kInputs>, Sign::kHeads},
    {"activated_projections",
     "A tanh follows the projections of queries and keys.", "",
     activated_unusually, activate<tanh, Activated::kQueryAndKey>,
     Sign::kHeads},
    {"activated_projections", "A SiLU follows the projections.", "",
     activated_unusually, activate<silu, Activated::kInputs>, Sign::kHeads},
    {"activated_projections", "An ELU follows the projections.", "",
     activated_unusually, activate<elu, Activated::kInputs>, Sign::kHeads},
    {"activated_projections", "A leaky ReLU follows the projections.", "",
     activated_unusually, activate<leaky_relu, Activated::kInputs>,
     Sign::kHeads},
    {"activated_projections", "A sigmoid follows the projections.", "",
     activated_unusually, activate<sigmoid, Activated::kInputs>, Sign::kHeads},
    {"norm_of_heads", kNormOfHeads, "", norm_of_heads<kLayer>,
     norm_heads<kLayer>, Sign::kHeads},
    {"norm_of_heads", kNormOfHeads, "", norm_of_heads<kRms>, norm_heads<kRms>,
     Sign::kHeads},
    {"norm_of_heads", kNormOfHeads, "", norm_of_heads<kRmsFromOne>,
     norm_heads<kRmsFromOne>, Sign::kHeads},
    {"norm_of_heads", kNormOfProjected, "", norm_of_projected<kLayer>,
     norm_heads<kLayer, true>, Sign::kHeads},
    {"norm_of_heads", kNormOfProjected, "", norm_of_projected<kRms>,
     norm_heads<kRms, true>, Sign::kHeads},
    {"norm_of_heads", kNormOfProjected, "", norm_of_projected<kRmsFromOne>,
     norm_heads<kRmsFromOne, true>, Sign::kHeads},
    {"norm_of_heads",
     "Queries and keys have unit length: their products are "
     "cosines.",
     "", norm_of_heads<kUnit>, norm_heads<kUnit>, Sign::kHeads},
    // Told by a trace alone.
    {"norm_after_turn", "That norm follows the turn by positions.", "",
     [](const ObservedCall&) { return Concern::kNo; },
     [](Recipe& r) { r.norm_after_turn = true; }},
    {"rotary_positions", kRotary, "", rotary, rotate<Rotary::kHalves>,
     Sign::kHeads},
    {"rotary_positions", kRotary, "", rotary, rotate<Rotary::kPairs>,
     Sign::kHeads},
    {"rotary_positions",
     "Queries and keys are turned by their positions (rotary positions) before "
     "their heads are cut, each head by angles of its own.",
     "", rotary, rotate<Rotary::kPairsOfAll>, Sign::kHeads},
    {"rotary_positions",
     "Queries and keys are turned by their positions (rotary positions), by "
     "angles of its own, which are not judged.",
     "", rotary_of_its_own, rotate<Rotary::kShown>, Sign::kHeads},
    {"values_turned",
     "The values are turned by their positions, too, as few models mean it.",
     "Turn queries and keys alone: what is read should not depend on where it "
     "stands.",
     rotary_of_its_own, [](Recipe& r) { r.turned[2] = true; }, Sign::kHeads,
     "its values are meant to be turned by their positions"},
    {"learned_scale", kLearnedScale, "", learned_scale,
     scale_learned<LearnedScale::kTimes>, Sign::kScores},
    {"learned_scale", kLearnedScale, "", learned_scale,
     scale_learned<LearnedScale::kOver>, Sign::kScores},
    {"learned_scale", kLearnedScale, "", learned_scale,
     scale_learned<LearnedScale::kTimesRoot>, Sign::kScores},
    {"learned_scale", kLearnedScale, "", learned_scale,
     scale_learned<LearnedScale::kOverRoot>, Sign::kScores},
    {"learned_scale", kLearnedScale, "", learned_scale,
     scale_learned<LearnedScale::kExp>, Sign::kScores},
    {"unscaled",
     "The scores are not scaled; its matrices are made for that, as those of "
     "T5 are.",
     "nn.MultiheadAttention divides them by the square root of the head width.",
     unscaled, scale_learned<LearnedScale::kOne>, Sign::kScores},
    {"unscaled_beside_number",
     "The scores are not scaled; a number that is learned, or a bias, may be "
     "meant for that.",
     "nn.MultiheadAttention divides them by the square root of the head width.",
     unscaled_beside_number, scale_learned<LearnedScale::kOne>, Sign::kScores,
     "its scores are meant not to be scaled, beside a number or a bias"},
    {"scale_in_gains",
     "The scores are not scaled: the gains of the norms of queries and keys "
     "may hold the scale.",
     "nn.MultiheadAttention divides them by the square root of the head width.",
     gains_of_heads, scale_learned<LearnedScale::kOne>, Sign::kScores,
     "the gains of the norms of queries and keys hold the scale"},
    {"softcap",
     "The scores s are capped: c·tanh(s / c), by a c of its own, as in Gemma "
     "2.",
     "nn.MultiheadAttention does not cap them.", traced,
     [](Recipe& r) { r.softcapped = true; }, Sign::kBias,
     "its scores are meant to be capped"},
    {"position_bias", kStraight, "", stated_bias, bias<PositionBias::kFalling>,
     Sign::kBias},
    {"falling_bias", kStraight,
     "nn.MultiheadAttention adds none: a position counts as any other.", traced,
     bias<PositionBias::kFalling>, Sign::kBias,
     "its scores are meant to fall with the distance"},
    {"rising_bias",
     "A bias is added to the scores that rises with the distance in a straight "
     "line: far keys get more weight than near ones.",
     "ALiBi subtracts the distance times its slopes.", traced,
     bias<PositionBias::kRising>, Sign::kBias,
     "far keys are meant to get more weight than near ones"},
    {"bias_of_late_keys",
     "A bias is added to the scores that rises in a straight line with the "
     "position of the key, also ahead of the query: late keys get more weight "
     "than early ones.",
     kOneSided, traced, bias<PositionBias::kLateKeys>, Sign::kBias,
     "late keys are meant to get more weight than early ones"},
    {"bias_of_early_keys",
     "A bias is added to the scores that falls in a straight line with the "
     "position of the key, also ahead of the query: early keys get more weight "
     "than late ones.",
     kOneSided, traced, bias<PositionBias::kEarlyKeys>, Sign::kBias,
     "early keys are meant to get more weight than late ones"},
    {"position_bias",
     "A bias of its own is added to the scores, of relative positions, "
     "perhaps. The bias is not judged, all else is.",
     "", position_bias, bias<PositionBias::kShown>, Sign::kBias},
    {"sinks",
     "One more score stands in each row, a learned number, and takes some of "
     "the weight (an attention sink).",
     "The weights of nn.MultiheadAttention add up to 1.", learned_sink,
     [](Recipe& r) { r.sink = Sink::kLearned; }, Sign::kWeights},
    {"sinks",
     "One more score of 0 stands in each row, and takes some of the weight: "
     "softmax plus one.",
     "The weights of nn.MultiheadAttention add up to 1.", traced,
     [](Recipe& r) { r.sink = Sink::kZero; }, Sign::kWeights,
     "its weights are meant to add up to less than 1"},
};

}  // namespace multihead::diagnosis
