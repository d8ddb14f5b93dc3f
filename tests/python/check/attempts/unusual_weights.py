# SPDX-License-Identifier: MIT
"""Weights that are computed, stacked, of NumPy, or handed over in a dictionary;
right, and with one fault each."""

import numpy as np
import torch
import torch.nn as nn


def attend(q, k, v, mask, scale):
    """mask: 0 = blocked."""
    scores = q @ k.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v


class WeightNormed(nn.Module):
    norm = staticmethod(nn.utils.parametrizations.weight_norm)

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = self.norm(nn.Linear(d_model, d_model))
        self.W_k = self.norm(nn.Linear(d_model, d_model))
        self.W_v = self.norm(nn.Linear(d_model, d_model))
        self.W_o = self.norm(nn.Linear(d_model, d_model))

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def scale(self):
        return self.d_k**-0.5

    def forward(self, q, k, v, mask=None):
        q, k, v = self.W_q(q), self.W_k(k), self.W_v(v)
        q, k, v = self.split(q), self.split(k), self.split(v)
        return self.W_o(attend(q, k, v, mask, self.scale()).transpose(1, 2).flatten(2))


class WeightNormedByHook(WeightNormed):
    norm = staticmethod(nn.utils.weight_norm)


class SpectrallyNormed(WeightNormed):
    norm = staticmethod(nn.utils.parametrizations.spectral_norm)


class WeightNormedUnscaled(WeightNormed):
    def scale(self):
        return 1.0


class WeightNormedByHookUnscaled(WeightNormedByHook):
    def scale(self):
        return 1.0


class WeightNormedViewedStraight(WeightNormed):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)


class PlainTensors:
    """No module: tensors as attributes."""

    def __init__(self, d_model, num_heads):
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = torch.randn(d_model, d_model) / d_model**0.5
        self.W_k = torch.randn(d_model, d_model) / d_model**0.5
        self.W_v = torch.randn(d_model, d_model) / d_model**0.5
        self.W_o = torch.randn(d_model, d_model) / d_model**0.5
        self.b_q = torch.zeros(d_model)
        self.b_v = torch.zeros(d_model)
        self.b_o = torch.zeros(d_model)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, q, k, v, mask=None):
        q, k = self.split(q @ self.W_q + self.b_q), self.split(k @ self.W_k)
        v = self.split(v @ self.W_v + self.b_v)
        context = attend(q, k, v, mask, self.d_k**-0.5)
        return context.transpose(1, 2).flatten(2) @ self.W_o + self.b_o


class PlainViewedStraight(PlainTensors):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)


class PlainWithoutQueryBias(PlainTensors):
    def forward(self, q, k, v, mask=None):
        q, k = self.split(q @ self.W_q), self.split(k @ self.W_k)
        v = self.split(v @ self.W_v + self.b_v)
        context = attend(q, k, v, mask, self.d_k**-0.5)
        return context.transpose(1, 2).flatten(2) @ self.W_o + self.b_o


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class NumpyAttention:
    def __init__(self, d_model, num_heads):
        self.d_model, self.num_heads = d_model, num_heads
        self.d_k = d_model // num_heads
        self.W_q = np.random.randn(d_model, d_model) * 0.1
        self.W_k = np.random.randn(d_model, d_model) * 0.1
        self.W_v = np.random.randn(d_model, d_model) * 0.1
        self.W_o = np.random.randn(d_model, d_model) * 0.1
        self.b_q, self.b_k = np.zeros(d_model), np.zeros(d_model)
        self.b_v, self.b_o = np.zeros(d_model), np.zeros(d_model)

    def split_heads(self, x):
        B, L, _ = x.shape
        return x.reshape(B, L, self.num_heads, self.d_k).transpose(0, 2, 1, 3)

    def scaled(self, scores):
        return scores / np.sqrt(self.d_k)

    def __call__(self, x, mask=None):
        q = self.split_heads(x @ self.W_q + self.b_q)
        k = self.split_heads(x @ self.W_k + self.b_k)
        v = self.split_heads(x @ self.W_v + self.b_v)
        scores = self.scaled(q @ k.transpose(0, 1, 3, 2))
        if mask is not None:
            scores = np.where(mask == 0, -1e9, scores)
        context = (softmax(scores) @ v).transpose(0, 2, 1, 3)
        return context.reshape(x.shape) @ self.W_o + self.b_o


class NumpyUnscaled(NumpyAttention):
    def scaled(self, scores):
        return scores


