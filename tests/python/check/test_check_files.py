# SPDX-License-Identifier: MIT
"""Files and notebooks: what they define is found, whatever else they do."""

import json
import linecache
import sys
import textwrap
import types

import numpy as np
import pytest
import torch
from check_samples import call, only

import multihead
from multihead.check.sandbox.guard import Guard
from multihead.check.sandbox.state import Snapshot
from multihead.check.subject import script as loading


@pytest.fixture
def load(tmp_path):
    def load(text: str, name: str = "attention.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        with Guard(20) as guard:
            return loading.run_file(path, guard)

    return load


def test_a_file_is_run_but_not_as_main(load):
    module, outcome = load(
        """
        from __future__ import annotations
        import dataclasses, math

        @dataclasses.dataclass
        class Sizes:
            heads: Unknown = 2

        def attend(): return Sizes().heads * math.pi
        if __name__ == "__main__":
            exit(1)
        """
    )
    assert outcome.error is None and outcome.findings == []
    assert module.attend() == 2 * np.pi


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("assert torch.allclose(torch.ones(1), torch.rand(1))", "own assertion fails"),
        ("assert False", "own assertion fails"),
        ("print(undefined)", "NameError"),
        ("input('name?')", "EOFError"),
        ("exit(1)", "calls `exit()`"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("while True: pass", "not come to an end after 0.2 s"),
    ],
)
def test_what_follows_is_still_defined(load, line, said, monkeypatch):
    monkeypatch.setattr(loading, "_SECONDS", 0.2)
    module, outcome = load(
        f"""
        import torch
        {line}
        print("never")
        HEADS = 4
        def attend(): return HEADS
        """
    )
    assert outcome.error is None and "never" not in outcome.printed
    assert module.attend() == 4
    (remark,) = outcome.findings
    assert (remark.name, remark.kind) == ("file_stops", "remark")
    assert said in remark.sentence
    assert "attention.py, line 3" in remark.sentence
    assert ("different weights" in remark.remedy) == ("allclose" in line)


def test_an_absent_package_fails_who_uses_it(load):
    module, outcome = load(
        """
        import torch, absent_one
        from absent_two.deep import rearrange as r
        def fine(): return 1
        def uses_one(): return absent_one.rearrange(1)
        def uses_two(): return r(1)
        """
    )
    assert outcome.error is None
    assert [f.name for f in outcome.findings] == ["missing_package"] * 2
    assert {f.kind for f in outcome.findings} == {"remark"}
    assert module.fine() == 1
    for function, package in (
        (module.uses_one, "absent_one"),
        (module.uses_two, "absent_two"),
    ):
        finding = only(call(function))
        assert finding.name == "missing_package" and package in finding.sentence


def test_what_is_no_python_is_an_error(load):
    _, outcome = load("def attend(:\n    pass\n")
    finding = only(outcome)
    assert finding.sentence == "SyntaxError: invalid syntax"
    assert "attention.py, line 1" in finding.detail
    assert "`def attend(:`" in finding.detail


def test_a_class_that_cannot_be_defined_is_an_error(load):
    _, outcome = load("class Attention(undefined): pass\n")
    assert only(outcome).sentence.startswith("NameError")


