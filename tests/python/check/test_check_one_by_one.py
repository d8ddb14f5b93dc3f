# SPDX-License-Identifier: MIT
"""Code that takes one token at a time, as copies of LLaMA for inference do, is called
once for each position, and judged as one call."""

import math

import pytest
import torch
from torch import nn

import multihead


class OneToken(nn.Module):
    """Grouped heads, turned by the positions that are handed in, on its own cache."""

    scaled = True

    def __init__(self, dim, n_heads=8, n_kv_heads=2, max_batch_size=8, max_seq_len=300):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        shape = (max_batch_size, max_seq_len, n_kv_heads, self.head_dim)
        self.cache_k, self.cache_v = torch.zeros(shape), torch.zeros(shape)

    def turned(self, x, freqs_complex):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        turned = pairs * freqs_complex[None, :, None]
        return torch.view_as_real(turned).flatten(-2).type_as(x)

    def keep(self, cache, start_pos, x):
        cache[: len(x), start_pos : start_pos + 1] = x
        return cache[: len(x), : start_pos + 1]

    def forward(self, x, start_pos: int, freqs_complex):
        batch, length, _ = x.shape
        assert length == 1, "Only one token at a time can be processed"
        q = self.turned(self.wq(x).view(batch, 1, self.n_heads, -1), freqs_complex)
        k = self.turned(self.wk(x).view(batch, 1, self.n_kv_heads, -1), freqs_complex)
        v = self.wv(x).view(batch, 1, self.n_kv_heads, -1)
        k, v = (
            self.keep(cache, start_pos, t)
            .repeat_interleave(self.n_heads // self.n_kv_heads, 2)
            .transpose(1, 2)
            for cache, t in ((self.cache_k, k), (self.cache_v, v))
        )
        scores = q.transpose(1, 2) @ k.transpose(2, 3)
        scores = scores / math.sqrt(self.head_dim) if self.scaled else scores
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, 1, -1))


class Unscaled(OneToken):
    scaled = False


class KeepsAlongTheBatch(OneToken):
    def keep(self, cache, start_pos, x):
        cache[start_pos : start_pos + 1] = x
        return cache[: len(x), : start_pos + 1]


class LosesTheFirst(OneToken):
    def keep(self, cache, start_pos, x):
        kept = super().keep(cache, start_pos, x)
        return kept[:, 1:] if start_pos else kept


class KeepsThree(OneToken):
    """A window that no argument names."""

    def keep(self, cache, start_pos, x):
        kept = super().keep(cache, start_pos, x)
        return kept[:, -3:]


class Drops(OneToken):
    """In training, which this form does not try; nor gradients of its caches."""

    def __init__(self, dim, n_heads=8, n_kv_heads=2, dropout=0.1):
        super().__init__(dim, n_heads, n_kv_heads)
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def forward(self, x, start_pos: int, freqs_complex):
        return self.dropout(super().forward(x, start_pos, freqs_complex))


def test_what_is_not_tried_one_token_at_a_time():
    assert multihead.check(Drops).judgement == "right"
    report = multihead.check(KeepsThree)
    assert report.judgement == "not_judged", str(report)
    assert "keeps the newest, 3 with its own" in " ".join(str(report).split())


def test_one_token_at_a_time_is_attention_to_those_before_it():
    report = multihead.check(OneToken)
    assert report.judgement == "right", str(report)
    names = {assumption["name"] for assumption in report.assumptions}
    assert {"causal_by_itself", "rotary_positions"} <= names
    assert "one token at a time" in str(report)
    assert any("start_pos = 0, 1" in said for said in report.understood)


def test_a_fault_beside_the_cache_has_its_name():
    report = multihead.check(Unscaled)
    assert [fault["name"] for fault in report.verdict["faults"]] == ["scale_missing"]


@pytest.mark.parametrize("module", [KeepsAlongTheBatch, LosesTheFirst])
def test_a_cache_that_loses_tokens(module):
    report = multihead.check(module)
    assert report.judgement == "wrong", str(report)
    assert [finding.name for finding in report.findings] == ["cache_differs"]


def test_its_cache_is_as_it_was_afterwards():
    module = OneToken(16, 4, 2)
    multihead.check(module)
    assert not module.cache_k.any() and not module.cache_v.any()
