// SPDX-License-Identifier: MIT
//
// What explain says of observations that lack something or contradict
// themselves. A file may hold anything: each of these ends in a sentence.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "multihead/diagnosis.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;
using Tensors = std::map<std::string, Tensor>;
using Facts = std::map<std::string, std::string>;

constexpr int64_t kB = 2, kH = 3, kLq = 5, kLk = 7, kD = 4, kE = kH * kD;

Tensor ones(at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  return at::ones(sizes, type);
}

// Heads that somebody has attended with, and nothing else.
const Tensors& heads() {
  static const Tensors tensors = {{"query", ones({kB, kH, kLq, kD})},
                                  {"key", ones({kB, kH, kLk, kD})},
                                  {"value", ones({kB, kH, kLk, kD})},
                                  {"out", ones({kB, kH, kLq, kD})}};
  return tensors;
}

// Self-attention with its four matrices.
const Tensors& layer() {
  static const Tensors tensors = {
      {"x", ones({kB, kLq, kE})},   {"out", ones({kB, kLq, kE})},
      {"q.weight", ones({kE, kE})}, {"k.weight", ones({kE, kE})},
      {"v.weight", ones({kE, kE})}, {"out_proj.weight", ones({kE, kE})},
  };
  return tensors;
}

struct Case {
  const char* text;
  Tensors tensors;  ///< beside or in place of the usual; undefined = none
  Facts facts = {};
};

void expect_errors(const Tensors& usual, const Facts& usual_facts,
                   const std::vector<Case>& cases) {
  for (const Case& test : cases) {
    Observation observation{usual, usual_facts};
    for (const auto& [name, tensor] : test.tensors) {
      if (tensor.defined()) {
        observation.tensors[name] = tensor;
      } else {
        observation.tensors.erase(name);
      }
    }
    for (const auto& [name, fact] : test.facts) {
      observation.metadata[name] = fact;
    }
    try {
      explain({&observation, 1});
      ADD_FAILURE() << "no error: " << test.text;
    } catch (const c10::ValueError& error) {
      EXPECT_STREQ(error.what_without_backtrace(), test.text);
    }
  }
}

void expect_errors_of_heads(const std::vector<Case>& cases) {
  expect_errors(heads(), {}, cases);
}

void expect_errors_of_layers(const std::vector<Case>& cases) {
  expect_errors(layer(), {{"num_heads", "3"}}, cases);
}

TEST(ExplainErrors, SomethingWentInAndSomethingCameOut) {
  EXPECT_THROW(explain({}), c10::ValueError);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_errors_of_heads({
      {"explain: an observation must hold the input, query or x, got none",
       {{"query", {}}}},
      {"explain: an observation must hold what came out, out, got none",
       {{"out", {}}}},
      {"explain: query must hold a finite number, got none",
       {{"query", at::full({kB, kH, kLq, kD}, nan, at::kDouble)}}},
  });
}

TEST(ExplainErrors, FaultsAreCountedUpToOne) {
  const std::array observations = {Observation{.tensors = heads()}};
  EXPECT_EQ(fewest_faults(observations, /*most=*/0), 0);
  for (const int most : {-1, 2})
    EXPECT_THROW(fewest_faults(observations, most), c10::ValueError);
}

TEST(ExplainErrors, RanksAreThoseOfHeadsOrOfSequences) {
  expect_errors_of_heads({
      {"explain: query must have 2 dimensions or more, got shape ()",
       {{"query", ones({})}}},
      {"explain: query must have 2 dimensions or more, got shape (4,)",
       {{"query", ones({kD})}}},
      {"explain: query must have 2, 3 or 4 dimensions, got shape "
       "(1, 2, 3, 5, 4)",
       {{"query", ones({1, kB, kH, kLq, kD})}}},
      {"explain: key must have 2, 3 or 4 dimensions, got shape (7,)",
       {{"key", ones({kLk})}}},
      {"explain: out must have 2, 3 or 4 dimensions, got shape ()",
       {{"out", ones({})}}},
  });
  expect_errors_of_layers({
      {"explain: query must have 2 or 3 dimensions where there are weights, "
       "got shape (2, 3, 5, 12)",
       {{"x", ones({kB, kH, kLq, kE})}}},
      {"explain: value must have 2 or 3 dimensions where there are weights, "
       "got shape ()",
       {{"key", ones({kB, kLk, kE})}, {"value", ones({})}}},
      {"explain: out must have 2 or 3 dimensions where there are weights, got "
       "shape ()",
       {{"out", ones({})}}},
  });
}

