# SPDX-License-Identifier: MIT
"""Attention whose scores are no plain products of queries and keys: what it does with
them is judged."""

import torch
from torch import nn
from torch.nn import functional as F

import multihead


def conditions(report):
    return [condition["name"] for condition in report.conditions]


class Additive(nn.Module):
    """Attention of Bahdanau et al. (2015), with how many keys are real."""

    def __init__(self, query_size, key_size, hidden):
        super().__init__()
        self.w_q = nn.Linear(query_size, hidden, bias=False)
        self.w_k = nn.Linear(key_size, hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)

    def bent(self, x):
        return torch.tanh(x)

    def weights(self, scores, seen):
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)

    def forward(self, queries, keys, values, valid_lens=None):
        q, k = self.w_q(queries), self.w_k(keys)
        scores = self.v(self.bent(q.unsqueeze(2) + k.unsqueeze(1))).squeeze(-1)
        seen = torch.ones(keys.shape[:2], dtype=torch.bool)
        if valid_lens is not None:
            seen = torch.arange(keys.shape[1]) < valid_lens[:, None]
        return self.weights(scores, seen.unsqueeze(1)) @ values


class AdditiveTwice(Additive):
    def weights(self, scores, seen):
        return super().weights(scores, seen).softmax(-1)


class AdditiveUnmasked(Additive):
    def weights(self, scores, seen):
        return scores.softmax(-1)


class AdditiveUnbent(Additive):
    def bent(self, x):
        return x


def test_additive_attention_is_judged_from_its_scores_on():
    report = multihead.check(Additive)
    assert report.judgement == "right_if" and conditions(report) == ["scores_given"]
    assert multihead.check(AdditiveTwice).cause == "softmax_twice"
    assert multihead.check(AdditiveUnmasked).cause == "padding_ignored"


def test_a_query_that_cancels_is_named():
    report = multihead.check(AdditiveUnbent)
    assert report.cause == "query_cancels"
    assert "w_q.weight" in str(report)


class Pooling(nn.Module):
    """One learned vector weighs the sequence (Yang et al., 2016)."""

    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.context = nn.Parameter(torch.randn(dim, 1))

    def weights(self, scores):
        return scores.softmax(1)

    def pooled(self, weighted):
        return weighted.sum(1)

    def forward(self, x):
        scores = torch.tanh(self.proj(x)) @ self.context
        return self.pooled(self.weights(scores) * x)


class PoolingOfOne(Pooling):
    def weights(self, scores):
        return scores.softmax(-1)


class PoolingByMean(Pooling):
    def pooled(self, weighted):
        return weighted.mean(1)


class PoolingOfLengths(nn.Module):
    """x (B, T, D), lengths (B,)"""

    def __init__(self, dim):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def real(self, steps, lengths):
        return steps < lengths[:, None]

    def forward(self, x, lengths):
        real = self.real(torch.arange(x.shape[1]), lengths)
        scores = self.score(x).squeeze(-1).masked_fill(~real, float("-inf"))
        return (scores.softmax(1).unsqueeze(-1) * x).sum(1)


class PoolingOfOneMore(PoolingOfLengths):
    def real(self, steps, lengths):
        return steps <= lengths[:, None]


def test_pooling_by_a_learned_vector():
    report = multihead.check(Pooling)
    assert report.judgement == "right_if" and "scores_given" in conditions(report)
    assert "softmax_of_one" in {f.name for f in multihead.check(PoolingOfOne).findings}
    assert multihead.check(PoolingByMean).cause == "values_averaged"


def test_one_more_key_than_lengths_say():
    assert multihead.check(PoolingOfLengths).judgement == "right_if"
    assert multihead.check(PoolingOfOneMore).cause == "padding_off_by_one"


class OfGraph(nn.Module):
    """h (N, in_features), adj (N, N) with loops"""

    def __init__(self, in_features, out_features, dropout, alpha):
        super().__init__()
        self.W = nn.Parameter(torch.randn(in_features, out_features))
        self.a = nn.Parameter(torch.randn(2 * out_features, 1))
        self.leaky, self.dropout = nn.LeakyReLU(alpha), dropout

    def dropped(self, weights):
        return F.dropout(weights, self.dropout, training=self.training)

    def filled(self, scores, adj):
        return torch.where(adj > 0, scores, -9e15)

    def forward(self, h, adj):
        h = h @ self.W
        mine, others = self.a.chunk(2)
        scores = self.leaky(h @ mine + (h @ others).T)
        weights = self.filled(scores, adj).softmax(1)
        return F.elu(self.dropped(weights) @ h)


class OfGraphAlways(OfGraph):
    def dropped(self, weights):
        return F.dropout(weights, self.dropout)


class OfGraphFilledWithNothing(OfGraph):
    def filled(self, scores, adj):
        return scores.masked_fill(adj == 0, 1e-9)


