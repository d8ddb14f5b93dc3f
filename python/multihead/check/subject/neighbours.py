# SPDX-License-Identifier: MIT
"""Imports of a checked file from other files of its author: its neighbours, its own
package, and what lies beside that, without an installation.

They are run for what they define, statement by statement. What a package's own
__init__.py would import is imported when it is asked for: most of it never is.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Iterator

from ..sandbox.guard import Outcome, OutOfTime, finding_of, is_library
from . import absent
from .script import Script

_MOST_ABOVE = 5
# What packages write down of themselves; Python asks for other such names.
_WRITTEN = ("__all__", "__version__")
# What lies in the topmost folder of somebody's work.
_TOPMOST = (".git", "setup.py", "pyproject.toml", "setup.cfg", "requirements.txt")
_NEVER = {"torch", "numpy", "multihead", *sys.stdlib_module_names}
_SHARED = {pathlib.Path(p) for p in ("/", "/tmp", "/home", "/root", "/usr", "/var")}


class Neighbours(importlib.abc.MetaPathFinder):
    """Finds what the file at `path` imports. package: what it belongs to, for
    relative imports. close() takes it all out of Python's tables again."""

    def __init__(self, path: pathlib.Path, trees: list[ast.Module]) -> None:
        self._folder = path.parent
        self._top, self.package = _package(path.parent, _levels(trees))
        self._above = [*_added(path.parent, trees), *_folders_above(path.parent)]
        self._divided = set(_divided(trees))
        self._loaded: list[str] = []
        self._folders: set[str] = set()  # of packages
        self._hidden: dict[str, types.ModuleType] = {}
        self._hide({self.package.partition(".")[0], *_names(path.parent)})
        sys.meta_path.insert(0, self)

    def close(self) -> None:
        sys.meta_path.remove(self)
        for name in self._loaded:
            sys.modules.pop(name, None)
        sys.modules.update(self._hidden)

    def _hide(self, names: set[str]) -> None:
        """Modules of these names that come from elsewhere, until the end."""
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            file = getattr(sys.modules.get(top), "__file__", None) or ""
            if top in names - _NEVER and not is_library(file):
                self._hidden[name] = module
        for name in self._hidden:
            del sys.modules[name]

    def find_spec(self, fullname, path=None, target=None):
        top, _, _ = fullname.partition(".")
        if top in _NEVER:
            return None
        if path is not None:  # within a package
            own = [pathlib.Path(p) for p in path if p in self._folders]
            return self._spec(fullname, own)
        if fullname == self.package.partition(".")[0]:
            return self._of_package(fullname, self._top)
        found = self._spec(fullname, [self._folder])
        if found or importlib.machinery.PathFinder.find_spec(fullname):
            return found
        return self._spec(fullname, self._above)

    def _spec(self, name: str, folders: list[pathlib.Path]):
        last = name.rpartition(".")[2]
        packages = []
        for folder in folders:
            file, inner = folder / f"{last}.py", folder / last
            if file.is_file() and not packages and name not in self._divided:
                is_package = (inner / "__init__.py").is_file()
                return (
                    self._of_package(name, inner)
                    if is_package
                    else self._made(name, file)
                )
            if inner.is_dir() and any(inner.glob("**/*.py")):
                packages.append(inner)
        return self._of_package(name, *packages) if packages else None

    def _of_package(self, name: str, *folders: pathlib.Path):
        """A package of all folders of that name: the nearest may be an inner one."""
        inside = [str(folder) for folder in folders]
        self._folders.update(inside)
        return self._made(name, folders[0] / "__init__.py", inside)

    def _made(self, name: str, file: pathlib.Path, inside: list[str] | None = None):
        self._loaded.append(name)
        return importlib.util.spec_from_file_location(
            name, file, loader=_Loader(), submodule_search_locations=inside
        )


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return _Package(spec.name) if spec.submodule_search_locations else None

    def exec_module(self, module) -> None:
        if not isinstance(module, _Package):
            _run(module, _parsed(module).body)


