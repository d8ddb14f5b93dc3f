// SPDX-License-Identifier: MIT
//
// A module is loaded entirely or left alone, and the message names every
// difference.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <vector>

#include "multihead/modules.h"
#include "multihead/safetensors.h"
#include "tests/cpp/safetensors/files.h"

namespace multihead {
namespace {

using test::TemporaryFolder;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using torch::nn::Sequential;
using enum SafetensorsFault;

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : read_safetensors(path).tensors) {
    names.push_back(name);
  }
  return names;
}

/// Saves `from`, loads `to`, and compares all parameters and buffers.
void expect_round_trip(const torch::nn::Module& from, torch::nn::Module& to) {
  const TemporaryFolder folder;
  const std::string path = folder / "module.safetensors";
  save_safetensors(from, path);
  load_safetensors(to, path);
  const auto expect_equal = [](const auto& expected, const auto& actual) {
    for (const auto& [name, tensor] : expected.pairs()) {
      EXPECT_TRUE(at::equal(actual[name], tensor)) << name;
    }
  };
  expect_equal(from.named_parameters(), to.named_parameters());
  expect_equal(from.named_buffers(), to.named_buffers());
}

/// Loading `content` into `module` fails so and changes no parameter.
void expect_refused(torch::nn::Module& module, const Safetensors& content,
                    SafetensorsFault fault,
                    std::initializer_list<std::string> fragments) {
  const TemporaryFolder folder;
  const std::string path = folder / "module.safetensors";
  write_safetensors(path, content);
  std::vector<at::Tensor> before;
  for (const auto& tensor : module.parameters()) {
    before.push_back(tensor.detach().clone());
  }
  test::expect_fault([&] { load_safetensors(module, path); }, fault, fragments);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(module.parameters()[i], before[i])) << i;
  }
}

TEST(SafetensorsModule, RoundTripsLinear) {
  Linear from(3, 2), to(3, 2);
  expect_round_trip(*from, *to);
  EXPECT_TRUE(to->weight.is_leaf());
  EXPECT_TRUE(to->weight.requires_grad());
}

TEST(SafetensorsModule, RoundTripsBuffersAndSubmodules) {
  Sequential from(Linear(3, 4), BatchNorm1d(4)),
      to(Linear(3, 4), BatchNorm1d(4));
  from->forward(at::rand({5, 3}));  // moves the running statistics
  expect_round_trip(*from, *to);
}

TEST(SafetensorsModule, NamesAreThoseOfTheStateDict) {
  const TemporaryFolder folder;
  const std::string path = folder / "module.safetensors";
  save_safetensors(*Sequential(Linear(3, 4), BatchNorm1d(4)), path);
  EXPECT_EQ(names_in(path),
            (std::vector<std::string>{"0.bias", "0.weight", "1.bias",
                                      "1.num_batches_tracked", "1.running_mean",
                                      "1.running_var", "1.weight"}));
}

TEST(SafetensorsModule, RoundTripsMultiheadAttention) {
  const auto packed = MultiheadAttentionOptions(8, 2);
  const auto separate =
      MultiheadAttentionOptions(8, 2).kdim(5).vdim(6).add_bias_kv(true);
  for (const auto& options : {packed, separate}) {
    MultiheadAttention from(options), to(options);
    expect_round_trip(*from, *to);
  }
  const TemporaryFolder folder;
  const std::string path = folder / "module.safetensors";
  save_safetensors(*MultiheadAttention(packed), path);
  EXPECT_EQ(names_in(path),
            (std::vector<std::string>{"in_proj_bias", "in_proj_weight",
                                      "out_proj.bias", "out_proj.weight"}));
}

TEST(SafetensorsModule, RoundTripsGroupedQueryAttention) {
  GroupedQueryAttention from(8, 4, 2), to(8, 4, 2);
  expect_round_trip(*from, *to);
}

TEST(SafetensorsModule, ConvertsToTheModulesDtype) {
  const TemporaryFolder folder;
  const std::string path = folder / "module.safetensors";
  Linear from(3, 2), to(3, 2);
  from->to(at::kDouble);
  to->to(at::kHalf);
  save_safetensors(*from, path);
  load_safetensors(*to, path);
  EXPECT_EQ(to->weight.scalar_type(), at::kHalf);
  EXPECT_TRUE(at::equal(to->weight, from->weight.to(at::kHalf)));
}

TEST(SafetensorsModule, NamesAllDifferencesAtOnce) {
  Sequential module(Linear(3, 2), Linear(2, 2));
  expect_refused(*module,
                 {.tensors = {{"0.weight", at::ones({2, 3})},
                              {"0.bias", at::ones({3})},
                              {"1.weight", at::ones({2, 2})},
                              {"2.weight", at::ones({2, 2})}}},
                 kMissing,
                 {"load_safetensors: ", "module.safetensors: tensors must be",
                  "missing: \"1.bias\"; unexpected: \"2.weight\"; ",
                  "\"0.bias\" must have shape [2], got [3]"});
}

TEST(SafetensorsModule, RefusesAnotherShape) {
  Linear module(3, 2);
  expect_refused(
      *module,
      {.tensors = {{"weight", at::ones({3, 2})}, {"bias", at::ones({2})}}},
      kMismatch, {"got \"weight\" must have shape [2,3], got [3,2]"});
}

TEST(SafetensorsModule, RefusesADtypeThatLosesItsMeaning) {
  Linear module(3, 2);
  expect_refused(*module,
                 {.tensors = {{"weight", at::ones({2, 3}, at::kComplexFloat)},
                              {"bias", at::ones({2})}}},
                 kMismatch,
                 {"\"weight\" must have a dtype that casts to Float, got "
                  "ComplexFloat"});
}

// Two names of one tensor, as tied weights have them.
class Tied : public ::testing::Test {
 protected:
  Tied() { module_ = Sequential(shared_, shared_); }
  Linear shared_{2, 1};
  Sequential module_;
};

TEST_F(Tied, RoundTrips) {
  Linear other(2, 1);
  expect_round_trip(*Sequential(other, other), *module_);
}

TEST_F(Tied, OneNameIsEnough) {
  const TemporaryFolder folder;
  const std::string path = folder / "module.safetensors";
  write_safetensors(path, {.tensors = {{"0.weight", at::full({1, 2}, 7.0)},
                                       {"1.bias", at::full({1}, 8.0)}}});
  load_safetensors(*module_, path);
  EXPECT_TRUE(at::equal(shared_->weight, at::full({1, 2}, 7.0)));
  EXPECT_TRUE(at::equal(shared_->bias, at::full({1}, 8.0)));
}

TEST_F(Tied, NamesMustAgree) {
  expect_refused(*module_,
                 {.tensors = {{"0.weight", at::full({1, 2}, 7.0)},
                              {"1.weight", at::full({1, 2}, 9.0)},
                              {"0.bias", at::ones({1})}}},
                 kMismatch, {"\"1.weight\" must equal the same tensor"});
}

TEST_F(Tied, NoNameIsMissing) {
  expect_refused(*module_, {.tensors = {{"0.bias", at::ones({1})}}}, kMissing,
                 {"missing: \"0.weight\", \"1.weight\""});
}

}  // namespace
}  // namespace multihead
