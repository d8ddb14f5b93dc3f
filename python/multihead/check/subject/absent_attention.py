# SPDX-License-Identifier: MIT
"""Attention of packages that are not there, as most need a GPU: by their documentation,
and computed by PyTorch's function, whose scores a check sees. Those of
multihead.flash_attn are one operation each: of these it would see no softmax, and judge
nothing. Options that PyTorch's function lacks are refused."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# What changes nothing, of options that PyTorch's function lacks.
_IDLE = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}


class LowerTriangularMask:
    """The causal mask of xformers, aligned with the first key."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | LowerTriangularMask | None = None,
    p: float = 0.0,
    scale: float | None = None,
    **_: object,
) -> Tensor:
    """xformers.ops.memory_efficient_attention: (B, L, H, D), or (B, L, D) of one head;
    a bias (B, H, Lq, Lk)."""
    if query.dim() == 3:
        bias = attn_bias.unsqueeze(1) if isinstance(attn_bias, Tensor) else attn_bias
        heads = (x.unsqueeze(2) for x in (query, key, value))
        return memory_efficient_attention(*heads, bias, p, scale).squeeze(2)
    mask = attn_bias
    if isinstance(mask, LowerTriangularMask):
        mask = _causal(query, key, diagonal=0)
    return _attend(query, key, value, mask, p, scale)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: object,
) -> Tensor:
    """flash_attn.flash_attn_func: (B, L, H, D), of keys and values a divisor of the heads;
    causal is aligned with the last key.

    Raises NotImplementedError for a window, a cap or slopes of ALiBi."""
    for name, idle in _IDLE.items():
        if (value := options.get(name, idle)) is not idle and value != idle:
            raise NotImplementedError(
                f"flash_attn_func: {name} must be {idle} where flash_attn is not "
                f"installed, got {value}"
            )
    mask = _causal(q, k, k.shape[1] - q.shape[1]) if causal else None
    return _attend(q, k, v, mask, dropout_p, softmax_scale)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: object, **options: object) -> Tensor:
    """The same of (B, L, 3, H, D)."""
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *args: object, **options: object
) -> Tensor:
    """The same of (B, Lq, H, D) and (B, Lk, 2, H, D)."""
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def _causal(query: Tensor, key: Tensor, diagonal: int) -> Tensor:
    sizes = query.shape[1], key.shape[1]
    return torch.ones(sizes, dtype=torch.bool, device=query.device).tril(diagonal)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    scale: float | None,
) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    is_grouped = query.shape[2] != key.shape[2]
    out = F.scaled_dot_product_attention(
        *heads, mask, p, scale=scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2)


FUNCTIONS: dict[str, Callable] = {
    one.__name__: one
    for one in (
        LowerTriangularMask,
        memory_efficient_attention,
        flash_attn_func,
        flash_attn_qkvpacked_func,
        flash_attn_kvpacked_func,
    )
}
