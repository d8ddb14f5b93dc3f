# SPDX-License-Identifier: MIT
"""Finds the code that is to be checked, and says what it is."""

import ast
import contextlib
import enum
import functools
import importlib
import inspect
import linecache
import pathlib
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..report import Finding
from ..sandbox.guard import Guard, Outcome, Stop, finding_of, is_cell, is_library
from .absent import Absent, missing
from .maker import as_class
from .script import overlays, run_file
from .texts import lines_of, text_of

_ATTENTION = re.compile(r"attention|attn|mha|gqa|mqa|sdpa", re.IGNORECASE)
_MULTI = re.compile(r"multi_?head|mha|grouped|gqa|mqa|multi_?query", re.IGNORECASE)
_OF_ATTENTION = re.compile(r"attention|attend|attn|^(apply|call|compute|run)$", re.I)
# Seconds that a file has for itself, what it imports among it.
_LOADING = 30.0

_BACKWARD = ("backward", "backward_pass", "backprop", "bprop")


@dataclass
class Subject:
    """The code under test.

    kind: "function", "class" (to be constructed) or "instance". target: the
    object itself. entry: the function whose signature a call has. name and where
    are shown; source is the text of the target, empty where there is none. how: what
    calls the target with the arguments of `entry`, where that is not the target
    itself; factory: what constructs a class, where that is not the class.
    """

    kind: str
    target: object
    entry: Callable
    name: str
    where: str = ""
    source: str = ""
    findings: list[Finding] = field(default_factory=list)
    how: Callable | None = None
    factory: Callable | None = None

    @property
    def type(self) -> type:
        return self.target if self.kind == "class" else type(self.target)

    @property
    def own_backward(self) -> str | None:
        """The method of its class, or of one in the same file, that computes gradients;
        none that PyTorch calls itself, and none of a package for training."""
        if issubclass(self.type, torch.autograd.Function):
            return None
        for kind in self.type.__mro__:
            if kind.__module__ == self.type.__module__:
                found = (name for name in _BACKWARD if name in vars(kind))
                if name := next(found, None):
                    return name
        return None


def load(target: object, guard: Guard) -> Subject:
    """The subject that `target` names: a function, a module, its class, or a
    string "file.py:name" or "file.py"; a notebook is a file, too.

    Raises FileNotFoundError or ValueError where there is no such thing, and
    Stop where the file raises before it defines the target, or the target
    is of a package that is not there.
    """
    if not isinstance(target, (str, pathlib.Path)):
        return describe(target)
    path, name = _named(target)
    module, outcome = _run(path, guard)
    found = vars(module).get(name) if name else None
    if found is None and outcome.error and (name or not _candidates(module)):
        # What an absent package would have had is missed later, too.
        lacking = [f for f in outcome.findings if f.name == "missing_package"]
        raise Stop(lacking or outcome.findings)
    absent = [v for v in (found, *vars(module).values()) if isinstance(v, Absent)]
    if absent and (found is absent[0] or found is None and not _defined(module)):
        raise Stop([finding_of(missing(absent[0]), guard.time_limit)])
    if name and found is None:
        raise ValueError(
            f"check: target must name something defined in {path}, got {name!r} "
            f"(it defines {', '.join(_defined(module)) or 'nothing'})"
        )
    names = [name] if name else _candidates(module)
    if len(names) != 1:
        raise ValueError(
            f"check: target must say which of {path} to check, as in "
            f"'{path}:{names[0] if names else 'name'}' "
            f"(it defines {', '.join(names) or 'no function or class'})"
        )
    subject = describe(vars(module)[names[0]])
    subject.findings += [f for f in outcome.findings if f.kind != "failure"]
    return subject


def _named(target: str | pathlib.Path) -> tuple[pathlib.Path, str]:
    """The file and the name in it, if there is one."""
    named = re.fullmatch(r"(.*\.(?:py|ipynb)):(\w+)", str(target))
    path = pathlib.Path(named[1] if named else target)
    if str(target) and path.is_dir():
        raise ValueError(
            f"check: target must name a file, got the folder {str(target)!r}; all of a "
            "folder is checked by the command `multihead check FOLDER`"
        )
    if not path.is_file():
        raise FileNotFoundError(f"check: target must name a file, got {str(target)!r}")
    return path, named[2] if named else ""


