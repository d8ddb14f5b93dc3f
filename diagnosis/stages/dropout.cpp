// SPDX-License-Identifier: MIT
#include "diagnosis/stages/dropout.h"

#include <ATen/TensorOperators.h>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// `draws` (1 = kept) on x, as torch.dropout would.
Tensor drop(const Tensor& x, const Tensor& draws, double p) {
  require(draws.defined());
  return x * (draws / (1.0 - p));
}

}  // namespace

bool drops(const ObservedCall& call, const Recipe& recipe) {
  return call.training
             ? call.dropout_p > 0.0 && recipe.dropout != Dropout::kExchanged
             : recipe.dropout == Dropout::kLeftOn ||
                   recipe.dropout == Dropout::kLeftOnOutput ||
                   recipe.dropout == Dropout::kExchanged;
}

Tensor drop_weights(const ObservedCall& call, const Recipe& recipe,
                    const Tensor& weights) {
  if (!drops(call, recipe)) return weights;
  const double p = call.dropout_p;
  switch (recipe.dropout) {
    case Dropout::kOnWeights:
    case Dropout::kOnOutputToo:
    case Dropout::kLeftOn:
    case Dropout::kExchanged:
      return drop(weights, call.kept_weights, p);
    case Dropout::kNotRescaled:
      require(call.kept_weights.defined());
      return weights * call.kept_weights;
    case Dropout::kKeepsTheDropped:
      require(call.kept_weights.defined());
      return drop(weights, 1.0 - call.kept_weights, p);
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

Tensor drop_later(const ObservedCall& call, const Recipe& recipe,
                  const Tensor& x, Dropout where) {
  if (recipe.dropout != where || !drops(call, recipe)) return x;
  const Tensor& draws =
      where == Dropout::kOnContext ? call.kept_context : call.kept_output;
  require(draws.defined() && draws.sizes() == x.sizes());
  return drop(x, draws, call.dropout_p);
}

Tensor drop_scores(const ObservedCall& call, const Recipe& recipe,
                   const Tensor& scores, Dropout where) {
  if (recipe.dropout != where || !drops(call, recipe)) return scores;
  return drop(scores, call.kept_weights, call.dropout_p);
}

// ---- Faults ----------------------------------------------------------------

namespace {

constexpr std::string_view kRemedy =
    "Drop weights, after the softmax, in training only, and divide what is "
    "kept by 1 - p: F.dropout(weights, p, training=self.training), or an "
    "nn.Dropout that eval() reaches.";

}  // namespace

const std::vector<Fault> kDropoutFaults = {
    {"dropout_left_on",
     "Dropout is on in evaluation: results are random.",
     kRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOn; }},
      {[](Recipe& r) { r.dropout = Dropout::kExchanged; },
       "And it is off in training."}}},
    {"dropout_missing",
     "Nothing is dropped in training.",
     kRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kMissing; }}}},
    {"dropout_before_softmax",
     "Scores are dropped, not weights: a dropped score is 0, which is a "
     "weight like any other.",
     kRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kBeforeSoftmax; }},
      {[](Recipe& r) { r.dropout = Dropout::kBeforeMask; },
       "The mask comes after."}}},
    {"dropout_not_rescaled",
     "The weights that are kept are not divided by 1 - p: the output shrinks "
     "in training.",
     kRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kNotRescaled; }}}},
    {"dropout_on_context",
     "The heads' results are dropped, the weights are not.",
     kRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kOnContext; }},
      {[](Recipe& r) { r.dropout = Dropout::kOnMerged; },
       "They are merged before."}},
     Stage::kContext},
    {"dropout_keeps_what_it_should_drop",
     "What should be dropped is kept: p is taken for the share to keep.",
     kRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kKeepsTheDropped; }}}},
    // The same name as above: the cause is one, the place is another.
    {"dropout_left_on",
     "Dropout of the output is on in evaluation: results are random.",
     "Drop in training only: `F.dropout(out, p, training=self.training)` or "
     "an `nn.Dropout` that eval() reaches.",
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOnOutput; }}},
     Stage::kOutput},
};

}  // namespace multihead::diagnosis
