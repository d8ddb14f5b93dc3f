# SPDX-License-Identifier: MIT
"""The question whether a call would run fused."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from ._call import as_tensor, call
from ._subclasses import own_rules_of

_ops = torch.ops.multihead


def why_not_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **rules: Any,
) -> str | None:
    """Why the fused kernels cannot run a call of scaled_dot_product_attention.

    Takes its arguments, without return_lse. None: they can, and do so under the
    backends "auto" and "fused". Nothing is computed.
    """
    if isinstance(attn_mask, CausalBias):
        attn_mask = None
    rules["query_offset"] = as_tensor(rules.get("query_offset"), query)
    tensors = dict(query=query, key=key, value=value, attn_mask=attn_mask)
    reason: str | None = own_rules_of(tensors | rules) or call(
        _ops.why_not_fused.default,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        **rules,
    )
    return reason
