# SPDX-License-Identifier: MIT
"""Code that is handed the parts of what attends: vectors of an item that become its
tokens, as those of a text, an image and a table, each (B, E); or a sequence with how many
frames and patches it is of. And code that takes sequences apart, into blocks that attend
to themselves."""

import inspect
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ..subject.roles import SIZES, TENSORS
from ..subject.signature import Call, type_name
from ..subject.target import Subject
from ..subject.words import mask_of_words, words
from . import cases
from .forms import Form, called, formed
from .tokens import like

# One token for each: torch.stack([a, b], 1), torch.cat([a.unsqueeze(1), ...], 1).
_STACKS = r"\bstack\(|unsqueeze\(\s*(?:dim\s*=\s*)?[01]\s*\)|\[:, ?None"
# As they come: torch.stack([a, b, ...
_STACKS_THEM = r"\bstack\(\s*[\[(]\s*{0}\s*,\s*{1}\b"
_BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_MOST = 6  # vectors
_BLOCK = 3  # positions, as many as a window is told to have
# N // self.window_size, N % block, rearrange(x, "b (n w) d -> ...")
_CUTS = re.compile(
    r"(?://|%)\s*(?:self\.)?(?:\w*(?:window|block|chunk|bucket|segment)\w*|ws?)\b|"
    r"\(\s*\w+\s+(?:w|window|block|chunk)\w*\s*\)"
)
_FRAMES = {"frames", "frame", "nframes", "clips"}
_PATCHES = {"patches", "patch", "joints", "spatial", "tokens"}


def of_stacked(subject: Subject, call: Call) -> Iterator[Form]:
    """What of_vectors() does, where the text stacks its arguments as they come."""
    names = [re.escape(p.name) for p in call.parameters[:2]]
    if len(names) == 2 and re.search(_STACKS_THEM.format(*names), subject.source):
        yield from of_vectors(subject, call)


def _is_one_beside(names: list[str], source: str) -> bool:
    """Whether some alone are given an axis of positions, as what scales a sequence."""
    given = r"\b{}(?:\.unsqueeze\(\s*1|\[:, ?None)".format
    alone = [n for n in names if re.search(given(re.escape(n)), source)]
    return 0 < len(alone) < len(names) and "stack(" not in source


def of_vectors(subject: Subject, call: Call) -> Iterator[Form]:
    """With a vector for each of its arguments, which are the tokens of one sequence."""
    named = {"query", "key", "value"} & set(call.roles.values())
    names = [
        p.name
        for p in call.parameters
        if p.default is p.empty
        and mask_of_words(p.name) is None
        and (call.roles[p.name] in (None, *TENSORS) or p.name in call.guessed)
        and type_name(p) not in ("int", "bool", "float", "str")
    ]
    others = [p for p in call.parameters if p.name not in names]
    if named or not 2 <= len(names) <= _MOST:
        return
    if not re.search(_STACKS, subject.source) or _is_one_beside(names, subject.source):
        return

    def how(target: object, /, x: Tensor, **given: object) -> object:
        if x.dim() != 3 or x.shape[1] != len(names):
            raise ValueError(f"it takes {len(names)} vectors")
        given |= {name: x[:, place] for place, name in enumerate(names)}
        returned = called(subject, target, given)
        several = isinstance(returned, (tuple, list)) and len(returned) == len(names)
        if several and all(isinstance(p, Tensor) and p.dim() == 2 for p in returned):
            return torch.stack(list(returned), 1)
        return like(returned, x)

    how.has_many = how.has_head = True  # type: ignore[attr-defined]
    how.knows_order = True  # type: ignore[attr-defined]
    parameters = [inspect.Parameter("x", _BY_KEYWORD)]
    parameters += [p.replace(kind=_BY_KEYWORD) for p in others]
    said = f"{', '.join(names)} taken for the tokens of each item, (B, E)"
    form = formed(subject, parameters, how, (cases.LAYER,), said)
    form.queries, form.batch = len(names), len(names) + 2  # which differ
    yield form


def of_frames(subject: Subject, call: Call) -> Iterator[Form]:
    """With a number of frames, and perhaps of patches in each, of which there are as many
    in the length, (B, T·P, E), or in the batch, (B·T, P, E)."""
    counts = [
        p.name
        for p in call.parameters
        if p.default is p.empty
        and (call.roles[p.name] in (None, "mask", *SIZES) or p.name in call.guessed)
    ]
    patches = [n for n in counts if set(words(n)) & _PATCHES]
    frames = [n for n in counts if set(words(n)) & _FRAMES and n not in patches]
    sequence = call.parameter("x") or call.parameter("query")
    if len(frames) != 1 or len(patches) > 1 or sequence is None:
        return

    def how(target: object, /, **given: object) -> object:
        length = given[sequence].shape[1]  # type: ignore[attr-defined]
        if length % 2:
            raise ValueError("it takes the tokens of two frames")
        given |= {frames[0]: 2} | dict.fromkeys(patches, length // 2)
        return called(subject, target, given)

    how.splits_batch = True  # type: ignore[attr-defined]
    parameters = [
        p.replace(kind=_BY_KEYWORD)
        for p in call.parameters
        if p.name not in frames + patches
    ]
    said = f"{', '.join(frames + patches)} of two frames"
    form = formed(subject, parameters, how, (cases.LAYER,), said)
    form.batch, form.queries = 4, 6
    yield form


def in_blocks(subject: Subject, call: Call) -> Iterator[Form]:
    """With two items behind one another, (B / 2, 2·L, E), which it takes apart again, as
    windows of a sequence."""
    sequence = call.parameter("x")
    if sequence is None or not _CUTS.search(subject.source):
        return

    def how(target: object, /, **given: object) -> object:
        x = given[sequence]
        if len(x) % 2:  # type: ignore[arg-type]
            raise ValueError("it takes the blocks of two items")
        given[sequence] = x.flatten(0, 1).unflatten(0, (-1, 2 * x.shape[1]))  # type: ignore[attr-defined]
        returned = called(subject, target, given)
        out = returned[0] if isinstance(returned, tuple) else returned
        return out.reshape(*x.shape[:2], -1)  # type: ignore[attr-defined]

    how.splits_batch = how.cuts_blocks = True  # type: ignore[attr-defined]
    parameters = [p.replace(kind=_BY_KEYWORD) for p in call.parameters]
    said = "a sequence taken for two blocks, each of which attends to itself"
    form = formed(subject, parameters, how, (cases.LAYER,), said)
    form.batch, form.queries = 4, _BLOCK
    yield form
