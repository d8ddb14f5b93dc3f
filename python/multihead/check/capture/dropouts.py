# SPDX-License-Identifier: MIT
"""Layers of dropout that a run left out, and what their names and the text say."""

import inspect
import re

from torch import nn

from ..report import Finding
from ..subject.texts import text_of
from .frames import Frames

_OF_WEIGHTS = re.compile(r"att|weight|score|prob|softmax")
# What may be for weights, and what is for something else.
_PLAIN = re.compile(r"(.*_)?(drop|dropout)(_layer)?")
_OTHERWISE = re.compile(r"res|out_|proj|ff|mlp|emb|path|hid|input|pos|final")

ALWAYS_DROPS = Finding(
    "dropout_left_on",
    "Dropout is on in evaluation: two runs on the same inputs give different outputs, "
    "and without dropout they do not.",
    "Drop in training only: `if self.training:`, or a flag that is False by default.",
)


def idle_dropouts(target: object, frames: Frames, source: str) -> list[str]:
    """The layers of dropout that the run left out, and of which the code does not read
    the rate either, as `self.drop.p`."""
    parts = target.named_modules() if isinstance(target, nn.Module) else ()
    read = set(re.findall(r"\.(\w+)\.p\b", source))
    return [
        path
        for path, part in parts
        if isinstance(part, nn.Dropout)
        and part.p > 0
        and id(part) not in frames.dropouts
        and path.rpartition(".")[2] not in read
    ]


def is_forgotten(target: object, path: str) -> bool:
    """Whether the class that makes this layer of dropout, by no name that says what
    else it is for, never speaks of it again."""
    assert isinstance(target, nn.Module)
    owner, _, name = path.rpartition(".")
    while type(module := target.get_submodule(owner)).__module__.startswith("torch"):
        if not owner:
            return False
        owner, _, name = owner.rpartition(".")  # a list of layers
    name = re.sub(r"^_\w+?__", "__", name)
    is_plain = _PLAIN.fullmatch(name) and not _OTHERWISE.search(name)
    return bool(is_plain or is_of_weights(path)) and not is_spoken_of(
        type(module), name
    )


def is_spoken_of(kind: type, name: str) -> bool:
    """Whether the text of a class, or of one that it inherits from, speaks of an
    attribute beside where it is made."""
    classes = inspect.getmro(kind)
    own = re.escape(name)  # config.dropout is another's
    spoken = re.compile(rf"(?:\bself\.|[\"']){own}\b(?!\s*=[^=])|\.{own}[\[(]")
    for kind in classes[: classes.index(nn.Module)]:
        try:
            if spoken.search(text_of(kind)):
                return True
        except (OSError, TypeError):
            return True  # nobody knows
    return False


def is_of_weights(path: str) -> bool:
    """Whether a layer of dropout is one for weights, by its name."""
    return bool(_OF_WEIGHTS.search(path.rpartition(".")[2].lower()))


def never_drops(layer: str) -> Finding:
    return Finding(
        "dropout_unused",
        f"It has a layer of dropout, {layer}, and never calls it: in training nothing "
        "is dropped.",
        "Drop weights, after the softmax: self.dropout(scores.softmax(-1)).",
        kind="remark",
    )
