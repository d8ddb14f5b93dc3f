# SPDX-License-Identifier: MIT
"""What words and numbers excuse, and what they do not: masks of rows, scales that are
left out, names that a file imports where it can, layers of packages that are absent."""

import math

import pytest
import torch
from torch import nn

import multihead


def faults(report) -> list[str]:
    return [fault["name"] for fault in (report.verdict or {}).get("faults", [])]


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


class Rows(nn.Module):
    """The mask of padding zeroes what comes out."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, pad_mask):
        out = self.attend(*(self.split(f(x)) for f in (self.q, self.k, self.v)))
        return out * pad_mask.unsqueeze(-1)


class Keys(Rows):
    """It multiplies the keys, which blocks none."""

    def forward(self, x, pad_mask):
        k = self.split(self.k(x) * pad_mask.unsqueeze(-1))
        return self.attend(self.split(self.q(x)), k, self.split(self.v(x)))


class ScoresOfQueries(Rows):
    def forward(self, x, pad_mask):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(q.shape[-1]) * pad_mask[:, None, :, None]
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class NamedOfKeys(Rows):
    def forward(self, x, key_padding_mask):
        return super().forward(x, key_padding_mask)


def test_a_mask_that_zeroes_rows_of_the_output_is_a_condition():
    report = multihead.check(Rows)
    assert conditions(report) == ["padding_of_rows"] and not faults(report)


@pytest.mark.parametrize("kind", [Keys, ScoresOfQueries, NamedOfKeys])
def test_a_mask_that_does_something_else_is_not_excused(kind):
    report = multihead.check(kind)
    assert report.judgement == "wrong" and "padding" in str(report), str(report)


class Weighed(Rows):
    """The sum is weighed by a number that is learned, the scores are not scaled."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(dim, num_heads)
        self.alpha = nn.Parameter(torch.ones(1))

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        context = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.alpha * self.o(context)


class SpeaksOfTheNonLocal(Rows):
    """Attention, so that non-local dependencies are captured."""

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_learned_number_beside_unscaled_scores_is_a_condition():
    assert conditions(multihead.check(Weighed)) == ["unscaled_beside_number"]


def test_words_alone_excuse_no_missing_scale():
    assert faults(multihead.check(SpeaksOfTheNonLocal)) == ["scale_missing"]


CALLERS = """
import torch
from torch import nn

def attend(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v

class Layer(nn.Module):
    scale = 0.5

    def forward(self, q, k, v):
        q = q * self.scale
        return {called}(q, k, v)
"""

TRIED = """
from torch import nn
{imports}

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        return xformers.ops.memory_efficient_attention(x, x, x)
"""

OF_GPT2 = """
import math
from torch import nn
from transformers.modeling_utils import Conv1D

class Attention(nn.Module):
    def __init__(self, nx, n_head):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = n_head, Conv1D(3 * nx, nx), Conv1D(nx, 1, nx)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.c_attn(x).chunk(3, -1)
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2))
"""


def checked(folder, text: str, name: str):
    path = folder / "code.py"
    path.write_text(text)
    return multihead.check(f"{path}:{name}")


def test_a_function_may_be_handed_scaled_queries(tmp_path):
    report = checked(tmp_path, CALLERS.format(called="attend"), "attend")
    assert conditions(report) == ["dot_product_attention"]
    report = checked(tmp_path, CALLERS.format(called="other"), "attend")
    assert faults(report) == ["scale_missing"]


def test_a_name_that_its_file_tries_to_import_is_no_mistake(tmp_path):
    tried = "try:\n    import xformers\nexcept ImportError:\n    pass"
    report = checked(tmp_path, TRIED.format(imports=tried), "Attention")
    assert report.judgement == "not_judged", str(report)
    report = checked(tmp_path, TRIED.format(imports=""), "Attention")
    assert report.cause == "raises" and report.judgement == "wrong"


def test_the_layer_of_gpt2_stands_in_for_that_of_its_package(tmp_path):
    report = checked(tmp_path, OF_GPT2, "Attention")
    assert report.passed, str(report)
