// SPDX-License-Identifier: MIT
#include "diagnosis/search/cuts.h"

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

std::vector<Cut> other_cuts(const ObservedCall& call) {
  std::vector<Cut> cuts = {
      [](Recipe& r) { r.split.fill(split_by_feature); },
      [](Recipe& r) { r.split.fill(split_as_viewed); },
      [](Recipe& r) { r.fused = FusedOrder::kHeadByHead; }};
  const auto add = [&](const Fault& fault) {
    for (const Way& way : fault.ways) cuts.push_back(way.apply);
  };
  const bool is_fused = !call.weights_by_order.empty();
  const bool is_done = call.turns_heads || has_norm(call, call.sizes.width);
  for (const Fault& fault : kHeadFaults) {
    const bool of_others =
        fault.name == "keys_are_queries" || fault.name == "queries_are_keys";
    if (is_fused && fault.name == "fused_view_without_permute") add(fault);
    if (is_done && of_others) add(fault);
  }
  for (const Fault& fault : kProjectionFaults) {
    // Which axis is that of positions, what is done to heads must show.
    if (is_done && fault.name != "batch_and_sequence_exchanged") add(fault);
  }
  return cuts;
}

}  // namespace multihead::diagnosis
