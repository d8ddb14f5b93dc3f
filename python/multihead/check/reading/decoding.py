# SPDX-License-Identifier: MIT
"""Whether code that predicts what comes next sees it. Its name says that it decodes, or
it takes tokens and returns a number for each word at each of them.
"""

import functools
import inspect
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..calls import cases
from ..calls.tokens import has_others
from ..capture import core
from ..capture.runner import Run, Runner
from ..subject.roles import role_of_name
from ..subject.target import Subject, text_of_file
from ..subject.words import OF_SOURCE, words
from . import again, wiring

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
    names = _unmasked(runner.subject, base)
    if names and has_others(runner.subject) and (target := _target(names)):
        return _target_sees_later(runner, base, target)
    decodes = _decodes(runner.subject, names) or _predicts_tokens(runner, base, names)
    return decodes and _hides_nothing(base)


def is_trained_to_say_the_next(runner: Runner, base: Run) -> bool:
    """Whether it is a whole model whose file shows that it is handed all tokens but the
    last, and compared with all but the first."""
    subject = runner.subject
    names = _unmasked(subject, base)
    if not names or not _predicts_the_next(text_of_file(subject)):
        return False
    of_target = has_others(subject) and _target(names) is not None
    return of_target or _predicts_tokens(runner, base, names)


def _unmasked(subject: Subject, base: Run) -> list[str]:
    """The names of its arguments; none where one may be a mask of later keys."""
    called = getattr(subject.type, "forward", subject.entry)  # also in another form
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # it is written in C
        return []
    return [] if base.recorder is None or any(map(_may_hide_later, names)) else names


def _hides_nothing(base: Run) -> bool:
    own = core.attentions(base.recorder.cores.found)[:1]
    if not own or not wiring.reads_its_own(own[0]):
        return False
    return all(map(wiring.hides_nothing, own[0]))


# tokens[:, :-1] and tokens[:, 1:], or logits[..., :-1, :] and labels[..., 1:].
_BUT_LAST = re.compile(r"(\w+)\[(?::,|\.\.\.,)?\s*:-1(?:,\s*:)?\]")
_BUT_FIRST = re.compile(r"(\w+)\[(?::,|\.\.\.,)?\s*1:(?:,\s*:)?\]")
_OF_TARGET = {"tgt", "trg", "target", "dec", "decoder"}


def _predicts_the_next(text: str) -> bool:
    """Whether one sequence is handed on without its last token and without its first, as
    in training to say the next; or results without their last are compared with such."""
    last, first = set(_BUT_LAST.findall(text)), set(_BUT_FIRST.findall(text))
    compared = any("logit" in name for name in last) and any(
        {"label", "labels", "target", "targets"} & set(words(name)) for name in first
    )
    return bool(last & first) or compared


def _target(names: list[str]) -> str | None:
    return next((name for name in names if set(words(name)) & _OF_TARGET), None)


def _target_sees_later(runner: Runner, base: Run, name: str) -> bool:
    """Whether what is said of a position of the target changes with the last one."""
    subject = runner.subject
    how = functools.partial(subject.how, name=name, always=False)  # type: ignore[arg-type]
    how.has_many = True  # type: ignore[attr-defined]
    other = runner.calling(runner.call, replace(subject, how=how))
    axis = cases.query_axis(base.case)

    def draw_last(sequence: Tensor) -> None:
        last = sequence.select(axis, -1)
        last.copy_(torch.randn_like(last))

    runs = again.twice(other, replace(base.case, gradients=False), draw_last)
    if runs is None:
        return False
    earlier = runs[0].out.size(axis) - 1
    before, after = (run.out.narrow(axis, 0, earlier) for run in runs)
    return not torch.allclose(before, after)


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
