# SPDX-License-Identifier: MIT
"""Sizes of inputs that tell mistakes apart, and those that an instance has."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from ..subject.holding import held
from ..subject.roles import ATTRIBUTES, normal

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call. All differ, so that no axis can stand for another.

    kv_heads: None where keys and values have as many heads as queries.
    out: the width of the output where it is not that of the input. key_width,
    value_width: those of keys and values where they are not that of the queries.
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

    @property
    def head_dim(self) -> int:
        return (self.out or self.embed) // self.heads

    def value_of(self, role: str) -> int | None:
        """What an argument of this role is given."""
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads or self.heads,
            "embed_dim": self.embed,
            "out_dim": self.out or self.embed,
            "head_dim": self.head_dim,
            # Longer than any sequence here, and no other size.
            "max_length": max(16, self.keys + 1),
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


def apart(sizes: Sizes) -> Sizes:
    """`sizes` with a batch and lengths that equal no other, keys the longest."""
    taken = {sizes.heads, sizes.kv_heads, sizes.head_dim}
    batch, queries, keys = (
        next(size for size in sizes_of if size not in taken)
        for sizes_of in ((3, 2, 4, 1), (5, 6, 10, 12), (7, 9, 11, 13))
    )
    return replace(sizes, batch=batch, queries=queries, keys=keys)


def attributes(module: object) -> dict[str, int]:
    """Sizes that a module keeps, by role: in itself, its configuration or, where
    it has none of its own, its parts."""
    found: dict[str, int] = {}
    for owner in _owners(module):
        for name, value in _named(owner):
            role = ATTRIBUTES.get(normal(str(name)))
            if role is None:
                continue
            if isinstance(value, nn.ModuleList) and role == "num_heads":
                value = len(value)
            if type(value) is int and value > 0:
                found.setdefault(role, value)
    return found


def _owners(module: object) -> Iterator[object]:
    for part in module.modules() if isinstance(module, nn.Module) else [module]:
        if not isinstance(part, _CONVOLUTIONS):  # whose groups are no heads
            yield part
            kept = (getattr(part, name, None) for name in ("config", "cfg", "args"))
            yield from (owner for owner in kept if owner is not None)


def _named(owner: object) -> list[tuple[object, object]]:
    names = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    parts = owner.named_children() if isinstance(owner, nn.Module) else ()
    return [*names.items(), *parts]


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
    """The sizes that `module` was built with; those of `start` where it is free.

    A module that counts no heads has one.
    """
    kept = attributes(module)
    embed = kept.get("embed_dim") or input_width(module)
    if embed is None:
        return start
    heads = kept.get("num_heads")
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
    return {
        ATTRIBUTES[normal(name)]: value
        for name, value in constants.items()
        if normal(name) in ATTRIBUTES
        and type(value) is int
        and value > 0
        and (whole or name in code.co_names)
    }
