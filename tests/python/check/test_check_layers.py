# SPDX-License-Identifier: MIT
"""Layers that a constructor is handed, as those of the Annotated Transformer: attention
of the file's own, or of a file beside it, and something in the place of the rest."""

import copy
import math

import pytest
import torch
from torch import nn

import multihead


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


class MultiHeadedAttention(nn.Module):
    """Its layers are copies of one, and so begin with the same numbers."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        layer = nn.Linear(d_model, d_model)
        self.linears = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        query, key, value = (
            linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value))
        )
        scores = query @ key.mT / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        heads = self.dropout(scores.softmax(-1)) @ value
        return self.linears[-1](heads.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, size: int, dropout: float):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList(Residual(size, dropout) for _ in range(2))

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList(Residual(size, dropout) for _ in range(3))

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, tgt_mask))
        x = self.sublayer[1](x, lambda y: self.of_source(y, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)

    def of_source(self, x, memory, src_mask):
        return self.src_attn(x, memory, memory, src_mask)


class MadeOfClasses(nn.Module):
    """It is handed the classes, and makes the layers itself."""

    def __init__(self, hid_dim, n_heads, pf_dim, attention, feedforward, dropout):
        super().__init__()
        self.own = attention(n_heads, hid_dim, dropout)
        self.source = attention(n_heads, hid_dim, dropout)
        self.behind = feedforward(hid_dim, pf_dim, dropout)
        self.norm = nn.LayerNorm(hid_dim)

    def forward(self, trg, src, trg_mask, src_mask):
        trg = self.norm(trg + self.own(trg, trg, trg, trg_mask))
        trg = self.norm(trg + self.source(trg, src, src, src_mask))
        return self.norm(trg + self.behind(trg))


@pytest.mark.parametrize("layer", [EncoderLayer, DecoderLayer, MadeOfClasses])
def test_a_layer_that_is_handed_its_attention_is_right(layer):
    report = multihead.check(layer)
    assert report.judgement == "right_if", str(report)
    assert set(conditions(report)) == {"mask_keeps", "layers_beside"}


class WithoutMaskOfSource(DecoderLayer):
    def of_source(self, x, memory, src_mask):
        return self.src_attn(x, memory, memory)


def test_a_mask_that_does_not_reach_what_it_is_handed():
    assert multihead.check(WithoutMaskOfSource).cause == "mask_ignored"


def test_copies_of_one_layer_are_told_apart():
    report = multihead.check(MultiHeadedAttention)
    assert report.judgement == "right_if", str(report)
    assert conditions(report) == ["mask_keeps"]


_LAYERS = """
import torch.nn as nn

class Block(nn.Module):
    def __init__(self, d_model, self_attention, ffn):
        super().__init__()
        self.attend = self_attention
        self.ffn = ffn
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm(x + self.attend(query=x, key=x, value=x))
        return x + self.ffn(x)
"""
_ATTENTION = """
import torch.nn as nn

class SelfAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value):
        q, k, v = (
            f(t).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for f, t in ((self.q, query), (self.k, key), (self.v, value))
        )
        weights = (q @ k.mT{scale}).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
