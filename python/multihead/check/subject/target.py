# SPDX-License-Identifier: MIT
"""Finds the code that is to be checked, and says what it is.

A file or notebook often does more than to define it: it asserts, trains, draws, asks.
It is run statement by statement, not as __main__. After the first one that fails or
takes long, only definitions and assignments are run.
"""

import __future__

import ast
import contextlib
import functools
import inspect
import itertools
import json
import linecache
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..report import Finding
from ..sandbox.guard import Guard, Outcome, Stop, finding_of, is_library
from ..sandbox.state import Snapshot

_ATTENTION = re.compile(r"attention|attn|mha|gqa|mqa|sdpa", re.IGNORECASE)
_MULTI = re.compile(r"multi_?head|mha|grouped|gqa|mqa|multi_?query", re.IGNORECASE)
# What the top level may take, imports and definitions aside, half of all time at
# most; what an assignment gets when that is used up.
_SECONDS, _MOMENT = 5.0, 0.2

_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (*_IMPORTS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


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
    def type(self) -> type:
        return self.target if self.kind == "class" else type(self.target)


def load(target: object, guard: Guard) -> Subject:
    """The subject that `target` names: a function, a module, its class, or a
    string "file.py:name" or "file.py"; a notebook is a file, too.

    Raises FileNotFoundError or ValueError where there is no such thing, and
    Stop where the file raises before it defines the target, or the target
    is of a package that is not there.
    """
    if not isinstance(target, (str, pathlib.Path)):
        return describe(target)
    named = re.fullmatch(r"(.*\.(?:py|ipynb)):(\w+)", str(target))
    path, name = (named[1], named[2]) if named else (target, "")
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"check: target must name a file, got {str(target)!r}")
    module, outcome = run_file(path, guard)
    found = vars(module).get(name) if name else None
    if found is None and outcome.error and (name or not _candidates(module)):
        raise Stop(outcome.findings)
    absent = [v for v in (found, *vars(module).values()) if isinstance(v, _Absent)]
    if absent and (found is absent[0] or found is None and not _defined(module)):
        raise Stop([finding_of(_missing(absent[0]), guard.time_limit)])
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
    name = getattr(code, "__qualname__", type(code).__name__).split("<locals>.")[-1]
    return Subject(kind, target, entry, name, _where(code), _source(code))


def _is_function(target: object) -> bool:
    return inspect.isroutine(target) or isinstance(
        target, (functools.partial, torch.jit.ScriptFunction)
    )


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
        if (_method(value) if inspect.isclass(value) else _is_function(value))
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


def run_file(path: pathlib.Path, guard: Guard) -> tuple[types.ModuleType, Outcome]:
    """The module that a .py or .ipynb file defines.

    Its outcome has an error, findings[0], where the text is no Python or a function
    or class could not be defined. Other findings are remarks: what failed and was
    left out.

    Raises ValueError where a notebook is none.
    """
    texts = _texts(path)
    # Under a name of its own, for which dataclasses and pickle ask.
    module = types.ModuleType("checked_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    outcome = Outcome()
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # for what it imports later; the guard removes it
        sys.path.insert(0, folder)
    run = _Run(module, guard, outcome, min(_SECONDS, guard.time_limit / 2))
    snapshot = Snapshot()  # a script may seed and set what it likes
    try:
        for name, source in texts:
            run.all(ast.parse(source, name).body, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        outcome.error = error
        outcome.findings.insert(0, finding_of(error, guard.time_limit))
    snapshot.restore()
    return module, outcome


_overlaid: dict[str, str] = {}


@contextlib.contextmanager
def overlaid(path: str, text: str) -> Iterator[None]:
    """Within it the file at `path` has this text, for checks; it stays as it is."""
    name = str(pathlib.Path(path).resolve())
    _overlaid[name] = text
    try:
        yield
    finally:
        del _overlaid[name]
        linecache.checkcache(name)


def _texts(path: pathlib.Path) -> list[tuple[str, str | bytes]]:
    """Each with its name: a file is one text, a notebook has one in each code cell, as
    in "exercise.ipynb[2]", without the lines that are IPython's own."""
    if path.suffix != ".ipynb":
        name = str(path.resolve())
        if name in _overlaid:
            text = _overlaid[name]
            lines = text.splitlines(keepends=True)
            linecache.cache[name] = (len(text), None, lines, name)
            return [(name, text)]
        linecache.cache.pop(name, None)
        return [(name, path.read_bytes())]
    texts = []
    for number, source in enumerate(_cells(path), 1):
        if not source.lstrip().startswith("%%"):
            name = f"{path.name}[{number}]"
            source = re.sub(r"(?m)^[ \t]*[%!].*$", "", source)
            # Tracebacks and inspect.getsource look for the lines here.
            lines = source.splitlines(keepends=True)
            linecache.cache[name] = (len(source), None, lines, name)
            texts.append((name, source))
    return texts


def _cells(path: pathlib.Path) -> list[str]:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in code]
    except (KeyError, TypeError):
        reason = "no list of cells with a cell_type and a source"
    except (ValueError, RecursionError):
        reason = "no JSON"
    raise ValueError(
        f"check: target must be a notebook, got {path}, which has {reason}"
    )


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Try, ast.If)):  # try: import …; if version: def …
        parts = itertools.chain(node.body, node.orelse)
        return any(isinstance(part, _DEFINITIONS) for part in parts)
    return isinstance(node, _DEFINITIONS)


