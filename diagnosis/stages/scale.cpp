// SPDX-License-Identifier: MIT
#include "diagnosis/stages/scale.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

constexpr Scale kNamed[] = {
    Scale::kRootOfWidth, Scale::kNone,           Scale::kRootOfEmbedding,
    Scale::kEmbedding,   Scale::kWidth,          Scale::kTwice,
    Scale::kRootOfKeys,  Scale::kKeys,           Scale::kRootOfQueries,
    Scale::kRootOfHeads, Scale::kFourthRoot,     Scale::kWidthSquared,
    Scale::kMultiplied,  Scale::kRootOfAllHeads, Scale::kRootOfValueWidth};

double root(int64_t size) { return 1.0 / std::sqrt(static_cast<double>(size)); }

double scale_of(const ObservedCall& call, Scale choice, const Tensor& query,
                const Tensor& key);

// Where widths are the usual ones, two of them have another name.
bool is_possible(const ObservedCall& call, Scale choice) {
  const Sizes& n = call.sizes;
  if (choice == Scale::kRootOfAllHeads) return n.heads * n.width != n.embed_dim;
  if (choice == Scale::kRootOfValueWidth) return n.value_width != n.width;
  return true;
}

bool close(double x, double y) { return std::abs(x - y) <= 1e-6 * std::abs(y); }

// The number by which a tensor of the trace differs from q·k, where it is none
// that has a name.
double other_scale(const ObservedCall& call, const Tensor& query,
                   const Tensor& key) {
  const Tensor products = query.matmul(key.transpose(-2, -1));
  const double norm = products.norm().item<double>();
  const double sum = products.sum().item<double>();
  for (const Tensor& tensor : call.trace) {
    if (tensor.numel() != products.numel()) continue;
    const Tensor x = tensor.to(at::kDouble);
    const double size = x.norm().item<double>() / norm;
    const double scale = std::copysign(size, x.sum().item<double>() / sum);
    const bool proportional = std::isfinite(scale) && scale != 0 &&
                              close(x.sum().item<double>(), scale * sum);
    const bool named =
        std::any_of(std::begin(kNamed), std::end(kNamed), [&](Scale choice) {
          return is_possible(call, choice) &&
                 close(scale, scale_of(call, choice, query, key));
        });
    if (proportional && !named) return scale;
  }
  throw Impossible();
}

double scale_of(const ObservedCall& call, Scale choice, const Tensor& query,
                const Tensor& key) {
  const double width = root(query.size(-1));
  switch (choice) {
    case Scale::kRootOfWidth:
      return call.scale.value_or(width);
    case Scale::kNone:
    case Scale::kAfterSoftmax:
      return 1.0;
    case Scale::kRootOfEmbedding:
      return root(call.sizes.embed_dim);
    case Scale::kRootOfAllHeads:
      require(is_possible(call, choice));
      return root(call.sizes.heads * call.sizes.width);
    case Scale::kEmbedding:
      return root(call.sizes.embed_dim) * root(call.sizes.embed_dim);
    case Scale::kWidth:
      return width * width;
    case Scale::kTwice:
      return std::pow(call.scale.value_or(width), 2);
    case Scale::kRootOfKeys:
      return root(key.size(2));
    case Scale::kKeys:
      return root(key.size(2)) * root(key.size(2));
    case Scale::kRootOfQueries:
      return root(query.size(2));
    case Scale::kRootOfHeads:
      return root(call.sizes.heads);
    case Scale::kRootOfGroups:
      require(call.sizes.kv_heads != call.sizes.heads);
      return root(call.sizes.kv_heads);
    case Scale::kRootOfGroupWidth:
      require(call.sizes.kv_heads != call.sizes.heads);
      return root(call.sizes.embed_dim / call.sizes.kv_heads);
    case Scale::kRootOfOneHead:
      return root(call.sizes.width);
    case Scale::kRootOfValueWidth:
      require(is_possible(call, choice));
      return root(call.sizes.value_width);
    case Scale::kFourthRoot:
      return std::sqrt(width);
    case Scale::kWidthSquared:
      return std::pow(width, 4);
    case Scale::kMultiplied:
      return 1.0 / call.scale.value_or(width);
    case Scale::kOther:
      return other_scale(call, query, key);
  }
  throw Impossible();
}

}  // namespace

