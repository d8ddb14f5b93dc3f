# SPDX-License-Identifier: MIT
"""Code that cuts images into windows: several items as the windows of one image, which
are then what they were as images of their own."""

import inspect

from torch import Tensor

from ..subject.roles import TENSORS
from ..subject.signature import Call
from ..subject.target import Subject
from . import cases
from .forms import Form, called, formed


def in_one_image(
    subject: Subject, call: Call, layout: str, rows: int, columns: int
) -> Form:
    """So many rows and columns of items as one image."""
    channels = 1 if layout == cases.IMAGE else 3
    inputs = [n for n, role in call.roles.items() if role in TENSORS]

    def how(target: object, /, **given: object) -> object:
        whole = {
            n: _joined(t, channels, rows, columns) if n in inputs else t
            for n, t in given.items()
        }
        returned = called(subject, target, whole)
        first = returned[0] if isinstance(returned, (tuple, list)) else returned
        is_image = isinstance(first, Tensor) and first.dim() == 4
        return _cut(first, channels, rows, columns) if is_image else returned

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in call.parameters
    ]
    said = f"{rows * columns} items as the windows of one image"
    return formed(subject, parameters, how, (layout,), said)


def _joined(items: object, channels: int, rows: int, columns: int) -> object:
    if not isinstance(items, Tensor) or items.dim() != 4:
        return items
    cells = items.movedim(channels, -1).unflatten(0, (-1, rows, columns))
    image = cells.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return image.movedim(-1, channels).contiguous()


def _cut(image: Tensor, channels: int, rows: int, columns: int) -> Tensor:
    cells = image.movedim(channels, -1).unflatten(2, (columns, -1))
    cells = cells.unflatten(1, (rows, -1)).transpose(2, 3)
    return cells.flatten(0, 2).movedim(-1, channels)
