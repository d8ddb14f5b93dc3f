# SPDX-License-Identifier: MIT
"""Starts the command of the installed package, which is a C++ program.

It runs with the LibTorch that Python would import. This module lies outside the
package because importing the package imports torch, which takes seconds.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import sys

NO_COMMAND = """\
multihead: this installation has the Python package without the command.
To check somebody's attention: python -m multihead.check FILE.py:NAME
For the command too, install it from the sources with
  pip install --no-build-isolation -C cmake.define.MULTIHEAD_BUILD_CLI=ON .
which needs libraries of the system: see "Installation" in README.md."""


def package_file(package: str, name: str, without: str = "") -> pathlib.Path:
    """Where the installed `package` keeps the file or folder `name`; ends the program
    with the sentence `without` if it does not."""
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations if spec else []:
        if (path := pathlib.Path(folder, name)).exists():
            return path
    sys.exit(without or f"multihead: the Python package {package} has no {name}")


def main() -> None:
    """Becomes the command; returns only by raising SystemExit."""
    if sys.argv[1:2] == ["run"]:  # a program of Python's, in this Python
        os.execv(sys.executable, [sys.executable, "-m", "multihead", *sys.argv[1:]])
    built = runpy.run_path(str(package_file("multihead", "_built.py")))
    try:
        built["check_torch"](importlib.metadata.version("torch"))
    except ImportError as error:
        sys.exit(f"multihead: {error}")
    command = package_file("multihead", "bin/multihead", NO_COMMAND)
    folders = [str(package_file("torch", "lib")), os.environ.get("LD_LIBRARY_PATH")]
    # `multihead check` runs Python code: in the environment that this one serves.
    os.environ.setdefault("MULTIHEAD_PYTHON", sys.executable)
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    os.execv(command, sys.argv)
