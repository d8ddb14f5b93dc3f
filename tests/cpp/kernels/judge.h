// SPDX-License-Identifier: MIT
//
// Results against the float64 loops, element by element, by the one rule of
// reference/precision.h: |x − golden| ≤ c·u·scale + tiny.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/cpp/kernels/run.h"

namespace kernel_test {

/// Of results that are not stored in 16 bits.
inline reference::Precision compute_precision_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? reference::kFloat64 : reference::kFloat32;
}

/// Of results stored in the dtype. The floor is not below that of the
/// arithmetic, though bfloat16 reaches lower.
inline reference::Precision precision_of(Dtype dtype) {
  reference::Precision p = dtype == Dtype::kBFloat16 ? reference::kBFloat16
                           : dtype == Dtype::kFloat16
                               ? reference::kFloat16
                               : compute_precision_of(dtype);
  p.tiny = std::max(p.tiny, compute_precision_of(dtype).tiny);
  return p;
}

/// The largest |x − golden| / allowed so far, by kind of result.
struct WorstErrors {
  double out = 0, logsumexp = 0, weights = 0, entropy = 0;
};

/// Numbers and what they are held to.
struct Expectation {
  const char* what;
  const reference::Values& golden;
  const reference::Values& allowed;
};

/// Fails at the first element that is not within what is allowed; returns the
/// largest error in units of it. Where golden is not finite, the result is not
/// either, and of the same kind.
inline double judge(const reference::Values& actual,
                    const Expectation& expected) {
  EXPECT_EQ(actual.size(), expected.golden.size()) << expected.what;
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double golden = expected.golden[i];
    if (actual[i] == golden || (std::isnan(golden) && std::isnan(actual[i]))) {
      continue;
    }
    const double error = std::abs(actual[i] - golden) / expected.allowed[i];
    worst = std::max(worst, error);
    if (error <= 1) continue;
    ADD_FAILURE() << expected.what << ", element " << i << ": " << actual[i]
                  << " is " << error << " times what is allowed from "
                  << golden;
    return error;
  }
  return worst;
}

inline void expect_same_bits(const char* what,
                             const std::vector<uint64_t>& actual,
                             const std::vector<uint64_t>& expected) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i], expected[i])
        << "bits of " << what << ", element " << i;
  }
}

/// A call with the loops' answer to it.
struct Golden {
  explicit Golden(const Call& c)
      : arguments(golden_arguments_of(c)),
        output(reference::forward(arguments)) {}
  reference::Attention arguments;
  reference::Output output;
};

/// The floor of weights is that of exp, times what dropout multiplies them by.
inline reference::Precision weights_precision_of(const Call& c) {
  reference::Precision p = precision_of(c.dtype);
  const double left = 1 - c.dropout.probability;
  if (left > 0) p.tiny /= left;
  return p;
}
/// The floor of out is that of weights, times what they multiply.
inline reference::Precision out_precision_of(const Call& c,
                                             const reference::Values& value) {
  reference::Precision p = weights_precision_of(c);
  double largest = 1;
  for (double v : value) largest = std::max(largest, std::abs(v));
  p.tiny *= largest;
  return p;
}

inline void judge_forward(const Call& c, const Golden& golden,
                          const Result& result, WorstErrors& worst) {
  const reference::Precision p = out_precision_of(c, golden.arguments.value);
  const reference::Output& g = golden.output;
  worst.out = std::max(
      worst.out,
      judge(result.out.values(),
            {"out", g.out, p.allowed(g.out_scale, g.lambda, p.forward)}));
  worst.logsumexp = std::max(
      worst.logsumexp, judge(result.logsumexp.values(),
                             {"logsumexp", g.logsumexp,
                              p.allowed_logsumexp(g.logsumexp, g.lambda)}));
}

/// Golden weights after dropout, per head or averaged over heads.
inline reference::Values golden_weights(const Call& c, const Golden& golden,
                                        bool average) {
  reference::Values weights = golden.output.weights;
  const reference::Values& factors = golden.arguments.dropout;
  for (size_t i = 0; i < factors.size(); ++i) weights[i] *= factors[i];
  if (!average) return weights;
  const Shape& s = c.shape;
  const int64_t matrix = s.Lq * s.Lk;
  reference::Values mean(s.B * matrix);
  for (int64_t n = 0; n < s.B * s.H * matrix; ++n) {
    const int64_t b = n / (s.H * matrix);
    mean[b * matrix + n % matrix] += weights[n] / static_cast<double>(s.H);
  }
  return mean;
}

inline void judge_weights(const Call& c, const Golden& golden,
                          const Tensor& weights, WorstErrors& worst) {
  const reference::Precision p = weights_precision_of(c);
  const reference::Values expected =
      golden_weights(c, golden, weights.sizes()[1] != c.shape.H);
  worst.weights =
      std::max(worst.weights,
               judge(weights.values(),
                     {"weights", expected,
                      p.allowed(expected, golden.output.lambda, p.forward)}));
}

}  // namespace kernel_test
