// SPDX-License-Identifier: MIT
//
// What the scores q·k are multiplied by.
#include <ATen/TensorOperators.h>

#include <cmath>
#include <optional>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

double root(int64_t size) { return 1.0 / std::sqrt(static_cast<double>(size)); }

double root_of_width(const Scaling& s) { return root(s.query.size(-1)); }

bool close(double x, double y) { return std::abs(x - y) <= 1e-6 * std::abs(y); }

double other_scale(const Scaling& s);

bool is(Scale known, double scale, const Scaling& s) try {
  return known != other_scale && close(scale, known(s));
} catch (const Impossible&) {
  return false;
}

// The scale of a fault that is this number, in float32 perhaps.
std::optional<double> named_as(double scale, const Scaling& s) {
  for (const Fault& fault : kScaleFaults) {
    for (const Way& way : fault.ways) {
      Recipe recipe;
      way.apply(recipe);
      if (is(recipe.scale, scale, s)) return recipe.scale(s);
    }
  }
  return std::nullopt;
}

// The number by which the last such tensor of the trace differs from these
// products, where it is none that has a name: queries may have been scaled
// before, and scores again. Else one that may have its name by chance, as 1/5
// where there are five keys. Some of them may be blocked already.
std::optional<double> factor_in_trace(const Scaling& s,
                                      const Tensor& all_products) {
  std::optional<double> unnamed, named;
  // What is blocked is -1e9 or so; of the rest, enough must be left to tell.
  const double limit = 1e4 * (1 + largest_finite(all_products));
  const Tensor contiguous = all_products.contiguous();
  const double* const products = contiguous.const_data_ptr<double>();
  for (const Tensor& tensor : s.call.trace) {
    if (tensor.numel() != contiguous.numel()) continue;
    const Tensor numbers = tensor.to(at::kDouble).contiguous();
    const double* const x = numbers.const_data_ptr<double>();
    int64_t blocked = 0;
    double sum = 0, squares = 0, sum_of_x = 0, squares_of_x = 0;
    for (int64_t i = 0; i < numbers.numel(); ++i) {
      if (!(std::abs(x[i]) < limit)) {
        ++blocked;
        continue;
      }
      sum += products[i], squares += products[i] * products[i];
      sum_of_x += x[i], squares_of_x += x[i] * x[i];
    }
    if (2 * blocked > numbers.numel()) continue;
    const double norm = std::sqrt(squares);
    const double size = std::sqrt(squares_of_x) / norm;
    const double scale = std::copysign(size, sum_of_x / sum);
    // Beside the size of its terms: a sum may be nearly 0.
    const double rest = std::abs(sum_of_x - scale * sum);
    const bool proportional =
        std::isfinite(scale) && scale != 0 && rest <= 1e-5 * size * norm;
    if (!proportional || is(scale_by_width, scale, s)) continue;
    const std::optional<double> other = named_as(scale, s);
    // The products themselves are always there, as if nothing scaled them.
    if (!other) {
      unnamed = scale;
    } else if (!close(scale, 1.0)) {
      named = other;
    }
  }
  return unnamed ? unnamed : named;
}

// Whether all queries have length 1.
bool are_unit(const Tensor& query) {
  return (query.square().sum(-1) - 1.0).abs().max().item<double>() < 1e-6;
}

// Of q·k, or of that of the first head, as in a loop over heads. That of
// cosines is up to the code.
double other_scale(const Scaling& s) {
  require(!are_unit(s.query));
  const Tensor products = matrix_product(s.query, s.key.transpose(-2, -1));
  auto factor = factor_in_trace(s, products);
  if (!factor) factor = factor_in_trace(s, products.select(1, 0));
  require(factor.has_value());
  return *factor;
}

// As einsum does where each has a letter of its own for the features.
Tensor features_summed_apart(const Tensor& query, const Tensor& keys) {
  return query.sum(-1, /*keepdim=*/true) * keys.sum(-2, /*keepdim=*/true);
}

template <auto scale>
void scale_by(Recipe& r) {
  r.scale = scale;
}

constexpr std::string_view kRemedy =
    "Divide q·k by the square root of the head width, sqrt(d) = sqrt({D}): a "
    "sum of d products of unit variance has the standard deviation sqrt(d), "
    "and the division brings it back to 1.";

}  // namespace

Tensor queries_times_keys(const Tensor& query, const Tensor& keys) {
  return matrix_product(query, keys);
}

double scale_by_width(const Scaling& s) {
  return s.call.scale.value_or(root_of_width(s));
}

double scale_by_split_width(const Scaling& s) { return root(s.n.width); }

double scale_twice(const Scaling& s) { return std::pow(scale_by_width(s), 2); }

double scale_weights(const Scaling&) { return 1.0; }

double scale_weights_by_embed_dim(const Scaling& s) {
  require(s.n.embed_dim != s.query.size(-1));
  return 1.0;
}

double scale_weights_by_all_heads(const Scaling& s) {
  require(s.n.heads > 1);  // else it is the width of one
  return 1.0;
}

// ---- Faults ----------------------------------------------------------------

