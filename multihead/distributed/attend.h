// SPDX-License-Identifier: MIT
//
// Attention over the tokens of several processes, by either method.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <tuple>

#include "multihead/distributed/checks.h"

namespace multihead::distributed {

/// Where the tokens of a sequence lie.
struct Location {
  std::string group;
  TokenOrder order;
  std::string_view order_name() const;
};

/// out (B, H, Lq, Dv) of query's type and logsumexp (B, H, Lq). Differentiable.
std::tuple<at::Tensor, at::Tensor> ring(const OwnCall& call,
                                        const Location& location);
std::tuple<at::Tensor, at::Tensor> ulysses(const OwnCall& call,
                                           const Location& location);

}  // namespace multihead::distributed
