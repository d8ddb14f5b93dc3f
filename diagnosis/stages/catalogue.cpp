// SPDX-License-Identifier: MIT
#include "diagnosis/stages/catalogue.h"

#include "diagnosis/stages/faults_by_stage.h"

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
    for (auto* part : {faults_of_projections, faults_of_heads, faults_of_scores,
                       faults_of_masks, faults_of_weights, faults_of_output}) {
      for (const Fault& fault : part()) all.push_back(fault);
    }
    return all;
  }();
  return faults;
}

namespace {

const Convention kConventions[] = {
    {"mask_keeps", "The mask is read as True (or 1) = may attend.",
     "If True is meant to block, say mask=\"blocked\".",
     [](const Run& run) {
       return run.mask.numbers.defined() &&
              run.mask.meaning == MaskMeaning::kUnknown;
     },
     [](Recipe& r) { r.mask_keeps = true; }},
    {"padding_keeps", "The padding mask is read as True (or 1) = a real token.",
     "If True is meant to mark padding, say mask=\"blocked\".",
     [](const Run& run) {
       return run.padding.numbers.defined() &&
              run.padding.meaning == MaskMeaning::kUnknown;
     },
     [](Recipe& r) { r.padding_keeps = true; }},
    {"weights_in_out",
     "The matrices are read as (in, out): input @ W. nn.Linear stores "
     "(out, in).",
     "",
     [](const Run& run) {
       for (const auto* matrix : {&run.weights.query, &run.weights.key,
                                  &run.weights.value, &run.weights.output}) {
         if (matrix->weight.defined() &&
             matrix->orientation == Orientation::kUnknown) {
           return true;
         }
       }
       return false;
     },
     [](Recipe& r) { r.weights_in_out = true; }},
    {"fused_head_by_head",
     "The fused projection is cut head by head (q, k, v of head 0, then of "
     "head 1, …), not into all queries, all keys, all values.",
     "",
     [](const Run& run) { return run.weights.fused != FusedOrder::kNotFused; },
     [](Recipe& r) { r.fused_head_by_head = true; }},
    {"causal_by_itself",
     "It is causal by itself: no query sees a later key, without being "
     "asked.",
     "", [](const Run& run) { return run.causal == CausalRequest::kUnknown; },
     [](Recipe& r) { r.causal_by_itself = true; }},
    {"drops_output_too",
     "In training it drops elements of the output too, not only weights.", "",
     [](const Run& run) {
       return run.training && run.kept_output.defined() &&
              run.kept_weights.defined();
     },
     [](Recipe& r) { r.dropout = Dropout::kOnOutputToo; }},
    {"drops_output_instead",
     "In training it drops elements of the output and no weights, as vision "
     "transformers often do.",
     "nn.MultiheadAttention drops weights.",
     [](const Run& run) {
       return run.training && run.kept_output.defined() &&
              !run.kept_weights.defined();
     },
     [](Recipe& r) { r.dropout = Dropout::kOnOutput; }},
};

}  // namespace

std::span<const Convention> all_conventions() { return kConventions; }

}  // namespace multihead::diagnosis