"""


def test_attention_of_a_file_beside_it(tmp_path):
    file, beside = tmp_path / "blocks.py", tmp_path / "parts.py"
    file.write_text(_LAYERS)
    report = multihead.check(f"{file}:Block")
    assert report.unchecked, str(report)  # nobody knows which attention is meant
    beside.write_text(_ATTENTION.replace("{scale}", " / q.shape[-1] ** 0.5"))
    assert multihead.check(f"{file}:Block").judgement == "right_if"
    beside.write_text(_ATTENTION.replace("{scale}", ""))
    assert multihead.check(f"{file}:Block").cause == "scale_missing"


class Decoder(nn.Module):
    """Takes tokens of its own, and what is encoded."""

    def __init__(self, output_dim, hid_dim, n_layers, n_heads, dropout):
        super().__init__()
        self.embedding = nn.Embedding(output_dim, hid_dim)
        self.own = nn.ModuleList(
            MultiHeadedAttention(n_heads, hid_dim, dropout) for _ in range(n_layers)
        )
        self.source = copy.deepcopy(self.own)
        self.norm, self.out = nn.LayerNorm(hid_dim), nn.Linear(hid_dim, output_dim)

    def forward(self, trg, enc_src, trg_mask, src_mask):
        trg = self.embedding(trg)
        for own, source in zip(self.own, self.source):
            trg = self.norm(trg + own(trg, trg, trg, self.own_mask(trg_mask)))
            trg = self.norm(trg + source(trg, enc_src, enc_src, src_mask))
        return self.out(trg)

    def own_mask(self, mask):
        return mask


class DecoderWithoutItsMask(Decoder):
    def own_mask(self, mask):
        return None


def test_a_decoder_of_tokens_and_of_what_is_encoded():
    report = multihead.check(Decoder)
    assert report.judgement == "right_if", str(report)
    assert "later_attentions" in conditions(report)
    assert multihead.check(DecoderWithoutItsMask).cause == "mask_ignored"


class Gated(nn.Module):
    """As AlphaFold has it: matrices of each head, a gate, a bias that masks."""

    def __init__(self, c_q, c_m, num_head, out_dim):
        super().__init__()
        width = c_q // num_head
        sizes = (c_q, c_m, c_m, c_q)
        made = [nn.Parameter(torch.randn(n, num_head, width) / 7) for n in sizes]
        self.query_w, self.key_w, self.value_w, self.gating_w = made
        self.gating_b = nn.Parameter(torch.ones(num_head, width))
        self.o_w = nn.Parameter(torch.randn(num_head, width, out_dim) / 7)

    def scale(self) -> float:
        return self.query_w.shape[-1] ** -0.5

    def forward(self, q_data, m_data, bias):
        q = torch.einsum("bqa,ahc->bqhc", q_data, self.query_w) * self.scale()
        k = torch.einsum("bka,ahc->bkhc", m_data, self.key_w)
        v = torch.einsum("bka,ahc->bkhc", m_data, self.value_w)
        weights = (torch.einsum("bqhc,bkhc->bhqk", q, k) + bias).softmax(-1)
        heads = torch.einsum("bhqk,bkhc->bqhc", weights, v)
        gate = torch.einsum("bqa,ahc->bqhc", q_data, self.gating_w) + self.gating_b
        return torch.einsum("bqhc,hco->bqo", heads * gate.sigmoid(), self.o_w)


class GatedUnscaled(Gated):
    def scale(self) -> float:
        return 1.0


class OfHidden(nn.Module):
    """The width of a head is what the text multiplies by their number."""

    def __init__(self, c_q, c_k, c_v, c_hidden, no_heads):
        super().__init__()
        self.no_heads, self.c_hidden = no_heads, c_hidden
        self.linear_q = nn.Linear(c_q, c_hidden * no_heads, bias=False)
        self.linear_k = nn.Linear(c_k, c_hidden * no_heads, bias=False)
        self.linear_v = nn.Linear(c_v, c_hidden * no_heads, bias=False)
        self.linear_o = nn.Linear(c_hidden * no_heads, c_q)

    def forward(self, q_x, kv_x):
        q, k, v = (
            t.unflatten(-1, (self.no_heads, -1)).transpose(-2, -3)
            for t in (self.linear_q(q_x), self.linear_k(kv_x), self.linear_v(kv_x))
        )
        weights = (q @ k.mT / math.sqrt(self.c_hidden)).softmax(-1)
        return self.linear_o((weights @ v).transpose(-2, -3).flatten(-2))


class OfPairs(nn.Module):
    """A bias of features of each pair of positions is added to the scores."""

    def __init__(self, c_m, c_z, num_heads):
        super().__init__()
        self.heads, self.width = num_heads, c_m // num_heads
        self.norm_z, self.of_pairs = nn.LayerNorm(c_z), nn.Linear(c_z, num_heads)
        self.qkv, self.out = nn.Linear(c_m, 3 * c_m), nn.Linear(c_m, c_m)

    def softmax(self, scores):
        return scores.softmax(-1)

    def forward(self, m, z):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(m).chunk(3, -1)
        )
        bias = self.of_pairs(self.norm_z(z)).permute(0, 3, 1, 2)
        weights = self.softmax(q @ k.mT / math.sqrt(self.width) + bias)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OfPairsOverQueries(OfPairs):
    def softmax(self, scores):
        return scores.softmax(-2)


@pytest.mark.parametrize("layer", [Gated, OfHidden, OfPairs])
def test_layers_of_proteins(layer):
    report = multihead.check(layer)
    assert report.judgement in ("right", "right_if"), str(report)


@pytest.mark.parametrize(
    "layer, fault",
    [(GatedUnscaled, "scale_missing"), (OfPairsOverQueries, "softmax_over_queries")],
)
def test_faults_of_layers_of_proteins(layer, fault):
    assert multihead.check(layer).cause == fault


class Wrapper(nn.Module):
    """What it wraps, nobody knows: it may be no attention."""

    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x):
        return self.fn(self.norm(x))


class WrapperByName(Wrapper):
    def forward(self, x):
        return self.fn(inputs=self.norm(x), mask=None)


@pytest.mark.parametrize("wrapper", [Wrapper, WrapperByName])
def test_a_layer_of_which_nothing_says_what_it_does_is_no_fault(wrapper):
    report = multihead.check(wrapper)
    assert report.unchecked, str(report)
