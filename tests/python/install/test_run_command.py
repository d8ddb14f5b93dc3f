# SPDX-License-Identifier: MIT
"""python -m multihead run: programs run as Python runs them, and on the kernels."""

import os
import pathlib
import py_compile
import runpy
import subprocess
import sys
import zipfile

import pytest

import multihead
import multihead.__main__ as command

ROOT = pathlib.Path(__file__).resolve().parents[3]
# Attends where there is PyTorch already: to import it takes two seconds.
PROGRAM = """
import json, os, sys
from helper import HELP
x = object()
if torch := sys.modules.get("torch"):
    x = torch.zeros(1, 2, 5, 8)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
main = sys.modules["__main__"]
seen = dict(
    argv=sys.argv, path=sys.path[0], name=__name__, file=globals().get("__file__"), help=HELP,
    main=main.x is x, spec=str(__spec__ and __spec__.name), package=__package__,
    loader=getattr(__loader__, "__name__", type(__loader__).__name__),
    cwd=os.getcwd(),
)
print(json.dumps(seen))
"""
FAILS = """
def inner():
    raise KeyError("no")

inner()
"""
# An encoding, pickles of what __main__ has, annotations, and what runs at the end.
ODD = """# coding: latin-1
import atexit, pickle
class Kept: pass
print(ascii("é"), type(pickle.loads(pickle.dumps(Kept()))))
atexit.register(lambda: print(x))
x: int = 1
try:
    def f(x: unknown): pass
except NameError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs")
    files = {
        "scripts/program.py": PROGRAM,
        "scripts/helper.py": "HELP = 'beside the script'\n",
        "helper.py": "HELP = 'in the folder'\n",
        "package/__init__.py": "",
        "package/__main__.py": PROGRAM,
        "fails.py": FAILS,
        "package/fails.py": FAILS,
        "folder/__main__.py": PROGRAM,
        "folder/helper.py": "HELP = 'in the program'\n",
        "failing/__main__.py": FAILS,
        "interrupts.py": FAILS.replace('KeyError("no")', "KeyboardInterrupt"),
        "syntax.py": "x = = 1\n",
        "exits.py": "import sys\nsys.exit(7)\n",
        "says.py": "import sys\nsys.exit('said')\n",
        "odd.py": ODD.encode("latin-1"),
    }
    for name, text in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with zipfile.ZipFile(path / "archive.zip", "w") as archive:
        for name in ("__main__.py", "fails.py"):
            archive.write(path / "package" / name, name)
        archive.write(path / "helper.py", "helper.py")
    for name in ("program", "fails"):
        source = path / "scripts" / f"{name}.py"
        if not source.exists():
            source.write_text(FAILS)
        py_compile.compile(str(source), str(path / "scripts" / f"{name}.pyc"))
    return path


def python(folder, *arguments, **environment):
    """(status, standard output, standard error)"""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


RUN = ("-m", "multihead", "run")
# What multihead is to the command; with it alone a program starts 60 times as fast.
STAND_IN = """
def install(linear=False): pass
def stats(): return "no calls of attention"
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The environment in which `python -m multihead run` is the command itself, without
    the library beneath."""
    path = tmp_path_factory.mktemp("stand_in")
    (path / "multihead").mkdir()
    (path / "multihead/__init__.py").write_text(STAND_IN)
    (path / "multihead/__main__.py").symlink_to(command.__file__)
    return {"PYTHONPATH": str(path)}


@pytest.mark.parametrize(
    "program",
    [
        ("scripts/program.py", "a", "--stats", "-m"),
        ("scripts/program.pyc", "a"),
        ("folder", "a"),
        ("archive.zip", "-c"),
        ("-m", "package", "--", "b"),
        ("-c", PROGRAM, "-m", "b"),
    ],
    ids=["script", "compiled", "folder", "archive", "module", "code"],
)
def test_a_program_sees_what_python_shows_it(folder, program, stand_in):
    expected = python(folder, *program)
    assert expected[0] == 0 and expected[2] == ""
    assert python(folder, *RUN, *program, **stand_in) == expected
    status, out, err = python(folder, *RUN, "--stats", *program)
    assert (status, out) == expected[:2]
    assert err.split("\n")[1].split() == ["1", "installed", "fused"]


@pytest.mark.parametrize(
    "program",
    [
        ("fails.py",),
        ("scripts/fails.pyc",),
        ("-m", "package.fails"),
        ("-m", "no.such"),
        ("-m", "scripts"),
        ("failing",),
        ("scripts",),
        ("-c", FAILS),
        ("-c", "x = = 1"),
        ("-c", "raise SystemExit(5)"),
        ("interrupts.py",),
        ("-m", "interrupts"),
        ("syntax.py",),
        ("exits.py",),
        ("says.py",),
        ("odd.py",),
    ],
    ids=" ".join,
)
def test_a_program_ends_as_with_python(folder, program, stand_in):
    assert python(folder, *RUN, *program, **stand_in) == python(folder, *program)


@pytest.mark.parametrize("program", ["fails.py", "interrupts.py", "odd.py"])
def test_a_program_ends_so_on_the_library_too(folder, program):
    assert python(folder, *RUN, program) == python(folder, program)


@pytest.mark.parametrize("program", ["fails.py", "exits.py"])
def test_stats_come_last(folder, program):
    status, _, err = python(folder, *RUN, "--stats", program)
    assert status == (1 if program == "fails.py" else 7)
    assert err.endswith("no calls of attention\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "python -m multihead: expected run, got "),
        (("check",), "python -m multihead: expected run, got check"),
        (("run",), "run: SCRIPT must be given"),
        (("run", "--stats"), "run: SCRIPT must be given"),
        (("run", "-m"), "run: MODULE must be given"),
        (("run", "--statistics", "x.py"), "run: there is no option --statistics"),
        (("run", "no.py"), "run: SCRIPT must be a file that can be read, got no.py: "),
        (("run", "-c"), "run: CODE must be given"),
    ],
)
def test_errors(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["multihead"])
    with pytest.raises(SystemExit) as ended:
        command.main(list(arguments))
    assert ended.value.code == 2 and not multihead.is_installed()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message)
    assert "run [--stats] [--linear] SCRIPT.py [ARGUMENTS]" in err


def test_help(capsys):
    command.main(["run", "--help"])
    out, err = capsys.readouterr()
    assert err == "" and "--stats" in out


def test_the_installed_command_hands_it_over(monkeypatch):
    """`multihead run` of a wheel is `python -m multihead run`."""
    taken = []
    monkeypatch.setattr(os, "execv", lambda *call: taken.append(call) or sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["multihead", "run", "x.py", "a b"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "python/multihead_command.py"))["main"]()
    command = [sys.executable, "-m", "multihead", "run", "x.py", "a b"]
    assert taken == [(sys.executable, command)]
