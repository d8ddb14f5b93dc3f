# SPDX-License-Identifier: MIT
"""Code whose queries are its own, learned: pooling by attention, the seeds of a set
transformer, the latents of a perceiver, labels that attend. It is called with queries
of ours in the place of those that it learned, so that all of it can be judged.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator

from torch import Tensor, nn

from ..subject.signature import Call
from ..subject.target import Subject
from . import cases
from .forms import Form, called, formed

# How many vectors it returns for each item, as complaints say.
_SOME = re.compile(
    r"returns (?:(one) vector|(\d+) vectors)|shape \(\d+, (\d+), \d+\) for"
)
# What holds numbers of its own that are no queries; an embedding may hold them.
_LAYERS = (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RMSNorm)
_BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_learned_queries(
    subject: Subject, call: Call, complaints: str = ""
) -> Iterator[Form]:
    """complaints: what it says of other forms, which tells how many it has."""
    sequence, found = call.parameter("x"), _SOME.search(complaints)
    if sequence is None or call.style != "x" or found is None:
        return
    count = 1 if found[1] else int(found[2] or found[3])

    def how(target: object, /, place: int, query: Tensor, **given: object) -> object:
        if not query.equal(query[:1].expand_as(query)):
            raise ValueError("all items have the same queries")
        query = query[:1]
        with _in_place_of(_learned(target, query)[place:], query):
            returned = called(subject, target, given)
        if isinstance(returned, (tuple, list)):
            return tuple(map(_of_queries, returned))
        return _of_queries(returned)

    parameters = [inspect.Parameter("query", _BY_KEYWORD)]
    parameters += [p.replace(kind=_BY_KEYWORD) for p in call.parameters]
    for place in (0, 1):
        one = functools.partial(how, place=place)
        one.has_no_gradients = True  # of the items' own queries, which are one
        said = "queries of ours for those that it learns, the same for all items"
        form = formed(subject, parameters, one, (cases.LAYER,), said)
        form.shares_queries, form.queries = True, count
        yield form


def _of_queries(returned: object) -> object:
    """(B, E) of one query as (B, 1, E)."""
    is_one = isinstance(returned, Tensor) and returned.dim() == 2
    return returned.unsqueeze(1) if is_one else returned  # type: ignore[union-attr]


def _learned(target: object, query: Tensor) -> list[tuple[nn.Module, str]]:
    """The parameters that may be queries: as many numbers, and no matrix of a layer."""
    parts = target.modules() if isinstance(target, nn.Module) else ()
    return [
        (part, name)
        for part in parts
        if not isinstance(part, _LAYERS)
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.numel() == query.numel() and query.shape[-1] in parameter.shape
    ]


@contextlib.contextmanager
def _in_place_of(learned: list[tuple[nn.Module, str]], query: Tensor) -> Iterator[None]:
    """The first of these parameters is the query, for a while."""
    if not learned:
        raise ValueError("it has no such queries")
    owner, name = learned[0]
    known = dict(owner._parameters)
    parameter = owner._parameters.pop(name)
    assert parameter is not None
    setattr(owner, name, query.reshape(parameter.shape))
    try:
        yield
    finally:
        delattr(owner, name)
        owner._parameters.clear()
        owner._parameters.update(known)  # in the same order
