// SPDX-License-Identifier: MIT
//
// Which tokens of a sequence lie on which process.
#pragma once

#include <cstdint>
#include <vector>

#include "multihead/distributed.h"

namespace multihead::distributed {

/// Tokens that follow each other, in a process's rows and in the sequence.
struct Span {
  int64_t row = 0;       ///< of the first one, on its process
  int64_t position = 0;  ///< of the first one, in the sequence
  int64_t length = 0;
  size_t document = 0;  ///< which one `position` is in
};

/// How many tokens each process has.
using Lengths = std::vector<int64_t>;

int64_t total(const Lengths& lengths);

/// Those of process `rank`; none is empty.
std::vector<Span> spans_of(TokenOrder order, const Lengths& lengths, int rank);

/// The same, cut where documents begin: document n has the tokens from
/// starts[n] to starts[n + 1], and positions are those in it.
std::vector<Span> cut(const std::vector<Span>& spans,
                      const std::vector<int64_t>& starts);

/// How many tokens `order` gives each process of a sequence of `length`.
/// kContiguous: as torch.chunk and DTensor's Shard cut it.
Lengths lengths_of(TokenOrder order, int64_t length, int processes);

}  // namespace multihead::distributed
