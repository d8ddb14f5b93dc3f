// SPDX-License-Identifier: MIT
#include "cli/cases/block_call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "cli/cases/case.h"

namespace cli {
namespace {

at::Tensor linear(const at::Tensor& x, const Affine& layer) {
  return at::linear(x, layer.weight, layer.bias);
}

at::Tensor norm(const at::Tensor& x, const Affine& layer) {
  return at::layer_norm(x, layer.weight.sizes(), layer.weight, layer.bias);
}

}  // namespace

std::vector<at::Tensor> Block::leaves() const {
  std::vector<at::Tensor> all{input};
  for (const Affine* part :
       {&attention_norm, &qkv, &merge, &mlp_norm, &up, &down})
    all.insert(all.end(), {part->weight, part->bias});
  return all;
}

int64_t Block::num_weights() const {
  return qkv.weight.numel() + merge.weight.numel() + up.weight.numel() +
         down.weight.numel();
}

Block draw(const BlockCall& call, Random& random) {
  const int64_t E = call.E;
  const auto linear = [&](int64_t out, int64_t in) {
    const at::Tensor weight = random.normal({out, in}) / std::sqrt(in);
    return Affine{leaf(weight.to(call.dtype)),
                  leaf(at::zeros({out}, call.dtype))};
  };
  const auto norm = [&] {
    return Affine{leaf(at::ones({E}, call.dtype)),
                  leaf(at::zeros({E}, call.dtype))};
  };
  return {.input = leaf(random.normal({call.N, call.L, E}, call.dtype)),
          .attention_norm = norm(),
          .qkv = linear(3 * E, E),
          .merge = linear(E, E),
          .mlp_norm = norm(),
          .up = linear(4 * E, E),
          .down = linear(E, 4 * E),
          .num_heads = call.H,
          .dropout_p = call.dropout};
}

at::Tensor forward(
    const Block& block,
    const std::function<at::Tensor(const AttentionInputs&)>& attend) {
  const at::Tensor heads =
      linear(norm(block.input, block.attention_norm), block.qkv)
          .unflatten(-1, {3, block.num_heads, -1})
          .permute({2, 0, 3, 1, 4});
  const at::Tensor attended =
      attend({heads[0],
              heads[1],
              heads[2],
              {.dropout_p = block.dropout_p, .is_causal = true}});
  const at::Tensor x =
      block.input + linear(attended.transpose(1, 2).flatten(2), block.merge);
  return x + linear(at::gelu(linear(norm(x, block.mlp_norm), block.up), "tanh"),
                    block.down);
}

std::string shapes(const BlockCall& c) {
  return c10::str("N", c.N, " L", c.L, " E", c.E, " H", c.H, " ",
                  short_name(c.dtype));
}

}  // namespace cli