double scale_of(const ObservedCall& call, const Recipe& recipe,
                const Tensor& query, const Tensor& key) {
  return scale_of(call, recipe.scale, query, key);
}

// ---- Faults ----------------------------------------------------------------

namespace {

constexpr std::string_view kRemedy =
    "Divide q·k by the square root of the head width, sqrt(d) = sqrt({D}): a "
    "sum of d products of unit variance has the standard deviation sqrt(d), "
    "and the division brings it back to 1.";

}  // namespace

const std::vector<Fault> kScaleFaults = {
    {"scale_missing", "The scores are not scaled.", kRemedy, {{[](Recipe& r) {
       r.scale = Scale::kNone;
     }}}},
    {"scale_not_root",
     "The scores are divided by the head width {D}, not by its square root.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kWidth; }}}},
    {"scale_by_embed_dim",
     "The scores are divided by sqrt(d_model) = sqrt({E}).",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfEmbedding; }}}},
    {"scale_by_all_heads",
     "The scores are divided by sqrt({H} · {D}), the root of the width of "
     "all heads together.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfAllHeads; }}}},
    {"scale_by_value_width",
     "The scores are divided by the square root of the width of the values, "
     "not of that of queries and keys.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfValueWidth; }}}},
    {"scale_by_embed_dim_not_root",
     "The scores are divided by d_model = {E}.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kEmbedding; }}}},
    {"scale_applied_twice",
     "The scores are scaled twice: by 1/sqrt({D}), and again.",
     "Scale once: the query before the product, or the scores after it. "
     "F.scaled_dot_product_attention scales by itself.",
     {{[](Recipe& r) { r.scale = Scale::kTwice; }}}},
    {"scale_by_length",
     "The scores are divided by the square root of a length, not of the head "
     "width.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfKeys; },
       "It is sqrt(Lk) = sqrt({Lk})."},
      {[](Recipe& r) { r.scale = Scale::kRootOfQueries; },
       "It is sqrt(Lq) = sqrt({Lq})."},
      {[](Recipe& r) { r.scale = Scale::kKeys; }, "It is Lk = {Lk}."}}},
    {"scale_by_heads",
     "The scores are divided by the square root of the number of heads, "
     "sqrt({H}).",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfHeads; }}}},
    {"scale_by_group_count",
     "The number of groups enters the scale of the scores.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfGroups; },
       "They are divided by sqrt(G) = sqrt({G})."},
      {[](Recipe& r) { r.scale = Scale::kRootOfGroupWidth; },
       "They are divided by sqrt(E / G), not by sqrt(E / H) = sqrt({D})."}}},
    {"scale_wrong_power",
     "The scores are divided by another power of the head width than its "
     "square root.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kFourthRoot; },
       "It is the fourth root; on queries and on keys, it would be right."},
      {[](Recipe& r) { r.scale = Scale::kWidthSquared; }, "It is {D}^2."}}},
    {"scale_multiplied",
     "The scores are multiplied by sqrt({D}), not divided.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kMultiplied; }}}},
    {"scale_after_softmax",
     "The weights are divided by sqrt({D}) after the softmax; the scores are "
     "not.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kAfterSoftmax; }}}},
    {"scale_of_another_number",
     "The scores are scaled by another number than 1/sqrt({D}): a constant, "
     "perhaps, that fits other sizes.",
     kRemedy,
     {{[](Recipe& r) { r.scale = Scale::kOther; }}}},
};

}  // namespace multihead::diagnosis
