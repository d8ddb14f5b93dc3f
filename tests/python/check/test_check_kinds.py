# SPDX-License-Identifier: MIT
"""What `check` calls: functions in C, scripted and wrapped ones, odd modules."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


class CallsItself(nn.Module):
    """A module without forward."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def __call__(self, x):
        return self.inner(x, x, x)[0]


def test_what_a_module_calls_need_not_be_forward():
    report = multihead.check(CallsItself)
    assert report.cause is None, str(report)


def test_a_function_in_c_is_called_as_its_docstring_says():
    report = multihead.check(F.scaled_dot_product_attention)
    assert report.cause is None, str(report)
    names = {case["name"] for case in report.cases}
    assert names >= {"is_causal", "mask (Lq, Lk)", "2 groups"}


@torch.jit.script
def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    if causal:
        later = torch.ones_like(scores).triu(1) == 1
        scores = scores.masked_fill(later, -float("inf"))
    return scores.softmax(-1) @ v


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1) @ v


@torch.vmap
def over_the_batch(q, k, v):
    return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


@pytest.mark.parametrize(
    "target", [scripted, torch.jit.script(Attend()), over_the_batch]
)
def test_functions_that_are_no_plain_ones(target):
    report = multihead.check(target)
    assert report.cause is None, str(report)
    is_causal = any(case["name"] == "is_causal" for case in report.cases)
    assert is_causal == (target is scripted)


def test_a_file_leaves_time_for_what_it_defines(tmp_path):
    file = tmp_path / "attention.py"
    file.write_text(
        "import torch.nn.functional as F\n"
        "while True: pass\n"
        "def attend(q, k, v): return F.scaled_dot_product_attention(q, k, v)\n"
    )
    report = multihead.check(f"{file}:attend", time_limit=2.0)
    assert report.cause is None, str(report)
