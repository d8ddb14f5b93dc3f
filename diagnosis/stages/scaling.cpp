// SPDX-License-Identifier: MIT
#include "diagnosis/stages/scaling.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "diagnosis/stages/impossible.h"

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

double scale_of(const Run& run, Scale choice, const Tensor& query,
                const Tensor& key);

// Where widths are the usual ones, two of them have another name.
bool is_possible(const Run& run, Scale choice) {
  const Sizes& n = run.sizes;
  if (choice == Scale::kRootOfAllHeads) return n.heads * n.width != n.embed_dim;
  if (choice == Scale::kRootOfValueWidth) return n.value_width != n.width;
  return true;
}

bool close(double x, double y) { return std::abs(x - y) <= 1e-6 * std::abs(y); }

// The number by which a tensor of the trace differs from q·k, where it is none
// that has a name.
double other_scale(const Run& run, const Tensor& query, const Tensor& key) {
  const Tensor products = query.matmul(key.transpose(-2, -1));
  const double norm = products.norm().item<double>();
  const double sum = products.sum().item<double>();
  for (const Tensor& tensor : run.trace) {
    if (tensor.numel() != products.numel()) continue;
    const Tensor x = tensor.to(at::kDouble);
    const double size = x.norm().item<double>() / norm;
    const double scale = std::copysign(size, x.sum().item<double>() / sum);
    const bool proportional = std::isfinite(scale) && scale != 0 &&
                              close(x.sum().item<double>(), scale * sum);
    const bool named =
        std::any_of(std::begin(kNamed), std::end(kNamed), [&](Scale choice) {
          return is_possible(run, choice) &&
                 close(scale, scale_of(run, choice, query, key));
        });
    if (proportional && !named) return scale;
  }
  throw Impossible();
}

double scale_of(const Run& run, Scale choice, const Tensor& query,
                const Tensor& key) {
  const double width = root(query.size(-1));
  switch (choice) {
    case Scale::kRootOfWidth:
      return run.scale.value_or(width);
    case Scale::kNone:
    case Scale::kAfterSoftmax:
      return 1.0;
    case Scale::kRootOfEmbedding:
      return root(run.sizes.embed_dim);
    case Scale::kRootOfAllHeads:
      need(is_possible(run, choice));
      return root(run.sizes.heads * run.sizes.width);
    case Scale::kEmbedding:
      return root(run.sizes.embed_dim) * root(run.sizes.embed_dim);
    case Scale::kWidth:
      return width * width;
    case Scale::kTwice:
      return std::pow(run.scale.value_or(width), 2);
    case Scale::kRootOfKeys:
      return root(key.size(2));
    case Scale::kKeys:
      return root(key.size(2)) * root(key.size(2));
    case Scale::kRootOfQueries:
      return root(query.size(2));
    case Scale::kRootOfHeads:
      return root(run.sizes.heads);
    case Scale::kRootOfGroups:
      need(run.sizes.kv_heads != run.sizes.heads);
      return root(run.sizes.kv_heads);
    case Scale::kRootOfGroupWidth:
      need(run.sizes.kv_heads != run.sizes.heads);
      return root(run.sizes.embed_dim / run.sizes.kv_heads);
    case Scale::kRootOfOneHead:
      return root(run.sizes.width);
    case Scale::kRootOfValueWidth:
      need(is_possible(run, choice));
      return root(run.sizes.value_width);
    case Scale::kFourthRoot:
      return std::sqrt(width);
    case Scale::kWidthSquared:
      return std::pow(width, 4);
    case Scale::kMultiplied:
      return 1.0 / run.scale.value_or(width);
    case Scale::kOther:
      return other_scale(run, query, key);
  }
  throw Impossible();
}

}  // namespace

double scale_of(const Run& run, const Recipe& recipe, const Tensor& query,
                const Tensor& key) {
  return scale_of(run, recipe.scale, query, key);
}

}  // namespace multihead::diagnosis
