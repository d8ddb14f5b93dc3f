// SPDX-License-Identifier: MIT
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "diagnosis/search/search.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// Half an ulp of 1, and how many of them another order of the same operations,
// projections included, may cost at most. Faults are far beyond.
constexpr double kUnits = 64;
// Beyond that share of a result rounding alone could make of it what it likes.
constexpr double kLost = 0x1p-3;

double unit_of(at::ScalarType precision) {
  return precision == at::kDouble     ? 0x1p-53
         : precision == at::kFloat    ? 0x1p-24
         : precision == at::kBFloat16 ? 0x1p-9
                                      : 0x1p-12;
}

// Scores enter through exp: one that is off by δ = unit·|score| changes its
// weight p by p·(1 − p)·(exp(2δ) − 1)/2 at most. Where δ is small that is
// nearly δ; where it is not, weights that are 0 or 1 stay what they are, and
// all others may become anything.
double rounding_by_softmax(const Stages& stages, double unit) {
  const double delta = unit * largest_finite(stages.scores);
  if (delta < 0x1p-10) return delta;
  const Tensor p = stages.weights.detach().nan_to_num().abs().clamp_max(1);
  const double undecided = (p * (1 - p)).sum(-1).max().item<double>();
  return std::min(undecided * std::expm1(std::min(2 * delta, 700.0)) / 2, 2.0);
}

double l2(const Tensor& x) { return x.square().sum().sqrt().item<double>(); }

// Conventions apart, nothing is done otherwise than attention does.
bool is_attention(Recipe recipe) {
  static_cast<Habits&>(recipe) = {};
  return recipe == Recipe{};
}

Error error(double difference, double allowed) {
  return {difference, difference == 0 ? 0 : difference / allowed};
}

Error returned_error(const ObservedCall& call, const Recipe& recipe,
                     const Stages& stages, at::ScalarType precision) {
  if (!call.returned.defined()) return {0, 0};
  const Tensor got = recipe.returned == Returned::kScores
                         ? with_infinity(call.returned, stages)
                         : call.returned;
  const Tensor expected = returned_weights(call, recipe, stages);
  if (!expected.defined()) return {};
  Tensor fully_masked_rows;
  if (stages.fully_masked.defined() && is_attention(recipe)) {
    Tensor seen = stages.fully_masked.logical_not();
    if (call.returned.numel() != stages.weights.numel()) {
      seen = seen.all(1);
    } else if (recipe.heads_before_items && expected.dim() == 3) {
      seen = seen.transpose(0, 1);
    }
    fully_masked_rows =
        seen.reshape(expected.sizes().slice(0, expected.dim() - 1));
  }
  const double allowed = rounding_allowed(
      precision, stages, largest_finite(got, fully_masked_rows));
  double difference = largest_difference(got, expected, fully_masked_rows);
  // In training both are usual: the weights before dropout, and after.
  if (difference > allowed && call.training &&
      recipe.returned == Returned::kWeights) {
    difference = largest_difference(
        call.returned, in_shape_of(stages.weights, call.returned, recipe),
        fully_masked_rows);
  }
  return error(difference, allowed);
}

// Whether the recipe lets gradients pass to the matrices that they reached, of
// those that take part.
bool reaches_matrices(const ObservedCall& call, const Recipe& recipe) {
  const bool passes =
      recipe.detached == Detached::kNothing ||
      (recipe.detached == Detached::kMaskedWeights && !call.is_masked());
  const bool cuts_both = recipe.detached == Detached::kKeyAndValue;
  if (cuts_both && !(call.without_gradient[1] && call.without_gradient[2]))
    return false;  // behind the projections, which learn nothing
  if (!passes || recipe.rounded) {
    return recipe.frozen == Recipe{}.frozen;
  }
  const auto matrices = call.weights.matrices();
  for (int i = 0; i < 4; ++i) {
    bool used = i == 3 && recipe.output != Output::kNone;
    for (int role = 0; role < 3; ++role) {
      const bool meets =
          std::ranges::find(recipe.roles, role) != recipe.roles.end();
      used = used ||
             (meets && recipe.matrices[role] == i && !recipe.unprojected[role]);
    }
    if (!used || !matrices[i]->weight.defined()) continue;
    if (call.without_gradient[i] != recipe.frozen[i]) return false;
  }
  return true;
}