def test_files_may_import_their_neighbours(load, tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("HEADS = 3")
    before = list(sys.path)
    module, outcome = load("from neighbour_of_mine import HEADS")
    assert outcome.findings == [] and module.HEADS == 3
    assert sys.path == before


def test_a_script_may_set_what_it_likes(load):
    before = Snapshot()
    _, outcome = load(
        "import torch\ntorch.manual_seed(0)\ntorch.set_default_dtype(torch.float64)"
    )
    assert outcome.findings == []
    assert before.restore() == []


def test_notebooks(load):
    cells = [
        {"cell_type": "markdown", "source": ["# Attention"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import math\n"]},
        {"cell_type": "code", "source": "!pip install things\nassert 1 == 2"},
        {"cell_type": "code", "source": "%%time\nthis is no Python"},
        {"cell_type": "code", "source": ["def attend():\n", "    return math.pi"]},
    ]
    module, outcome = load(json.dumps({"cells": cells}), "exercise.ipynb")
    assert module.attend() == np.pi
    (remark,) = outcome.findings
    assert "exercise.ipynb[2], line 2" in remark.sentence


IN_A_CELL = '''
import math
from torch import nn

def attend(q, k, v, mask=None):
    """mask: True = blocked"""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    return scores.softmax(-1) @ v

class Attention(nn.Module):
    """mask: 0 = blocked"""

    def forward(self, q, k, v, mask=None):
        return attend(q, k, v, None if mask is None else mask == 0)
'''


@pytest.mark.parametrize("name", ["attend", "Attention"])
def test_what_a_running_notebook_defines(monkeypatch, name):
    """Its classes have no file to be read from, and what they say is believed."""
    file = "/tmp/ipykernel_7/1234.py"
    lines = IN_A_CELL.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, file, (len(lines), None, lines, file))
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec(compile(IN_A_CELL, file, "exec"), vars(notebook))
    report = multihead.check(getattr(notebook, name))
    assert report.judgement == "right"
    assert report.target == f"{name} (this notebook)"


@pytest.mark.parametrize(
    "text, reason",
    [
        ("not json", "no JSON"),
        ('{"cells": ' + "[" * 100_000, "no JSON"),
        *(
            (text, "no list of cells")
            for text in (
                "[]",
                "{}",
                '{"cells": 5}',
                '{"cells": [{}]}',
                '{"cells": [{"cell_type": "code"}]}',
                '{"cells": [{"cell_type": "code", "source": 5}]}',
            )
        ),
    ],
)
def test_what_is_no_notebook_is_refused(tmp_path, text, reason):
    file = tmp_path / "exercise.ipynb"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^check: target must be a note.*{reason}"):
        multihead.check(str(file))


@pytest.mark.parametrize(
    "text", ["x = 1\0", "from __future__ import nope", "(" * 1000, "-" * 10**5 + "1"]
)
def test_what_cannot_be_compiled_has_no_place_but_its_own(tmp_path, text):
    file = tmp_path / "broken.py"
    file.write_text(text)
    report = multihead.check(str(file))
    assert report.cause == "raises", str(report)
    assert report.findings[0].detail == "" or "broken.py" in report.findings[0].detail


ATTENTION = """
def attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
"""


def notebook(folder, *cells):
    file = folder / "exercise.ipynb"
    cells = [{"cell_type": "code", "source": cell} for cell in cells]
    file.write_text(json.dumps({"cells": cells}))
    return file


OF_A_NOTEBOOK = """
class Attention(nn.Module):
    "mask: True = blocked"

    def forward(self, q, k, v, mask=None):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v
"""


def test_the_text_of_a_class_in_a_notebook_is_read(tmp_path):
    file = notebook(tmp_path, "from torch import nn", OF_A_NOTEBOOK)
    report = multihead.check(f"{file}:Attention")
    assert report.cause == "mask_inverted", str(report)
    assert report.target == "Attention (exercise.ipynb[2]:2)"


def test_an_import_that_is_missing_is_told_and_not_needed(tmp_path):
    file = tmp_path / "exercise.py"
    root = ATTENTION.replace("q.shape[-1] ** 0.5", "math.sqrt(q.shape[-1])")
    file.write_text("import torch\n" + root)
    report = multihead.check(str(file))
    assert report.passed, str(report)
    (remark,) = [r for r in report.remarks if r["name"] == "imports_missing"]
    assert "uses math without an import" in remark["sentence"]


def test_a_name_that_nothing_imports_may_be_that_of_a_package(tmp_path):
    text = "class Attention(nn.Module):\n    def forward(self, q: List, k, v):\n"
    text += "        w = einsum('bid,bjd->bij', q, k) / q.shape[-1] ** 0.5\n"
    text += "        return w.softmax(-1) @ v\n"
    file = tmp_path / "cell.py"
    file.write_text(text)
    report = multihead.check(str(file))
    assert report.passed, str(report)


def test_a_file_that_computes_on_a_gpu_by_default(tmp_path):
    text = "import torch\ntorch.set_default_device('cuda')\n" + ATTENTION
    file = tmp_path / "exercise.py"
    file.write_text(text)
    before = torch.get_default_device()
    assert multihead.check(str(file)).passed
    assert torch.get_default_device() == before


def test_what_a_file_imports_from_its_neighbour_is_found(tmp_path):
    (tmp_path / "my_neighbour.py").write_text(ATTENTION)
    file = tmp_path / "attention.py"
    file.write_text("from math import sqrt\nfrom my_neighbour import attention\n")
    assert multihead.check(str(file)).cause is None
    assert multihead.check(f"{file}:attention").cause is None


@pytest.mark.parametrize("name", ["", ":attention", ":another"])
def test_a_target_of_an_absent_package_is_said_to_be_one(tmp_path, name):
    file = tmp_path / "exercise.py"
    file.write_text("from nowhere_at_all.x import attention\n")
    report = multihead.check(f"{file}{name}")
    assert report.cause == "missing_package", str(report)
    assert "nowhere_at_all" in report.findings[0].sentence


def test_a_file_that_takes_long_leaves_time_to_what_it_defines(tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text(ATTENTION + "while True: pass\n")
    assert multihead.check(str(file), time_limit=4).cause is None


_ABSENT_ATTENTION = """
import torch
import xformers.ops as xops
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(2)
        return self.out((ATTENDED).flatten(2))
"""


@pytest.mark.parametrize(
    ("attended", "causal"),
    [
        ("xops.memory_efficient_attention(q, k, v)", False),
        (
            "xops.memory_efficient_attention(q, k, v, xops.LowerTriangularMask())",
            True,
        ),
        ("flash_attn_func(q, k, v, causal=True)", True),
        ("flash_attn_qkvpacked_func(qkv, softmax_scale=q.shape[-1] ** -0.5)", False),
    ],
)
def test_attention_of_absent_packages_is_computed(tmp_path, attended, causal):
    path = tmp_path / "absent_attention.py"
    path.write_text(_ABSENT_ATTENTION.replace("ATTENDED", attended))
    report = multihead.check(f"{path}:Attention")
    assert report.judgement.startswith("right"), str(report)
    assumed = [one["name"] for one in report.verdict["assumptions"]]
    assert ("causal_by_itself" in assumed) is causal, str(report)
    # What it computes is wrong where it is handed something wrong.
    wrong = attended.replace("(q, k", "(2 * q, k").replace("(qkv,", "(2 * qkv,")
    path.write_text(_ABSENT_ATTENTION.replace("ATTENDED", wrong))
    assert multihead.check(f"{path}:Attention").judgement == "wrong"


def test_what_absent_attention_lacks_is_said(tmp_path):
    path = tmp_path / "absent_attention.py"
    attended = "flash_attn_func(q, k, v, window_size=(2, 0))"
    path.write_text(_ABSENT_ATTENTION.replace("ATTENDED", attended))
    report = multihead.check(f"{path}:Attention")
    assert report.judgement != "wrong", str(report)
    assert "flash_attn_func: window_size" in str(report)
