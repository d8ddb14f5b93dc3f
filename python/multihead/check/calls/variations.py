# SPDX-License-Identifier: MIT
"""The cases that follow once a first call is known: masks, flags, modes, sizes."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..subject.signature import Call
from . import cases
from .cases import Case
from .sizes import EXERCISE, grouped

_BATCHED = ("rows of the batch", "rows of each item", "keys", "keys of each item")
_PER_HEAD = ("heads", "heads in the batch")
MASK_DTYPES = (torch.bool, torch.int64, torch.float32)


def masked(base: Case) -> list[Case]:
    """The base with each mask that its layout can have."""
    kinds = ["rows", "causal"]
    if not cases.unbatched(base):
        kinds += _BATCHED
    if base.layout in (cases.LAYER, cases.SEQUENCE_FIRST, cases.HEADS):
        kinds += _PER_HEAD
    return [
        replace(base, name=_mask_name(kind), mask=kind, draw=index + 1)
        for index, kind in enumerate(kinds)
    ]


def masked_square(base: Case, call: Call) -> list[Case]:
    """The same with as many keys as queries, where there were more."""
    if base.relation != "cross" or call.style == "x":
        return []
    return [
        replace(case, name=f"{case.name}, Lq = Lk", relation="equal")
        for case in masked(base)
    ]


def _mask_name(kind: str) -> str:
    shape = cases.MASKS[kind]
    names = {"causal": "causal mask", "blocked row": "a row that sees nothing"}
    return names.get(kind, f"mask {shape}")


def relations(base: Case, call: Call) -> Iterator[Case]:
    """The other ways to relate keys to queries."""
    if call.style != "x" and base.relation != "self":
        yield replace(base, name="self-attention", relation="self", draw=11)
    if call.style == "x and context" and base.relation == "self":
        yield replace(base, name="other keys", relation="cross", draw=12)


def variants(case: Case, call: Call) -> Iterator[Case]:
    """The case, then with as many keys as queries, for code that mistakes the one
    for the other or relies on it; then with padding as the scores have it."""
    yield case
    if case.relation == "cross" and call.style != "x":
        yield replace(case, name=f"{case.name}, Lq = Lk", relation="equal")
        yield replace(case, name=f"{case.name}, self-attention", relation="self")
    if case.padding == "mask":
        name = case.name.replace("padding", "padding (B, 1, 1, Lk)")
        yield replace(case, name=name, padding="wide mask")


def masked_self(base: Case, call: Call, kinds: list[str]) -> Iterator[Case]:
    """Self-attention with a mask and with padding: a mistake may show only where
    queries are as many as keys, and other keys may have masks of their own."""
    if base.relation == "self" or call.style == "x":
        return
    if kinds:
        name = f"self-attention, {_mask_name(kinds[0])}"
        yield replace(base, name=name, relation="self", mask=kinds[0], draw=26)
    if call.takes("padding") and not cases.unbatched(base):
        name = "self-attention, padding"
        yield replace(base, name=name, relation="self", padding="mask", draw=29)


def flags(base: Case, call: Call, kinds: list[str]) -> Iterator[Case]:
    """is_causal, padding and lengths, where the code takes them; padding also with
    a mask, if one of these kinds is taken."""
    if call.takes("is_causal"):
        # As in nn.MultiheadAttention, where the flag only says what the mask is.
        hint = all(call.takes(r) for r in ("mask", "padding", "need_weights"))
        mask = "later keys" if hint else None
        yield replace(base, name="is_causal", is_causal=True, mask=mask, draw=13)
        if base.relation == "cross" and not hint:
            yield replace(
                base,
                name="is_causal, self-attention",
                is_causal=True,
                relation="self",
                draw=14,
            )
    if cases.unbatched(base):
        return
    if call.takes("padding"):
        yield replace(base, name="padding", padding="mask", draw=15)
        if kinds:
            yield replace(
                base, name="padding and mask", padding="mask", mask=kinds[0], draw=16
            )
    if call.takes("lengths"):
        yield replace(base, name="lengths", padding="lengths", draw=17)


def groups(base: Case, call: Call, constructed: bool) -> Iterator[Case]:
    """Another number of key and value heads, where it can be chosen; heads of keys
    and values that queries share, for attention by itself."""
    sizes = base.sizes
    chosen = call.takes("num_kv_heads") or constructed
    if chosen and sizes.kv_heads and sizes.heads % 4 == 0 and sizes.kv_heads != 4:
        other = replace(base, name="4 groups", sizes=grouped(sizes, 4), draw=18)
        if sizes.heads > 4:
            yield other
    if base.layout in (cases.HEADS, cases.HEADS_LATER) and sizes.heads % 2 == 0:
        yield replace(base, name="2 groups", sizes=grouped(sizes, 2), draw=18)


def others(base: Case) -> Iterator[Case]:
    """Other numbers and sizes, where only one dtype and no other argument make more
    than one case."""
    sizes = base.sizes
    taken = {sizes.batch, sizes.queries, sizes.heads, sizes.head_dim}
    batch, queries = [n for n in (2, 4, 6, 9, 10, 11) if n not in taken][:2]
    longer = replace(sizes, batch=batch, queries=queries, keys=queries + 2)
    yield replace(base, name="other sizes", sizes=longer, draw=27)
    yield replace(base, name="other numbers", draw=28)


def long(base: Case) -> Case:
    """Longer than the tiles of a kernel and than any window that code may have by
    mistake; one item, so that it does not take long."""
    sizes = replace(base.sizes, batch=1, queries=130, keys=257)
    return replace(base, name="130 queries", sizes=sizes, gradients=False, draw=30)


def rounding(base: Case, call: Call, free: bool) -> Iterator[Case]:
    """float32, and the sizes of the exercise if sizes are free to choose."""
    single = replace(base, dtype=torch.float32, gradients=False)
    yield replace(single, name="float32")
    if free and base.layout == cases.LAYER and base.sizes.embed == 48:
        kv_heads = 1 if base.sizes.kv_heads else None
        sizes = replace(EXERCISE, kv_heads=kv_heads)
        if base.sizes.heads == 1:
            sizes = replace(sizes, heads=1)
        yield replace(single, name="exercise, float32", sizes=sizes, draw=19)


def training(base: Case) -> Case:
    return replace(base, name="training", training=True, gradients=False, draw=20)


def undisturbed(base: Case, call: Call) -> Case | None:
    """With the dropout that a call has by itself, where that is not 0."""
    defaults = {call.roles[p.name]: p.default for p in call.parameters}
    dropout = defaults.get("dropout")
    if type(dropout) is not float or not 0 < dropout < 1:
        return None
    return replace(
        base,
        name=f"dropout {dropout:g} by default",
        own_dropout=dropout,
        training=defaults.get("training") is True,
        gradients=False,
        draw=24,
    )


def returning_weights(base: Case) -> Case:
    return replace(base, name="weights per head", returns_weights=True, draw=21)


def blocked(base: Case, kind: str | None) -> Case | None:
    """A row that sees nothing, where masks of rows are taken."""
    if kind != "rows":
        return None
    mask = "blocked row"
    return replace(base, name=_mask_name(mask), mask=mask, gradients=False, draw=22)


def crowded(base: Case, mask: str | None, padding: str | None) -> Case:
    """As many items as heads and as queries: where a mask spread over the wrong axis
    still fits."""
    name = f"B = H = Lq, {'padding' if padding else _mask_name(mask)}"
    return replace(
        base,
        name=name,
        sizes=cases.square(base.sizes),
        mask=mask,
        padding=padding,
        draw=23,
    )
