# SPDX-License-Identifier: MIT
"""Whether code whose heads are right, beside layers that are not judged, keeps features
of one position together. Attention without positions, and layers that work on each
position alone, return the same for a sequence in another order, in that order. A view
where a transpose is meant does not.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..calls import cases
from ..calls.asked import source_of
from ..calls.cases import Case
from ..capture.runner import Run, Runner
from ..report import Finding
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
_OF_ONE_POSITION = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d)
_OF_ONE_POSITION += (nn.BatchNorm2d, nn.MultiheadAttention)
_KNOWS_ORDER = re.compile(
    r"(?<!trans)pos|rope|rotary|rotat|arange|alibi|relative|sin\(|cos\(|window|shift|"
    r"roll\(|causal|subsequent|tri[lu]\b|\bF\.conv|functional\.conv|pool|interpolate|"
    r"unfold|cumsum|\bpad\(|\[:, ?(?:-?\d|:-?\d)|linspace|decay|delta",
    re.I,
)


def of_positions(runner: Runner, base: Run) -> list[Finding]:
    """The flaw, if nothing that the code has or speaks of knows an order."""
    case = replace(base.case, gradients=False)
    target, _ = runner.target_of(case, may_hang=True)
    is_plain = case.layout in _FLAT and case.relation == "self"
    if not (is_plain and isinstance(target, nn.Module)) or case.mask is not None:
        return []
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
    # What is added to each position is the same in every draw, and no fault here.
    off = [_off(runner, replace(case, draw=case.draw + more)) for more in (0, 1)]
    if off[0] is None or off[1] is None:
        return []
    is_same = any(torch.allclose(off[0], o) for o in (off[1], torch.zeros_like(off[0])))
    return [] if is_same else [SCRAMBLED]


def _off(runner: Runner, case: Case) -> Tensor | None:
    """What a sequence turned round gives, less what it gives, turned round."""
    runs = again.twice(runner, case, lambda x: x.copy_(_turned_round(x, case)))
    if runs is None:
        return None
    before, after = runs
    return after.out - before.out.flip(cases.query_axis(case))


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


def _turned_round(x: Tensor, case: Case) -> Tensor:
    first, last = _FLAT[case.layout]
    return x.flatten(first, last).flip(first).view(x.shape)
