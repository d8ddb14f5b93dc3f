// SPDX-License-Identifier: MIT
//
// What one small call costs: multihead::MultiheadAttention against
// torch::nn::MultiheadAttention, and the function against PyTorch's, which is
// also called while the library is installed; interleaved in one process,
// results compared first. The ratio is what counts.
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <multihead/functional.h>
#include <multihead/install.h>
#include <multihead/modules.h>
#include <torch/nn/modules/activation.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

constexpr int64_t kBatch = 3, kLength = 4, kEmbedDim = 8, kNumHeads = 2;
constexpr int kRounds = 60, kCalls = 100;

template <typename F>
double microseconds_per_call(F f) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) f();
  const std::chrono::duration<double, std::micro> passed =
      std::chrono::steady_clock::now() - start;
  return passed.count() / kCalls;
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2,
                   times.end());
  return times[times.size() / 2];
}

template <typename Theirs, typename Ours>
void compare(const char* name, Theirs theirs, Ours ours) {
  TORCH_CHECK(at::allclose(theirs(), ours(), 1e-5, 1e-6), name, ": differs");
  std::vector<double> a, b;
  for (int round = 0; round < kRounds; ++round) {
    a.push_back(microseconds_per_call(theirs));
    b.push_back(microseconds_per_call(ours));
  }
  std::printf("%-34s%12.1f%10.1f%8.2f\n", name, median(a), median(b),
              median(b) / median(a));
}

void compare_functions(int64_t heads, int64_t queries, int64_t keys,
                       int64_t width, bool is_causal) {
  const at::Tensor q = at::randn({1, heads, queries, width});
  const at::Tensor k = at::randn({1, heads, keys, width});
  const at::Tensor v = at::randn({1, heads, keys, width});
  const auto theirs = [&] {
    return at::scaled_dot_product_attention(q, k, v, {}, 0.0, is_causal);
  };
  const auto ours = [&] {
    return multihead::scaled_dot_product_attention(q, k, v,
                                                   {.is_causal = is_causal});
  };
  TORCH_CHECK(at::allclose(theirs(), ours(), 1e-5, 1e-6), "differs");
  std::vector<double> a, b, c;
  for (int round = 0; round < kRounds; ++round) {
    a.push_back(microseconds_per_call(theirs));
    b.push_back(microseconds_per_call(ours));
    const multihead::Installed installed;
    c.push_back(microseconds_per_call(theirs));
  }
  std::printf(
      "H%ld Lq%-3ld Lk%-3ld D%-3ld %-12s%12.2f%10.2f%11.2f%8.2f%11.2f\n", heads,
      queries, keys, width, is_causal ? "causal" : "", median(a), median(b),
      median(c), median(b) / median(a), median(c) / median(a));
}

void measure_functions() {
  const at::NoGradGuard no_grad;
  std::printf("%-34s%12s%10s%11s%8s%11s\n", "function", "PyTorch us", "ours us",
              "installed", "ratio", "installed");
  for (const int64_t heads : {1, 8}) {
    for (const auto& [queries, keys] :
         {std::pair(1, 1), {1, 16}, {1, 64}, {4, 4}, {16, 16}}) {
      for (const int64_t width : {32, 64}) {
        for (const bool is_causal : {false, true}) {
          compare_functions(heads, queries, keys, width, is_causal);
        }
      }
    }
  }
}

void measure_modules() {
  torch::nn::MultiheadAttention reference(kEmbedDim, kNumHeads);
  multihead::MultiheadAttention module(kEmbedDim, kNumHeads);
  {
    const at::NoGradGuard no_grad;
    for (const auto& p : reference->named_parameters()) {
      module->named_parameters()[p.key()].copy_(p.value());
    }
  }
  const at::Tensor x = torch::rand({kLength, kBatch, kEmbedDim});
  const at::Tensor y = torch::rand({kLength, kBatch, kEmbedDim});
  std::printf("%-34s%12s%10s%8s\n", "case", "PyTorch us", "ours us", "ratio");
  for (const bool training : {true, false}) {
    reference->train(training);
    module->train(training);
    const at::AutoGradMode grad(training);
    const auto pair = [&](const char* name, const at::Tensor& key,
                          bool need_weights) {
      compare(
          name,
          [&] {
            return std::get<0>(
                reference->forward(x, key, key, {}, need_weights));
          },
          [&] {
            return std::get<0>(module->forward(
                x, key, key,
                multihead::ForwardOptions().need_weights(need_weights)));
          });
    };
    pair(training ? "train, self-attention" : "eval, self-attention", x, true);
    pair(training ? "train, key is value" : "eval, key is value", y, true);
    pair(training ? "train, no weights" : "eval, no weights", x, false);
  }
}

}  // namespace

int main() {
  at::set_num_threads(1);
  measure_modules();
  measure_functions();
}
