# SPDX-License-Identifier: MIT
"""FlashAttention 2's function for decoding with a cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import scaled_dot_product_attention, varlen_attention
from .rules import NO_WINDOW, check_tensors, in_their_words, rules_of


@in_their_words(key="k_cache", value="v_cache", key_lengths="cache_seqlens")
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
    window_size: Sequence[int] = NO_WINDOW,
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
        rotary_cos: (positions, rotary_dim / 2), only with k: k is rotated for the
            positions cache_seqlens, cache_seqlens + 1, ...; q likewise where causal or
            a window is given, else all of it for cache_seqlens.
        rotary_sin: like rotary_cos.
        cache_seqlens: how many keys the cache holds: an int or integers (B,); None:
            all L_cache.
        cache_batch_idx: integers (B,): which rows of the cache; None: 0, 1, ...
        cache_leftpad: integers (B,): keys before it are not seen. Not with pages; with
            cache_batch_idx the rows are computed one after the other.
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
        ValueError: arguments that do not fit together.
        RuntimeError, TypeError: those of varlen_attention. In all cases the cache is
            what it was.
    """
    rules = rules_of(
        "flash_attn_with_kvcache",
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
    )
    _check_cache(q, k_cache, v_cache)
    table = _pages(q, k_cache, cache_batch_idx, cache_leftpad, block_table)
    room = table.shape[1] * k_cache.shape[1]
    new = _check_new(q, k_cache, v_cache, k, v, cache_seqlens)
    lengths = _lengths(len(q), cache_seqlens, room, new)
    if cache_leftpad is not None:
        cache_leftpad = _integers("cache_leftpad", cache_leftpad, len(q), room)
    moves = causal or rules["window"] != NO_WINDOW
    steps = torch.arange(q.shape[1]) * moves  # of q, where it is rotated
    reach = max(new, q.shape[1] if moves else min(q.shape[1], 1))
    _check_rotary(q, k, rotary_cos, rotary_sin, lengths, reach)
    if k is not None and v is not None:
        start, lengths = lengths[:, None], lengths + new
        # No queries: the rules and the table are checked before the cache changes.
        _attend(q[:, :0], k_cache, v_cache, table, lengths, rules)
        positions = start + torch.arange(new)
        if rotary_cos is not None and rotary_sin is not None:
            turns = (rotary_cos, rotary_sin, rotary_interleaved)
            q = _rotated(q, start + steps, *turns)
            k = _rotated(k, positions, *turns)
        if new:
            _write(k_cache, v_cache, k, v, table, positions)
    if cache_leftpad is None:
        out, lse = _attend(q, k_cache, v_cache, table, lengths, rules)
    else:
        rows = None if cache_batch_idx is None else table[:, 0].tolist()
        out, lse = _attend_padded(
            q, k_cache, v_cache, rows, lengths, cache_leftpad, rules
        )
    return (out, lse) if return_softmax_lse else out


def _write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    # Keys out of the cache itself must not change while they are copied.
    stores = [x.untyped_storage().data_ptr() for x in (k_cache, v_cache)]
    k, v = (
        x.clone() if x.untyped_storage().data_ptr() in stores else x for x in (k, v)
    )
    page = k_cache.shape[1]
    pages = table.long().gather(1, positions // page)
    k_cache[pages, positions % page] = k
    v_cache[pages, positions % page] = v


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    rules: dict[str, Any],
) -> tuple[Tensor, Tensor]:
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


