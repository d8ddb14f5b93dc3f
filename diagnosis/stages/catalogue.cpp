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

bool is_of_core(const Fault& fault) {
  return *fault.stage >= Stage::kScores && *fault.stage <= Stage::kContext &&
         fault.name != "softmax_not_normalised";
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

}  // namespace multihead::diagnosis
