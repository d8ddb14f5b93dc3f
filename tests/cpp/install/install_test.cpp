// SPDX-License-Identifier: MIT
//
// C++ programs that call PyTorch's attention, as they are, while it is
// installed.
#include "multihead/install.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "multihead/backend.h"
#include "multihead/functional.h"
#include "multihead/stats.h"

namespace multihead {
namespace {

at::Tensor heads(int64_t length = 33) { return at::randn({2, 4, length, 16}); }

at::Tensor attend(const at::Tensor& x) {
  return at::scaled_dot_product_attention(x, x, x, {}, 0.0,
                                          /*is_causal=*/true);
}

// Since the last reset_stats().
int64_t calls(std::string_view source, std::string_view way) {
  int64_t sum = 0;
  for (const CallCount& count : stats()) {
    if (count.source == source && count.way == way) sum += count.calls;
  }
  return sum;
}

class InstallTest : public ::testing::Test {
 protected:
  void SetUp() override { reset_stats(); }
  void TearDown() override { uninstall(); }
};

TEST_F(InstallTest, TakesPyTorchsFunctionAndGivesItBack) {
  const at::Tensor x = heads(), theirs = attend(x);
  install();
  install();
  EXPECT_TRUE(is_installed());
  EXPECT_TRUE(at::allclose(attend(x), theirs, 1e-5, 1e-6));
  EXPECT_EQ(calls("installed", "fused"), 1);
  uninstall();
  EXPECT_FALSE(is_installed());
  EXPECT_TRUE(at::equal(attend(x), theirs));
  EXPECT_EQ(calls("installed", "fused"), 1);
}

TEST_F(InstallTest, ScopesNest) {
  {
    const Installed outer;
    {
      const Installed inner;
    }
    EXPECT_TRUE(is_installed());
    uninstall();  // of an install() that nobody asked for
    EXPECT_TRUE(is_installed());
  }
  EXPECT_FALSE(is_installed());
}

TEST_F(InstallTest, GradientsAreTheirs) {
  const at::Tensor x = heads();
  const auto gradient = [&] {
    const at::Tensor leaf = x.clone().requires_grad_();
    attend(leaf).square().sum().backward();
    return leaf.grad();
  };
  const at::Tensor theirs = gradient();
  const Installed installed;
  EXPECT_TRUE(at::allclose(gradient(), theirs, 1e-4, 1e-5));
  EXPECT_EQ(calls("installed", "fused"), 1);
}

TEST_F(InstallTest, InferenceModeToo) {
  const c10::InferenceMode inference;
  const at::Tensor x = heads(), theirs = attend(x);
  const Installed installed;
  EXPECT_TRUE(at::allclose(attend(x), theirs, 1e-5, 1e-6));
  EXPECT_EQ(calls("installed", "fused"), 1);
}

TEST_F(InstallTest, WhoAsksForPyTorchGetsItsBits) {
  const at::Tensor x = heads(), theirs = attend(x);
  const Installed installed;
  {
    const BackendGuard exact(Backend::kExact);
    EXPECT_TRUE(at::equal(attend(x), theirs));
  }
  EXPECT_TRUE(stats().empty());
  at::globalContext().setSDPUseFlash(false);
  attend(x);
  at::globalContext().setSDPUseFlash(true);
  EXPECT_EQ(calls("installed", "pytorch"), 1);
}

TEST_F(InstallTest, ExactFunctionsDoNotComeBackHere) {
  const at::Tensor x = heads(), theirs = attend(x);
  const Installed installed;
  const BackendGuard exact(Backend::kExact);
  EXPECT_TRUE(at::equal(
      multihead::scaled_dot_product_attention(x, x, x, {.is_causal = true}),
      theirs));
  EXPECT_EQ(calls("function", "pytorch"), 1);
  EXPECT_EQ(calls("installed", "fused"), 0);
}

TEST_F(InstallTest, SourcesAreCountedApart) {
  const at::Tensor x = heads();
  const Installed installed;
  attend(x);
  multihead::scaled_dot_product_attention(x, x, x);
  multihead::scaled_dot_product_attention(x, x, x);
  EXPECT_EQ(calls("installed", "fused"), 1);
  EXPECT_EQ(calls("function", "fused"), 2);
  reset_stats();
  EXPECT_TRUE(stats().empty());
}

TEST_F(InstallTest, ThreadsCallMeanwhile) {
  const at::Tensor x = heads(), theirs = attend(x);
  std::atomic<bool> done{false}, right{true};
  std::thread caller([&] {
    const at::NoGradGuard no_grad;
    while (!done) {
      if (!at::allclose(attend(x), theirs, 1e-5, 1e-6)) right = false;
    }
  });
  for (int i = 0; i < 300; ++i) const Installed installed;
  done = true;
  caller.join();
  EXPECT_TRUE(right);
}

TEST_F(InstallTest, LinearFollowsItsRule) {
  const at::Tensor a = at::randn({256, 512}), b = at::randn({512, 512});
  const at::Tensor theirs = at::mm(a, b);
  const Installed installed({.linear = true});
  EXPECT_TRUE(at::allclose(at::mm(a, b), theirs, 1e-4, 1e-4));
  EXPECT_EQ(calls("linear", "onednn") > 0, why_not_linear().empty());
}

}  // namespace
}  // namespace multihead
