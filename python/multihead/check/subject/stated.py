# SPDX-License-Identifier: MIT
"""A call that somebody writes, as "Attention(dim=E)(x, mask=mask)": it says how the code
is constructed and called.

It is an expression in the code's own file, or statements and an expression, in which
these names stand for what each run brings: x, or q, k and v; context, another sequence;
mask and padding; B, L, S, E, H and D, the batch, the number of queries and of keys, the
width, the heads and their width. Names of sequences and masks that nobody has defined,
values or attn_mask, are among them. What it gives without these names stays as it is;
masks alone are made for each run, beside sequences that it gives.
"""

import ast
import builtins
import copy
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..sandbox.guard import Outcome, Stop
from .roles import CALL, normal
from .target import Subject, describe

# As the tables of roles know them.
_TENSORS = {"x": "x", "q": "query", "k": "key", "v": "value", "context": "context"}
_TENSORS |= {"mask": "mask", "padding": "key_padding_mask"}
_COUNTS = {"B": "batch_size", "L": "query_length", "S": "key_length"}
_COUNTS |= {"E": "embed_dim", "H": "num_heads", "D": "head_dim"}
_NAMES = _TENSORS | _COUNTS
_MASKS = ("mask", "key_padding_mask")
_USUAL = {"B": 3, "L": 5, "S": 7, "E": 48, "H": 8, "D": 6}
_AT_HAND = {"torch": torch, "nn": nn, "F": F, "types": types}
_CODE = "_the_code"
_BROUGHT = object()  # what each run brings
_LACKS = re.compile(r"AttributeError: '(\w+)' object has no attribute")


class Attempts(Protocol):
    """What runs code that may do anything, as a Guard does."""

    def attempt(self, code: Callable) -> Outcome: ...


@dataclass
class Stated:
    """subject: what is called, and how. inputs: the arguments of the call by name, where
    it brings tensors of its own; else None."""

    subject: Subject
    inputs: dict[str, object] | None = None


def read(text: str, scope: dict[str, object], guard: Attempts) -> Stated:
    """The call that `text` writes, in the names of `scope`. guard: what runs the code.

    Raises ValueError where it is none, and Stop where it raises.
    """
    before, expression = _parsed(text)
    bound = {n.id for n in ast.walk(before) if _is_bound(n)}
    names = _by_our_names(expression, {*scope, *bound})
    scope = {**_AT_HAND, **scope}
    if before.body:
        code = compile(before, "<call>", "exec")
        _value(guard, lambda: exec(code, scope), text)
        names -= bound
    names &= _NAMES.keys()
    call = _call_in(expression, names & _TENSORS.keys())
    ordered = sorted(names, key=list(_NAMES).index)
    written = _Written(scope, expression, call, ordered, text)
    return written.stated(guard)


def _by_our_names(expression: ast.Expression, defined: set[str]) -> set[str]:
    """Gives sequences and masks that nobody has defined, as `values` and `attn_mask`,
    our names; all names in the expression."""
    ours = {long: short for short, long in _TENSORS.items()}
    used = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id not in {*_NAMES, *defined}:
            role = "" if hasattr(builtins, node.id) else CALL.get(normal(node.id), "")
            name = ours.get({"padding": "key_padding_mask"}.get(role, role), "")
            if name and name not in used:
                node.id = name
    return {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}


def _parsed(text: str) -> tuple[ast.Module, ast.Expression]:
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"check: call must be Python, got {text!r} ({error})"
        ) from None
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        raise ValueError(f"check: call must end with a call, got {text!r}")
    return ast.Module(tree.body[:-1], []), ast.Expression(tree.body[-1].value)


def _is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _call_in(expression: ast.Expression, tensors: set[str]) -> ast.Call:
    """The call that takes the tensors, or, without any, the outermost; one of the
    code's own before those of Python and PyTorch around it."""
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    taking = [
        call
        for call in calls
        if not tensors
        or any(
            isinstance(n, ast.Name) and n.id in tensors
            for part in _arguments(call)
            for n in ast.walk(part)
        )
    ]
    if not taking:
        raise ValueError(
            f"check: call must call something, got {ast.unparse(expression)!r}"
        )
    return next((call for call in taking if not _is_common(call)), taking[0])


def _is_common(call: ast.Call) -> bool:
    root = next((n for n in ast.walk(call.func) if isinstance(n, ast.Name)), None)
    common = {*_AT_HAND, *vars(builtins)}
    return root is None or root.id in common


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _value(guard: Attempts, code: Callable[[], object], text: str) -> object:
    """What `code` gives. What raises there is the call's fault, but for an attribute
    that a class of the call has not set itself."""
    outcome = guard.attempt(code)
    if outcome.error is not None:
        finding = outcome.findings[0]
        own = _LACKS.match(finding.sentence)
        if not own or not re.search(rf"\b{own[1]}\(", text):
            finding = replace(finding, kind="unchecked")
        raise Stop([finding])
    return outcome.value


