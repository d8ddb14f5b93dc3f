// SPDX-License-Identifier: MIT
//
// The backward kernels where random configurations would not look: bits, rows
// and keys without gradients, sizes of zero, what is not wanted. That gradients
// stay within the error budget is for fuzz_test.cpp.
#include <numeric>

#include "tests/cpp/kernels/gradients.h"

namespace kernel_test {
namespace {

class Backward : public EachIsa {};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Bits = std::vector<std::vector<uint64_t>>;

Bits bits_of(const GradientResult& result) {
  Bits bits;
  for (const auto& [name, x] : result.all()) bits.push_back(x->bits());
  return bits;
}

/// Forward and backward of a call, dout and dlogsumexp from a fixed seed.
GradientResult differentiate(const Variant& variant, const Call& c,
                             const Running& running = {},
                             const Wanted& wanted = {}) {
  Rng rng(5);
  return backward(variant, c, forward(variant, c), random_gradients(rng, c),
                  running, wanted);
}

TEST_P(Backward, BitsDoNotDependOnThreadsOrRepeats) {
  for (const Dtype dtype : kAllDtypes) {
    std::vector<Call> calls = large_calls(dtype);
    // More rows than a key sums up in one chain.
    calls.push_back(normal_call(dtype, {1, 2, 1, 900, 300, 6, 5}));
    for (const Call& c : calls) {
      SCOPED_TRACE(description(c));
      const Bits once = bits_of(differentiate(variant(dtype), c));
      for (const int threads : {1, 2, 3, 5}) {
        EXPECT_EQ(
            bits_of(differentiate(variant(dtype), c, {.threads = threads})),
            once)
            << threads << " threads";
      }
    }
  }
}

TEST_P(Backward, ManyRowsStayWithinTheErrorBudget) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 3, 1, 1100, 20, 4, 3});
    const Golden golden(c);
    const Result result = forward(variant(dtype), c);
    Rng rng(5);
    const OutputGradients gradients = random_gradients(rng, c);
    WorstGradients worst;
    judge_backward(c, golden, gradients,
                   backward(variant(dtype), c, result, gradients), worst);
  }
}

TEST_P(Backward, WhatIsNotWantedChangesNoOther) {
  for (const Dtype dtype : kAllDtypes) {
    for (const Call& c : large_calls(dtype)) {
      const Bits all = bits_of(differentiate(variant(dtype), c));
      for (int n = 0; n < 8; ++n) {
        const bool wanted[] = {(n & 1) != 0, (n & 2) != 0, (n & 4) != 0};
        const Bits some = bits_of(differentiate(
            variant(dtype), c, {}, {wanted[0], wanted[1], wanted[2]}));
        for (int g = 0; g < 6; ++g) {
          if (g > 2 || wanted[g]) {
            EXPECT_EQ(some[g], all[g]) << n << ' ' << g;
          }
        }
      }
    }
  }
}

/// Queries 3 and 7 see nothing, nobody sees keys 5 and 11.
Call with_blind_rows(Dtype dtype, bool of_bias) {
  Call c = normal_call(dtype, {1, 2, 1, 40, 30, 9, 6});
  const auto keep = [](const Index& i) {
    return i[2] != 3 && i[2] != 7 && i[3] != 5 && i[3] != 11;
  };
  if (of_bias) {
    set_mask(c, Kind::kBias, [&](const Index& i) {
      return keep(i) ? 0.5 : -reference::kInfinity;
    });
  } else {
    set_mask(c, Kind::kKeep, keep);
  }
  return c;
}

TEST_P(Backward, WhatSeesNothingAndIsNotSeenGetsNone) {
  for (const Dtype dtype : kAllDtypes) {
    for (const bool of_bias : {false, true}) {
      const Call c = with_blind_rows(dtype, of_bias);
      const GradientResult r = differentiate(variant(dtype), c);
      for_each_index(r.query.sizes(), [&](const Index& i) {
        if (i[2] == 3 || i[2] == 7) {
          EXPECT_EQ(r.query.get(i), 0);
        }
      });
      for (const Tensor* x : {&r.key, &r.value}) {
        for_each_index(x->sizes(), [&](const Index& i) {
          if (i[2] == 5 || i[2] == 11) {
            EXPECT_EQ(x->get(i), 0);
          }
        });
      }
    }
  }
}

TEST_P(Backward, NumbersThatNobodySeesPoisonNothing) {
  for (const Dtype dtype : kAllDtypes) {
    for (const double poison : {kNan, reference::kInfinity}) {
      Call c = with_blind_rows(dtype, false);
      const Bits clean = bits_of(differentiate(variant(dtype), c));
      for (int64_t j : {5, 11}) {
        c.key.set({0, 0, j, 2}, poison);
        c.value.set({0, 0, j, 4}, poison);
      }
      for (int64_t h : {0, 1}) c.query.set({0, h, 3, 1}, poison);
      EXPECT_EQ(bits_of(differentiate(variant(dtype), c)), clean);
    }
  }
}

