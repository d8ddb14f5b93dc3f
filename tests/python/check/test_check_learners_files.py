# SPDX-License-Identifier: MIT
"""The same of whole files, which define or import what their attention calls."""

import textwrap

import pytest

import multihead


def faults(report) -> list[str]:
    return [fault["name"] for fault in (report.verdict or {}).get("faults", [])]


NUMPY = """
    import numpy as np

    class Parameter:
        def __init__(self, data):
            self.data, self.grad = data, None

    class Linear:
        def __init__(self, into, out):
            self.W = Parameter(np.random.randn(into, out) / np.sqrt(into))
            self.b = Parameter(np.zeros((out,)))

        def __call__(self, x):
            return x @ self.W.data + self.b.data

    class MultiHeadAttention:
        def __init__(self, d_model, num_heads):
            self.num_heads, self.head_dim = num_heads, d_model // num_heads
            self.qkv_linear = Linear(d_model, 3 * d_model)
            self.out_linear = Linear(d_model, d_model)

        def forward(self, x):
            b, length, d_model = x.shape
            qkv = self.qkv_linear(x).reshape(b, length, self.num_heads, -1)
            q, k, v = np.split(qkv.transpose(0, 2, 1, 3), 3, axis=-1)
            scores = q @ k.swapaxes(-2, -1) / np.sqrt(self.head_dim)
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            values = powers / powers.sum(-1, keepdims=True) @ v
            return self.out_linear(values{merged}.reshape(b, length, d_model))
"""
LOST = """
    from torch import nn

    class MultiQuery(nn.Module):
        def __init__(self, d_model, n_heads):
            super().__init__()
            self.n_heads = n_heads
            self.qkv = nn.Linear(d_model, 3 * d_model)

        def forward(self, x):
            q, k, v = (
                t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                for t in self.qkv(x).chunk(3, -1)
            )
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return (weights @ v).transpose(1, 2).reshape(x.size(0), T, -1)
"""
ON_A_GPU = """
    import torch
    from settings import DEVICE

    def attention(query, key, value, mask):
        mask = mask.to(DEVICE)
        scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
        return scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ value
"""
OF_ANOTHER_FRAMEWORK = """
    import chainer

    class MultiHeadAttention(chainer.Chain):
        def __init__(self, n_units, h):
            super().__init__()
            with self.init_scope():
                self.linear = chainer.links.Linear(n_units, n_units)

        def forward(self, x):
            return self.linear(x)
"""


OF_ANOTHERS_LAYER = """
    from linear import Linear

    class MultiHeadAttention:
        def __init__(self, d_model, num_heads):
            self.W_q = Linear(d_model, d_model, use_bias=False)

        def forward(self, x):
            return self.W_q(x)
"""
HUGE = """
    from torch import nn

    class Vertices(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.table = nn.Linear(dim * 4096, dim * 4096)

        def forward(self, x):
            return self.table(x)
"""


@pytest.fixture
def checked(tmp_path):
    def checked(text: str, name: str):
        path = tmp_path / "code.py"
        path.write_text(textwrap.dedent(text))
        return multihead.check(f"{path}:{name}")

    return checked


def test_arrays_in_tensors_of_the_codes_own_kind(checked):
    text = NUMPY.replace("{merged}", ".transpose(0, 2, 1, 3)")
    assert checked(text, "MultiHeadAttention").judgement == "right"
    text = NUMPY.replace("{merged}", "")
    assert faults(checked(text, "MultiHeadAttention")) == ["merge_not_transposed"]


def test_a_letter_that_nobody_defines_is_a_mistake(checked):
    report = checked(LOST, "MultiQuery")
    assert report.judgement == "wrong"
    assert "name 'T' is not defined" in report.findings[0].sentence


def test_a_device_that_only_a_constant_names(checked, tmp_path):
    (tmp_path / "settings.py").write_text('DEVICE = "cuda:0"\n')
    report = checked(ON_A_GPU, "attention")
    assert report.judgement == "right_if", str(report)


def test_what_stands_in_for_a_layer_is_no_mistake_of_the_code(checked):
    report = checked(OF_ANOTHERS_LAYER, "MultiHeadAttention")
    assert report.judgement == "not_judged", str(report)


def test_sizes_that_no_memory_holds(checked):
    report = checked(HUGE, "Vertices")
    assert report.judgement == "not_judged" and "too large" in str(report)


def test_a_class_of_a_package_that_is_not_there(checked):
    report = checked(OF_ANOTHER_FRAMEWORK, "MultiHeadAttention")
    assert report.judgement == "not_judged", str(report)
