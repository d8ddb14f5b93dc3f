# SPDX-License-Identifier: MIT
"""Published habits: sizes in one argument, matrices that are repeated for each item, a
vector of which keys are made, masks of contexts, matrices without use."""

import math

import pytest
import torch
from torch import nn

import multihead


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


class Heads(nn.Module):
    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(q.shape[-1])

    def merge(self, weights, v):
        return (weights @ v).transpose(1, 2).flatten(2)


class SizesInOne(Heads):
    def __init__(self, heads: int, shape: tuple):
        super().__init__()
        self.length, self.dmodel = shape
        self.heads = heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(self.dmodel, self.dmodel) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        return self.o(self.merge(self.scores(q, k).softmax(-1), v))


class Repeated(Heads):
    """A matrix of each head, repeated for each item."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.Wqs, self.Wks, self.Wvs = (
            nn.ParameterList(
                nn.Parameter(torch.randn(dim, dim // num_heads) / dim**0.5)
                for _ in range(num_heads)
            )
            for _ in range(3)
        )
        self.Wo = nn.Linear(dim, dim)

    def of_keys(self):
        return self.Wks

    def forward(self, q, k, v):
        heads = []
        for w_q, w_k, w_v in zip(self.Wqs, self.of_keys(), self.Wvs):
            own, other, value = (
                t @ w.repeat(len(t), 1, 1) for t, w in ((q, w_q), (k, w_k), (v, w_v))
            )
            heads.append(self.scores(own, other).softmax(-1) @ value)
        return self.Wo(torch.cat(heads, -1))


class RepeatedForKeys(Repeated):
    def of_keys(self):
        return self.Wqs


class OfAVector(Heads):
    """Keys and values of one vector for each item, (B, D), beside an image."""

    def __init__(self, query_dim: int, context_dim: int, n_heads: int, n_keys: int = 4):
        super().__init__()
        self.heads, self.n_keys = n_heads, n_keys
        self.norm = nn.GroupNorm(32, query_dim)
        self.q, self.o = (nn.Linear(query_dim, query_dim) for _ in range(2))
        self.kv = nn.Linear(context_dim, 2 * n_keys * query_dim)

    def weigh(self, scores):
        return scores.softmax(-1)

    def forward(self, x, context):
        batch, channels, height, width = x.shape
        pixels = self.norm(x).reshape(batch, channels, height * width).mT
        k, v = self.kv(context).unflatten(-1, (2, self.n_keys, -1)).unbind(1)
        q, k, v = map(self.split, (self.q(pixels), k, v))
        out = self.o(self.merge(self.weigh(self.scores(q, k)), v))
        return x + out.mT.reshape(batch, channels, height, width)


class OfAVectorOverQueries(OfAVector):
    def weigh(self, scores):
        return scores.softmax(-2)


class MaskOfAContext(Heads):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def spread(self, context_mask):
        return context_mask[:, None, None, :]

    def forward(self, x, context, mask=None, context_mask=None):
        q, k, v = map(self.split, (self.q(x), self.k(context), self.v(context)))
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        if context_mask is not None:
            scores = scores.masked_fill(~self.spread(context_mask), -1e9)
        return self.o(self.merge(scores.softmax(-1), v))


class MaskOfAContextAsHeads(MaskOfAContext):
    def spread(self, context_mask):
        return context_mask[:, None, :]


class Idle(SizesInOne):
    """Keys are never projected, beside a layer of its own."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(num_heads, (1, dim))
        self.beside, self.u = nn.Linear(dim, dim), nn.Parameter(torch.randn(dim))

    def forward(self, x):
        q, k, v = map(self.split, (self.q(x) + self.u, self.q(x), self.v(x)))
        out = self.o(self.merge(self.scores(q, k).softmax(-1), v))
        return out + self.beside(x).tanh()


class OwnOnly(SizesInOne):
    """A letter stands twice in a term; the root is of the whole width, in float32; and a
    layer is beside."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(num_heads, (1, dim))
        self.beside = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        root = torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float))
        weights = (q @ k.mT / root).softmax(-1)
        out = self.o(torch.einsum("bhss,bhsd->bshd", weights, v).flatten(2))
        return out + self.beside(x).tanh()


class Diagonal(SizesInOne):
    """A letter stands for the rows and the columns of the output matrix."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__(n_heads, (1, d_model))
        self.o = nn.Parameter(torch.randn(d_model, d_model))

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        merged = self.merge(self.scores(q, k).softmax(-1), v)
        return torch.einsum("bld,dd->bld", merged, self.o)