def _attend_padded(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: list[int] | None,
    lengths: Tensor,
    leftpad: Tensor,
    rules: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if rows:  # one by one, where they lie: to copy them takes longer than attention
        slopes = rules["alibi_slopes"]
        parts = []
        for n, row in enumerate(rows):
            own = (
                slopes[n : n + 1]
                if slopes is not None and slopes.dim() == 2
                else slopes
            )
            tensors = (q[n : n + 1], k_cache[row : row + 1], v_cache[row : row + 1])
            at = (lengths[n : n + 1], leftpad[n : n + 1])
            parts.append(
                _attend_padded(*tensors, None, *at, rules | {"alibi_slopes": own})
            )
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, lse
    end = int(lengths.max()) if len(q) else 0
    out, lse = scaled_dot_product_attention(
        q.transpose(1, 2),
        k_cache[: len(q), :end].transpose(1, 2),
        v_cache[: len(q), :end].transpose(1, 2),
        enable_gqa=True,
        key_lengths=lengths,
        return_lse=True,
        key_mask=torch.arange(end) >= leftpad[:, None],
        **rules,
    )
    return out.transpose(1, 2), lse


# --- Checks --------------------------------------------------------------------------


def _error(text: str) -> ValueError:
    return ValueError(f"flash_attn_with_kvcache: {text}")


def _described(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def _integers(name: str, x: Any, count: int, most: int, why: str = "") -> Tensor:
    """x as int64 (count,), each from 0 to most."""
    if (
        not isinstance(x, Tensor)
        or x.dtype not in (torch.int32, torch.int64)
        or not x.is_cpu
        or x.shape != (count,)
    ):
        raise _error(
            f"{name} must be int32 or int64 ({count},) on the CPU, got {_described(x)}"
        )
    for number in x.tolist():
        if not 0 <= number <= most:
            raise _error(f"{name} must be from 0 to {most}{why}, got {number}")
    return x.long()


def _lengths(count: int, given: Any, room: int, new: int) -> Tensor:
    """(B,): how many keys the cache holds."""
    if given is None:
        given = room
    if isinstance(given, int) and not isinstance(given, bool):
        given = torch.full((count,), given)
    if new > room:
        raise _error(f"k must have at most the {room} keys of the cache, got {new}")
    why = f", to leave place for {new} more among {room}" if new else ""
    return _integers("cache_seqlens", given, count, room - new, why)


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    check_tensors("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        # Under autocast the dtypes may differ.
        fits = x.dtype == q.dtype or torch.is_autocast_enabled("cpu")
        if x.dim() != 4 or not x.is_floating_point() or not fits:
            kind = "floating point" if name == "q" else q.dtype
            raise _error(
                f"{name} must be {kind} with four dimensions, got {_described(x)}"
            )
    if not k_cache.shape[1]:
        raise _error(f"k_cache must have keys, got the shape {tuple(k_cache.shape)}")
    if k_cache.shape[3] != q.shape[3]:
        raise _error(
            "k_cache must have the head width of q, got "
            f"{k_cache.shape[3]} and {q.shape[3]}"
        )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise _error(
            f"v_cache must have the shape of k_cache, {tuple(k_cache.shape)}, or "
            f"another width, got {tuple(v_cache.shape)}"
        )
    if k_cache.shape[2] and q.shape[2] % k_cache.shape[2]:
        raise _error(
            f"q must have a multiple of the {k_cache.shape[2]} heads of k_cache, got "
            f"{q.shape[2]}"
        )


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
        fits = isinstance(table, Tensor) and table.dtype == torch.int32 and table.is_cpu
        if not (fits and table.dim() == 2 and len(table) == len(q)):
            raise _error(
                f"block_table must be int32 ({len(q)}, pages) on the CPU, got "
                f"{_described(table)}"
            )
        return table
    if rows is not None:
        most = len(k_cache) - 1
        return _integers("cache_batch_idx", rows, len(q), most)[:, None].int()
    if len(q) != len(k_cache):
        raise _error(
            "k_cache must have the batch size of q without cache_batch_idx, got "
            f"{len(k_cache)} and {len(q)}"
        )
    return torch.arange(len(q), dtype=torch.int32)[:, None]


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, seqlens: Any
) -> int:
    """How many keys are new; they must fit, and the cache be one to write to."""
    if k is None and v is None:
        return 0
    if k is None or v is None or seqlens is None:
        raise _error("k, v and cache_seqlens must be given together")
    count = k.shape[1] if k.dim() == 4 else 0
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (len(q), count, *cache.shape[2:])
        if new.shape != expected or new.dtype != cache.dtype:
            raise _error(
                f"{name} must be {cache.dtype} {expected}, got {new.dtype} "
                f"{tuple(new.shape)}"
            )
        shared = 0 in (
            s for n, s in zip(cache.shape, cache.stride(), strict=True) if n > 1
        )
        if shared:
            raise _error(
                f"{name}_cache must have its own memory for each number where {name} is "
                f"written to it, got strides {cache.stride()}"
            )
        if cache.is_inference() and not torch.is_inference_mode_enabled():
            raise _error(
                f"{name}_cache must not be an inference tensor where {name} is written "
                "to it outside inference_mode, got one"
            )
    return int(count)


def _check_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    lengths: Tensor,
    steps: int,
) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise _error("rotary_cos and rotary_sin must be given together, got one")
    if k is None:
        raise _error("rotary_cos must be None without k and v, got a tensor")
    if not cos.is_floating_point() or cos.dim() != 2 or 2 * cos.shape[1] > q.shape[3]:
        raise _error(
            f"rotary_cos must be floating point (positions, at most {q.shape[3] // 2}), "
            f"got {_described(cos)}"
        )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise _error(
            f"rotary_sin must be {cos.dtype} {tuple(cos.shape)}, as rotary_cos, got "
            f"{_described(sin)}"
        )
    last = int(lengths.max()) + steps - 1 if len(lengths) and steps else -1
    if last >= len(cos):
        raise _error(f"rotary_cos must have a row for position {last}, got {len(cos)}")


def _rotated(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """x (B, L, heads, D), its first dimensions rotated for positions (B, L)."""
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
