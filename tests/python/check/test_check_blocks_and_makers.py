# SPDX-License-Identifier: MIT
"""Residuals that are lost, modes that mask alone, graphs, functions that make functions,
sizes that a class fixes, sequences that only a docstring names, and recurrent decoders."""

import functools

import pytest
import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


def conditions(report):
    return [condition["name"] for condition in report.conditions]


class TransformerBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def attended(self, x):
        return x + self.attn(x, x, x)[0]

    def forward(self, x):
        x = self.norm(self.attended(x))
        return self.norm2(x + self.ff(x))


class TransformerBlockWithout(TransformerBlock):
    def attended(self, x):
        return self.attn(x, x, x)[0]


class DiTBlock(TransformerBlockWithout):
    """Of any name that ends so."""


class TransformerBlockOfOneLine(TransformerBlockWithout):
    """Nothing goes around any of its parts, which may be meant."""

    def forward(self, x):
        return self.norm2(self.ff(self.norm(self.attended(x))))


class AddsItself(Heads):
    """Adds what it is given, and norms it."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, given):
        out = F.scaled_dot_product_attention(*self.heads(given))
        return self.norm(self.merged(out) + given)


class EncoderLayer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = AddsItself(dim, num_heads)
        self.ff, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x):
        x = self.attn(x)
        return self.norm(x + self.ff(x).relu())


def test_a_residual_that_is_lost_around_attention():
    for kind in (TransformerBlockWithout, DiTBlock):
        report = multihead.check(kind)
        assert report.cause == "residual_lost", str(report)
        assert "`attn`" in report.findings[0].sentence
    for kind in (TransformerBlock, TransformerBlockOfOneLine, EncoderLayer):
        report = multihead.check(kind)
        assert report.judgement == "right_if", str(report)


class ReadsMemory(Heads):
    """A sublayer of a decoder, which takes what it reads first. Its norms are not known
    here."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.gain_x, self.gain_y = (nn.Parameter(torch.tensor(g)) for g in (7.0, 6.0))

    def norm(self, x, gain):
        return gain * F.normalize(x, dim=-1)

    def attended(self, x, y):
        keys = self.norm(x, self.gain_x)
        q, k, v = self.heads(query=self.norm(y, self.gain_y), key=keys)
        return self.merged(F.scaled_dot_product_attention(q, k, v))

    def forward(self, x, y):
        return y + self.attended(x, y)


class AddsMemory(ReadsMemory):
    def forward(self, x, y):
        keys = self.norm(x, self.gain_x)
        q, k, v = self.heads(query=self.norm(y, self.gain_y), key=keys)
        return x + self.merged(F.scaled_dot_product_attention(q, k, v))


class GatedByMemory(ReadsMemory):
    def forward(self, x, y):
        return y + self.attended(x, y) * x.sigmoid()


class AddsMemoryPlainly(AddsMemory):
    def norm(self, x, gain):
        return x


class DecoderOfVagueNames(nn.Module):
    """Which of the two asks, no name says."""

    def __init__(self, dim, num_heads):
        super().__init__()
        make = functools.partial(
            nn.MultiheadAttention, dim, num_heads, batch_first=True
        )
        self.self_attn, self.cross_attn = make(), make()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, y, x):
        y = self.norm1(y + self.self_attn(y, y, y, need_weights=False)[0])
        return self.norm2(y + self.cross_attn(y, x, x, need_weights=False)[0])


class TextReadsImage(DecoderOfVagueNames):
    def forward(self, image, text):
        keys = self.norm1(image)
        return text + self.cross_attn(self.norm2(text), keys, keys)[0]


@pytest.mark.parametrize("subject", [DecoderOfVagueNames, TextReadsImage])
def test_a_residual_of_what_asks_whatever_it_is_called(subject):
    assert multihead.check(subject).judgement != "wrong"


def test_a_residual_of_what_is_read():
    report = multihead.check(AddsMemory)
    assert report.cause == "residual_of_context", str(report)
    assert multihead.check(AddsMemoryPlainly).causes == ["input_added"]
    for kind in (ReadsMemory, GatedByMemory):
        assert multihead.check(kind).judgement != "wrong", kind


class InTraining(Heads):
    def forward(self, x):
        q, k, v = self.heads(x)
        later = None
        if self.training:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        seen = None if later is None else ~later
        return self.merged(F.scaled_dot_product_attention(q, k, v, seen))