def _run(path: pathlib.Path, guard: Guard) -> tuple[types.ModuleType, Outcome]:
    with guard.apart(max(_LOADING, guard.time_limit)):
        if name := _name_of_installed(path):
            outcome = guard.run(lambda: importlib.import_module(name))
            if outcome.error is None:
                return outcome.value, outcome
        return run_file(path, guard)


def _name_of_installed(path: pathlib.Path) -> str:
    """The name by which Python imports a file of an installed package; "" of others."""
    file = path.resolve()
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    found = [pathlib.Path(p).resolve() for p in sys.path if p]
    is_package = file.stem != "__init__" and len(names) > 1
    is_package = is_package and all(name.isidentifier() for name in names)
    installed = folder in found and any(folder.glob(f"{names[0]}*.dist-info"))
    return ".".join(names) if is_package and installed and not overlays(file) else ""


def scope(target: object, guard: Guard) -> dict[str, object]:
    """The names of the file that `target` is in, or names, and its own.

    Raises FileNotFoundError where there is no such file.
    """
    if isinstance(target, (str, pathlib.Path)):
        return vars(_run(_named(target)[0], guard)[0])
    code = target if hasattr(target, "__module__") else type(target)
    names = vars(sys.modules.get(code.__module__, types))
    own = getattr(inspect.unwrap(target), "__globals__", {})
    name = getattr(target, "__name__", None)
    return {**names, **own, **({name: target} if name else {})}


def describe(target: object) -> Subject:
    """The subject for an object; ValueError if it cannot be called."""
    for original in ("_orig_mod", "_torchdynamo_orig_callable"):
        target = _attribute(target, original) or target
    if _is_function(target) and (made := as_class(target)):
        where = _where(target), _source(target)
        return Subject("class", made, _method(made), target.__name__, *where)
    if inspect.isclass(target):
        kind, entry = "class", _method(target)
    elif isinstance(target, nn.Module) or not _is_function(target):
        kind, entry = "instance", _method(target)
    else:
        kind, entry = "function", target
    how = None
    if entry is None and kind == "class" and (method := _only_method(target)):
        entry, how = _without_self(method), _called_by_name(method.__name__)
    if entry is None:
        raise ValueError(
            "check: target must be a function, a module, its class or 'file.py:name', "
            f"got {type(target).__name__}"
        )
    code = target
    while isinstance(code, functools.partial):
        code = code.func
    code = type(code) if kind == "instance" else inspect.unwrap(code)
    name = getattr(code, "__qualname__", type(code).__name__).split("<locals>.")[-1]
    return Subject(kind, target, entry, name, _where(code), _source(code), how=how)


def _is_function(target: object) -> bool:
    return inspect.isroutine(target) or isinstance(
        target, (functools.partial, torch.jit.ScriptFunction)
    )


def is_wrapped(entry: object) -> bool:
    """Whether a wrapper stands before it; that of torch.no_grad() hands all on."""
    code = getattr(entry, "__code__", None)
    return hasattr(entry, "__wrapped__") and (
        code is None or code.co_name != "decorate_context"
    )


def _method(target: object) -> Callable | None:
    """What a call of a module, or of any other object, runs."""
    kind = target if inspect.isclass(target) else type(target)
    owner = next((k for k in kind.__mro__ if "__call__" in vars(k)), None)
    forward = _attribute(target, "forward")
    # Its own runs forward, as that of a base class by hand does: it names no argument.
    if owner in (None, nn.Module) or (forward and _hands_on(vars(owner)["__call__"])):
        return forward
    return kind.__call__ if kind is target else target.__call__


def _only_method(kind: type) -> Callable | None:
    """The method of a class that nothing can call by itself: the only one that takes
    something and has a public name, or the only one named after attention."""
    if issubclass(kind, (tuple, dict, BaseException, enum.Enum)):
        return None
    public = [
        m
        for n, m in vars(kind).items()
        if inspect.isfunction(m) and not n.startswith("_") and _takes_something(m)
    ]
    named = [m for m in public if _OF_ATTENTION.search(m.__name__)]
    found = named or public
    return found[0] if len(found) == 1 else None


