# SPDX-License-Identifier: MIT
"""One more option: what the compiler asks for before a call can have it.

attention/fields.h has the one list of options. An option that is not in it, or that a
path computes without, must not compile: it would be dropped in silence.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
FUNCTIONAL = "multihead/functional.h"
FIELDS = "multihead/attention/fields.h"
LAST_MEMBER = "  at::Tensor sinks = {};\n"
LAST_ROW = 'Field{"sinks", &AttentionOptions::sinks, "None", kDifferentiable}'
MEMBER = "  at::Tensor one_more = {};\n"
ROW = 'Field{"one_more", &AttentionOptions::one_more, "None"'

COUNT = (ROOT / FIELDS).read_text().count('    Field{"')

# What computes by options, each in its own way: the definition, the kernels'
# arguments, the question whether PyTorch's function has the call.
PATHS = ("attention/definition.cpp", "ops/cpu/arguments.cpp", "attention/route.cpp")


def compile_with(folder: pathlib.Path, *sources: str) -> str:
    """What the compiler has against sources, read one after the other, so that it reads
    PyTorch's headers once; headers in `folder` come first."""
    build = pathlib.Path(os.environ["MULTIHEAD_BUILD_DIR"])
    commands = json.loads((build / "compile_commands.json").read_text())
    if str(ROOT / "multihead") not in str(commands):
        pytest.skip("MULTIHEAD_BUILD_DIR was built from another folder")
    # The flags of the library, whether the build takes its sources one by one or not.
    units = (x for x in commands if "CMakeFiles/multihead.dir/" in x["command"])
    entry = next(x for x in units if "parallel" not in x["file"])
    words = shlex.split(entry["command"])
    together = folder / "together.cpp"
    lines = [f'#include "{ROOT / "multihead" / source}"\n' for source in sources]
    together.write_text("".join(lines))
    words = [*words[: words.index("-o")], str(together)]
    words[1:1] = ["-fsyntax-only", f"-I{folder}"]
    run = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True)
    assert (run.returncode == 0) == ("error:" not in run.stderr), run.stderr
    return run.stderr


@pytest.fixture
def patched(tmp_path):
    """patched(header, old, new): a copy with one place changed, in `folder`."""

    def patch(header: str, old: str, new: str) -> pathlib.Path:
        text = (ROOT / header).read_text()
        assert text.count(old) == 1
        copy = tmp_path / header
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace(old, new))
        return tmp_path

    return patch


def test_a_member_without_a_row_does_not_compile(patched):
    folder = patched(FUNCTIONAL, LAST_MEMBER, LAST_MEMBER + MEMBER)
    said = compile_with(folder, "attention/fields.cpp")
    assert "each member of AttentionOptions must have its row in kFields" in said


def test_a_path_that_does_not_know_an_option_does_not_compile(patched):
    patched(FUNCTIONAL, LAST_MEMBER, LAST_MEMBER + MEMBER)
    folder = patched(FIELDS, LAST_ROW, LAST_ROW + f",\n    {ROW}}}")
    said = compile_with(folder, *PATHS)
    for source in PATHS:
        error = rf"{source}:\d+:\d+: error: .*only {COUNT} names provided"
        assert re.search(error, said), source
    # Schemas and what goes through the dispatcher follow from the list.
    assert compile_with(folder, "attention/fields.cpp", "ops/results.cpp") == ""


def test_a_gradient_that_no_kernel_computes_does_not_compile(patched):
    patched(FUNCTIONAL, LAST_MEMBER, LAST_MEMBER + MEMBER)
    folder = patched(FIELDS, LAST_ROW, LAST_ROW + f",\n    {ROW}, kDifferentiable}}")
    assert "only 6 names provided" in compile_with(folder, "ops/cpu/cpu.cpp")
