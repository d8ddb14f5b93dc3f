# SPDX-License-Identifier: MIT
"""Continuous batching of transformers: attention to its paged cache.

transformers' own ways of attention copy all keys and values of all requests out of the
pages for every new token. Here they are read where they lie.
"""

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
)
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)

from ..functional import varlen_attention

# Rows of a page into which the keys of a window are copied where they must be.
_PAGE = 64
# Pages that are shorter are read too slowly.
_SMALL_PAGE = 16

_names: set[str] = set()
_switch = ContinuousBatchingManager.switch_to_cb_friendly_attn


def admit(name: str) -> None:
    """Lets models of this implementation batch continuously, as they are.

    The manager of transformers has a fixed list: "sdpa", "eager", and the packages of
    flash attention.
    """
    _names.add(name)
    ContinuousBatchingManager.switch_to_cb_friendly_attn = _keep_or_switch


def _keep_or_switch(
    manager: ContinuousBatchingManager, model: Any, *args: Any, **kwargs: Any
) -> None:
    if model.config._attn_implementation not in _names:
        _switch(manager, model, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    cache: PagedAttentionCache,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: dict[str, Any],
    **rules: Any,
) -> Tensor:
    """Adds the new tokens to the cache, and attends to what it has of each request.

    query (1, H, T, D), key and value (1, G, T, D): the new tokens of all requests, one
    request after the other; rows behind the last request are padding. batch: what the
    manager gives the model for this step. rules: of varlen_attention.

    Returns (1, T, H, D), zeros for padding. Raises ValueError where the layer's part of
    the cache has a form that is not known.
    """
    allocator = cache.layer_to_allocator[layer]
    step = _step(cache, allocator, batch)
    write = batch["write_index"][allocator.index]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    both = allocator.update(k, v, layer, step.read, write)
    if step.in_place:
        both = FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)
        both = [x.flatten(0, 1) for x in both]
    if step.page > 0:
        k, v = (x.unflatten(0, (-1, step.page)) for x in both)
    else:
        k, v = (x[: step.rows] for x in both)
    starts = batch["cu_seq_lens_q"]
    rules |= step.rules
    out: Tensor = varlen_attention(
        q[: step.rows], k, v, starts, is_causal=True, **rules
    )
    padding = query.shape[2] - step.rows
    if padding > 0:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
    return out[None]


# ---- Where the keys of a step lie -------------------------------------------


@dataclass
class _Step:
    """What is the same for all layers of a kind.

    rows: new tokens without padding; rules: which keys a request has, as
    varlen_attention takes it; read: what to copy out of the cache for a layer; page:
    the length of the pages of what was copied or, in_place, of the cache; 0: nobody has
    a past, and the new keys are all keys.
    """

    rows: int
    rules: dict[str, Any]
    read: Tensor
    page: int = 0
    in_place: bool = False


# Of each cache the batch of its last step, and what is known of that step.
_steps: "WeakKeyDictionary[PagedAttentionCache, tuple[Any, dict[str, _Step]]]"
_steps = WeakKeyDictionary()


def _step(cache: PagedAttentionCache, allocator: Any, batch: dict[str, Any]) -> _Step:
    kind, this = allocator.layer_type, batch["read_index"]
    last, known = _steps.get(cache, (None, {}))
    if last is not this:
        known = {}
        _steps[cache] = this, known
    if kind not in known:
        known[kind] = _new_step(allocator, batch)
    return known[kind]


def _new_step(allocator: Any, batch: dict[str, Any]) -> _Step:
    kind, group = allocator.layer_type, allocator.index
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            "multihead.integrations.transformers: a paged cache must be of full or "
            f"sliding attention, got {kind}"
        )
    starts, key_starts = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][kind]
    read, write = batch["read_index"][group], batch["write_index"][group]
    rows, lengths = int(starts[-1]), key_starts.diff()
    rules: dict[str, Any] = {}
    begins = torch.zeros_like(lengths)
    if kind == "sliding_attention":
        rules["window"] = (allocator.sliding_window - 1, 0)
        begins = _begins(batch.get("position_ids"), starts, lengths)
    if read.numel() == 0:
        return _Step(rows, rules | {"cu_seqlens_k": starts}, read)
    rules["key_lengths"] = begins + lengths
    found = _places(allocator, read, write, begins, key_starts)
    if found is not None:
        page, table = found
        return _Step(rows, rules | {"block_table": table}, read[:0], page, True)
    read, table = _copied(read, begins, key_starts, allocator.read_trash_index)
    return _Step(rows, rules | {"block_table": table}, read, _PAGE)


def _places(
    allocator: Any, read: Tensor, write: Tensor, begins: Tensor, starts: Tensor
) -> tuple[int, Tensor] | None:
    """The length of pages, and the block table (N, pages) of where the keys lie.

    None where they must be copied: a window is a ring, in which new tokens overwrite
    old ones that others of the new tokens see; pages may not fit into it.
    """
    page: int = allocator.tokens_per_page
    if allocator.layer_type == "sliding_attention":
        page = math.gcd(page, allocator.sliding_window)
        new = read == allocator.sentinel_index
        if page < _SMALL_PAGE or (new[:-1] & new[1:]).any():
            return None
        read = read.masked_scatter(new, write)
    lengths = starts.diff()
    pages = torch.arange(0, int((begins + lengths).max()), page)
    firsts = (pages - begins[:, None]).clamp(min=0) + starts[:-1, None]
    places = read[firsts.clamp(max=len(read) - 1)]
    shifted = (places[:, 0] - begins) % page != 0
    if (shifted & (lengths > 0)).any():
        return None
    return page, (places // page).int()


def _begins(positions: Tensor | None, starts: Tensor, lengths: Tensor) -> Tensor:
    """The place (N,) in its text of the first key that a request still has.

    It makes no difference to what attention means. With it a key is summed where it
    would be if all keys were there, so its bits are the same in chunks of any size.
    """
    if positions is None or positions.shape[:-1] != (1,):
        return torch.zeros_like(lengths)
    ends: Tensor = positions[0, (starts[1:] - 1).clamp(min=0)] + 1
    return (ends - lengths).clamp(min=0)


def _copied(
    read: Tensor, begins: Tensor, starts: Tensor, nowhere: int
) -> tuple[Tensor, Tensor]:
    """Where to read the rows of pages, each key at its place in its text, and the block
    table (N, pages) of these pages. Rows without a key are read from nowhere."""
    lengths = starts.diff()
    counts = (begins % _PAGE + lengths + _PAGE - 1) // _PAGE
    first = counts.cumsum(0) - counts - begins // _PAGE
    shift = first * _PAGE + begins - starts[:-1]
    places = torch.arange(int(starts[-1])) + shift.repeat_interleave(lengths)
    pages = int(counts.sum())
    index = read.new_full((pages * _PAGE,), nowhere)
    index[places] = read[: len(places)]
    width = -(-int((begins + lengths).max()) // _PAGE)
    table = first[:, None] + torch.arange(width)
    return index, table.clamp(0, pages - 1).int()