Error gradient_error(const ObservedCall& call, const Recipe& recipe,
                     const Stages& stages, at::ScalarType precision) {
  if (!call.dout.defined()) return {0, 0};
  if (call.has_weights && !reaches_matrices(call, recipe)) return {};
  const std::array<Tensor, 3> expected = gradients(call, recipe);
  std::array<double, 3> sizes = {};
  for (int role = 0; role < 3; ++role) {
    if (!expected[role].defined()) continue;
    // A gradient of nothing has no size of its own.
    sizes[role] = std::max(largest_finite(expected[role]),
                           largest_finite(call.gradients[role]));
  }
  // What is left of one whose terms cancel is rounding.
  const double nothing =
      rounding_allowed(precision, stages, std::ranges::max(sizes));
  Error worst{0, 0};
  for (int role = 0; role < 3; ++role) {
    const double size = sizes[role];
    if (!expected[role].defined() || size <= nothing) continue;
    const Error one =
        error(largest_difference(call.gradients[role], expected[role]),
              4 * rounding_allowed(precision, stages, size));
    if (one.share > worst.share) worst = one;
  }
  return worst;
}

// What the tensors of that type in the trace show: scores and weights, or more.
std::optional<Narrow> narrow_in_trace(const ObservedCall& call,
                                      at::ScalarType type) {
  std::optional<Narrow> shown;
  for (const Tensor& x : call.trace) {
    if (x.scalar_type() != type) continue;
    const bool scores = x.dim() > 0 && x.size(-1) == call.sizes.keys;
    if (!scores) return Narrow::kEverywhere;
    shown = Narrow::kSoftmax;
  }
  return shown;
}

// Rounding on the way is told by tensors of that type in the trace, or by what
// it does: the error left is small beside the error that it explains.
Errors narrow_errors(const ObservedCall& call, const Recipe& recipe,
                     const Stages& narrow, at::ScalarType precision) {
  const at::ScalarType type = recipe.narrow_type;
  Recipe wide = recipe;
  wide.narrow = Narrow::kNever;
  const std::optional<Stages> stages = simulate(call, wide);
  if (!stages) return {};
  const double rounding = largest_difference(call.out, stages->out);
  const double size = largest_finite(call.out);
  // What may be as large as the output itself explains every output.
  const double most = std::min(rounding_allowed(type, *stages, size), size);
  if (rounding <= rounding_allowed(precision, *stages, size) ||
      rounding > most) {
    return {};
  }
  const double left = largest_difference(call.out, narrow.out);
  double share = 2 * l2(call.out - narrow.out) / l2(call.out - stages->out);
  const std::optional<Narrow> traced = narrow_in_trace(call, type);
  if (traced && recipe.narrow != Narrow::kOutput) {
    const bool alike = call.sizes.width == call.sizes.keys;
    share = alike || *traced == recipe.narrow ? 0 : 2;
  }
  return {{left, share},
          returned_error(call, wide, *stages, type),
          gradient_error(call, wide, *stages, type)};
}

// The difference as a share of PyTorch's own: its bits are right whatever their
// error, and what is not much further off is as right.
double beside_pytorch(const ObservedCall& call, const Recipe& recipe,
                      const Stages& stages, const Tensor& rows) {
  double share = kInfinity;
  for (const Tensor& result : pytorch_results(call, recipe)) {
    if (result.sizes() != call.out.sizes()) continue;
    const Tensor theirs = result.to(at::kDouble);
    if (largest_difference(call.out, theirs, rows) == 0) return 0;
    const double own = largest_difference(theirs, stages.out, rows);
    if (own > kLost * largest_finite(stages.out, rows)) continue;
    const double difference = largest_difference(call.out, stages.out, rows);
    share = std::min(share, difference / (4 * own));
  }
  return share;
}

Errors errors_of(const ObservedCall& call, const Recipe& recipe,
                 const std::optional<Stages>& stages,
                 at::ScalarType precision) {
  Errors found;
  if (!stages || stages->out.sizes() != call.out.sizes()) return found;
  if (recipe.narrow != Narrow::kNever) {
    return narrow_errors(call, recipe, *stages, precision);
  }
  // Queries that see no key are left to the code, where it is attention. A
  // fault has to explain them.
  const Tensor rows =
      is_attention(recipe) ? seeing_rows(call, *stages) : Tensor();
  // Heads and positions exchanged: a mask that blinds rows is no more theirs.
  if (rows.defined() &&
      rows.sizes() != call.out.sizes().slice(0, call.out.dim() - 1)) {
    return found;
  }
  // Judged by the size of the observed numbers: a recipe whose numbers explode
  // would allow everything.
  const double size = largest_finite(call.out, rows);
  const double rounding = rounding_allowed(precision, *stages, 1.0);
  double allowed = rounding * size;
  if (recipe.rounded && call.digits > 0) {
    const double step = 0.5 * std::pow(10.0, -call.digits);
    if (step > kLost * size) return found;
    allowed += step * (1 + 1e-6);
  }
  found.out = error(largest_difference(call.out, stages->out, rows), allowed);
  if (rounding > kLost) found.out.share = kInfinity;
  if (found.out.share > 1 && is_attention(recipe)) {
    found.out.share =
        std::min(found.out.share, beside_pytorch(call, recipe, *stages, rows));
  }
  if (found.out.share > 1) return found;
  found.weights = returned_error(call, recipe, *stages, precision);
  if (found.weights.share > 1) return found;
  found.gradients = gradient_error(call, recipe, *stages, precision);
  return found;
}

