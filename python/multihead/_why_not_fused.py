# SPDX-License-Identifier: MIT
"""The question whether a call would run fused."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._call import as_tensor, call
from ._subclasses import is_causal_bias, own_rules_of
from .functional import Rules

if TYPE_CHECKING:  # of Python 3.11, or of a package that PyTorch brings
    from typing_extensions import Unpack

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
    *,
    return_lse: bool = False,
    **rules: "Unpack[Rules]",
) -> str | None:
    """Why the fused kernels cannot run a call of scaled_dot_product_attention.

    Takes its arguments. None: they can, and do so under the backends "auto" and
    "fused". Nothing is computed, and the arguments are not checked: the answer is
    None for calls that raise. TypeError for unknown names and other types.
    """
    for name in rules.keys() - Rules.__annotations__.keys():
        raise TypeError(
            "why_not_fused: arguments must be those of scaled_dot_product_attention, "
            f"got {name}"
        )
    if is_causal_bias(attn_mask):
        attn_mask = None
    options: dict[str, Any] = {**rules}
    offset = options.get("query_offset")
    options["query_offset"] = as_tensor("why_not_fused", offset, query)
    tensors = dict(query=query, key=key, value=value, attn_mask=attn_mask)
    reason: str | None = own_rules_of(tensors | options) or call(
        _ops.why_not_fused.default,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        **options,
    )
    return reason
