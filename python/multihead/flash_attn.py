# SPDX-License-Identifier: MIT
"""FlashAttention 2's functions on the CPU, for code that imports them.

Names, arguments, layouts and meaning are those of flash_attn_interface.py of
FlashAttention 2: q (B, L, H, D); causal masks and windows from the bottom right; a row
that sees no key gives 0. Two lines make ``import flash_attn`` work where it is not
installed::

    import sys, multihead.flash_attn
    sys.modules["flash_attn"] = multihead.flash_attn

Gradients are those of multihead's functions, which these call. Beyond FlashAttention,
float32 and float64 are taken, any head width, value heads of another width, and pages of
any size; dropout draws other numbers from PyTorch's generator.

Accepted without effect, since there is nothing to choose here: ``deterministic`` (it
always is), ``num_splits`` (bits never depend on it), ``max_seqlen_q`` and
``max_seqlen_k`` (the bounds say it). The bounds ``cu_seqlens`` are on the CPU, as all is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .functional import scaled_dot_product_attention, varlen_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_NONE = (-1, -1)  # no window


def _rules(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """FlashAttention's rules in multihead's words."""
    return dict(
        scale=softmax_scale,
        is_causal=causal,
        window=tuple(window_size),
        softcap=softcap if softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        causal_alignment="bottom_right",
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = _NONE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Lq, H, D), k and v (B, Lk, G, D); G divides H.

    Returns out (B, Lq, H, D); with return_attn_probs (out, softmax_lse (B, H, Lq),
    None): the probabilities, which FlashAttention returns "for testing only", are not
    formed. Raises as scaled_dot_product_attention does.
    """
    rules = _rules(softmax_scale, causal, window_size, softcap, alibi_slopes)
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
    window_size: Sequence[int] = _NONE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """The same of sequences one after the other: q (total_q, H, D), k, v (total_k, G, D).

    With block_table k and v are pages (P, page, G, D), and cu_seqlens_k says how many
    keys each sequence has. Returns out (total_q, H, D), or (out, softmax_lse
    (H, total_q), None). Raises as varlen_attention does.
    """
    paged = block_table is not None
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
        **_rules(softmax_scale, causal, window_size, softcap, alibi_slopes),
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, *rules: Any, **named: Any) -> Any:
    """flash_attn_func of qkv (B, L, 3, H, D)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rules, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *rules: Any, **named: Any) -> Any:
    """flash_attn_func of q (B, Lq, H, D) and kv (B, Lk, 2, G, D)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *rules, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *rules: Any, **named: Any
) -> Any:
    """flash_attn_varlen_func of qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(1)
    bounds: Any = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *bounds, *rules, **named)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, *bounds_and_rules: Any, **named: Any
) -> Any:
    """flash_attn_varlen_func of q (total_q, H, D) and kv (total_k, 2, G, D)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *bounds_and_rules, **named)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = _NONE,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of new queries to a cache, into which new keys and values go first.

    Without derivatives, as FlashAttention's.

    Args:
        q: (B, Lq, H, D).
        k_cache: (B_cache, L_cache, G, D), or with block_table pages (P, page, G, D).
        v_cache: like k_cache.
        k: (B, L_new, G, D): written to the cache **in place**, from cache_seqlens on.
        v: like k; both or none.
        rotary_cos: (positions, rotary_dim / 2). With k given, k is rotated for the
            positions cache_seqlens, cache_seqlens + 1, ...; q likewise where causal or
            a window is given, else all of it for cache_seqlens.
        rotary_sin: like rotary_cos.
        cache_seqlens: how many keys the cache holds: an int or integers (B,); None:
            all L_cache.
        cache_batch_idx: integers (B,): which rows of the cache; None: 0, 1, ...
        cache_leftpad: integers (B,): keys before it are not seen. Not with pages.
        block_table: int32 (B, pages).
        softmax_scale: default 1/sqrt(D).
        causal: the last query stands at the last key.
        window_size: (left, right), from there as well.
        softcap: 0 = none.
        rotary_interleaved: dimensions 0 and 1, 2 and 3, ... are rotated together; else
            0 and rotary_dim / 2, ...
        alibi_slopes: (H,) or (B, H).
        num_splits: without effect.
        return_softmax_lse: also return the logsumexp.

    Returns:
        out (B, Lq, H, D), or (out, softmax_lse (B, H, Lq)).

    Raises:
        ValueError: keys beyond the cache, and those of varlen_attention.
        RuntimeError: shapes or dtypes that do not fit together. In both cases the
            cache is what it was.
    """
    lengths = _lengths(q, k_cache, cache_seqlens, block_table)
    table = _pages(q, k_cache, cache_batch_idx, cache_leftpad, block_table)
    rules = _rules(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if k is not None or v is not None:
        if k is None or v is None or cache_seqlens is None:
            raise _error("k, v and cache_seqlens must be given together")
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            expected = (len(q), k.shape[1], *cache.shape[2:])
            if new.shape != expected or new.dtype != cache.dtype:
                raise _error(
                    f"{name} must be {cache.dtype} {expected}, got {new.dtype} "
                    f"{tuple(new.shape)}"
                )
        positions = lengths[:, None] + torch.arange(k.shape[1])
        lengths = lengths + k.shape[1]
        _check_room(positions, table, k_cache)
        # No queries: all arguments are checked before the cache changes.
        _attend(q[:, :0], k_cache, v_cache, table, lengths, cache_leftpad, rules)
        if rotary_cos is not None and rotary_sin is not None:
            turns = (rotary_cos, rotary_sin, rotary_interleaved)
            moves = causal or tuple(window_size) != _NONE
            steps = torch.arange(q.shape[1]) * moves
            q = _rotated(q, positions[:, :1] + steps, *turns)
            k = _rotated(k, positions, *turns)
        page = k_cache.shape[1]
        pages = table.long().gather(1, positions // page)
        k_cache[pages, positions % page] = k
        v_cache[pages, positions % page] = v
    out, lse = _attend(q, k_cache, v_cache, table, lengths, cache_leftpad, rules)
    return (out, lse) if return_softmax_lse else out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    leftpad: Tensor | None,
    rules: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if leftpad is not None:
        rows = table[:, 0]
        out, lse = scaled_dot_product_attention(
            q.transpose(1, 2),
            k_cache[rows].transpose(1, 2),
            v_cache[rows].transpose(1, 2),
            enable_gqa=True,
            key_lengths=lengths,
            return_lse=True,
            key_mask=torch.arange(k_cache.shape[1]) >= leftpad[:, None],
            **rules,
        )
        return out.transpose(1, 2), lse
    out, lse = varlen_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        torch.arange(q.shape[0] + 1) * q.shape[1],
        key_lengths=lengths,
        block_table=table,
        return_lse=True,
        **rules,
    )
    size = q.shape[:2]
    return out.unflatten(0, size), lse.unflatten(1, size).transpose(0, 1)


def _error(text: str) -> ValueError:
    return ValueError(f"flash_attn_with_kvcache: {text}")


def _lengths(
    q: Tensor, k_cache: Tensor, given: int | Tensor | None, table: Tensor | None
) -> Tensor:
    """(B,): how many keys of the cache count."""
    if isinstance(given, Tensor):
        if given.shape != q.shape[:1]:
            shape = tuple(given.shape)
            raise _error(f"cache_seqlens must have the shape (B,), got {shape}")
        return given.long()
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    return torch.full(q.shape[:1], room if given is None else given)


def _pages(
    q: Tensor,
    k_cache: Tensor,
    rows: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """A cache without pages is one whose pages are as long as it is."""
    if table is not None:
        if rows is not None or leftpad is not None:
            raise _error(
                "cache_batch_idx and cache_leftpad must be None with block_table, got one"
            )
        return table
    if rows is not None:
        return rows[:, None].int()
    if len(q) != len(k_cache):
        raise _error(
            "k_cache must have the batch size of q without cache_batch_idx, got "
            f"{len(k_cache)} and {len(q)}"
        )
    return torch.arange(len(q), dtype=torch.int32)[:, None]


def _check_room(positions: Tensor, table: Tensor, cache: Tensor) -> None:
    """New keys must have a place."""
    room = table.shape[1] * cache.shape[1]
    if positions.numel() and not 0 <= positions.min() <= positions.max() < room:
        raise _error(
            f"cache_seqlens must leave place for k among the {room} keys of the cache, "
            f"got keys {positions.min()} to {positions.max()}"
        )


def _rotated(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """x (B, L, heads, D), its first dimensions rotated for positions (B, L)."""
    if positions.numel() and positions.max() >= len(cos):
        raise _error(
            f"rotary_cos must have a row for position {positions.max()}, got {len(cos)}"
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    c, s = (turn[positions][:, :, None].to(dtype) for turn in (cos, sin))
    width = 2 * cos.shape[-1]
    turned = x[..., :width].to(dtype)
    a, b = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    )
    parts = (a * c - b * s, b * c + a * s)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned.to(x.dtype), x[..., width:]], -1)
