# SPDX-License-Identifier: MIT
"""Masks that code takes by chance, of other shapes or meanings than the one that it is
for: what is wrong with these alone is judged without them."""

from ..capture.runner import Run
from ..subject.masking import makes_causal_masks
from .apart import Judge
from .ways import Reading


def judge(reading: Reading, kept: list[Run], judged: Judge) -> None:
    """The verdict on the masks that it is for, if it has a fault with the others."""
    call, subject = reading.way.call, reading.way.runner.subject
    faults = set(reading.faults)
    if faults == {"mask_inverted", "padding_inverted"} and not call.takes("padding"):
        # One parameter, for padding.
        judged(reading, [run for run in kept if "mask" not in run.arguments.masks])
    if faults == {"mask_taken_for_causal"} and makes_causal_masks(call, subject):
        reading.takes_causal_masks = True
        judged(reading, [run for run in kept if run.case.mask is None])