TEST_P(Backward, OneBadQueryReachesTheKeysThatItSees) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 1, 1, 20, 30, 4, 4});
    c.visibility.is_causal = true;
    c.query.set({0, 0, 9, 0}, kNan);
    const GradientResult r = differentiate(variant(dtype), c);
    for (int64_t j = 0; j < 30; ++j) {
      EXPECT_EQ(std::isnan(r.value.get({0, 0, j, 0})), j <= 9) << j;
    }
    for (int64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(std::isnan(r.query.get({0, 0, i, 0})), i == 9) << i;
    }
  }
}

TEST_P(Backward, OneBadNumberOfDoutReachesTheKeysThatItsRowSees) {
  for (const Dtype dtype : kAllDtypes) {
    for (const double poison : {kNan, reference::kInfinity}) {
      Call c = normal_call(dtype, {1, 1, 1, 70, 80, 4, 4});
      c.visibility.is_causal = true;
      const Result result = forward(variant(dtype), c);
      Rng rng(5);
      const OutputGradients gradients = random_gradients(rng, c);
      gradients.out.set({0, 0, 40, 2}, poison);
      const GradientResult r = backward(variant(dtype), c, result, gradients);
      for (int64_t j = 0; j < 80; ++j) {
        EXPECT_EQ(std::isfinite(r.value.get({0, 0, j, 2})), j > 40) << j;
        EXPECT_TRUE(std::isfinite(r.value.get({0, 0, j, 1}))) << j;
        EXPECT_EQ(std::isfinite(r.key.get({0, 0, j, 0})), j > 40) << j;
      }
      for (int64_t i = 0; i < 70; ++i) {
        EXPECT_EQ(std::isfinite(r.query.get({0, 0, i, 0})), i != 40) << i;
      }
    }
  }
}

TEST_P(Backward, BytesOutsideOfTheIntervalAreNotTouched) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {1, 2, 1, 20, 300, 8, 8});
    set_key_lengths(c, {270});
    const Bits whole = bits_of(differentiate(variant(dtype), c));
    // The tensors end where the keys do: what follows cannot be read.
    const auto shortened = [](const Tensor& x) {
      Index sizes = x.sizes();
      sizes[2] = 270;
      Tensor y(x.storage(), sizes);
      for_each_index(sizes, [&](const Index& i) { y.set(i, x.get(i)); });
      return y;
    };
    c.key = shortened(c.key);
    c.value = shortened(c.value);
    EXPECT_EQ(bits_of(differentiate(variant(dtype), c)), whole);
  }
}

TEST_P(Backward, AnySizeMayBeZero) {
  for (const Dtype dtype : kAllDtypes) {
    for (int zeros = 0; zeros < 64; ++zeros) {
      const auto size = [&](int bit, int64_t n) {
        return zeros >> bit & 1 ? 0 : n;
      };
      const Call c =
          normal_call(dtype, {size(0, 2), size(1, 4), size(1, 2), size(2, 3),
                              size(3, 5), size(4, 6), size(5, 7)});
      SCOPED_TRACE(description(c));
      const GradientResult r = differentiate(variant(dtype), c);
      if (c.shape.Lq == 0 || c.shape.Dv == 0 || c.shape.B == 0) continue;
      for (const Tensor* x : {&r.query, &r.key, &r.value}) {
        for (double g : x->values()) EXPECT_TRUE(std::isfinite(g));
      }
    }
  }
}

/// Every operand and result in turn lies so wide that offsets exceed 2^31 and
/// 2^32.
TEST_P(Backward, OffsetsExceed32Bits) {
  constexpr int64_t kFar = (int64_t{1} << 31) + 64;
  for (const Dtype dtype : kAllDtypes) {
    const Variant kernels = variant(dtype);
    Call c = normal_call(dtype, {3, 2, 2, 3, 3, 20, 12});
    set_mask(c, Kind::kBias, [](const Index& i) {
      return i[2] == i[3] ? -reference::kInfinity
                          : 0.1 * static_cast<double>(i[3]);
    });
    Rng rng(5);
    OutputGradients gradients = random_gradients(rng, c);
    Result result = forward(kernels, c);
    const Bits expected = bits_of(backward(kernels, c, result, gradients));
    for (int dimension = 0; dimension < 3; ++dimension) {
      const auto far = [&](Index strides) {
        strides[dimension] = kFar;
        return strides;
      };
      // One at a time, and back again: each takes gigabytes of addresses.
      for (Tensor* x :
           {&c.query, &c.key, &c.value, &c.mask, &gradients.out, &result.out}) {
        const Tensor dense = copy_of(*x);
        *x = laid_out(dense, far(dense.strides()));
        EXPECT_EQ(bits_of(backward(kernels, c, result, gradients)), expected);
        *x = copy_of(dense);
      }
      for (auto strides : {&Wanted::query_strides, &Wanted::key_strides,
                           &Wanted::value_strides}) {
        Wanted wanted;
        const int64_t width = strides == &Wanted::value_strides ? 12 : 20;
        wanted.*strides = far({2 * 3 * width, 3 * width, width, 1});
        EXPECT_EQ(bits_of(backward(kernels, c, result, gradients, {}, wanted)),
                  expected);
      }
    }
  }
}