def test_sizes_that_the_constructor_names_are_given():
    assert multihead.check(SizesInOne).judgement == "right"


def test_matrices_that_are_repeated_are_themselves():
    assert multihead.check(Repeated).judgement == "right"
    assert multihead.check(RepeatedForKeys).cause == "query_weight_for_keys"


def test_keys_of_a_vector_are_judged():
    report = multihead.check(OfAVector)
    assert report.judgement == "right_if", str(report)
    assert multihead.check(OfAVectorOverQueries).cause == "softmax_over_queries"


def test_the_mask_of_a_context_is_one_of_its_keys():
    assert multihead.check(MaskOfAContext).judgement == "right_if"
    assert multihead.check(MaskOfAContextAsHeads).cause == "mask_batch_as_heads"


def test_matrices_without_use_are_a_condition():
    assert "idle_weights" in conditions(multihead.check(Idle))


def test_two_faults_beside_a_rounded_scale_are_named():
    report = multihead.check(OwnOnly)
    assert set(report.causes) == {"own_value_only", "scale_by_embed_dim"}, str(report)


def test_the_diagonal_of_the_output_matrix_is_named():
    assert multihead.check(Diagonal).cause == "output_diagonal"


def rearrange(x, pattern: str, size: int):
    """As einops would, for this pattern alone."""
    assert pattern == "b (y p) (x q) c -> b (y x) (p q) c"
    cells = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return cells.transpose(2, 3).flatten(3, 4).flatten(1, 2)


class WindowOfAPattern(Heads):
    """Windows of images (B, Y, X, E), which only a pattern says; heads before items, and
    a bias of each head."""

    exchanged = False

    def __init__(self, input_dim, output_dim, head_dim, window_size, kind):
        super().__init__()
        self.heads = input_dim // head_dim
        self.window, self.kind = window_size, kind
        self.qkv = nn.Linear(input_dim, 3 * input_dim)
        self.bias = nn.Parameter(torch.randn(self.heads, window_size**2, 1))
        self.out = nn.Linear(input_dim, output_dim)

    def forward(self, x):
        rows = x.shape[1] // self.window
        x = rearrange(x, "b (y p) (x q) c -> b (y x) (p q) c", self.window)
        if self.kind != "W":
            x = x.roll(1, 2)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).movedim(-2, 0)
            for t in self.qkv(x).chunk(3, -1)
        )
        scores = self.scores(q, k) + self.bias[:, None, None]
        out = self.out((scores.softmax(-1) @ v).movedim(0, -2).flatten(-2))
        cells = out.unflatten(2, (self.window, -1)).unflatten(1, (rows, -1))
        if self.exchanged:
            cells = cells.flip(2)
        return cells.transpose(2, 3).flatten(3, 4).flatten(1, 2)


class BesideBias(MaskOfAContext):
    """As T5, whose scores have no scale and a bias that it is handed."""

    def scores(self, q, k):
        return q @ k.mT

    def forward(self, x, enc, pos_bias):
        q, k, v = map(self.split, (self.q(x), self.k(enc), self.v(enc)))
        return self.o(self.merge((self.scores(q, k) + pos_bias).softmax(-1), v))


def test_windows_are_cut_as_a_pattern_says():
    report = multihead.check(WindowOfAPattern)
    assert report.judgement == "right", str(report)
    assert "kind='W'" in " ".join(report.understood)


class PutBackElsewhere(WindowOfAPattern):
    """Rows and columns of windows are exchanged as they are put back."""

    exchanged = True


def test_windows_that_are_put_back_elsewhere():
    report = multihead.check(PutBackElsewhere)
    assert report.judgement != "right"
    assert "puts back its windows in other places" in " ".join(str(report).split())


class BesideDepth(MaskOfAContext):
    """Keys of what nobody knows to be a sequence."""

    def forward(self, x, depth_feat):
        q, k, v = map(self.split, (self.q(x), self.k(depth_feat), self.v(depth_feat)))
        return self.o(self.merge(self.scores(q, k).softmax(-1), v))


class AsksForABias(SizesInOne):
    """A flag, whose name is that of a bias."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(num_heads, (1, dim))

    def forward(self, x, use_rel_bias):
        if use_rel_bias:
            x = x * 1.0
        return super().forward(x)


@pytest.mark.parametrize("kind", [BesideDepth, AsksForABias])
def test_what_is_no_size_and_no_bias_is_not_taken_for_one(kind):
    assert multihead.check(kind).judgement == "right"


def test_no_scale_beside_a_bias_that_is_handed_is_a_condition():
    report = multihead.check(BesideBias)
    assert conditions(report) == ["unscaled_beside_number"], str(report)
