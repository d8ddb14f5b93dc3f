// SPDX-License-Identifier: MIT
//
// How much a search may do before it is cut short. What it does is counted, not
// timed: a verdict is the same on every machine, however busy that is.
#pragma once

#include <algorithm>
#include <span>

#include "diagnosis/dump/run.h"

namespace multihead::diagnosis {

/// What one candidate costs beside one run, in nanoseconds or so: so much for
/// any, and more for each score and for the products of large tensors.
inline double cost(const Run& run) {
  const Sizes& n = run.sizes;
  const double rows = static_cast<double>(n.batch) * n.queries;
  const double scores = rows * n.heads * n.keys;
  const double weights =
      run.has_weights ? static_cast<double>(n.embed_dim) * n.embed_dim : 0.0;
  const double products = scores * (n.width + n.value_width) + rows * weights;
  return 2e5 + 20 * scores + products / 2;
}

/// Whether a run costs many times what the cheapest does. Such runs come last:
/// what smaller ones show is looked for there.
inline bool is_large(const Run& run, std::span<const Run> among) {
  return std::any_of(among.begin(), among.end(), [&](const Run& other) {
    return cost(run) > 8 * cost(other);
  });
}

class Effort {
 public:
  /// One candidate beside one run.
  void spend(const Run& run) { left_ -= cost(run); }
  bool is_spent() const { return left_ <= 0; }

 private:
  double left_ = 60e9;
};

}  // namespace multihead::diagnosis
