# SPDX-License-Identifier: MIT
"""Finds the code that is to be checked, and says what it is."""

import contextlib
import functools
import inspect
import pathlib
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..finding import Finding
from ..sandbox.guard import Guard
from ..sandbox.traceback_report import finding_of, is_library
from .load import Absent, missing, run_file

_ATTENTION = re.compile(r"attention|attn|mha|gqa|mqa|sdpa", re.IGNORECASE)
_MULTI = re.compile(r"multi_?head|mha|grouped|gqa|mqa|multi_?query", re.IGNORECASE)


class Unreachable(Exception):
    """The target's file could not be run up to the target; holds the findings."""

    def __init__(self, findings: list[Finding]):
        super().__init__(findings[0].sentence)
        self.findings = findings


@dataclass
class Subject:
    """The code under test.

    kind: "function", "class" (to be constructed) or "instance". target: the
    object itself. entry: the function whose signature a call has. name and where
    are shown; source is the text of the target, empty where there is none.
    """

    kind: str
    target: object
    entry: Callable
    name: str
    where: str = ""
    source: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_module(self) -> bool:
        kind = self.target if self.kind == "class" else type(self.target)
        return issubclass(kind, nn.Module)


def load(target: object, guard: Guard) -> Subject:
    """The subject that `target` names: a function, a module, its class, or a
    string "file.py:name" or "file.py"; a notebook is a file, too.

    Raises FileNotFoundError or ValueError where there is no such thing, and
    Unreachable where the file raises before it defines the target, or the target
    is of a package that is not there.
    """
    if not isinstance(target, (str, pathlib.Path)):
        return describe(target)
    path, name = _path_and_name(str(target))
    if not path.is_file():
        raise FileNotFoundError(f"check: target must name a file, got {str(target)!r}")
    module, outcome = run_file(path, guard)
    found = vars(module).get(name) if name else None
    if found is None and outcome.error is not None:
        candidates = [] if name else _candidates(module)
        if not candidates:
            raise Unreachable(outcome.findings)
    absent = [v for v in (found, *vars(module).values()) if isinstance(v, Absent)]
    if absent and (found is absent[0] or found is None and not _defined(module)):
        raise Unreachable([finding_of(missing(absent[0]), guard.time_limit)])
    if name and found is None:
        raise ValueError(
            f"check: target must name something defined in {path}, got {name!r} "
            f"(it defines {', '.join(_defined(module)) or 'nothing'})"
        )
    subject = describe(found if name else _only_candidate(module, path))
    subject.findings += [f for f in outcome.findings if f.kind != "failure"]
    return subject


def _path_and_name(target: str) -> tuple[pathlib.Path, str]:
    found = re.fullmatch(r"(.*\.(?:py|ipynb)):(\w+)", target)
    return (pathlib.Path(found[1]), found[2]) if found else (pathlib.Path(target), "")


def describe(target: object) -> Subject:
    """The subject for an object; ValueError if it cannot be called."""
    for original in ("_orig_mod", "_torchdynamo_orig_callable"):
        target = _attribute(target, original) or target
    if inspect.isclass(target):
        kind, entry = "class", _method(target)
    elif isinstance(target, nn.Module) or not _is_function(target):
        kind, entry = "instance", _method(target)
    else:
        kind, entry = "function", target
    if entry is None:
        raise ValueError(
            "check: target must be a function, a module, its class or 'file.py:name', "
            f"got {type(target).__name__}"
        )
    code = target
    while isinstance(code, functools.partial):
        code = code.func
    code = type(code) if kind == "instance" else inspect.unwrap(code)
    return Subject(kind, target, entry, _name(code), _where(code), _source(code))


def _is_function(target: object) -> bool:
    kinds = (
        types.FunctionType,
        types.MethodType,
        types.BuiltinFunctionType,
        functools.partial,
        torch.jit.ScriptFunction,
    )
    return isinstance(target, kinds)


def _method(target: object) -> Callable | None:
    """What a call of a module, or of any other object, runs."""
    kind = target if inspect.isclass(target) else type(target)
    owner = next((k for k in kind.__mro__ if "__call__" in vars(k)), None)
    if owner in (None, nn.Module):  # whose own runs forward
        return _attribute(target, "forward")
    return kind.__call__ if kind is target else target.__call__


def _attribute(target: object, name: str) -> object:
    """An attribute of a foreign object, which may raise anything; None without."""
    try:
        return getattr(target, name, None)
    except Exception:
        return None


def _name(code: object) -> str:
    return getattr(code, "__qualname__", type(code).__name__).split("<locals>.")[-1]


def _where(code: object) -> str:
    try:
        file = inspect.getsourcefile(code)
        return f"{pathlib.Path(file).name}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return ""


def _source(code: object) -> str:
    """The text of a function, or of a class and of what it inherits from."""
    texts = []
    for part in inspect.getmro(code) if inspect.isclass(code) else (code,):
        package = str(part.__module__).partition(".")[0]
        if part is code or package not in ("torch", "builtins"):
            with contextlib.suppress(OSError, TypeError):
                texts.append(inspect.getsource(part))
    return "\n".join(texts)


def _defined(module: types.ModuleType) -> dict[str, object]:
    """The functions and classes of a file that can be called; where it has none, those
    that it imports from other files of its author."""
    found = {
        name: value
        for name, value in vars(module).items()
        if (inspect.isclass(value) or _is_function(value))
        and (not inspect.isclass(value) or _method(value) is not None)
        and not name.startswith("test")
    }
    own = {
        name: value
        for name, value in found.items()
        if getattr(value, "__module__", None) == module.__name__
    }
    return own or {n: v for n, v in found.items() if not _is_of_library(v)}


def _is_of_library(value: object) -> bool:
    try:
        return is_library(inspect.getsourcefile(inspect.unwrap(value)) or "")
    except (OSError, TypeError):  # it is written in C
        return True


def _candidates(module: types.ModuleType) -> list[str]:
    """The names in a file that are most likely meant: attention with several heads,
    else attention, else anything."""
    names = list(_defined(module))
    for pattern in (_MULTI, _ATTENTION):
        found = [name for name in names if pattern.search(name)]
        if found:
            return found
    return names


def _only_candidate(module: types.ModuleType, path: pathlib.Path) -> object:
    names = _candidates(module)
    if len(names) != 1:
        raise ValueError(
            f"check: target must say which of {path} to check, as in "
            f"'{path}:{names[0] if names else 'name'}' "
            f"(it defines {', '.join(names) or 'no function or class'})"
        )
    return vars(module)[names[0]]