TEST(ExplainErrors, EmptyTensorsShowNothing) {
  expect_errors_of_heads({
      {"explain: query must hold an element, got shape (2, 0, 5, 4)",
       {{"query", ones({kB, 0, kLq, kD})}}},
      {"explain: query must hold an element, got shape (2, 3, 0, 4)",
       {{"query", ones({kB, kH, 0, kD})}}},
      {"explain: key must hold an element, got shape (2, 0, 7, 4)",
       {{"key", ones({kB, 0, kLk, kD})}, {"value", ones({kB, 0, kLk, kD})}}},
      {"explain: value must hold an element, got shape (2, 3, 7, 0)",
       {{"value", ones({kB, kH, kLk, 0})}}},
      {"explain: out must hold an element, got shape (0, 3, 5, 4)",
       {{"out", ones({0, kH, kLq, kD})}}},
      {"explain: dout must hold an element, got shape (2, 3, 0, 4)",
       {{"dout", ones({kB, kH, 0, kD})}}},
  });
  expect_errors_of_layers({
      {"explain: query must hold an element, got shape (2, 5, 0)",
       {{"x", ones({kB, kLq, 0})}}},
  });
}

TEST(ExplainErrors, TypesAreThoseThatAttentionIsComputedIn) {
  const auto of = [](at::ScalarType type, at::IntArrayRef sizes) {
    return ones(sizes).to(type);
  };
  expect_errors_of_heads({
      {"explain: key must be float64, float32, bfloat16 or float16, got Long",
       {{"key", of(at::kLong, {kB, kH, kLk, kD})}}},
      {"explain: key must be float64, float32, bfloat16 or float16, got "
       "ComplexFloat",
       {{"key", of(at::kComplexFloat, {kB, kH, kLk, kD})}}},
      {"explain: query must be float64, float32, bfloat16 or float16, got "
       "Float8_e5m2",
       {{"query", of(at::kFloat8_e5m2, {kB, kH, kLq, kD})}}},
      {"explain: out must be float64, float32, bfloat16 or float16, got "
       "Float8_e4m3fn",
       {{"out", of(at::kFloat8_e4m3fn, {kB, kH, kLq, kD})}}},
      {"explain: dkey must be float64, float32, bfloat16 or float16, got Bool",
       {{"dkey", of(at::kBool, {kB, kH, kLk, kD})}}},
      {"explain: mask must hold real numbers of 16 bits or more, got "
       "ComplexDouble",
       {{"mask", of(at::kComplexDouble, {kLq, kLk})}}},
      {"explain: mask must hold real numbers of 16 bits or more, got "
       "Float8_e4m3fn",
       {{"mask", of(at::kFloat8_e4m3fn, {kLq, kLk})}}},
      {"explain: weights must hold real numbers of 16 bits or more, got "
       "ComplexFloat",
       {{"weights", of(at::kComplexFloat, {kB, kH, kLq, kLk})}}},
      {"explain: scores must hold real numbers of 16 bits or more, got "
       "ComplexFloat",
       {{"scores", of(at::kComplexFloat, {kB, kH, kLq, kLk})}}},
      {"explain: dropout_keep must hold real numbers of 16 bits or more, got "
       "ComplexFloat",
       {{"dropout_keep", of(at::kComplexFloat, {kB, kH, kLq, kLk})}}},
  });
}

TEST(ExplainErrors, InputsFitEachOther) {
  expect_errors_of_heads({
      {"explain: key must have a number of heads that divides that of query, "
       "3, got 2",
       {{"key", ones({kB, 2, kLk, kD})}, {"value", ones({kB, 2, kLk, kD})}}},
      {"explain: query, key and value must have one batch size, key and value "
       "one length, got key of shape (3, 3, 7, 4) beside query (2, 3, 5, 4)",
       {{"key", ones({3, kH, kLk, kD})}}},
      {"explain: query, key and value must have one batch size, key and value "
       "one length, got value of shape (2, 3, 6, 4) beside query (2, 3, 5, 4)",
       {{"value", ones({kB, kH, 6, kD})}}},
      {"explain: query and key must make no more than 67108864 scores, got 1 x "
       "1 x 8193 x 8193; save a smaller case",
       {{"query", ones({8193, 1})},
        {"key", {}},
        {"value", {}},
        {"out", ones({8193, 1})}}},
  });
}

TEST(ExplainErrors, GradientsFitWhatTheyAreOf) {
  expect_errors_of_heads({
      {"explain: dout must have the shape of out, (2, 3, 5, 4), got "
       "(2, 3, 5, 9)",
       {{"dout", ones({kB, kH, kLq, 9})}}},
      {"explain: dquery must have the shape of query, (2, 3, 5, 4), got "
       "(2, 3, 7, 4)",
       {{"dquery", ones({kB, kH, kLk, kD})}}},
      {"explain: dkey must have the shape of key, (2, 3, 7, 4), got "
       "(2, 3, 5, 4)",
       {{"dkey", ones({kB, kH, kLq, kD})}}},
      {"explain: dvalue must have the shape of value, (2, 3, 7, 4), got "
       "(1, 1, 7, 4)",
       {{"dvalue", ones({kLk, kD})}}},
  });
}

