# SPDX-License-Identifier: MIT
"""FlashAttention 2's functions on the CPU, for code that imports them.

Names, arguments, layouts and meaning are those of flash_attn_interface.py of
FlashAttention 2: q (B, L, H, D); causal masks and windows from the bottom right; a row
that sees no key gives 0. Two lines make ``import flash_attn`` work where it is not
installed::

    import sys, multihead.flash_attn
    sys.modules["flash_attn"] = multihead.flash_attn

and also ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding``;
``__version__`` is that of the FlashAttention whose arguments these are.

Gradients are those of multihead's functions, which these call. Beyond FlashAttention,
float32 and float64 are taken, any head width, value heads of another width, and pages of
any size; dropout draws other numbers from PyTorch's generator.

Accepted without effect, since there is nothing to choose here: ``deterministic`` (it
always is), ``num_splits`` (bits never depend on it), ``max_seqlen_q`` and
``max_seqlen_k`` (the bounds say it). The bounds ``cu_seqlens`` are on the CPU, as all is.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..functional import scaled_dot_product_attention, varlen_attention
from .kvcache import flash_attn_with_kvcache
from .rules import NO_WINDOW, check_tensors, in_their_words, rules_of, unpacked

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.3"  # FlashAttention's


@in_their_words()
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Lq, H, D), k and v (B, Lk, G, D); G divides H.

    Returns out (B, Lq, H, D); with return_attn_probs (out, softmax_lse (B, H, Lq),
    None): the probabilities, which FlashAttention returns "for testing only", are not
    formed. Raises as scaled_dot_product_attention does, about these arguments.
    """
    name = "flash_attn_func"
    rules = rules_of(name, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_tensors(name, 4, q=q, k=k, v=v)
    out, lse = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=dropout_p,
        enable_gqa=True,
        return_lse=True,
        **rules,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


@in_their_words(key_lengths="cu_seqlens_k.diff()")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """The same of sequences one after the other: q (total_q, H, D), k, v (total_k, G, D).

    With block_table k and v are pages (P, page, G, D), and cu_seqlens_k says how many
    keys each sequence has. Returns out (total_q, H, D), or (out, softmax_lse
    (H, total_q), None). Raises as varlen_attention does, about these
    arguments.
    """
    name = "flash_attn_varlen_func"
    check_tensors(name, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    check_tensors(name, cu_seqlens_k=cu_seqlens_k)
    paged = block_table is not None
    rules = rules_of(name, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        None if paged else cu_seqlens_k,
        dropout_p,
        key_lengths=cu_seqlens_k.diff() if paged else None,
        block_table=block_table,
        return_lse=True,
        **rules,
    )
    return (out, lse, None) if return_attn_probs else out


@in_their_words()
def flash_attn_qkvpacked_func(qkv: Tensor, *rules: Any, **named: Any) -> Any:
    """flash_attn_func of qkv (B, L, 3, H, D)."""
    q, k, v = unpacked("flash_attn_qkvpacked_func", "qkv", qkv, 2, 3)
    return flash_attn_func(q, k, v, *rules, **named)


@in_their_words()
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *rules: Any, **named: Any) -> Any:
    """flash_attn_func of q (B, Lq, H, D) and kv (B, Lk, 2, G, D)."""
    k, v = unpacked("flash_attn_kvpacked_func", "kv", kv, 2, 2)
    return flash_attn_func(q, k, v, *rules, **named)


@in_their_words(key_lengths="cu_seqlens_k.diff()")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *rules: Any, **named: Any
) -> Any:
    """flash_attn_varlen_func of qkv (total, 3, H, D)."""
    q, k, v = unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 1, 3)
    bounds: Any = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *bounds, *rules, **named)


@in_their_words(key_lengths="cu_seqlens_k.diff()")
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, *bounds_and_rules: Any, **named: Any
) -> Any:
    """flash_attn_varlen_func of q (total_q, H, D) and kv (total_k, 2, G, D)."""
    k, v = unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, 1, 2)
    return flash_attn_varlen_func(q, k, v, *bounds_and_rules, **named)
