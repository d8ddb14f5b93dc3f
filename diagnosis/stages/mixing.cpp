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

template <int which, bool turned>
Convention of_scores() {
  return {"scores_mixed",
          "Heads are mixed by learned numbers before the softmax (talking "
          "heads).",
          "nn.MultiheadAttention has no such numbers.",
          has_mix<which>,
          [](Recipe& r) { r.mixed_scores = {which, turned}; },
          Sign::kScores};
}

template <int which, bool turned>
Convention of_weights() {
  return {"weights_mixed",
          "Heads are mixed by learned numbers behind the softmax (talking "
          "heads).",
          "nn.MultiheadAttention has no such numbers.",
          has_mix<which>,
          [](Recipe& r) { r.mixed_weights = {which, turned}; },
          Sign::kWeights};
}

}  // namespace

const std::vector<Convention> kMixing = {
    of_scores<0, false>(),  of_scores<0, true>(),   of_scores<1, false>(),
    of_scores<1, true>(),   of_weights<0, false>(), of_weights<0, true>(),
    of_weights<1, false>(), of_weights<1, true>(),
};

}  // namespace multihead::diagnosis
