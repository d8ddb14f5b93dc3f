# SPDX-License-Identifier: MIT
"""One call of scaled_dot_product_attention for each option, and what it means.

Small tensors: batch 2, 4 query heads, 3 queries, 5 keys, heads of width 4 and
value heads of width 3.
"""

import itertools
import math
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


def _integers(*values: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.tensor(values)


# Functions stand for tensors and are called with the dtype.
OPTIONS = {
    "none": {},
    "scale": dict(scale=-0.7),
    "causal": dict(is_causal=True),
    "bottom right": dict(is_causal=True, causal_alignment="bottom_right"),
    "offset": dict(is_causal=True, query_offset=lambda dtype: torch.tensor(1)),
    "offset, blocked rows": dict(is_causal=True, query_offset=_integers(2, -2)),
    "offset, window": dict(window=(1, 0), query_offset=_integers(3, 1)),
    "offset, slopes": dict(query_offset=_integers(-1, 2), alibi_slopes=_randn(H)),
    "window": dict(window=(1, 0)),
    "window, blocked rows": dict(window=(0, -1), causal_alignment="bottom_right"),
    "lengths": dict(key_lengths=_integers(3, 5)),
    "lengths, blocked rows": dict(key_lengths=_integers(0, 5)),
    "decoding": dict(
        is_causal=True,
        causal_alignment="bottom_right",
        key_lengths=_integers(2, 4),
    ),
    "key mask": dict(key_mask=lambda dtype: _keep()[:, 0, 1]),
    "key mask, blocked rows": dict(
        key_mask=lambda dtype: torch.tensor([[False] * LK, [True] * 2 + [False] * 3])
    ),
    "key mask, bias": dict(key_mask=lambda dtype: _keep()[:, 0, 1], attn_mask=_bias),
    "key mask, keep mask": dict(
        key_mask=lambda dtype: _keep()[:, 0, 1], attn_mask=lambda dtype: _keep()
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
        query_offset=_integers(1, 2),
        window=(2, 1),
        key_lengths=_integers(4, 5),
        key_mask=lambda dtype: torch.arange(B * LK).view(B, LK) % 4 != 2,
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


def _position(b: int, i: int, options: dict) -> tuple[int, int]:
    """The number of keys of batch row b, and the key at which query i stands."""
    lengths = options.get("key_lengths")
    n = LK if lengths is None else int(lengths[b])
    if "query_offset" in options:
        return n, i + int(options["query_offset"].expand(B)[b])
    bottom_right = options.get("causal_alignment") == "bottom_right"
    return n, i + (n - LQ if bottom_right else 0)


def _visible(b: int, h: int, i: int, options: dict) -> list[int]:
    """The keys that query i of head h in batch row b sees."""
    n, position = _position(b, i, options)
    left, right = options.get("window", (-1, -1))
    mask = options.get("attn_mask")
    blocked = None
    if mask is not None:
        blocked = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        blocked = blocked.expand(B, H, LQ, LK)[b, h, i]
    keys = options.get("key_mask")
    return [
        j
        for j in range(n)
        if not (options.get("is_causal") and j > position)
        and not (left >= 0 and j < position - left)
        and not (right >= 0 and j > position + right)
        and not (blocked is not None and blocked[j])
        and not (keys is not None and not keys[b, j])
    ]


def _score(q: Tensor, k: Tensor, at: tuple, options: dict) -> float:
    """Of one query and one key; at = (b, h, i, j)."""
    b, h, i, j = at
    score = options.get("scale", D**-0.5) * float(q @ k)
    cap = options.get("softcap")
    score = score if cap is None else cap * math.tanh(score / cap)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        score += float(mask.expand(B, H, LQ, LK)[at])
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        _, position = _position(b, i, options)
        score -= float(slopes.expand(B, H)[b, h]) * abs(position - j)
    return score


def reference(inputs: tuple[Tensor, Tensor, Tensor], options: dict):
    """Output and logsumexp of a float64 call, row by row, from the definition."""
    query, key, value = inputs
    group = H // key.size(1)
    out = torch.zeros(B, H, LQ, DV, dtype=torch.float64)
    logsumexp = torch.full((B, H, LQ), -torch.inf, dtype=torch.float64)
    sinks = options.get("sinks")
    for b, h, i in itertools.product(range(B), range(H), range(LQ)):
        terms = {
            j: math.exp(
                _score(query[b, h, i], key[b, h // group, j], (b, h, i, j), options)
            )
            for j in _visible(b, h, i, options)
        }
        total = sum(terms.values())
        total += 0.0 if sinks is None else math.exp(float(sinks[h]))
        for j, term in terms.items():
            out[b, h, i] += term / total * value[b, h // group, j]
        if total > 0:
            logsumexp[b, h, i] = math.log(total)
    return out, logsumexp
