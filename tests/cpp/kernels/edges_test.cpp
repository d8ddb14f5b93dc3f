// SPDX-License-Identifier: MIT
//
// Where attention kernels break: rows that see nothing, sizes of zero, offsets
// beyond 32 bits, scores beyond a dtype's range, dead blocks of keys.
#include "tests/cpp/kernels/judge.h"

namespace kernel_test {
namespace {

constexpr double kInf = reference::kInfinity;

class Edges : public EachIsa {
 protected:
  /// Forward and weights against the loops.
  void expect_golden(const Call& c) {
    SCOPED_TRACE(description(c));
    const Golden golden(c);
    WorstErrors worst;
    const Variant kernels = variant(c.dtype);
    const Result result = forward(kernels, c);
    judge_forward(c, golden, result, worst);
    for (const bool average : {false, true}) {
      judge_weights(c, golden, weights(kernels, c, result.logsumexp, average),
                    worst);
    }
  }
};

/// Out and weights exactly 0, logsumexp exactly `logsumexp`, for row i.
void expect_empty_row(const Variant& variant, const Call& c, int64_t i,
                      double logsumexp) {
  SCOPED_TRACE(description(c));
  const Result result = forward(variant, c);
  for (int64_t e = 0; e < c.shape.Dv; ++e) {
    EXPECT_EQ(result.out.get({0, 0, i, e}), 0);
  }
  EXPECT_EQ(result.logsumexp.get({0, 0, 0, i}), logsumexp);
  for (const bool average : {false, true}) {
    const Tensor w = weights(variant, c, result.logsumexp, average);
    for (int64_t j = 0; j < c.shape.Lk; ++j) {
      EXPECT_EQ(w.get({0, 0, i, j}), 0);
    }
  }
  const SummaryResult top = summary(variant, c, result.logsumexp, 2);
  for (int64_t n = 0; n < 2; ++n) {
    EXPECT_EQ(top.keys.get({0, 0, i, n}), -1);
    EXPECT_EQ(top.weights.get({0, 0, i, n}), 0);
  }
  EXPECT_EQ(top.entropy.get({0, 0, 0, i}), 0);
}

TEST_P(Edges, RowsThatSeeNothingAreZero) {
  const auto for_every_kind = [](Call& c, int kind) {
    const auto keep = [](const Index& i) { return i[2] != 3; };
    switch (kind) {
      case 0:
        c.visibility.is_causal = true;
        align_bottom_right(c);
        break;
      case 1:
        c.visibility.left = 0;
        c.visibility.right = 2;
        align_bottom_right(c);
        break;
      case 2:
        set_key_lengths(c, {0});
        break;
      case 3:
        set_mask(c, Kind::kKeep, keep);
        break;
      case 4:
        set_mask(c, Kind::kBias,
                 [&](const Index& i) { return keep(i) ? 0.5 : -kInf; });
        break;
      case 5:
        set_key_mask(c, [](int64_t, int64_t) { return false; });
        break;
      default:  // seen, but every score is −infinity
        c.query.fill([](const Index& i) { return i[2] == 3 ? 1 : 0.5; });
        c.key.fill([](const Index&) { return 1; });
        c.query.set({0, 0, 3, 0}, -kInf);
    }
  };
  for (const Dtype dtype : kAllDtypes) {
    for (int kind = 0; kind < 7; ++kind) {
      Call c = normal_call(dtype, {1, 1, 1, 50, 20, 5, 7});
      for_every_kind(c, kind);
      expect_empty_row(variant(dtype), c, 3, -kInf);
      set_sinks(c, {0.75});
      expect_empty_row(variant(dtype), c, 3, 0.75);
      set_sinks(c, {-kInf});
      expect_empty_row(variant(dtype), c, 3, -kInf);
    }
  }
}

TEST_P(Edges, AnySizeMayBeZero) {
  for (const Dtype dtype : kAllDtypes) {
    const Variant kernels = variant(dtype);
    for (int zeros = 0; zeros < 64; ++zeros) {
      const auto size = [&](int bit, int64_t n) {
        return zeros >> bit & 1 ? 0 : n;
      };
      Call c =
          normal_call(dtype, {size(0, 2), size(1, 4), size(1, 2), size(2, 3),
                              size(3, 5), size(4, 6), size(5, 7)});
      SCOPED_TRACE(description(c));
      const Result result = forward(kernels, c);
      const Tensor average = weights(kernels, c, result.logsumexp, true);
      if (c.shape.H > 0) expect_golden(c);
      summary(kernels, c, result.logsumexp, 0);
      summary(kernels, c, result.logsumexp, 3);
      if (c.shape.Lk > 0) continue;
      for (double x : result.out.values()) EXPECT_EQ(x, 0);
      for (double x : result.logsumexp.values()) EXPECT_EQ(x, -kInf);
    }
  }
}

/// Scores that are all far below or above 0, and a hidden key that would win.
/// 32 are seen, so that weights are exact.
TEST_P(Edges, NoNumberStandsForHidden) {
  for (const Dtype dtype : kAllDtypes) {
    for (const double shift : {-1e5, -1e30, -3.4e38, 1e30}) {
      Call c(dtype, {1, 1, 1, 20, 33, 4, 1});
      c.value.fill([](const Index& i) { return i[2] == 7 ? 1e4 : 1; });
      set_mask(c, Kind::kBias,
               [&](const Index& i) { return i[3] == 7 ? -kInf : shift; });
      const Result result = forward(variant(dtype), c);
      for (double x : result.out.values()) EXPECT_EQ(x, 1) << shift;
    }
  }
}

TEST_P(Edges, WholeBlocksMayBeHidden) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64}) {
    // What is seen starts in the first, second, a middle or the last block.
    for (const int64_t first : {0, 127, 128, 300, 511, 512, 1000, 1299}) {
      Call c = normal_call(dtype, {1, 1, 1, 5, 1300, 3, 4});
      set_mask(c, Kind::kKeep, [&](const Index& i) {
        return i[3] >= first && (i[3] < first + 3 || i[3] > 1290);
      });
      expect_golden(c);
    }
  }
}