class _Absent:
    """Stands for what an absent package would have had, until somebody uses it."""

    def __init__(self, package: str) -> None:
        self.__dict__["package"] = package

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise _missing(self)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python asks every value of a module for these
            raise AttributeError(name)
        return self()


def _missing(absent: _Absent) -> ModuleNotFoundError:
    """What an import of it raises."""
    package = absent.__dict__["package"]
    return ModuleNotFoundError(f"No module named {package!r}", name=package)


def _single(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """`import a, b` as two statements: one may fail alone."""
    for node in statements:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield ast.copy_location(ast.Import([name]), node)
        else:
            yield node


@dataclass
class _Run:
    """The statements of a file, one after the other."""

    module: types.ModuleType
    guard: Guard
    outcome: Outcome
    seconds: float
    careful: bool = False
    flags: int = 0

    def all(self, statements: list[ast.stmt], name: str) -> None:
        for node in _single(statements):
            if self.careful and not (isinstance(node, _ASSIGNMENTS) or _defines(node)):
                continue
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for feature in node.names:
                    known = getattr(__future__, feature.name, None)
                    self.flags |= getattr(known, "compiler_flag", 0)
            tree = ast.Module([node], type_ignores=[])
            code = compile(tree, name, "exec", self.flags, dont_inherit=True)
            self.one(node, code)

    def one(self, node: ast.stmt, code: types.CodeType) -> None:
        defines = _defines(node)
        before = self.guard.remaining
        result = self.guard.run(
            lambda: exec(code, vars(self.module)),
            None if defines else max(self.seconds, _MOMENT),
        )
        self.outcome.printed += result.printed
        if not defines:
            self.seconds -= before - self.guard.remaining
        if result.error is None:
            return
        if isinstance(node, _IMPORTS) and isinstance(result.error, ModuleNotFoundError):
            self.stand_in(node, result)
        elif defines:
            self.outcome.error = result.error
            self.outcome.findings.insert(0, result.findings[0])
        elif not self.careful:  # what fails later fails because of this
            self.outcome.findings.append(_stops(result))
            self.careful = True

    def stand_in(self, node: ast.Import | ast.ImportFrom, result: Outcome) -> None:
        """The file may never need what the absent package would have had."""
        for name in node.names:
            bound = name.asname or name.name.partition(".")[0]
            vars(self.module)[bound] = _Absent(result.error.name)
        found = result.findings[0]
        self.outcome.findings.append(Finding(found.name, found.sentence, kind="remark"))


def _stops(result: Outcome) -> Finding:
    """What failed at the top level: no fault of the attention that is defined."""
    found = result.findings[0]
    where, _, line = found.detail.partition("\n")
    rest = "After that line only definitions and assignments were run."
    sentence = f"The file's own assertion fails ({where})."
    if not isinstance(result.error, AssertionError):
        sentence = f"The file stops in {where}: {found.sentence.rstrip('.')}."
    elif re.search("close|equal|max", line):
        rest = (
            "Layers that were made separately have different weights, so comparing "
            "them fails for right code, too; here both have the same."
        )
    return Finding("file_stops", sentence, rest, kind="remark")
