// SPDX-License-Identifier: MIT
#include "diagnosis/stages/rounding.h"

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

using at::Tensor;

at::ScalarType type_of(NarrowType type) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  return kTypes[static_cast<int>(type)];
}

Tensor narrowed(const Tensor& x, const Recipe& recipe, Narrow where) {
  if (recipe.narrow != where && recipe.narrow != Narrow::kEverywhere) return x;
  return x.to(type_of(recipe.narrow_type)).to(at::kDouble);
}

Tensor rounded_everywhere(const Tensor& x, const Recipe& recipe) {
  return narrowed(x, recipe, Narrow::kEverywhere);
}

// ---- Faults ----------------------------------------------------------------

namespace {

template <NarrowType type>
std::vector<Way> narrow_ways() {
  return {{[](Recipe& r) {
             r.narrow = Narrow::kOutput;
             r.narrow_type = type;
           },
           "It is the output."},
          {[](Recipe& r) {
             r.narrow = Narrow::kSoftmax;
             r.narrow_type = type;
           },
           "It is the softmax and what enters it."},
          {[](Recipe& r) {
             r.narrow = Narrow::kEverywhere;
             r.narrow_type = type;
           },
           "It is every step."}};
}

}  // namespace

const std::vector<Fault> kRoundingFaults = {
    {"computed_in_bfloat16", "Numbers are rounded to bfloat16 on the way.",
     "Keep scores and weights in float32, also where inputs and outputs are "
     "bfloat16.",
     narrow_ways<NarrowType::kBFloat16>()},
    {"computed_in_float16", "Numbers are rounded to float16 on the way.",
     "Keep scores and weights in float32, also where inputs and outputs are "
     "float16.",
     narrow_ways<NarrowType::kHalf>()},
};

}  // namespace multihead::diagnosis