TEST_P(Edges, ScoresBeyondFloat16AreFinite) {
  Call c = normal_call(Dtype::kFloat16, {1, 1, 1, 17, 33, 64, 8});
  Rng rng(3);
  fill_normal(c.query, rng, 100);
  fill_normal(c.key, rng, 100);
  expect_golden(c);
  c.scale = 1;
  expect_golden(c);
}

TEST_P(Edges, SoftcapMayBeAnyPositiveNumber) {
  for (const Dtype dtype : kAllDtypes) {
    for (const double softcap : {1e300, 1e39, 1e-39}) {
      SCOPED_TRACE(softcap);
      Call c = normal_call(dtype, {1, 2, 1, 9, 40, 16, 8});
      c.softcap = softcap;
      WorstErrors worst;
      judge_forward(c, Golden(c), forward(variant(dtype), c), worst);
    }
  }
}

TEST_P(Edges, ManyEqualKeysWeighTheSame) {
  for (const Dtype dtype : kAllDtypes) {
    Call c(dtype, {1, 1, 1, 2, 65536, 1, 2});
    c.value.fill([](const Index&) { return 1; });
    const Result result = forward(variant(dtype), c);
    for (double x : result.out.values()) EXPECT_EQ(x, 1);
  }
}

TEST_P(Edges, NothingBehindTheKeysThatExistIsTouched) {
  for (const Dtype dtype : kAllDtypes) {
    for (const int64_t length : {1, 2, 3, 63, 64, 65, 129, 515}) {
      const Call is = normal_call(dtype, {1, 2, 1, 20, length, 33, 17});
      // Says that there are more, but the page behind the last is not there.
      Call says = normal_call(dtype, {1, 2, 1, 20, length, 33, 17});
      says.shape.Lk = length + 200;
      set_key_lengths(says, {length});
      EXPECT_EQ(forward(variant(dtype), says).out.bits(),
                forward(variant(dtype), is).out.bits())
          << name_of(dtype) << ", " << length << " keys";
    }
  }
}

/// Every operand in turn lies so wide that offsets exceed 2^31 and 2^32.
TEST_P(Edges, OffsetsExceed32Bits) {
  constexpr int64_t kFar = (int64_t{1} << 31) + 64;
  for (const Dtype dtype : kAllDtypes) {
    const Variant kernels = variant(dtype);
    const auto call = [&] {
      Call c = normal_call(dtype, {3, 2, 2, 3, 3, 20, 12});
      set_mask(c, Kind::kBias, [](const Index& i) {
        return i[2] == i[3] ? -kInf : 0.1 * static_cast<double>(i[3]);
      });
      return c;
    };
    const Call dense = call();
    const auto expected = forward(kernels, dense).out.bits();
    for (int dimension = 0; dimension < 3; ++dimension) {
      const auto far = [&](const Tensor& x) {
        Index strides = x.strides();
        strides[dimension] = kFar;
        return laid_out(x, strides);
      };
      Call c = call();
      c.query = far(dense.query);
      EXPECT_EQ(forward(kernels, c).out.bits(), expected) << "query";
      c.query = copy_of(dense.query);
      c.key = far(dense.key);
      EXPECT_EQ(forward(kernels, c).out.bits(), expected) << "key";
      c.key = copy_of(dense.key);
      c.value = far(dense.value);
      EXPECT_EQ(forward(kernels, c).out.bits(), expected) << "value";
      c.value = copy_of(dense.value);
      c.mask = far(dense.mask);
      EXPECT_EQ(forward(kernels, c).out.bits(), expected) << "mask";
      c.mask = copy_of(dense.mask);
      c.out_strides[dimension] = kFar;
      EXPECT_EQ(forward(kernels, c).out.bits(), expected) << "out";
    }
    Call c = call();
    c.mask = laid_out(dense.mask, {9 * 3, 9, 1, kFar});
    EXPECT_EQ(forward(kernels, c).out.bits(), expected) << "keys of the mask";
  }
}

TEST_P(Edges, LogsumexpMayBeLeftOut) {
  const Call c = normal_call(Dtype::kFloat32, {1, 2, 1, 9, 11, 3, 4});
  const Result result =
      forward(variant(c.dtype), c, {.wants_logsumexp = false});
  EXPECT_EQ(result.out.bits(), forward(variant(c.dtype), c).out.bits());
  for (uint64_t x : result.logsumexp.bits()) EXPECT_EQ(x, 0xFFFFFFFF);
}

FOR_EACH_ISA(Edges);

}  // namespace
}  // namespace kernel_test
