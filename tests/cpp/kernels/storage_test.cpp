// SPDX-License-Identifier: MIT
//
// Keys and values that are stored narrower than queries: random calls, on every
// instruction set, have the bits of the same call on the numbers restored.
// Rows lie at the edge of guarded memory, and what a row must not see is NaN.
#include "multihead/kernels/mxint8.h"
#include "tests/cpp/kernels/gradients.h"

namespace kernel_test {
namespace {

/// The numbers of row (b, g, j) of x.
std::vector<float> numbers_of(const Tensor& x, const Index& row) {
  std::vector<float> numbers;
  for (int64_t e = 0; e < x.sizes()[3]; ++e) {
    numbers.push_back(static_cast<float>(x.get({row[0], row[1], row[2], e})));
  }
  return numbers;
}

/// x as rows of MXINT8; what they hold becomes x.
Tensor to_mxint8(Rng& rng, Tensor& x) {
  Index sizes = x.sizes();
  const int64_t width = sizes[3];
  sizes[3] = kernels::mxint8_bytes(width);
  Tensor stored(Storage::kByte, sizes, random_row_strides(rng, sizes),
                random_edge(rng));
  stored.fill_bytes(0xFF);
  Tensor restored(x.storage(), x.sizes());
  for_each_index({sizes[0], sizes[1], sizes[2], 1}, [&](const Index& i) {
    auto* row = reinterpret_cast<uint8_t*>(stored.at(i));
    kernels::round_to_mxint8(numbers_of(x, i).data(), width, row);
    std::vector<float> numbers(width);
    kernels::restore_mxint8(row, width, numbers.data());
    for (int64_t e = 0; e < width; ++e) {
      restored.set({i[0], i[1], i[2], e}, numbers[e]);
    }
  });
  x = std::move(restored);
  return stored;
}

/// x as bfloat16; x becomes what it holds.
Tensor to_bfloat16_rows(Rng& rng, Tensor& x) {
  Tensor stored(Storage::kBFloat16, x.sizes(),
                random_row_strides(rng, x.sizes()), random_edge(rng));
  stored.fill_bytes(0xFF);
  Tensor restored(x.storage(), x.sizes());
  for_each_index(x.sizes(), [&](const Index& i) {
    stored.set(i, x.get(i));
    restored.set(i, stored.get(i));
  });
  x = std::move(restored);
  return stored;
}

/// NaN in keys that no row of the batch sees.
void hide_nan(const Call& c, const Tensor& x) {
  for (int64_t b = 0; b < c.shape.B && !c.key_lengths.empty(); ++b) {
    const auto length = static_cast<int64_t>(c.key_lengths.get({0, 0, 0, b}));
    for_each_index({1, c.shape.G, c.shape.Lk - length, x.sizes()[3]},
                   [&](const Index& i) {
                     memset(x.at({b, i[1], length + i[2], i[3]}), 0xFF,
                            bytes_of(x.storage()));
                   });
  }
}

struct Format {
  Dtype dtype;
  kernels::Storage storage;
};

class StoredRows : public testing::TestWithParam<Format> {};

// On ARM fewer: they are emulated.
#ifdef MULTIHEAD_ARM
constexpr uint64_t kConfigurations = 80;
#else
constexpr uint64_t kConfigurations = 750;
#endif

TEST_P(StoredRows, HaveTheBitsOfRestoredOnes) {
  const auto [dtype, storage] = GetParam();
  uint64_t decoded = 0;
  for (uint64_t number = 0; number < kConfigurations; ++number) {
    Rng rng(number);
    Call restored = random_call(dtype, number),
         stored = random_call(dtype, number);
    const auto store = [&](Tensor& x) {
      return storage == kernels::Storage::kMXInt8 ? to_mxint8(rng, x)
                                                  : to_bfloat16_rows(rng, x);
    };
    stored.stored_as = storage;
    stored.key = store(restored.key);
    stored.value = store(restored.value);
    for (const Call* c : {&restored, &stored}) {
      hide_nan(*c, c->key);
      hide_nan(*c, c->value);
    }
    SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                 description(restored));
    const Running running{.threads = number % 4 == 0 ? 3 : 1};
    bool is_decoded = false;
    for (const Variant& variant : variants(dtype)) {
      SCOPED_TRACE(variant.name);
      const Result wanted = forward(variant, restored, running);
      const Result got = forward(variant, stored, running);
      expect_same_bits("out", got.out.bits(), wanted.out.bits());
      expect_same_bits("logsumexp", got.logsumexp.bits(),
                       wanted.logsumexp.bits());
      if (HasFatalFailure()) return;
      const kernels::ForwardArgs f{arguments_of(stored), {}, nullptr};
      is_decoded |= variant.kernels.forward.plan(f, 1).is_decoding;
    }
    decoded += is_decoded;
  }
  EXPECT_GE(decoded, kConfigurations / 20) << "too few were decoded";
}

INSTANTIATE_TEST_SUITE_P(
    Format, StoredRows,
    testing::Values(Format{Dtype::kFloat32, kernels::Storage::kBFloat16},
                    Format{Dtype::kFloat32, kernels::Storage::kMXInt8},
                    Format{Dtype::kBFloat16, kernels::Storage::kMXInt8},
                    Format{Dtype::kFloat16, kernels::Storage::kMXInt8}),
    [](const auto& info) {
      const bool is_byte = info.param.storage == kernels::Storage::kMXInt8;
      return std::string(is_byte ? "mxint8" : "bfloat16") + "_under_" +
             name_of(info.param.dtype);
    });

TEST(MXInt8, RoundsToTheNearestWithinItsBound) {
  Rng rng(5);
  for (int64_t n = 0; n < 2000; ++n) {
    const int64_t width = uniform(rng, 1, 100);
    std::vector<float> x(width), restored(width);
    for (float& number : x) {
      number =
          static_cast<float>(normal(rng) * std::exp2(uniform(rng, -12, 40)));
    }
    std::vector<uint8_t> row(kernels::mxint8_bytes(width));
    kernels::round_to_mxint8(x.data(), width, row.data());
    kernels::restore_mxint8(row.data(), width, restored.data());
    for (int64_t begin = 0; begin < width; begin += kernels::kMXGroup) {
      const int64_t end = std::min(begin + kernels::kMXGroup, width);
      float largest = 0;
      for (int64_t i = begin; i < end; ++i) {
        largest = std::max(largest, std::abs(x[i]));
      }
      const float bound = std::max(largest * 0x1p-7F, 0x1p-25F);
      for (int64_t i = begin; i < end; ++i) {
        EXPECT_LE(std::abs(restored[i] - x[i]), bound);
        EXPECT_EQ(from_bfloat16(to_bfloat16(restored[i])), restored[i])
            << "not exact in bfloat16";
      }
    }
  }
}

TEST(MXInt8, TurnsThirtyTwoIntoNaNWhereOneIsNotFinite) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x(40, 1.0F), restored(40);
    x[7] = bad;
    std::vector<uint8_t> row(kernels::mxint8_bytes(40));
    kernels::round_to_mxint8(x.data(), 40, row.data());
    kernels::restore_mxint8(row.data(), 40, restored.data());
    for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(restored[i]));
    for (int i = 32; i < 40; ++i) EXPECT_EQ(restored[i], 1.0F);
  }
}

}  // namespace
}  // namespace kernel_test
