// SPDX-License-Identifier: MIT
//
// The weights on request, and what is said of a row without them: the largest
// ones with their keys, and the entropy. That they stay within the error budget
// is for the random configurations; here they meet each other.
#include <numeric>

#include "tests/cpp/kernels/judge.h"
#include "tests/cpp/kernels/random_call.h"

namespace kernel_test {
namespace {

class Weights : public EachIsa {};
class Summary : public EachIsa {};

/// Numbers of configurations, chosen so that each test takes about a second.
constexpr uint64_t kConfigurations = 40;

TEST_P(Weights, DoNotDependOnThreads) {
  for (const Dtype dtype : kAllDtypes) {
    const Variant kernels = variant(dtype);
    Call c = normal_call(dtype, {2, 6, 2, 101, 300, 8, 4});
    c.visibility.is_causal = true;
    c.dropout = {0.2, 3, 4};
    const Tensor logsumexp = forward(kernels, c).logsumexp;
    for (const bool average : {false, true}) {
      const auto once = weights(kernels, c, logsumexp, average).bits();
      for (const int threads : {2, 3, 5}) {
        EXPECT_EQ(weights(kernels, c, logsumexp, average, {.threads = threads})
                      .bits(),
                  once);
      }
    }
  }
}

TEST_P(Weights, AreThoseOfThePortableKernels) {
  if (!why_not(Isa::kPortable).empty()) GTEST_SKIP() << why_not(Isa::kPortable);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64}) {
    const Variant portable = variant_of(Isa::kPortable, dtype);
    for (uint64_t number = 0; number < kConfigurations; ++number) {
      const Call c = random_call(dtype, number);
      SCOPED_TRACE(description(c));
      const Tensor logsumexp = forward(portable, c).logsumexp;
      for (const bool average : {false, true}) {
        EXPECT_EQ(weights(variant(dtype), c, logsumexp, average).bits(),
                  weights(portable, c, logsumexp, average).bits());
      }
    }
  }
}

TEST_P(Weights, OfHiddenKeysAreZeroThoughTheRowIsNotANumber) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 1, 1, 20, 20, 8, 4});
    c.visibility.is_causal = true;
    c.query.set({0, 0, 3, 0}, std::nan(""));
    const Variant kernels = variant(dtype);
    const Tensor w = weights(kernels, c, forward(kernels, c).logsumexp);
    for (int64_t j = 0; j < 20; ++j) {
      EXPECT_EQ(std::isnan(w.get({0, 0, 3, j})), j <= 3) << "key " << j;
      if (j > 3) {
        EXPECT_EQ(w.get({0, 0, 3, j}), 0);
      }
    }
  }
}

TEST_P(Weights, TimesValuesAreTheOutput) {
  // A unit value singles out its key: out is the weight.
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64}) {
    Call c = normal_call(dtype, {2, 2, 1, 40, 33, 6, 33});
    c.value.fill([](const Index& i) { return i[2] == i[3] ? 1 : 0; });
    c.dropout = {0.4, 11, 12};
    const Golden golden(c);
    const Result result = forward(variant(dtype), c);
    WorstErrors worst;
    judge_weights(c, golden, result.out, worst);
    judge_weights(c, golden, weights(variant(dtype), c, result.logsumexp),
                  worst);
  }
}

/// Visible keys of a row by descending weight, of equal ones the lower first.
std::vector<int64_t> ranking(const reference::Attention& a, const Index& row,
                             const Tensor& weights) {
  std::vector<int64_t> keys;
  const reference::Row reference_row(a, row[0], row[1], row[2]);
  for (int64_t j = 0; j < a.Lk; ++j) {
    if (reference_row.sees(a, j)) keys.push_back(j);
  }
  const auto rank = [&](int64_t j) {
    return std::pair(-weights.get({row[0], row[1], row[2], j}), j);
  };
  std::sort(keys.begin(), keys.end(),
            [&](int64_t x, int64_t y) { return rank(x) < rank(y); });
  return keys;
}

