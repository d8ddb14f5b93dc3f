# SPDX-License-Identifier: MIT
"""Projections of a module, by their names, that no data ever meet."""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from ..capture import core
from ..capture.core import Core
from ..capture.runner import Run
from ..report import Finding
from ..subject.roles import speaks

_OUTPUT = re.compile(
    r"(^|[._])(c_?)?(proj|projection|unify_?heads?|combine(_heads)?|concat|merge(_heads)?)"
    r"(\d|[._]|$)"
)
_NORM = re.compile(r"norm|(?:^|_)ln(?:_?\d)?$")
_OF_TABLES = re.compile(r"emb|(^|\.)(tok|token|tokens|wte|wpe|pos|lookup)\.")
_NAMED = r"(^|[._])(w_?|to_?|fc_?|lin(ear)?_?)?({0}|{1}s?)(_?(proj|lin|linear|net|layer))?s?([._]|$)"
_OF = {
    part: re.compile(_NAMED.format(part[0], part), re.I)
    for part in ("query", "key", "value")
}
_TIES = re.compile(r"\btie[sd]?(_|\b)|\bshar(e|es|ed|ing)(_|\b)", re.I)
_MATRIX = {"query": "W_q", "key": "W_k", "value": "W_v"}
_ASKED = {"query": "Queries", "key": "Keys", "value": "Values"}

FILL_THROWN_AWAY = Finding(
    "mask_ignored",
    "What `masked_fill` returns is thrown away, and what else is wrong beside that, nothing "
    "explains.",
    "Keep it, scores = scores.masked_fill(...), or call masked_fill_(), which changes the "
    "tensor that it has.",
)


LAYER_THROWN_AWAY = Finding(
    "output_thrown_away",
    "What a layer makes of the result is thrown away: `{}` stands alone, and what went "
    "into it is returned.",
    "Keep it: y = self.proj(y).",
)


def projections(run: Run) -> list[str]:
    """Their names; not tables, which are exchanged where tokens are given."""
    if run.recorder is None:
        return []
    met = run.recorder.met
    return [
        name
        for name, tensor in run.parameters.tensors.items()
        if tensor.dim() >= 2
        and (speaks(name) or _OUTPUT.search(name))
        and not _OF_TABLES.search(name)
        and run.recorder.root(tensor) not in met
    ]


def replaced(run: Run, text: str) -> list[Finding]:
    """Whether one of them is left out for another: keys and values, say, are the same
    numbers, and no data meet the matrix that is named after values. text: that of the
    code, which may tie them on purpose."""
    names = projections(run)
    if not names or _TIES.search(text):
        return []
    found = core.attentions(run.recorder.cores.found)
    for used, left in (
        ("key", "value"),
        ("query", "key"),
        ("query", "value"),
        ("value", "key"),
        ("key", "query"),
        ("value", "query"),
    ):
        if any(map(_OF[used].search, names)):
            continue  # neither is projected
        idle = [f"`{n}`" for n in names if _OF[left].search(n)]
        if idle and any(_are_equal(each, used, left) for each in found):
            return [_of_another(used, left, idle)]
    return []


def _are_equal(attention: list[Core], *parts: str) -> bool:
    pairs = [[getattr(one, part) for part in parts] for one in attention]
    return all(a.shape == b.shape and a.equal(b) for a, b in pairs)


def _of_another(used: str, left: str, idle: list[str]) -> Finding:
    return Finding(
        f"{used}_weight_for_{_ASKED[left].lower()}",
        f"{_ASKED[left]} are projected by {_MATRIX[used]}, not by {_MATRIX[left]}: both "
        f"are the same numbers, and no data meet {' and '.join(idle)}.",
        f"Project each by its own matrix: {left[0]} = {_MATRIX[left]}(x).",
    )


def thrown_away(source: str) -> Finding | None:
    """What is said of code, by its text, that calls masked_fill() and does nothing with
    what it returns."""
    filled = any(call.func.attr == "masked_fill" for call in _alone(source))
    return FILL_THROWN_AWAY if filled else None


def layer_thrown_away(entry: str, source: str, module: object) -> Finding | None:
    """The same of a projection of the module, or of a norm, that nothing else calls:
    `self.dropout(self.proj(y))` as a statement. Other methods may note what they get.
    entry: the text of what is called, in `source`."""
    for call in _alone(entry):
        names = list(_layers(call))
        are_layers = all(isinstance(getattr(module, n, None), nn.Module) for n in names)
        ends = [n for n in names if _OUTPUT.search(n) or _NORM.search(n)]
        idle = [n for n in ends if source.count(f".{n}(") == 1]
        if are_layers and idle:
            said = LAYER_THROWN_AWAY.sentence.format(ast.unparse(call))
            return replace(LAYER_THROWN_AWAY, sentence=said)
    return None


def _layers(call: ast.expr) -> Iterator[str]:
    """What is called in a nest of calls, `self.dropout(self.proj(y))`, from outside."""
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        is_own = ast.unparse(call.func.value) == "self"
        yield call.func.attr if is_own else ""
        call = call.args[0] if call.args else call.func.value


def _alone(source: str) -> Iterator[ast.Call]:
    """Calls of methods that are statements, of which nothing is kept."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if isinstance(node.value.func, ast.Attribute):
                yield node.value
