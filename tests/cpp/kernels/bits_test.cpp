// SPDX-License-Identifier: MIT
//
// The same bits: whatever the threads, the cut into tasks, the company a row is
// in, the strides, the way a mask is written down, and, in float32 and float64,
// the instruction set.
#include "multihead/kernels/cpu/blocking/tasks.h"
#include "tests/cpp/kernels/random_call.h"
#include "tests/cpp/kernels/run.h"

namespace kernel_test {
namespace {

/// Bits of everything that forward returns.
std::vector<uint64_t> bits_of(const Result& result) {
  std::vector<uint64_t> bits = result.out.bits();
  for (uint64_t x : result.logsumexp.bits()) bits.push_back(x);
  return bits;
}

class Bits : public EachIsa {};

TEST_P(Bits, DoNotDependOnThreadsOrRepeats) {
  for (const Dtype dtype : kAllDtypes) {
    for (const Call& c : large_calls(dtype)) {
      SCOPED_TRACE(description(c));
      const auto once = bits_of(forward(variant(dtype), c));
      for (const int threads : {1, 2, 3, 5, 2}) {
        EXPECT_EQ(bits_of(forward(variant(dtype), c, {.threads = threads})),
                  once)
            << threads << " threads";
      }
    }
  }
}

/// The plan of a call, cut anew. Its scratch serves any number of rows.
kernels::Plan plan_with_rows(const Variant& variant, const Call& c,
                             int64_t rows) {
  kernels::ForwardArgs arguments{arguments_of(c), {}, nullptr};
  const Shape& s = c.shape;
  kernels::Plan plan = variant.kernels.forward.plan(arguments, 1);
  plan.is_decoding = false;
  plan.rows_per_task = rows;
  const kernels::TaskGrid grid{s.B, s.G, s.Lq * (s.H / s.G), rows,
                               plan.longest_first};
  plan.tasks = grid.tasks();
  plan.scratch_bytes = 8 * plan.scratch_bytes + (size_t{1} << 20);
  return plan;
}

TEST_P(Bits, DoNotDependOnThePlan) {
  for (const Dtype dtype : kAllDtypes) {
    const Variant kernels = variant(dtype);
    for (const Call& c : large_calls(dtype)) {
      SCOPED_TRACE(description(c));
      const auto expected = bits_of(forward(kernels, c));
      const kernels::WeightsArgs one_tile{arguments_of(c), nullptr, {}, false};
      const int64_t tile =
          kernels.kernels.weights.plan(one_tile, 1).rows_per_task;
      for (int64_t tiles = 1; tiles <= 8; ++tiles) {
        kernels::Plan plan = plan_with_rows(kernels, c, tiles * tile);
        for (const bool longest_first : {false, true}) {
          plan.longest_first = longest_first;
          EXPECT_EQ(bits_of(forward(kernels, c, {.plan = plan})), expected)
              << tiles << " tiles per task";
        }
      }
    }
  }
}

TEST_P(Bits, OfDecodingAreThoseOfATile) {
  for (const Dtype dtype : kAllDtypes) {
    const Variant kernels = variant(dtype);
    const bool decodes =
        !(GetParam() == Isa::kAmx && dtype == Dtype::kBFloat16);
    int count = 0, in_splits = 0;
    for (uint64_t number = 0; count < 150; ++number) {
      const Call c = random_call(dtype, number);
      const Shape& s = c.shape;
      if (s.Lq * s.H / s.G > 24 || c.dropout.probability > 0) continue;
      ++count;
      SCOPED_TRACE("configuration " + std::to_string(number) + ": " +
                   description(c));
      const kernels::ForwardArgs arguments{arguments_of(c), {}, nullptr};
      const auto plan = kernels.kernels.forward.plan(arguments, 5);
      EXPECT_EQ(plan.is_decoding, decodes);
      in_splits += plan.splits > 0;
      const kernels::Plan tile = plan_with_rows(kernels, c, 16);
      const auto expected = bits_of(forward(kernels, c, {.plan = tile}));
      for (const int threads : {1, 2, 5}) {
        EXPECT_EQ(bits_of(forward(kernels, c, {.threads = threads})), expected)
            << threads << " threads";
      }
    }
    EXPECT_EQ(in_splits > 0, decodes);
  }
}

/// A row whose window begins behind its keys sees nothing, in no split.
TEST_P(Bits, OfRowsThatSeeNothingAreThoseWithoutSplits) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {2, 2, 1, 1, 1025, 16, 16});
    c.visibility.left = 31;
    set_query_offsets(c, {700, 1024});
    set_key_lengths(c, {335, 1025});
    const auto expected = bits_of(forward(variant(dtype), c));
    const Result in_splits = forward(variant(dtype), c, {.threads = 5});
    EXPECT_EQ(bits_of(in_splits), expected);
    EXPECT_EQ(in_splits.out.get({0, 0, 0, 0}), 0);
  }
}