def test_what_is_causal_in_training_alone():
    assert multihead.check(InTraining).cause == "causal_in_training_alone"


class SetsItsMode(Heads):
    def __init__(self, dim, num_heads, d_rate=0.0):
        super().__init__(dim, num_heads)
        self.d_rate = d_rate

    def forward(self, x, training=True):
        self.training = training
        q, k, v = self.heads(x)
        rate = self.d_rate if self.training else 0.0
        return self.merged(F.scaled_dot_product_attention(q, k, v, dropout_p=rate))


class AsksItsMode(SetsItsMode):
    def forward(self, x, training=True):
        q, k, v = self.heads(x)
        rate = self.d_rate if training and self.training else 0.0
        return self.merged(F.scaled_dot_product_attention(q, k, v, dropout_p=rate))


class SetsItsModeBesideALayer(SetsItsMode):
    """The layer that drops keeps its own mode."""

    def __init__(self, dim, num_heads, d_rate=0.0):
        super().__init__(dim, num_heads, d_rate)
        self.drop = nn.Dropout(d_rate)

    def forward(self, x, training=True):
        self.training = training
        q, k, v = self.heads(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.merged(self.drop(weights) @ v)


class NormsAnew(Heads):
    """A gain of ones in each call, which is no draw."""

    def forward(self, x):
        gain = nn.Parameter(torch.ones(x.shape[-1]))
        return self.merged(
            F.scaled_dot_product_attention(*self.heads(F.rms_norm(x, gain.shape, gain)))
        )


class ProjectsAnew(Heads):
    def forward(self, x):
        x = nn.Linear(x.shape[-1], x.shape[-1]).to(x)(x)
        return self.merged(F.scaled_dot_product_attention(*self.heads(x)))


def test_a_call_that_sets_the_mode():
    report = multihead.check(SetsItsMode)
    assert report.cause == "mode_overwritten", str(report)
    assert multihead.check(AsksItsMode).judgement == "right"
    assert multihead.check(SetsItsModeBesideALayer).judgement == "right"


def test_parameters_that_a_call_makes():
    report = multihead.check(NormsAnew)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(ProjectsAnew).cause == "random"


class ThrowsAway(Heads):
    """Scores of queries alone, as of a synthesizer (Tay et al., 2020)."""

    def __init__(self, dim, num_heads, block_size):
        super().__init__(dim, num_heads)
        self.proj, self.drop = nn.Linear(dim, dim), nn.Dropout(0.1)
        self.w2 = nn.Parameter(torch.randn(dim // num_heads, block_size))

    def forward(self, x):
        weights = (self.cut(self.q(x)).relu() @ self.w2[:, : x.shape[1]]).softmax(-1)
        y = (weights @ self.cut(self.v(x))).transpose(1, 2).flatten(2)
        self.drop(self.proj(y))
        return y


class Notes(Heads):
    """Methods, and layers that are called again, note what they get."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.c_proj, self.seen = nn.Linear(dim, dim), []

    def note_proj(self, weight):
        self.seen.append(weight.norm())

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.heads(x)).transpose(1, 2).flatten(2)
        self.note_proj(self.c_proj.weight.detach())
        self.c_proj(y)
        return self.c_proj(y)


class Quantised(Heads):
    """One scale for all items, so that they follow each other."""

    def int8(self, x):
        scale = x.abs().max() / 127
        return (x / scale).round() * scale

    def forward(self, x):
        x = self.int8(x)
        return self.merged(F.scaled_dot_product_attention(*self.heads(x)))


class OfItsBatch(Heads):
    """Attends over the samples of a batch, as BatchFormer (Hou et al., 2022)."""

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = (t.permute(2, 1, 0, 3) for t in self.heads(x))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.merged(y.permute(2, 1, 0, 3))


@pytest.mark.parametrize("target", [Quantised, OfItsBatch])
def test_items_that_meet_on_purpose_are_not_judged(target):
    report = multihead.check(target)
    assert report.judgement == "not_judged", str(report)


def test_what_notes_its_projection_throws_nothing_away():
    assert multihead.check(Notes).judgement != "wrong"


def test_a_projection_whose_result_nothing_keeps():
    report = multihead.check(ThrowsAway)
    assert report.cause == "output_thrown_away", str(report)
    assert "self.drop(self.proj(y))" in str(report)


class ThrowsAwayItsNorm(Heads):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Linear(dim, dim)

    def forward(self, x):
        out = self.merged(F.scaled_dot_product_attention(*self.heads(x)))
        self.norm1(x + out)
        return self.norm2(x + self.ff(x))


class CubesOfTokens(Heads):
    """Keys and values of a cube of tokens at half of its resolution; not scaled by the
    width of a head."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.sr = nn.Conv3d(dim, dim, 2, stride=2)

    def forward(self, x):
        side = round(x.shape[1] ** (1 / 3))
        y = self.sr(x.mT.unflatten(2, (side, side, side))).flatten(2).mT
        q, k, v = self.heads(x, y)
        scores = q @ k.mT / self.num_heads**0.5
        return self.merged(scores.softmax(-1) @ v)


def test_a_norm_whose_result_nothing_keeps():
    assert multihead.check(ThrowsAwayItsNorm).cause == "output_thrown_away"


def test_cubes_have_more_keys_than_one():
    report = multihead.check(CubesOfTokens)
    assert report.judgement == "wrong", str(report)


# ---- Graphs --------------------------------------------------------------------------


class OfNeighbours(Heads):
    def seen(self, adj):
        return adj > 0

    def forward(self, h, adj):
        q, k, v = self.heads(h)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~self.seen(adj)[:, None], -9e15)
        return self.merged(scores.softmax(-1) @ v)


class OfOthers(OfNeighbours):
    def seen(self, adj):
        return adj == 0


class WithLoops(OfNeighbours):
    def seen(self, adj):
        return (adj > 0) | torch.eye(adj.shape[-1], dtype=torch.bool)


def test_one_in_an_adjacency_matrix_is_an_edge():
    assert multihead.check(OfNeighbours).judgement == "right"
    assert multihead.check(OfOthers).cause == "mask_inverted"
    report = multihead.check(WithLoops)
    assert report.judgement == "right", str(report)
    assert "a loop to itself" in " ".join(str(report).split())


# ---- What it is made of --------------------------------------------------------------


def make_attention(num_heads, causal=False):
    """attend(q, k, v) of (B, L, E)."""

    def split(x):
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    def attend(q, k, v):
        q, k, v = map(split, (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2).flatten(2)

    return attend


def make_unscaled(max_len):
    keep = torch.ones(max_len, max_len, dtype=torch.bool).tril()

    def attend(q, k, v, mask=None):
        seen = keep[: q.shape[2], : k.shape[2]]
        return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    return attend


def make_either(num_heads):
    """Not one function, whatever is asked of it."""

    def first(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    if num_heads > 1:
        return make_attention(num_heads)
    return first


def test_functions_that_make_functions():
    report = multihead.check(make_attention)
    assert report.judgement == "right", str(report)
    assert "make_attention(num_heads=8)" in " ".join(str(report).split())
    assert "scale_missing" in multihead.check(make_unscaled).causes
    assert multihead.check(make_either).judgement != "right"


class FixedByItsClass(nn.Module):
    n_heads = 4

    def __init__(self, d):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        width, heads = x.shape[-1] // self.n_heads, []
        parts = self.qkv(x).chunk(3, -1)
        for i in range(self.n_heads):
            q, k, v = (t[..., i * width : (i + 1) * width] for t in parts)
            heads.append((q @ k.mT / width**0.5).softmax(-1) @ v)
        return self.out(torch.cat(heads, -1))


def test_sizes_that_a_class_fixes():
    report = multihead.check(FixedByItsClass)
    assert report.judgement == "right", str(report)


class OfDrugs(Heads):
    """
    drug: (batch_size, drug_len, dim)
    target: (batch_size, target_len, dim)
    pro_mask: 1 for residues, 0 for padding
    """

    def forward(self, drug, target, drug_mask, pro_mask):
        q, k, v = self.heads(drug, target)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(drug_mask[:, None, :, None] == 0, -1e6)
        scores = scores.masked_fill(pro_mask[:, None, None, :] == 0, -1e6)
        return self.merged(scores.softmax(-1) @ v)


def test_sequences_that_only_a_docstring_names():
    report = multihead.check(OfDrugs)
    assert report.judgement == "right", str(report)
    assert "drug (3, 5, 48), target (3, 7, 48)" in " ".join(str(report).split())


class KeepsKeys(Heads):
    """Causal."""

    ahead = True

    def __init__(self, dim, num_heads, kv_cache=False):
        super().__init__(dim, num_heads)
        self.kv_cache, self.past = kv_cache, None

    def forward(self, x, use_cache=False):
        q, k, v = self.heads(x)
        if use_cache and self.kv_cache:
            if self.past is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v)))
            self.past = k, v
        ahead = (k.shape[2] - q.shape[2]) * self.ahead
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(ahead)
        return self.merged(F.scaled_dot_product_attention(q, k, v, seen))


class KeepsKeysTopLeft(KeepsKeys):
    ahead = False


def test_a_cache_that_the_constructor_turns_on():
    assert multihead.check(KeepsKeys).judgement == "right"
    assert multihead.check(KeepsKeysTopLeft).cause == "cache_differs"


class OfADecoder(nn.Module):
    """query: the state of the LSTM, (B, E); key and value (B, L, E); lens (B,)."""

    fill = -1e9

    def forward(self, query, key, value, lens):
        scores = torch.bmm(key, query.unsqueeze(2)).squeeze(2)
        behind = torch.arange(key.shape[1]) >= lens[:, None]
        weights = scores.masked_fill(behind, self.fill).softmax(1)
        return torch.bmm(weights.unsqueeze(1), value).squeeze(1), weights


class OfADecoderLeaks(OfADecoder):
    """query: the state of the LSTM, (B, E); key and value (B, L, E); lens (B,)."""

    fill = 1e-9


def test_one_query_beside_keys_without_a_scale():
    report = multihead.check(OfADecoder)
    assert report.judgement == "right_if", str(report)
    assert conditions(report)[0] == "dot_product_attention"
    assert multihead.check(OfADecoderLeaks).judgement == "wrong"


class PooledOverTokens(Heads):
    """ids, of which 0 is padding: the mean of what is attended to."""

    def __init__(self, vocab, d, num_heads=4):
        super().__init__(d, num_heads)
        self.emb = nn.Embedding(vocab, d, padding_idx=0)

    def forward(self, ids):
        keep = ids != 0
        q, k, v = self.heads(self.emb(ids))
        out = F.scaled_dot_product_attention(q, k, v, keep[:, None, None, :])
        out = self.merged(out) * keep[..., None]
        return out.sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


def test_means_of_tokens_are_not_what_is_judged():
    report = multihead.check(PooledOverTokens)
    assert report.judgement != "wrong", str(report)


class MeansAndCovariances(nn.Module):
    """Two attentions beside each other, whose masks are added (Fan et al., 2022)."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        for name in ("mean", "cov"):
            for role in ("query", "key", "value", "dense"):
                setattr(self, f"{name}_{role}", nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim)

    def cut(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attended(self, q, k, v, attention_mask):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + attention_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, input_mean_tensor, input_cov_tensor, attention_mask):
        means = (self.mean_query, self.mean_key, self.mean_value)
        means = [self.cut(layer(input_mean_tensor)) for layer in means]
        covs = (self.cov_query, self.cov_key, self.cov_value)
        covs = [self.cut(F.elu(layer(input_cov_tensor)) + 1) for layer in covs]
        mean = self.mean_dense(self.attended(*means, attention_mask))
        cov = self.cov_dense(self.attended(*covs, attention_mask))
        return self.norm(mean + input_mean_tensor), self.norm(cov + input_cov_tensor)


def test_masks_that_are_added_in_two_attentions():
    report = multihead.check(MeansAndCovariances)
    assert report.judgement == "right_if", str(report)
    assert "mask_additive" in [one["name"] for one in report.conditions]


class ReturnsWhatItTook(Heads):
    def forward(self, x):
        out = self.merged(F.scaled_dot_product_attention(*self.heads(x)))
        out = out + x
        return x


class ProjectsOnes(Heads):
    def forward(self, x):
        ones = torch.ones_like(x)
        return self.merged(F.scaled_dot_product_attention(*self.heads(ones)))


def test_an_input_that_comes_back_or_is_never_read():
    assert multihead.check(ReturnsWhatItTook).cause == "input_returned"
    assert multihead.check(ProjectsOnes).cause == "input_unread"
