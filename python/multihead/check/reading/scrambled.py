# SPDX-License-Identifier: MIT
"""Whether code whose heads are right, beside layers that are not judged, keeps features
of one position together. Attention without positions, and layers that work on each
position alone, return the same for a sequence in another order, in that order. A view
where a transpose is meant does not.
"""

import math
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..calls import cases
from ..calls.cases import Case
from ..capture.runner import Run, Runner
from ..report import Finding
from ..subject.texts import source_of
from . import again

SCRAMBLED = Finding(
    "positions_scrambled",
    "The features of a position do not stay together: for the same positions in another "
    "order it returns other numbers, though none of its layers knows of an order.",
    "Exchange axes by transpose or permute: x.flatten(2).transpose(1, 2) for an image "
    "(B, C, H, W), x.transpose(1, 2) for (B, C, L). view and reshape keep the order in "
    "memory, and make tokens of parts of several.",
)
_FLAT = {cases.LAYER: (1, 1), cases.CHANNELS_FIRST: (2, 2)}
_FLAT |= {cases.IMAGE: (2, 3), cases.IMAGE_LAST: (1, 2)}  # the axes of positions
_CLOSE = 1e-5  # scores may be of float32
_OF_ONE_POSITION = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d)
_OF_ONE_POSITION += (nn.BatchNorm2d, nn.MultiheadAttention)
_KNOWS_ORDER = re.compile(
    r"(?<!trans)pos|rope|rotary|rotat|arange|alibi|relative|sin\(|cos\(|window|shift|"
    r"roll\(|causal|subsequent|tri[lu]\b|\bF\.conv|functional\.conv|pool|interpolate|"
    r"unfold|cumsum|flip|fft|pad\dd|mixer|gmlp|\bpad\(|linspace|decay|delta|"
    # One of them is chosen: x[:, 0], x[:, :-1], and x[-1] where they come first.
    r"\[:, ?(?:-?\d|:-?\d)|\b(?!shape\b)\w+\[(?:-1|0)\]",
    re.I,
)


def of_positions(runner: Runner, base: Run, parts: tuple = ()) -> list[Finding]:
    """The flaw, if nothing that the code has or speaks of knows an order. parts: the
    sizes that the length is of, where it is that of a video."""
    case = replace(base.case, gradients=False)
    target, _ = runner.target_of(case, may_hang=True)
    is_plain = case.layout in _FLAT and case.relation == "self"
    if not (is_plain and isinstance(target, nn.Module)):
        return []
    is_ordered = getattr(runner.subject.how, "knows_order", False)
    if is_ordered or case.mask is not None or case.padding is not None:
        return []  # which know of an order
    own = {type(part) for part in target.modules()}
    text = "".join(source_of(kind) for kind in own if not _is_pytorchs(kind))
    text = f"{runner.subject.source}{text}"
    cores = base.recorder.cores
    knows_order = base.recorder.has_triangle or cores.is_turned
    knows_order |= any(one.is_shifted or one.is_biased for one in cores.found)
    if knows_order or _KNOWS_ORDER.search(text):
        return []
    if not all(map(_is_of_one_position, target.modules())):
        return []
    length = case.sizes.queries
    layers = (m for m in target.modules() if isinstance(m, nn.Linear))
    if any(m.in_features == length != case.sizes.embed for m in layers):
        return []  # it may mix positions
    # What is added to each position is the same in every draw, and no fault here.
    draws = [replace(case, draw=case.draw + more) for more in (0, 1)]
    off = [_off(runner, one, parts) for one in draws]
    if off[0] is None or off[1] is None:
        return []
    known = off[1], torch.zeros_like(off[0])
    is_same = any(torch.allclose(off[0], o, rtol=_CLOSE, atol=_CLOSE) for o in known)
    return [] if is_same else [SCRAMBLED]


def _off(runner: Runner, case: Case, parts: tuple) -> Tensor | None:
    """What a sequence in another order gives, less what it gives, in that order."""
    first, last = _FLAT[case.layout]
    orders: list[Tensor] = []

    def exchange(x: Tensor) -> None:
        orders.append(_other_order(parts or x.shape[first : last + 1]))
        x.copy_(x.flatten(first, last).index_select(first, orders[0]).view(x.shape))

    runs = again.twice(runner, case, exchange)
    if runs is None or not orders:
        return None
    before, after = runs
    axis = cases.query_axis(case)
    if before.out.shape[axis] != len(orders[0]):
        return None
    return after.out - before.out.index_select(axis, orders[0])


def _other_order(sizes: tuple[int, ...]) -> Tensor:
    """Of the positions of a sequence, or of rows and columns that change places as a
    whole, which attention along one of them allows, too."""
    places = torch.arange(math.prod(sizes)).view(sizes)
    for axis, size in enumerate(sizes):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
        places = places.index_select(axis, order.flip(0))  # two are exchanged, too
    return places.flatten()


def _is_pytorchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _is_of_one_position(layer: nn.Module) -> bool:
    """Whether what it computes at one position follows that alone, or those that attend
    to each other."""
    own = list(layer.parameters(recurse=False))
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return set(layer.kernel_size) == {1}
    learned = any(p.dim() > 1 for p in own)
    return isinstance(layer, _OF_ONE_POSITION) or not learned
