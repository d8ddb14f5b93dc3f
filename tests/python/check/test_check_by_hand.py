# SPDX-License-Identifier: MIT
"""Layers that are written by hand, without torch.nn: what their model sets from
outside, and biases that are added behind a product."""

import math

import torch

import multihead


class Layer:
    def __call__(self, x):
        return self.forward(x)

    def set_mode(self, mode):
        self.mode = mode


class Dense(Layer):
    def __init__(self, rows, columns):
        self.params = {"W": torch.randn(rows, columns) / rows**0.5}
        self.params["b"] = torch.randn(columns)

    def forward(self, x):
        z = torch.einsum("btd,do->bto", x, self.params["W"])
        z += self.params["b"]
        return z


class Dropout(Layer):
    def __init__(self, rate):
        self.rate = rate

    def forward(self, x):
        if self.mode == "test":
            return x
        return torch.where(torch.rand(*x.shape) > self.rate, x, 0) / (1 - self.rate)


class ByHand(Layer):
    """No query sees a later key."""

    def __init__(self, in_size, n_heads, dropout_prob):
        self.heads = n_heads
        self.k, self.q, self.v, self.proj = (Dense(in_size, in_size) for _ in range(4))
        self.dropout = Dropout(dropout_prob)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def drop(self, weights):
        return self.dropout(weights)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = self.drop(scores.masked_fill(later, -torch.inf).softmax(-1))
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class DropsAlways(ByHand):
    def drop(self, weights):
        return torch.where(torch.rand(*weights.shape) > 0.25, weights, 0) / 0.75


def test_layers_get_the_mode_that_their_model_would_set():
    report = multihead.check(ByHand)
    assert report.verdict["faults"] == []
    assert report.passed, str(report)
    assert any(case["name"] == "training" for case in report.verdict["cases"])


def test_a_fault_of_layers_by_hand_is_named():
    report = multihead.check(DropsAlways)
    assert [f["name"] for f in report.verdict["faults"]] == ["dropout_left_on"]
