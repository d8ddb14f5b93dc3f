# SPDX-License-Identifier: MIT
"""What code adds to its scores or to its output and insists on being given, as Bloom
the bias of its positions and its residual: zeros change nothing, and all else can be
judged."""

import inspect
from collections.abc import Iterator

from torch import Tensor, nn

from ..subject.signature import Call
from ..subject.target import Subject
from ..subject.words import is_position_bias, words
from .asked import size_of
from .forms import Form, called, formed

_BESIDE = {"residual", "identity", "shortcut", "skip"}
# B items, H heads, L positions.
_SHAPES = (
    "(B * H, 1, L)",
    "(B, H, 1, L)",
    "(B, H, L, L)",
    "(H, L, L)",
    "(B * H, L, L)",
)


def with_zeros(subject: Subject, call: Call) -> Iterator[Form]:
    """In each shape that a bias of positions may have."""
    sequence = call.parameter("x") or call.parameter("query")
    unknown = [
        p.name
        for p in call.parameters
        if p.default is p.empty
        and (call.roles[p.name] is None or p.name in call.guessed)
    ]
    beside = [n for n in unknown if set(words(n)) & _BESIDE]
    biases = [n for n in unknown if is_position_bias(n) or "alibi" in words(n)]
    if sequence is None or not beside + biases:
        return
    for shape in _SHAPES if biases else ("",):
        yield _form(subject, call, sequence, beside, biases, shape)


def _form(
    subject: Subject,
    call: Call,
    sequence: str,
    beside: list[str],
    biases: list[str],
    shape: str,
) -> Form:
    def how(target: object, /, **given: object) -> object:
        whole = given[sequence]
        if not isinstance(whole, Tensor) or whole.dim() != 3:
            raise ValueError("it takes no sequence")
        given |= {name: whole.new_zeros(whole.shape) for name in beside}
        if biases:
            sizes = _sizes(shape, target, *whole.shape[:2])
            given |= {name: whole.new_zeros(sizes) for name in biases}
        return called(subject, target, given)

    names = [*beside, *biases]
    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in names
    ]
    of_shape = f", {shape}" if biases else ""
    said = f"{', '.join(names)} given as zeros{of_shape}, which change nothing"
    return formed(subject, parameters, how, (), said)


def _sizes(shape: str, target: object, batch: int, length: int) -> list[int]:
    counts = vars(target).items() if isinstance(target, nn.Module) else ()
    heads = [n for name, n in counts if type(n) is int and size_of(name) == "num_heads"]
    if not heads:
        raise ValueError("how many heads it has is not known")
    known = {"B": batch, "H": heads[0], "L": length, "1": 1}
    known["B * H"] = batch * heads[0]
    return [known[axis] for axis in shape.strip("()").split(", ")]
