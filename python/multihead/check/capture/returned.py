# SPDX-License-Identifier: MIT
"""What a call returned, taken for the output and the weights of attention."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from ..calls.cases import (
    HEADS,
    HEADS_LATER,
    IMAGE,
    IMAGES,
    LAYER,
    UNBATCHED,
    Case,
    as_sequence,
    query_axis,
)
from ..report import Finding
from ..subject.signature import Call
from .record import Recorder

OF_ONE_SEQUENCE = (LAYER, *IMAGES)
_OUTPUT = re.compile(r"x|y|z|h|out(put)?s?|.*_out(put)?|context|hidden\w*|result")
# Beside the output, by its name: `return self.out(wv), qk`.
RETURNS_SCORES = re.compile(r"^\s*return \S[^\n]*, \(?(qk|logits|sim)\)?\s*$", re.M)


class Unfit(Exception):
    """What came back cannot be an output of attention; holds the finding."""

    def __init__(
        self,
        name: str,
        sentence: str,
        remedy: str,
        shape: tuple = (),
        kind: str = "failure",
    ):
        super().__init__(sentence)
        self.finding = Finding(name, sentence, remedy, kind=kind)
        self.shape = shape

    def of_one_sequence(self, case: Case) -> Finding:
        """The same of a module that is given one: it may pool what comes in."""
        sizes, shape = case.sizes, self.shape
        if case.layout in IMAGES and len(shape) == 4:
            shape = as_sequence(torch.empty(shape), case).shape
        own = (sizes.heads, sizes.head_dim, sizes.queries * sizes.heads)
        of_some = len(shape) == 3 and shape[1] not in own and shape[1] % sizes.queries
        some = f"{shape[1]} vectors" if len(shape) == 3 else "one vector"
        few = "fewer than" if len(shape) < len(self.shape) else "however many"
        # A head behind it returns as many numbers as there are classes.
        classes = len(shape) == 2 and shape[1] < sizes.embed and shape[1] not in own
        classes = classes and shape[1] not in (sizes.queries, sizes.out)
        if len(shape) != 2 and not of_some:
            return self.finding
        if shape[0] != sizes.batch or (shape[-1] != sizes.embed and not classes):
            return self.finding
        return Finding(
            "pools",
            f"It returns {some} for each item, {few} come in, as pooling does: "
            "what asks is its own, and not judged.",
            "Check the attention inside, which is handed its queries.",
            kind="unchecked",
        )


def pooled(found: Finding, returned: object) -> Tensor | None:
    """A vector for each item, where that is what was found to come back."""
    is_one = found.name == "pools" and isinstance(returned, Tensor)
    return returned.detach() if is_one else None


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
    if not tensors and isinstance(returned, (list, tuple)):  # of several calls, perhaps
        inner = itertools.chain.from_iterable(map(_parts, returned))
        tensors = [t for t in map(_tensor, inner) if t is not None]
    if not tensors:
        name = type(returned).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise Unfit(
            "wrong_type",
            f"It returns {article} {name} where a tensor is expected.",
            "Return the output as a tensor, alone or first in a tuple.",
            # Of steps, as a benchmark has them: nobody writes that by mistake.
            kind="unchecked" if name == "generator" else "failure",
        )
    _check_kinds(tensors)
    rows = as_sequence(query, case).shape[:-1]
    if case.layout == IMAGE:
        tensors = [_channels_first(t, query) for t in tensors]
    if case.layout == UNBATCHED:
        tensors = [_of_one_item(t, query) for t in tensors]
    sequences = [as_sequence(t, case) for t in tensors]
    fitting = [t for t in sequences if t.shape[:-1] == rows and t.dim() > 1]
    if isinstance(returned, dict):  # which may hold what came in, too
        given = as_sequence(query, case).data_ptr()
        fitting = [t for t in fitting if t.data_ptr() != given] or fitting
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
    weights = [t for t in weights if t.is_floating_point()]
    shares = [t for t in weights if _are_shares(t)]
    return out, next(iter(shares or weights), None)


def _check_kinds(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if kind := _kind(tensor):
            raise Unfit(
                "wrong_type",
                f"It returns {kind} where a plain tensor of real numbers is expected.",
                "Return the output as a dense tensor in the type of the query.",
            )


def _of_one_item(tensor: Tensor, query: Tensor) -> Tensor:
    """(L, E) of what comes back with an axis for one item, (1, L, E) or (L, 1, E)."""
    for axis in (0, 1):
        if tensor.dim() == 3 and tensor.shape[axis] == 1:
            if tensor.shape[1 - axis] == len(query):
                return tensor.squeeze(axis)
    return tensor


def _channels_first(tensor: Tensor, query: Tensor) -> Tensor:
    """An image with its channels first, which may come back with its channels last."""
    last = tensor.dim() == 4 and tensor.shape == query.permute(0, 2, 3, 1).shape
    is_other = last and tensor.shape != query.shape
    return tensor.permute(0, 3, 1, 2) if is_other else tensor


def _are_shares(tensor: Tensor) -> bool:
    """Whether all rows add up to 1."""
    sums = tensor.detach().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def of_others(returned: object, out: Tensor, recorder: Recorder) -> set[int]:
    """The storages of weights that have a part in what comes back beside the output, as
    in the edges of a graph, and none in the output."""
    tensors = [t for t in map(_tensor, _parts(returned)) if t is not None]

    def weights(*made: Tensor) -> set[int]:
        return {key for t in made for key, _ in recorder.origin(t).weights}

    return weights(*tensors) - weights(out)


def _parts(returned: object, depth: int = 3) -> Iterator[object]:
    """The values in what came back, the likeliest output first."""
    if depth == 0:
        return
    if dataclasses.is_dataclass(returned) or type(returned) is SimpleNamespace:
        returned = dict(vars(returned))
    if isinstance(returned, dict):
        values, made_for_it = list(returned.values()), type(returned) is not dict
        named = [v for n, v in returned.items() if _OUTPUT.fullmatch(str(n).lower())]
        # Results of Transformers begin with the output; others keep steps in order.
        for value in [*named, *(values if made_for_it else values[::-1])]:
            yield from _parts(value, depth - 1)
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
    exchanged = sorted(shape) == sorted(expected)
    if exchanged:
        hint += " Here axes are exchanged."
    return Unfit(
        "wrong_shape",
        f"It returns shape {shape} for a query of shape {expected}.",
        hint,
        shape,
        # Of four axes it may be meant: an image's channels, or its heads, go last.
        "unchecked"
        if exchanged and shape[:1] == expected[:1] and got.dim() == 4
        else "failure",
    )


def as_queries_came(returned: object, query: Tensor, case: Case, call: Call) -> object:
    """What came back in the order of its queries: heads and positions may go out the
    other way round, as Transformers' attention functions hand them on to be merged. Then
    they do so in each call, which `call` keeps."""
    if call.style == "x" and case.layout in OF_ONE_SEQUENCE:
        return _without_rest(returned, query, case)
    out, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
    if case.layout not in (HEADS, HEADS_LATER) or not isinstance(out, Tensor):
        return returned
    if (
        out.is_nested
        or out.dim() != 4
        or out.shape[:3] != query.transpose(1, 2).shape[:3]
    ):
        return returned
    call.exchanges = call.exchanges or out.shape[1] != out.shape[2]
    out = out.transpose(1, 2) if call.exchanges else out
    return (out, *rest) if isinstance(returned, tuple) else out


def _without_rest(returned: object, query: Tensor, case: Case) -> object:
    """The first position of an output alone, where the rest of the sequence is handed on
    as it came, as class attention does (CaiT; XCiT's): it answers the first."""
    axis = query_axis(case)
    is_plain = isinstance(returned, Tensor) and not returned.is_nested
    is_like = is_plain and returned.shape == query.shape
    if not is_like or query.dim() != 3 or query.shape[axis] == 1:
        return returned
    rest = (t.narrow(axis, 1, t.shape[axis] - 1) for t in (returned, query))
    first = returned.narrow(axis, 0, 1)
    is_new = not torch.equal(first, query.narrow(axis, 0, 1))
    return first if is_new and torch.equal(*rest) else returned


def position_that_asks(recorder: Recorder, query: Tensor, axis: int) -> int:
    """The last, if it alone was taken out of the sequence or of what became of it;
    else the first."""
    plain = [t for t in recorder.alive if _is_like(t, query)]
    shape = query.shape[:2]
    for whole in (t for t in plain if t.dim() > 2 and t.shape[:2] == shape):
        first, last = (whole.narrow(axis, p, 1).flatten() for p in (0, -1))
        ones = [t.flatten() for t in plain if t.numel() == first.numel()]
        if any(torch.equal(one, first) for one in ones):
            return 0
        if any(torch.equal(one, last) for one in ones):
            return -1
    return 0


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    kinds = ("dtype", "device", "layout")
    return all(getattr(tensor, kind) == getattr(other, kind) for kind in kinds)


def has_weights(trace: list[Tensor], like: Tensor) -> bool:
    """Whether weights of this shape were computed, whose rows add up to 1."""
    return any(
        x.numel() == like.numel()
        and x.shape[-2:] == like.shape[-2:]
        and bool(((x.sum(-1) - 1).abs() < 1e-3).all())
        for x in trace
    )
