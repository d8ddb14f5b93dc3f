// SPDX-License-Identifier: MIT
//
// Whether what came out is what a recipe gives, but for rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/numbers.h"
#include "diagnosis/stages/recipe.h"
#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

/// What rounding to `precision` may do to a tensor of attention whose largest
/// element is `largest`.
double rounding_allowed(at::ScalarType precision, const Stages& stages,
                        double largest);

/// Whether that is so much that a result tells nothing: scores are too large.
bool is_lost_in_rounding(at::ScalarType precision, const Stages& stages);

/// The rows of out, (B, Lq) or (B, H, Lq), in which some key was seen;
/// undefined: all of them.
at::Tensor seeing_rows(const ObservedCall& call, const Stages& stages);

/// Whether no query sees a key, so that nothing can be compared.
bool sees_nothing(const Stages& stages);

/// Gradients of Σ out·dout for query, key and value where the call has them.
std::array<at::Tensor, 3> gradients(const ObservedCall& call,
                                    const Recipe& recipe);

/// What remains of a tensor, and as a share of what rounding may do.
struct Error {
  double difference = std::numeric_limits<double>::infinity();
  double share = std::numeric_limits<double>::infinity();
};

/// Errors of what a call returned, judged in the order of the members; 0 for
/// what it did not return. The first that is beyond rounding ends it: where out
/// is wrong, the errors of weights and gradients stay infinite. So do all three
/// where the recipe cannot be followed.
struct Errors {
  Error out, weights, gradients;

  bool fit() const {
    return out.share <= 1 && weights.share <= 1 && gradients.share <= 1;
  }
};
Errors errors(const ObservedCall& call, const Recipe& recipe,
              at::ScalarType precision);

/// How many bits of out the recipe predicts: for each element log2 of its usual
/// size as a share of what is left of it. An output that has nothing to do with
/// the recipe has that many by chance once in 2^bits.
double bits_in_common(const ObservedCall& call, const Recipe& recipe);

}  // namespace multihead::diagnosis
