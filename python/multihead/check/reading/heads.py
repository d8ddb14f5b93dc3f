# SPDX-License-Identifier: MIT
"""How many heads code has: what tells it, else what the shapes on its way suggest."""

import math
from collections import Counter

from ..calls import cases
from ..capture.runner import Run
from ..subject.signature import Call


def known_heads(run: Run, call: Call, stated: int | None) -> int | None:
    """The number of heads: stated, given or counted by the code; None where nothing
    tells."""
    if stated:
        return stated
    layout = run.case.layout
    if layout in (cases.HEADS, cases.HEADS_LATER) or call.takes("num_heads"):
        return run.case.sizes.heads
    counted = call.bound.get("num_heads") or run.counted.get("num_heads")
    if not counted and layout in (cases.SINGLE, cases.FLAT):
        return 1
    return counted


def guessed_heads(run: Run) -> list[int]:
    """The numbers of heads that a run may have had, likeliest first: that of its
    scores, of axes (H, L, D) or (H, D) that make up the width, of slices of the
    width, and one."""
    embed, lengths = run.case.sizes.embed, (run.case.sizes.queries, run.case.keys)
    batch = 1 if cases.unbatched(run.case) else run.case.sizes.batch
    shapes = [tuple(tensor.shape) for tensor in run.recorder.trace]
    deep = [shape for shape in shapes if len(shape) >= 3]
    scores = [math.prod(s[:-2]) // batch for s in deep if s[-2:] == lengths][:1]
    cut = [
        count
        for s in deep
        if s[-2] in lengths
        for count in (s[-3], s[-3] // batch)
        if count * s[-1] == embed
    ]
    viewed = [s[-2] for s in deep if s[-2] * s[-1] == embed]
    narrow = [s for s in deep if s[-2] in lengths and embed % s[-1] == 0]
    sliced = Counter(embed // s[-1] for s in narrow if s[-1] < embed)
    # Queries, keys, values and context of each head, in a loop.
    looped = [count for count, seen in sliced.items() if seen >= 4 * count]
    several = [count for count in [*scores, *cut, *viewed, *looped] if count > 1]
    one = [1] if scores == [1] else []
    found = dict.fromkeys([*several, *one, *sliced, 1])
    return [count for count in found if embed % count == 0]
