// SPDX-License-Identifier: MIT
//
// The fused operators without values.
#include <torch/library.h>

#include "multihead/ops/results.h"

namespace multihead::ops {

TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  using fields::implementation;
  m.impl("fused_attention", implementation<&fused_attention_results>);
  m.impl("fused_attention_backward",
         implementation<&fused_attention_backward_results>);
  m.impl("fused_varlen_attention",
         implementation<&fused_varlen_attention_results>);
  m.impl("fused_varlen_attention_backward",
         implementation<&fused_varlen_attention_backward_results>);
  m.impl("attention_weights", implementation<&attention_weights_result>);
  m.impl("fused_attention_summary",
         implementation<&fused_attention_summary_results>);
}

}  // namespace multihead::ops
