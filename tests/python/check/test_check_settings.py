# SPDX-License-Identifier: MIT
"""Settings that the code asks of a configuration's methods, or of a file that does not
define them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead
from multihead.check.calls import cases
from multihead.check.capture.runner import Runner
from multihead.check.options import Options
from multihead.check.reading.first_call import FirstCall
from multihead.check.sandbox.guard import Guard
from multihead.check.subject import documented
from multihead.check.subject.target import describe


class AsksAMethod(nn.Module):
    """Its settings are what a method of the configuration returns."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.provide("n_heads")
        width = config.getint("d_model")
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


def test_settings_that_a_method_of_the_configuration_returns():
    report = multihead.check(AsksAMethod)
    assert report.judgement == "right"


class CountsWhatNobodyKnows(nn.Module):
    """A number of a configuration decides how long its buffer is."""

    def __init__(self, config):
        super().__init__()
        self.heads, width = config.n_head, config.n_embd
        length = 3 * (config.num_cities - 1)
        self.register_buffer("seen", torch.ones(length, length).tril().bool())
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        seen = self.seen[: x.size(1), : x.size(1)]
        out = F.scaled_dot_product_attention(q, k, v, seen)
        return self.out(out.transpose(1, 2).flatten(2))


def test_a_number_that_nobody_knows_is_made_up():
    report = multihead.check(CountsWhatNobodyKnows)
    assert report.cause is None, str(report)
    assert any("`num_cities`" in a["sentence"] for a in report.assumptions)


class OfOneSentence(nn.Module):
    """No batch; which of two axes is which are arguments, and no sizes."""

    def __init__(self, d_model=2, row_dim=0, col_dim=1):
        super().__init__()
        self.row_dim, self.col_dim = row_dim, col_dim
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, tokens):
        q, k, v = self.q(tokens), self.k(tokens), self.v(tokens)
        scores = q @ k.transpose(self.row_dim, self.col_dim)
        return (scores / k.size(self.col_dim) ** 0.5).softmax(self.col_dim) @ v


def test_axes_are_no_sizes():
    report = multihead.check(OfOneSentence)
    assert report.cause is None and report.judgement != "not_judged", str(report)


class OfTokenPairs(nn.Module):
    """Its mask must be there, of numbers (B, L), and keys as many as queries."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, q, k, v, masks):
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.q, q), (self.k, k), (self.v, v))
        )
        blocked = 1 - masks.unsqueeze(1) * masks.unsqueeze(2)
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(blocked.unsqueeze(1).bool(), -1e9)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_calls_were_refused_for_tells_the_next():
    subject = describe(OfTokenPairs)
    with Guard(60.0) as guard:
        runner = Runner(subject, documented.read_call(subject), guard, {})
        tried = []
        run = runner.run
        runner.run = lambda case, **more: tried.append(case) or run(case, **more)
        found = FirstCall(runner, Options()).find((cases.LAYER, cases.SEQUENCE_FIRST))
    assert found is not None and found.case.mask_dtype is torch.int64
    assert len(tried) < 40


WITHOUT_FIRST_CELL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        T = x.size(1)
        scores = self.query(x) @ self.key(x).mT * self.key.out_features**-0.5
        scores = scores.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return self.dropout(scores.softmax(-1)) @ self.value(x)

class MultiHead(nn.Module):
    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))

def attend(q, k, v):
    q, k, v = (x.unflatten(-1, (n_heads, -1)).transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)

class LostItsSelf(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

class NamesNothing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / zorp).softmax(-1) @ v
"""


@pytest.fixture
def first_cell_missing(tmp_path):
    path = tmp_path / "cells.py"
    path.write_text(WITHOUT_FIRST_CELL)
    return path


@pytest.mark.parametrize(
    "name, settings",
    [
        ("Head", "n_embd = 48, block_size = 512, dropout = 0.25"),
        ("MultiHead", "n_embd = 48, block_size = 512, dropout = 0.25"),
        ("attend", "n_heads = 8"),
    ],
)
def test_settings_that_the_file_does_not_define(first_cell_missing, name, settings):
    report = multihead.check(f"{first_cell_missing}:{name}")
    assert report.judgement in ("right", "right_if")
    (remark,) = [r for r in report.remarks if r["name"] == "settings_undefined"]
    assert remark["sentence"].endswith(f"checked with {settings}.")


@pytest.mark.parametrize(
    "name, lost", [("LostItsSelf", "num_heads"), ("NamesNothing", "zorp")]
)
def test_a_name_that_is_no_setting_of_the_file_is_a_mistake(
    first_cell_missing, name, lost
):
    report = multihead.check(f"{first_cell_missing}:{name}")
    assert report.judgement == "wrong"
    (mistake,) = [f for f in report.findings if f.kind == "failure"]
    assert mistake.sentence == f"NameError: name '{lost}' is not defined"


def test_a_program_that_runs_gets_no_settings():
    def lost(q, k, v):
        return (q @ k.mT / head_dim**0.5).softmax(-1) @ v  # noqa: F821

    report = multihead.check(lost)
    assert report.cause == "raises" and "head_dim" not in globals()
