# SPDX-License-Identifier: MIT
"""The same call once more, with something changed in what it is given: what follows the
change shows what reads what, whatever computes it."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..calls import arguments
from ..calls.arguments import Arguments
from ..calls.cases import Case
from ..capture.runner import Run, Runner

ALL = ("query", "key", "value")
_CLOSE = 1e-5  # of numbers that float32 rounds on the way


def sequences(made: Arguments, roles: tuple[str, ...] = ALL) -> list[Tensor]:
    """Those that are given, each once: one tensor may be queries, keys and values."""
    given = [made.tensors[role] for role in roles if role in made.tensors]
    return list({tensor.data_ptr(): tensor for tensor in given}.values())


def draw_last_item(made: Arguments) -> None:
    """Another last item, where the first axis is that of items."""
    for sequence in sequences(made):
        draw_item(sequence)


def draw_item(sequence: Tensor) -> None:
    """Another last item, in place."""
    sequence[-1].copy_(torch.randn_like(sequence[-1]))


def last_differs(
    runner: Runner, case: Case, many: Arguments, single: Arguments
) -> bool:
    """Whether the last along the first axis of `many` gives something else than
    `single`, which has it alone, on the same instance."""
    runs = [runner.run(case, given=made) for made in (many, single)]
    if any(run.refused for run in runs):
        return False
    last, one = runs[0].out[-1:], runs[1].out
    is_close = last.shape == one.shape and torch.allclose(
        last, one, _CLOSE, _CLOSE, equal_nan=True
    )
    return last.shape == one.shape and not is_close


def twice(
    runner: Runner,
    case: Case,
    change: Callable[[Tensor], None],
    roles: tuple[str, ...] = ALL,
) -> tuple[Run, Run] | None:
    """A run, and one after `change` of its sequences of these roles, in place; None where one of them
    is refused, or their outputs have different shapes."""
    made = arguments.make(runner.call, case)
    before = runner.run(case, given=made)
    for sequence in sequences(made, roles):
        change(sequence)
    after = runner.run(case, given=made)
    if before.refused or after.refused or before.out.shape != after.out.shape:
        return None
    return before, after
