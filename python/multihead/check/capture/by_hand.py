# SPDX-License-Identifier: MIT
"""A backward pass that is written by hand, as layers in NumPy have it: whether what it
returns for the inputs is the gradient of what the forward pass computes, by differences
along random directions."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments
from ..report import Finding
from .runner import Run, Runner

BACKWARD_DIFFERS = Finding(
    "backward_differs",
    "What its backward pass returns for the inputs is not the gradient of what its "
    "forward pass computes.",
    "Compare each step with differences, (f(x + h) - f(x - h)) / 2h. The gradient of the "
    "scores is w * (dw - (dw * w).sum(-1)[..., None]), times their scale; that of an "
    "input is the sum of those that come of queries, keys and values.",
)
_NAMES = ("backward", "backward_pass", "backprop", "bprop")
_DIRECTIONS = 3
# By differences over 2h, in float64, of numbers around 1.
_STEP, _ALLOWED = 1e-5, 1e-5


def backward_differs(runner: Runner, base: Run) -> bool:
    """False, too, where there is none, or what it returns cannot be told."""
    case = replace(base.case, gradients=False, training=False)
    if case.dtype is not torch.float64:
        return False
    made = arguments.make(runner.call, case)
    target = runner.target_of(case, may_hang=True)[0]
    called = runner.callable_of(target)

    def forward() -> object:
        return runner.guard.call(called, *made.positional, **made.keywords).value

    torch.manual_seed(0)
    with torch.no_grad():
        returned = forward()
        backward, out = _backward_of(target, returned), _first(returned)
        if backward is None or out is None:
            return False
        dout = torch.randn_like(out)
        given = dout.numpy() if case.style.numpy else dout
        gradients = _arrays(runner.guard.call(backward, given).value)
        inputs = list(made.tensors.values())
        if [g.shape for g in gradients[: len(inputs)]] != [x.shape for x in inputs]:
            return False
        pairs = list(zip(inputs, gradients))
        return any(_is_off(forward, pairs, dout) for _ in range(_DIRECTIONS))


def _backward_of(target: object, returned: object) -> Callable | None:
    """That of a layer, which takes a gradient alone; or the function beside
    `attention_forward` that takes what this returns for it, too."""
    for name in _NAMES:
        method = getattr(target, name, None)
        if method is not None and _count(method) == 1:
            return method
    name = getattr(target, "__name__", "")
    beside = getattr(target, "__globals__", {}).get(name.replace("forward", "backward"))
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if "forward" not in name or not is_pair or _count(beside) != 2:
        return None
    return lambda dout: beside(dout, returned[1])


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
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [torch.as_tensor(part) for part in parts if hasattr(part, "shape")]


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

    ahead, behind = moved(_STEP), moved(-2 * _STEP)
    moved(_STEP)
    expected = (ahead - behind) / (2 * _STEP)
    got = sum(float((gradient * steps[x.data_ptr()]).sum()) for x, gradient in pairs)
    size = sum(float(gradient.norm()) for _, gradient in pairs) + abs(expected)
    return abs(got - expected) > _ALLOWED * size