TEST(ExplainErrors, MasksBroadcastToTheScores) {
  const auto mask = [](at::IntArrayRef sizes) {
    return ones(sizes, at::kBool);
  };
  expect_errors_of_heads({
      {"explain: mask must broadcast to (B, H, Lq, Lk) = (2, 3, 5, 7), got "
       "shape ()",
       {{"mask", mask({})}}},
      {"explain: mask must broadcast to (B, H, Lq, Lk) = (2, 3, 5, 7), got "
       "shape (4, 7)",
       {{"mask", mask({4, kLk})}}},
      {"explain: mask must broadcast to (B, H, Lq, Lk) = (2, 3, 5, 7), got "
       "shape (0, 7)",
       {{"mask", mask({0, kLk})}}},
      {"explain: mask must broadcast to (B, H, Lq, Lk) = (2, 3, 5, 7), got "
       "shape (6, 4, 7)",
       {{"mask", mask({kB * kH, 4, kLk})}}},
      {"explain: mask must broadcast to (B, H, Lq, Lk) = (2, 3, 5, 7), got "
       "shape (1, 1, 1, 5, 7)",
       {{"mask", mask({1, 1, 1, kLq, kLk})}}},
      {"explain: key_padding_mask must broadcast to (B, H, Lq, Lk) = (2, 3, 5, "
       "7), got shape (3, 7)",
       {{"key_padding_mask", mask({3, kLk})}}},
      {"explain: key_padding_mask must be (B, Lk) = (2, 7) or broadcast so, "
       "got a row for each query",
       {{"key_padding_mask", mask({kLq, kLk})}}},
      {"explain: key_padding_mask must be (B, Lk) = (2, 7) or broadcast so, "
       "got a row for each query",
       {{"key_padding_mask", mask({kB, 1, kLq, kLk})}}},
  });
}

TEST(ExplainErrors, HeadsAreCounted) {
  expect_errors(layer(), {},
                {{"explain: num_heads must be among the facts where there are "
                  "weights, got none",
                  {}}});
  // A layer of which only a bias is known.
  expect_errors({{"x", ones({kB, kLq, kE})},
                 {"out", ones({kB, kLq, kE})},
                 {"b_q", ones({kE})}},
                {{"num_heads", "5"}},
                {{"explain: num_heads must divide the 12 features of the "
                  "queries, got 5",
                  {}}});
  for (const char* text : {"", "0", "-3", "3.0", " 3", "8\n", "three", "65537",
                           "9223372036854775807", "99999999999999999999"}) {
    const std::string got = std::string(", got \"") + text + "\"";
    const std::string of_heads =
        "explain: num_heads must be a number from 1 to 65536" + got;
    const std::string of_groups =
        "explain: num_kv_heads must be a number from 1 to 65536" + got;
    expect_errors_of_layers({
        {of_heads.c_str(), {}, {{"num_heads", text}}},
        {of_groups.c_str(), {}, {{"num_kv_heads", text}}},
    });
  }
  expect_errors_of_layers({
      {"explain: num_kv_heads must divide num_heads = 3, got 2",
       {},
       {{"num_kv_heads", "2"}}},
      {"explain: num_heads must divide the width of the heads together, a size "
       "of q.weight (12, 12), got 7",
       {},
       {{"num_heads", "7"}, {"num_kv_heads", "7"}}},
      {"explain: num_heads must divide the width of the heads together, a size "
       "of q.weight (12, 12), got 65536",
       {},
       {{"num_heads", "65536"}, {"num_kv_heads", "65536"}}},
  });
}

TEST(ExplainErrors, FactsAreNumbersOrKnownWords) {
  for (const char* name : {"scale", "dropout_p"}) {
    for (const char* value : {"", "nan", "-inf", "0.1x", "1e999", "half"}) {
      const std::string text = std::string("explain: ") + name +
                               " must be a number, got \"" + value + "\"";
      expect_errors_of_heads({{text.c_str(), {}, {{name, value}}}});
    }
  }
  expect_errors_of_heads({
      {"explain: dropout_p must be from 0 to below 1, got 1",
       {},
       {{"dropout_p", "1"}}},
      {"explain: dropout_p must be from 0 to below 1, got -0.5",
       {},
       {{"dropout_p", "-0.5"}}},
      {"explain: training must be one of true, false, got \"yes\"",
       {},
       {{"training", "yes"}}},
      {"explain: is_causal must be one of true, false, infer, expected, got "
       "\"1\"",
       {},
       {{"is_causal", "1"}}},
      {"explain: mask must be one of blocked, keep, additive, got \"Keep\"",
       {{"mask", ones({kLq, kLk}, at::kBool)}},
       {{"mask", "Keep"}}},
      {"explain: padding must be one of blocked, keep, additive, got \"\"",
       {{"key_padding_mask", ones({kB, kLk}, at::kBool)}},
       {{"padding", ""}}},
  });
  expect_errors_of_layers({
      {"explain: batch_first must be one of true, false, got \"True\"",
       {},
       {{"batch_first", "True"}}},
      {"explain: layout:q.weight must be one of out_in, in_out, got \"out\"",
       {},
       {{"layout:q.weight", "out"}}},
  });
}

}  // namespace
}  // namespace multihead::diagnosis
