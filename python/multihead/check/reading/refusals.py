# SPDX-License-Identifier: MIT
"""Which calls are tried first, by what those before were refused for."""

import re
from collections.abc import Iterator

import torch

from ..calls.cases import Case
from ..report import Finding

_SHAPES = 3  # of masks that are refused beside unequal lengths, until others are
_COMPARED = re.compile(r"size of tensor a \((\d+)\) must match .* b \((\d+)\)")
# B, L, H, D = x.shape, and what einops says of the axes of a pattern.
_UNPACKED = re.compile(
    r"values to unpack \(expected \d(, got (?P<got>\d))?\)|"
    r"expected \d dims\. Received (?P<dims>\d)-dim"
)
# Of nn.MultiheadAttention: the last axes, those of the keys.
_MASKED = re.compile(
    r"attn_mask is torch\.Size\(\[.*?(\d+)\]\), but should be \(.*?(\d+)\)"
)


def length_of_mask(sentence: str) -> int | None:
    """The keys that a mask is for, where PyTorch says that there are others."""
    said = _MASKED.search(sentence)
    return int(said[1]) if said and said[1] != said[2] else None


_SHAPE = re.compile(r"shape|size|dim")  # in the line that unpacks too many


def compared(sentence: str) -> list[tuple[int, int]]:
    """The sizes that PyTorch says do not match."""
    return [(int(a), int(b)) for a, b in _COMPARED.findall(sentence)]


def of_depth(sentence: str) -> bool:
    """Whether tensors are refused for how many axes they have, it seems."""
    return _UNPACKED.search(sentence) is not None


class Refusals:
    """What calls were refused for: others of which the same can be expected come
    last. A mask that is None where it is needed, or bool where it is a number; queries
    of another length than keys, in some shape of a mask; tensors of too many axes or of
    too few."""

    def __init__(self) -> None:
        self._needs_mask = self._needs_number = False
        self._lengths: set[str | None] = set()  # shapes of masks, of unequal lengths
        self._depths: set[int] = set()  # of tensors, in axes
        self._known: set[tuple[str, str]] = set()
        self.nothing_new = 0  # how many of the last ones said what others had said

    def note(self, case: Case, finding: Finding) -> None:
        said, place = finding.sentence, finding.detail.partition("\n")[0]
        words = re.sub(r"\d+", "0", said), place
        self.nothing_new = self.nothing_new + 1 if words in self._known else 0
        self._known.add(words)
        self._needs_mask |= case.mask is None and "NoneType" in said
        is_bool = case.mask is not None and case.mask_dtype is torch.bool
        self._needs_number |= is_bool and "bool tensor" in said
        depth, unpacked = _depth(case.layout), _UNPACKED.search(said)
        got = unpacked and (unpacked["got"] or unpacked["dims"])
        is_known = got == str(depth) or (got is None and _SHAPE.search(finding.detail))
        if unpacked and case.mask is None and is_known:
            self._depths.add(depth)
        lengths = case.sizes.queries, case.sizes.keys
        unequal = {lengths, lengths[::-1]}.intersection(compared(said))
        if case.relation == "cross" and unequal:
            self._lengths.add(case.mask)

    def has_none_left(self, layouts: tuple[str, ...]) -> bool:
        """Whether tensors of as many axes as each of these has were refused for that."""
        return self._depths.issuperset(map(_depth, layouts))

    def expected(self, case: Case) -> bool:
        if _depth(case.layout) in self._depths:
            return True
        if case.mask is None:
            return self._needs_mask
        unequal = case.relation == "cross" and len(self._lengths) >= _SHAPES
        return unequal or (self._needs_number and case.mask_dtype is torch.bool)


def _depth(layout: str) -> int:
    return len(layout.split(","))


def likelier_first(choices: Iterator[Case], refusals: Refusals) -> Iterator[Case]:
    """Those of which a refusal is expected come after all others."""
    later = []
    for case in choices:
        if refusals.expected(case):
            later.append(case)
        else:
            yield case
    yield from later
