# SPDX-License-Identifier: MIT
"""Patches: each repairs its fault, is small, and applies."""

import subprocess
import textwrap

import pytest

import multihead
from multihead.check import Options
from multihead.check.workplace.fix import patch

FUNCTION = '''
import math
import torch

def attend(q, k, v, mask=None):
    """mask: True = may attend, False = masked out."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v
'''
MODULE = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.scale = self.head_dim ** -0.5
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, L, E = x.shape
        q = self.q_proj(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        future = torch.triu(torch.ones(L, L, dtype=torch.bool), diagonal=1)
        scores = scores.masked_fill(future, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        out = (weights @ v).transpose(1, 2).reshape(B, L, E)
        return self.out_proj(out)
"""
MASK = '        scores = scores.masked_fill(mask == 0, float("-inf"))'
# What is changed in right code; the same or another change repairs it.
BROKEN = {
    "scale_missing": (FUNCTION, " / math.sqrt(q.size(-1))", ""),
    "scale_not_root": (FUNCTION, "math.sqrt(q.size(-1))", "q.size(-1)"),
    "scale_by_embed_dim": (MODULE, "self.head_dim ** -0.5", "dim ** -0.5"),
    "softmax_over_queries": (FUNCTION, "dim=-1", "dim=-2"),
    "softmax_over_heads": (MODULE, "F.softmax(scores, dim=-1)", "F.softmax(scores, 1)"),
    "mask_inverted": (FUNCTION, "mask == 0", "mask != 0"),
    "mask_ignored": (FUNCTION, MASK, MASK.replace("scores = ", "")),
    "mask_sentinel_leaks": (FUNCTION, 'float("-inf")', "1e-9"),
    "mask_multiplied": (FUNCTION, 'float("-inf")', "0.0"),
    "causal_misses_diagonal": (MODULE, "diagonal=1", "diagonal=0"),
    "causal_one_too_far": (MODULE, "diagonal=1", "diagonal=2"),
    "heads_not_transposed": (
        MODULE,
        "(B, L, self.heads, self.head_dim).transpose(1, 2)",
        "(B, self.heads, L, self.head_dim)",
    ),
    "merge_not_transposed": (MODULE, ".transpose(1, 2).reshape", ".reshape"),
    "keys_reshaped": (
        FUNCTION,
        "k.transpose(-2, -1)",
        "k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2])",
    ),
    "output_forgotten": (MODULE, "self.out_proj(out)", "out"),
    "key_value_swapped": (
        MODULE,
        "k = self.k_proj(x)",
        "k = self.v_proj(x)",
    ),
    "gradient_detached": (FUNCTION, "weights @ v", "weights.detach() @ v"),
}
SECOND = {"key_value_swapped": ("v = self.v_proj(x)", "v = self.k_proj(x)")}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_patch_repairs_it(fault, tmp_path, monkeypatch):
    text, old, new = BROKEN[fault]
    name = "Attention" if text is MODULE else "attend"
    assert old in text
    text = text.replace(old, new)
    if fault in SECOND:
        text = text.replace(*SECOND[fault])
    path = tmp_path / "attention.py"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    options = Options(time_limit=60.0)
    before = multihead.check(f"attention.py:{name}", time_limit=60.0)
    assert not before.passed
    found = patch(f"attention.py:{name}", before, options)
    assert found.startswith("--- a/attention.py\n+++ b/attention.py\n@@")
    assert path.read_text() == text  # nothing was written
    (tmp_path / "patch").write_text("some words first\n\n" + found)
    subprocess.run(["git", "apply", "patch"], check=True)
    assert path.read_text() != text
    after = multihead.check(f"attention.py:{name}", time_limit=60.0)
    assert after.cause is None, str(after)


def test_where_no_edit_repairs_it_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = """
    def attend(q, k, v):
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).sigmoid() @ v
    """
    (tmp_path / "a.py").write_text(textwrap.dedent(text))
    report = multihead.check("a.py:attend")
    assert patch("a.py:attend", report, Options()) == ""
