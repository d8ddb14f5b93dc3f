// SPDX-License-Identifier: MIT
//
// A layer's attention in the order of
// torch.nn.functional.multi_head_attention_forward: what backend "exact" runs
// between the projections.
#pragma once

#include "multihead/attention/heads.h"
#include "multihead/layer/masks.h"

namespace multihead {

/// Weights where options ask for them.
HeadResults attend_in_torch_order(Heads heads, LayerMasks masks,
                                  const AttentionLayer& layer,
                                  const ForwardOptions& options,
                                  double dropout_p);

}  // namespace multihead
