# SPDX-License-Identifier: MIT
"""Whether PyTorch's own layer is handed items in the place of positions, as without
batch_first, whatever the code makes of what it returns: a head for classes, a pooling,
a draw; and whether an item comes out otherwise alone.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from ..calls import arguments, cases
from ..calls.arguments import Arguments
from ..capture.runner import Run, Runner
from ..report import Finding
from . import again, flaws
from .layouts import written_batch_first

BATCH_COUNTS = Finding(
    "batch_size_counts",
    "An item gives something else alone than in a batch, where no item follows another: "
    "the number of items has a part in what is computed.",
    "Look at what is made of the batch's size, x.shape[0], beside shapes: a scale, "
    "positions that are counted once for each item, a sum over items.",
)

_UNKNOWN = object()


def differs_alone(runner: Runner, run: Run) -> bool:
    """Whether the last item of a batch gives something else in a batch of one. run: what
    came to its end."""
    case = replace(run.case, gradients=False)
    if case.layout != cases.LAYER or cases.unbatched(case) or case.style.numpy:
        return False
    alone = replace(case, sizes=replace(case.sizes, batch=1))
    made, one = (arguments.make(runner.call, c) for c in (case, alone))
    last = _of_last(made, one) if case.sizes.batch > 1 else None
    return last is not None and again.last_differs(runner, case, made, last)


def _of_last(made: Arguments, one: Arguments) -> Arguments | None:
    """A call with the last item of a batch, as one for a single item, and with what all
    items share; None where something else is given, of which that is not known."""
    for role, tensor in one.tensors.items():
        tensor.copy_(made.tensors[role][-1:])
    sequences = {tensor.data_ptr() for tensor in one.tensors.values()}

    def shared(many: object, single: object) -> object:
        if not isinstance(single, Tensor):
            is_known = single is None or isinstance(single, (bool, int, float, str))
            return single if is_known else _UNKNOWN
        if single.data_ptr() in sequences:
            return single
        assert isinstance(many, Tensor)
        part = many if many.shape == single.shape else many[-1:]
        return part.clone() if part.shape == single.shape else _UNKNOWN

    given = [shared(*pair) for pair in zip(made.positional, one.positional)]
    named = {name: shared(made.keywords[name], x) for name, x in one.keywords.items()}
    if any(x is _UNKNOWN for x in (*given, *named.values())):
        return None
    return replace(one, positional=given, keywords=named)


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
