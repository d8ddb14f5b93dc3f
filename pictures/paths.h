// SPDX-License-Identifier: MIT
//
// What reaches a token through all layers, as far as weights tell (S. Abnar and
// W. Zuidema, "Quantifying Attention Flow in Transformers", 2020).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "pictures/picture.h"

namespace multihead::pictures {

/// Of the mean weights of each layer's heads, (L, L), the first layer first:
/// the product of ½·(weights + 1), rows divided by their sum. (L, L), float64:
/// how much of position j is in what the last layer gives for position i.
at::Tensor rollout(const std::vector<at::Tensor>& means);

/// For the same, the most that can flow from position i above the last layer to
/// position j below the first, where no edge of ½·(weights + 1) carries more
/// than its weight. (L, L), float64.
at::Tensor flow(const std::vector<at::Tensor>& means);

/// Whether flow() takes seconds at most.
bool is_flow_short(int64_t layers, int64_t length);

/// The mean of the layers, rollout and flow as panels of a picture beside the
/// layers', with what they do not tell as remarks. `layer` is one of the
/// layers, whose tokens and sizes it takes.
Picture paths_of(const std::vector<at::Tensor>& means, const Picture& layer);

}  // namespace multihead::pictures