class _Package(types.ModuleType):
    """A package, of whose __init__.py only that is run that somebody asks for."""

    def __getattr__(self, name: str) -> object:
        asked = self.__dict__.setdefault("_asked", set())
        if name in asked or (name.startswith("__") and name not in _WRITTEN):
            raise AttributeError(name)
        asked.add(name)
        file = pathlib.Path(self.__file__)
        if file.is_file():
            self._bind(name, _parsed(self).body)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}"
            ) from None

    def _bind(self, name: str, statements: list[ast.stmt]) -> None:
        imports = [
            n for s in statements for n in ast.walk(s) if isinstance(n, ast.ImportFrom)
        ]
        for node in imports:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    self._import(node, alias)
                    # A file that is imported takes the place of what has its name.
                    for other in node.names:
                        if other.name == (node.module or "").rpartition(".")[2]:
                            self._import(node, other)
                    return
        folders = [pathlib.Path(folder) for folder in self.__path__]
        if any((f / f"{name}.py").is_file() or (f / name).is_dir() for f in folders):
            return  # which Python imports by itself
        if not self.__dict__.get("_is_run"):
            self.__dict__["_is_run"] = True
            _run(self, statements)

    def _import(self, node: ast.ImportFrom, alias: ast.alias) -> None:
        single = ast.ImportFrom(node.module, [alias], node.level)
        _run(self, [ast.copy_location(single, node)])


def _parsed(module: types.ModuleType) -> ast.Module:
    try:
        return ast.parse(pathlib.Path(module.__file__).read_bytes(), module.__file__)
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise ImportError(f"{module.__name__}: {error}", name=module.__name__) from None


def _run(module: types.ModuleType, statements: list[ast.stmt]) -> None:
    script = Script(module, _plainly, Outcome(), 0.0, careful=True)
    with absent.calls_go_on():
        script.all(statements, module.__file__)


def _plainly(code, seconds: float | None) -> Outcome:
    """Within a statement of the checked file, which has a limit already."""
    outcome = Outcome()
    try:
        outcome.value = code()
    except (OutOfTime, KeyboardInterrupt):
        raise
    except BaseException as error:
        outcome.error = error
        outcome.findings.append(finding_of(error, 0.0))
    return outcome


def _divided(trees: list[ast.Module]) -> Iterator[str]:
    """What the file imports parts of, `utils` of utils.masking: no single file."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        named = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            named = [node.module or ""]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        yield from (name.partition(".")[0] for name in named if "." in name)


def _names(folder: pathlib.Path) -> Iterator[str]:
    """What can be imported from a folder."""
    for path in folder.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            yield path.stem


def _added(folder: pathlib.Path, trees: list[ast.Module]) -> Iterator[pathlib.Path]:
    """The folders that a text puts on Python's path, sys.path.append("../common")."""
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _ADDS:
            given = node.args[-1] if node.args else None
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield (folder / given.value).resolve()


_ADDS = ("sys.path.append", "sys.path.insert")


def _levels(trees: list[ast.Module]) -> int:
    """How many packages the relative imports of a text go up."""
    nodes = (node for tree in trees for node in ast.walk(tree))
    return max((n.level for n in nodes if isinstance(n, ast.ImportFrom)), default=0)


def _package(folder: pathlib.Path, levels: int) -> tuple[pathlib.Path, str]:
    """The topmost folder of the package that a file in `folder` belongs to, and the
    package's name: as far up as there are __init__.py, or as its imports go."""
    names: list[str] = []
    top = folder
    while (folder / "__init__.py").is_file() or len(names) < levels:
        if folder == folder.parent:
            break
        names.insert(0, re.sub(r"\W", "_", folder.name))
        top, folder = folder, folder.parent
    return top, ".".join(names)


def _folders_above(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder, and those above it in which its author's work may begin."""
    for above in [folder, *folder.parents][: _MOST_ABOVE + 1]:
        if above in _SHARED and above != folder:
            return
        yield above
        if (above / "src").is_dir():
            yield above / "src"
        if any((above / mark).exists() for mark in _TOPMOST):
            return
