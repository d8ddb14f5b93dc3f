# SPDX-License-Identifier: MIT
"""A function that makes a function, as a class whose constructor is the one and whose call
is the other: make_attention(heads)(q, k, v)."""

import ast
import inspect
import textwrap
import types
from collections.abc import Callable

from torch import nn

from .texts import text_of


def as_class(maker: Callable) -> type | None:
    """None where it does not return, whatever is asked of it, a function that it defines."""
    inner = _made_by(maker)
    if inner is None:
        return None

    def __init__(self, *args: object, **kwargs: object) -> None:
        nn.Module.__init__(self)
        self.made = maker(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.made(*args, **kwargs)

    body = {"__init__": __init__, "forward": forward, "__doc__": maker.__doc__}
    for method, stands_for in ((__init__, maker), (forward, inner)):
        method.__wrapped__ = stands_for  # whose text and names are read
        signature = inspect.signature(stands_for)
        rest = list(signature.parameters.values())
        kinds = {p.kind for p in rest}
        first = inspect.Parameter.POSITIONAL_ONLY
        kind = first if first in kinds else inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = inspect.Parameter("_made_self", kind)
        method.__signature__ = signature.replace(parameters=[own, *rest])
    names = {"__module__": maker.__module__, "__qualname__": maker.__qualname__}
    return type(maker.__name__, (nn.Module,), body | names)


def _made_by(maker: Callable) -> types.FunctionType | None:
    """The function that it returns, with none of what it closes over."""
    if not isinstance(maker, types.FunctionType):
        return None
    try:
        (tree,) = ast.parse(textwrap.dedent(text_of(maker))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    returned = {_returned(node) for node in _own(tree) if isinstance(node, ast.Return)}
    name = returned.pop() if len(returned) == 1 else None
    codes = [c for c in maker.__code__.co_consts if isinstance(c, types.CodeType)]
    code = next((c for c in codes if c.co_name == name), None)
    made = next((n for n in tree.body if getattr(n, "name", "") == name), None)
    if code is None or not isinstance(made, ast.FunctionDef) or made.decorator_list:
        return None
    if made.args.args[:1] and made.args.args[0].arg == "self":
        return None  # a method for some class
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    again = any(n.id == name and isinstance(n.ctx, ast.Store) for n in named)
    handed = {argument.arg for argument in tree.args.args + tree.args.kwonlyargs}
    calls = (n.func for n in ast.walk(made) if isinstance(n, ast.Call))
    wraps = any(isinstance(f, ast.Name) and f.id in handed for f in calls)
    if again or wraps:  # as a decorator does
        return None
    cells = tuple(types.CellType() for _ in code.co_freevars)
    inner = types.FunctionType(code, maker.__globals__, closure=cells)
    inner.__defaults__ = tuple(map(_literal, made.args.defaults)) or None
    keywords = zip(made.args.kwonlyargs, made.args.kw_defaults)
    inner.__kwdefaults__ = {a.arg: _literal(d) for a, d in keywords if d is not None}
    return inner


def _returned(node: ast.Return) -> str | None:
    return node.value.id if isinstance(node.value, ast.Name) else None


def _own(tree: ast.FunctionDef) -> list[ast.AST]:
    """What is in a function and in none inside it."""
    found: list[ast.AST] = []
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            left.extend(ast.iter_child_nodes(node))
    return found


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
