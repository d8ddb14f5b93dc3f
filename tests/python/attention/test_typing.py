# SPDX-License-Identifier: MIT
"""What type checkers say: of plain calls, of wrong ones, and of the package itself."""

import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import plain_calls
import pytest

import multihead
from multihead import _built, functional

# The folder with _built.py: in a build, links to the sources.
PACKAGE = pathlib.Path(_built.__file__).parent
# What users import; elsewhere types stand where they help the reader.
PUBLIC = [
    PACKAGE / "__init__.py",
    *sorted(PACKAGE.glob("[!_]*.py")),
    *(PACKAGE / f"check/{n}.py" for n in ("__init__", "options", "report")),
]
# Each of these calls is an error; what the checkers say of it holds this text.
WRONG = {
    "multihead.backend('quick')": "quick",
    "attention(q, q, q, causal_alignment='middle')": "No overload|causal_alignment",
    "attention(q, q, q, window=4)": "No overload|window",
    "attention(q, q, q, windows=(4, 0))": "windows|No overload",
    "attention(q, q, q, return_lse=True).sum()": "tuple",
    "multihead.GroupedQueryAttention(8, 2, '1')": "str|Literal",
}
HEAD = "import torch, multihead\nq = torch.rand(1, 2, 3, 4)\n"
HEAD += "attention = multihead.scaled_dot_product_attention\n"


@pytest.fixture(scope="module")
def wrong_calls(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("types") / "wrong_calls.py"
    path.write_text(HEAD + "\n".join(WRONG) + "\n")
    return path


def errors_of(*command, **variables) -> dict[str, list[tuple[int, str]]]:
    """file name: (line, text) of each error that the checker prints."""
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^ *(\S+\.py):(\d+).*? error: (.*)", done.stdout, re.MULTILINE)
    assert bool(found) == done.returncode, done.stdout
    errors = {}
    for path, line, text in found:
        errors.setdefault(pathlib.Path(path).name, []).append((int(line), text))
    return errors


@pytest.fixture(scope="module")
def mypy(wrong_calls):
    """What mypy --strict finds in the package, the plain calls and the wrong ones."""
    if not importlib.util.find_spec("mypy"):
        pytest.skip("mypy is not installed, see requirements/test.txt")
    cache = pathlib.Path(os.environ["MULTIHEAD_BUILD_DIR"]) / ".mypy_cache"
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={cache}"]
    files = [*PUBLIC, plain_calls.__file__, wrong_calls]
    command = [sys.executable, "-m", "mypy", *options, *files]
    return errors_of(*command, MYPYPATH=str(PACKAGE.parent))


@pytest.fixture(scope="module")
def pyright(wrong_calls, tmp_path_factory):
    """What pyright finds in the plain calls and the wrong ones."""
    spec = importlib.util.find_spec("pyright")
    if not spec or not shutil.which("node"):
        pytest.skip("pyright or the node that it needs is not installed")
    program = pathlib.Path(spec.origin).with_name("dist") / "index.js"
    if not program.exists():
        pytest.skip("this pyright would be downloaded first")
    folder = tmp_path_factory.mktemp("project")
    settings = json.dumps(
        {"extraPaths": [str(PACKAGE.parent)], "typeCheckingMode": "strict"}
    )
    for path in (pathlib.Path(plain_calls.__file__), wrong_calls):
        shutil.copy(path, folder)
    (folder / "pyrightconfig.json").write_text(settings)
    return errors_of(
        "node", program, "--project", folder, "--pythonpath", sys.executable
    )


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_plain_calls_are_accepted(checker, request):
    errors = request.getfixturevalue(checker)
    assert errors.get("plain_calls.py", []) == []


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_wrong_calls_are_refused(checker, request):
    errors = request.getfixturevalue(checker)["wrong_calls.py"]
    first = HEAD.count("\n") + 1
    for number, (call, text) in enumerate(WRONG.items(), start=first):
        said = " ".join(said for line, said in errors if line == number)
        assert re.search(text, said), (call, said)


def test_the_public_package_is_strictly_typed(mypy):
    names = {path.name for path in PUBLIC}
    assert {name: errors for name, errors in mypy.items() if name in names} == {}
    assert (PACKAGE / "py.typed").exists()


def test_plain_calls_run(capsys):
    plain_calls.main()
    assert multihead.__version__ in capsys.readouterr().out


def test_the_overloads_know_every_argument():
    parameters = inspect.signature(functional.scaled_dot_product_attention).parameters
    keywords = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert keywords - {"return_lse"} == set(functional.Rules.__annotations__)
