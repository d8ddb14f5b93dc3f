// SPDX-License-Identifier: MIT
//
// Cases with a backward pass: of attention, alone and after its forward, and
// training steps of a layer and of a transformer block.
#pragma once

#include "cli/bench/contenders.h"

namespace cli {

/// Gradients are those of Σ out·dout with dout drawn at random, of query, key
/// and value. By hand only with dropout, which PyTorch has no kernel for.
Problem training_problem(const AttentionCall& call, Pass pass, Random& random);

/// Self-attention in training mode; gradients of the input and all parameters.
/// Ours and nn.MHA.
Problem training_problem(const LayerCall& call, Pass pass, Random& random);

/// One step through a block with dropout. Contenders differ in its attention,
/// which is what is verified, on the heads that the block makes.
Problem training_problem(const BlockCall& call, Random& random);

}  // namespace cli
