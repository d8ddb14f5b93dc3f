# SPDX-License-Identifier: MIT
"""Arguments that count, whatever their names say: items, heads; and to which item each
node of several graphs belongs."""

import inspect
import re
from typing import TYPE_CHECKING

from .roles import normal
from .words import role_of_words

if TYPE_CHECKING:
    from .signature import Call

_OF_GRAPHS = {"batch", "batchindex", "batchidx", "batchids", "graphids", "graphindex"}


def settle(call: "Call", text: str) -> None:
    """What counts the items, `x.reshape(size, length, heads, d)`, or numbers the graph of
    each node, as `batch` does beside nodes (N, E)."""
    for parameter in call.parameters:
        name, role = parameter.name, call.roles[parameter.name]
        if parameter.default is not inspect.Parameter.empty:
            continue
        counts = rf"\.(?:reshape|view)\(\s*{re.escape(name)}\s*,[^\n]*,"
        if role in (None, "embed_dim", "max_length") and re.search(counts, text):
            call.roles[name] = "batch"
        taken = rf"\b{re.escape(name)}(?:\.unsqueeze\(\d\)|\[[^\]]*None[^\]]*\])"
        if normal(name) in _OF_GRAPHS and re.search(taken, text):
            call.roles[name] = "graphs"
    call.roles |= dict.fromkeys(heads(call.roles, text), "num_heads")


def heads(roles: dict[str, str | None], text: str) -> list[str]:
    """The names of widths that count heads: `part = features // heads_dim`, and features
    are cut as (heads_dim, part)."""
    found = []
    for name in (name for name, role in roles.items() if role == "head_dim"):
        count = rf"(?:self\.)?{re.escape(name)}\b"
        for part in re.findall(rf"(\w+)\s*=\s*[\w.]+\s*//\s*{count}", text):
            cut = re.search(rf"{count}\s*,\s*(?:self\.)?{part}\s*[,)]", text)
            if cut and role_of_words(part) != "num_heads":
                found.append(name)
    return found
