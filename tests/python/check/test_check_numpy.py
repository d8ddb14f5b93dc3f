# SPDX-License-Identifier: MIT
"""Layers in NumPy, which shows nothing of what is computed on the way."""

import numpy as np
import pytest

import multihead


def softmax(scores):
    """What is added keeps the sum from being 0."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / (powers.sum(-1, keepdims=True) + 1e-10)


def attend(x, w_q, w_k, w_v, w_o, n_heads, mask, scale=None, turn=lambda t: t):
    batch, length, _ = x.shape
    q, k, v = (
        (x @ w.T).reshape(batch, length, -1, w_q.shape[0] // n_heads)
        for w in (w_q, w_k, w_v)
    )
    q, k = turn(q), turn(k)
    k, v = (np.repeat(t, n_heads // t.shape[2], axis=2) for t in (k, v))
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = scores if mask is None else scores + mask
    context = softmax(scores) @ v
    return context.transpose(0, 2, 1, 3).reshape(batch, length, -1) @ w_o.T


def adds_a_little(x, w_q, w_k, w_v, w_o, n_heads, mask=None):
    """mask is added to the scores."""
    return attend(x, w_q, w_k, w_v, w_o, n_heads, mask)


def adds_a_mask(x, w_q, w_k, w_v, w_o, n_heads, mask=None):
    return attend(x, w_q, w_k, w_v, w_o, n_heads, mask)


def ignores_its_mask(x, w_q, w_k, w_v, w_o, n_heads, mask=None):
    return attend(x, w_q, w_k, w_v, w_o, n_heads, None)


def grouped(
    x, q_weight, k_weight, v_weight, o_weight, position_ids, n_heads, n_kv_heads, scale
):
    """Rotary positions, and a number that it insists on. x @ q_weight.T, x @ k_weight.T"""

    def turn(t):
        half = t.shape[-1] // 2
        angles = position_ids[..., None, None] * 100.0 ** (-np.arange(half) / half)
        a, b = t[..., :half], t[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    weights = q_weight, k_weight, v_weight, o_weight
    return attend(x, *weights, n_heads, None, scale, turn)


@pytest.mark.parametrize("function", [adds_a_little, adds_a_mask])
def test_a_small_number_that_keeps_a_sum_from_zero_is_right(function):
    report = multihead.check(function)
    assert report.judgement in ("right", "right_if"), str(report)


def test_a_small_number_hides_no_fault():
    assert multihead.check(ignores_its_mask).cause == "mask_ignored"


def test_positions_and_a_scale_that_it_insists_on_are_given():
    report = multihead.check(grouped)
    conditions = [condition["name"] for condition in report.conditions]
    assert conditions == ["positions_unseen"], str(report)


def waves(x, w_q, w_k, w_v, w_o, n_heads):
    """Turned by sines of its own, which nobody sees."""
    at = np.arange(x.shape[1])[:, None] / 10.0 ** (np.arange(x.shape[2]) / x.shape[2])
    return attend(x + np.sin(at), w_q, w_k, w_v, w_o, n_heads, None)


def test_positions_that_numpy_hides_are_not_judged():
    report = multihead.check(waves)
    assert report.judgement == "not_judged" and report.cause == "positions_unseen"


class Linear:
    def __init__(self, width: int):
        self.W = np.random.randn(width, width) / width**0.5
        self.b = np.random.randn(width)

    def __call__(self, x):
        self.x = x  # for the backward pass
        return x @ self.W + self.b


class Layer:
    """A base class by hand, whose call names no argument."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class KeepsItsHeads(Layer):
    """Keeps queries, keys and values for its backward pass; drops in training."""

    def __init__(self, h, d_model, dropout=0.1):
        self.h, self.dropout = h, dropout
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d_model) for _ in range(4))
        self.q = self.k = self.v = None

    def cut(self, x):
        return x.reshape(*x.shape[:2], self.h, -1).transpose(0, 2, 1, 3)

    def root(self):
        return np.sqrt(self.q.shape[-1])

    def forward(self, query, key, value, training=True):
        self.q, self.k, self.v = map(
            self.cut, (self.W_q(query), self.W_k(key), self.W_v(value))
        )
        weights = softmax(self.q @ self.k.swapaxes(-1, -2) / self.root())
        if training:
            kept = np.random.rand(*weights.shape) > self.dropout
            weights = weights * kept / (1 - self.dropout)
        heads = (weights @ self.v).transpose(0, 2, 1, 3)
        return self.W_o(heads.reshape(*query.shape))


