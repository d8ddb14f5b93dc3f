// SPDX-License-Identifier: MIT
//
// One transformer block as data: what a training step goes through, around any
// form of attention.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/cases/attention_call.h"

namespace cli {

struct BlockCall {
  int64_t N = 2, L = 7, E = 16, H = 4;
  at::ScalarType dtype = at::kFloat;
  double dropout = 0.1;  ///< on the attention weights
};

/// Parameters of a linear layer, weight (out, in), or of a layer norm.
struct Affine {
  at::Tensor weight, bias;
};

/// x + attention(norm(x)), then x + mlp(norm(x)), as GPT-2 has them; causal.
struct Block {
  at::Tensor input;                   ///< (N, L, E)
  Affine attention_norm, qkv, merge;  ///< (E), (3·E, E), (E, E)
  Affine mlp_norm, up, down;          ///< (E), (4·E, E), (E, 4·E)
  int64_t num_heads;
  double dropout_p;

  /// The input, then the parameters; they need gradients.
  std::vector<at::Tensor> leaves() const;
  /// The number of weights of the linear layers; biases do not count.
  int64_t num_weights() const;
};

Block draw(const BlockCall& call, Random& random);

/// (N, L, E); `attend` gets queries, keys and values as views of (N, L, 3·E).
at::Tensor forward(
    const Block& block,
    const std::function<at::Tensor(const AttentionInputs&)>& attend);

/// "N1 L1024 E768 H12 bf16"
std::string shapes(const BlockCall& call);

}  // namespace cli
