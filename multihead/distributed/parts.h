// SPDX-License-Identifier: MIT
//
// A call over a whole sequence, seen from a part: some queries and some keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "multihead/distributed/agreement.h"
#include "multihead/distributed/tokens.h"

namespace multihead::distributed {

class Whole {
 public:
  /// `options`: those of this process's call, but key_mask of all keys.
  Whole(const AttentionOptions& options, const Places& places);

  /// Whether no query of these sees one of these keys.
  bool hides(const Span& queries, const Span& keys) const;

  /// What the part is called with: positions from its first key on, and no
  /// sinks, which are no key's.
  AttentionOptions of_part(const Span& queries, const Span& keys) const;

  /// Where the part draws its dropout, if any.
  std::optional<at::Tensor> dropout_state(const Span& queries, const Span& keys,
                                          int64_t num_heads) const;

  /// attn_mask of the part, a view of the one of the call; undefined: none.
  at::Tensor mask_of_part(const at::Tensor& attn_mask, const Span& queries,
                          const Span& keys) const;

 private:
  const AttentionOptions options_;
  const Places places_;
  at::Tensor offsets_;  ///< (), (B), or undefined: 0
  int64_t least_offset_ = 0, greatest_offset_ = 0, longest_key_ = 0;
};

}  // namespace multihead::distributed
