// SPDX-License-Identifier: MIT
//
// Numbers that have nothing to do with what went in: no fault explains them,
// whatever their size and type, and whatever is given beside them.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <array>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

struct Noise {
  int64_t embed, heads, batch, queries, keys;
  at::ScalarType dtype;
  double spread;  ///< of out
  bool projected, weights, gradients;
};

void PrintTo(const Noise& n, std::ostream* out) {
  *out << n.embed << "/" << n.heads << " " << n.batch << "x" << n.queries << "x"
       << n.keys << " " << n.dtype << " times " << n.spread
       << (n.projected ? "" : " heads") << (n.weights ? " weights" : "")
       << (n.gradients ? " gradients" : "");
}

Observation observed(const Noise& n) {
  const auto draw = [&](int64_t length) {
    return (n.projected ? random({n.batch, length, n.embed})
                        : random({n.batch, n.heads, length, n.embed / n.heads}))
        .to(n.dtype);
  };
  Observation o{{{"query", draw(n.queries)},
                 {"key", draw(n.keys)},
                 {"value", draw(n.keys)},
                 {"out", draw(n.queries) * n.spread}},
                {{"num_heads", std::to_string(n.heads)}}};
  if (n.projected) {
    const double root = std::sqrt(3.0 * static_cast<double>(n.embed));
    const auto weight = [&](int64_t rows) {
      return (at::rand({rows, n.embed}, at::kDouble) * 2 - 1) * (3 / root);
    };
    o.tensors["in_proj_weight"] = weight(3 * n.embed).to(n.dtype);
    o.tensors["out_proj.weight"] = weight(n.embed).to(n.dtype);
  }
  if (n.weights) {
    o.tensors["weights"] =
        random({n.batch, n.heads, n.queries, n.keys}).softmax(-1).to(n.dtype);
  }
  if (n.gradients) {
    o.tensors["dout"] = draw(n.queries);
    o.tensors["dquery"] = draw(n.queries);
    o.tensors["dkey"] = draw(n.keys);
    o.tensors["dvalue"] = draw(n.keys);
  }
  return o;
}

void expect_unknown(const Noise& n, uint64_t seed) {
  at::manual_seed(seed);
  const Verdict verdict = explain(std::array{observed(n)});
  EXPECT_EQ(verdict.judgement, Judgement::kUnknown)
      << testing::PrintToString(n) << " seed " << seed << " " << names(verdict);
  EXPECT_TRUE(verdict.assumptions.empty())
      << testing::PrintToString(n) << " seed " << seed << " "
      << verdict.assumptions.at(0).name;
}

// Where a fault makes numbers explode, its rounding explains anything: the
// seeds are among those for which it did.
TEST(Noise, IsNotExplainedByWhatExplodes) {
  const Noise usual{48, 8, 3, 5, 7, at::kDouble, 1, true, false, false};
  for (const uint64_t seed : {10, 11}) {
    for (const double spread : {0.1, 1.0}) {
      Noise noise = usual;
      noise.spread = spread;
      expect_unknown(noise, seed);
    }
  }
}

TEST(Noise, OfAnySizeAndTypeIsUnknown) {
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16,
                                       at::kHalf};
  constexpr int64_t kSizes[][5] = {{48, 8, 3, 5, 7},
                                   {8, 2, 2, 4, 4},
                                   {16, 4, 1, 3, 6},
                                   {64, 4, 2, 5, 3},
                                   {12, 3, 1, 9, 2}};
  uint64_t seed = 100;
  for (const auto& [embed, heads, batch, queries, keys] : kSizes) {
    for (const at::ScalarType dtype : kTypes) {
      const bool projected = seed % 3 != 0, weights = seed % 2 == 0;
      expect_unknown({embed, heads, batch, queries, keys, dtype, 1.0, projected,
                      weights, /*gradients=*/seed % 5 < 2},
                     seed);
      ++seed;
    }
  }
}

// No reading of the weights comes nearer to noise but by chance: they are read
// as their names say, and what should be there is what attention computes.
TEST(Noise, IsMeasuredByTheReadingThatNamesImply) {
  const Noise usual{48, 8, 3, 5, 5, at::kFloat, 1, true, false, false};
  for (uint64_t seed = 400; seed < 402; ++seed) {
    at::manual_seed(seed);
    Observation o = observed(usual);
    const at::Tensor right = simulate(read_dump(o), Recipe{})->out;
    at::Tensor& out = o.tensors["out"];
    const std::array<at::Tensor, 4> wrong = {out, at::zeros_like(out),
                                             o.tensors["query"], out * 1e6};
    for (size_t i = 0; i < wrong.size(); ++i) {
      out = wrong[i];
      const Verdict verdict = explain(std::array{o});
      EXPECT_EQ(verdict.judgement, Judgement::kUnknown);
      EXPECT_TRUE(verdict.assumptions.empty()) << seed << " " << i;
      ASSERT_TRUE(verdict.where.has_value());
      EXPECT_EQ(verdict.where->expected, right[0][0][0].item<double>())
          << seed << " " << i;
    }
  }
}

// Few numbers fit something by chance.
TEST(Noise, OfAFewNumbersIsNotNamed) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (uint64_t seed = 200; seed < 204; ++seed) {
      at::manual_seed(seed);
      const Noise noise{2, 1, 1, 1, 3, dtype, 1, true, false, false};
      const Verdict verdict = explain(std::array{observed(noise)});
      EXPECT_TRUE(verdict.faults.empty())
          << dtype << " seed " << seed << " " << names(verdict);
    }
  }
}

// What came out by a fault is still explained, though it is small.
TEST(Noise, AFaultInSmallTensorsIsNamed) {
  at::manual_seed(300);
  Observation o = observed({8, 2, 1, 2, 3, at::kFloat, 1, true, false, false});
  const auto stages = simulate(read_dump(o), faulty("scale_by_embed_dim"));
  o.tensors["out"] = stages->out.to(at::kFloat);
  EXPECT_EQ(names(explain(std::array{o})), "scale_by_embed_dim");
}

TEST(Noise, TheNumberOfThreadsIsWhatItWas) {
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  at::manual_seed(301);
  Observation o = observed({8, 2, 1, 2, 3, at::kFloat, 1, true, false, false});
  o.tensors["out"] = simulate(read_dump(o), Recipe{})->out.to(at::kFloat);
  explain(std::array{o});
  EXPECT_EQ(at::get_num_threads(), 2);
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace multihead::diagnosis
