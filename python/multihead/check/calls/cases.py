# SPDX-License-Identifier: MIT
"""The runs of a check: which sizes, inputs, masks, which mode. No rule of attention:
sizes tell mistakes apart, masks say something whichever way they are read."""

import inspect
import itertools
import math
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..subject.holding import held
from ..subject.roles import ATTRIBUTES, normal

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_GROUPED = (*_CONVOLUTIONS, nn.GroupNorm)

# How tensors are laid out, by the rank and order that the code takes. With heads
# and "single" belong to functions without weights.
LAYER = "(B, L, E)"
SEQUENCE_FIRST = "(L, B, E)"
UNBATCHED = "(L, E)"
CHANNELS_FIRST = "(B, E, L)"  # of convolutions; the pixels of an image are a sequence
IMAGE = "(B, E, Y, X)"
IMAGE_LAST = "(B, Y, X, E)"
HEADS = "(B, H, L, D)"
HEADS_LATER = "(B, L, H, D)"
HEADS_LAST = "(B, D, H, L)"
HEADS_OF_STEPS = "(L, B, H, D)"
HEADS_FIRST = "(H, B, L, D)"
SINGLE = "(B, L, D)"
SINGLE_OF_STEPS = "(L, B, D)"
SINGLE_LAST = "(B, D, L)"
FLAT = "(L, D)"
IMAGES = (IMAGE, IMAGE_LAST)
BATCH_THEN_HEADS = (HEADS, HEADS_LATER, HEADS_LAST)
HEADS_BEHIND = (HEADS_LATER, HEADS_LAST, HEADS_OF_STEPS, HEADS_FIRST)  # the length
WITH_HEADS = (HEADS, *HEADS_BEHIND)
OF_STEPS = (HEADS_OF_STEPS, SINGLE_OF_STEPS)
CORE = (*WITH_HEADS, SINGLE, SINGLE_OF_STEPS, SINGLE_LAST, FLAT)
# The order of axes in which as_sequence() has them, by layout.
_ORDERS = {
    HEADS_LAST: (0, 3, 2, 1),
    HEADS_OF_STEPS: (1, 0, 2, 3),
    HEADS_FIRST: (1, 2, 0, 3),
    SINGLE_OF_STEPS: (1, 0, 2),
    SINGLE_LAST: (0, 2, 1),
    CHANNELS_FIRST: (0, 2, 1),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call. All differ, so that no axis can stand for another.

    kv_heads: None where keys and values have as many heads as queries.
    out: the width of the output where it is not that of the input. key_width,
    value_width: those of keys and values where they are not that of the queries.
    columns: of an image whose pixels are the sequence. window: what a window is given
    as, "length", or, to be all of the image, "pair", "square", "side", or as a side where
    the image is "in a pair". is_exact: what is told
    a length is told that of the queries. cut: how many windows lie along each side of the
    image. wide_keys: what is told the width of queries
    and keys is told that of all heads. before: how many tokens, as that of a class,
    stand before those of an image. shares_queries: all items have the same. is_whole: the
    code makes the sequence, and decides how long it is. head_width: that of a head where
    heads are not the parts of the width.
    """

    batch: int = 3
    queries: int = 5
    keys: int = 7
    embed: int = 48
    heads: int = 8
    kv_heads: int | None = None
    out: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    columns: int = 1
    window: str = "length"
    is_exact: bool = False
    cut: int = 1
    wide_keys: bool = False
    before: int = 0
    shares_queries: bool = False
    is_whole: bool = False
    head_width: int | None = None
    # Fewer keys than there are, so that it shows.
    sliding_window: int = 3

    @property
    def head_dim(self) -> int:
        return self.head_width or (self.out or self.embed) // self.heads

    @property
    def image(self) -> tuple[int, int]:
        """Rows and columns of the queries as an image."""
        pixels = self.queries - self.before
        columns = self.columns if pixels % self.columns == 0 else 1
        return pixels // columns, columns

    def value_of(self, role: str) -> int | float | tuple[int, int] | None:
        """What an argument of this role is given."""
        # Longer than any sequence here, and no other size.
        longest = self.queries if self.is_exact else max(16, self.keys + 1)
        side = self.columns // self.cut
        windows = {"length": longest, "side": side, "in a pair": side}
        rows, columns = self.image
        images = {"length": longest, "side": self.columns}
        return {
            "batch": self.batch,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads or self.heads,
            "embed_dim": self.embed,
            "out_dim": self.out or self.embed,
            "head_dim": self.head_dim,
            "qkv_dim": self.embed if self.wide_keys else self.head_dim,
            "mlp_dim": 2 * self.embed,
            "mlp_ratio": 2,
            "temperature": self.head_dim**0.5,
            "max_length": longest,
            "block": 16,
            "vocabulary": 64,
            "learned": 4,
            "window": windows.get(self.window, (rows // self.cut, columns // self.cut)),
            "resolution": images.get(self.window, self.image),
            "sliding_window": self.sliding_window,
            "image": self.image,
            "rows": self.image[0],
            "columns": self.image[1],
        }.get(role)


# When code refuses the first: small ones, heads of width 64, and those of models.
SIZES_IN_TURN = (
    Sizes(),
    Sizes(embed=8, heads=2),
    Sizes(embed=256, heads=4),
    Sizes(embed=512, heads=8),
    Sizes(embed=768, heads=12),
    Sizes(embed=64, heads=4),
)


def grouped(sizes: Sizes, groups: int) -> Sizes:
    """`sizes` with `groups` key and value heads, as many as divide its heads."""
    return replace(sizes, kv_heads=groups if sizes.heads % groups == 0 else 1)


_SQUARES = ("side", "square", "in a pair")


def as_image(
    sizes: Sizes, window: str = "length", rows: int = 2, columns: int = 5
) -> Sizes:
    """`sizes` with as many queries and keys as an image has pixels: of so many rows and
    columns, or three of both, where it is to be cut by one number, or is a square."""
    rows, columns = (3, 3) if window in _SQUARES else (rows, columns)
    lengths = dict(queries=rows * columns, keys=rows * columns, columns=columns)
    return replace(sizes, **lengths, window=window, is_exact=True)


def sides(image: Tensor, layout: str) -> tuple[int, int]:
    """Rows and columns of images in one of IMAGES."""
    rows, columns = image.shape[2:] if layout == IMAGE else image.shape[1:3]
    return rows, columns


def in_one_window(sizes: Sizes, base: Sizes) -> Sizes:
    """`sizes` as a square that is one window, where the image of `base` is; as long as
    that where the code decides how long."""
    if base.is_whole:
        lengths = dict(queries=base.queries, keys=base.queries, columns=base.columns)
        kept = dict(window=base.window, is_exact=True, is_whole=True)
        return replace(sizes, **lengths, **kept)
    if base.window not in _SQUARES or base.columns == 1:
        return sizes
    side = math.isqrt(sizes.queries)
    lengths = dict(queries=side * side, keys=side * side, columns=side)
    return replace(sizes, **lengths, window=base.window, is_exact=True)


def in_windows(sizes: Sizes) -> Sizes:
    """`sizes` as an image of two by two windows, each four pixels wide and high."""
    lengths = dict(queries=64, keys=64, columns=8)
    return replace(sizes, **lengths, is_exact=True, cut=2)


def apart(sizes: Sizes) -> Sizes:
    """`sizes` with a batch and lengths that equal no other, keys the longest."""
    if sizes.columns > 1:
        return sizes
    taken = {sizes.heads, sizes.kv_heads, sizes.head_dim}
    batch, queries, keys = (
        next(size for size in sizes_of if size not in taken)
        for sizes_of in ((3, 2, 4, 1), (5, 6, 10, 12), (7, 9, 11, 13))
    )
    return replace(sizes, batch=batch, queries=queries, keys=keys)


# The shapes in which code takes cosines and sines of positions: as two tables, with a
# number for each feature or for two, for one sequence, for items of a batch, or beside
# heads, (B, L, H, D) or (B, H, L, D); or as one of both; or the angles themselves.
TABLES = ("L D", "L D/2", "2 L D", "L D/2 2", "1 L D", "1 L D/2")
TABLES += ("1 L 1 D", "1 L 1 D/2", "1 1 L D", "1 1 L D/2")
TABLES += ("angles L D", "angles 1 1 L D", "angles L D/2")
# Embeddings of positions: one for each key, or for each distance, 2·L − 1.
DISTANCES = "distances"
ONCE = "distances, for all items"
ALONE = "one for each key, (L, E)"


@dataclass(frozen=True)
class Style:
    """What the code wants: arrays of NumPy, layers for matrices, masks that are added,
    of any numbers if biased, matrices as (out, in), one for each head, or q, k and v
    apart, (3, E, E), and tables of positions as one of TABLES, or embeddings, DISTANCES,
    ONCE or ALONE, or numbers of positions, for each item or ONCE."""

    numpy: bool = False
    layers: bool = False
    additive: bool = False
    biased: bool = False
    out_in: bool = False
    apart: bool = False
    by_heads: bool = False
    tables: str = TABLES[0]


@dataclass(frozen=True)
class Case:
    """One run.

    relation: "cross" (keys longer than queries), "equal" (as long, other values) or
    "self" (one tensor). mask: of MASKS. padding: of PADDINGS, or "lengths". is_causal:
    the flag is set; built_causal: that of the constructor is; built_turned: that of
    rotary positions; built_shifted: that of windows; built_cached: that of a cache.
    built_whole: its constructor is given no dropout. own_dropout: the call's own
    default of it. draw: what the random inputs start from. pads_between: padding is not
    at the end. of_self: the mask is that of the queries' own sequence, beside keys of a
    context.
    """

    name: str
    sizes: Sizes
    layout: str = LAYER
    relation: str = "cross"
    mask: str | None = None
    mask_dtype: torch.dtype = torch.bool
    padding: str | None = None
    pads_between: bool = False
    of_self: bool = False
    is_causal: bool = False
    built_causal: bool = False
    built_turned: bool = False
    built_shifted: bool = False
    built_cached: bool = False
    built_whole: bool = False
    training: bool = False
    gradients: bool = False
    returns_weights: bool = False
    own_dropout: float | None = None
    dtype: torch.dtype = torch.float64
    style: Style = Style()
    spread: float = 1.0
    draw: int = 0

    @property
    def built(self) -> tuple[bool, ...]:
        """How it is constructed."""
        flags = self.built_causal, self.built_turned, self.built_shifted
        return *flags, self.built_cached, self.built_whole

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
        lengths["Y"], lengths["X"] = replace(sizes, queries=length).image
        shape = _shape(case.layout, {"B": sizes.batch, **lengths})
        # Drawn in float64, so that runs in float32 see the same numbers rounded.
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (values * case.spread).to(case.dtype)

    query = normal(sizes.queries, sizes.heads, sizes.embed)
    if sizes.shares_queries:
        query = query[:1].expand_as(query).clone()
    if case.relation == "self":
        return {"query": query, "key": query, "value": query}
    widths = (sizes.key_width or sizes.embed, sizes.value_width or sizes.embed)
    key, value = (normal(case.keys, kv_heads, width) for width in widths)
    return {"query": query, "key": key, "value": value}


def positions(case: Case) -> Tensor:
    """Embeddings of the positions of the keys, in their shape, or of all distances."""
    sizes = case.sizes
    if case.style.tables in (DISTANCES, ONCE):
        longest = max(sizes.queries, case.keys)
        sizes = replace(sizes, queries=2 * longest - 1, keys=2 * longest - 1)
    keys = sequences(replace(case, sizes=sizes))["key"]
    generator = torch.Generator().manual_seed(99)
    drawn = torch.randn(keys.shape, generator=generator, dtype=torch.float64)
    drawn = drawn.to(case.dtype)
    if case.style.tables == ALONE and drawn.dim() == 3:
        return drawn.select(1 if case.layout == SEQUENCE_FIRST else 0, 0)
    return drawn[: 1 if case.style.tables == ONCE else None]


def as_sequence(tensor: Tensor, case: Case) -> Tensor:
    """(B, L, E) of an image, or where channels come first, (B, L, D) or (B, L, H, D) of
    a function's tensors in another order; (L, B, E) and others as they are."""
    order = _ORDERS.get(case.layout)
    if order and tensor.dim() == len(order):
        return tensor.permute(order)
    if case.layout == IMAGE and tensor.dim() == 4:
        return tensor.flatten(2).transpose(1, 2)
    if case.layout == IMAGE_LAST and tensor.dim() == 4:
        return tensor.flatten(1, 2)
    return tensor


# The shapes in which code may take a mask, by name.
MASKS = {
    "rows": "(Lq, Lk)",
    "rows of the batch": "(B, 1, Lq, Lk)",
    "rows of each item": "(B, Lq, Lk)",
    "items last": "(Lq, Lk, B)",
    "keys": "(B, 1, 1, Lk)",
    "keys of each item": "(B, Lk)",
    "heads": "(B, H, Lq, Lk)",
    "heads in the batch": "(B·H, Lq, Lk)",
    "causal": "(Lq, Lk)",
    "later keys": "(Lq, Lk)",
    "blocked row": "(Lq, Lk)",
}


# The shapes in which code may take a padding mask.
PADDINGS = {
    "mask": "(B, Lk)",
    "wide mask": "(B, 1, 1, Lk)",
    "row mask": "(B, 1, Lk)",
    "column mask": "(B, Lk, 1)",
}

# Those of which each query has its own row.
OF_ROWS = ("rows", "rows of the batch", "rows of each item")


def mask(case: Case) -> Tensor | None:
    """The mask of a case, in the dtype that it asks for.

    Bool, or 0 and 1 in another dtype: nothing is decided about what True means.
    "blocked row" has one row of True and one of False, so that some row is blocked
    either way; in all others but a square causal one, no row is blocked either way.
    """
    if case.mask is None:
        return None
    if case.mask == "items last":
        return mask(replace(case, mask="rows of each item")).permute(1, 2, 0)
    sizes, generator = case.sizes, _generator(case)
    batch, heads, rows, keys = sizes.batch, sizes.heads, sizes.queries, case.keys
    axes = {"B": batch, "H": heads, "B·H": batch * heads, "Lq": rows, "Lk": keys}
    shape = _shape(MASKS[case.mask], axes)
    if case.mask in ("causal", "later keys"):
        earlier = torch.ones(shape, dtype=torch.bool).tril()
        made = earlier if case.mask == "causal" else ~earlier
        return made.to(case.mask_dtype)
    # Random, but every row holds both True and False.
    made = torch.rand(shape, generator=generator) < 0.45
    first = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    other = (first + 1 + first % 2) % shape[-1]
    made = made.scatter(-1, first, True).scatter(-1, other, False)
    if case.padding:
        # Whatever either means, some key is seen: padding leaves two at each end.
        made[..., 1] = ~made[..., 0]
        made[..., -1] = ~made[..., -2]
    if case.mask == "blocked row":
        made[1] = True
        made[-1] = False
    return made.to(case.mask_dtype)


def as_additive(mask: Tensor, case: Case) -> Tensor:
    """The mask for code that adds it: 0 where `mask` is True, -inf elsewhere. The
    first key is seen, so that code that is causal by itself leaves no row blind. Where
    it is biased, a mask of rows has other numbers instead of 0, to show it.
    """
    if case.mask == "items last":
        of_items = replace(case, mask="rows of each item")
        return as_additive(mask.permute(2, 0, 1), of_items).permute(1, 2, 0)
    blocked = mask == 0
    if case.mask != "blocked row":
        blocked[..., 0] = False
    added = torch.zeros(mask.shape, dtype=torch.float64)
    if case.style.biased and case.mask == "rows":
        added.normal_(generator=_generator(case))
    return added.to(case.dtype).masked_fill(blocked, -torch.inf)


def lengths(case: Case) -> Tensor:
    """How many keys of each item are real: (B,), all different where they can be;
    beside a mask, two at least, and not the last two."""
    least = 2 if case.mask else 1
    different = max(case.keys - 2 * least + 1, 1)
    return torch.arange(case.sizes.batch) % different + least


def padding(case: Case) -> Tensor:
    """The padding mask of a case, in the shape of PADDINGS: True from a length on, or,
    for "lengths", True before it. Each row holds both. In between: as many tokens as
    that are padding, from the second on."""
    places = torch.arange(case.keys)
    before = places < lengths(case)[:, None]
    if case.pads_between:
        before = (places == 0) | (places > lengths(case)[:, None])
    if case.padding == "lengths":
        return before
    assert case.padding is not None
    sizes = {"B": before.shape[0], "Lk": before.shape[1], "1": 1}
    axes = PADDINGS[case.padding].strip("()").split(", ")
    return ~before.view([sizes[axis] for axis in axes])


def other_paddings(case: Case, is_column: bool) -> list[str]:
    """The shapes that are tried where (B, Lk) is not taken. An axis of queries is none
    beside heads, and is taken by chance where a column is read."""
    rows = [] if is_column or case.layout in WITH_HEADS else ["row mask"]
    return ["wide mask", *rows, "column mask"]


def may_be_blind(mask: Tensor) -> Tensor:
    """The queries (Lq,) that a mask (..., Lq, Lk), read in one of both ways, leaves
    without an earlier key in some item, as code sees it that is causal by itself."""
    marked = (mask != 0).reshape(-1, *mask.shape[-2:])
    later = torch.ones(marked.shape, dtype=torch.bool).triu(1)
    return ((marked | later).all(-1) | (~marked | later).all(-1)).any(0)


def query_axis(case: Case) -> int:
    """That of the length in what as_sequence() has."""
    return (
        0 if case.layout == SEQUENCE_FIRST else 1 if case.layout in HEADS_BEHIND else -2
    )


def unbatched(case: Case) -> bool:
    return case.layout in (UNBATCHED, FLAT)


def others(case: Case, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """The layouts that may also be meant where code takes this case, fewer than these:
    what is right without a batch only is not right."""
    smaller = (UNBATCHED, FLAT)
    found = tuple(x for x in layouts if x != case.layout and x not in smaller)
    return found if len(found) < len(layouts) else found[1:]


def attributes(module: object) -> dict[str, int]:
    """Sizes that a module keeps, by role: in itself, its configuration or, where
    it has none of its own, its parts."""
    found: dict[str, int] = {}
    for owner in _owners(module):
        names = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        parts = owner.named_children() if isinstance(owner, nn.Module) else ()
        for name, value in (*names.items(), *parts):
            role = ATTRIBUTES.get(normal(str(name)))
            if role == "num_heads" and isinstance(value, nn.ModuleList):
                value = len(value)
            if role and type(value) is int and value > 0:
                found.setdefault(role, value)
        found = constants_of(type(owner)) | found
    return found


def _owners(module: object) -> Iterator[object]:
    for part in module.modules() if isinstance(module, nn.Module) else [module]:
        if not isinstance(part, _GROUPED):  # whose groups are no heads
            yield part
            kept = (getattr(part, name, None) for name in ("config", "cfg", "args"))
            yield from (owner for owner in kept if owner is not None)


def input_width(module: object) -> int | None:
    """The width that a module's first projection takes."""
    for part in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, nn.Linear):
            # A lazy layer, which has not seen its input, is mostly square.
            return part.in_features or part.out_features
        if isinstance(part, _CONVOLUTIONS):
            return part.in_channels
        if isinstance(part, nn.MultiheadAttention):
            return part.embed_dim
    matrices = [p for p in held(module) if p.dim() >= 2]
    if not matrices:
        return None
    shape = matrices[0].shape
    # With an axis of heads, (H, E, D) or (E, H, D), the input is the widest.
    return int(shape[-2]) if len(shape) == 2 else max(shape)


def of_instance(module: object, start: Sizes) -> Sizes:
    """The sizes that `module` was built with; those of `start` where it is free. One
    that counts no heads has one."""
    kept = attributes(module)
    embed = kept.get("embed_dim") or input_width(module)
    heads = kept.get("num_heads")
    if embed is None:
        return replace(start, heads=heads) if heads else start
    if heads is None and "head_dim" in kept and embed % kept["head_dim"] == 0:
        heads = embed // kept["head_dim"]
    kv_heads = kept.get("num_kv_heads")
    key, value = _other_widths(module)
    return replace(
        start,
        embed=embed,
        heads=heads or 1,
        kv_heads=kv_heads if kv_heads != heads else None,
        out=kept.get("out_dim"),
        key_width=key if key != embed else None,
        value_width=value if value != embed else None,
    )


_NAMED = r"(^|[._])(w_?|to_?|fc_?)?({0}s?|{1}|kv)(_?(proj|lin|linear|net))?$"
_KEY = re.compile(_NAMED.format("key", "k"))
_VALUE = re.compile(_NAMED.format("value", "v"))


def _other_widths(module: object) -> tuple[int | None, int | None]:
    """The widths of keys and values, as the layers that are named after them say."""
    found: dict[re.Pattern, int | None] = {}
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, nn.MultiheadAttention):
            return part.kdim, part.vdim
        if isinstance(part, nn.Linear):
            for name in (_KEY, _VALUE):
                if not found.get(name) and name.search(path.lower()):
                    found[name] = part.in_features or None
    return found.get(_KEY), found.get(_VALUE)


