# SPDX-License-Identifier: MIT
"""The runs of a check: which inputs, which masks, which mode. No rule of attention:
masks are made so that they say something whichever way they are read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .sizes import Sizes

# How tensors are laid out, by the rank and order that the code takes. With heads
# and "single" belong to functions without weights.
LAYER = "(B, L, E)"
SEQUENCE_FIRST = "(L, B, E)"
UNBATCHED = "(L, E)"
# As convolutions have them; the pixels of an image are a sequence.
CHANNELS_FIRST = "(B, E, L)"
IMAGE = "(B, E, L, 1)"
HEADS = "(B, H, L, D)"
HEADS_LATER = "(B, L, H, D)"
SINGLE = "(B, L, D)"
FLAT = "(L, D)"
CORE = (HEADS, SINGLE, FLAT, HEADS_LATER)


@dataclass(frozen=True)
class Case:
    """One run.

    relation: "cross" (keys longer than queries), "equal" (as long, other values) or
    "self" (one tensor). mask: None or one of MASKS. padding: None, "mask", "wide
    mask" or "lengths". is_causal: the flag is set. own_dropout: dropout as the call's
    own default, which is this. draw: what the random inputs start from.
    """

    name: str
    sizes: Sizes
    layout: str = LAYER
    relation: str = "cross"
    mask: str | None = None
    mask_dtype: torch.dtype = torch.bool
    padding: str | None = None
    is_causal: bool = False
    training: bool = False
    gradients: bool = False
    returns_weights: bool = False
    own_dropout: float | None = None
    dtype: torch.dtype = torch.float64
    spread: float = 1.0
    draw: int = 0

    @property
    def keys(self) -> int:
        return self.sizes.keys if self.relation == "cross" else self.sizes.queries


def _generator(case: Case) -> torch.Generator:
    return torch.Generator().manual_seed(1234 + case.draw)


def _shape(axes: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The sizes of axes that are written as in "(B, 1, Lk)"."""
    return tuple(sizes.get(axis, 1) for axis in axes.strip("()").split(", "))


def sequences(case: Case) -> dict[str, Tensor]:
    """query, key and value of a case; one object three times for "self"."""
    sizes, generator = case.sizes, _generator(case)
    kv_heads = sizes.kv_heads or sizes.heads

    def normal(length: int, heads: int, width: int) -> Tensor:
        lengths = {"L": length, "E": width, "H": heads, "D": sizes.head_dim}
        shape = _shape(case.layout, {"B": sizes.batch, **lengths})
        # Drawn in float64, so that runs in float32 see the same numbers rounded.
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (values * case.spread).to(case.dtype)

    query = normal(sizes.queries, sizes.heads, sizes.embed)
    if case.relation == "self":
        return {"query": query, "key": query, "value": query}
    widths = (sizes.key_width or sizes.embed, sizes.value_width or sizes.embed)
    key, value = (normal(case.keys, kv_heads, width) for width in widths)
    return {"query": query, "key": key, "value": value}


def as_sequence(tensor: Tensor, case: Case) -> Tensor:
    """(B, L, E) of a tensor whose channels come first; others as they are."""
    if case.layout == IMAGE and tensor.dim() == 4:
        return tensor.flatten(2).transpose(1, 2)
    channels_first = case.layout == CHANNELS_FIRST and tensor.dim() == 3
    return tensor.transpose(1, 2) if channels_first else tensor


def _mixed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random bool mask, every row of which holds both True and False."""
    mask = torch.rand(shape, generator=generator) < 0.45
    first = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    other = (first + 1 + first % 2) % shape[-1]
    return mask.scatter(-1, first, True).scatter(-1, other, False)


# The shapes in which code may take a mask, by name.
MASKS = {
    "rows": "(Lq, Lk)",
    "rows of the batch": "(B, 1, Lq, Lk)",
    "rows of each item": "(B, Lq, Lk)",
    "keys": "(B, 1, 1, Lk)",
    "keys of each item": "(B, Lk)",
    "heads": "(B, H, Lq, Lk)",
    "heads in the batch": "(B·H, Lq, Lk)",
    "causal": "(Lq, Lk)",
    "later keys": "(Lq, Lk)",
    "blocked row": "(Lq, Lk)",
}


def mask(case: Case) -> Tensor | None:
    """The mask of a case, in the dtype that it asks for.

    Bool, or 0 and 1 in another dtype: nothing is decided about what True means.
    "blocked row" has one row of True and one of False, so that some row is blocked
    either way; in all others but a square causal one, no row is blocked either way.
    """
    if case.mask is None:
        return None
    sizes, generator = case.sizes, _generator(case)
    batch, heads, rows, keys = sizes.batch, sizes.heads, sizes.queries, case.keys
    axes = {"B": batch, "H": heads, "B·H": batch * heads, "Lq": rows, "Lk": keys}
    shape = _shape(MASKS[case.mask], axes)
    if case.mask in ("causal", "later keys"):
        earlier = torch.ones(shape, dtype=torch.bool).tril()
        made = earlier if case.mask == "causal" else ~earlier
        return made.to(case.mask_dtype)
    made = _mixed(shape, generator)
    if case.padding:
        # Whatever either means, some key is seen: padding leaves two at each end.
        made[..., 1] = ~made[..., 0]
        made[..., -1] = ~made[..., -2]
    if case.mask == "blocked row":
        made[1] = True
        made[-1] = False
    return made.to(case.mask_dtype)


def as_additive(mask: Tensor, case: Case, biased: bool) -> Tensor:
    """The mask for code that adds it: 0 where `mask` is True, -inf elsewhere. The
    first key is seen, so that code that is causal by itself leaves no row blind.

    biased: a mask of rows has other numbers instead of 0, to show when they are
    added.
    """
    blocked = mask == 0
    if case.mask != "blocked row":
        blocked[..., 0] = False
    added = torch.zeros(mask.shape, dtype=torch.float64)
    if biased and case.mask == "rows":
        added.normal_(generator=_generator(case))
    return added.to(case.dtype).masked_fill(blocked, -torch.inf)


def lengths(case: Case) -> Tensor:
    """How many keys of each item are real: (B,), all different where they can be;
    beside a mask, two at least, and not the last two."""
    least = 2 if case.mask else 1
    return torch.arange(case.sizes.batch) % (case.keys - 2 * least + 1) + least


def padding(case: Case) -> Tensor:
    """The padding mask of a case, (B, Lk), or (B, 1, 1, Lk) if wide: True from a
    length on, or, for "lengths", True before it. Each row holds both."""
    before = torch.arange(case.keys) < lengths(case)[:, None]
    if case.padding == "wide mask":
        return ~before[:, None, None]
    return before if case.padding == "lengths" else ~before


def may_be_blind(mask: Tensor) -> Tensor:
    """The queries (Lq,) that a mask (Lq, Lk), read in one of both ways, leaves without
    an earlier key, as code sees it that is causal by itself."""
    later = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    marked = mask != 0
    return (marked | later).all(-1) | (~marked | later).all(-1)


def query_axis(case: Case) -> int:
    return {SEQUENCE_FIRST: 0, HEADS_LATER: 1}.get(case.layout, -2)


def unbatched(case: Case) -> bool:
    return case.layout in (UNBATCHED, FLAT)
