# SPDX-License-Identifier: MIT
"""Code that takes more beside its sequence: a vector for each item, as blocks of
diffusion models take the time and the class, features of each pair of positions, as
those of proteins and graphs, places in space, or sequences that nobody understands."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..subject.roles import normal
from ..subject.signature import Call
from ..subject.target import Subject
from ..subject.words import OF_QUERIES, words
from . import cases
from .forms import Form, called, formed

# Letters and words of its name.
_LETTERS = {"c", "t", "s", "w", "y", "z"}
_WORDS = {"cond", "conds", "condition", "conditions", "conditioning", "temb", "time"}
_WORDS |= {"timestep", "timesteps", "style", "adaln", "modulation", "vec", "cemb"}
_SHAPES = ("(B, E)", "(B, 1, E)", "(B,)")
_PAIRS = {"z", "pair", "pairs", "edge", "edges", "pairwise"}
_ROWS = 2  # of an image that asks
_PLACES = {"coord", "coords", "coordinates", "xyz", "points", "pos", "positions"}


def conditioned(subject: Subject, call: Call) -> Iterator[Form]:
    """With a vector of the sequence's width, (B, E) or (B, 1, E), or a number, (B,);
    where that is a context, the code makes several keys of it."""
    sequence = call.parameter("x") or call.parameter("query")
    context = call.parameter("context")
    if sequence is None:
        return
    others = [p for p in call.parameters if p.name != sequence]
    others = [p.name for p in others if p.default in (p.empty, None)]

    def of(known: set[str]) -> list[str]:
        return [n for n in others if normal(n) in known or set(words(n)) & known]

    named = of(_LETTERS | _WORDS)
    if not named and context is not None:
        said = f"{context} taken for a vector for each item, (B, E)"
        yield _filled(subject, call, sequence, [context], _mean, said)
    for shape in _SHAPES if named else ():
        said = f"{', '.join(named)} taken for a vector for each item, {shape}"
        vector = functools.partial(_vector, shape=shape)
        yield _filled(subject, call, sequence, named, vector, said)
    for names, made, kind in (
        (of(_PAIRS), _of_pairs, "the features of each pair of positions, (B, L, L, E)"),
        (of(_PLACES), _in_space, "the place of each position in space, (B, L, 3)"),
    ):
        if names:
            said = f"{', '.join(names)} taken for {kind}"
            yield _filled(subject, call, sequence, names, made, said)


def beside_others(subject: Subject, call: Call) -> Iterator[Form]:
    """With more sequences like its own in the place of what nobody understands."""
    sequence = call.parameter("value") or call.parameter("x") or call.parameter("query")
    unknown = [
        p.name
        for p in call.parameters
        if p.default is p.empty
        and (call.roles[p.name] is None or p.name in call.guessed)
        and call.roles[p.name] in (None, "mask")
    ]
    if sequence is None or not unknown:
        return
    said = f"{', '.join(unknown)} taken for more sequences, like {sequence}"
    yield _filled(subject, call, sequence, unknown, _another, said)
    context = call.parameter("context")
    placed = {n for n in unknown if set(words(n)) & _PLACES}
    asking = [n for n in unknown if set(words(n)) & OF_QUERIES]
    if context is not None and placed == set(unknown) and asking:
        # As DETR has them: those of its queries, and of what is encoded.
        rest = [n for n in unknown if n not in asking]
        said = f"{', '.join(unknown)} taken for what is added for positions"
        form = _filled(subject, call, sequence, asking, _another, said)
        of_keys = _filled(form.subject, form.call, context, rest, _another, said)
        yield of_keys if rest else form


def beside_images(subject: Subject, call: Call) -> Iterator[Form]:
    """With an image (B, E, Y, X) that reads a sequence, as in models that draw images of
    texts, or that is read by one. The sequence is (B, S, E), or (B, E, S), as points in
    space are."""
    query = call.parameter("x") or call.parameter("query")
    context = call.parameter("context") or call.parameter("key")
    if query is None or context is None or call.takes("value"):
        return
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=kind) for p in call.parameters]
    for image, sequence, does in (
        (query, context, f"which reads {context}"),
        (context, query, f"which {query} reads"),
    ):
        for axes in ("(B, S, E)", "(B, E, S)"):
            how = functools.partial(
                _beside_image, subject, image=image, asks=image == query
            )
            if axes == "(B, E, S)":
                how = functools.partial(how, features_first=sequence)
            said = f"{image} taken for an image, (B, E, Y, X), {does}, {axes}"
            form = formed(subject, parameters, how, (cases.LAYER,), said)
            form.queries = 5 * _ROWS if image == query else None
            yield form


def _beside_image(
    subject: Subject,
    target: object,
    /,
    image: str,
    asks: bool,
    features_first: str = "",
    **given: object,
) -> object:
    """What comes of tokens that are handed over as an image, (B, L, E). asks: it is of
    queries. features_first: what else has them before its positions."""
    x, other = given[image], given.get(features_first)
    rows = _ROWS if asks else 1
    if not isinstance(x, Tensor) or x.shape[1] % rows:
        raise ValueError("it takes no image")
    given[image] = x.mT.unflatten(2, (rows, -1))
    if isinstance(other, Tensor):
        given[features_first] = other.mT
    returned = called(subject, target, given)
    if isinstance(returned, Tensor) and asks and returned.dim() == 4:
        return returned.flatten(2).mT
    is_turned = isinstance(returned, Tensor) and isinstance(other, Tensor)
    return returned.mT if is_turned and not asks else returned


def _filled(
    subject: Subject,
    call: Call,
    sequence: str,
    names: list[str],
    made: Callable[[Tensor, int], Tensor],
    said: str,
) -> Form:
    """With what is made of the sequence, and of its place among them, for these."""

    def how(target: object, /, **given: object) -> object:
        whole = given[sequence]
        if not isinstance(whole, Tensor):
            raise ValueError("it takes no sequence")
        given |= {name: made(whole, place) for place, name in enumerate(names)}
        return called(subject, target, given)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in names
    ]
    return formed(subject, parameters, how, (), said, tuple(names))


def _another(whole: Tensor, place: int) -> Tensor:
    return whole.roll(place + 1, 0)


def _mean(whole: Tensor, place: int) -> Tensor:
    """(B, E) of all positions. What becomes keys must come of what is given."""
    return whole.flatten(2).mean(-1) if whole.dim() == 4 else whole.mean(1)


def _vector(whole: Tensor, place: int, shape: str) -> Tensor:
    """Numbers that nothing is drawn for, so that nobody takes them for weights; as wide
    as the features, which are the channels of an image."""
    batch, width = len(whole), whole.shape[1 if whole.dim() == 4 else -1]
    if shape == "(B,)":
        return torch.arange(batch)
    numbers = _numbers(whole, batch, width)
    return numbers if shape == "(B, E)" else numbers.unsqueeze(1)


def _of_pairs(whole: Tensor, place: int) -> Tensor:
    batch, length, width = whole.shape
    return _numbers(whole, batch, length, length, width)


def _in_space(whole: Tensor, place: int) -> Tensor:
    batch, length, _ = whole.shape
    return _numbers(whole, batch, length, 3)


def _numbers(like: Tensor, *shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=like.dtype).cos().view(shape)