def of_globals(entry: object) -> dict[str, int]:
    """Sizes that the code's file fixes as constants (n_embd = 384), by role: those
    that a function refers to, and all for a constructor, whose parts may."""
    entry = getattr(inspect.unwrap(entry), "__func__", inspect.unwrap(entry))
    constants = getattr(entry, "__globals__", {})
    code = getattr(entry, "__code__", None)
    whole = code is None or code.co_name == "__init__"
    read = {name for one in with_inner(code) for name in one.co_names}
    roles = ATTRIBUTES | {"batchsize": "batch"}
    return {
        roles[normal(name)]: value
        for name, value in constants.items()
        if normal(name) in roles
        and type(value) is int
        and value > 0
        and (whole or name in read)
    }


def constants_of(kind: type) -> dict[str, int]:
    """Sizes that a class, or one that it inherits from, fixes as attributes (n_heads =
    4), by role."""
    own = (k for k in reversed(kind.__mro__) if not k.__module__.startswith("torch"))
    named = {name: value for k in own for name, value in vars(k).items()}
    return {
        ATTRIBUTES[normal(name)]: value
        for name, value in named.items()
        if normal(name) in ATTRIBUTES and type(value) is int and value > 0
    }


def with_inner(code: types.CodeType | None) -> Iterator[types.CodeType]:
    """A function's code and that of what it has inside, as generators."""
    if code is not None:
        yield code
        inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
        yield from itertools.chain.from_iterable(map(with_inner, inner))
