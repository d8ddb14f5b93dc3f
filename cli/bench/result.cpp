// SPDX-License-Identifier: MIT
#include "cli/bench/result.h"

#include <algorithm>

namespace cli {

std::string name(Status status) {
  static constexpr const char* kNames[] = {"ok", "wrong", "failed"};
  return kNames[static_cast<int>(status)];
}

const Entry* Measurement::find(Implementation who) const {
  const auto entry = std::ranges::find(entries, who, &Entry::who);
  return entry == entries.end() ? nullptr : &*entry;
}

std::vector<TargetResult> target_results(const Measurement& m) {
  std::vector<TargetResult> all;
  if (!m.right()) return all;
  const Target& target = m.test->target;
  if (m.threads == 2 && target.scaling > 0 && m.scaling)
    all.push_back({"two threads over one", Implementation::kOurs,
                   target.scaling, *m.scaling});
  if (m.threads != 1) return all;
  if (target.share > 0)
    all.push_back(
        {"share of peak", Implementation::kOurs, target.share, m.ours().share});
  for (const auto& [who, ratio] : target.ratios)
    if (const Entry* entry = m.find(who);
        entry && entry->status == Status::kRight)
      all.push_back({"times " + name(who), who, ratio, entry->ratio});
  const Entry* sdpa = m.find(Implementation::kSdpa);
  if (target.memory > 0 && sdpa && sdpa->memory && m.ours().memory)
    all.push_back({.what = "memory of SDPA over ours",
                   .who = Implementation::kSdpa,
                   .wanted = target.memory,
                   .reached = static_cast<double>(*sdpa->memory) /
                              std::max<int64_t>(1, *m.ours().memory),
                   .of_memory = true});
  return all;
}

}  // namespace cli
