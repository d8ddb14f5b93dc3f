// SPDX-License-Identifier: MIT
//
// exp, tanh and log of the kernels against the library's in more precision: exp
// for every float32 that a softmax can ask for. The figures that the test
// prints are worst errors; its bounds are what the essay of softmax.h and the
// error budget build on.
#include "tests/cpp/kernels/vector_functions.h"

#include <cstdio>

#include "tests/cpp/kernels/run.h"

namespace kernel_test {
namespace {

/// The functions of one instruction set; null where nothing of it runs here.
template <typename T>
struct Functions {
  using Function = void (*)(const T*, T*, int64_t);
  std::string name;
  Function exp, tanh, log;
  bool fuses;
};

#define MULTIHEAD_FUNCTIONS(target, fuses) \
  {#target, &exp_##target, &tanh_##target, &log_##target, fuses}

template <typename T>
std::vector<Functions<T>> functions() {
#ifdef MULTIHEAD_ARM
  return {MULTIHEAD_FUNCTIONS(portable, true), MULTIHEAD_FUNCTIONS(neon, true)};
#else
  std::vector<Functions<T>> result{MULTIHEAD_FUNCTIONS(portable, false)};
#ifdef MULTIHEAD_X86
  if (why_not(Isa::kAvx2).empty()) {
    result.push_back(MULTIHEAD_FUNCTIONS(portable_fma, true));
    result.push_back(MULTIHEAD_FUNCTIONS(avx2, true));
  }
  if (why_not(Isa::kAvx512).empty()) {
    result.push_back(MULTIHEAD_FUNCTIONS(avx512, true));
  }
#endif
  return result;
#endif
}

constexpr int64_t kChunk = 1 << 12;

/// Runs `member` of every instruction set over chunks of arguments, which
/// `next` fills until it returns false, and has each argument and value
/// checked. Those that fuse must agree in all bits.
template <typename T, typename Next, typename Check>
void sweep(typename Functions<T>::Function Functions<T>::* member, Next&& next,
           Check&& check) {
  const auto all = functions<T>();
  std::vector<T> x(kChunk), first(kChunk), y(kChunk);
  while (next(x)) {
    bool has_first = false;
    for (const Functions<T>& f : all) {
      std::vector<T>& values = f.fuses && !has_first ? first : y;
      (f.*member)(x.data(), values.data(), kChunk);
      if (f.fuses && has_first) {
        ASSERT_EQ(memcmp(first.data(), y.data(), kChunk * sizeof(T)), 0)
            << f.name << " differs in bits, first argument " << x[0];
        continue;
      }
      has_first |= f.fuses;
      bool good = true;
      for (int64_t i = 0; i < kChunk; ++i) good &= check(f, x[i], values[i]);
      ASSERT_TRUE(good) << f.name << ", arguments " << x.front() << " to "
                        << x.back();
    }
  }
}

float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// Chunks of every float32 of that sign bit with first ≤ |x| ≤ last.
auto every_float(float first, float last, uint32_t sign) {
  return [at = bits_of(first), last = bits_of(last),
          sign](std::vector<float>& x) mutable {
    if (at > last) return false;
    for (uint32_t i = 0; i < kChunk; ++i) {
      x[i] = from_bits(sign | std::min(at + i, last));
    }
    at += kChunk;
    return true;
  };
}
constexpr uint32_t kNegative = 0x80000000;

/// `count` chunks of random numbers between first and last.
auto some_doubles(double first, double last, int count) {
  return [=, rng = Rng(9)](std::vector<double>& x) mutable {
    if (count-- == 0) return false;
    std::uniform_real_distribution<double> distribution(first, last);
    for (double& value : x) value = distribution(rng);
    return true;
  };
}

/// Keeps the worst of errors and says whether each is at most 1.
struct Worst {
  double error = 0;
  bool take(double of_this) {
    error = std::max(error, of_this);
    return of_this <= 1;
  }
};

/// Bounds of relative errors, in unit roundoffs.
constexpr double kTanhBound = 4;
constexpr double kLogBound = 5;  ///< of max(1, |log|)

void report(const char* name, const Worst& single, const Worst& other) {
  printf("  %s: at most %.2f of its bound in float32, %.2f in float64\n", name,
         single.error, other.error);
}

/// Of e^x: a constant from the polynomial, and for large x the rounding of
/// log2 e; without a fused multiply-add that of x·log2 e too.
template <typename T>
double exp_bound(const Functions<T>& f, double x) {
  const double size = std::abs(x);
  return f.fuses ? 6.5 + 0.2 * size : 7 + 1.3 * size;
}

TEST(VectorExp, IsExactlyOneNearZero) {
  // The rest of all float32; smaller ones than 2^-60 only on request.
  const float first = getenv("MULTIHEAD_LONG") ? 0 : 0x1p-60f;
  sweep<float>(&Functions<float>::exp, every_float(first, 0x1p-30f, kNegative),
               [](const auto&, float, float y) { return y == 1; });
}

TEST(VectorExp, IsZeroBelow) {
  sweep<float>(&Functions<float>::exp,
               every_float(std::nextafter(87.0f, 88.0f), 256, kNegative),
               [](const auto&, float, float y) { return bits_of(y) == 0; });
  sweep<double>(&Functions<double>::exp,
                some_doubles(-1e300, std::nextafter(-708.0, -709.0), 10),
                [](const auto&, double, double y) { return y == 0; });
}

TEST(VectorExp, StaysWithinItsBoundForEveryFloat) {
  Worst single, other;
  const auto check = [&](const auto& f, float x, float y) {
    const double exact = std::exp(static_cast<double>(x));
    return single.take(std::abs(y - exact) / exact * 0x1p24 / exp_bound(f, x));
  };
  sweep<float>(&Functions<float>::exp, every_float(0x1p-30f, 87, kNegative),
               check);
  sweep<float>(&Functions<float>::exp, every_float(0x1p-3f, 80, 0), check);
  sweep<double>(&Functions<double>::exp, some_doubles(-707.9, 300, 300),
                [&](const auto& f, double x, double y) {
                  const long double exact =
                      std::exp(static_cast<long double>(x));
                  const auto error = std::abs(y - exact) / exact;
                  return other.take(static_cast<double>(error) * 0x1p53 /
                                    exp_bound(f, x));
                });
  report("exp", single, other);
}

TEST(VectorTanh, StaysWithinItsBound) {
  Worst single, other;
  const auto check = [&](const auto&, float x, float y) {
    const double exact = std::tanh(static_cast<double>(x));
    return single.take(std::abs((y - exact) / exact) * 0x1p24 / kTanhBound);
  };
  for (const uint32_t sign : {0u, kNegative}) {
    sweep<float>(&Functions<float>::tanh, every_float(0x1p-20f, 0x1p-16f, sign),
                 check);
    sweep<float>(&Functions<float>::tanh, every_float(0.25f, 64, sign), check);
  }
  sweep<double>(
      &Functions<double>::tanh, some_doubles(-30, 30, 300),
      [&](const auto&, double x, double y) {
        const long double exact = std::tanh(static_cast<long double>(x));
        const auto error = std::abs((y - exact) / exact);
        return other.take(static_cast<double>(error) * 0x1p53 / kTanhBound);
      });
  report("tanh", single, other);
}

/// Sums of a softmax: from 1 to how many keys there are, and far beyond.
TEST(VectorLog, StaysWithinItsBound) {
  Worst single, other;
  sweep<float>(
      &Functions<float>::log, every_float(0.5f, 0x1p10f, 0),
      [&](const auto&, float x, float y) {
        const double exact = std::log(static_cast<double>(x));
        const double size = std::max(1.0, std::abs(exact));
        return single.take(std::abs(y - exact) / size * 0x1p24 / kLogBound);
      });
  sweep<double>(
      &Functions<double>::log, some_doubles(0.5, 1e6, 300),
      [&](const auto&, double x, double y) {
        const long double exact = std::log(static_cast<long double>(x));
        const auto size = std::max(1.0L, std::abs(exact));
        return other.take(static_cast<double>(std::abs(y - exact) / size) *
                          0x1p53 / kLogBound);
      });
  report("log", single, other);
}

template <typename T>
class VectorFunctions : public testing::Test {};
using Scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(VectorFunctions, Scalars);

TYPED_TEST(VectorFunctions, KeepSpecialNumbers) {
  using T = TypeParam;
  const T inf = INFINITY, nan = NAN;
  const std::vector<T> x{0, T(-0.0), -inf, nan, 1, -1, 50, -50,
                         0, T(-0.0), -inf, nan, 1, -1, 50, -50};
  for (const Functions<T>& f : functions<T>()) {
    SCOPED_TRACE(f.name);
    std::vector<T> y(16);
    f.exp(x.data(), y.data(), 16);
    EXPECT_EQ(y[0], 1);
    EXPECT_EQ(y[1], 1);
    EXPECT_EQ(y[2], 0);
    EXPECT_TRUE(std::isnan(y[3]));
    f.tanh(x.data(), y.data(), 16);
    EXPECT_EQ(y[0], 0);
    EXPECT_EQ(y[2], -1);
    EXPECT_TRUE(std::isnan(y[3]));
    EXPECT_EQ(y[4], -y[5]);
    EXPECT_EQ(y[6], 1);
    EXPECT_EQ(y[7], -1);
    f.log(x.data(), y.data(), 16);
    EXPECT_EQ(y[0], -inf);
    EXPECT_TRUE(std::isnan(y[3]));
    EXPECT_EQ(y[4], 0);
  }
}

}  // namespace
}  // namespace kernel_test
