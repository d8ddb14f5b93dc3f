// SPDX-License-Identifier: MIT
#include "multihead/ops/rules.h"

#include "multihead/optional_tensor.h"

namespace multihead::ops {

AttentionOptions options_of(const Rules& rules) {
  AttentionOptions options{
      .attn_mask = or_undefined(rules.attn_mask),
      .dropout_p = rules.dropout_p,
      .is_causal = rules.is_causal,
      .scale = rules.scale,
      .enable_gqa = rules.enable_gqa,
      .causal_alignment = causal_alignment_from_name(rules.causal_alignment),
      .query_offset = or_undefined(rules.query_offset),
      .key_lengths = or_undefined(rules.key_lengths),
      .key_mask = or_undefined(rules.key_mask),
      .softcap = rules.softcap,
      .alibi_slopes = or_undefined(rules.alibi_slopes),
      .sinks = or_undefined(rules.sinks)};
  if (rules.window) {
    TORCH_CHECK_VALUE(rules.window->size() == 2,
                      "scaled_dot_product_attention: window must be two sizes, "
                      "got ",
                      *rules.window);
    options.window = {(*rules.window)[0], (*rules.window)[1]};
  }
  return options;
}

}  // namespace multihead::ops
