# SPDX-License-Identifier: MIT
"""Weights that code is handed, as arguments of a call or of a constructor."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..subject.roles import is_weight
from .cases import Case, Sizes, Style

_FEWEST = 3  # of a constructor: one alone may be anything


def weight(name: str, case: Case) -> object:
    """A weight for a parameter of this name: a matrix, a bias or a layer."""
    sizes = case.sizes
    rows, columns = sizes.embed, _width(name.lower(), sizes)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(case.dtype)

    if name.lower().startswith("b") or re.search(r"bias|_b$", name.lower()):
        return 0.3 * normal(columns)
    if case.style.layers and case.style.numpy:
        # As those of GPT-2 in NumPy: linear(x, **c_attn).
        return {"w": normal(rows, columns) / rows**0.5, "b": 0.3 * normal(columns)}
    if case.style.layers:
        layer = nn.Linear(rows, columns, dtype=case.dtype)
        with torch.no_grad():
            layer.weight.copy_(normal(columns, rows) / rows**0.5)
        return layer
    shape = (columns, rows) if case.style.out_in else (rows, columns)
    if case.style.apart and columns == 3 * rows:
        shape = (3, rows, rows)
    elif case.style.by_heads:
        heads, width = columns // sizes.head_dim, sizes.head_dim
        is_out = "o" in name.lower().strip("w_") and not case.style.out_in
        shape = (heads, width, rows) if is_out else (heads, rows, width)
    return normal(*shape) / rows**0.5


def _width(name: str, sizes: Sizes) -> int:
    """The width of what the weight of this name makes."""
    full, shared = sizes.embed, (sizes.kv_heads or sizes.heads) * sizes.head_dim
    if "qkv" in name or "in_proj" in name or re.search("[cwb]_attn", name):
        return full + 2 * shared
    if "kv" in name:
        return 2 * shared
    letters = set(name.replace("weight", "").replace("bias", "").split("_"))
    if letters & {"k", "v", "key", "value", "wk", "wv", "bk", "bv", "keys", "values"}:
        return shared
    return full


def constructors(names: Iterable[str]) -> list[str]:
    """The arguments of a constructor that take a weight each: wq, wk, wv and wo."""
    named = [name for name in names if is_weight(name)]
    return named if len(named) >= _FEWEST else []


def built(name: str, sizes: Sizes, text: str) -> object:
    """A weight for a constructor with this text: an array, where it computes in NumPy;
    (out, in), where it is transposed."""
    turned = rf"\b{re.escape(name)}(?:\.T\b|\.mT\b|\.t\(|\.transpose\()"
    style = Style(out_in=re.search(turned, text) is not None)
    made = weight(name, Case("", sizes, dtype=torch.get_default_dtype(), style=style))
    is_numpy = re.search(r"\bnp\.\w", text) and not re.search(r"\btorch\.|\bnn\.", text)
    return made.numpy() if is_numpy else made
