# SPDX-License-Identifier: MIT
"""Finds the attention of a checkout by its code; nothing of it is run or imported."""

import ast
import hashlib
import pathlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from .evidence import NAME, Evidence, called, of_function
from .files import python_files, texts

_SIGN = re.compile(r"softmax|attention|attn|\bexp\(", re.IGNORECASE)
# Programs of another framework are not called from here.
_OTHER_FRAMEWORKS = {
    "tensorflow",
    "keras",
    "jax",
    "flax",
    "haiku",
    "equinox",
    "paddle",
    "mindspore",
    "mxnet",
    "mlx",
    "tinygrad",
    "triton",
}
_OURS = {"torch", "numpy"}
_CALLED = ("forward", "__call__", "call")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Arguments of what trains, evaluates or draws with attention, and is none.
_OF_PROGRAMS = {"args", "model", "models", "net", "loader", "dataloader", "optimizer"}
_PROJECTIONS = 3  # of queries, keys and values
_NO_TARGET = {"Function", "Protocol", "TypedDict", "Enum", "Exception"}


@dataclass
class Candidate:
    """A class or function of the top level of a file that looks like attention.

    target: as `multihead check` takes it. cell: of a notebook, "[3]". same_as: the
    candidate that has the same text, and is checked instead.
    """

    target: str
    file: str
    line: int
    name: str
    score: int
    cell: str = ""
    end_line: int = 0
    same_as: str = ""


@dataclass
class Found:
    """files: that were looked at. other: candidates of other frameworks."""

    candidates: list[Candidate] = field(default_factory=list)
    files: int = 0
    other: int = 0

    def to_dict(self) -> dict:
        return asdict(self)


def find(root: str) -> Found:
    """Candidates, the likeliest first. ValueError where `root` is no folder."""
    folder = pathlib.Path(root)
    if not folder.is_dir():
        raise ValueError(f"check: target must be a folder, got {root}")
    found, first = Found(), {}
    for path in python_files(folder):
        found.files += 1
        for candidate, digest, is_other in _of_file(folder, path):
            if is_other:
                found.other += 1
                continue
            same = first.setdefault(digest, candidate)
            candidate.same_as = "" if same is candidate else same.target
            found.candidates.append(candidate)
    found.candidates.sort(
        key=lambda c: (-c.score, len(pathlib.Path(c.file).parts), c.file, c.line)
    )
    return found


def _of_file(
    folder: pathlib.Path, path: pathlib.Path
) -> Iterable[tuple[Candidate, str, bool]]:
    """Each with a digest of its text, and whether another framework is to run it."""
    parsed = [
        (cell, tree)
        for cell, text in texts(folder / path)
        if (tree := _parsed(text)) is not None
    ]
    if not any(_SIGN.search(text) for _, text in texts(folder / path)):
        return
    statements = [(cell, node) for cell, tree in parsed for node in _top(tree.body)]
    modules = _imported(node for _, node in statements)
    is_other = bool(modules & _OTHER_FRAMEWORKS) and not modules & _OURS
    known = {
        node.name: node
        for _, node in statements
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef))
    }
    evidence = _Evidences(known)
    for cell, node in statements:
        if known.get(getattr(node, "name", "")) is not node or not _is_target(node):
            continue
        score = evidence.of(node.name).score(node.name)
        if score:
            name = (folder / path).as_posix() + f":{node.name}"
            candidate = Candidate(
                name, path.as_posix(), node.lineno, node.name, score, cell
            )
            candidate.end_line = node.end_lineno or node.lineno
            yield candidate, evidence.digest(node.name, modules), is_other


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _top(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements of the top level, those under `try` and `if` among them."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            yield from _top(node.body)
            yield from _top(node.orelse)
        else:
            yield node


def _imported(nodes: Iterable[ast.stmt]) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _is_target(node: ast.stmt) -> bool:
    """Whether somebody could call it: no test, no kernel, no abstract class."""
    if isinstance(node, ast.ClassDef):
        bases = {called(ast.Call(base, [], [])) for base in node.bases}
        methods = {m.name for m in node.body if isinstance(m, _FUNCTIONS)}
        return not bases & _NO_TARGET and bool(methods & set(_CALLED))
    if not isinstance(node, _FUNCTIONS) or node.name.startswith("test"):
        return False
    arguments = node.args
    takes = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    is_kernel = any("jit" in d and "torch" not in d for d in decorators)
    is_program = {a.arg for a in takes} & _OF_PROGRAMS
    return bool(takes or arguments.vararg) and not is_kernel and not is_program


def _softmax_layers(methods: list[ast.FunctionDef]) -> frozenset[str]:
    """The names under which an object keeps softmax layers."""
    assignments = (n for m in methods for n in ast.walk(m) if isinstance(n, ast.Assign))
    return frozenset(
        target.attr
        for node in assignments
        if isinstance(node.value, ast.Call) and called(node.value) == "Softmax"
        for target in node.targets
        if isinstance(target, ast.Attribute)
    )


def _projections(node: ast.stmt) -> int:
    """How many linear layers it makes, at least."""
    several = (ast.ListComp, ast.GeneratorExp)
    made = [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    in_turn = any(
        called(call) == "Linear"
        for comprehension in ast.walk(node)
        if isinstance(comprehension, several)
        for call in ast.walk(comprehension.elt)
        if isinstance(call, ast.Call)
    )
    return made.count("Linear") + (_PROJECTIONS if in_turn else 0)


class _Evidences:
    """Of the functions and classes of one file, with that of what they call."""

    def __init__(self, known: dict[str, ast.stmt]) -> None:
        self.known = known

    def of(self, name: str) -> Evidence:
        node = self.known[name]
        own = self._own(node)
        if not NAME.search(name):
            return own
        # A class often leaves the steps to a function beside it.
        for other in self._calls(node):
            helper = self.known.get(other)
            if isinstance(helper, _FUNCTIONS) and helper is not node:
                own = own | self._own(helper)
        return own

    @staticmethod
    def _own(node: ast.stmt) -> Evidence:
        if isinstance(node, _FUNCTIONS):
            return of_function(node)
        methods = [m for m in getattr(node, "body", []) if isinstance(m, _FUNCTIONS)]
        layers = _softmax_layers(methods)
        evidence = Evidence(softmax=bool(layers))
        for method in methods:
            evidence = evidence | of_function(method, layers)
        calls = [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
        if NAME.search(getattr(node, "name", "")):
            evidence.whole |= "MultiheadAttention" in calls
            # It projects, and has attention by itself from another class.
            inner = any(NAME.search(name) and name[:1].isupper() for name in calls)
            evidence.whole |= inner and _projections(node) >= _PROJECTIONS
        return evidence

    @staticmethod
    def _calls(node: ast.stmt) -> set[str]:
        calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
        return {c.func.id for c in calls if isinstance(c.func, ast.Name)}

    def digest(self, name: str, modules: set[str]) -> str:
        """Of the text, of what it calls in its file, and of what the file imports:
        copies of all of it behave alike."""
        node = self.known[name]
        parts = [node, *(self.known[n] for n in self._used(node))]
        text = "\n".join([*sorted(modules), *(ast.dump(part) for part in parts)])
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    def _used(self, node: ast.stmt) -> list[str]:
        names, new = set(), {self._name(node)}
        while new:
            names |= new
            new = {
                n.id
                for name in new
                for n in ast.walk(self.known[name])
                if isinstance(n, ast.Name) and n.id in self.known
            } - names
        return sorted(names - {self._name(node)})

    @staticmethod
    def _name(node: ast.stmt) -> str:
        return getattr(node, "name", "")
