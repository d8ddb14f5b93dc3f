# SPDX-License-Identifier: MIT
"""python -m multihead run: a program as it is, its attention on the fused kernels.

    python -m multihead run [--stats] [--linear] SCRIPT.py [ARGUMENTS]
    python -m multihead run [--stats] [--linear] -m MODULE [ARGUMENTS]
    python -m multihead run [--stats] [--linear] -c CODE [ARGUMENTS]

Calls multihead.install() and runs the program as ``python SCRIPT.py ARGUMENTS`` would:
sys.argv, sys.path, __main__, tracebacks, exit status. SCRIPT may also be a .pyc file,
or a folder or zip file with a __main__.py. Processes that it starts are not installed
in, except those that it forks.

  --stats   at the end print multihead.stats() to standard error
  --linear  install(linear=True)
"""

import atexit
import builtins
import functools
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import multihead

_USAGE = (__doc__ or "").split("\n\n")[1].rstrip()


def _fail(message: str) -> NoReturn:
    print(f"{message}\nusage:\n{_USAGE}", file=sys.stderr)
    raise SystemExit(2)


def _fresh_main(**names: object) -> dict[str, Any]:
    """What __main__ holds before a program runs; this module goes."""
    main = types.ModuleType("__main__")
    loader = importlib.machinery.BuiltinImporter
    vars(main).update({"__builtins__": builtins, "__loader__": loader} | names)
    sys.modules["__main__"] = main
    return vars(main)


def _script(path: str) -> Callable[[], object]:
    """What runs the file, folder or archive."""
    is_safe = getattr(sys.flags, "safe_path", False)
    if pkgutil.get_importer(path) is not None:
        if not is_safe:
            del sys.path[0]
        sys.path.insert(0, os.path.abspath(path))
        return functools.partial(_as_main, "__main__", alter_argv=False)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _fail(f"run: SCRIPT must be a file that can be read, got {path}: {error}")
    if not is_safe:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    path = os.path.abspath(path)
    code = pkgutil.read_code(io.BytesIO(source))  # None: it is no .pyc file
    of_file = importlib.machinery.SourceFileLoader
    of_code = importlib.machinery.SourcelessFileLoader
    loader = (of_code if code else of_file)("__main__", path)

    def run() -> None:
        names = _fresh_main(__file__=path, __loader__=loader)
        exec(code or compile(source, path, "exec", dont_inherit=True), names)

    return run


def _code(source: str) -> Callable[[], object]:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = ""
    return lambda: exec(
        compile(source, "<string>", "exec", dont_inherit=True), _fresh_main()
    )


def _as_main(name: str, alter_argv: bool = True) -> None:
    """What ``python -m`` itself calls; it ends the program where there is none such."""
    _fresh_main()
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run_without_our_frames(run: Callable[[], object]) -> None:
    """An error looks as it would without us."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        # Python ends as for any error, by the signal for KeyboardInterrupt, and would
        # print it again.
        sys.excepthook = lambda *error: None
        raise


_KINDS: dict[str, tuple[str, Callable[[str], Callable[[], object]]]] = {
    "": ("SCRIPT", _script),
    "-m": ("MODULE", lambda name: functools.partial(_as_main, name)),
    "-c": ("CODE", _code),
}


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
    kind = rest.pop(0) if rest[:1] in (["-m"], ["-c"]) else ""
    what, prepare = _KINDS[kind]
    if not rest:
        _fail(f"run: {what} must be given")
    if not kind and rest[0].startswith("-"):
        _fail(f"run: there is no option {rest[0]}")
    # runpy puts a module's file there.
    sys.argv[:] = [kind or rest[0], *rest[1:]]
    run = prepare(rest[0])
    multihead.install(linear="--linear" in options)
    if "--stats" in options:
        atexit.register(lambda: print(multihead.stats(), file=sys.stderr))
    _run_without_our_frames(run)


if __name__ == "__main__":
    main(sys.argv[1:])
