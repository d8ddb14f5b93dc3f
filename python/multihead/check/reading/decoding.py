# SPDX-License-Identifier: MIT
"""Whether code that predicts what comes next sees it. Its name says that it decodes, or
it takes tokens and returns a number for each word at each of them.
"""

import inspect
import re
from dataclasses import replace

from torch import nn

from ..capture import core
from ..capture.runner import Run, Runner
from ..subject.roles import role_of_name
from ..subject.target import Subject, text_of_file
from ..subject.words import OF_SOURCE, words
from . import wiring

# What is said of models that return words and see all of them.
_SEES_ALL = re.compile(
    r"bert\b|bert[A-Z_]|Bert|\bmlm\b|masked.?(language|lm|token)|classif|tagg|\bner\b|"
    r"bidirection|denois|diffus|span|cloze|infill|discriminat|sentiment|"
    r"contrastive|reconstruct|autoencod|\bvae\b|\bctc\b|align",
    re.I,
)


def sees_later_keys(runner: Runner, base: Run) -> bool:
    """Whether it blocks no later key where it reads its own sequence first, and takes no
    mask that could."""
    subject = runner.subject
    called = getattr(subject.type, "forward", subject.entry)  # also in another form
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # it is written in C
        return False
    if base.recorder is None or any(map(_may_hide_later, names)):
        return False
    if not _decodes(subject, names) and not _predicts_tokens(runner, base, names):
        return False
    own = core.attentions(base.recorder.cores.found)[:1]
    if not own or not wiring.reads_its_own(own[0]):
        return False
    return all(map(wiring.hides_nothing, own[0]))


def _decodes(subject: Subject, names: list[str]) -> bool:
    """Whether it is a decoder, as its name says, that reads a context."""
    said = subject.name.lower().replace("_", "")
    if "decoder" not in said or "encoderdecoder" in said:
        return False
    return bool({role_of_name(name) for name in names} & {"context", "key"})


def _predicts_tokens(runner: Runner, base: Run, names: list[str]) -> bool:
    """Whether a whole model takes tokens alone, and has a layer that returns as many
    numbers as it knows words."""
    if len([name for name in names if name != "self"]) != 1:
        return False
    name = runner.subject.name
    if "encoder" in name.lower() or _SEES_ALL.search(text_of_file(runner.subject)):
        return False
    model, _ = runner.target_of(replace(base.case, gradients=False), may_hang=True)
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    known = {p.num_embeddings for p in parts if isinstance(p, nn.Embedding)}
    lines = [p.out_features for p in parts if isinstance(p, nn.Linear)]
    return bool(lines) and lines[-1] in known


def _may_hide_later(name: str) -> bool:
    """Whether an argument is a mask, and not by its name of padding or a context."""
    said = set(words(name))
    is_other = said & (OF_SOURCE | {"pad", "padding", "valid"})
    return bool(said & {"mask", "masks", "causal"}) and not is_other