def _takes_something(method: Callable) -> bool:
    return len(inspect.signature(method).parameters) > 1


def _without_self(method: Callable) -> Callable:
    """Only its signature counts."""
    own = inspect.signature(method)
    rest = list(own.parameters.values())[1:]

    def entry(**given: object) -> None: ...

    entry.__wrapped__ = method  # type: ignore[attr-defined]
    entry.__signature__ = own.replace(parameters=rest)  # type: ignore[attr-defined]
    return entry


def _called_by_name(name: str) -> Callable:
    """How an object is called by this method of its."""

    def how(made: object, /, *args: object, **given: object) -> object:
        return getattr(made, name)(*args, **given)

    return how


def _hands_on(method: object) -> bool:
    """Whether it takes whatever it is given: `__call__(self, *args, **kwargs)`."""
    try:
        _, *rest = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    any_kind = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return bool(rest) and all(parameter.kind in any_kind for parameter in rest)


def _attribute(target: object, name: str) -> object:
    """An attribute of a foreign object, which may raise anything; None without."""
    try:
        return getattr(target, name, None)
    except Exception:
        return None


def _where(code: object) -> str:
    try:
        file = inspect.getsourcefile(code)
        if is_cell(file or ""):
            return "this notebook"
        return f"{pathlib.Path(file).name}:{lines_of(code)[1]}"
    except (OSError, TypeError):
        file, line, _ = _in_cell(code)
        return "this notebook" if is_cell(file) else f"{file}:{line}" if file else ""


def text_of_file(subject: Subject) -> str:
    """The text of the file that the code under test is of; "" where there is none."""
    owner = subject.target if subject.kind == "function" else subject.type
    module = sys.modules.get(getattr(owner, "__module__", None) or "")
    path = pathlib.Path(getattr(module, "__file__", None) or "")
    if path.suffix == ".ipynb":
        cells = [n for n in linecache.cache if n.startswith(f"{path.name}[")]
        return "".join(line for cell in cells for line in linecache.getlines(cell))
    try:
        return inspect.getsource(module)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def _source(code: object) -> str:
    """The text of a function, or of a class and of what it inherits from."""
    texts = []
    for part in inspect.getmro(code) if inspect.isclass(code) else (code,):
        package = str(part.__module__).partition(".")[0]
        if part is code or package not in ("torch", "builtins"):
            try:
                texts.append(text_of(part))
            except (OSError, TypeError):
                texts.append(_in_cell(part)[2])
    return "\n".join(texts)


_CELL = re.compile(r".*\.ipynb\[\d+\]")


def _in_cell(code: object) -> tuple[str, int, str]:
    """The cell, line and text of a class that a notebook defines, else nothing. Python
    finds such texts of functions alone; those of the class know their cell."""
    members = vars(code).values() if inspect.isclass(code) else ()
    files = {m.__code__.co_filename for m in members if inspect.isfunction(m)}
    for file in files:
        if not is_cell(file) and not _CELL.fullmatch(file):
            continue
        text = "".join(linecache.getlines(file))
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == code.__name__:
                    segment = ast.get_source_segment(text, node) or ""
                    return file, node.lineno, segment
    return "", 0, ""


def _defined(module: types.ModuleType) -> dict[str, object]:
    """The functions and classes of a file that can be called; where it has none, those
    that it imports from other files of its author."""
    found = {
        name: value
        for name, value in vars(module).items()
        if (
            _method(value) or (_ATTENTION.search(name) and _only_method(value))
            if inspect.isclass(value)
            else _is_function(value)
        )
        and not name.startswith("test")
    }
    here = module.__name__
    own = {n: v for n, v in found.items() if getattr(v, "__module__", None) == here}
    return own or {n: v for n, v in found.items() if not _is_of_library(v)}


def _is_of_library(value: object) -> bool:
    try:
        return is_library(inspect.getsourcefile(inspect.unwrap(value)) or "")
    except (OSError, TypeError):  # it is written in C
        return True


def _candidates(module: types.ModuleType) -> list[str]:
    """The likeliest names in a file: multi-head, else any attention, else any."""
    names = list(_defined(module))
    for pattern in (_MULTI, _ATTENTION):
        if found := [name for name in names if pattern.search(name)]:
            return found
    return names
