# SPDX-License-Identifier: MIT
"""One call of scaled_dot_product_attention for each option, as data.

Small tensors: batch 2, 4 query heads, 3 queries, 5 keys, heads of width 4 and
value heads of width 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import multihead

B, H, LQ, LK, D, DV = 2, 4, 3, 5, 4, 3


def _keep() -> Tensor:
    """May attend; batch row 1's query 0 sees nothing."""
    keep = torch.rand(B, 1, LQ, LK) < 0.6
    keep[..., 0] = True
    keep[1, :, 0] = False
    return keep


def _bias(dtype: torch.dtype) -> Tensor:
    """Added to the scores, with blocked keys; query 1 of head 2 sees nothing."""
    bias = torch.randn(H, LQ, LK, dtype=dtype)
    bias[:, 0, 3] = -torch.inf
    bias[2, 1] = -torch.inf
    return bias


def _randn(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.randn(shape, dtype=dtype)


def _lengths(*lengths: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.tensor(lengths)


# Functions stand for tensors and are called with the dtype.
OPTIONS = {
    "none": {},
    "scale": dict(scale=-0.7),
    "causal": dict(is_causal=True),
    "bottom right": dict(is_causal=True, causal_alignment="bottom_right"),
    "window": dict(window=(1, 0)),
    "window, blocked rows": dict(window=(0, -1), causal_alignment="bottom_right"),
    "lengths": dict(key_lengths=_lengths(3, 5)),
    "lengths, blocked rows": dict(key_lengths=_lengths(0, 5)),
    "decoding": dict(
        is_causal=True,
        causal_alignment="bottom_right",
        key_lengths=_lengths(2, 4),
    ),
    "softcap": dict(softcap=1.5),
    "slopes": dict(alibi_slopes=_randn(H)),
    "slopes per batch": dict(alibi_slopes=_randn(B, H)),
    "sinks": dict(sinks=_randn(H)),
    "keep mask": dict(attn_mask=lambda dtype: _keep()),
    "bias": dict(attn_mask=_bias),
    "bias, causal": dict(attn_mask=_bias, is_causal=True),
    "sinks, blocked rows": dict(sinks=_randn(H), attn_mask=lambda dtype: _keep()),
    "groups": dict(enable_gqa=True),
    "everything": dict(
        attn_mask=_bias,
        is_causal=True,
        scale=0.6,
        enable_gqa=True,
        causal_alignment="bottom_right",
        window=(2, 1),
        key_lengths=_lengths(4, 5),
        softcap=2.0,
        alibi_slopes=_randn(H),
        sinks=_randn(H),
    ),
}


def make(name: str, dtype: torch.dtype = torch.float64, grad: bool = False):
    """((query, key, value), options) of a call; grad: all float tensors require it."""
    torch.manual_seed(sum(map(ord, name)))
    options = {
        option: value(dtype) if callable(value) else value
        for option, value in OPTIONS[name].items()
    }
    groups = 2 if options.get("enable_gqa") else H
    inputs = (
        torch.randn(B, H, LQ, D, dtype=dtype),
        torch.randn(B, groups, LK, D, dtype=dtype),
        torch.randn(B, groups, LK, DV, dtype=dtype),
    )
    for x in (*inputs, *options.values()):
        if grad and isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    return inputs, options


def differentiable(name: str, return_lse: bool = False):
    """(function, tensors): attention of float64 tensors that require gradients.

    The tensors are query, key, value and the options that are floating point.
    """
    inputs, options = make(name, grad=True)
    extra = {
        option: x
        for option, x in options.items()
        if isinstance(x, Tensor) and x.requires_grad
    }
    rest = {option: x for option, x in options.items() if option not in extra}

    def function(query, key, value, *tensors):
        return multihead.scaled_dot_product_attention(
            query,
            key,
            value,
            **dict(zip(extra, tensors, strict=True)),
            **rest,
            return_lse=return_lse,
        )

    return function, (*inputs, *extra.values())
