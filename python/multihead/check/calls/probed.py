# SPDX-License-Identifier: MIT
"""Code that insists on more than anybody can guess by its name: edges, times, a kind of
attention in words. Each such argument is given what lets the code come furthest, line by
line: zeros of some shape, which mostly change nothing, or a word that the code compares it
with."""

import contextlib
import copy
import inspect
import linecache
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..subject.roles import TENSORS
from ..subject.signature import Call
from ..subject.target import Subject
from ..subject.words import words
from .forms import Form, called, formed
from .made_up import MASKS, NONE, SAME, Kind, kinds_for, sizes_of, words_of

# Roles of which everything is known, whatever the call.
_KNOWN = {*TENSORS, "num_heads", "scale", "padding", "lengths", "is_causal", "dropout"}
_MOST = 8  # arguments that are not known
_CALLS = 400
_LOOKS = 6  # in vain


def probed(
    subject: Subject, call: Call, layouts: tuple[str, ...] = ()
) -> Iterator[Form]:
    """With what lets it run in the place of each argument that is not known; a mask
    stays one, where the rest is found beside it."""
    sequence = call.parameter("query") or call.parameter("x")
    known = _KNOWN - ({"key", "value"} if call.style != "qkv" else set())
    required = [p.name for p in call.parameters if p.default is p.empty]
    unknown = [
        n
        for n in required
        if n != sequence
        and (n in call.guessed or call.roles[n] not in known or _is_vague(call, n))
    ]
    if sequence is None or not 0 < len(unknown) <= _MOST:
        return
    masks = [n for n in unknown if set(words(n)) & MASKS][:1]
    rest = [n for n in unknown if n not in masks]
    if masks and rest:
        role = call.roles[masks[0]] if masks[0] not in call.guessed else "padding"
        form = _form(_Found(subject, sequence, rest, masks[0]), call, layouts)
        form.call.roles |= {masks[0]: role}
        form.call.guessed -= {*masks}  # its name says what it is
        yield form
        if form.said:
            return
    yield _form(_Found(subject, sequence, unknown), call, layouts)


def _is_vague(call: Call, name: str) -> bool:
    """A context by a letter, which may be anything."""
    return call.roles[name] == "context" and len(name) == 1


def _form(found: "_Found", call: Call, layouts: tuple[str, ...]) -> Form:
    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in found.names
    ]
    form = formed(found.subject, parameters, found, layouts, "")
    for name in (n for n, role in form.call.roles.items() if role == "scale"):
        divides = re.search(rf"/=?\s*{re.escape(name)}\b", found.subject.source)
        form.call.roles[name] = "divisor" if divides else "factor"
    form.fact = "other_arguments"
    found.form = form
    return form


class _Found:
    """Calls the code with what was found for the arguments of these names, and looks for
    it at first. mask: what must be given beside them."""

    form: Form

    def __init__(
        self, subject: Subject, sequence: str, names: list[str], mask: str = ""
    ) -> None:
        self.subject, self.names = subject, names
        self._sequence, self._mask = sequence, mask
        self._kinds: dict[str, Kind] = {}
        self._looks, self._is_done = 0, False

    def __call__(self, target: object, /, **given: object) -> object:
        whole = given[self._sequence]
        if not isinstance(whole, Tensor) or whole.dim() not in (3, 4):
            raise ValueError("it takes no sequence")
        if self._mask and given[self._mask] is None:
            raise ValueError("it must be given a mask")
        sizes = sizes_of(target, given, whole)
        if not self._is_done and self._looks < _LOOKS:
            with torch.random.fork_rng(devices=[]):
                self._look(_copied(target), given, sizes)
        if not self._is_done:
            raise ValueError("nothing was found that lets it attend")
        return self._called(target, given, sizes, self._kinds)

    def _called(
        self,
        target: object,
        given: dict[str, object],
        sizes: dict[str, int],
        kinds: dict[str, Kind],
    ) -> object:
        whole = given[self._sequence]
        made = {n: kinds.get(n, NONE).value(sizes, whole) for n in self.names}
        return called(self.subject, target, given | made)

    def _look(
        self, target: object, given: dict[str, object], sizes: dict[str, int]
    ) -> None:
        """Takes one argument after the other for what brings the code furthest."""
        self._looks, calls = self._looks + 1, 0
        own = {n: words_of(self.subject, self.form.call, n) for n in self.names}
        self._kinds = {n: kinds[0] for n, kinds in own.items() if kinds}

        def reached(tried: dict[str, Kind]) -> _Reached:
            def call(given: dict[str, object]) -> object:
                return self._called(target, given, sizes, self._kinds | tried)

            nonlocal calls
            calls += 1
            return _reached(call, given, _file(self.subject))

        furthest = reached({})
        while furthest < _END:
            best, chosen = furthest, {}
            for tried in self._to_try(own, sizes, furthest):
                here = reached(tried)
                if here > best:
                    best, chosen = here, tried
                # What comes further with one of them is not tried with others.
                is_last = chosen and chosen.keys() != tried.keys()
                if is_last or best == _END or calls >= _CALLS:
                    break
            if not chosen or calls >= _CALLS and best < _END:
                return
            furthest = best
            self._kinds |= chosen
        self._is_done = True
        said = (f"{n} {self._kinds.get(n, NONE)}" for n in self.names)
        self.form.said = " · ".join(said)
        kinds = self._kinds.items()
        self.form.chosen = tuple(n for n, kind in kinds if kind.is_choice)

    def _to_try(
        self, own: dict[str, list[Kind]], sizes: dict[str, int], furthest: "_Reached"
    ) -> Iterator[dict[str, Kind]]:
        """Other kinds of one argument, first of those at which it stopped; of all that
        are no words at once, as those of a gain and a bias. own: words by name."""
        names = sorted(self.names, key=lambda n: not furthest.names(n))
        if furthest == _NO_ATTENTION:
            # Of keys that are made of zeros, or scores that are multiplied by them.
            for name in names:
                kind = self._kinds.get(name, NONE)
                yield from ({name: word} for word in own[name])
                yield {name: SAME}
                if kind.shape is not None:
                    plain = (replace(kind, fill=f, counts=False) for f in (0.0, 1.0))
                    yield from ({name: other} for other in plain if other != kind)
            return
        for name in names:
            for kind in kinds_for(name, sizes):
                yield {name: kind}
        numbers = [name for name in names if not own[name]]
        for kind in kinds_for(numbers[0], sizes) if len(numbers) > 1 else ():
            yield dict.fromkeys(numbers, kind)


