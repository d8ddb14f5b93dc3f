// SPDX-License-Identifier: MIT
//
// A trace is a list of nameless tensors in layouts of the code's own. What does
// not change with the layout is the set of numbers: sorted, they are compared
// with those of each stage, of one head of it, or of one head of one item, as a
// loop over heads computes them.
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "diagnosis/search/search.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

Tensor sorted(const Tensor& x) {
  return std::get<0>(x.flatten().sort(/*dim=*/-1, /*descending=*/true));
}

// NaN and infinity, which are sorted to the front.
int64_t count_beyond_numbers(const Tensor& x) {
  return x.isnan().logical_or(x.eq(kInfinity)).sum().item<int64_t>();
}

// Behind NaN and infinity the finite numbers of a stage are the largest of the
// tensor: what a mask has blocked is −inf here and anything very small there.
bool same_numbers(const Tensor& candidate, const Tensor& wanted,
                  double allowed) {
  if (candidate.numel() != wanted.numel()) return false;
  const int64_t finite = wanted.isfinite().sum().item<int64_t>();
  const int64_t beyond = count_beyond_numbers(wanted);
  const Tensor all = candidate.to(at::kDouble);
  // NaN alone is of any code.
  if ((finite == 0 && beyond == wanted.numel()) ||
      (beyond > 0 && count_beyond_numbers(all) != beyond)) {
    return false;
  }
  // Sorting is most of the work where tensors are large: mostly the largest
  // numbers tell.
  if (beyond == 0 && finite > 0) {
    const double apart = (all.max() - wanted.max()).abs().item<double>();
    if (!(apart <= allowed)) return false;
  }
  const Tensor x = sorted(all).slice(0, beyond, beyond + finite);
  const Tensor y = sorted(wanted).slice(0, beyond, beyond + finite);
  return largest_difference(x, y) <= allowed;
}

// What shows a stage: all of it; its first and last head; both of one item, as
// loops compute them.
std::vector<std::vector<Tensor>> pieces_of(const Tensor& stage) {
  std::vector<std::vector<Tensor>> pieces = {{stage}};
  if (stage.dim() == 4) {
    const Tensor first = stage.select(1, 0), last = stage.select(1, -1);
    pieces.push_back({first, last});
    pieces.push_back({first.select(0, 0), last.select(0, 0)});
  } else if (stage.dim() == 3) {
    pieces.push_back({stage.select(0, 0)});
  }
  return pieces;
}

double allowed_for(const Tensor& stage, const Stages& reference,
                   at::ScalarType precision) {
  return rounding_allowed(precision, reference, largest_finite(stage));
}

class Evidence {
 public:
  Evidence(const ObservedCall& call, const Stages& reference,
           at::ScalarType precision)
      : call_(call), reference_(reference), precision_(precision) {}

  bool has(const Tensor& stage) const {
    const double allowed = allowed_for(stage, reference_, precision_);
    return std::ranges::any_of(pieces_of(stage), [&](const auto& pieces) {
      return std::ranges::all_of(pieces, [&](const Tensor& piece) {
        return in_trace(call_, piece, allowed);
      });
    });
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
  // With any one dimension beside the last, at the first or last place of the
  // others; or as the first rows.
  bool has_matrix(const Tensor& matrix) const {
    const double allowed = allowed_for(matrix, reference_, precision_);
    const auto is = [&](const Tensor& x) {
      return x.sizes() == matrix.sizes() &&
             largest_difference(x.to(at::kDouble), matrix) <= allowed;
    };
    for (const Tensor& tensor : call_.trace) {
      if (tensor.dim() == 2 && is(tensor.slice(0, 0, matrix.size(0)))) {
        return true;
      }
      if (tensor.dim() < 3) continue;
      for (int64_t kept = 0; kept < tensor.dim() - 1; ++kept) {
        if (tensor.size(kept) != matrix.size(0)) continue;
        // Few: items times heads.
        const Tensor rows = tensor.movedim(kept, -2).flatten(0, -3);
        if (std::ranges::any_of(rows.unbind(0), is)) return true;
      }
    }
    return false;
  }

  const ObservedCall& call_;
  const Stages& reference_;
  at::ScalarType precision_;
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
    if (!same_numbers(entry->second, expected,
                      allowed_for(expected, reference, call.dtype))) {
      return stage;
    }
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
  return std::ranges::any_of(call.trace, [&](const Tensor& tensor) {
    return same_numbers(tensor, wanted, allowed);
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
