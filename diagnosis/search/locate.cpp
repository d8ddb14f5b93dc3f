// SPDX-License-Identifier: MIT
//
// A trace is a list of nameless tensors in layouts of the code's own. What does
// not change with the layout is the set of numbers: sorted, they are compared
// with those of each stage, of one head of it, or of one head of one item, as a
// loop over heads computes them.
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "diagnosis/search/search.h"
#include "diagnosis/search/trace.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

double allowed_for(const Tensor& stage, const Stages& reference,
                   at::ScalarType precision) {
  return rounding_allowed(precision, reference, largest_finite(stage));
}

class Evidence {
 public:
  Evidence(const ObservedCall& call, const Stages& reference,
           at::ScalarType precision)
      : call_(call),
        reference_(reference),
        rounding_(rounding_allowed(precision, reference, 1.0)) {}

  // All of it; its first and last head; both of one item, as loops compute
  // them.
  bool has(const Tensor& stage) const {
    const double allowed = allowed_for(stage);
    const auto is_shown = [&](const Tensor& piece) {
      return in_trace(call_, piece, allowed);
    };
    if (is_shown(stage)) return true;
    if (stage.dim() == 3) return is_shown(stage.select(0, 0));
    if (stage.dim() != 4) return false;
    const Tensor first = stage.select(1, 0), last = stage.select(1, -1);
    return (is_shown(first) && is_shown(last)) ||
           (is_shown(first.select(0, 0)) && is_shown(last.select(0, 0)));
  }

  // Item 0's first and last head stand in some tensor as matrices (L, D).
  bool has_heads(int role) const {
    const Tensor heads = reference_.heads[role].select(0, 0);
    return has_matrix(heads.select(0, 0)) && has_matrix(heads.select(0, -1));
  }

  // Item 0 as a matrix (L, H·D) or (H·D, L): its numbers are those of the
  // heads, so that only their places tell.
  bool has_merged() const {
    const Tensor merged = reference_.merged.select(0, 0);
    return has_matrix(merged) || has_matrix(merged.t());
  }

  // Whether the first two blocks of keys have their scores, which then never
  // stand whole.
  bool has_chunks(const Tensor& scores) const {
    const int64_t keys = scores.size(-1);
    return std::ranges::any_of(call_.trace, [&](const Tensor& x) {
      const int64_t block = x.dim() < 2 ? keys : x.size(-1);
      return block > 0 && block < keys && has(scores.slice(-1, 0, block)) &&
             has(scores.slice(-1, block, 2 * block));
    });
  }

  // Whether something sums to 1 over its last dimension: weights, though not
  // those of attention.
  bool has_other_weights() const {
    const Sizes& n = call_.sizes;
    return std::ranges::any_of(call_.trace, [&](const Tensor& tensor) {
      if (tensor.dim() < 2 || tensor.size(-1) != n.keys ||
          tensor.size(-2) != n.queries) {
        return false;
      }
      const Tensor x = tensor.to(at::kDouble);
      return x.ge(0).all().item<bool>() &&
             largest_finite(x.sum(-1) - 1.0) < 1e-3;
    });
  }

 private:
  double allowed_for(const Tensor& x) const {
    return rounding_ * largest_finite(x);
  }

  bool has_matrix(const Tensor& matrix) const {
    const double allowed = allowed_for(matrix);
    return std::ranges::any_of(traced(call_), [&](const Traced& tensor) {
      return tensor.has_matrix(matrix, allowed);
    });
  }

  const ObservedCall& call_;
  const Stages& reference_;
  double rounding_;  // of numbers up to 1
};

// Where heads do not show, whether it is they or what they are cut from.
Stage heads_or_projections(const Evidence& evidence, const Stages& reference) {
  const bool projected = std::ranges::all_of(
      reference.projected, [&](const Tensor& x) { return evidence.has(x); });
  return projected ? Stage::kHeads : Stage::kProjections;
}

std::optional<Stage> from_trace(const ObservedCall& call,
                                const Stages& reference) {
  const Evidence evidence(call, reference, call.dtype);
  if (evidence.has_merged()) return Stage::kOutput;
  if (evidence.has(reference.context)) return Stage::kMerge;
  if (evidence.has(reference.weights)) {
    return evidence.has_heads(2) ? Stage::kContext
                                 : heads_or_projections(evidence, reference);
  }
  if (evidence.has(reference.masked_scores) || evidence.has(reference.scores)) {
    const bool masked = !reference.scores.is_same(reference.masked_scores);
    return masked && evidence.has_other_weights() ? Stage::kMaskedScores
                                                  : Stage::kWeights;
  }
  // Without weights the inputs are the heads.
  if (call.has_weights && !(evidence.has_heads(0) && evidence.has_heads(1))) {
    return heads_or_projections(evidence, reference);
  }
  return evidence.has_chunks(reference.scores) ? Stage::kContext
                                               : Stage::kScores;
}

