# SPDX-License-Identifier: MIT
"""How many keys a query may see, of code with a sliding window."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..calls.cases import Case
from ..subject import sliding
from .frames import Frames

if TYPE_CHECKING:
    from .runner import Runner

_NAMED = re.compile(r"(sliding|local|attention|attn)_?window(_?size)?")


def size(runner: "Runner", target: object, frames: Frames, case: Case) -> int | None:
    """That of a run, where the code was told it, or an attribute or a variable says so;
    None where there is none, or a setting switches it off."""
    built, own = runner.construction, getattr(target, "__dict__", {})
    if runner.call.takes("sliding_window"):
        return case.sizes.sliding_window
    if sliding.is_by_choice(runner.call.parameters, runner.subject.source):
        return None
    in_blocks = getattr(runner.subject.how, "cuts_blocks", False)
    if built is not None and built.takes("sliding_window") and not in_blocks:
        named = (n for n in own if _NAMED.fullmatch(n) or sliding.is_size(n))
        names = [n for n, role in built.roles.items() if role == "sliding_window"]
        off = any(own.get(name, True) is None for name in (*named, *names))
        flags = [p.name for p in built.parameters if sliding.is_flag(p.name, p.default)]
        off |= any(own.get(name) is False for name in flags)
        return None if off else case.sizes.sliding_window
    slides = sliding.is_sliding(runner.subject.source)
    for variables in _variables(target, frames):
        for name, value in variables.items():
            named = _NAMED.fullmatch(name.lower()) is not None
            if named and value is None:  # as in every other layer of a model
                return None
            is_own = slides and variables is own and sliding.is_size(name)
            if type(value) is int and value > 0 and (named or is_own):
                return value
    return None


def _variables(target: object, frames: Frames) -> Iterator[dict[str, object]]:
    """By name: of modules, inner ones first, of what they keep as settings, and of
    functions that ran."""
    modules = [*target.modules()] if isinstance(target, nn.Module) else []
    own = [vars(module) for module in reversed(modules)]
    yield from own
    yield from (vars(v) for one in own for v in one.values() if is_dataclass(v))
    yield from frames.found
