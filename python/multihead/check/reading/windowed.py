# SPDX-License-Identifier: MIT
"""Flaws of windows of an image, as in Swin (Liu et al., 2021), which runs show: windows
that come out otherwise than alone, and shifts that are not undone, or that join opposite
sides of the image.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments, cases, windows
from ..calls.settings import is_only_kept
from ..capture.runner import Run, Runner
from ..report import Finding
from ..subject.target import text_of_file
from . import again

WINDOWS_MISPLACED = Finding(
    "windows_misplaced",
    "What its windows make of an image is put back elsewhere: the numbers are those of "
    "the windows alone, and stand in other places.",
    "Undo the cut step by step: x.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, "
    "5) cuts, and y.view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, "
    "H, W, C) puts back.",
)
SHIFT_NOT_UNDONE = Finding(
    "shift_not_undone",
    "Where its windows are shifted, what becomes of a pixel comes out at another one: the "
    "image is not rolled back to where it was.",
    "Roll by -shift before the windows are cut, and by +shift once they are put back, "
    "along the same two axes.",
)
WRAPS_AROUND = Finding(
    "wraps_around",
    "Where its windows are shifted, pixels read others of the opposite side of the image, "
    "which only the roll brings together.",
    "Block them by a mask made of the same shift: number the regions slice(0, -w), "
    "slice(-w, -shift) and slice(-shift, None) of both axes, cut that map into windows, "
    "and block pixels of two numbers.",
)
# What may well go on behind its last column.
_IS_ROUND = re.compile(
    r"panoram|longitude|periodic|earth|globe|spher|circular|torus", re.I
)
_MASKED = re.compile(r"mask|swin", re.I)
_CHANGED = 1e-9


def of_windows(runner: Runner, base: Run) -> Finding | bool:
    """Whether the windows of an image do not come out as they would alone, or what they
    make stands elsewhere: a flaw."""
    case, built = base.case, runner.construction
    if case.layout not in cases.IMAGES or built is None:
        return False
    subject, text = runner.subject, text_of_file(runner.subject)
    names = [name for name, role in built.roles.items() if role == "window"]
    # H // grid_size cells of a side, whose pixels may stand apart.
    names += [
        name
        for name, role in built.roles.items()
        if role == "resolution" and re.search(rf"//\s*(?:self\.)?{name}\b", text)
    ]
    if all(is_only_kept(subject, name) for name in names):
        return False
    sizes = replace(case.sizes, batch=12)
    case = replace(case, sizes=sizes, gradients=False)
    alone = runner.run(case)
    for rows, columns in ((2, 3), (2, 2)):  # some take squares alone
        call = runner.call, case.layout, rows, columns
        forms = (windows.in_one_image(subject, *call, grids) for grids in (False, True))
        ran = [runner.calling(form.call, form.subject).run(case) for form in forms]
        if alone.refused or any(run.refused for run in ran):
            continue
        if any(torch.allclose(alone.out, run.out) for run in ran):
            return False
        misplaced = any(_are_moved(alone, run) for run in ran)
        return WINDOWS_MISPLACED if misplaced else True
    return not alone.refused


def _are_moved(alone: Run, together: Run) -> bool:
    """Whether these are the same numbers in other places, perhaps beside a residual
    connection."""

    def numbers(run: Run, share: int) -> Tensor:
        query, is_image = run.arguments.tensors["query"], run.case.layout == cases.IMAGE
        pixels = query.flatten(2).mT if is_image else query.flatten(1, 2)
        added = share * pixels if pixels.shape == run.out.shape else 0
        return (run.out - added).flatten().sort().values

    return any(
        torch.allclose(numbers(alone, share), numbers(together, share))
        for share in (0, 1)
    )


def of_shift(runner: Runner, base: Run) -> Finding | None:
    """Whether what becomes of the first pixel comes out elsewhere, where windows are
    shifted; or whether they join it and the last rows or columns, and none in the middle.
    """
    built, text = runner.construction, text_of_file(runner.subject)
    if built is None or not built.takes("window") or built.shift_switch is None:
        return None
    if any("mask" in name.lower() for name in runner.call.roles):
        return None  # which callers make
    case = replace(base.case, built_shifted=True, gradients=False, mask=None)
    case = replace(case, sizes=cases.in_windows(case.sizes))
    side, is_image = case.sizes.columns, case.layout in cases.IMAGES
    if case.relation == "cross" or not (is_image or case.layout == cases.LAYER):
        return None
    plain, other = (arguments.make(runner.call, case) for _ in range(2))
    for sequence in again.sequences(other):
        pixels = sequence.movedim(1, -1) if case.layout == cases.IMAGE else sequence
        pixels[0, 0, 0 if is_image else ...].mul_(-1.7)
    before, after = (runner.run(case, given=made) for made in (plain, other))
    if before.refused or after.refused or before.out.shape != after.out.shape:
        return None
    changed = (after.out - before.out)[0]
    changed = changed.abs().amax(0 if case.layout == cases.IMAGE else -1) > _CHANGED
    if changed.numel() != side * side:
        return None
    changed = changed.view(side, side)
    if changed.any() and not changed[0, 0]:
        return SHIFT_NOT_UNDONE
    if _IS_ROUND.search(runner.subject.source) or not _MASKED.search(text):
        return None
    far = changed[-2:].any() or changed[:, -2:].any()
    return WRAPS_AROUND if far and not changed[2:-2, 2:-2].any() else None
