# SPDX-License-Identifier: MIT
"""The ways in which code may be meant to be called and read, as data.

Names, docstrings and comments only order them: what the numbers explain is believed
(session.py). What the user states, or the type of the code, leaves no other.
"""

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..options import Options
from ..subject import documented
from ..subject.documented import Said
from ..subject.roles import normal, role_of_name
from ..subject.signature import Call
from ..subject.target import Subject
from .observation import Stated


@dataclass(frozen=True)
class Meaning:
    """How its masks are read. additive: it is given 0 and -inf, to be added.
    against: what the text seems to say and is not believed here; why: the reason for
    an additive mask, where nothing states it."""

    stated: Stated
    additive: bool = False
    against: frozenset[str] = frozenset()
    why: str = ""


# Embeddings of positions, which may also be their cosines and sines.
_TABLES = {"posemb", "posembed", "posembeds", "positionembeddings", "encoding"}


def _is_asked(subject: Subject, parameter: inspect.Parameter) -> bool:
    """Whether the code asks whether what it takes for a mask is true, as of a flag."""
    asked = rf"\bif\s+{re.escape(parameter.name)}\s*(:|==\s*True|is True)"
    return parameter.default is None and re.search(asked, subject.source) is not None


def roles(call: Call, subject: Subject) -> Iterator[dict[str, str | None]]:
    """Roles of parameters, as they seem, and then otherwise:

    * a scale that may be left out, and without which some code does not scale;
    * a mask that is a flag, one of queries in which True blocks, or one that was taken
      for a mask of keys;
    * embeddings of positions instead of rotary tables, and numbers of positions where
      they may be left out;
    * no window, where it may be for steps of decoding alone;
    * sequences exchanged that names do not settle, as of forward(x, y), which may ask
      with y.
    """
    yield {}
    in_steps = call.takes("past") or call.takes("zero")
    for parameter in call.parameters:
        if call.roles[parameter.name] == "scale" and parameter.default in (
            None,
            1,
            parameter.empty,
        ):
            for role in ("factor", "divisor"):
                yield {parameter.name: role}
        if call.roles[parameter.name] == "mask" and _is_asked(subject, parameter):
            yield {parameter.name: "is_causal"}
        if call.roles[parameter.name] == "query_mask":
            yield {parameter.name: "query_blocked"}
        tables = normal(parameter.name) in _TABLES
        if call.roles[parameter.name] == "rotation" and tables:
            yield {parameter.name: "positions"}
        numbered = role_of_name(parameter.name) == "position_ids"
        if numbered and call.roles[parameter.name] is None:
            yield {parameter.name: "position_ids"}
        if call.is_guessed("padding") and call.parameter("padding") == parameter.name:
            biases = [name for name, role in call.roles.items() if role == "mask"]
            yield {**dict.fromkeys(biases), parameter.name: "mask"}
        if call.roles[parameter.name] == "sliding_window" and in_steps:
            yield {parameter.name: None}
    names = [name for name in call.roles if call.is_open(name)]
    seeming = tuple(call.roles[name] for name in names)
    for order in itertools.permutations(seeming):
        if order != seeming:
            yield dict(zip(names, order))


def meanings(
    call: Call, subject: Subject, options: Options, said: dict[str, Said], first: Stated
) -> Iterator[Meaning]:
    """What is stated or written; then without what is only written in passing, or is
    in a name that leaves it open; then with masks that are added, or that are not."""
    additive = first.mask == "additive"
    yield Meaning(first, additive)
    doubtful = frozenset(fact for fact, one in said.items() if not one.is_plain)
    if doubtful:
        without = replace(first, **dict.fromkeys(doubtful))
        yield Meaning(without, additive, against=doubtful)
    unsaid = first.padding == "blocked" and "padding" not in said
    if options.mask is None and unsaid and documented.may_be_of_tokens(call, subject):
        yield Meaning(replace(first, padding=None), additive)
    if options.mask is not None or not call.takes("mask"):
        return
    if additive and not documented.is_bias(call):
        # The text may speak of a mask that the code makes of the one it is given.
        yield Meaning(replace(first, mask=None))
    known = first.mask is not None and "mask" not in doubtful
    if not additive and not known and documented.may_be_additive(call, subject):
        why = "which leaves fewer faults"
        yield Meaning(replace(first, mask="additive"), additive=True, why=why)
