# SPDX-License-Identifier: MIT
"""Runs somebody's file or notebook for what it defines.

Such a file often does more: it asserts, trains, draws, asks. It is run statement
by statement, not as __main__. After the first one that fails or takes long, only
definitions and assignments are run.
"""

import __future__

import ast
import itertools
import linecache
import pathlib
import re
import sys
import types
from collections.abc import Iterator

from ..finding import Finding
from ..sandbox.guard import Guard, Outcome
from ..sandbox.state import Snapshot
from ..sandbox.traceback_report import finding_of
from .notebook import code_of

# What the top level may take, imports and definitions aside, half of all time at
# most; what an assignment gets when that is used up.
_SECONDS, _MOMENT = 5.0, 0.2

_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (*_IMPORTS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def run_file(path: pathlib.Path, guard: Guard) -> tuple[types.ModuleType, Outcome]:
    """The module that a .py or .ipynb file defines.

    Its outcome has an error, findings[0], where the text is no Python or a function
    or class could not be defined. Other findings are remarks: what failed and was
    left out.

    Raises ValueError where a notebook is none.
    """
    texts = _texts(path)
    module = _module(path)
    outcome = Outcome()
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # for what it imports later; the guard removes it
        sys.path.insert(0, folder)
    run = _Run(module, guard, outcome)
    snapshot = Snapshot()  # a script may seed and set what it likes
    try:
        for name, source in texts:
            run.all(ast.parse(source, name).body, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        outcome.error = error
        outcome.findings.insert(0, finding_of(error, guard.time_limit))
    snapshot.restore()
    return module, outcome


def _module(path: pathlib.Path) -> types.ModuleType:
    """Empty, under a name of its own, for which dataclasses and pickle ask."""
    name = "checked_" + re.sub(r"\W", "_", path.stem)
    module = types.ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module
    return module


def _texts(path: pathlib.Path) -> list[tuple[str, str | bytes]]:
    """Each with its name: a file is one text, a notebook has one in each code cell."""
    if path.suffix != ".ipynb":
        name = str(path.resolve())
        linecache.checkcache(name)
        return [(name, path.read_bytes())]
    texts = list(code_of(path))
    for name, source in texts:
        # Tracebacks and inspect.getsource look for the lines here.
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, lines, name)
    return texts


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Try, ast.If)):  # try: import …; if version: def …
        parts = itertools.chain(node.body, node.orelse)
        return any(isinstance(part, _DEFINITIONS) for part in parts)
    return isinstance(node, _DEFINITIONS)


class Absent:
    """Stands for what an absent package would have had, until somebody uses it."""

    def __init__(self, package: str) -> None:
        self.__dict__["package"] = package

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise missing(self)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python asks every value of a module for these
            raise AttributeError(name)
        return self()


def missing(absent: Absent) -> ModuleNotFoundError:
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


class _Run:
    """The statements of a file, one after the other."""

    def __init__(
        self, module: types.ModuleType, guard: Guard, outcome: Outcome
    ) -> None:
        self.module = module
        self.guard = guard
        self.outcome = outcome
        self.seconds = min(_SECONDS, guard.time_limit / 2)
        self.careful = False
        self.flags = 0

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
            vars(self.module)[bound] = Absent(result.error.name)
        found = result.findings[0]
        self.outcome.findings.append(Finding(found.name, found.sentence, kind="remark"))


def _stops(result: Outcome) -> Finding:
    """What failed at the top level: no fault of the attention that is defined."""
    found = result.findings[0]
    where, _, line = found.detail.partition("\n")
    rest = "After that line only definitions and assignments were run."
    if not isinstance(result.error, AssertionError):
        sentence = f"The file stops in {where}: {found.sentence.rstrip('.')}."
        return Finding("file_stops", sentence, rest, kind="remark")
    if re.search("close|equal|max", line):
        rest = (
            "Layers that were made separately have different weights, so comparing "
            "them fails for right code, too; here both have the same."
        )
    sentence = f"The file's own assertion fails ({where})."
    return Finding("file_stops", sentence, rest, kind="remark")
