# SPDX-License-Identifier: MIT
"""Code that takes videos, (B, E, T, Y, X) or (B, T, Y, X, E): all of it is one sequence,
or each frame is one, or each pixel in time."""

import re
from collections.abc import Callable, Iterator

from torch import Tensor

from ..subject.roles import TENSORS
from ..subject.signature import Call, axes
from ..subject.target import Subject
from . import cases
from .forms import Form, called, formed

# What code of videos does, speaks of or complains of.
_OF_VIDEOS = re.compile(
    r"conv3d|\b5D\b|expected 5|\bvideos?\b|\bframes\b|\bt h w\b|\bt,\s*h,\s*w\b", re.I
)
# Five axes, as a text has them: (B, S, H, W, D), the last being that of features.
_FIVE = re.compile(
    r"\(\s*[bn]\w*,\s*[tsfn]\w*,\s*h\w*,\s*w\w*,\s*([dce]\w*|hidden_dim|features)\s*\)",
    re.I,
)

# What einops takes apart: "b t h w c -> (b t) (h w) c".
_OF_EINOPS = re.compile(
    r"rearrange\(\s*\w+,\s*[\"']\s*b\w* \w*[tf] \w*h \w*w (?:[cde]|dim|channels)\s*->"
)
_FEATURES = re.compile(r"c\w*|d|dim|e|emb\w*|features?")


def of_videos(subject: Subject, call: Call, complaints: str = "") -> Iterator[Form]:
    """complaints: what it says of other forms."""
    inputs = [n for n, role in call.roles.items() if role in TENSORS]
    said = f"{subject.source} {complaints}"
    is_last = _are_last(subject)
    if not (_OF_VIDEOS.search(said) or takes_videos(subject)):
        return
    # Items and queries: two items, and sizes that differ, so that no axis can stand for
    # another.
    ways: list[tuple[str, Callable, Callable, tuple[int, int | None], str]] = [
        (cases.CHANNELS_FIRST, _as_whole, _of_whole, (4, 30), "all of it one sequence"),
        (cases.IMAGE, _as_frames, _of_frames, (6, None), "each frame a sequence"),
        (cases.CHANNELS_FIRST, _as_pixels, _of_pixels, (12, 5), "each pixel in time"),
    ]
    is_third = not is_last and _are_third(subject)
    written = "(B, T, E, Y, X)" if is_third else "(B, E, T, Y, X)"
    written = "(B, T, Y, X, E)" if is_last else written
    for layout, split, join, sizes, what in ways:
        is_whole = split is _as_whole
        if is_last:
            layout, split, join = _LAST[layout], _last(split), _last(join)
        if is_third:
            split, join = _third(split, join)

        def how(target: object, /, split=split, join=join, **given: object) -> object:
            video = {n: split(t) if n in inputs else t for n, t in given.items()}
            returned = called(subject, target, video)
            first = returned[0] if isinstance(returned, (tuple, list)) else returned
            if not isinstance(first, Tensor) or first.dim() != 5:
                return returned
            return join(first)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in call.parameters]
        shown = f"videos as {written}, {what}"
        form = formed(subject, parameters, how, (layout,), shown, tuple(inputs))
        form.batch, form.queries = sizes
        form.parts = _parts(sizes[1]) if is_whole else ()
        yield form


def takes_videos(subject: Subject) -> bool:
    """Whether it unpacks five axes, or its text has those of a video."""
    return len(axes(subject)) == 5 or _are_last(subject)


def _are_last(subject: Subject) -> bool:
    """Whether its text has the five axes of a video, the last that of features."""
    named = ", ".join(axes(subject))
    text = f"({named})" if named.count(",") == 4 else subject.source
    return any(one.search(text) for one in (_FIVE, _OF_EINOPS))


def _are_third(subject: Subject) -> bool:
    """Whether the features are the third of five axes, behind those of time."""
    named = [name.lower() for name in axes(subject)]
    return len(named) == 5 and _FEATURES.fullmatch(named[2]) is not None


_LAST = {cases.CHANNELS_FIRST: cases.LAYER, cases.IMAGE: cases.IMAGE_LAST}


def _last(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same for features in the last axis."""
    return lambda x: change(x.movedim(-1, 1)).movedim(1, -1)


def _third(split: Callable, join: Callable) -> tuple[Callable, Callable]:
    """Both for features in the third axis."""
    return lambda x: split(x).movedim(1, 2), lambda video: join(video.movedim(2, 1))


def _parts(length: int) -> tuple[int, int, int]:
    """Three sizes that make up so many, as frames, rows and columns of a video."""
    frames = _smallest_factor(length)
    rows = _smallest_factor(length // frames)
    return frames, rows, length // frames // rows


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, number) if number % n == 0), 1)


def _as_whole(x: Tensor) -> Tensor:
    return x.unflatten(2, _parts(x.shape[2]))


def _of_whole(video: Tensor) -> Tensor:
    return video.flatten(2)


def _as_frames(x: Tensor) -> Tensor:
    """(B·T, E, Y, X) as (B, E, T, Y, X)."""
    count = _smallest_factor(len(x))
    return x.unflatten(0, (count, -1)).movedim(1, 2)


def _of_frames(video: Tensor) -> Tensor:
    return video.movedim(2, 1).flatten(0, 1)


def _as_pixels(x: Tensor) -> Tensor:
    """(B·Y·X, E, T) as (B, E, T, Y, X)."""
    return x.unflatten(0, _parts(len(x))).movedim((1, 2), (3, 4))


def _of_pixels(video: Tensor) -> Tensor:
    return video.movedim((3, 4), (1, 2)).flatten(0, 2)
