# SPDX-License-Identifier: MIT
"""All faults that are planted, and why the others of the engine are not."""

from .faults import FAULTS as COMMON
from .faults import Fault, has_heads, is_torch
from .further import FURTHER
from .program import Steps
from .spec import Spec

FAULTS = [*COMMON, *FURTHER]

# Of sizes that no program has: all heads together are as wide as the inputs, and
# values as queries.
OTHER_SIZES = ("scale_by_all_heads", "scale_by_value_width")


def _padded(s: Spec) -> bool:
    return is_torch(s) and s.mask == "padding"


def _spread(axes: str):
    def plant(p: Steps) -> None:
        p.mask = [line.replace("[:, None, None, :]", axes) for line in p.mask]

    return plant


# These raise at the sizes of the programs: only at others can they go unseen.
RAISING = [
    # As many items as heads.
    Fault(("mask_batch_as_heads",), _padded, _spread("[None, :, None, :]")),
    # As many items as queries.
    Fault(("mask_batch_as_queries",), _padded, _spread("[None, None, :, :]")),
    # An output layer that takes one head.
    Fault(
        ("heads_averaged_together",),
        lambda s: is_torch(s) and has_heads(s),
        lambda p: setattr(p, "merge", "context.mean(1)"),
    ),
]