/// The same bits as the weights that the other kernel writes.
void expect_top_of(const Call& c, const Tensor& weights,
                   const SummaryResult& top) {
  const reference::Attention a = golden_arguments_of(c);
  for_each_index({c.shape.B, c.shape.H, c.shape.Lq, 1}, [&](Index i) {
    const std::vector<int64_t> keys = ranking(a, i, weights);
    for (i[3] = 0; i[3] < top.keys.sizes()[3]; ++i[3]) {
      const bool is_there = i[3] < static_cast<int64_t>(keys.size());
      const int64_t key = is_there ? keys[i[3]] : -1;
      ASSERT_EQ(top.keys.get(i), key) << i[0] << ' ' << i[1] << ' ' << i[2];
      ASSERT_EQ(top.weights.get(i),
                is_there ? weights.get({i[0], i[1], i[2], key}) : 0);
    }
  });
}

TEST_P(Summary, ListsTheLargestWeights) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64}) {
    const Variant kernels = variant(dtype);
    for (uint64_t number = 0; number < kConfigurations; ++number) {
      Call c = random_call(dtype, number);
      c.dropout = {};
      SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                   description(c));
      const Tensor logsumexp = forward(kernels, c).logsumexp;
      const int64_t count = std::vector<int64_t>{1, 2, 5, 40}[number % 4];
      expect_top_of(c, weights(kernels, c, logsumexp),
                    summary(kernels, c, logsumexp, count));
    }
  }
}

TEST_P(Summary, PutsTheLowerOfEqualKeysFirst) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 1, 1, 20, 200, 4, 4});
    c.scale = 0;
    c.visibility.left = 150;
    const Tensor logsumexp = forward(variant(dtype), c).logsumexp;
    const SummaryResult top = summary(variant(dtype), c, logsumexp, 9);
    for_each_index(top.keys.sizes(),
                   [&](const Index& i) { ASSERT_EQ(top.keys.get(i), i[3]); });
  }
}

/// Σ −w·ln w, and its scale: an error of w shows in both factors. Of each
/// weight below the floor the whole term may be missing.
void judge_entropy(const Call& c, const Golden& golden, const Tensor& entropy,
                   WorstErrors& worst) {
  reference::Precision p = compute_precision_of(c.dtype);
  p.tiny *= -std::log(p.tiny) * static_cast<double>(c.shape.Lk);
  const reference::Values& w = golden.output.weights;
  const int64_t rows = c.shape.B * c.shape.H * c.shape.Lq;
  reference::Values expected(rows), scale(rows);
  for (int64_t n = 0; n < rows * c.shape.Lk; ++n) {
    if (w[n] == 0) continue;
    expected[n / c.shape.Lk] -= w[n] * std::log(w[n]);
    scale[n / c.shape.Lk] += w[n] * (1 + std::abs(std::log(w[n])));
  }
  worst.entropy =
      std::max(worst.entropy,
               judge(entropy.values(),
                     {"entropy", expected,
                      p.allowed(scale, golden.output.lambda, p.forward)}));
}

TEST_P(Summary, StaysWithinTheErrorBudget) {
  for (const Dtype dtype : kAllDtypes) {
    WorstErrors worst;
    for (uint64_t number = 0; number < kConfigurations; ++number) {
      Call c = random_call(dtype, number);
      c.dropout = {};
      SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                   description(c));
      const Golden golden(c);
      const Tensor logsumexp = forward(variant(dtype), c).logsumexp;
      const SummaryResult top = summary(variant(dtype), c, logsumexp, 3);
      judge_entropy(c, golden, top.entropy, worst);
      // The weights of the keys that it names.
      const reference::Precision p = compute_precision_of(dtype);
      reference::Values expected;
      for_each_index(top.keys.sizes(), [&](const Index& i) {
        const auto key = static_cast<int64_t>(top.keys.get(i));
        const int64_t row = (i[0] * c.shape.H + i[1]) * c.shape.Lq + i[2];
        expected.push_back(
            key < 0 ? 0 : golden.output.weights[row * c.shape.Lk + key]);
      });
      judge(top.weights.values(),
            {"largest weights", expected,
             p.allowed(expected, golden.output.lambda, p.forward)});
    }
    RecordProperty(std::string("worst_entropy_") + name_of(dtype),
                   std::to_string(worst.entropy));
  }
}

FOR_EACH_ISA(Weights);
FOR_EACH_ISA(Summary);

}  // namespace
}  // namespace kernel_test
