// SPDX-License-Identifier: MIT
#include <algorithm>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

std::string_view name_of(Stage stage) {
  constexpr std::string_view kNames[] = {
      "projections", "heads", "scores", "masked scores",    "weights",
      "context",     "merge", "output", "returned weights", "gradients"};
  return kNames[static_cast<int>(stage)];
}

std::span<const Fault> all_faults() {
  static const std::vector<Fault> faults = [] {
    std::vector<Fault> all;
    for (const auto& [stage, list] :
         {std::pair(Stage::kProjections, &kProjectionFaults),
          {Stage::kHeads, &kHeadFaults},
          {Stage::kScores, &kScaleFaults},
          {Stage::kMaskedScores, &kMaskFaults},
          {Stage::kWeights, &kWeightFaults},
          {Stage::kOutput, &kOutputFaults}}) {
      for (const Fault& fault : *list) {
        all.push_back(fault);
        if (!fault.stage) all.back().stage = stage;
      }
    }
    std::ranges::stable_sort(all, {}, &Fault::stage);
    return all;
  }();
  return faults;
}

namespace {

const Convention kConventions[] = {
    {"mask_keeps", "The mask is read as True (or 1) = may attend.",
     "If True is meant to block, say mask=\"blocked\".",
     [](const ObservedCall& call) {
       return call.mask.numbers.defined() &&
              call.mask.meaning == MaskMeaning::kUnknown;
     },
     [](Recipe& r) { r.mask_keeps = true; },
     "True in the mask means may attend"},
    {"padding_keeps", "The padding mask is read as True (or 1) = a real token.",
     "If True is meant to mark padding, say mask=\"blocked\".",
     [](const ObservedCall& call) {
       return call.padding.numbers.defined() &&
              call.padding.meaning == MaskMeaning::kUnknown;
     },
     [](Recipe& r) { r.padding_keeps = true; },
     "True in the padding mask means a real token"},
    {"weights_in_out",
     "The matrices are read as (in, out): input @ W. nn.Linear stores "
     "(out, in).",
     "",
     [](const ObservedCall& call) {
       return std::ranges::any_of(call.weights.matrices(), [](const auto* m) {
         return m->weight.defined() && m->orientation == Orientation::kUnknown;
       });
     },
     [](Recipe& r) { r.weights_in_out = true; }},
    {"fused_head_by_head",
     "The fused projection is cut head by head (q, k, v of head 0, then of "
     "head 1, …), not into all queries, all keys, all values.",
     "",
     [](const ObservedCall& call) {
       return call.weights.fused != FusedOrder::kNotFused;
     },
     [](Recipe& r) { r.fused_head_by_head = true; }},
    {"keys_multiplied_first",
     "Nothing names its matrices: the one whose product comes first in the "
     "scores is read as that of the keys.",
     "",
     [](const ObservedCall& call) { return call.roles_by_order; },
     [](Recipe& r) { r.matrices = {1, 0, 2}; }},
    {"causal_by_itself",
     "It is causal by itself: no query sees a later key, without being "
     "asked.",
     "",
     [](const ObservedCall& call) {
       return call.causal == CausalRequest::kUnknown;
     },
     [](Recipe& r) { r.causal_by_itself = true; }, "it is meant to be causal"},
    {"drops_output_too",
     "In training it drops elements of the output too, not only weights.", "",
     [](const ObservedCall& call) {
       return call.training && call.kept_output.defined() &&
              call.kept_weights.defined();
     },
     [](Recipe& r) { r.dropout = Dropout::kOnOutputToo; }},
    {"drops_output_instead",
     "In training it drops elements of the output and no weights, as vision "
     "transformers often do.",
     "nn.MultiheadAttention drops weights.",
     [](const ObservedCall& call) {
       return call.training && call.kept_output.defined() &&
              !call.kept_weights.defined();
     },
     [](Recipe& r) { r.dropout = Dropout::kOnOutput; }},
};

}  // namespace

std::span<const Convention> all_conventions() { return kConventions; }

}  // namespace multihead::diagnosis