class NumpyReshapedStraight(NumpyAttention):
    def split_heads(self, x):
        B, L, _ = x.shape
        return x.reshape(B, self.num_heads, L, self.d_k)


class NumpyOfOneSequence:
    """(L, E), its weights in a dictionary."""

    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        rng = np.random.default_rng(0)
        names = ("Wq", "Wk", "Wv", "Wo")
        drawn = {n: rng.standard_normal((d_model, d_model)) for n in names}
        self.params = {name: 0.1 * matrix for name, matrix in drawn.items()}

    def forward(self, x):
        L, E = x.shape
        q, k, v = (
            (x @ self.params[name]).reshape(L, self.num_heads, -1).transpose(1, 0, 2)
            for name in ("Wq", "Wk", "Wv")
        )
        weights = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(E // self.num_heads))
        return (weights @ v).transpose(1, 0, 2).reshape(L, E) @ self.params["Wo"]


class PartsOfOneParameter(nn.Module):
    """One parameter of three square matrices."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_qkv = nn.Parameter(torch.randn(3, d_model, d_model) / d_model**0.5)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)

    def forward(self, x, mask=None):
        B, L, E = x.shape
        q, k, v = (x @ W for W in self.W_qkv)
        q, k, v = (
            t.view(B, L, self.num_heads, self.d_k).transpose(1, 2) for t in (q, k, v)
        )
        context = attend(q, k, v, mask, self.d_k**-0.5)
        return context.transpose(1, 2).reshape(B, L, E) @ self.W_o


class HeadsOfOneParameter(nn.Module):
    """Parts, features, heads and their features each have an axis."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        d_head = d_model // num_heads
        self.num_heads, self.d_model, self.d_head = num_heads, d_model, d_head
        self.W_qkv = nn.Parameter(torch.randn(3, d_model, num_heads, d_head) * 0.1)
        self.W_o = nn.Parameter(torch.randn(num_heads, d_head, d_model) * 0.1)

    def scale(self):
        return self.d_head**-0.5

    def forward(self, x, mask=None):
        q, k, v = torch.einsum("ble,pehd->pbhld", x, self.W_qkv)
        context = attend(q, k, v, mask, self.scale())
        return torch.einsum("bhld,hde->ble", context, self.W_o)


class HeadsOfOneParameterUnscaled(HeadsOfOneParameter):
    def scale(self):
        return 1.0


class HeadsInTheWeights(nn.Module):
    """(H, D, E) for each projection, with biases (H, D)."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        d_head = d_model // num_heads
        self.num_heads, self.d_head = num_heads, d_head
        for name in "qkv":
            matrix = torch.randn(num_heads, d_head, d_model) * 0.1
            setattr(self, f"W_{name}", nn.Parameter(matrix))
            setattr(self, f"b_{name}", nn.Parameter(torch.zeros(num_heads, d_head)))
        self.W_o = nn.Parameter(torch.randn(num_heads, d_head, d_model) * 0.1)

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("ble,hde->bhld", q, self.W_q) + self.b_q[:, None]
        k = torch.einsum("ble,hde->bhld", k, self.W_k) + self.b_k[:, None]
        v = torch.einsum("ble,hde->bhld", v, self.W_v) + self.b_v[:, None]
        context = attend(q, k, v, mask, self.d_head**-0.5)
        return torch.einsum("bhld,hde->ble", context, self.W_o)


def split(x, num_heads):
    return x.view(x.size(0), x.size(1), num_heads, -1).transpose(1, 2)


def params_attention(x, params, num_heads, mask=None):
    q, k, v = (split(x @ params[n], num_heads) for n in ("W_q", "W_k", "W_v"))
    context = attend(q, k, v, mask, q.size(-1) ** -0.5)
    return context.transpose(1, 2).flatten(2) @ params["W_o"]


def params_of_three(q, k, v, params, mask=None):
    heads = params["num_heads"]
    q, k, v = q @ params["wq"], k @ params["wk"], v @ params["wv"]
    q, k, v = split(q, heads), split(k, heads), split(v, heads)
    context = attend(q, k, v, mask, q.size(-1) ** -0.5)
    return context.transpose(1, 2).flatten(2) @ params["wo"] + params["bo"]


def params_unscaled(x, params, num_heads, mask=None):
    q, k, v = (split(x @ params[n], num_heads) for n in ("W_q", "W_k", "W_v"))
    return attend(q, k, v, mask, 1.0).transpose(1, 2).flatten(2) @ params["W_o"]


def params_viewed_straight(x, params, num_heads):
    B, L, E = x.shape
    q, k, v = ((x @ params[n]).view(B, num_heads, L, -1) for n in ("W_q", "W_k", "W_v"))
    context = attend(q, k, v, None, q.size(-1) ** -0.5)
    return context.transpose(1, 2).reshape(B, L, E) @ params["W_o"]


class ByConvolutions(nn.Module):
    """(B, C, T): projections of width 1."""

    def __init__(self, channels, n_heads):
        super().__init__()
        self.n_heads, self.k_channels = n_heads, channels // n_heads
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, channels, 1)

    def split(self, x):
        return x.view(x.size(0), self.n_heads, self.k_channels, -1).transpose(2, 3)

    def scale(self):
        return self.k_channels**-0.5

    def forward(self, x):
        q, k, v = self.conv_q(x), self.conv_k(x), self.conv_v(x)
        q, k, v = self.split(q), self.split(k), self.split(v)
        context = attend(q, k, v, None, self.scale())
        return self.conv_o(context.transpose(2, 3).reshape(x.shape))


class ByConvolutionsUnscaled(ByConvolutions):
    def scale(self):
        return 1.0


class OfPixels(nn.Module):
    """(B, C, H, W): the pixels attend to each other."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(channels, 3 * channels, kernel_size=1)
        self.proj = nn.Conv2d(channels, channels, kernel_size=1)

    def forward(self, x):
        B, C, H, W = x.shape
        qkv = self.qkv(x).view(B, 3, self.num_heads, C // self.num_heads, H * W)
        q, k, v = qkv.transpose(-2, -1).unbind(1)
        context = attend(q, k, v, None, q.size(-1) ** -0.5)
        return self.proj(context.transpose(-2, -1).reshape(B, C, H, W))


class NumberedProjections(nn.Module):
    """Of the names of its weights only one says what it is."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.first = nn.Linear(embed_dim, embed_dim)
        self.second = nn.Linear(embed_dim, embed_dim)
        self.third = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = (split(f(x), self.num_heads) for f in self.projections())
        attended = attend(q, k, v, None, q.size(-1) ** -0.5)
        return self.last()(attended.transpose(1, 2).flatten(2))

    def projections(self):
        return self.first, self.second, self.third

    def last(self):
        return self.out


class NamesThatMislead(NumberedProjections):
    """ "context" makes the keys, and "content" the values."""

    def __init__(self, embed_dim, num_heads):
        nn.Module.__init__(self)
        self.num_heads = num_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.context = nn.Linear(embed_dim, embed_dim)
        self.content = nn.Linear(embed_dim, embed_dim)
        self.mix = nn.Linear(embed_dim, embed_dim)

    def projections(self):
        return self.query, self.context, self.content

    def last(self):
        return self.mix


class TransposedInside(nn.Module):
    """Batch first; (L, B, E) is a step inside. Not scaled, and no softmax."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_o = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        z = x.transpose(0, 1)
        L, B, E = z.shape
        rows = (L, B * self.num_heads, E // self.num_heads)
        q, k, v = (f(z).reshape(rows) for f in (self.W_q, self.W_k, self.W_v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        attended = (q @ k.transpose(1, 2)).sigmoid() @ v
        return self.W_o(attended.transpose(0, 1).reshape(L, B, E)).transpose(0, 1)


def native_dropout(q, k, v, dropout_p=0.0, training=False):
    weights = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
    return torch.native_dropout(weights, dropout_p, training)[0] @ v


weight_normed = WeightNormed(32, 4)
weight_normed_by_hook = WeightNormedByHook(32, 4)
weight_normed_by_hook_unscaled = WeightNormedByHookUnscaled(32, 4)
weight_normed_viewed_straight = WeightNormedViewedStraight(32, 4)
plain_tensors = PlainTensors(32, 4)
plain_viewed_straight = PlainViewedStraight(32, 4)
numpy_attention = NumpyAttention(32, 4)
numpy_unscaled = NumpyUnscaled(32, 4)
numpy_of_one_sequence = NumpyOfOneSequence(32, 4)
heads_of_one_parameter = HeadsOfOneParameter(32, 4)
heads_of_one_parameter_unscaled = HeadsOfOneParameterUnscaled(32, 4)
by_convolutions = ByConvolutions(32, 4)
of_pixels = OfPixels(32, 4)
by_convolutions_unscaled = ByConvolutionsUnscaled(32, 4)
