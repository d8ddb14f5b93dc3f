// SPDX-License-Identifier: MIT
#include "diagnosis/stages/dropping.h"

#include <ATen/TensorOperators.h>

#include "diagnosis/stages/impossible.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// `draws` (1 = kept) on x, as torch.dropout would.
Tensor drop(const Tensor& x, const Tensor& draws, double p) {
  need(draws.defined());
  return x * (draws / (1.0 - p));
}

}  // namespace

bool drops(const Run& run, const Recipe& recipe) {
  return run.training
             ? run.dropout_p > 0.0 && recipe.dropout != Dropout::kExchanged
             : recipe.dropout == Dropout::kLeftOn ||
                   recipe.dropout == Dropout::kLeftOnOutput ||
                   recipe.dropout == Dropout::kExchanged;
}

Tensor drop_weights(const Run& run, const Recipe& recipe,
                    const Tensor& weights) {
  if (!drops(run, recipe)) return weights;
  const double p = run.dropout_p;
  switch (recipe.dropout) {
    case Dropout::kOnWeights:
    case Dropout::kOnOutputToo:
    case Dropout::kLeftOn:
    case Dropout::kExchanged:
      return drop(weights, run.kept_weights, p);
    case Dropout::kNotRescaled:
      need(run.kept_weights.defined());
      return weights * run.kept_weights;
    case Dropout::kKeepsTheDropped:
      need(run.kept_weights.defined());
      return drop(weights, 1.0 - run.kept_weights, p);
    case Dropout::kBeforeMask:
    case Dropout::kBeforeSoftmax:
    case Dropout::kOnContext:
    case Dropout::kOnMerged:
    case Dropout::kOnOutput:
    case Dropout::kLeftOnOutput:
    case Dropout::kMissing:
      return weights;
  }
  throw Impossible();
}

Tensor drop_later(const Run& run, const Recipe& recipe, const Tensor& x,
                  Dropout where) {
  if (recipe.dropout != where || !drops(run, recipe)) return x;
  const Tensor& draws =
      where == Dropout::kOnContext ? run.kept_context : run.kept_output;
  need(draws.defined() && draws.sizes() == x.sizes());
  return drop(x, draws, run.dropout_p);
}

Tensor drop_scores(const Run& run, const Recipe& recipe, const Tensor& scores,
                   Dropout where) {
  if (recipe.dropout != where || !drops(run, recipe)) return scores;
  return drop(scores, run.kept_weights, run.dropout_p);
}

}  // namespace multihead::diagnosis