def _copied(target: object) -> object:
    """Calls may change what it keeps, as a cache."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(target)
    return target


@dataclass(order=True)
class _Reached:
    """Where a call stopped: in which places of the code's own, outermost first, and what
    their lines say; or at its end."""

    places: tuple[float, ...]
    text: str = field(default="", compare=False)

    def names(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None


_END, _NO_ATTENTION = _Reached((math.inf,)), _Reached((sys.maxsize,))


def _reached(
    call: Callable[[dict[str, object]], object], given: dict[str, object], file: str
) -> _Reached:
    """How far it comes, in lines of this file. Attention is what makes numbers of other
    positions of those of one, and not by their mean, as where all weights are alike."""

    def returned(axis: int, share: float) -> Tensor | None:
        copies = dict(given)
        for name, value in given.items():
            if isinstance(value, Tensor):
                copies[name] = changed = value.detach().clone()
                if value.dim() >= 3 and value.is_floating_point():
                    place = changed.select(axis, value.shape[axis] // 2)
                    # No norm removes it.
                    place += share * torch.linspace(-1, 1, place.shape[-1]).cos()
        torch.manual_seed(0)  # dropout is the same in all
        return _first(call(copies))

    try:
        with _disable_current_modes(), torch.no_grad():
            for axis in (-2, 0):  # of positions, with items first or not
                outs = [returned(axis, share) for share in (0.0, 1.0, -1.0)]
                if _attends([out for out in outs if out is not None], axis):
                    return _END
    except Exception as error:
        return _stopped(error.__traceback__, file)
    return _NO_ATTENTION


def _stopped(trace: types.TracebackType | None, file: str) -> _Reached:
    """The lines, and how far in each: arguments of one line come one after the other."""
    places: list[float] = []
    text: list[str] = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            places += [trace.tb_lineno, trace.tb_lasti]
            text.append(linecache.getline(file, trace.tb_lineno))
        trace = trace.tb_next
    return _Reached(tuple(places), "\n".join(text))


def _first(returned: object) -> Tensor | None:
    several = returned if isinstance(returned, (tuple, list)) else [returned]
    return next((t for t in several if isinstance(t, Tensor)), None)


def _attends(outs: list[Tensor], axis: int) -> bool:
    """outs: as it is, and with more or less in the middle position."""
    if len(outs) < 3 or outs[0].dim() < 2 or not outs[0].isfinite().all():
        return False
    out, more, less = outs
    changed = ~out.isclose(more).transpose(axis, 0).flatten(1).all(-1)
    changed[len(changed) // 2] = False
    return bool(changed.any()) and not torch.allclose(more + less, 2 * out)


def _file(subject: Subject) -> str:
    code = getattr(inspect.unwrap(subject.entry), "__code__", None)
    return code.co_filename if code else ""
