# SPDX-License-Identifier: MIT
"""Whose the parts of a fused matrix are, where a line that takes it apart says so:
key, query, value = self.kqv(x).chunk(3, dim=-1)."""

import re
from collections.abc import Iterable

from .words import words

_UNPACKED = re.compile(
    r"^\s*((?:\w+\s*,\s*){1,2}\w+)\s*=\s*"
    r"(?:[^\n]*\b(?:chunk|split|unbind|tensor_split)\(|[kqv]{3}\s*$)",
    re.M,
)
_LAYERS = re.compile(r"\bself\.(\w+)\s*=\s*[\w.]*(?:Linear|Conv\w*|Parameter)\(")
# Those whose names say in which order.
_IN_USUAL_ORDER = re.compile(r"qkv|(?<![a-z])kv|in_proj|c_attn|query_key_value", re.I)
_LETTERS = {"queries": "q", "query": "q", "keys": "k", "key": "k"}
_LETTERS |= {"values": "v", "value": "v", "q": "q", "k": "k", "v": "v"}
_OTHER_ORDERS = {"vk": "qvk", **{o: o for o in ("qvk", "kqv", "kvq", "vqk", "vkq")}}


def parts(text: str, weights: Iterable[str]) -> str | None:
    """ "kqv", say; None where the order is the usual one, as a name like in_proj has it,
    of a layer or of a weight that is given, or where nothing says it."""
    if any(map(_IN_USUAL_ORDER.search, [*_LAYERS.findall(text), *weights])):
        return None
    for found in _UNPACKED.finditer(text):
        named = [words(name.strip()) for name in found[1].split(",")]
        letters = [{_LETTERS[w] for w in said if w in _LETTERS} for said in named]
        if all(len(one) == 1 for one in letters):
            return _OTHER_ORDERS.get("".join(one.pop() for one in letters))
    return None