def test_attention_of_graphs():
    report = multihead.check(OfGraph)
    assert report.judgement == "right_if" and "scores_given" in conditions(report)
    assert multihead.check(OfGraphAlways).cause == "dropout_left_on"
    assert multihead.check(OfGraphFilledWithNothing).cause == "mask_sentinel_leaks"


class Relative(nn.Module):
    """Attention of Dai et al. (2019) without memory. w: (T, B, D)"""

    def __init__(self, n_head, d_model):
        super().__init__()
        self.heads, width = n_head, d_model // n_head
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r = nn.Linear(d_model, d_model, bias=False)
        self.places = nn.Parameter(torch.randn(2, n_head, width))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def weights(self, scores):
        return scores.softmax(1)

    def forward(self, w):
        length, batch, width = w.shape
        q, k, v = self.qkv(w).view(length, batch, 3, self.heads, -1).unbind(2)
        steps = torch.arange(length - 1, -1, -1.0).to(w)
        table = torch.outer(steps, 1.0 / (1 + torch.arange(width).to(w))).sin()
        r = self.r(table).view(length, self.heads, -1)
        own = torch.einsum("ibnd,jbnd->ijbn", q + self.places[0], k)
        far = torch.einsum("ibnd,jnd->ijbn", q + self.places[1], r)
        padded = torch.cat([far.new_zeros(length, 1, *far.shape[2:]), far], 1)
        far = padded.view(length + 1, length, *far.shape[2:])[1:].view_as(far)
        scores = (own + far) / q.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = self.weights(
            scores.masked_fill(later[:, :, None, None], float("-inf"))
        )
        out = torch.einsum("ijbn,jbnd->ibnd", weights, v)
        return self.out(out.reshape(length, batch, -1))


def test_scores_of_more_than_one_product():
    report = multihead.check(Relative)
    assert report.judgement == "right_if" and "scores_given" in conditions(report)


def written_out(q, k, v):
    """Scores of (B, H, L, D) as a sum."""
    scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / q.shape[-1] ** 0.5
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


def test_scores_that_are_written_out():
    assert multihead.check(written_out).passed


class AdditiveInPlace(nn.Module):
    """The mask is added, in place."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.w_q = nn.Linear(dim, hidden, bias=False)
        self.w_k = nn.Linear(dim, hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)

    def added(self, scores, mask):
        scores += mask
        return scores

    def forward(self, query, key, value, mask=None):
        q, k = self.w_q(query), self.w_k(key)
        scores = self.v(torch.tanh(q.unsqueeze(2) + k.unsqueeze(1))).squeeze(-1)
        if mask is not None:
            scores = self.added(scores, mask)
        return scores.softmax(-1) @ value


class AdditiveMultiplied(AdditiveInPlace):
    def added(self, scores, mask):
        return scores * (mask == 0)


def test_masks_that_are_added_in_place_are_not_taken_for_ignored():
    report = multihead.check(AdditiveInPlace)
    assert report.judgement == "right_if", str(report)
    assert "scores_given" in conditions(report), str(report)
    assert multihead.check(AdditiveMultiplied).judgement == "wrong"


class OfTransformerXL(nn.Module):
    """w: (qlen, bsz, d_model), r: (qlen, d_model), embeddings of distances (Dai et al.,
    2019). Later keys are hidden."""

    axis = 1

    def __init__(self, n_head, d_model, d_head):
        super().__init__()
        self.heads = n_head, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.u = nn.Parameter(torch.randn(n_head, d_head))
        self.v = nn.Parameter(torch.randn(n_head, d_head))

    def rel_shift(self, x):
        padded = torch.cat([x.new_zeros(len(x), 1, *x.shape[2:]), x], 1)
        return padded.view(x.shape[1] + 1, len(x), *x.shape[2:])[1:].view_as(x)

    def forward(self, w, r):
        q, k, v = (t.unflatten(-1, self.heads) for t in self.qkv_net(w).chunk(3, -1))
        placed = self.r_net(r).unflatten(-1, self.heads)
        scores = torch.einsum("ibnd,jbnd->ijbn", q + self.u, k)
        shifted = self.rel_shift(torch.einsum("ibnd,jnd->ijbn", q + self.v, placed))
        scores = (scores + shifted) / self.heads[1] ** 0.5
        later = torch.ones(scores.shape[:2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later[..., None, None], float("-inf"))
        weights = scores.softmax(self.axis)
        return self.o_net(torch.einsum("ijbn,jbnd->ibnd", weights, v).flatten(2))


class OfTransformerXLOverQueries(OfTransformerXL):
    axis = 0


def test_embeddings_of_distances_that_are_handed_in():
    report = multihead.check(OfTransformerXL)
    assert report.judgement == "right_if", str(report)
    report = multihead.check(OfTransformerXLOverQueries)
    assert report.judgement == "wrong", str(report)