const std::vector<Fault> kScaleFaults = {
    {"scale_missing",
     "The scores are not scaled.",
     kRemedy,
     {{scale_by<[](const Scaling&) { return 1.0; }>}}},
    {"scale_by_embed_dim",
     "The scores are divided by sqrt(d_model) = sqrt({E}).",
     kRemedy,
     {{scale_by<[](const Scaling& s) { return root(s.n.embed_dim); }>}}},
    {"scale_not_root",
     "The scores are divided by the head width {D}, not by its square root.",
     kRemedy,
     {{scale_by<[](const Scaling& s) {
       return std::pow(root_of_width(s), 2);
     }>}}},
    {"scale_by_all_heads",
     "The scores are divided by sqrt({H} · {D}), the root of the width of "
     "all heads together.",
     kRemedy,
     {{scale_by<[](const Scaling& s) {
       require(s.n.heads * s.n.width !=
               s.n.embed_dim);  // else it has another name
       return root(s.n.heads * s.n.width);
     }>}}},
    {"scale_by_value_width",
     "The scores are divided by the square root of the width of the values, "
     "not of that of queries and keys.",
     kRemedy,
     {{scale_by<[](const Scaling& s) {
       require(s.n.value_width != s.n.width);  // likewise
       return root(s.n.value_width);
     }>}}},
    {"scale_by_embed_dim_not_root",
     "The scores are divided by d_model = {E}.",
     kRemedy,
     {{scale_by<[](const Scaling& s) {
       return std::pow(root(s.n.embed_dim), 2);
     }>}}},
    {"scale_applied_twice",
     "The scores are scaled twice: by 1/sqrt({D}), and again.",
     "Scale once: the query before the product, or the scores after it. "
     "F.scaled_dot_product_attention scales by itself.",
     {{scale_by<scale_twice>}}},
    {"scale_by_length",
     "The scores are divided by the square root of a length, not of the head "
     "width.",
     kRemedy,
     {{scale_by<[](const Scaling& s) { return root(s.key.size(2)); }>,
       "It is sqrt(Lk) = sqrt({Lk})."},
      {scale_by<[](const Scaling& s) { return root(s.query.size(2)); }>,
       "It is sqrt(Lq) = sqrt({Lq})."},
      {scale_by<[](const Scaling& s) {
         return std::pow(root(s.key.size(2)), 2);
       }>,
       "It is Lk = {Lk}."},
      {scale_by<[](const Scaling& s) { return root(s.query.size(0)); }>,
       "It is sqrt(B) = sqrt({B}), of the batch."}}},
    {"scale_by_heads",
     "The scores are divided by the square root of the number of heads, "
     "sqrt({H}).",
     kRemedy,
     {{scale_by<[](const Scaling& s) { return root(s.n.heads); }>}}},
    {"scale_by_group_count",
     "The number of groups enters the scale of the scores.",
     kRemedy,
     {{scale_by<[](const Scaling& s) {
         require(s.n.kv_heads != s.n.heads);
         return root(s.n.kv_heads);
       }>,
       "They are divided by sqrt(G) = sqrt({G})."},
      {scale_by<[](const Scaling& s) {
         require(s.n.kv_heads != s.n.heads);
         return root(s.n.embed_dim / s.n.kv_heads);
       }>,
       "They are divided by sqrt(E / G), not by sqrt(E / H) = sqrt({D})."}}},
    {"scale_wrong_power",
     "The scores are divided by another power of the head width than its "
     "square root.",
     kRemedy,
     {{scale_by<[](const Scaling& s) { return std::sqrt(root_of_width(s)); }>,
       "It is the fourth root; on queries and on keys, it would be right."},
      {scale_by<[](const Scaling& s) { return std::pow(root_of_width(s), 4); }>,
       "It is {D}^2."},
      {scale_by<[](const Scaling& s) {
         return 2 * std::pow(root_of_width(s), 2);
       }>,
       "It is {D} / 2, as d ** 1/2 has it: the power binds first; the root is "
       "d ** 0.5."}}},
    {"scale_multiplied",
     "The scores are multiplied by the square root of a width, not divided.",
     kRemedy,
     {{scale_by<[](const Scaling& s) { return 1.0 / scale_by_width(s); }>,
       "It is sqrt({D})."},
      {scale_by<[](const Scaling& s) { return 1.0 / root(s.n.embed_dim); }>,
       "It is sqrt(d_model) = sqrt({E})."}}},
    {"scale_after_softmax",
     "The weights are divided by sqrt({D}) after the softmax; the scores are "
     "not.",
     kRemedy,
     {{scale_by<scale_weights>},
      {scale_by<scale_weights_by_embed_dim>,
       "It is sqrt(d_model) = sqrt({E}) by which they are divided."},
      {scale_by<scale_weights_by_all_heads>,
       "It is sqrt({H} · {D}) by which they are divided."}}},
    {"scores_summed_apart",
     "Queries and keys are summed over their features, each for itself, and "
     "only the sums are multiplied.",
     "One letter for the features of both: einsum(\"bhqd,bhkd->bhqk\", q, k), "
     "or q @ k.transpose(-2, -1).",
     {{[](Recipe& r) { r.product = features_summed_apart; }}}},
    {"scores_floored",
     "The scores are rounded down to whole numbers, as by `//`: no gradient "
     "reaches queries and keys.",
     "Divide with `/`: `//` drops what is behind the point.",
     {{[](Recipe& r) { r.floored = true; }}}},
    {"scale_of_another_number",
     "The scores are scaled by another number than 1/sqrt({D}): a constant, "
     "perhaps, that fits other sizes.",
     kRemedy,
     {{scale_by<other_scale>}}},
};

}  // namespace multihead::diagnosis