class KeepsItsHeadsUnscaled(KeepsItsHeads):
    def root(self):
        return 1.0


def test_what_a_call_leaves_on_an_object_is_no_weight():
    report = multihead.check(KeepsItsHeads)
    assert report.passed, str(report)
    assert "training False" in "\n".join(report.understood)
    assert multihead.check(KeepsItsHeadsUnscaled).cause == "scale_missing"


class Layer:
    def __init__(self, width: int):
        self.weights = np.random.default_rng(width).normal(
            0, width**-0.5, (width, width)
        )
        self.bias = np.zeros(width)

    def forward(self, x):
        return x @ self.weights + self.bias


class OfLayers:
    """Its matrices are those of layers of the file's own, called by their roles."""

    scale = staticmethod(np.sqrt)

    def __init__(self, hidden_dim: int):
        self.hidden_dim = hidden_dim
        self.w_q, self.w_k, self.w_v = (Layer(hidden_dim) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer.forward(x) for layer in (self.w_q, self.w_k, self.w_v))
        return softmax(q @ k.swapaxes(-1, -2) / self.scale(self.hidden_dim)) @ v


class OfLayersUnscaled(OfLayers):
    scale = staticmethod(lambda width: 1.0)


def test_layers_of_the_code_s_own():
    report = multihead.check(OfLayers)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(OfLayersUnscaled).cause == "scale_missing"


class OfDictionaries:
    """Its matrices are in one dictionary, and their gradients in another."""

    def __init__(self, hidden_dim: int):
        rng, shape = np.random.default_rng(1), (hidden_dim, hidden_dim)
        self.params = {n: rng.normal(0, 0.2, shape) for n in ("Wq", "Wk", "Wv")}
        self.grads = {name: np.zeros(shape) for name in self.params}

    def forward(self, x):
        P = self.params
        q, k, v = x @ P["Wq"], x @ P["Wk"], x @ P["Wv"]
        return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def test_matrices_in_a_dictionary_beside_their_gradients():
    report = multihead.check(OfDictionaries)
    assert report.judgement == "right", str(report)


def of_gpt2(x, c_attn_w, c_attn_b, c_proj_w, c_proj_b, n_head, divide=np.sqrt):
    """x: (T, E); c_attn_w: (E, 3 * E)"""
    length, width = x.shape
    q, k, v = np.split(x @ c_attn_w + c_attn_b, 3, axis=-1)
    heads = []
    for h in range(n_head):
        part = slice(h * width // n_head, (h + 1) * width // n_head)
        scores = q[:, part] @ k[:, part].T / divide(width // n_head)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
    return np.concatenate(heads, -1) @ c_proj_w + c_proj_b


def of_gpt2_unscaled(x, c_attn_w, c_attn_b, c_proj_w, c_proj_b, n_head):
    return of_gpt2(x, c_attn_w, c_attn_b, c_proj_w, c_proj_b, n_head, lambda n: 1.0)


def test_weights_by_the_names_of_gpt2():
    assert multihead.check(of_gpt2).judgement == "right"
    assert multihead.check(of_gpt2_unscaled).causes == ["scale_missing"]


def linear(x, w, b):
    return x @ w + b


def attend_as_gpt2(x, c_attn, c_proj, n_head):  # (L, E) -> (L, E)
    """Causal attention whose matrices come with their biases, as those of GPT-2 in
    NumPy do."""
    qkv = np.split(linear(x, **c_attn), 3, axis=-1)
    heads = [np.split(part, n_head, axis=-1) for part in qkv]
    hidden = (1 - np.tri(len(x), dtype=x.dtype)) * -1e10
    out = []
    for q, k, v in zip(*heads):
        scores = q @ k.T / np.sqrt(q.shape[-1]) + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(weights / weights.sum(-1, keepdims=True) @ v)
    return linear(np.hstack(out), **c_proj)


def test_matrices_that_come_with_their_biases():
    report = multihead.check(attend_as_gpt2)
    assert report.judgement == "right", str(report)
    assert "c_attn {w (48, 144), b (144,)}" in " ".join(str(report).split())
