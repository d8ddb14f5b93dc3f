// SPDX-License-Identifier: MIT
//
// The same bits on every machine: hashes of what the kernels return for numbers
// that are made without rounding. The other tests compare the instruction sets
// of one CPU with each other; this table compares CPUs that never meet. Whoever
// changes an order of sums writes it anew, once for all instruction sets.
#include <cinttypes>

#include "tests/cpp/kernels/gradients.h"
#include "tests/cpp/kernels/run.h"

namespace kernel_test {
namespace {

/// FNV-1a.
struct Hash {
  uint64_t value = 0xCBF29CE484222325;
  void add(const Tensor& x) {
    for (uint64_t bits : x.bits()) {
      for (int byte = 0; byte < 8; ++byte, bits >>= 8) {
        value = (value ^ (bits & 0xFF)) * 0x100000001B3;
      }
    }
  }
};

/// Between −2 and 2. std::normal_distribution rounds as the machine's log does.
double number(Rng& rng) {
  return static_cast<double>(rng() >> 11) * 0x1p-51 - 2;
}
void fill(const Tensor& x, Rng& rng) {
  x.fill([&](const Index&) { return number(rng); });
}

Call made_call(Dtype dtype, const Shape& shape) {
  Rng rng(11);
  Call c(dtype, shape);
  for (const Tensor* x : {&c.query, &c.key, &c.value}) fill(*x, rng);
  return c;
}

/// Plain; causal with softcap and sinks; a window with dropout and slopes; a
/// bias, queries before the first key; one row of each head, which is decoded.
std::vector<Call> made_calls(Dtype dtype) {
  std::vector<Call> calls;
  for (const Shape& shape :
       {Shape{1, 1, 1, 70, 600, 67, 40}, Shape{2, 4, 2, 131, 140, 16, 33},
        Shape{2, 3, 3, 90, 129, 5, 8}, Shape{1, 4, 1, 50, 300, 34, 9},
        Shape{2, 6, 2, 1, 1100, 80, 72}}) {
    calls.push_back(made_call(dtype, shape));
  }
  Rng rng(12);
  calls[1].visibility.is_causal = true;
  calls[1].softcap = 1.5;
  set_sinks(calls[1], {0.5, -1, 2, 0});
  calls[2].visibility.left = 20;
  calls[2].visibility.right = 7;
  calls[2].dropout = {0.3, 7, 9};
  calls[2].slopes = Tensor(Storage::kFloat64, {1, 1, 2, 3});
  fill(calls[2].slopes, rng);
  set_mask(calls[3], Kind::kBias, [&](const Index& i) {
    return i[3] / 90 == i[2] % 3 ? -reference::kInfinity : number(rng);
  });
  set_query_offsets(calls[3], {-7});
  return calls;
}

/// Of forward, weights and backward.
std::string hashes_of(const Variant& variant, const Call& c) {
  Hash of_forward, of_weights, of_backward;
  const Result result = forward(variant, c);
  of_forward.add(result.out);
  of_forward.add(result.logsumexp);
  of_weights.add(weights(variant, c, result.logsumexp));
  const Shape& s = c.shape;
  Rng rng(13);
  const OutputGradients gradients{
      Tensor(storage_of(c.dtype), {s.B, s.H, s.Lq, s.Dv}),
      Tensor(compute_storage_of(c.dtype), {1, s.B, s.H, s.Lq})};
  fill(gradients.out, rng);
  fill(gradients.logsumexp, rng);
  const GradientResult of_inputs = backward(variant, c, result, gradients);
  for (const auto& [name, x] : of_inputs.all()) of_backward.add(*x);
  char text[64];
  snprintf(text, sizeof text, "%016" PRIX64 " %016" PRIX64 " %016" PRIX64,
           of_forward.value, of_weights.value, of_backward.value);
  return text;
}

struct Expected {
  Dtype dtype;
  const char* hashes[5];
};
constexpr Expected kExpected[] = {
    {Dtype::kFloat32,
     {"7B0CABA39CD77DE0 37CCD7B00A3BE7D8 2B053C9DA776AA40",
      "35376E66DC46F673 958986C9B5E11CE2 E7CAF2DFA6E7E5BF",
      "BC3DF49C5ACF8EEE 455461C6F747E18A 0563C45CFFFCF35B",
      "647A282C99797336 402D9951CFECA373 B252F2A3DAE6FE7E",
      "E0EAE1A94BC8AE52 FC073F9A57BC7FA8 13E0D2B288BDE066"}},
    {Dtype::kFloat64,
     {"D0F82BA18C296C9A B1380571303E9754 05E0AF78B0CE5540",
      "F91F6C4A7D64D9B4 B7E6ED6DA8851F04 8868188011A05B13",
      "3337910C4359E736 97C06D34FACD4934 2C0E36EA3CB96F1D",
      "1DE66E6BA2A4FD3F 4029E4E03F24FB0C 4D812AD8AE56EB78",
      "D49A6692D757E102 2FDB853D68D83B9C 8774D2B0A6468E49"}},
};

class Machines : public EachIsa {};

TEST_P(Machines, HaveTheSameBits) {
  for (const auto& [dtype, hashes] : kExpected) {
    const std::vector<Call> calls = made_calls(dtype);
    for (size_t n = 0; n < calls.size(); ++n) {
      EXPECT_EQ(hashes_of(variant(dtype), calls[n]), hashes[n])
          << description(calls[n]);
    }
  }
}

FOR_EACH_ISA(Machines);

}  // namespace
}  // namespace kernel_test
