# SPDX-License-Identifier: MIT
"""Arguments of a call that say how many items there are, or to which item each node of
several graphs belongs."""

import inspect
import re
from typing import TYPE_CHECKING

from .roles import normal

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
