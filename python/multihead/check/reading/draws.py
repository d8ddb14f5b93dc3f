# SPDX-License-Identifier: MIT
"""Whether code gives something else each time, in evaluation."""

import re
from dataclasses import replace

import torch

from ..capture.runner import Run, Runner
from ..report import Finding

# What code speaks of that draws its output on purpose.
_ON_PURPOSE = re.compile(
    r"reparam|variational|\bvae|vae\b|log_?var|gumbel|stochastic|add_?noise|rsample",
    re.I,
)


_DRAWN = Finding(
    "random",
    "Two runs on the same inputs give different outputs, in evaluation mode.",
    "Something is drawn anew in each call: parameters belong into the constructor, "
    "dropout into training.",
)
_LEFT_BEHIND = Finding(
    "random",
    "A second run on the same inputs gives another output, in evaluation mode, and not "
    "by chance: a call changes what the next one reads.",
    "Compute what is needed in each call, and leave parameters to the optimiser: "
    "`shares = self.shares.softmax(0)`, not `self.shares = ...`.",
)


def differing(runner: Runner, first: Run) -> list[Finding]:
    """Two runs that differ although nothing is dropped and no layer made anew."""
    made_inside = runner.subject.kind == "function" and not runner.call.weights
    if first.recorder.draws or (made_inside and first.parameters.tensors):
        return []
    again = runner.run(first.case, seed=1)
    if again.refused or torch.equal(again.out.nan_to_num(), first.out.nan_to_num()):
        return []
    same = runner.run(first.case)
    is_changed = not same.refused and not torch.equal(same.out, first.out)
    finding = _LEFT_BEHIND if is_changed else _DRAWN
    on_purpose = _ON_PURPOSE.search(runner.subject.source)
    return [replace(finding, kind="unchecked") if on_purpose else finding]
