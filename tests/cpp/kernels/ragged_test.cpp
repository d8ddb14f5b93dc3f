// SPDX-License-Identifier: MIT
//
// Ragged rows and pages: random sequences one after the other, on every
// instruction set, have the bits that each of them has alone, forward and
// backward.
#include "tests/cpp/kernels/ragged.h"

namespace kernel_test {
namespace {

constexpr uint64_t kConfigurations = 80;

void expect_same_result(const Result& actual, const Result& expected) {
  expect_same_bits("out", actual.out.bits(), expected.out.bits());
  expect_same_bits("logsumexp", actual.logsumexp.bits(),
                   expected.logsumexp.bits());
}

class RaggedBits : public testing::TestWithParam<Dtype> {
 protected:
  /// judge(variant, batch, n) for every sequence on every instruction set.
  template <class Batch, class Judge>
  void for_each_sequence(const Judge& judge) {
    for (uint64_t number = 0; number < kConfigurations; ++number) {
      Batch batch(random_call(GetParam(), number), number);
      SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                   description(batch.c));
      for (const Variant& variant : variants(GetParam())) {
        SCOPED_TRACE(variant.name);
        batch.run(variant);
        for (int64_t n = 0; n < batch.s.B; ++n) {
          SCOPED_TRACE("sequence " + std::to_string(n));
          judge(variant, batch, n);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
};

TEST_P(RaggedBits, OfRowsAreThoseOfEachSequenceAlone) {
  for_each_sequence<RaggedRows>([](const Variant& variant,
                                   const RaggedRows& batch, int64_t n) {
    const Call alone = batch.sequences.alone(n);
    const Result result = forward(variant, alone);
    expect_same_result(batch.result_of(n), result);
    const GradientResult actual = batch.gradients_of(n),
                         expected = backward(variant, alone, result,
                                             batch.output_gradients_of(n));
    for (size_t i = 0; i < actual.all().size(); ++i) {
      expect_same_bits(actual.all()[i].first, actual.all()[i].second->bits(),
                       expected.all()[i].second->bits());
    }
  });
}

TEST_P(RaggedBits, OfPagesAreThoseOfEachSequenceAlone) {
  for_each_sequence<PagedBatch>(
      [](const Variant& variant, const PagedBatch& batch, int64_t n) {
        expect_same_result(batch.result_of(n),
                           forward(variant, batch.sequences.alone(n)));
      });
}

// A cache without pages is one page as long as it is, which may be odd.
TEST(PagedPlan, IsDecodingWhereNoPageEndsInAPair) {
  Call c(Dtype::kBFloat16,
         {.B = 1, .H = 2, .G = 1, .Lq = 1, .Lk = 17, .D = 8, .Dv = 8});
  const int32_t table[4] = {};
  for (const Variant& variant : variants(c.dtype)) {
    SCOPED_TRACE(variant.name);
    kernels::AttentionArgs a = arguments_of(c);
    const auto is_decoding = [&](int64_t page) {
      a.key.block_table = a.value.block_table = page > 0 ? table : nullptr;
      a.key.page = a.value.page = page;
      return variant.kernels.forward.plan({a, {}, nullptr}, 1).is_decoding;
    };
    const bool of_rows = is_decoding(0);
    for (const int64_t page : {16, 17, 19}) {
      EXPECT_EQ(is_decoding(page), of_rows);
    }
    EXPECT_FALSE(is_decoding(5));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtype, RaggedBits, testing::ValuesIn(kAllDtypes),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace kernel_test