std::optional<Stage> from_names(const ObservedCall& call,
                                const Stages& reference) {
  const std::tuple<const char*, Tensor, Stage> named[] = {
      {"projected_query", reference.projected[0], Stage::kProjections},
      {"projected_key", reference.projected[1], Stage::kProjections},
      {"projected_value", reference.projected[2], Stage::kProjections},
      {"scores", reference.scores, Stage::kScores},
      {"masked_scores", reference.masked_scores, Stage::kMaskedScores},
      {"weights", reference.dropped, Stage::kWeights},
      {"context", reference.context, Stage::kContext},
      {"merged", reference.merged, Stage::kMerge}};
  bool any = false;
  for (const auto& [name, expected, stage] : named) {
    const auto entry = call.stages.find(name);
    if (entry == call.stages.end()) continue;
    any = true;
    const double allowed = allowed_for(expected, reference, call.dtype);
    if (!Traced(entry->second).has_numbers_of(Traced(expected), allowed))
      return stage;
  }
  return any ? std::optional(Stage::kOutput) : std::nullopt;
}

// From stages known by name, else from the trace, else from the weights that
// were returned; nullopt where none of these is there.
std::optional<Stage> first_difference(const ObservedCall& call,
                                      const Stages& reference) {
  if (!call.stages.empty()) return from_names(call, reference);
  if (!call.trace.empty()) return from_trace(call, reference);
  if (!call.returned.defined()) return std::nullopt;
  const Tensor expected = returned_weights(call, Recipe{}, reference);
  const bool right =
      expected.defined() && largest_difference(call.returned, expected) <=
                                allowed_for(expected, reference, call.dtype);
  return right ? Stage::kContext : Stage::kWeights;
}

std::optional<Place> first_place(const ObservedCall& call,
                                 const Stages& reference) {
  const Tensor& got = call.out;
  const Tensor& expected = reference.out;
  if (got.sizes() != expected.sizes()) return std::nullopt;
  const double allowed =
      rounding_allowed(call.dtype, reference, largest_finite(expected));
  Tensor wrong = (got - expected).abs().le(allowed).logical_not();
  if (const Tensor rows = seeing_rows(call, reference); rows.defined()) {
    wrong = wrong.logical_and(rows.unsqueeze(-1));
  }
  const Tensor places = wrong.nonzero();
  if (places.size(0) == 0) return std::nullopt;
  Place place{.observation = call.name, .tensor = "out"};
  Tensor a = got, b = expected;
  for (int64_t d = 0; d < got.dim(); ++d) {
    place.index.push_back(places[0][d].item<int64_t>());
    a = a[place.index.back()];
    b = b[place.index.back()];
  }
  place.got = a.item<double>();
  place.expected = b.item<double>();
  return place;
}

}  // namespace

std::vector<Shown> shown_in_trace(const ObservedCall& call,
                                  const Stages& reference,
                                  at::ScalarType precision) {
  const Evidence evidence(call, reference, precision);
  std::vector<Shown> shown;
  for (const auto& [stage, tensor] :
       {std::pair(Stage::kScores, &Stages::scores),
        std::pair(Stage::kWeights, &Stages::weights),
        std::pair(Stage::kContext, &Stages::context)}) {
    const Tensor& right = reference.*tensor;
    if (evidence.has(right)) {
      shown.push_back(
          {stage, tensor, right, allowed_for(right, reference, precision)});
    }
  }
  return shown;
}

bool shows_heads(const ObservedCall& call, const Stages& reference, int role,
                 at::ScalarType precision) {
  return Evidence(call, reference, precision).has_heads(role);
}

bool shows_merged(const ObservedCall& call, const Stages& reference,
                  at::ScalarType precision) {
  return Evidence(call, reference, precision).has_merged();
}

bool shows(const ObservedCall& call, const Stages& reference,
           const Tensor& wanted, at::ScalarType precision) {
  return Evidence(call, reference, precision).has(wanted);
}

bool in_trace(const ObservedCall& call, const Tensor& wanted, double allowed) {
  const Traced numbers(wanted);
  return std::ranges::any_of(traced(call), [&](const Traced& tensor) {
    return tensor.has_numbers_of(numbers, allowed);
  });
}

Difference locate(std::span<const ObservedCall> calls,
                  const Recipe& attention) {
  Difference difference;
  for (const bool outputs : {true, false}) {
    for (const ObservedCall& call : calls) {
      const Errors found = errors(call, attention, call.dtype);
      if (found.fit() || (found.out.share > 1) != outputs) continue;
      const auto reference = simulate(call, attention);
      if (reference && !difference.place) {
        difference.place = first_place(call, *reference);
      }
      if (difference.stage) return difference;
      if (!outputs) {
        difference.stage = found.weights.share > 1 ? Stage::kReturnedWeights
                                                   : Stage::kGradients;
      } else if (reference) {
        difference.stage = first_difference(call, *reference);
      } else if (call.training) {
        // It drew numbers in another place than attention does.
        difference.stage = Stage::kWeights;
      }
    }
  }
  return difference;
}

}  // namespace multihead::diagnosis
