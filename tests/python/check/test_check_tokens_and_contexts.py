# SPDX-License-Identifier: MIT
"""Tokens whose padding code finds itself, contexts that it does not read, masks that are
causal by its file, and matrices that are exchanged beside rotary positions."""

import pytest
import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


def faults(report):
    return [fault["name"] for fault in (report.verdict or {}).get("faults", [])]


def pad_mask(tokens, pad_idx=0):
    return tokens.ne(pad_idx).long().unsqueeze(1)


class Scored(Heads):
    def scores(self, q, k):
        return q @ k.mT / q.shape[-1] ** 0.5


class SeesPaddingAlone(Scored):
    def forward(self, x, token_ids):
        q, k, v = self.heads(x)
        hidden = pad_mask(token_ids).unsqueeze(1).bool()
        return self.merged(self.scores(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v)


class SeesTokens(Scored):
    def forward(self, x, token_ids):
        q, k, v = self.heads(x)
        hidden = pad_mask(token_ids).unsqueeze(1) == 0
        return self.merged(self.scores(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v)


class OnQueries(Scored):
    def make_src_mask(self, src, src_pad_idx):
        return (src != src_pad_idx).unsqueeze(1).unsqueeze(3)

    def forward(self, x, src, src_pad_idx=1):
        q, k, v = self.heads(x)
        mask = self.make_src_mask(src, src_pad_idx)
        return self.merged(
            self.scores(q, k).masked_fill(mask == 0, -1e9).softmax(-1) @ v
        )


def test_what_is_compared_with_padding_in_a_function_holds_tokens():
    report = multihead.check(SeesTokens)
    assert report.passed and not report.conditions, str(report)
    assert "token_ids taken for tokens, of which 0 is padding" in str(report)
    report = multihead.check(SeesPaddingAlone)
    assert faults(report) == ["padding_inverted"], str(report)
    report = multihead.check(OnQueries)
    assert faults(report) == ["padding_on_queries"], str(report)


class ReadsItself(nn.Module):
    """Text tokens attend to image tokens."""

    def __init__(self, dim, context_dim=None, heads=4, dim_head=16):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm, self.norm_context = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim or dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def read(self, x, context):
        return x

    def forward(self, x, context):
        x, context = self.norm(x), self.norm_context(context)
        k, v = self.to_kv(self.read(x, context)).chunk(2, dim=-1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.to_q(x), k, v)
        )
        weights = (q @ k.mT * self.scale).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class ReadsContext(ReadsItself):
    def read(self, x, context):
        return context


def test_one_attention_that_leaves_its_context():
    report = multihead.check(ReadsItself)
    assert not report.passed, str(report)
    assert "flaw: context unread" in " ".join(str(report).split()), str(report)
    assert multihead.check(ReadsContext).passed


_DECODER = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.value = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        source = x if xa is None else xa
        q, k, v = (
            t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for t in (self.query(x), self.key(source), self.value(source))
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)
        return self.out(a.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, n_ctx, n_state, n_head):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        MADE

    def forward(self, x):
        return x + self.attn(x, mask=self.mask)
"""
_CAUSAL = 'mask = torch.full((n_ctx, n_ctx), float("-inf")).triu_(1); self.mask = mask'


def test_masks_of_a_file_that_makes_none_but_causal_ones(tmp_path):
    def of(name, made):
        path = tmp_path / name
        path.write_text(_DECODER.replace("MADE", made))
        return multihead.check(f"{path}:MultiHeadAttention")

    report = of("causal.py", _CAUSAL)
    assert [c["name"] for c in report.conditions] == ["masks_are_causal"], str(report)
    report = of("any.py", "self.mask = None")
    assert faults(report) == ["mask_taken_for_causal"], str(report)


class OfPatches(nn.Module):
    """Attention of a ViT; x is [batch_size, num_patches + 1, embed_dim]."""

    def __init__(self, embedding_dim=64, num_heads=4):
        super().__init__()
        self.attn = nn.MultiheadAttention(embedding_dim, num_heads)

    def forward(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


def test_items_before_patches_by_a_docstring():
    report = multihead.check(OfPatches)
    assert faults(report) == ["batch_and_sequence_exchanged"], str(report)


class OfPixels(Heads):
    def forward(self, x):
        batch, sides = x.shape[0], x.shape[2:]
        x = x.flatten(start_dim=2).permute(2, 0, 1)
        q, k, v = self.heads(x.transpose(0, 1))
        out = self.merged(F.scaled_dot_product_attention(q, k, v))
        return out.mT.reshape(batch, -1, *sides)


def test_what_flattens_an_image_is_given_one():
    report = multihead.check(OfPixels)
    assert report.passed, str(report)
    assert "(3, 48, " in str(report)


class OfPixelsByReshape(Heads):
    def forward(self, x):
        q, k, v = self.heads(self.pixels(x))
        out = self.merged(F.scaled_dot_product_attention(q, k, v))
        return out.mT.reshape(x.shape)

    def pixels(self, x):
        return x.reshape(*x.shape[:2], -1).mT


class OfPixelsInOne(OfPixelsByReshape):
    def forward(self, x):
        pixels = x.reshape(*x.shape[:2], -1).mT
        out = self.merged(F.scaled_dot_product_attention(*self.heads(pixels)))
        return out.mT.reshape(x.shape)


@pytest.mark.parametrize("target", [OfPixelsByReshape, OfPixelsInOne])
def test_pixels_by_reshape(target):
    report = multihead.check(target)
    assert report.cause is None, str(report)
    assert "(3, 48, " in str(report)


def turned(x):
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), rates)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Turned(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        inner = num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, inner)
        self.v_proj = nn.Linear(hidden_size, inner)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def projected(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def repeated(self, x):
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, 1)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.projected(x)
        )
        q, k, v = turned(q), turned(self.repeated(k)), self.repeated(v)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Exchanged(Turned):
    def projected(self, x):
        return self.q_proj(x), self.v_proj(x), self.k_proj(x)


class Truncated(Turned):
    def repeated(self, x):
        return x[:, :1].expand(-1, self.num_heads, -1, -1)


def test_faults_before_heads_that_are_turned():
    assert multihead.check(Turned).passed
    report = multihead.check(Exchanged)
    assert faults(report) == ["key_value_swapped"], str(report)
    report = multihead.check(Truncated)
    assert faults(report) == ["groups_truncated"], str(report)


class OfOutputs(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.concat = nn.Linear(hidden_size * 2, hidden_size)

    def weighed(self, scores):
        return scores.t().softmax(dim=1).unsqueeze(1)

    def forward(self, rnn_output, encoder_outputs):
        scores = torch.sum(rnn_output * encoder_outputs, dim=2)
        context = self.weighed(scores).bmm(encoder_outputs.transpose(0, 1))
        context = torch.cat((rnn_output.squeeze(0), context.squeeze(1)), 1)
        return torch.tanh(self.concat(context))


class OverItems(OfOutputs):
    def weighed(self, scores):
        return scores.t().softmax(dim=0).unsqueeze(1)


def test_the_output_of_a_recurrent_layer_asks():
    report = multihead.check(OfOutputs)
    assert report.conditions and not faults(report), str(report)
    assert "rnn_output, the last state of a decoder" in " ".join(str(report).split())
    assert not multihead.check(OverItems).passed
