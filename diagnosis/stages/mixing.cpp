// SPDX-License-Identifier: MIT
//
// Talking heads (Shazeer et al., 2020): what one head scores, or weighs, is a
// learned sum of what all of them do. CaiT (Touvron et al., 2021) mixes both.
#include <ATen/ops/matmul.h>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

Tensor mixed(const ObservedCall& call, const MixedHeads& how, const Tensor& x) {
  if (how.which < 0) return x;
  require(how.which < static_cast<int>(call.mixes.size()));
  const HeadMix& mix = call.mixes[how.which];
  const Tensor weight = how.turned ? mix.weight.t() : mix.weight;
  const Tensor sums = weight.matmul(x.flatten(2)).view(x.sizes());
  return mix.bias.defined() ? sums + mix.bias.view({-1, 1, 1}) : sums;
}

namespace {

template <int which>
Concern has_mix(const ObservedCall& call) {
  return maybe(shows_its_way(call) &&
               static_cast<int>(call.mixes.size()) > which);
}

constexpr auto kScores = &Recipe::mixed_scores;
constexpr auto kWeights = &Recipe::mixed_weights;

template <auto mixes, int which, bool turned>
Convention heads_mixed() {
  constexpr bool before = mixes == kScores;
  return {before ? "scores_mixed" : "weights_mixed",
          before ? "Heads are mixed by learned numbers before the softmax "
                   "(talking heads)."
                 : "Heads are mixed by learned numbers behind the softmax "
                   "(talking heads).",
          "nn.MultiheadAttention has no such numbers.",
          has_mix<which>,
          [](Recipe& r) { r.*mixes = {which, turned}; },
          before ? Sign::kScores : Sign::kWeights};
}

}  // namespace

// At most one before the softmax and one behind it, in either order of names.
const std::vector<Convention> kMixing = {
    heads_mixed<kScores, 0, false>(),  heads_mixed<kScores, 0, true>(),
    heads_mixed<kScores, 1, false>(),  heads_mixed<kScores, 1, true>(),
    heads_mixed<kWeights, 0, false>(), heads_mixed<kWeights, 0, true>(),
    heads_mixed<kWeights, 1, false>(), heads_mixed<kWeights, 1, true>(),
};

}  // namespace multihead::diagnosis
