# SPDX-License-Identifier: MIT
"""Backward passes that are written by hand, of layers and of functions."""

import numpy as np
import pytest

import multihead


class Attention:
    """Self-attention; a layer in NumPy with a backward pass of its own."""

    def __init__(self, d_model: int, num_heads: int):
        rng = np.random.default_rng(0)
        self.heads, self.width = num_heads, d_model // num_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (
            rng.normal(0, d_model**-0.5, (d_model, d_model)) for _ in range(4)
        )

    def split(self, x):
        return x.reshape(*x.shape[:2], self.heads, self.width).transpose(0, 2, 1, 3)

    def merge(self, x):
        return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    def forward(self, x):
        self.x = x
        self.q, self.k, self.v = (
            self.split(x @ w) for w in (self.Wq, self.Wk, self.Wv)
        )
        scores = self.q @ self.k.swapaxes(-1, -2) / np.sqrt(self.width)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        self.w = powers / powers.sum(-1, keepdims=True)
        return self.merge(self.w @ self.v) @ self.Wo

    def of_scores(self, dw):
        ds = self.w * (dw - (dw * self.w).sum(-1, keepdims=True))
        return ds / np.sqrt(self.width)

    def of_keys(self, ds):
        return ds.swapaxes(-1, -2) @ self.q

    def of_input(self, dq, dk, dv):
        return dq @ self.Wq.T + dk @ self.Wk.T + dv @ self.Wv.T

    def backward(self, dout):
        dcontext = self.split(dout @ self.Wo.T)
        ds = self.of_scores(dcontext @ self.v.swapaxes(-1, -2))
        dv = self.w.swapaxes(-1, -2) @ dcontext
        return self.of_input(*map(self.merge, (ds @ self.k, self.of_keys(ds), dv)))


class ScoresNotScaled(Attention):
    def of_scores(self, dw):
        return super().of_scores(dw) * np.sqrt(self.width)


class SoftmaxOfOneNumber(Attention):
    def of_scores(self, dw):
        return self.w * (1 - self.w) * dw / np.sqrt(self.width)


class QueriesForKeys(Attention):
    def of_keys(self, ds):
        return ds @ self.q


class ValuesForgotten(Attention):
    def of_input(self, dq, dk, dv):
        return dq @ self.Wq.T + dk @ self.Wk.T


WRONG = [ScoresNotScaled, SoftmaxOfOneNumber, QueriesForKeys, ValuesForgotten]


@pytest.mark.parametrize("layer", WRONG)
def test_a_backward_pass_that_is_no_gradient_is_a_flaw(layer):
    assert multihead.check(layer).causes == ["backward_differs"]


class TakesAStep(Attention):
    """Its matrices are others behind each backward pass."""

    def backward(self, dout, rate=0.01):
        dx = super().backward(dout)
        self.Wo -= rate * np.einsum("bli,blj->ij", self.merge(self.w @ self.v), dout)
        return dx


class RoundsOnTheWay(Attention):
    def forward(self, x):
        return super().forward(x.astype(np.float32)).astype(np.float64)


class DropsInTraining(Attention):
    """Which it says by itself, and a model changes."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__(d_model, num_heads)
        self.training, self.keep = True, 1.0

    def forward(self, x):
        if not self.training:  # what was kept before stays where it is
            return super().forward(x)
        self.keep = (np.random.rand(*x.shape) > 0.1) / 0.9
        return super().forward(x) * self.keep

    def backward(self, dout):
        return super().backward(dout * self.keep)


@pytest.mark.parametrize(
    "layer", [Attention, TakesAStep, RoundsOnTheWay, DropsInTraining]
)
def test_a_backward_pass_that_is_the_gradient_is_right(layer):
    assert multihead.check(layer).passed


class Raises(Attention):
    def backward(self, dout):
        return self.merge(dout)


def test_a_backward_pass_that_cannot_be_compared_is_told():
    report = multihead.check(Raises)
    assert report.passed
    assert "was not compared with its forward pass: it raises" in str(report)


FUNCTIONS = """
import numpy as np

def attention_forward(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    w = powers / powers.sum(-1, keepdims=True)
    return w @ v, (q, k, v, w)

def attention_backward(dout, cache):
    q, k, v, w = cache
    dw = dout @ v.swapaxes(-1, -2)
    ds = w * (dw - (dw * w).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return ds @ k, ds.swapaxes(-1, -2) @ q, w.swapaxes(-1, -2) @ dout
"""


def test_functions_in_pairs(tmp_path):
    file = tmp_path / "layers.py"
    file.write_text(FUNCTIONS)
    assert multihead.check(f"{file}:attention_forward").passed
    file.write_text(FUNCTIONS.replace("w.swapaxes(-1, -2) @ dout", "w @ dout"))
    assert multihead.check(f"{file}:attention_forward").cause == "backward_differs"
    file.write_text(
        FUNCTIONS.replace("swapaxes(-1, -2) @ q,", "swapaxes(-1, -2) @ -q,")
    )
    assert multihead.check(f"{file}:attention_forward").cause == "backward_differs"
