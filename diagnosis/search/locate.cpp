// SPDX-License-Identifier: MIT
#include "diagnosis/search/locate.h"

#include <ATen/TensorOperators.h>

#include "diagnosis/search/compare.h"
#include "diagnosis/search/first_stage.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

std::optional<Place> first_place(const Run& run, const Stages& reference) {
  const Tensor& got = run.out;
  const Tensor& expected = reference.out;
  if (got.sizes() != expected.sizes()) return std::nullopt;
  const double allowed =
      rounding_allowed(run.dtype, reference, largest_finite(expected));
  Tensor wrong = (got - expected).abs().le(allowed).logical_not();
  if (const Tensor rows = seeing_rows(run, reference); rows.defined()) {
    wrong = wrong.logical_and(rows.unsqueeze(-1));
  }
  const Tensor places = wrong.nonzero();
  if (places.size(0) == 0) return std::nullopt;
  Place place{.observation = run.name, .tensor = "out"};
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

// Draws that are not where they
// should be leave a run without a reference.
std::optional<Stage> stage_that_differs(const Run& run, const Errors& errors,
                                        const Stages* reference) {
  if (errors.out.share <= 1) {
    return errors.weights.share > 1 ? Stage::kReturnedWeights
                                    : Stage::kGradients;
  }
  if (reference == nullptr) {
    return run.training ? std::optional(Stage::kWeights) : std::nullopt;
  }
  return first_difference(run, *reference, run.dtype);
}

}  // namespace

Difference locate(std::span<const Run> runs, const Recipe& attention) {
  Difference difference;
  for (const bool outputs : {true, false}) {
    for (const Run& run : runs) {
      const Errors found = errors(run, attention, run.dtype);
      if (found.fit() || (found.out.share > 1) != outputs) continue;
      const auto reference = run_recipe(run, attention);
      if (reference && !difference.place) {
        difference.place = first_place(run, *reference);
      }
      if (difference.stage) return difference;
      difference.stage =
          stage_that_differs(run, found, reference ? &*reference : nullptr);
    }
  }
  return difference;
}

}  // namespace multihead::diagnosis
