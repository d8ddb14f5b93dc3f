# SPDX-License-Identifier: MIT
"""Runs a file or notebook as a module, for what it defines.

It often does more than to define: it asserts, trains, draws, asks. It is run statement
by statement, not as __main__. After the first one that fails or takes long, only
definitions and assignments are run. What it imports from other files of its author is
run in the same way (see neighbours.py).
"""

import __future__

import ast
import builtins
import contextlib
import copy
import importlib
import json
import linecache
import pathlib
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..report import Finding
from ..sandbox import draws
from ..sandbox.compilers import uncompiled
from ..sandbox.guard import Guard, Outcome, finding_of, message_of
from ..sandbox.state import Snapshot
from . import absent
from .absent import Absent

# What the top level may take, imports and definitions aside, half of all time at
# most; what an assignment gets when that is used up.
_SECONDS, _MOMENT = 2.5, 0.2

_IMPORTS = (ast.Import, ast.ImportFrom)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINITIONS = (*_IMPORTS, *_NAMED)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_MAGIC = re.compile(r"(?m)^([ \t]*)[%!?].*$")
_USUAL = {
    "torch": ("torch", ""),
    "nn": ("torch.nn", ""),
    "F": ("torch.nn.functional", ""),
    "Tensor": ("torch", "Tensor"),
    "einsum": ("torch", "einsum"),
    "math": ("math", ""),
    "copy": ("copy", ""),
    "np": ("numpy", ""),
    "partial": ("functools", "partial"),
    "einops": ("einops", ""),
}
_USUAL |= {
    n: ("typing", n) for n in ("Any", "Dict", "List", "Optional", "Tuple", "Union")
}
_USUAL |= {name: ("einops", name) for name in ("rearrange", "reduce", "repeat")}
# Cells whose text below the first line is Python.
_CELL_MAGIC = re.compile(r"\s*%%(time|timeit|capture|writefile|prun|skip)\b.*")

# Runs code, which has so many seconds, or as many as there are.
Execute = Callable[[Callable[[], object], float | None], Outcome]


