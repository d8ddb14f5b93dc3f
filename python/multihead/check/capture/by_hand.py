# SPDX-License-Identifier: MIT
"""A backward pass that is written by hand, as layers in NumPy have it: whether what it
returns for the inputs is the gradient of what the forward pass computes, by differences
along random directions."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments
from ..calls.cases import Case
from ..report import Finding
from .record import copied
from .runner import Run, Runner
from .surroundings import settings

BACKWARD_DIFFERS = Finding(
    "backward_differs",
    "What its backward pass returns for the inputs is not the gradient of what its "
    "forward pass computes.",
    "Compare each step with differences, (f(x + h) - f(x - h)) / 2h. The gradient of the "
    "scores is w * (dw - (dw * w).sum(-1)[..., None]), times their scale; that of an "
    "input is the sum of those that come of queries, keys and values.",
)
_DIRECTIONS = 3
# By differences over 2h, in float64, of numbers around 1.
_STEP, _ALLOWED = 1e-5, 1e-5


def of_backward(runner: Runner, base: Run) -> Finding | None:
    """What is to be said of a backward pass, if there is one: that it differs, or why it
    was not compared. One that raises may need queries that are as many as keys."""
    # It is for training: with what is dropped, which is the same in each call.
    case = replace(base.case, gradients=False, training=True)
    subject = runner.subject
    if subject.own_backward is None and _beside(subject.target) is None:
        return None
    with torch.no_grad():
        found, why = _compared(runner, case)
        if why and case.relation == "cross":
            found, why = _compared(runner, replace(case, relation="equal"))
    if not why:
        return BACKWARD_DIFFERS if found else None
    sentence = f"Its backward pass was not compared with its forward pass: {why}"
    return Finding("limit", sentence, kind="limit")


def _compared(runner: Runner, case: Case) -> tuple[bool, str]:
    """Whether it differs; or why that cannot be told."""
    made = arguments.make(runner.call, case)
    target = copied(runner.target_of(case, may_hang=True)[0])
    trained = copied(target)  # backward passes may take a step, too

    def forward(of: object = target) -> object:
        called = runner.callable_of(of)
        with settings(case, seed=0):
            return runner.guard.call(called, *made.positional, **made.keywords).value

    returned = forward(trained)
    backward = _backward_of(trained, runner.subject.own_backward, returned)
    out = _first(returned)
    again = _first(forward())
    if backward is None or out is None or again is None:
        return False, "how it is called is not known."
    if not torch.equal(out, again):
        return False, "two forward passes differ."
    torch.manual_seed(0)
    dout = torch.randn_like(out)
    given = dout.clone()  # it may be overwritten
    outcome = runner.guard.call(backward, given.numpy() if case.style.numpy else given)
    if outcome.error is not None:
        return False, f"it raises {outcome.findings[0].sentence}"
    gradients, inputs = _arrays(outcome.value), list(made.tensors.values())
    if any(t.dtype is not torch.float64 for t in (out, *gradients)):
        return False, "it computes in float32, in which differences tell little."
    # In whatever order they come.
    orders = [
        list(zip(inputs, order))
        for order in itertools.permutations(gradients[: len(inputs)])
        if [g.shape for g in order] == [x.shape for x in inputs]
    ]
    if not orders:
        return False, "it returns no gradient in the shape of each input."
    return all(
        any(_is_off(forward, pairs, dout) for _ in range(_DIRECTIONS))
        for pairs in orders
    ), ""


def _backward_of(target: object, name: str | None, returned: object) -> Callable | None:
    """That of a layer, by its name, which takes a gradient alone; or the function beside
    `attention_forward` that takes what this returns for it, too."""
    if name is not None:
        method = getattr(target, name)
        return method if _count(method) == 1 else None
    beside = _beside(target)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if beside is None or not is_pair or _count(beside) != 2:
        return None
    return lambda dout: beside(dout, returned[1])


def _beside(function: object) -> Callable | None:
    name = getattr(function, "__name__", "")
    known = getattr(function, "__globals__", {})
    return known.get(name.replace("forward", "backward")) if "forward" in name else None


def _count(function: object) -> int:
    """How many arguments it must be given."""
    try:
        taken = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0
    return sum(
        p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in taken
    )


def _arrays(returned: object) -> list[Tensor]:
    """The tensors and arrays, alone or in a tuple, a list or a dictionary."""
    several = list(returned.values()) if isinstance(returned, dict) else returned
    parts = several if isinstance(several, (tuple, list)) else (returned,)
    kinds = ("torch", "numpy")
    arrays = [p for p in parts if type(p).__module__ in kinds and hasattr(p, "shape")]
    return [torch.as_tensor(array) for array in arrays]


def _first(returned: object) -> Tensor | None:
    return next(iter(_arrays(returned)), None)


def _is_off(
    forward: Callable[[], object], pairs: list[tuple[Tensor, Tensor]], dout: Tensor
) -> bool:
    """Along one direction. pairs: inputs, some of which may be one tensor, with what the
    backward pass returns for each."""
    inputs = {x.data_ptr(): x for x, _ in pairs}
    steps = {place: torch.randn_like(x) for place, x in inputs.items()}

    def moved(by: float) -> float:
        for place, x in inputs.items():
            x += by * steps[place]
        out = _first(forward())
        return float("nan") if out is None else float((out * dout).sum())

    def slope(step: float) -> float:
        ahead, behind = moved(step), moved(-2 * step)
        moved(step)
        return (ahead - behind) / (2 * step)

    expected, wide = slope(_STEP), slope(10 * _STEP)
    got = sum(float((gradient * steps[x.data_ptr()]).sum()) for x, gradient in pairs)
    size = sum(float(gradient.norm()) for _, gradient in pairs) + abs(expected)
    # What is rounded on the way, to float32 perhaps, gives another slope each time.
    is_smooth = abs(wide - expected) <= _ALLOWED * size
    return is_smooth and abs(got - expected) > _ALLOWED * size
