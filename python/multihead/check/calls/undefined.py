# SPDX-License-Identifier: MIT
"""Settings that the code reads as names of its file, which defines them nowhere: the
first cell of a notebook or another file has them (`n_embd = 384`)."""

import builtins
import dis
import inspect
import pathlib
import types
from collections.abc import Iterator

from ..report import Finding
from ..subject.target import Subject
from .cases import Sizes, with_inner
from .settings import value_for

_LENGTHS = {"B", "T", "L", "N", "S"}
# A file's sizes are for all cases: the longest has 257 keys.
_SIZES = Sizes(keys=511)


def define(subject: Subject, target: object) -> Subject:
    """The subject that `target` names, in whose file such settings have values, which a
    remark tells. What is there already, in a program that runs, is left as it is."""
    if not isinstance(target, (str, pathlib.Path)):
        return subject
    names = getattr(inspect.unwrap(subject.entry), "__globals__", {})
    code = subject.target if subject.kind == "function" else subject.type
    values = {name: value_for(name, _SIZES) for name in _undefined(code, names)}
    made_up = {name: value for name, value in values.items() if value is not None}
    if made_up:
        names.update(made_up)
        told = ", ".join(f"{name} = {value!s}" for name, value in made_up.items())
        subject.findings.append(
            Finding(
                "settings_undefined",
                f"The file does not define {' and '.join(made_up)}: checked with {told}.",
                kind="remark",
            )
        )
    return subject


def _undefined(first: object, names: dict[str, object]) -> list[str]:
    """What is read and nowhere defined. What is an argument elsewhere in the class, or
    read outside of the constructor and an attribute, has lost its `self.`: a mistake."""
    found: dict[str, None] = {}
    for codes in _codes([first], names):
        arguments = {name for code in codes for name in code.co_varnames}
        attributes = {name for code in codes for name in _named(code, "STORE_ATTR")}
        for code in codes:
            lost = arguments | (attributes if code.co_name != "__init__" else set())
            read = (n for n in _named(code, "LOAD_GLOBAL") if n not in lost)
            # Outside of the constructor these letters are sizes of inputs, forgotten.
            inside = "__init__" in getattr(code, "co_qualname", code.co_name)
            found |= dict.fromkeys(n for n in read if inside or n not in _LENGTHS)
    return [n for n in found if n not in names and not hasattr(builtins, n)]


def _codes(queue: list, names: dict[str, object]) -> Iterator[list[types.CodeType]]:
    """The code of these and of all classes and functions of the file that they name:
    each class's together."""
    seen: set[int] = set()
    while queue:
        one = queue.pop(0)
        elsewhere = getattr(one, "__module__", None) != names.get("__name__")
        if id(one) in seen or elsewhere:
            continue
        seen.add(id(one))
        is_class = inspect.isclass(one)
        queue += one.__mro__[1:] if is_class else ()
        parts = [p for p in vars(one).values() if callable(p)] if is_class else [one]
        found = [getattr(inspect.unwrap(part), "__code__", None) for part in parts]
        codes = [inner for code in found for inner in with_inner(code)]
        named = [names.get(name) for code in codes for name in code.co_names]
        queue += filter(callable, named)
        yield codes


def _named(code: types.CodeType, operation: str) -> list[str]:
    found = dis.get_instructions(code)
    return [one.argval for one in found if one.opname == operation]