def run_file(path: pathlib.Path, guard: Guard) -> tuple[types.ModuleType, Outcome]:
    """The module that a .py or .ipynb file defines.

    Its outcome has an error, findings[0], where the text is no Python or a function
    or class could not be defined. Other findings are remarks: what failed and was
    left out.

    Raises ValueError where a notebook is none.
    """
    from .neighbours import Neighbours  # which runs files as this does

    texts = _texts(path)
    # Under a name of its own, for which dataclasses and pickle ask.
    module = types.ModuleType("checked_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    outcome = Outcome()
    script = Script(module, guard.run, outcome, min(_SECONDS, guard.remaining / 2))
    snapshot = Snapshot()  # a script may seed and set what it likes
    argv, sys.argv = sys.argv, [module.__file__]  # no options for its parse_args()
    try:
        trees = list(_trees(texts, outcome, guard))
        neighbours = Neighbours(path.resolve(), [tree for _, tree in trees])
        guard.until_exit(neighbours.close)
        module.__package__ = neighbours.package
        _import_usual(module, trees, outcome)
        with absent.calls_go_on(), draws.large_ones_repeat(), uncompiled():
            for name, tree in trees:
                script.all(tree.body, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        outcome.error = error
        outcome.findings.insert(0, finding_of(error, guard.time_limit))
    finally:
        sys.argv = argv
    snapshot.restore()
    return module, outcome


def _import_usual(
    module: types.ModuleType, trees: list[tuple[str, ast.Module]], outcome: Outcome
) -> None:
    """What a file uses under usual names and does not import: a part of a larger file
    has no import at all; of others, `outcome` tells it."""
    whole = ast.Module([node for _, tree in trees for node in tree.body], [])
    imports = [node for node in ast.walk(whole) if isinstance(node, _IMPORTS)]
    if any(alias.name == "*" for node in imports for alias in node.names):
        return  # which may have them
    used = _unbound(whole)
    names = []
    for name in filter(used.__contains__, _USUAL):
        path, member = _USUAL[name]
        try:
            found = importlib.import_module(path)
        except ImportError:
            continue
        vars(module)[name] = getattr(found, member) if member else found
        names.append(name)
    if imports and names:
        said = " and ".join(names)
        sentence = f"The file uses {said} without an import: checked as if it had one."
        outcome.findings.append(Finding("imports_missing", sentence, kind="remark"))


def _trees(
    texts: list[tuple[str, str | bytes]], outcome: Outcome, guard: Guard
) -> Iterator[tuple[str, ast.Module]]:
    """The texts, parsed; cells of a notebook that are no Python are left out, which
    `outcome` keeps as its error. Raises what a file's text raises."""
    for name, source in texts:
        try:
            yield name, ast.parse(source, name)
        except (SyntaxError, ValueError) as error:
            if isinstance(source, bytes):
                raise
            outcome.error = error
            outcome.findings.append(finding_of(error, guard.time_limit))


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


def overlays(path: pathlib.Path) -> bool:
    return str(path.resolve()) in _overlaid


def _texts(path: pathlib.Path) -> list[tuple[str, str | bytes]]:
    """Each with its name: a file is one text, a notebook has one in each code cell, as
    in "exercise.ipynb[2]", without the lines that are IPython's own."""
    if path.suffix != ".ipynb":
        name = str(path.resolve())
        if name in _overlaid:
            text = _overlaid[name]
            lines = text.splitlines(keepends=True)
            linecache.cache[name] = (len(text), None, lines, name)
            return [(name, text.encode())]
        linecache.cache.pop(name, None)
        return [(name, path.read_bytes())]
    texts = []
    for number, source in enumerate(_cells(path), 1):
        first, _, rest = source.lstrip().partition("\n")
        is_python = not first.startswith("%%")
        if not is_python and _CELL_MAGIC.match(first):
            source, is_python = "\n" + rest, _is_python(_without_magic(rest))
        if is_python:
            name = f"{path.name}[{number}]"
            source = _without_magic(source)
            # Tracebacks and inspect.getsource look for the lines here.
            lines = source.splitlines(keepends=True)
            linecache.cache[name] = (len(source), None, lines, name)
            texts.append((name, source))
    return texts


def _without_magic(source: str) -> str:
    """A cell without the lines that only IPython knows, if it has any."""
    return source if _is_python(source) else _MAGIC.sub(r"\1pass", source)


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


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
        parts = [*node.body, *node.orelse]
        return any(isinstance(part, _DEFINITIONS) for part in parts)
    return isinstance(node, _DEFINITIONS)


def _only_sets(node: ast.stmt) -> bool:
    """Whether it gives names values, on a condition or not, and does nothing else."""
    if isinstance(node, ast.If):
        return all(map(_only_sets, [*node.body, *node.orelse]))
    if isinstance(node, ast.Try):
        return all(map(_only_sets, [*node.body, *node.orelse, *node.finalbody]))
    return isinstance(node, (*_ASSIGNMENTS, *_DEFINITIONS, ast.Pass))


def _asks_for_main(node: ast.If) -> bool:
    names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
    return names == {"__name__"}


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


_COUNTING = set(
    "len list set dict tuple sorted enumerate range zip min max sum".split()
)
_COUNTING |= set("int float str join split lower strip items keys values".split())


def _is_calculated(node: ast.expr) -> bool:
    """Whether it is made of literals and names, and calls what counts and cuts: 4 * 64,
    len(words), {w: i for i, w in enumerate(" ".join(sentences).split())}."""
    called = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    names = [getattr(func, "attr", getattr(func, "id", "")) for func in called]
    return _COUNTING.issuperset(names)


def _single(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """`import a, b` as two statements: one may fail alone."""
    for node in statements:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield ast.copy_location(ast.Import([name]), node)
        else:
            yield node


@dataclass
class Script:
    """The statements of a file, one after the other, in its module."""

    module: types.ModuleType
    execute: Execute
    outcome: Outcome
    seconds: float
    careful: bool = False
    flags: int = 0

    def all(self, statements: list[ast.stmt], name: str) -> None:
        self._tree = ast.Module(statements, type_ignores=[])
        for node in _single(statements):
            if isinstance(node, ast.If) and _asks_for_main(node):
                self._constants(node.body)
            if self.careful and not (_only_sets(node) or _defines(node)):
                continue
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for feature in node.names:
                    known = getattr(__future__, feature.name, None)
                    self.flags |= getattr(known, "compiler_flag", 0)
            self.one(node, name)

    def _constants(self, statements: list[ast.stmt]) -> None:
        """What a script sets before it starts, which its classes may read: numbers
        and the like, under names that have no value yet."""
        for node in statements:
            if isinstance(node, ast.Assign) and _is_calculated(node.value):
                names = [n.id for t in node.targets for n in ast.walk(t) if _is_name(n)]
                if names and not set(names) & vars(self.module).keys():
                    self._run(node, self.module.__file__ or "")

    def one(self, node: ast.stmt, name: str) -> None:
        defines = _defines(node)
        result = self._run(self._without_absent_decorators(node), name)
        self.outcome.printed += result.printed
        if result.error is not None and isinstance(node, _NAMED):
            result = self._bare(node, name, result)
        if result.error is None:
            return
        imports = [n for n in ast.walk(node) if isinstance(n, _IMPORTS)]
        if isinstance(node, _IMPORTS) or (
            isinstance(result.error, ImportError) and imports and defines
        ):
            for part in imports:
                self._import_what_is_there(part, name)
            # The file may never need what the absent package would have had.
            found = result.findings[0]
            self.outcome.findings.append(
                Finding(found.name, found.sentence, kind="remark")
            )
        elif defines:
            self.outcome.error = result.error
            self.outcome.findings.insert(0, result.findings[0])
        elif not self.careful:  # what fails later fails because of this
            self.outcome.findings.append(_stops(result))
            self.careful = True

    def _run(self, node: ast.stmt, name: str, flags: int = 0) -> Outcome:
        tree = ast.Module([node], type_ignores=[])
        code = compile(tree, name, "exec", self.flags | flags, dont_inherit=True)
        return self._execute(code, not _defines(node))

    def _execute(self, code: types.CodeType, is_limited: bool) -> Outcome:
        limit = max(self.seconds, _MOMENT) if is_limited else None
        start = time.monotonic()
        result = self.execute(lambda: exec(code, vars(self.module)), limit)
        if is_limited:
            self.seconds -= time.monotonic() - start
        return result

    def _without_absent_decorators(self, node: ast.stmt) -> ast.stmt:
        """What a decorator of an absent package would add, is not looked at here."""
        if not any(getattr(n, "decorator_list", ()) for n in ast.walk(node)):
            return node
        node = copy.deepcopy(node)
        for part in ast.walk(node):
            if isinstance(part, _NAMED):
                part.decorator_list = [
                    d for d in part.decorator_list if not self._is_absent(d)
                ]
        return node

    def _is_absent(self, decorator: ast.expr) -> bool:
        names = [n for n in ast.walk(decorator) if isinstance(n, ast.Name)]
        found = vars(self.module).get(names[0].id) if names else None
        return isinstance(found, Absent)

    def _bare(self, node: ast.stmt, name: str, result: Outcome) -> Outcome:
        """Without decorators and annotations, which may be what fails."""
        bare = copy.deepcopy(node)
        bare.decorator_list = []
        flags = __future__.annotations.compiler_flag
        again = self._run(self._without_absent_decorators(bare), name, flags)
        return again if again.error is None else result

    def _import_what_is_there(self, node: ast.stmt, file: str) -> None:
        """Each name by itself; something stands in for what is not there."""
        for name in node.names:
            bound = name.asname or name.name.partition(".")[0]
            if bound in vars(self.module):
                continue
            single = copy.copy(node)
            single.names = [name]
            result = self._run(single, file)
            if result.error is None:
                continue
            reason = _reason(node, result.error)
            if name.name == "*":
                for unbound in _unbound(self._tree) - vars(self.module).keys():
                    vars(self.module)[unbound] = absent.of(reason, unbound)
            elif isinstance(node, ast.ImportFrom):
                vars(self.module)[bound] = absent.of(reason, name.name)
            else:
                vars(self.module)[bound] = Absent(reason, name.name)


def _reason(node: ast.stmt, error: BaseException) -> ImportError:
    """Why a name cannot be imported, as an error to raise where it is needed."""
    is_from = isinstance(node, ast.ImportFrom)
    path = (node.module or ".") if is_from else node.names[0].name
    if not isinstance(error, ImportError):
        error = ImportError(f"{path}: {message_of(error)}", name=path)
    error.name = error.name or path
    error.of_neighbour = getattr(error, "of_neighbour", is_from and node.level > 0)
    return error


def _unbound(tree: ast.Module) -> set[str]:
    """The names that a text uses and nowhere binds."""
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if not isinstance(n.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, _NAMED):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return {n.id for n in names} - bound - vars(builtins).keys()


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
