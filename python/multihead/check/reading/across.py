# SPDX-License-Identifier: MIT
"""Whether PyTorch's own layer is handed items in the place of positions, as without
batch_first, whatever the code makes of what it returns: a head for classes, a pooling,
a draw.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from ..calls import arguments, cases
from ..capture.runner import Run, Runner
from . import again, flaws
from .layouts import written_batch_first


def attends_over_items(runner: Runner, run: Run) -> bool:
    """Whether queries of other items are those beside a query, along the axis of
    positions: with another last item they change there alone. run: what came to its
    end."""
    case = replace(run.case, gradients=False)
    if case.layout not in (cases.LAYER, *cases.IMAGES) or cases.unbatched(case):
        return False
    if case.style.numpy or flaws.works_across_items(runner.subject):
        return False
    # Else (L, B, E) may be meant.
    is_told = run.pooled is not None or case.layout in cases.IMAGES
    if not is_told and not written_batch_first(runner.subject):
        return False
    target, _ = runner.target_of(case, may_hang=True)
    if not isinstance(target, nn.Module):
        return False
    made = arguments.make(runner.call, case)
    with _queries(target) as before:
        runner.run(case, given=made)
    again.draw_last_item(made)
    with _queries(target) as after:
        runner.run(case, given=made)
    return any(map(_are_items, before[:1], after[:1]))


def _are_items(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape or before.dim() != 3 or before.shape[1] == 1:
        return False
    changed = (before != after).any(-1)
    along, beside = changed.any(1), changed.any(0)
    return bool(beside.all() and along.any() and not along.all())


@contextlib.contextmanager
def _queries(target: nn.Module) -> Iterator[list[Tensor]]:
    """What layers that take (L, B, E) are handed as queries, call by call."""
    seen: list[Tensor] = []

    def note(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        query = args[0] if args else kwargs.get("query")
        if isinstance(query, Tensor):
            seen.append(query.detach().clone())

    layers = (m for m in target.modules() if isinstance(m, nn.MultiheadAttention))
    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True)
        for layer in layers
        if not layer.batch_first
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