// Whether rows that see a key differ by far more than rounding, whatever
// becomes of the others. Not known where rows are mixed.
bool differs_where_seen(const ObservedCall& call, const Recipe& recipe,
                        const Stages& stages) {
  const bool mixes_rows =
      (recipe.merge != merge_by_head && recipe.merge != merge_by_feature) ||
      recipe.exchanges_groups || recipe.weights_transposed ||
      recipe.mix != weighted_sum || recipe.batch_exchanged ||
      recipe.context_norm == NormKind::kGroup ||
      recipe.output_norm == NormKind::kGroup;
  const Tensor rows = seeing_rows(call, stages);
  if (!rows.defined() || mixes_rows || recipe.blockwise ||
      recipe.normalise != softmax_over_keys ||
      rows.sizes() != call.out.sizes().slice(0, call.out.dim() - 1)) {
    return false;
  }
  const double size = largest_finite(call.out, rows);
  const double least =
      std::max(1e-3 * size, 2 * rounding_allowed(call.dtype, stages, size));
  return !(largest_difference(call.out, stages.out, rows) <= least);
}

constexpr size_t kFewSentinels = 6;

// The usual numbers block keys in every usual way, the commonest first. What is
// added to −1e4 keeps some digits of the scores, to −1e9 few, to the rest none.
const std::vector<Sentinels>& all_sentinels() {
  static const std::vector<Sentinels> all = [] {
    using enum Sentinels::How;
    std::vector<Sentinels> result = {{.united = true},
                                     {kAdded, kAdded, /*united=*/true}};
    for (const bool last : {false, true}) {
      result.push_back({kFilled, kInfinity, false, last});
      result.push_back({kInfinity, kFilled, false, last});
    }
    for (const double number : {-1e9, -1e4, -3.4e38}) {
      if (number != -1e9)
        result.push_back({kAdded, kAdded, true, false, number});
      result.push_back({kAdded, kAdded, false, false, number});
      result.push_back({kAdded, kInfinity, false, false, number});
      result.push_back({kInfinity, kAdded, false, false, number});
      for (const bool last : {false, true}) {
        result.push_back({kAdded, kFilled, false, last, number});
        result.push_back({kFilled, kAdded, false, last, number});
      }
    }
    return result;
  }();
  return all;
}

}  // namespace

double rounding_allowed(at::ScalarType precision, const Stages& stages,
                        double largest) {
  // Of 16 bits are only what goes in and what comes out of a step: queries and
  // keys, which the scores amplify, and results.
  const double unit = unit_of(precision);
  const double share = at::isReducedFloatingType(precision)
                           ? 16 * unit * stages.magnification +
                                 rounding_by_softmax(stages, 2 * unit)
                           : kUnits * unit * (4 + stages.magnification) +
                                 rounding_by_softmax(stages, kUnits * unit);
  return share * largest + 1e-300;
}

bool is_lost_in_rounding(at::ScalarType precision, const Stages& stages) {
  return rounding_allowed(precision, stages, 1.0) > kLost;
}

Tensor seeing_rows(const ObservedCall& call, const Stages& stages) {
  if (!stages.fully_masked.defined()) return {};
  const Tensor seen = stages.fully_masked.logical_not();
  return call.has_weights ? seen.all(1) : seen;
}