@dataclass
class _Written:
    """A call in an expression. names: those that each run brings."""

    scope: dict[str, object]
    expression: ast.Expression
    call: ast.Call
    names: list[str]
    text: str
    counts: list[str] = field(default_factory=list)

    def stated(self, guard: Attempts) -> Stated:
        made = self.call.func
        used = {n.id for n in ast.walk(made) if isinstance(n, ast.Name)}
        self.counts = [name for name in self.names if name in used]
        usual = {name: _USUAL.get(name) for name in self.counts}
        found = _value(guard, lambda: self._evaluated(made, usual), self.text)
        owner = getattr(found, "__self__", None)
        code = owner if isinstance(owner, nn.Module) else found
        subject = describe(code)
        brought = {_TENSORS[n] for n in self.names if n in _TENSORS}
        if not brought or (brought <= {*_MASKS} and self._gives_tensors(guard)):
            given = _value(guard, lambda: self._given(subject), self.text)
            return Stated(subject, given)
        subject.entry = _with_parameters(
            [n for n in self.names if self._is_called_with(n)]
        )
        subject.how = self._how(getattr(found, "__name__", "") if owner is code else "")
        if self.counts and subject.kind == "instance":
            subject.kind, subject.target = "class", type(code)
            subject.factory = _with_parameters(
                self.counts, self._construct(owner is code)
            )
        return Stated(subject)

    def _gives_tensors(self, guard: Attempts) -> bool:
        """Whether it has sequences of its own."""
        parts = [p for p in _arguments(self.call) if not self._brought_in(p)]
        usual = {name: _USUAL.get(name) for name in self.names}
        values = _value(
            guard, lambda: [self._evaluated(p, usual) for p in parts], self.text
        )
        return any(isinstance(value, torch.Tensor) for value in values)

    def _brought_in(self, node: ast.expr) -> bool:
        """Whether a run brings a part of this argument."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return bool(names & set(self.names) & _TENSORS.keys())

    def _is_called_with(self, name: str) -> bool:
        outside = copy.deepcopy(self.expression)
        kept = _Replaced(ast.dump(self.call.func)).visit(outside)
        return name in {n.id for n in ast.walk(kept) if isinstance(n, ast.Name)}

    def _evaluated(self, node: ast.expr, names: dict[str, object]) -> object:
        tree = ast.fix_missing_locations(ast.Expression(copy.deepcopy(node)))
        return eval(compile(tree, "<call>", "eval"), {**self.scope, **names})

    def _given(self, subject: Subject) -> dict[str, object]:
        """The arguments that it brings itself, by the names of the parameters."""
        usual = {name: _USUAL.get(name) for name in self.names}
        positional: list[object] = []
        for argument in self.call.args:
            if self._brought_in(argument):
                positional.append(_BROUGHT)
                continue
            several = isinstance(argument, ast.Starred)
            value = self._evaluated(argument.value if several else argument, usual)
            positional += list(value) if several else [value]
        named = {
            k.arg: self._evaluated(k.value, usual)
            for k in self.call.keywords
            if not self._brought_in(k.value)
        }
        entry = subject.entry
        first = [None] if subject.kind == "class" else []
        bound = inspect.signature(entry).bind_partial(*first, *positional, **named)
        given = dict(bound.arguments)
        if first:
            given.pop(next(iter(given)))
        return {name: value for name, value in given.items() if value is not _BROUGHT}

    def _how(self, method: str) -> Callable:
        """Calls the code as the expression does, with what a run brings."""
        tree = _Replaced(ast.dump(self.call.func)).visit(copy.deepcopy(self.expression))
        code = compile(ast.fix_missing_locations(tree), "<call>", "eval")
        short = {long: name for name, long in _NAMES.items()}

        def how(target: object, **brought: object) -> object:
            called = getattr(target, method) if method else target
            names = {short[name]: value for name, value in brought.items()}
            return eval(code, {**self.scope, **names, _CODE: called})

        return how

    def _construct(self, is_bound: bool) -> Callable:
        short = {long: name for name, long in _NAMES.items()}

        def construct(**sizes: object) -> object:
            names = {short[name]: size for name, size in sizes.items()}
            made = self._evaluated(self.call.func, names)
            return made.__self__ if is_bound else made

        return construct


class _Replaced(ast.NodeTransformer):
    """The code, where it is constructed or named, as a name of ours."""

    def __init__(self, dump: str) -> None:
        self._dump = dump

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.dump(node) == self._dump:
            return ast.Name(_CODE, ast.Load())
        return super().visit(node)


def _with_parameters(names: list[str], function: Callable | None = None) -> Callable:
    """A function that says of itself that it takes these, by their long names."""

    def stated(**given: object) -> object:
        return function(**given) if function else None

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(_NAMES[name], kind) for name in names]
    stated.__signature__ = inspect.Signature(parameters)
    return stated
