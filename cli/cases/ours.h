// SPDX-License-Identifier: MIT
//
// The modules under test, made from the parameters of a layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "cli/cases/layer_call.h"
#include "multihead/functional.h"

namespace cli::ours {

/// MultiheadAttention, or GroupedQueryAttention where num_kv_heads is set.
Module make_module(const multihead::AttentionLayer& layer);

/// One call of it.
std::tuple<at::Tensor, at::Tensor> module(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const multihead::AttentionLayer& layer,
    const multihead::ForwardOptions& options);

}  // namespace cli::ours
