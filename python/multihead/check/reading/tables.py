# SPDX-License-Identifier: MIT
"""Tables of relative positions in an image, as of Swin (Liu et al., 2021): a bias for each
offset of two pixels, of rows and of columns. What a query and a key have added follows
their offset alone, and another offset has another number. And tables of any positions
that no weight follows."""

import itertools
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ..calls import cases
from ..capture import weights
from ..capture.runner import Run, Runner
from ..report import Finding

MISREAD = Finding(
    "table_misread",
    "Its table of relative positions is read wrongly: pairs of pixels with one offset "
    "get different numbers, or pairs of different offsets one.",
    "Number offsets as (dy + h - 1) * (2 * w - 1) + dx + w - 1, and permute what the "
    "table gives, (L, L, heads), to (heads, L, L).",
)
# (2 * h - 1) * (2 * w - 1), (2 * size - 1) ** 2
_OF_OFFSETS = re.compile(
    r"\b2\s*\*\s*[\w.\[\]]+\s*-\s*1\)+\s*(?:\*\*\s*2|\*\s*\(\s*2\s*\*)"
)
# Of videos, a third axis; tokens that are no pixels; numbers that a layer makes of
# offsets.
_OF_THREE = re.compile(rf"{_OF_OFFSETS.pattern}[^\n]*\*\s*\(\s*2\s*\*", re.I)
_BESIDE = re.compile(
    r"cls|class_token|\+ ?3\b|prefix|register_tok|registers\b|latent|global|extra|"
    r"dist_|cpb|mlp\w*\([^\n]*(?:offset|coord|rel)|talking|log\w*coord",
    re.I,
)
_CLOSE, _MASKED = 1e-9, -50.0


def misread(runner: Runner, base: Run) -> Finding | None:
    text = runner.subject.source
    is_exact = base.case.dtype is torch.float64 and base.case.mask is None
    if base.recorder is None or not is_exact or cases.unbatched(base.case):
        return None
    if not _OF_OFFSETS.search(text) or _BESIDE.search(text):
        return None
    axes = 3 if _OF_THREE.search(text) else 2
    found = base.recorder.cores.found
    bias = found[0].bias if len(found) == 1 and found[0].is_biased else None
    if bias is None or bias.shape[-1] != bias.shape[-2] or not bias.isfinite().all():
        return None
    items = base.case.sizes.batch
    heads, rest = bias[: len(bias) // items], bias[len(bias) // items :]
    of_places = len(bias) % items == 0 and torch.allclose(
        heads.repeat(items - 1, 1, 1),
        rest,
        rtol=0,
        atol=_CLOSE * float(bias.abs().max()),
    )
    if items < 2 or not of_places:
        return None  # what else is added follows the sequence
    # A table that begins with few numbers tells nothing, nor does one with a mask.
    if any(len(one.unique()) < 4 for one in heads) or bias.min() < _MASKED:
        return None
    grids = list(_grids(bias.shape[-1], axes))
    fits = any(_follows(heads, grid) for grid in grids)
    return None if fits or not grids else MISREAD


def _grids(length: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Sizes of images, or of videos, of so many pixels; not of a line of them."""
    factors = [n for n in range(1, length) if length % n == 0]
    for sizes in itertools.product(factors, repeat=axes):
        if math.prod(sizes) == length and sum(n > 1 for n in sizes) > 1:
            yield sizes


def _follows(heads: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether each head's (L, L) has one number for each offset in such an image, and
    others for others."""
    offsets, count = torch.zeros((), dtype=torch.int64), 1
    for place, n in zip(
        torch.unravel_index(torch.arange(math.prod(sizes)), sizes), sizes
    ):
        width = 2 * n - 1
        offsets = offsets * width + place[:, None] - place[None, :] + n - 1
        count *= width
    offsets = offsets.flatten()
    for head in heads.flatten(1):
        first = torch.zeros(count, dtype=head.dtype).index_copy(0, offsets, head)
        size = head.abs().max()
        if (first[offsets] - head).abs().max() > _CLOSE * size:
            return False
        gaps = first.sort().values.diff()
        if gaps.min() < _CLOSE * size:
            return False
    return True


def bias_cancels(runs: list[Run]) -> Finding | None:
    """What is said of a learned bias of relative positions that no weight follows."""
    cancelled = [run.cancelled for run in runs if run.gradients]
    first = cancelled[0] if cancelled else {}
    names = [n for n in first if weights.is_of_positions(n)]
    if not names:
        return None
    return Finding(
        "bias_cancels",
        f"It adds what it reads from {' and '.join(f'`{n}`' for n in names)} to its "
        "scores, and no weight follows that: at all keys that a query sees the number is "
        "the same, which the softmax removes.",
        "Number positions as key minus query, or the other way round where the table wants "
        "that: with the wrong sign all keys before the query get one bucket.",
    )
