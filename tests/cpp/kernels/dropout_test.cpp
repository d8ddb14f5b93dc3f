// SPDX-License-Identifier: MIT
//
// Dropout drops exactly what Philox4x32-10, written down a second time, says.
#include "tests/cpp/kernels/judge.h"

namespace kernel_test {
namespace {

// The published vectors: counters and keys of zeros, of ones, and digits of pi.
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(philox({}, {}),
            (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                   {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

const kernels::Dropout kDropouts[] = {
    {0.1, 0, 0},
    {0.5, 1, 0},
    {0.5, 0, 1},
    {0.999, 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF},
    {0.25, uint64_t{1} << 32, 0},
    {0.25, 0, uint64_t{1} << 32},
    {1e-4, 0x0123456789ABCDEF, 0xFEDCBA9876543210},
    // Parts of a larger call, which begin within a draw of eight keys.
    {.probability = 0.5, .seed = 7, .first_query = 3, .first_key = 1021},
    {.probability = 0.5, .seed = 7, .first_key = 5},
    {.probability = 0.3,
     .seed = 9,
     .offset = 4,
     .first_batch = 2,
     .first_head = 5,
     .heads = 11,
     .first_query = 100000,
     .first_key = 64}};

class Dropout : public EachIsa {};

TEST_P(Dropout, DropsWhatPhiloxSays) {
  for (const Dtype dtype : kAllDtypes) {
    for (const kernels::Dropout& dropout : kDropouts) {
      Call c = normal_call(dtype, {2, 3, 1, 35, 301, 4, 2});
      c.scale = 0;
      c.dropout = dropout;
      SCOPED_TRACE(description(c));
      const Variant kernels = variant(dtype);
      const Tensor w = weights(kernels, c, forward(kernels, c).logsumexp);
      for_each_index(w.sizes(), [&](const Index& i) {
        const double factor = dropout_factor(dropout, c.shape.H, i);
        ASSERT_EQ(w.get(i) != 0, factor != 0)
            << i[0] << ' ' << i[1] << ' ' << i[2] << ' ' << i[3];
      });
    }
  }
}

TEST_P(Dropout, DropsTheSameInTheOutput) {
  for (const Dtype dtype : kAllDtypes) {
    for (const kernels::Dropout& dropout : kDropouts) {
      Call c = normal_call(dtype, {2, 4, 2, 21, 77, 4, 77});
      c.scale = 0;
      c.dropout = dropout;
      c.value.fill([](const Index& i) { return i[2] == i[3] ? 1 : 0; });
      SCOPED_TRACE(description(c));
      const Tensor out = forward(variant(dtype), c).out;
      for_each_index(out.sizes(), [&](const Index& i) {
        const double factor = dropout_factor(dropout, c.shape.H, i);
        ASSERT_EQ(out.get(i) != 0, factor != 0);
      });
    }
  }
}

/// Within five standard deviations, over heads, rows and keys.
TEST_P(Dropout, KeepsAsManyAsAsked) {
  for (const double probability : {0.1, 0.5, 0.9}) {
    Call c(Dtype::kFloat32, {2, 4, 4, 200, 640, 1, 1});
    c.dropout = {probability, 2024, 7};
    const Variant kernels = variant(c.dtype);
    const Tensor w = weights(kernels, c, forward(kernels, c).logsumexp);
    double kept = 0, count = 0;
    for_each_index(w.sizes(), [&](const Index& i) {
      kept += w.get(i) != 0;
      count += 1;
    });
    const double deviation = std::sqrt(count * probability * (1 - probability));
    // The probability counts in steps of 2^-16.
    const double asked = count * (1 - probability);
    EXPECT_LT(std::abs(kept - asked), 5 * deviation + count * 0x1p-17);
  }
}

TEST_P(Dropout, OfZeroChangesNothing) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 2, 1, 30, 150, 8, 8});
    const Result without = forward(variant(dtype), c);
    c.dropout = {0, 99, 98};
    const Result with = forward(variant(dtype), c);
    EXPECT_EQ(with.out.bits(), without.out.bits());
    EXPECT_EQ(with.logsumexp.bits(), without.logsumexp.bits());
  }
}

TEST_P(Dropout, OfOneLeavesNothing) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 2, 1, 30, 150, 8, 8});
    const auto logsumexp = forward(variant(dtype), c).logsumexp.bits();
    c.dropout = {1, 99, 98};
    const Result result = forward(variant(dtype), c);
    for (double x : result.out.values()) ASSERT_EQ(x, 0);
    EXPECT_EQ(result.logsumexp.bits(), logsumexp) << "before dropout";
    for (const bool average : {false, true}) {
      const Tensor w = weights(variant(dtype), c, result.logsumexp, average);
      for (double x : w.values()) ASSERT_EQ(x, 0);
    }
  }
}

TEST_P(Dropout, DependsOnSeedAndOffset) {
  Call c = normal_call(Dtype::kFloat32, {1, 1, 1, 30, 150, 8, 8});
  std::vector<std::vector<uint64_t>> seen;
  for (const auto& [seed, offset] :
       std::vector<std::array<uint64_t, 2>>{{1, 0},
                                            {2, 0},
                                            {1, 1},
                                            {1, 2},
                                            {uint64_t{1} << 40, 0},
                                            {1, uint64_t{1} << 40}}) {
    c.dropout = {0.5, seed, offset};
    const auto bits = forward(variant(c.dtype), c).out.bits();
    EXPECT_EQ(std::count(seen.begin(), seen.end(), bits), 0);
    EXPECT_EQ(forward(variant(c.dtype), c).out.bits(), bits) << "repeated";
    seen.push_back(bits);
  }
}

FOR_EACH_ISA(Dropout);

}  // namespace
}  // namespace kernel_test
