// SPDX-License-Identifier: MIT
#include "cli/bench/grid.h"

#include "cli/cases/case.h"

namespace cli {
namespace {

std::string size_of(const AttentionCall& c) {
  std::string text = c10::str(" d", c.D, " L", c.Lq);
  if (c.Lk != c.Lq) text += c10::str("x", c.Lk);
  return text + " " + short_name(c.dtype);
}

}  // namespace

Target against_sdpa(double ratio, double share) {
  return {.share = share, .ratios = {{Who::kSdpa, ratio}}};
}

Target goal(std::span<const Goal> goals, const AttentionCall& call) {
  Target target;
  for (const Goal& g : goals)
    if (g.dtype == call.dtype && g.causal == call.options.is_causal &&
        (g.D == 0 || g.D == call.D) && g.from <= call.Lq)
      target = against_sdpa(g.ratio, g.share);
  return target;
}

AttentionCall square(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype) {
  return {.name = std::move(name),
          .B = 1,
          .H = 8,
          .Lq = L,
          .Lk = L,
          .D = D,
          .dtype = dtype};
}

AttentionCall causal(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype) {
  AttentionCall call = square(std::move(name), L, D, dtype);
  call.options.is_causal = true;
  return call;
}

BenchCase attention(std::string group, const AttentionCall& call,
                    Target target) {
  return {.group = std::move(group),
          .name = call.name + size_of(call),
          .call = call,
          .target = std::move(target)};
}

}  // namespace cli
