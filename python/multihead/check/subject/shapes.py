# SPDX-License-Identifier: MIT
"""Sequences under names that say nothing, by the shapes that a docstring gives them:
drug: (batch, drug_len, dim), protein: (batch, protein_len, dim)."""

import inspect
import re
from typing import TYPE_CHECKING

from .roles import VAGUE, normal
from .target import Subject
from .texts import source_of
from .words import words

if TYPE_CHECKING:
    from .signature import Call

_SEQUENCE = (
    r"(?<!\w){}(?:\s*\([^()\n]*\))?\s*[:=][^(\[\n]{{0,40}}[(\[]\s*"
    r"(?:b|bs|bsz|n|batch\w*(?: size)?)\s*,\s*(?!1\b)[\w ]+,\s*"
    r"(?:[cdeh]|\w*(?:dim|emb\w*|hidden\w*|model|size|feat\w*|channels?))\s*[)\]]"
)


_OF_BOTH = {"attn", "attention", "causal", "cross"}


def of_documented(call: "Call", subject: Subject) -> None:
    """Two such sequences, of which nothing else says what one of them is: the first asks,
    and the other is its context. A mask named after the one that asks is of queries."""
    said = (inspect.getdoc(one) for one in (subject.target, subject.entry))
    text = "\n".join(filter(None, said))
    _of_masks(call, text)
    named = [
        p.name for p in call.parameters if not set(words(p.name)) & {"mask", "pad"}
    ]
    found = [n for n in named if re.search(_SEQUENCE.format(re.escape(n)), text, re.I)]
    if len(found) != 2 or None not in (call.roles[name] for name in found):
        return
    others = {role for name, role in call.roles.items() if name not in found}
    if others & {"query", "key", "value", "x", "context"}:
        return
    asks, context = found
    if _makes_queries(context, subject) and not _makes_queries(asks, subject):
        asks, context = context, asks
    elif not _makes_queries(asks, subject):
        call.guess(found, "what asks and its context")
    call.roles |= {asks: "query", context: "context"}
    named = {n: set(words(n)) for n in call.roles}
    masks = [n for n, w in named.items() if "mask" in w and not w & _OF_BOTH]
    of_query = [n for n in masks if set(words(n)) & set(words(asks))]
    if len(masks) == 2 and len(of_query) == 1:
        of_keys = next(n for n in masks if n not in of_query)
        call.roles |= {of_query[0]: "query_mask", of_keys: "padding"}


def _makes_queries(name: str, subject: Subject) -> bool:
    """Whether its text makes queries of it, or hands it on as such."""
    made = rf"\b(?:q|query|queries)\w*\s*=[^\n;=]*\b{re.escape(name)}\b"
    text = subject.source + source_of(inspect.unwrap(subject.entry))
    return re.search(made, text, re.I) is not None


def _is_vague(call: "Call", name: str) -> bool:
    return name in call.guessed or normal(name) in VAGUE or len(name) == 1


def of_vague(call: "Call", subject: Subject) -> None:
    """Exchanges x and y, or two of which places alone tell, where queries are made of
    the second."""
    vague = {r: n for n, r in call.roles.items() if r in ("x", "context")}
    if (
        len(vague) < 2
        or call.takes("query")
        or not all(_is_vague(call, n) for n in vague.values())
    ):
        return
    asks, context = vague["x"], vague["context"]
    if _makes_queries(context, subject) and not _makes_queries(asks, subject):
        call.roles |= {asks: "context", context: "query"}


def _of_masks(call: "Call", text: str) -> None:
    """What must be given, and of which the text says what True marks: is_token: (B, L)
    bool, True for tokens, False for padding."""
    if call.takes("mask") or call.takes("padding"):
        return
    for parameter in call.parameters:
        name, is_free = parameter.name, call.roles[parameter.name] is None
        said = (
            rf"\b{re.escape(name)}\b[^.;\n]*\b(?:True|1)\b[^.;\n]*\bpad(?:ding|ded)?\b"
        )
        if is_free and parameter.default is parameter.empty and re.search(said, text):
            call.roles[name] = "padding"
            return