TEST_P(Bits, DoNotDependOnStrides) {
  Rng rng(5);
  for (const Dtype dtype : kAllDtypes) {
    for (Call& c : large_calls(dtype)) {
      SCOPED_TRACE(description(c));
      const auto dense = bits_of(forward(variant(dtype), c));
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (Tensor* x : {&c.query, &c.key, &c.value}) {
          *x = laid_out(*x, random_row_strides(rng, x->sizes()),
                        random_edge(rng));
        }
        if (c.mask_kind != Kind::kNone) {
          c.mask = laid_out(
              c.mask, strides_in_order(c.mask.sizes(), {3, 1, 2, 0}, repeat));
        }
        c.out_strides = random_row_strides(
            rng, {c.shape.B, c.shape.H, c.shape.Lq, c.shape.Dv});
        EXPECT_EQ(bits_of(forward(variant(dtype), c)), dense);
      }
    }
  }
}

/// Rows of (B, heads, L, D) chosen by batch row, head and row; −1: all.
Tensor part_of(const Tensor& x, int64_t batch, int64_t head) {
  Index sizes = x.sizes();
  if (batch >= 0) sizes[0] = 1;
  if (head >= 0) sizes[1] = 1;
  Tensor result(x.storage(), sizes);
  result.fill([&](const Index& i) {
    return x.get({i[0] + std::max<int64_t>(batch, 0),
                  i[1] + std::max<int64_t>(head, 0), i[2], i[3]});
  });
  return result;
}

TEST_P(Bits, OfABatchRowAreThoseOfItAlone) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {3, 4, 2, 70, 90, 11, 13});
    c.visibility.is_causal = true;
    set_key_lengths(c, {90, 0, 37});
    align_bottom_right(c);
    const Tensor all = forward(variant(dtype), c).out;
    for (int64_t b = 0; b < 3; ++b) {
      Call alone(dtype, {1, 4, 2, 70, 90, 11, 13});
      alone.query = part_of(c.query, b, -1);
      alone.key = part_of(c.key, b, -1);
      alone.value = part_of(c.value, b, -1);
      alone.visibility = c.visibility;
      set_key_lengths(alone,
                      {static_cast<int64_t>(c.key_lengths.get({0, 0, 0, b}))});
      align_bottom_right(alone);
      EXPECT_EQ(forward(variant(dtype), alone).out.bits(),
                part_of(all, b, -1).bits())
          << "batch row " << b;
    }
  }
}

TEST_P(Bits, OfGroupedHeadsAreThoseOfRepeatedOnes) {
  for (const Dtype dtype : kAllDtypes) {
    for (const int64_t heads : {2, 6, 10, 16}) {
      Call c = normal_call(dtype, {2, heads, 2, 37, 150, 19, 6});
      c.visibility.is_causal = true;
      Call repeated = normal_call(dtype, {2, heads, heads, 37, 150, 19, 6});
      const int64_t group = heads / 2;
      const auto expand = [&](const Tensor& from, const Tensor& to) {
        to.fill([&](const Index& i) {
          return from.get({i[0], i[1] / group, i[2], i[3]});
        });
      };
      repeated.query = copy_of(c.query);
      expand(c.key, repeated.key);
      expand(c.value, repeated.value);
      repeated.visibility = c.visibility;
      EXPECT_EQ(bits_of(forward(variant(dtype), c)),
                bits_of(forward(variant(dtype), repeated)))
          << heads << " heads";
    }
  }
}