/// Σ out·dout + Σ logsumexp·dlogsumexp of the forward kernel.
double loss(const Variant& variant, const Call& c, const OutputGradients& g) {
  const Result result = forward(variant, c);
  const auto dot = [](const reference::Values& a, const reference::Values& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  return dot(result.out.values(), g.out.values()) +
         dot(result.logsumexp.values(), g.logsumexp.values());
}

Call call_with_everything() {
  Call c = normal_call(Dtype::kFloat64, {2, 4, 2, 60, 70, 9, 7});
  set_mask(c, Kind::kBias, [](const Index& i) {
    return i[3] % 5 == 1 && i[2] != i[3]
               ? -reference::kInfinity
               : 0.01 * static_cast<double>(i[2] - i[3]);
  });
  c.visibility.is_causal = true;
  set_key_lengths(c, {70, 66});
  set_query_offsets(c, {10, 15});
  set_key_mask(c, [](int64_t b, int64_t j) { return (j + b) % 9 != 4; });
  c.softcap = 2.5;
  c.dropout = {0.2, 3, 4};
  c.slopes = Tensor(Storage::kFloat64, {1, 1, 2, 4});
  c.slopes.fill([](const Index& i) { return 0.1 * static_cast<double>(i[3]); });
  set_sinks(c, {0.5, -1, 2, 0});
  return c;
}

/// Along a random direction of every operand at once, in float64: nothing of
/// the loops enters.
TEST_P(Backward, GradientsAreSlopesOfTheForwardKernel) {
  const Variant kernels = variant(Dtype::kFloat64);
  Call c = call_with_everything();
  Rng rng(6);
  const OutputGradients gradients = random_gradients(rng, c);
  const GradientResult r = backward(kernels, c, forward(kernels, c), gradients);
  constexpr double kStep = 1e-6;
  Call above = call_with_everything(), below = call_with_everything();
  double expected = 0;
  const auto move = [&](Tensor Call::* operand, const Tensor& gradient) {
    for_each_index((c.*operand).sizes(), [&](const Index& i) {
      const double x = (c.*operand).get(i), direction = normal(rng);
      if (std::isinf(x)) return;
      (above.*operand).set(i, x + kStep * direction);
      (below.*operand).set(i, x - kStep * direction);
      expected += gradient.get(i) * direction;
    });
  };
  move(&Call::query, r.query);
  move(&Call::key, r.key);
  move(&Call::value, r.value);
  move(&Call::mask, r.bias);
  move(&Call::slopes, r.slopes);
  const double slope =
      (loss(kernels, above, gradients) - loss(kernels, below, gradients)) /
      (2 * kStep);
  EXPECT_NEAR(slope / expected, 1, 1e-6);
}

/// √Σ (x − y)²
double distance(const reference::Values& x, const reference::Values& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}

/// √Σ of errors, against that of rounding the exact gradient alone. Rounding
/// one factor of each product adds as much again: √2. A short head scatters, so
/// short ones are many.
TEST(BackwardOfBFloat16, ErrsByOneAndAHalfRoundingsAtEveryLength) {
  std::vector<Shape> shapes{{1, 48, 48, 16, 16, 64, 64},
                            {1, 4, 4, 130, 130, 64, 64},
                            {1, 2, 2, 512, 512, 32, 32}};
  if (getenv("MULTIHEAD_LONG")) {
    shapes.push_back({1, 1, 1, 2048, 2048, 128, 128});
    shapes.push_back({1, 1, 1, 8192, 8192, 64, 64});
  }
  for (const Shape& shape : shapes) {
    for (const bool causal : {false, true}) {
      Call c = normal_call(Dtype::kBFloat16, shape);
      c.visibility.is_causal = causal;
      SCOPED_TRACE(description(c));
      const Golden golden(c);
      OutputGradients gradients{
          normal_call(c.dtype, shape, 2).query,
          Tensor(Storage::kFloat32, {1, shape.B, shape.H, shape.Lq})};
      gradients.logsumexp.fill([](const Index&) { return 0.0; });
      const reference::Gradients g = reference::backward(
          golden.arguments, golden.output, gradients.out.values(), {});
      for (const Variant& kernels : variants(c.dtype)) {
        const GradientResult r =
            backward(kernels, c, forward(kernels, c), gradients);
        const auto expect_close = [&](const char* what, const Tensor& x,
                                      const reference::Values& exact) {
          const Tensor rounded(x.storage(), x.sizes());
          size_t next = 0;
          rounded.fill([&](const Index&) { return exact[next++]; });
          EXPECT_LE(distance(x.values(), exact),
                    1.5 * distance(rounded.values(), exact))
              << what << ", " << kernels.name;
        };
        expect_close("dquery", r.query, g.query);
        expect_close("dkey", r.key, g.key);
        expect_close("dvalue", r.value, g.value);
      }
    }
  }
}

FOR_EACH_ISA(Backward);

}  // namespace
}  // namespace kernel_test
