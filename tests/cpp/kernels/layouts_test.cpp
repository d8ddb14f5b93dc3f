// SPDX-License-Identifier: MIT
//
// Thousands of small random configurations for each layout that generation has,
// each on one instruction set by turns, against the float64 loops: rows as they
// lie in a cache, ragged rows with their gradients, and pages. As in
// fuzz_test.cpp, MULTIHEAD_LONG=1 tries ten times as many, and
// MULTIHEAD_FUZZ_FIRST says at which to begin.
#include "tests/cpp/kernels/ragged.h"

namespace kernel_test {
namespace {

constexpr int64_t kSplit = 512;  ///< keys of one

/// Three of four are a few queries, as in decoding and chunks, some of them
/// against keys of several splits; the others anything.
Shape small_shape(Rng& rng) {
  constexpr int64_t kWork = int64_t{1} << 15;
  Shape s = random_shape(rng, kWork);
  if (chance(rng, 0.25)) return s;
  s.Lq = pick<int64_t>(rng, {1, 1, 1, 2, 3, 4, 5, 8, 15, 24, 25});
  if (chance(rng, 0.15)) {
    const int64_t group = uniform(rng, 1, 2), width = uniform(rng, 1, 10);
    return {uniform(rng, 1, 2),
            group,
            1,
            s.Lq,
            uniform(rng, kSplit, 3 * kSplit),
            width,
            pick<int64_t>(rng, {width, 5})};
  }
  s.Lk = random_length(rng, /*large=*/true);
  shrink(rng, s, kWork);
  return s;
}

/// What a test is given: configuration `number`, and who computes it.
struct Given {
  uint64_t number;
  Call call;
  const Variant& variant;
};

class Layouts : public testing::TestWithParam<Dtype> {
 protected:
  /// test(given) judges, and returns the plan that ran.
  template <class Test>
  void for_each_configuration(bool masks, const Test& test) {
    const Dtype dtype = GetParam();
    const uint64_t first = number_from("MULTIHEAD_FUZZ_FIRST");
    const uint64_t last = getenv("MULTIHEAD_LONG") ? 30000 : 3000;
    const std::vector<Variant> all = variants(dtype);
    uint64_t decoded = 0, in_splits = 0;
    for (uint64_t number = first; number < last && !HasFailure(); ++number) {
      const Variant& variant = all[number % all.size()];
      Rng rng(number * 4 + static_cast<uint64_t>(dtype));
      const Shape shape = small_shape(rng);
      Given given{number, random_call(rng, dtype, shape, masks), variant};
      SCOPED_TRACE("configuration " + std::to_string(number) + ", " +
                   variant.name + ": " + description(given.call));
      const bool is_decoding = test(given).is_decoding;
      decoded += is_decoding;
      in_splits += is_decoding && shape.Lk > kSplit;
    }
    // Tiles of AMX have no products of few rows.
    const bool some_decode =
        dtype == Dtype::kBFloat16 && why_not(Isa::kAmx).empty();
    const uint64_t count = last - first;
    EXPECT_GE(decoded, count / (some_decode ? 4 : 2));
    EXPECT_LT(decoded, count);
    EXPECT_GE(in_splits, decoded / 20);
    printf(
        "  %s: %d configurations, %d decoded, %d in splits; worst error, as a "
        "share of what is allowed: out %.2f, logsumexp %.2f\n",
        name_of(dtype), static_cast<int>(count), static_cast<int>(decoded),
        static_cast<int>(in_splits), worst_.out, worst_.logsumexp);
  }

  WorstErrors worst_;
};

TEST_P(Layouts, RowsStayWithinTheErrorBudget) {
  for_each_configuration(/*masks=*/true, [&](const Given& given) {
    const auto& [number, c, variant] = given;
    const Running running{.threads = number % 16 == 0 ? 3 : 1};
    const Result result = forward(variant, c, running);
    judge_forward(c, Golden(c), result, worst_);
    EXPECT_TRUE(result.out.gaps_hold(kUnwritten));
    return variant.kernels.forward.plan({arguments_of(c), {}, nullptr},
                                        running.threads);
  });
}

TEST_P(Layouts, RaggedRowsStayWithinTheErrorBudget) {
  WorstGradients worst;
  for_each_configuration(/*masks=*/false, [&](Given& given) {
    RaggedRows batch(std::move(given.call), given.number);
    const kernels::Plan plan = batch.run(given.variant);
    for (int64_t n = 0; n < batch.s.B; ++n) {
      SCOPED_TRACE("sequence " + std::to_string(n));
      const Call alone = batch.sequences.alone(n);
      const Golden golden(alone);
      judge_forward(alone, golden, batch.result_of(n), worst_);
      judge_backward(alone, golden, batch.output_gradients_of(n),
                     batch.gradients_of(n), worst);
    }
    return plan;
  });
  printf("  gradients: query %.2f, key %.2f, value %.2f, heads %.2f\n",
         worst.query, worst.key, worst.value, worst.heads);
}

TEST_P(Layouts, PagesStayWithinTheErrorBudget) {
  for_each_configuration(/*masks=*/false, [&](Given& given) {
    PagedBatch batch(std::move(given.call), given.number);
    const kernels::Plan plan = batch.run(given.variant);
    for (int64_t n = 0; n < batch.s.B; ++n) {
      SCOPED_TRACE("sequence " + std::to_string(n));
      const Call alone = batch.sequences.alone(n);
      judge_forward(alone, Golden(alone), batch.result_of(n), worst_);
    }
    return plan;
  });
}

INSTANTIATE_TEST_SUITE_P(Dtype, Layouts,
                         testing::Values(Dtype::kFloat32, Dtype::kBFloat16,
                                         Dtype::kFloat16),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace kernel_test