std::array<Tensor, 3> gradients(const ObservedCall& call,
                                const Recipe& recipe) {
  const at::AutoGradMode with_grad(true);
  const auto dispatch = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(
      dispatch.included_,
      dispatch.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  ObservedCall leaves = call;
  for (int role = 0; role < 3; ++role) {
    leaves.inputs[role] =
        call.same_as[role] == role
            ? call.inputs[role].detach().clone().requires_grad_()
            : leaves.inputs[call.same_as[role]];
  }
  std::array<Tensor, 3> result;
  const std::optional<Stages> stages = simulate(leaves, recipe);
  for (int role = 0; role < 3; ++role) {
    if (!call.gradients[role].defined() || call.same_as[role] != role) continue;
    result[role] = at::zeros_like(call.inputs[role]);
    if (!stages || !stages->out.requires_grad() ||
        stages->out.sizes() != call.dout.sizes()) {
      continue;
    }
    const Tensor gradient =
        torch::autograd::grad({stages->out}, {leaves.inputs[role]}, {call.dout},
                              /*retain_graph=*/true,
                              /*create_graph=*/false, /*allow_unused=*/true)[0];
    if (gradient.defined()) result[role] = gradient;
  }
  return result;
}

Errors errors(const ObservedCall& call, const Recipe& recipe,
              at::ScalarType precision) {
  const at::NoGradGuard no_grad;
  std::optional<Stages> stages = simulate(call, recipe);
  const Errors found = errors_of(call, recipe, stages, precision);
  // Rows, or other lines of a softmax, in which all is blocked, are up to the
  // code: 0, NaN or, of a finite sentinel, equal weights, or as it is added.
  const bool may_differ =
      stages && (stages->fully_masked.defined() ||
                 (stages->blocks &&
                  (recipe.normalise != softmax_over_keys || recipe.blockwise)));
  if (found.fit() || !may_differ || differs_where_seen(call, recipe, *stages)) {
    return found;
  }
  Recipe other = recipe;
  std::optional<Errors> others;
  const auto explained = [&](FullyMasked fully_masked) {
    other.fully_masked = fully_masked;
    stages = simulate(call, other);
    others = errors_of(call, other, stages, precision);
    return others->fit();
  };
  if (explained(FullyMasked::kNaN)) return *others;
  // Of faults few ways: the more, the more of them explain the same numbers.
  const std::span all(all_sentinels());
  const bool is_fault = !is_attention(recipe);
  for (const Sentinels& way : is_fault ? all.first(kFewSentinels) : all) {
    other.sentinels = way;
    if (explained(FullyMasked::kFinite)) return *others;
  }
  return found;
}

// ---- What is improved ------------------------------------------------------

namespace {

// Bits that a recipe must explain by so many faults: of some 2^8 faults, 2^15
// pairs and 2^7 times as many of each more, one in 2^12 searches may find one
// that does by chance.
constexpr double kBitsNeeded[kMostSteps + 1] = {0, 20, 27, 34, 41};

// How many different numbers.
double distinct(const Tensor& x) {
  const Tensor sorted = std::get<0>(x.masked_select(x.isfinite()).sort());
  const int64_t n = sorted.numel();
  if (n == 0) return 0;
  const Tensor steps = sorted.slice(0, 1).ne(sorted.slice(0, 0, n - 1));
  return 1.0 + steps.sum().item<double>();
}

// log2 of in how many orders its numbers may stand.
double bits_of_order(const Tensor& x) {
  const Tensor sorted = std::get<0>(x.flatten().sort()).contiguous();
  const std::span numbers(sorted.const_data_ptr<double>(), sorted.numel());
  double nats = std::lgamma(static_cast<double>(numbers.size()) + 1);
  for (size_t i = 0, equal = 0; i < numbers.size(); ++i) {
    equal = i > 0 && numbers[i] == numbers[i - 1] ? equal + 1 : 1;
    nats -= std::log(static_cast<double>(equal));
  }
  return nats / std::log(2.0);
}

// Whether attention gives the same numbers at other places.
bool only_moved(const ObservedCall& call, const Recipe& start,
                at::ScalarType precision) {
  const std::optional<Stages> stages = simulate(call, start);
  if (!stages || stages->out.numel() != call.out.numel()) return false;
  const auto sorted = [](const Tensor& x) {
    return std::get<0>(x.flatten().sort());
  };
  return largest_difference(sorted(call.out), sorted(stages->out)) <=
         rounding_allowed(precision, *stages, largest_finite(call.out));
}

// Digits of what a recipe makes on its way to an output without numbers, where
// the trace shows it and attention makes something else; of an infinity, its
// sign.
double bits_on_the_way(const ObservedCall& call, const Recipe& start,
                       const Recipe& recipe, at::ScalarType precision) {
  const std::optional<Stages> right = simulate(call, start);
  const std::optional<Stages> stages = simulate(call, recipe);
  if (call.trace.empty() || !right || !stages ||
      shows(call, *right, right->weights, precision)) {
    return 0;
  }
  const double allowed = rounding_allowed(precision, *stages, 1.0);
  double most = 0;
  for (const auto tensor :
       {&Stages::weights, &Stages::normalised, &Stages::context}) {
    const Tensor& x = (*stages).*tensor;
    const auto is = [&](const Tensor& y) {
      return largest_difference(x, y) <= allowed * largest_finite(x);
    };
    if (is((*right).*tensor) || is(right->normalised)) continue;
    if (!shows(call, *stages, x, precision)) continue;
    const double signs = x.isinf().sum().item<double>();
    most = std::max(most, distinct(x) * -std::log2(allowed) + signs);
  }
  return most;
}

// The largest difference in the first tensor that `start` gets wrong, under it
// and under a recipe.
struct Gain {
  double without = 0, left = 0;
  // log2(without / left) for each different number: that many bits must agree
  // by chance where the numbers have nothing to do with the recipe.
  double bits = 0;
};

Gain gain_of(const ObservedCall& call, const Recipe& start,
             const Recipe& recipe, at::ScalarType precision) {
  const Errors before = errors(call, start, precision);
  const Errors after = errors(call, recipe, precision);
  if (before.fit()) return {};
  const bool in_out = before.out.share > 1;
  const bool in_weights = !in_out && before.weights.share > 1;
  std::vector<Tensor> got = {call.gradients.begin(), call.gradients.end()};
  if (in_out || in_weights) got = {in_out ? call.out : call.returned};
  const auto wrong = in_out       ? &Errors::out
                     : in_weights ? &Errors::weights
                                  : &Errors::gradients;
  Gain gain{(before.*wrong).difference, (after.*wrong).difference};

  // Numbers that are small beside attention agree with whatever is small, and
  // equal ones tell no more than one of them does. Not so where gradients that
  // were cut off are 0.
  const bool in_gradients = !in_out && !in_weights;
  double numbers = 0, largest = 0;
  for (const Tensor& x : got) {
    if (!x.defined()) continue;
    numbers += in_gradients ? static_cast<double>(x.numel()) : distinct(x);
    largest = std::max(largest, largest_finite(x));
  }
  // Of none at all, those that should be there tell.
  if (in_gradients && largest == 0) {
    for (const Tensor& x : gradients(call, start))
      largest = std::max(largest, largest_finite(x));
  }
  double without = gain.without;
  if (!in_gradients || !std::isfinite(without)) {
    without = std::min(without, largest);
  }
  // A type that stands in the trace is not there by chance.
  if (recipe.narrow != Narrow::kNever &&
      narrow_in_trace(call, recipe.narrow_type)) {
    without = largest;
  }
  if (without > 0) {
    // No number has more digits than its type.
    const double left = std::max(gain.left, without * unit_of(call.dtype));
    gain.bits = numbers * std::max(std::log2(without / left), 0.0);
  }
  if (in_out && numbers == 0) {
    gain.bits = bits_on_the_way(call, start, recipe, precision);
  }
  if (in_out && only_moved(call, start, precision)) {
    gain.bits = std::min(gain.bits, bits_of_order(call.out));
  }
  return gain;
}

// Rounding alone is judged by what it does, in errors().
bool only_rounds(const Recipe& start, const Recipe& recipe) {
  Recipe rounded = start;
  rounded.narrow = recipe.narrow;
  rounded.narrow_type = recipe.narrow_type;
  return recipe.narrow != Narrow::kNever && recipe == rounded;
}

}  // namespace

at::ScalarType precision_of(const ObservedCall& call, bool in_float) {
  return in_float && call.dtype == at::kDouble ? at::kFloat : call.dtype;
}

bool explains_most(double left, double without) { return left <= without / 4; }

Improvement improvement(std::span<const ObservedCall> calls,
                        const Recipe& start, const Recipe& recipe,
                        size_t faults, bool in_float) {
  const at::NoGradGuard no_grad;
  const bool rounds = only_rounds(start, recipe);
  bool first = true;
  double bits = 0;
  for (const ObservedCall& call : calls) {
    const Gain gain =
        gain_of(call, start, recipe, precision_of(call, in_float));
    if (gain.without == 0) continue;
    if (first && !rounds && !explains_most(gain.left, gain.without)) {
      return Improvement::kLittle;
    }
    first = false;
    bits += gain.bits;
  }
  return bits < kBitsNeeded[faults] ? Improvement::kMayBeChance
                                    : Improvement::kEnough;
}

}  // namespace multihead::diagnosis
