# SPDX-License-Identifier: MIT
"""python -m multihead run: a program as it is, its attention on the fused kernels.

    python -m multihead run [--stats] [--linear] SCRIPT.py [ARGUMENTS]
    python -m multihead run [--stats] [--linear] -m MODULE [ARGUMENTS]

Calls multihead.install() and runs the program as ``python SCRIPT.py ARGUMENTS`` would:
sys.argv, sys.path, __main__, exit status. Processes that it starts are not installed
in, except those that it forks.

  --stats   at the end print multihead.stats() to standard error
  --linear  install(linear=True)
"""

import atexit
import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import NoReturn

import multihead

_USAGE = (__doc__ or "").split("\n\n")[1].rstrip()


def _fail(message: str) -> NoReturn:
    print(f"{message}\nusage:\n{_USAGE}", file=sys.stderr)
    raise SystemExit(2)


def _script(path: str) -> Callable[[], object]:
    """What runs the file in a __main__ of its own."""
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _fail(f"run: SCRIPT must be a file that can be read, got {path}: {error}")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    path = os.path.abspath(path)
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __builtins__=builtins, __loader__=loader)

    def run() -> None:
        sys.modules["__main__"] = main
        exec(compile(source, path, "exec", dont_inherit=True), vars(main))

    return run


def _module(name: str) -> Callable[[], object]:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        _fail(f"run: MODULE must be one that can be imported, got {name}")
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_without_our_frames(run: Callable[[], object]) -> None:
    """An error looks as it would without us."""
    try:
        run()
    except Exception as error:
        ours = (__file__, runpy.run_module.__code__.co_filename)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def main(arguments: list[str]) -> None:
    """What the command line says after ``python -m multihead``."""
    if arguments[:1] in (["-h"], ["--help"]) or arguments[:2] == ["run", "--help"]:
        print(__doc__)
        return
    if arguments[:1] != ["run"]:
        _fail(f"python -m multihead: expected run, got {' '.join(arguments[:1])}")
    rest = arguments[1:]
    options = set()
    while rest and rest[0] in ("--stats", "--linear"):
        options.add(rest.pop(0))
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest.pop(0)
    if not rest:
        _fail(f"run: {'MODULE' if is_module else 'SCRIPT'} must be given")
    if rest[0].startswith("-"):
        _fail(f"run: there is no option {rest[0]}")
    # runpy puts a module's file there.
    sys.argv[:] = rest
    run = _module(rest[0]) if is_module else _script(rest[0])
    multihead.install(linear="--linear" in options)
    if "--stats" in options:
        atexit.register(lambda: print(multihead.stats(), file=sys.stderr))
    _run_without_our_frames(run)


if __name__ == "__main__":
    main(sys.argv[1:])
