# SPDX-License-Identifier: MIT
"""Why nothing ran. Code whose steps do not fit together may still run where sizes are
equal or 1, as with one head. If it is attention there, it is not our call that is
wrong."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..calls.cases import Sizes
from ..capture.runner import Run, Runner
from ..report import Finding
from ..subject import absent
from ..subject.absent import ModuleOfAbsent
from ..subject.target import Subject, text_of_file
from . import across, flaws, guessing
from .first_call import FirstCall
from .one_head import OF_SHAPES, unless
from .ways import Way

# Widths beside that of the inputs.
_WIDTHS = ("head_dim", "qkv_dim", "out_dim", "config", "attention", "norm")
_OF_ATTENTION = re.compile(r"attention|attn|mha|gqa|mqa|sdpa|head", re.I)
_WHOLE = "Check the attention inside, which returns as many positions as ask."
_SECONDS = 3.0  # for all of the sizes
# No code means to take such batches alone.
_AS_HEADS = "there are as many items as heads"


def complaints(
    first: FirstCall, layouts: tuple[str, ...], is_attention: Callable[[Way], bool]
) -> list[Finding]:
    """Why nothing ran, which is the code's fault only where that is clear.
    is_attention: whether the first call of a way to call it is."""
    built, subject = first.runner.construction, first.subject
    if first.ended is not None and mixes_items(*first.ended):
        return [flaws.ITEMS_MIXED]
    if first.outside and [f.name for f in first.findings] == ["wrong_shape"]:
        first.findings = [first.outside]
    first.findings = [_of_a_model(f, subject) for f in first.findings]
    if first.findings and _calls_its_own_number(first.findings[0], subject):
        return first.findings
    guessed = [*first.call.guessed, *(built.guessed if built else ())]
    # What it inherits of a package that is not there, it may well have.
    kind = "" if issubclass(subject.type, ModuleOfAbsent) else subject.type.__name__
    found = guessing.of_no_call(first.findings, guessed, kind, subject.source)
    if found and (_is_of_stand_in(found[0], subject) or _is_of_try(found[0], subject)):
        return [replace(f, kind="unchecked") for f in found]
    if guessed or not found or not OF_SHAPES.match(found[0].sentence):
        return found
    finder = FirstCall(first.runner, first.options, _SECONDS)
    finder.extends = False
    has_widths = built is not None and built.takes(*_WIDTHS)
    for words, sizes in _hiding(first.sizes[0], has_widths):
        finder.sizes = [sizes]
        base = finder.find(layouts)
        if base is None:
            continue
        if words == _AS_HEADS or is_attention(Way(first.runner, base)):
            return [unless(words, found[0])]
    return found


_CALLED = re.compile(r"TypeError: '(float|int)' object is not callable")


def _calls_its_own_number(finding: Finding, subject: Subject) -> bool:
    """Whether it calls what its constructor keeps, a number by its own default, as the
    rate of a dropout that no layer is made of: `self.dropout = dropout`."""
    said = _CALLED.match(finding.sentence)
    called = re.findall(r"\bself\.(\w+)\(", finding.detail)
    if said is None or subject.kind != "class":
        return False
    defaults = {
        name: type(parameter.default).__name__
        for name, parameter in inspect.signature(subject.type).parameters.items()
    }
    kept = (
        re.findall(rf"\bself\.{n}\s*=\s*(\w+)\s*$", subject.source, re.M)
        for n in called
    )
    return any(
        values and {defaults.get(v) for v in values} == {said[1]} for values in kept
    )


def _of_a_model(finding: Finding, subject: Subject) -> Finding:
    """What a whole model returns may have any shape."""
    is_other = finding.name == "wrong_shape" and subject.kind != "function"
    if not is_other or _OF_ATTENTION.search(subject.name):
        return finding
    return replace(finding, kind="unchecked", remedy=_WHOLE)


def mixes_items(runner: Runner, run: Run) -> bool:
    """Whether it does, as seen in a vector for each item or where PyTorch's own layer is
    handed them."""
    pools = run.pooled is not None and flaws.pools_mix_items(runner, run)
    return pools or across.attends_over_items(runner, run)


def _is_of_try(finding: Finding, subject: Subject) -> bool:
    """Whether a name is missing that its file imports where it can, or binds where it
    runs as a program: `if __name__ == "__main__"`."""
    named = re.match(r"NameError: name '(\w+)'", finding.sentence)
    if named is None:
        return False
    try:
        statements = ast.parse(text_of_file(subject)).body
    except SyntaxError:
        return False
    tried = [
        n for s in statements if isinstance(s, (ast.Try, ast.If)) for n in ast.walk(s)
    ]
    names = (
        a for n in tried if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names
    )
    bound = {n.id for n in tried if isinstance(n, ast.Name) and _is_set(n)}
    own = any(named[1] in (a.asname, a.name.partition(".")[0]) for a in names)
    return own or named[1] in bound


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_of_stand_in(finding: Finding, subject: Subject) -> bool:
    """Whether a layer of PyTorch refuses its arguments that stands in for one of the
    same name, of a package or a file that is not there."""
    named = re.match(r"TypeError: (\w+)\.__init__", finding.sentence)
    if named is None:
        return False
    elsewhere = rf"^\s*from (?!torch)[\w.]+ import [^\n]*\b{named[1]}\b"
    kind = getattr(subject.entry, "__globals__", {}).get(named[1])
    owner = str(getattr(kind, "__module__", ""))
    is_other = owner.startswith("torch") or owner == absent.__name__
    return is_other and bool(re.search(elsewhere, text_of_file(subject), re.M))


def _hiding(sizes: Sizes, has_widths: bool) -> Iterator[tuple[str, Sizes]]:
    heads = sizes.heads
    if heads > 1 and not has_widths:  # which may have to go together with them
        yield "it has one head", replace(sizes, heads=1, kv_heads=None)
    yield "the batch is one item", replace(sizes, batch=1)
    yield _AS_HEADS, replace(sizes, batch=heads)
    equal = dict(batch=heads, queries=heads, keys=heads)
    yield "items, heads and positions are equally many", replace(sizes, **equal)
