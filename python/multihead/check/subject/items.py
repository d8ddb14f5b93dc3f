# SPDX-License-Identifier: MIT
"""Arguments that count, whatever their names say: items, heads, rows and columns; and to
which item each node of several graphs belongs."""

import inspect
import re
from typing import TYPE_CHECKING

from .roles import normal
from .words import role_of_words, words

if TYPE_CHECKING:
    from .signature import Call

_OF_GRAPHS = {"batch", "batchindex", "batchidx", "batchids", "graphids", "graphindex"}
_PAIR = re.compile(r"(list|tuple|sequence)\[int\b", re.I)
_OF_IMAGES = {"size", "shape", "hw", "resolution", "feat", "grid"}


def settle(call: "Call", text: str) -> None:
    """What counts the items, `x.reshape(size, length, heads, d)`, or numbers the graph of
    each node, as `batch` does beside nodes (N, E)."""
    for parameter in call.parameters:
        name, role = parameter.name, call.roles[parameter.name]
        if parameter.default is not inspect.Parameter.empty:
            continue
        is_length = set(words(name)) & {"len", "length"}
        counts = rf"\.(?:reshape|view)\(\s*{re.escape(name)}\s*,[^\n]*,"
        is_free = role in (None, "embed_dim", "max_length") and not is_length
        if is_free and re.search(counts, text):
            call.roles[name] = "batch"
        taken = rf"\b{re.escape(name)}(?:\.unsqueeze\(\d\)|\[[^\]]*None[^\]]*\])"
        sides = _PAIR.search(str(parameter.annotation)) or _has_two_sides(name, text)
        is_free = role in (None, "embed_dim")
        if is_free and set(words(name)) & _OF_IMAGES and sides:
            call.roles[name] = "resolution"
        if normal(name) in _OF_GRAPHS and re.search(taken, text):
            call.roles[name] = "graphs"
    call.roles |= heads(call.roles, text)


def _has_two_sides(name: str, text: str) -> bool:
    """Whether code takes it for height and width: `h, w = size`, x.view(b, c, *size)."""
    own = re.escape(name)
    both = rf"\*{own}\b|^\s*\w+\s*,\s*\w+\s*=\s*{own}\s*$|\b{own}\[1\]"
    return re.search(both, text, re.M) is not None


def heads(roles: dict[str, str | None], text: str) -> dict[str, str]:
    """Sizes that say how features are cut into heads, whatever their names say: widths
    that count heads, `part = features // heads_dim`, where features are cut as
    (heads_dim, part), and lengths of a head's vectors, `heads * qk_length`."""
    found = {}
    for name in (name for name, role in roles.items() if role == "head_dim"):
        count = rf"(?:self\.)?{re.escape(name)}\b"
        for part in re.findall(rf"(\w+)\s*=\s*[\w.]+\s*//\s*{count}", text):
            cut = re.search(rf"{count}\s*,\s*(?:self\.)?{part}\s*[,)]", text)
            if cut and role_of_words(part) != "num_heads":
                found[name] = "num_heads"
    counts = "|".join(re.escape(n) for n, role in roles.items() if role == "num_heads")
    for name in (n for n, role in roles.items() if role in (None, "max_length")):
        own, many = rf"(?:self\.)?{re.escape(name)}\b", rf"\b(?:{counts})\b"
        made = rf"Linear\([^\n]*(?:{many}\s*\*\s*{own}|\b{own}\s*\*\s*{many})"
        if counts and re.search(made, text):
            found[name] = "head_dim"
    return found
