// SPDX-License-Identifier: MIT
//
// The exchange of tokens for heads, as operators; each is the other's inverse,
// and so its derivative.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>
#include <vector>

namespace multihead::distributed {

/// Tensors (B, H, own tokens, D) of W processes → (B, H/W, L, D): heads r·H/W
/// and following, of all tokens in the order of the sequence. H, D, dtypes and
/// tokens may be each tensor's own. lengths: how many tokens each process has
/// of the first tensor, then of the second, ...
///
/// One message to each process has its part of all tensors. So the processes
/// stay together in backward too, whichever gradients one of them needs.
struct TokensToHeads {
  static constexpr auto* kName = "multihead::tokens_to_heads";
};
/// (B, H/W, L, D) → (B, H, own tokens, D).
struct HeadsToTokens {
  static constexpr auto* kName = "multihead::heads_to_tokens";
};

template <class Exchange>
std::vector<at::Tensor> exchange(at::TensorList tensors, std::string_view group,
                                 std::string_view order,
                                 at::IntArrayRef lengths) {
  using Signature = std::vector<at::Tensor>(at::TensorList, std::string_view,
                                            std::string_view, at::IntArrayRef);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(Exchange::kName, "")
                             .template typed<Signature>();
  return op.call(tensors, group, order, lengths);
}

}  // namespace multihead::distributed
