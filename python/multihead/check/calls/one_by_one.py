# SPDX-License-Identifier: MIT
"""Code that takes one token at a time and keeps keys and values of those before it, as
some code for inference does: called once for each position, as one call with all.
"""

import functools
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..subject.signature import Call
from ..subject.target import Subject
from . import cases
from .forms import OF_POSITIONS, Form, called, formed

_BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_OF_MASKS = ("mask", "padding", "context_mask", "lengths")


def one_by_one(subject: Subject, call: Call) -> Iterator[Form]:
    """One position after the other, each told where it stands: with its own part of
    rotary tables, or with all of them. Of a batch, or of one item at a time."""
    sequence, position = call.parameter("x"), call.parameter("zero")
    if sequence is None or position is None or call.style != "x":
        return
    tables = [n for n, role in call.roles.items() if role in OF_POSITIONS]
    optional = {p.name for p in call.parameters if p.default is not p.empty}
    # No query sees a later key anyway.
    left_out = {
        n for n, role in call.roles.items() if role in _OF_MASKS and n in optional
    }

    def how(target: object, /, cuts: bool, **given: object) -> Tensor:
        whole = given[sequence]
        assert isinstance(whole, Tensor)
        outputs = []
        with _Joined() as joined:
            for at in range(whole.shape[1]):
                part = {**given, sequence: whole[:, at : at + 1], position: at}
                for name in tables if cuts else ():
                    part[name] = _row(given[name], at)
                returned = called(subject, target, part)
                several = isinstance(returned, (tuple, list))
                outputs.append(returned[0] if several else returned)
                joined.end_step()
        joined.join()
        return torch.cat(outputs, 1)

    parameters = [
        p.replace(kind=_BY_KEYWORD)
        for p in call.parameters
        if p.name != position and p.name not in left_out
    ]
    for batch in (None, 1):
        for cuts in (True, False) if tables else (False,):
            one = functools.partial(how, cuts=cuts)
            said = f"{sequence} one token after the other, {position} = 0, 1, …"
            form = formed(subject, parameters, one, (cases.LAYER,), said)
            one.is_stepwise = True  # type: ignore[attr-defined]
            form.batch, form.fact = batch, "stepwise"
            yield form


def is_stepwise(subject: Subject) -> bool:
    """Whether it is called in that form."""
    return getattr(subject.how, "is_stepwise", False)


def _row(table: object, at: int) -> object:
    """What a table (L, …), a tuple of such or numbers (B, L) have for one position."""
    if isinstance(table, (tuple, list)):
        return type(table)(_row(part, at) for part in table)
    if not isinstance(table, Tensor):
        return table
    is_numbers = not table.is_floating_point() and not table.is_complex()
    axis = table.dim() - 1 if is_numbers else 0
    return table.narrow(axis, at, 1)


class _Joined(TorchDispatchMode):
    """Collects what PyTorch computes in each step, and then joins what each step has
    of one position, (B, 1, …) or (B, H, 1, D), as one call with all positions has it:
    so that who watches sees heads, and what is done to them."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[dict[tuple, list[Tensor]]] = [{}]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports torch._dynamo, which takes two seconds

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            kind = function.overloadpacket.__name__, result.shape
            self._steps[-1].setdefault(kind, []).append(result)
        return result

    def end_step(self) -> None:
        self._steps.append({})

    def join(self) -> None:
        first, *others = (step for step in self._steps if step)
        for kind, tensors in first.items():
            axis = next((i for i in (1, 2) if kind[1][i : i + 1] == (1,)), None)
            of_steps = [tensors, *(step.get(kind, []) for step in others)]
            if axis is None or len({len(found) for found in of_steps}) > 1:
                continue
            for parts in zip(*of_steps):
                torch.cat([tensor.detach() for tensor in parts], axis)
