// SPDX-License-Identifier: MIT
//
// What a row does not see changes no bit of its result, whatever bytes it is
// made of, also where other rows of the same tile do see it; what it does see
// follows IEEE.
#include "tests/cpp/kernels/judge.h"

namespace kernel_test {
namespace {

/// Sets key and value j of batch row b and head g to what `byte_or_number`
/// says.
struct Poison {
  const char* name;
  double number;
  bool bytes;  ///< 0xFF instead
};
constexpr double kInf = reference::kInfinity;
const Poison kPoisons[] = {{"NaN", std::nan(""), false},
                           {"infinity", kInf, false},
                           {"-infinity", -kInf, false},
                           {"0xFF", 0, true}};
constexpr Poison kZero{"zero", 0, false};

void poison_row(const Tensor& x, Index row, const Poison& poison) {
  for (int64_t e = 0; e < x.sizes()[3]; ++e) {
    row[3] = e;
    if (poison.bytes) {
      memset(x.at(row), 0xFF, bytes_of(x.storage()));
    } else {
      x.set(row, poison.number);
    }
  }
}

/// A kind of visibility under which rows of one tile see different keys.
struct Rule {
  const char* name;
  void (*apply)(Call&);
};

double band(const Index& i) { return std::abs(i[2] - i[3]) < 5 ? 1 : 0; }

const Rule kRules[] = {
    {"causal", [](Call& c) { c.visibility.is_causal = true; }},
    {"bottom right",
     [](Call& c) {
       c.visibility.is_causal = true;
       align_bottom_right(c);
     }},
    {"query offsets",
     [](Call& c) {
       c.visibility.is_causal = true;
       set_query_offsets(c, {-7, 21});
     }},
    {"window",
     [](Call& c) {
       c.visibility.left = 5;
       c.visibility.right = 3;
     }},
    {"key lengths", [](Call& c) { set_key_lengths(c, {c.shape.Lk / 2, 3}); }},
    {"keep mask", [](Call& c) { set_mask(c, Kind::kKeep, band); }},
    {"bias",
     [](Call& c) {
       set_mask(c, Kind::kBias,
                [](const Index& i) { return band(i) == 1 ? 0.5 : -kInf; });
     }},
    {"key mask",
     [](Call& c) {
       set_key_mask(c, [](int64_t b, int64_t j) { return j % (4 + b) != 1; });
     }},
    {"key mask and bias",
     [](Call& c) {
       set_key_mask(c, [](int64_t, int64_t j) { return j < 33; });
       set_mask(c, Kind::kBias,
                [](const Index& i) { return 0.1 * (i[2] - i[3]); });
     }},
    {"everything",
     [](Call& c) {
       set_key_mask(c, [](int64_t, int64_t j) { return j % 7 != 3; });
       c.visibility.is_causal = true;
       set_key_lengths(c, {c.shape.Lk - 3, c.shape.Lk});
       align_bottom_right(c);
       set_mask(c, Kind::kKeep,
                [](const Index& i) { return (i[2] + i[3]) % 3 != 0; });
       set_sinks(c, {0.5, -1});
       c.softcap = 20;
     }},
};

Call call_with(Dtype dtype, const Rule& rule, double dropout) {
  Call c = normal_call(dtype, {2, 2, 1, 60, 70, 9, 7});
  rule.apply(c);
  c.dropout = {dropout, 42, 0};
  return c;
}

bool row_sees(const Call& c, const reference::Attention& a, const Index& row,
              const std::vector<int64_t>& keys) {
  const reference::Row reference_row(a, row[0], row[1], row[2]);
  for (int64_t j : keys) {
    if (reference_row.sees(a, j)) return true;
  }
  return c.shape.Lk == 0;
}

/// Bits of the results of rows that see none of `keys`.
std::vector<uint64_t> blind_rows(const Call& c, const reference::Attention& a,
                                 const Result& result,
                                 const std::vector<int64_t>& keys) {
  std::vector<uint64_t> kept;
  const std::vector<uint64_t> out = result.out.bits();
  const std::vector<uint64_t> logsumexp = result.logsumexp.bits();
  size_t n = 0;
  for_each_index({1, c.shape.B, c.shape.H, c.shape.Lq}, [&](const Index& i) {
    const size_t row = n++;
    if (row_sees(c, a, {i[1], i[2], i[3], 0}, keys)) return;
    kept.push_back(logsumexp[row]);
    for (int64_t e = 0; e < c.shape.Dv; ++e) {
      kept.push_back(out[row * c.shape.Dv + e]);
    }
  });
  return kept;
}

class Visibility : public EachIsa {
 protected:
  /// Keys and values of `keys`: NaN and its kind against zeros.
  void expect_hidden(Call& c, const std::vector<int64_t>& keys) {
    const reference::Attention a = golden_arguments_of(c);
    const auto set = [&](const Poison& of_key, const Poison& of_value) {
      for (int64_t b = 0; b < c.shape.B; ++b) {
        for (int64_t j : keys) {
          poison_row(c.key, {b, 0, j, 0}, of_key);
          poison_row(c.value, {b, 0, j, 0}, of_value);
        }
      }
    };
    set(kZero, kZero);
    const Variant kernels = variant(c.dtype);
    const auto clean = blind_rows(c, a, forward(kernels, c), keys);
    ASSERT_FALSE(clean.empty());
    for (const Poison& poison : kPoisons) {
      SCOPED_TRACE(poison.name);
      set(poison, kZero);
      EXPECT_EQ(blind_rows(c, a, forward(kernels, c), keys), clean) << "key";
      set(kZero, poison);
      EXPECT_EQ(blind_rows(c, a, forward(kernels, c), keys), clean) << "value";
    }
  }
};

TEST_P(Visibility, HiddenKeysAndValuesChangeNothing) {
  for (const Dtype dtype : kAllDtypes) {
    for (const Rule& rule : kRules) {
      for (const double dropout : {0.0, 0.5}) {
        Call c = call_with(dtype, rule, dropout);
        SCOPED_TRACE(rule.name + (": " + description(c)));
        expect_hidden(c, {33, 61, 69});
      }
    }
  }
}

TEST_P(Visibility, HiddenKeysHaveNoWeight) {
  for (const Dtype dtype : kAllDtypes) {
    for (const Rule& rule : kRules) {
      Call c = call_with(dtype, rule, 0);
      SCOPED_TRACE(rule.name + (": " + description(c)));
      const Variant kernels = variant(dtype);
      const Tensor logsumexp = forward(kernels, c).logsumexp;
      const auto clean = weights(kernels, c, logsumexp).bits();
      const reference::Attention a = golden_arguments_of(c);
      // A key of one head that no row of its batch sees.
      for (int64_t b = 0; b < c.shape.B; ++b) {
        for (int64_t j = 0; j < c.shape.Lk; ++j) {
          bool seen = false;
          for (int64_t n = 0; n < c.shape.H * c.shape.Lq; ++n) {
            seen |= row_sees(c, a, {b, n / c.shape.Lq, n % c.shape.Lq, 0}, {j});
          }
          if (!seen) poison_row(c.key, {b, 0, j, 0}, kPoisons[0]);
        }
      }
      const Result again = forward(kernels, c);
      EXPECT_EQ(again.logsumexp.bits(), logsumexp.bits());
      EXPECT_EQ(weights(kernels, c, logsumexp).bits(), clean);
    }
  }
}

TEST_P(Visibility, QueriesKeepToTheirRows) {
  for (const Dtype dtype : kAllDtypes) {
    Call c = normal_call(dtype, {2, 3, 1, 50, 40, 17, 5});
    const Variant kernels = variant(dtype);
    const auto clean = forward(kernels, c).out.bits();
    for (const Poison& poison : kPoisons) {
      Call poisoned = normal_call(dtype, c.shape);
      const Index row{1, 2, 20, 0};
      poison_row(poisoned.query, row, poison);
      const Tensor out = forward(kernels, poisoned).out;
      const auto bits = out.bits();
      const size_t from = ((1 * 3 + 2) * 50 + 20) * 5;
      for (size_t n = 0; n < bits.size(); ++n) {
        if (n >= from && n < from + 5) continue;
        ASSERT_EQ(bits[n], clean[n]) << poison.name << ", element " << n;
      }
      EXPECT_TRUE(std::isnan(out.get(row))) << poison.name;
    }
  }
}

/// Where golden is finite, so is the result, and within the budget; where it
/// is infinite or NaN, the result is the same.
TEST_P(Visibility, WhatIsSeenFollowsIeee) {
  for (const Dtype dtype : kAllDtypes) {
    for (const Rule& rule : kRules) {
      for (const Poison& poison : kPoisons) {
        for (const bool in_value : {false, true}) {
          Call c = call_with(dtype, rule, 0);
          // One element only: infinite scores of both signs are NaN.
          c.query.fill([](const Index& i) { return 0.01 * (i[2] + 1); });
          const Tensor& x = in_value ? c.value : c.key;
          for (int64_t j : {2, 33, 34}) {
            x.set({1, 0, j, 3}, poison.bytes ? std::nan("") : poison.number);
          }
          SCOPED_TRACE(std::string(rule.name) + ", " + poison.name +
                       (in_value ? " in a value: " : " in a key: ") +
                       description(c));
          Golden golden(c);
          // Λ of infinite scores says nothing: that of the others holds.
          golden.output.lambda = 20;
          WorstErrors worst;
          judge_forward(c, golden, forward(variant(dtype), c), worst);
        }
      }
    }
  }
}

FOR_EACH_ISA(Visibility);

}  // namespace
}  // namespace kernel_test
