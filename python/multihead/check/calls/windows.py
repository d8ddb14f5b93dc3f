# SPDX-License-Identifier: MIT
"""Code that cuts images into windows, or into grids of pixels that stand as far apart as
grids are many (Tu et al., MaxViT, 2022): several items as those of one image, which are
then what they were as images of their own."""

import inspect

from torch import Tensor

from ..subject.roles import TENSORS
from ..subject.signature import Call
from ..subject.target import Subject
from . import cases
from .forms import Form, called, formed


def in_one_image(
    subject: Subject,
    call: Call,
    layout: str,
    rows: int,
    columns: int,
    as_grids: bool = False,
) -> Form:
    """So many rows and columns of items as one image, side by side or as its grids."""
    channels = 1 if layout == cases.IMAGE else 3
    inputs = [n for n, role in call.roles.items() if role in TENSORS]

    def how(target: object, /, **given: object) -> object:
        whole = {
            n: _joined(t, channels, rows, columns, as_grids) if n in inputs else t
            for n, t in given.items()
        }
        returned = called(subject, target, whole)
        first = returned[0] if isinstance(returned, (tuple, list)) else returned
        is_image = isinstance(first, Tensor) and first.dim() == 4
        return _cut(first, channels, rows, columns, as_grids) if is_image else returned

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in call.parameters
    ]
    said = f"{rows * columns} items as the windows of one image"
    return formed(subject, parameters, how, (layout,), said)


def _joined(
    items: object, channels: int, rows: int, columns: int, as_grids: bool
) -> object:
    if not isinstance(items, Tensor) or items.dim() != 4:
        return items
    cells = items.movedim(channels, -1).unflatten(0, (-1, rows, columns))
    order = (0, 3, 1, 4, 2, 5) if as_grids else (0, 1, 3, 2, 4, 5)
    image = cells.permute(order).flatten(3, 4).flatten(1, 2)
    return image.movedim(-1, channels).contiguous()


def _cut(
    image: Tensor, channels: int, rows: int, columns: int, as_grids: bool
) -> Tensor:
    sides = ((-1, rows), (-1, columns)) if as_grids else ((rows, -1), (columns, -1))
    cells = image.movedim(channels, -1).unflatten(2, sides[1]).unflatten(1, sides[0])
    cells = cells.permute((0, 2, 4, 1, 3, 5) if as_grids else (0, 1, 3, 2, 4, 5))
    return cells.flatten(0, 2).movedim(-1, channels)
