# SPDX-License-Identifier: MIT
"""Code that is compiled, or that attends by flex_attention, runs as it is written."""

import math

import pytest
import torch
from heads import Heads
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import multihead

FILE = '''
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

attend = torch.compile(flex_attention, dynamic=False)


@torch.compile(mode="max-autotune")
def doubled(x):
    return 2 * x


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)
        self.out = torch.compile(nn.Linear(dim, dim))

    def forward(self, x):
        """x: (batch, length, dim)"""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        return self.out(attend(q, k, VALUES).transpose(1, 2).flatten(2))
'''


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ("v", None),
        ("doubled(v) / 2", None),
        ("v, scale=x.size(-1) ** -0.5", "scale_by_embed_dim"),
    ],
)
def test_a_file_that_compiles(tmp_path, values, cause):
    path, before = tmp_path / "attention.py", torch.compile
    path.write_text(FILE.replace("VALUES", values))
    report = multihead.check(path)
    assert (report.judgement, report.cause) == ("wrong" if cause else "right", cause)
    assert torch.compile is before


class Flexible(Heads):
    def attend(self, q, k, v):
        return flex_attention(q, k, v)

    def forward(self, x):
        return self.merged(self.attend(*self.heads(x)))


class CausalByMask(Flexible):
    """A causal layer."""

    def attend(self, q, k, v):
        lengths = {"Q_LEN": q.size(2), "KV_LEN": k.size(2)}
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, **lengths, device="cpu"
        )
        return flex_attention(q, k, v, block_mask=mask)


class LaterByMask(CausalByMask):
    """A causal layer."""

    def attend(self, q, k, v):
        return flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.where(i <= j, s, -math.inf)
        )


def test_flex_attention_in_its_steps():
    assert multihead.check(Flexible).judgement == "right"
    assert multihead.check(CausalByMask).judgement == "right"
    assert multihead.check(LaterByMask).cause == "causal_inverted"


def test_a_module_that_is_compiled():
    compiled = torch.compile(Flexible(48, 8), backend="eager")
    assert multihead.check(compiled).judgement == "right"
