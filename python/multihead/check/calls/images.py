# SPDX-License-Identifier: MIT
"""Whole models that cut an image into patches, as a vision transformer does: an image is
made of the numbers of our sequence, and what the first attention does is judged as that of
any layer. How many positions come of an image, a first call shows.
"""

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..subject.roles import TENSORS, normal
from ..subject.signature import Call
from ..subject.target import Subject, text_of_file
from . import cases
from .forms import Form, called, formed
from .tokens import like

# What code of patches speaks of, and what its sizes are called.
_CUTS = re.compile(r"patch|\bp1\b", re.I)
OF_LAYER = re.compile(r"att(entio)?n|mha|mhsa", re.I)
_SIDES = {"imagesize", "imgsize", "inputsize", "inputresolution", "imageheight"}
_CHANNELS = {"channels", "inchannels", "inchans", "numchannels", "imgchannels", "inch"}
# Sides of images where a model keeps none; the first is the one that it is built for.
SIDE = 32
_USUAL = (SIDE, 64, 28, 224)
_FEW = 8


def of_images(subject: Subject, call: Call) -> Iterator[Form]:
    """Its one required input as an image."""
    inputs = [n for n, role in call.roles.items() if role in TENSORS]
    required = [p.name for p in call.parameters if p.default is p.empty]
    if subject.kind == "function" or len(inputs) != 1 or required not in ([], inputs):
        return
    is_layer = OF_LAYER.search(subject.name) is not None
    if not _CUTS.search(subject.source if is_layer else text_of_file(subject)):
        return
    name = inputs[0]
    # Which shape what was built takes.
    known: dict[int, tuple[int, int, int]] = {}

    def how(target: object, /, x: Tensor, **given: object) -> object:
        if id(target) not in known:
            known[id(target)] = _taken(subject, target, name, x, given)
        image = _image(x, known[id(target)])
        return like(called(subject, target, {**given, name: image}), x)

    how.has_many = True  # type: ignore[attr-defined]
    # Numbers of a position of ours are spread over many of its own.
    how.knows_order = True  # type: ignore[attr-defined]
    kind = inspect.Parameter.KEYWORD_ONLY
    others = [p.replace(kind=kind) for p in call.parameters if p.name != name]
    parameters = [inspect.Parameter("x", kind), *others]
    said = f"{name} taken for an image, which is cut into patches"
    form = formed(subject, parameters, how, (cases.LAYER,), said)
    form.side = SIDE
    yield form


def _taken(
    subject: Subject, target: object, name: str, x: Tensor, given: dict[str, object]
) -> tuple[int, int, int]:
    """The first shape of an image that it takes; the usual one if none, which then tells
    why."""
    shapes = list(_shapes(target, x.shape[-1]))
    for shape in shapes:
        with contextlib.suppress(Exception), _disable_current_modes(), torch.no_grad():
            called(subject, target, {**given, name: _image(x.detach(), shape)})
            return shape
    return shapes[0]


def _shapes(target: object, width: int) -> Iterator[tuple[int, int, int]]:
    """Channels and sides, likelier first. width: as many channels it may be told."""
    parts = list(target.modules()) if isinstance(target, nn.Module) else []
    first = next((m for m in parts if isinstance(m, nn.Conv2d)), None)
    kept = (_size(parts, _CHANNELS) or 3, width)
    channels = kept if first is None else (first.in_channels,)
    told = _size(parts, _SIDES)
    # Without patches, which a convolution mostly cuts, each pixel may be a position.
    likely = told or (_FEW if first is None else SIDE)
    sides = dict.fromkeys([likely, *_USUAL])
    for side, count in itertools.product(sides, channels):
        yield count, side, side


def _size(parts: list[nn.Module], names: set[str]) -> int | None:
    """What it keeps, or has by default, under one of these names."""
    for part in parts:
        kept = {normal(n): v for n, v in vars(part).items()}
        asked = inspect.signature(type(part).__init__).parameters.values()
        defaults = {normal(p.name): p.default for p in asked}
        for value in (known[n] for known in (kept, defaults) for n in names & {*known}):
            value = value[0] if isinstance(value, (tuple, list)) and value else value
            if type(value) is int and value > 0:
                return value
    return None


def _image(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The numbers of a sequence (B, L, E) over and over, as images."""
    flat, size = x.flatten(1), shape[0] * shape[1] * shape[2]
    times = -(-size // flat.shape[1])
    return flat.repeat(1, times)[:, :size].view(len(x), *shape)
