// SPDX-License-Identifier: MIT
//
// A trace is a list of nameless tensors in layouts of the code's own. What does
// not change with the layout is the set of numbers: sorted, they are compared
// with those of each stage, of one head of it, or of one head of one item, as a
// loop over heads computes them.
#include "multihead/diagnosis/first_stage.h"

#include <ATen/TensorOperators.h>

#include "multihead/diagnosis/compare.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

Tensor sorted(const Tensor& x) {
  return std::get<0>(x.flatten().sort(/*dim=*/-1, /*descending=*/true));
}

// The finite numbers of a stage are the largest of the tensor: what a mask has
// blocked is −inf here and anything very small there.
bool same_numbers(const Tensor& candidate, const Tensor& wanted,
                  double allowed) {
  if (candidate.numel() != wanted.numel()) return false;
  const int64_t finite = wanted.isfinite().sum().item<int64_t>();
  const Tensor x = sorted(candidate.to(at::kDouble)).slice(0, 0, finite);
  const Tensor y = sorted(wanted).slice(0, 0, finite);
  return largest_difference(x, y) <= allowed;
}

// The stage as a whole, one head, one head of one item.
std::vector<Tensor> views_of(const Tensor& stage) {
  std::vector<Tensor> views = {stage};
  if (stage.dim() == 4) {
    views.push_back(stage.select(1, 0));
    views.push_back(stage.select(1, 0).select(0, 0));
  } else if (stage.dim() == 3) {
    views.push_back(stage.select(0, 0));
  }
  return views;
}

double allowed_for(const Tensor& stage, const Stages& reference,
                   at::ScalarType precision) {
  return rounding_allowed(precision, reference, largest_finite(stage));
}

class Evidence {
 public:
  Evidence(const Run& run, const Stages& reference, at::ScalarType precision)
      : run_(run), reference_(reference), precision_(precision) {}

  bool has(const Tensor& stage) const {
    for (const Tensor& view : views_of(stage)) {
      if (in_trace(run_, view, allowed_for(stage, reference_, precision_))) {
        return true;
      }
    }
    return false;
  }

  // Head 0 of item 0 stands in some tensor as a matrix (L, D).
  bool has_head(int role) const {
    return has_matrix(reference_.heads[role].select(0, 0).select(0, 0));
  }

  // Item 0 as a matrix (L, H·D): its numbers are those of the heads, so that
  // only their places tell.
  bool has_merged() const { return has_matrix(reference_.merged.select(0, 0)); }

  // Whether something sums to 1 over its last dimension: weights, though not
  // those of attention.
  bool has_other_weights() const {
    for (const Tensor& tensor : run_.trace) {
      if (tensor.dim() < 2 || tensor.size(-1) != run_.sizes.keys ||
          tensor.size(-2) != run_.sizes.queries) {
        continue;
      }
      const Tensor x = tensor.to(at::kDouble);
      if (x.ge(0).all().item<bool>() &&
          largest_finite(x.sum(-1) - 1.0) < 1e-3) {
        return true;
      }
    }
    return false;
  }

 private:
  // As the first rows, or with any one dimension beside the last.
  bool has_matrix(const Tensor& matrix) const {
    const double allowed = allowed_for(matrix, reference_, precision_);
    const auto is = [&](const Tensor& x) {
      return largest_difference(x.to(at::kDouble), matrix) <= allowed;
    };
    for (const Tensor& tensor : run_.trace) {
      if (tensor.dim() == 2 && is(tensor.slice(0, 0, matrix.size(0)))) {
        return true;
      }
      if (tensor.dim() < 3) continue;
      for (int64_t kept = 0; kept < tensor.dim() - 1; ++kept) {
        Tensor x = tensor;
        for (int64_t d = tensor.dim() - 2; d >= 0; --d) {
          if (d != kept) x = x.select(d, 0);
        }
        if (is(x)) return true;
      }
    }
    return false;
  }

  const Run& run_;
  const Stages& reference_;
  at::ScalarType precision_;
};

// Where heads do not show, whether it is they or what they are cut from.
Stage heads_or_projections(const Evidence& evidence, const Stages& reference) {
  for (const Tensor& x : reference.projected) {
    if (!evidence.has(x)) return Stage::kProjections;
  }
  return Stage::kHeads;
}

std::optional<Stage> from_trace(const Run& run, const Stages& reference,
                                at::ScalarType precision) {
  const Evidence evidence(run, reference, precision);
  if (evidence.has_merged()) return Stage::kOutput;
  if (evidence.has(reference.context)) return Stage::kMerge;
  if (evidence.has(reference.weights)) {
    return evidence.has_head(2) ? Stage::kContext
                                : heads_or_projections(evidence, reference);
  }
  if (evidence.has(reference.masked_scores) || evidence.has(reference.scores)) {
    return evidence.has_other_weights() ? Stage::kMaskedScores
                                        : Stage::kWeights;
  }
  // Without weights the inputs are the heads.
  return !run.has_weights || (evidence.has_head(0) && evidence.has_head(1))
             ? Stage::kScores
             : heads_or_projections(evidence, reference);
}

std::optional<Stage> from_names(const Run& run, const Stages& reference,
                                at::ScalarType precision) {
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
    const auto entry = run.stages.find(name);
    if (entry == run.stages.end()) continue;
    any = true;
    if (!same_numbers(entry->second, expected,
                      allowed_for(expected, reference, precision))) {
      return stage;
    }
  }
  return any ? std::optional(Stage::kOutput) : std::nullopt;
}

}  // namespace

bool in_trace(const Run& run, const Tensor& wanted, double allowed) {
  for (const Tensor& tensor : run.trace) {
    if (same_numbers(tensor, wanted, allowed)) return true;
  }
  return false;
}

std::optional<Stage> first_difference(const Run& run, const Stages& reference,
                                      at::ScalarType precision) {
  if (!run.stages.empty()) return from_names(run, reference, precision);
  if (!run.trace.empty()) return from_trace(run, reference, precision);
  if (!run.returned.defined()) return std::nullopt;
  const Tensor expected = returned_weights(run, Recipe{}, reference);
  const bool right =
      expected.defined() && largest_difference(run.returned, expected) <=
                                allowed_for(expected, reference, precision);
  return right ? Stage::kContext : Stage::kWeights;
}

}  // namespace multihead::diagnosis
