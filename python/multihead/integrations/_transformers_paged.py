# SPDX-License-Identifier: MIT
"""Continuous batching of transformers: attention to its paged cache.

transformers' own ways of attention copy all keys and values of all requests out of the
pages for every new token. Here full attention reads them where they lie.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    PagedAttentionCache,
)

from ..functional import varlen_attention

# Rows of a page into which the keys of a sliding window are copied.
_PAGE = 64

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
    kind, group = allocator.layer_type, allocator.index
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            "multihead.integrations.transformers: a paged cache must be of full or "
            f"sliding attention, got {kind}"
        )
    starts, key_starts = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][kind]
    read, write = batch["read_index"][group], batch["write_index"][group]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    rows = int(starts[-1])
    lengths = key_starts.diff()
    if kind == "sliding_attention":
        rules["window"] = (allocator.sliding_window - 1, 0)
    if read.numel() == 0:  # nobody has a past
        allocator.update(k, v, layer, read, write)
        k, v = k[:rows], v[:rows]
        rules["cu_seqlens_k"] = starts
    elif kind == "full_attention":
        allocator.update(k, v, layer, read[:0], write)
        k, v = allocator.get_cache_for_block_table(layer)
        table = _pages(read, key_starts, k.shape[1])
        rules |= {"block_table": table, "key_lengths": lengths}
    else:  # a ring: read before the new tokens overwrite it
        begins = _begins(batch.get("position_ids"), starts, lengths)
        index, table = _ring(read, begins, key_starts, allocator.read_trash_index)
        copies = allocator.update(k, v, layer, index, write)
        k, v = (x.unflatten(0, (-1, _PAGE)) for x in copies)
        rules |= {"block_table": table, "key_lengths": begins + lengths}
    out = varlen_attention(q[:rows], k, v, starts, is_causal=True, **rules)
    padding = query.shape[2] - rows
    if padding > 0:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, padding))
    return out[None]


def _pages(read: Tensor, starts: Tensor, page: int) -> Tensor:
    """The block table (N, pages) of the places where all keys lie."""
    longest = int(starts.diff().max())
    firsts = starts[:-1, None] + torch.arange(0, longest, page)
    return (read[firsts.clamp(max=len(read) - 1)] // page).int()


def _begins(positions: Tensor | None, starts: Tensor, lengths: Tensor) -> Tensor:
    """The place (N,) in its text of the first key that a request still has.

    It makes no difference to what attention means. With it a key is summed where it
    would be if all keys were there, so its bits are the same in chunks of any size.
    """
    if positions is None or positions.shape[:-1] != (1,):
        return torch.zeros_like(lengths)
    ends: Tensor = positions[0, (starts[1:] - 1).clamp(min=0)] + 1
    return (ends - lengths).clamp(min=0)


def _ring(
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