TEST_P(Bits, MoveWithTheQueries) {
  for (const Dtype dtype : kAllDtypes) {
    const Call c = normal_call(dtype, {1, 2, 1, 101, 200, 8, 8});
    Call moved = normal_call(dtype, c.shape);
    const auto to = [](int64_t i) { return i * 37 % 101; };
    moved.query.fill([&](const Index& i) {
      return c.query.get({i[0], i[1], to(i[2]), i[3]});
    });
    const Tensor expected = forward(variant(dtype), c).out;
    const Tensor actual = forward(variant(dtype), moved).out;
    for_each_index(actual.sizes(), [&](const Index& i) {
      ASSERT_EQ(actual.get(i), expected.get({i[0], i[1], to(i[2]), i[3]}));
    });
  }
}

/// A structural mask as tensors: keep, and bias of 0 and −infinity.
void expect_same_as_tensors(const Variant& variant, Call& c) {
  SCOPED_TRACE(description(c));
  const auto flags = bits_of(forward(variant, c));
  const reference::Attention a = golden_arguments_of(c);
  const auto keep = [&](const Index& i) {
    return reference::Row(a, i[0], i[1], i[2]).sees(a, i[3]) ? 1 : 0;
  };
  c.visibility = {};
  c.query_offsets = {};
  c.key_lengths = {};
  c.key_mask = {};
  set_mask(c, Kind::kKeep, keep);
  EXPECT_EQ(bits_of(forward(variant, c)), flags) << "keep mask";
  set_mask(c, Kind::kBias,
           [&](const Index& i) { return keep(i) ? 0 : -reference::kInfinity; });
  EXPECT_EQ(bits_of(forward(variant, c)), flags) << "bias";
}

TEST_P(Bits, OfFlagsAreThoseOfMaskTensors) {
  for (const Dtype dtype : kAllDtypes) {
    for (const int64_t length : {40, 150, 700}) {
      for (const int64_t left : {-1, 0, 30}) {
        for (const int64_t offset : {int64_t{0}, length - 130, int64_t{-17}}) {
          Call c = normal_call(dtype, {2, 2, 1, 130, length, 6, 10});
          c.visibility.is_causal = true;
          c.visibility.left = left;
          set_query_offsets(c, {offset, offset + 5});
          expect_same_as_tensors(variant(dtype), c);
        }
      }
      Call c = normal_call(dtype, {2, 2, 1, 130, length, 6, 10});
      set_key_lengths(c, {length / 3, length - 1});
      set_key_mask(c, [](int64_t b, int64_t j) { return j / 40 % 2 != b; });
      c.visibility.right = 11;
      expect_same_as_tensors(variant(dtype), c);
    }
  }
}

TEST_P(Bits, IgnoreKeysThatAreAppendedButNotThere) {
  for (const Dtype dtype : kAllDtypes) {
    const Call c = normal_call(dtype, {1, 2, 2, 33, 61, 8, 8});
    Call longer = normal_call(dtype, {1, 2, 2, 33, 600, 8, 8});
    longer.query = copy_of(c.query);
    const auto extend = [](const Tensor& from, const Tensor& to) {
      to.fill([&](const Index& i) {
        return i[2] < from.sizes()[2] ? from.get(i) : std::nan("");
      });
    };
    extend(c.key, longer.key);
    extend(c.value, longer.value);
    set_key_lengths(longer, {61});
    EXPECT_EQ(bits_of(forward(variant(dtype), longer)),
              bits_of(forward(variant(dtype), c)));
  }
}

TEST_P(Bits, AreThoseOfThePortableKernels) {
  if (!why_not(Isa::kPortable).empty()) GTEST_SKIP() << why_not(Isa::kPortable);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64}) {
    for (const Call& c : large_calls(dtype)) {
      EXPECT_EQ(bits_of(forward(variant(dtype), c)),
                bits_of(forward(variant_of(Isa::kPortable, dtype), c)))
          << description(c);
    }
  }
}

FOR_EACH_ISA(Bits);

}  // namespace
}  // namespace kernel_test
