// SPDX-License-Identifier: MIT
//
// Generates tokens with the model that generate.py has written, the same ones:
//
//   generate MODEL.safetensors [TOKENS [SEED]]
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "multihead/cache.h"
#include "multihead/modules.h"
#include "multihead/safetensors.h"

namespace {

using at::Tensor;

constexpr int64_t kVocabulary = 256, kWidth = 128, kHeads = 8, kKvHeads = 2,
                  kLayers = 2, kPositions = 1024;
constexpr std::string_view kPrompt = "The cat sat on the mat because ";
constexpr double kTemperature = 0.8;

Tensor norm(const Tensor& x, const Tensor& weight) {
  return at::rms_norm(x, {kWidth}, weight, 1e-6);
}

// Names of parameters are those of generate.py.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    attention_norm = register_parameter("attention_norm", at::ones({kWidth}));
    mlp_norm = register_parameter("mlp_norm", at::ones({kWidth}));
    attention = register_module(
        "attention",
        multihead::GroupedQueryAttention(
            multihead::GroupedQueryAttentionOptions(kWidth, kHeads, kKvHeads)
                .bias(false)
                .batch_first(true)));
    up =
        register_module("up", multihead::Projection(kWidth, 4 * kWidth, false));
    down = register_module("down",
                           multihead::Projection(4 * kWidth, kWidth, false));
  }

  Tensor forward(const Tensor& input, multihead::KVCache& cache) {
    const Tensor x = norm(input, attention_norm);
    const auto options =
        multihead::ForwardOptions().need_weights(false).cache(&cache);
    const Tensor y = input + std::get<0>(attention(x, x, x, options));
    return y + down(at::silu(up(norm(y, mlp_norm))));
  }

  Tensor attention_norm, mlp_norm;
  multihead::GroupedQueryAttention attention = nullptr;
  multihead::Projection up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct Decoder : torch::nn::Module {
  Decoder() {
    embedding =
        register_parameter("embedding", at::ones({kVocabulary, kWidth}));
    positions = register_parameter("positions", at::ones({kPositions, kWidth}));
    output = register_parameter("output", at::ones({kVocabulary, kWidth}));
    final_norm = register_parameter("norm", at::ones({kWidth}));
    const auto list = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.emplace_back();
      list->push_back(layers.back());
    }
  }

  // (B, L) tokens from position `start` on → (B, vocabulary), logits.
  Tensor forward(const Tensor& tokens, int64_t start,
                 std::vector<multihead::KVCache>& caches) {
    Tensor x = at::embedding(embedding, tokens) +
               positions.narrow(0, start, tokens.size(1));
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i](x, caches[i]);
    return at::linear(norm(x.select(1, -1), final_norm), output);
  }

  Tensor embedding, positions, final_norm, output;
  std::vector<Block> layers;
};

// SplitMix64, the upper 53 bits as a number in [0, 1).
class UniformNumbers {
 public:
  explicit UniformNumbers(uint64_t seed) : state_(seed) {}
  double next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return std::ldexp(static_cast<double>((z ^ (z >> 31)) >> 11), -53);
  }

 private:
  uint64_t state_;
};

// The token at which the cumulated probabilities, in float64, pass the number.
int64_t sampled(const Tensor& logits, double number) {
  const Tensor probabilities =
      (logits.to(at::kDouble) / kTemperature).softmax(-1);
  const auto passed = probabilities.cumsum(-1).le(number).sum().item<int64_t>();
  return std::min(passed, kVocabulary - 1);
}

// Without numbers each token is the likeliest.
std::vector<int64_t> generate(Decoder& model, int64_t count,
                              UniformNumbers* numbers) {
  std::vector<multihead::KVCache> caches;
  for (int64_t i = 0; i < kLayers; ++i) {
    caches.emplace_back(
        multihead::KVCacheOptions(1, kKvHeads, kWidth / kHeads));
  }
  std::vector<int64_t> tokens, news(kPrompt.begin(), kPrompt.end());
  int64_t position = 0;
  while (static_cast<int64_t>(tokens.size()) < count) {
    const Tensor input = at::tensor(news, at::kLong).unsqueeze(0);
    const Tensor logits = model.forward(input, position, caches)[0];
    position += input.size(1);
    tokens.push_back(numbers == nullptr ? logits.argmax().item<int64_t>()
                                        : sampled(logits, numbers->next()));
    news = {tokens.back()};
  }
  return tokens;
}

void print(const char* name, const std::vector<int64_t>& tokens) {
  std::cout << name;
  for (const int64_t token : tokens) std::cout << ' ' << token;
  std::cout << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::cerr << "usage: generate MODEL.safetensors [TOKENS [SEED]]\n";
    return 2;
  }
  try {
    const at::NoGradGuard no_grad;
    const int64_t count = argc > 2 ? std::stoll(argv[2]) : 64;
    UniformNumbers numbers(argc > 3 ? std::stoull(argv[3]) : 1);
    Decoder model;
    multihead::load_safetensors(model, argv[1]);
    model.eval();
    print("greedy:", generate(model, count, nullptr));
    print("sampled:", generate(model, count, &numbers));
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << '\n';
    return 1;
  }
}
