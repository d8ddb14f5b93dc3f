# SPDX-License-Identifier: MIT
"""What a call returned, taken for the output and the weights of attention."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..calls.cases import Case, as_sequence
from ..report import Finding


class Unfit(Exception):
    """What came back cannot be an output of attention; holds the finding."""

    def __init__(self, name: str, sentence: str, remedy: str):
        super().__init__(sentence)
        self.finding = Finding(name, sentence, remedy)


def split(
    returned: object, case: Case, query: Tensor, any_width: bool
) -> tuple[Tensor, Tensor | None]:
    """The output, with its features last, and, if there are any, the attention
    weights. any_width: the width of the output is not known. Raises Unfit."""
    if returned is None:
        raise Unfit(
            "returns_nothing",
            "It returns None.",
            "Does the function end with a return statement, on every path?",
        )
    tensors = [t for t in map(_tensor, _parts(returned)) if t is not None]
    if not tensors:
        name = type(returned).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise Unfit(
            "wrong_type",
            f"It returns {article} {name} where a tensor is expected.",
            "Return the output as a tensor, alone or first in a tuple.",
        )
    for tensor in tensors:
        if kind := _kind(tensor):
            raise Unfit(
                "wrong_type",
                f"It returns {kind} where a plain tensor of real numbers is expected.",
                "Return the output as a dense tensor in the type of the query.",
            )
    rows = as_sequence(query, case).shape[:-1]
    sequences = [as_sequence(t, case) for t in tensors]
    fitting = [t for t in sequences if t.shape[:-1] == rows and t.dim() > 1]
    widths = {case.sizes.embed, case.sizes.out, case.sizes.head_dim}
    exact = [t for t in fitting if t.shape[-1] in widths]
    if not exact:  # as wide as some heads together, if that is known
        wide = 1 if any_width else case.sizes.head_dim
        fitting = [t for t in fitting if t.shape[-1] % wide == 0]
        fitting = [t for t in fitting if t.shape[-1] != case.keys]
    if not fitting:
        raise _wrong_shape(tensors[0], query, case.keys)
    out = (exact or fitting)[0]
    if not out.is_floating_point():
        kind = str(out.dtype).removeprefix("torch.")
        raise Unfit(
            "integer_output",
            f"The output is of type {kind}; averages of values are not whole numbers.",
            "Compute in floating point from the scores on.",
        )
    pairs = (case.sizes.queries, case.keys)
    weights = [
        t
        for t, sequence in zip(tensors, sequences)
        if sequence is not out and 2 <= t.dim() <= 4 and tuple(t.shape[-2:]) == pairs
    ]
    return out, weights[0] if weights and weights[0].is_floating_point() else None


def _parts(returned: object) -> Iterator[object]:
    if isinstance(returned, dict) and type(returned) is not dict:
        yield from returned.values()  # as the models of Transformers return
    elif isinstance(returned, (list, tuple)):
        yield from returned
    else:
        yield returned


def _tensor(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    with contextlib.suppress(TypeError):  # a dtype that torch lacks
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 0):
            return torch.from_numpy(value.copy())
    return None


def _kind(tensor: Tensor) -> str:
    """What a tensor is that nothing can be compared with; empty for others."""
    kinds = {
        "a nested tensor": tensor.is_nested,
        "a sparse tensor": tensor.layout is not torch.strided,
        "a quantized tensor": tensor.is_quantized,
        "complex numbers": tensor.is_complex(),
        f"a tensor on the device {tensor.device.type!r}": tensor.device.type != "cpu",
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def _wrong_shape(got: Tensor, query: Tensor, keys: int) -> Unfit:
    expected = tuple(query.shape)
    shape = tuple(got.shape)
    hint = "Each query gets one output: all sizes but the last are those of the query."
    if got.dim() > 1 and shape[-2:] == (expected[-2], keys):
        hint = "These may be the weights: what comes out is `weights @ v`."
    elif got.dim() == len(expected) + 1:
        hint += " Here the heads are still apart: they are merged into one axis last."
    elif sorted(shape) == sorted(expected):
        hint += " Here two axes are exchanged."
    return Unfit(
        "wrong_shape",
        f"It returns shape {shape} for a query of shape {expected}.",
        hint,
    )
