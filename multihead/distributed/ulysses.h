// SPDX-License-Identifier: MIT
//
// The exchange of tokens for heads, as operators; each is the other's inverse,
// and so its derivative.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace multihead::distributed {

/// x (B, H, own tokens, D) of W processes → (B, H/W, L, D): heads r·H/W and
/// following, of all tokens in the order of the sequence. lengths: how many
/// tokens each process has.
struct TokensToHeads {
  static constexpr auto* kName = "multihead::tokens_to_heads";
};
/// x (B, H/W, L, D) → (B, H, own tokens, D).
struct HeadsToTokens {
  static constexpr auto* kName = "multihead::heads_to_tokens";
};

template <class Exchange>
at::Tensor exchange(const at::Tensor& x, std::string_view group,
                    std::string_view order, at::IntArrayRef lengths) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(Exchange::kName, "")
          .template typed<at::Tensor(const at::Tensor&, std::string_view,
                                     std::string_view, at::IntArrayRef)>();
  return op.call(x, group, order, lengths);
}

}  // namespace multihead::distributed
