# SPDX-License-Identifier: MIT
"""What an argument may be given of which nothing is known, likelier first: zeros or ones of
some shape, the numbers of positions, or a word that the code compares it with."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..subject.signature import Call
from ..subject.sliding import OF_WINDOWS, is_sliding
from ..subject.target import Subject
from ..subject.texts import compared_with
from ..subject.words import words
from .asked import size_of

# B items, L queries, S keys, E features, H heads and D features of each.
_SEQUENCES = ("B L E", "B S E", "B L D", "L E", "B L 1")
_OF_PAIRS = ("B L S E", "B L S D", "B L S", "B L S H", "B H L S")
_OF_PAIRS += ("B H L S D", "L S", "L S E", "L S D")
_OF_ITEMS = ("B L", "B S", "B E", "B")
_LEARNED = ("H D", "E")
# What is tried first, by words of the name.
_PAIRS = {"edge", "edges", "pair", "pairs", "e", "z", "delta", "rel", "relation"}
_PAIRS |= {"relations", "dist", "dists", "distance", "distances", "matrix", "bias"}
_TIMES = {"time", "times", "timestamp", "timestamps", "pos", "position", "positions"}
_TIMES |= {"step", "steps", "index", "ids", "segment", "type"}
_LENGTHS = {"len", "lens", "length", "lengths"}
MASKS = {"mask", "masks"}
_OF_CONTEXTS = re.compile("cross|context|memory|enc\\w*.?dec", re.I)


@dataclass(frozen=True)
class Kind:
    """What an argument is given. word: what the code compares it with; shape: of numbers,
    by the letters of its axes; fill: zeros or ones. said: the sequence itself, or whole
    lengths, in words. Nothing of all that is None."""

    word: str | None = None
    shape: str | None = None
    fill: float = 0.0
    dtype: torch.dtype | None = None  # that of the sequence
    counts: bool = False  # the number of each position, as of times
    said: str = ""

    @property
    def is_choice(self) -> bool:
        """Whether the code has other ways, or numbers of another order."""
        return self.word is not None or self.counts

    def value(self, sizes: dict[str, int], sequence: Tensor) -> object:
        if self == SAME:
            return sequence
        if self == WHOLE:
            return torch.full([sizes["B"]], sizes["S"])
        if self.shape is None:
            return self.word
        dtype = self.dtype or sequence.dtype
        counts = [sizes[axis] for axis in self.shape.split()]
        if self.counts:
            return torch.arange(counts[1], dtype=dtype).repeat(counts[0], 1)
        return torch.full(counts, self.fill, dtype=dtype)

    def __str__(self) -> str:
        if self.said:
            return f"taken for {self.said}"
        if self.shape is None:
            return "None" if self.word is None else f"= {self.word!r}"
        kind = "ones" if self.fill else "zeros"
        kind = "the number of each position" if self.counts else kind
        axes = self.shape.replace(" ", ", ") + "," * (len(self.shape) == 1)
        return f"given as {kind}, ({axes})"


NONE = Kind()
SAME = Kind(said="the sequence itself")
WHOLE = Kind(said="the whole length of each item")


def words_of(subject: Subject, call: Call, name: str) -> list[Kind]:
    """Words that the code compares an argument with; first such as need what it takes
    beside, as "cross" a context, and training at last."""
    own, found = re.escape(name), compared_with(name, subject.source)
    for listed in re.findall(rf"\b{own}\s+in\s+[(\[{{]([^)\]}}]*)", subject.source):
        found += re.findall(r"[\"']([\w-]+)[\"']", listed)
    needed = [OF_WINDOWS] if is_sliding(subject.source) else []
    needed += [_OF_CONTEXTS] if call.takes("context") or call.takes("key") else []
    first = [w for w in found if any(kind.search(w) for kind in needed)]
    ordered = sorted([*first, *found], key=lambda word: "train" in word.lower())
    return [Kind(word) for word in dict.fromkeys(ordered)]


def kinds_for(name: str, sizes: dict[str, int]) -> Iterator[Kind]:
    """Numbers of each shape that may be meant, then those of choices and of marks."""
    said = set(words(name))
    if said & MASKS:
        yield from (Kind(fill=1, shape=shape) for shape in ("B L", "L S", "B L S"))
    if said & _LENGTHS:
        yield WHOLE
    if said & _TIMES:
        yield from (Kind(shape=shape, counts=True) for shape in ("B L", "B S"))
    first = _OF_PAIRS if said & _PAIRS else _OF_ITEMS if said & _TIMES else ()
    shapes = dict.fromkeys([*first, *_SEQUENCES, *_OF_PAIRS, *_OF_ITEMS, *_LEARNED])
    tried = set()
    for dtype in (None, torch.int64, torch.bool):
        for shape in shapes:
            axes = shape.split()
            if any(a not in sizes for a in axes) or (dtype and {"E", "D"} & {*axes}):
                continue
            made = (dtype, *(sizes[a] for a in axes))
            if made not in tried:
                yield Kind(shape=shape, dtype=dtype)
            tried.add(made)


def sizes_of(target: object, given: dict[str, object], whole: Tensor) -> dict[str, int]:
    """By letters of axes; heads and their width where the code keeps how many it has."""
    keys = (given.get(n) for n in ("key", "keys", "k", "K"))
    key = next((k for k in keys if isinstance(k, Tensor)), whole)
    kept = vars(target).items() if isinstance(target, nn.Module) else ()
    counts = [n for name, n in kept if type(n) is int and size_of(name) == "num_heads"]
    width, heads = whole.shape[-1], next(iter(counts), 0)
    if whole.dim() == 4:
        heads = whole.shape[1]
        width *= heads
    sizes = {"B": len(whole), "L": whole.shape[-2], "S": key.shape[-2]}
    of_heads = {"H": heads, "D": width // heads} if heads and width % heads == 0 else {}
    return sizes | of_heads | {"E": width, "1": 1}
