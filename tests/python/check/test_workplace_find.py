# SPDX-License-Identifier: MIT
"""Where the attention of a checkout is, by its text alone."""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest

from multihead.check.workplace.find import find

PLAIN = """
import torch

def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v
"""


@pytest.fixture
def folder(tmp_path):
    def write(**texts: str) -> str:
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/")
            path = path if path.suffix else path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return str(tmp_path)

    return write


def names(root: str) -> list[str]:
    return [f"{c.file}:{c.name}" for c in find(root).candidates]


FOUND = {
    "products": PLAIN,
    "calls": """
        import torch
        from torch.nn import functional as F
        def similarity(a, b, values):
            logits = torch.einsum("bid,bjd->bij", a, b)
            logits = logits * a.shape[-1] ** -0.5
            return torch.bmm(F.softmax(logits, dim=-1), values)
        """,
    "layer": """
        from torch import nn
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.attend = nn.Softmax(dim=-1)
            def forward(self, x):
                dots = x @ x.transpose(-1, -2)
                return self.attend(dots) @ x
        """,
    "by_hand": """
        import numpy as np
        def read(q, k, v):
            e = q.dot(k.T)
            p = np.exp(e - e.max(-1, keepdims=True))
            p = p / p.sum(-1, keepdims=True)
            return p.dot(v)
        """,
    "whole": """
        import torch.nn.functional as F
        def attention(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
        """,
    "by_another_class": """
        from torch import nn
        from layers import ScaledDotProductAttention
        class MultiHeadAttention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
                self.attend = ScaledDotProductAttention()
            def forward(self, x):
                return self.attend(self.q(x), self.k(x), self.v(x))
        """,
    "projections_in_turn": """
        from torch import nn
        from layers import Attention
        class MultiHeadedAttention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.projections = nn.ModuleList([nn.Linear(d, d) for _ in range(3)])
                self.attend = Attention()
            def forward(self, x):
                return self.attend(*(layer(x) for layer in self.projections))
        """,
    "no_softmax": """
        def attention(q, k, v):
            return (q @ k.transpose(-2, -1)) @ v
        """,
}
LEFT = {
    "loss": """
        def contrast(a, b):
            return (a @ b.T).softmax(-1).log().mean()
        """,
    "classifier": """
        from torch import nn
        class Classifier(nn.Module):
            def forward(self, x):
                return (x @ self.w).softmax(-1)
        """,
    "test_attention": PLAIN,
    "tests__attention": PLAIN,
    "third_party__attention": PLAIN,
    "no_python": "def attention(:\n",
    "attention_block": """
        from torch import nn
        from layers import MultiHeadAttention
        class AttentionBlock(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.attend, self.last = MultiHeadAttention(d), nn.Linear(d, d)
            def forward(self, x):
                return self.last(self.attend(x))
        """,
    "block": """
        from torch import nn
        class Block(nn.Module):
            def __init__(self):
                self.inner = nn.Linear(3, 3)
            def forward(self, x):
                return self.inner(x).relu() @ x
        """,
}


@pytest.mark.parametrize("case", FOUND)
def test_code_tells(folder, case):
    assert len(names(folder(**{case: FOUND[case]}))) == 1


@pytest.mark.parametrize("case", LEFT)
def test_other_code_is_left_alone(folder, case):
    assert names(folder(**{case: LEFT[case]})) == []


def test_the_likeliest_comes_first(folder):
    root = folder(a=FOUND["no_softmax"], calls=FOUND["calls"], whole=FOUND["whole"])
    places = ["whole.py:attention", "calls.py:similarity", "a.py:attention"]
    assert names(root) == places


def test_what_git_ignores_and_environments_are_left_out(folder, tmp_path):
    root = folder(mine__a=PLAIN, scratch__a=PLAIN, own_env__lib__a=PLAIN)
    (tmp_path / "own_env/pyvenv.cfg").write_text("")
    assert names(root) == ["mine/a.py:attend", "scratch/a.py:attend"]
    (tmp_path / ".gitignore").write_text("scratch/\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    assert names(root) == ["mine/a.py:attend"]


def test_copies_are_checked_once(folder):
    root = folder(a=PLAIN, b=PLAIN, c=PLAIN.replace("** 0.5", "** 0.25"))
    same = {c.file: c.same_as for c in find(root).candidates}
    assert same["b.py"].endswith("a.py:attend") and not same["a.py"] + same["c.py"]


def test_other_frameworks_are_counted(folder):
    found = find(folder(a="import jax\n" + PLAIN.replace("import torch", "")))
    assert (len(found.candidates), found.other, found.files) == (0, 1, 1)


def test_notebooks_have_cells(folder, tmp_path):
    folder()
    cells = [
        {"cell_type": "markdown", "source": "words"},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "x = 1"]},
        {"cell_type": "code", "source": PLAIN},
    ]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    (candidate,) = find(str(tmp_path)).candidates
    assert (candidate.cell, candidate.line) == ("[2]", 4)
    assert candidate.target.endswith("book.ipynb:attend")


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="must be a folder"):
        find(str(tmp_path / "nowhere"))
