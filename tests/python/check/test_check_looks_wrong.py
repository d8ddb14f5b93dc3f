# SPDX-License-Identifier: MIT
"""Right code whose weights, shapes and masks look like a fault: one softmax that is read
in parts, rows of padding, whole models, layers that mix positions."""

import math

import pytest
import torch
import torch.nn.functional as F
from heads import Heads
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn

import multihead


class NullKey(nn.Module):
    """Additive attention, with a score for nothing."""

    def __init__(self, dim):
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.score, self.null = nn.Linear(dim, 1), nn.Parameter(torch.zeros(1))

    def weights(self, query, context):
        both = self.query(query).unsqueeze(2) + self.key(context).unsqueeze(1)
        scores = self.score(both.tanh()).squeeze(-1)
        null = self.null.expand(*scores.shape[:-1], 1)
        return torch.cat([scores, null], -1).softmax(-1)[..., :-1]

    def forward(self, query, context):
        return self.weights(query, context) @ context


class TwoScales(Heads):
    """One softmax over keys and over their averages."""

    def forward(self, x):
        q, k, v = self.heads(x)
        few = [t.mean(2, keepdim=True) for t in (k, v)]
        scores = q @ torch.cat([k, few[0]], 2).mT / math.sqrt(q.shape[-1])
        weights, length = scores.softmax(-1), x.shape[1]
        y = weights[..., :length] @ v + weights[..., length:] @ few[1]
        return self.merged(y)


class ZeroesRows(NullKey):
    """Rows of padding are nothing."""

    def forward(self, x, mask=None):
        both = self.query(x).unsqueeze(2) + self.key(x).unsqueeze(1)
        scores = self.score(both.tanh()).squeeze(-1)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights * mask[:, :, None]
        return weights @ x


def test_rows_of_padding_may_be_nothing():
    assert multihead.check(ZeroesRows).judgement == "right_if"


@pytest.mark.parametrize("kind", [NullKey, TwoScales])
def test_weights_that_add_up_in_parts_are_not_accused(kind):
    assert multihead.check(kind).judgement == "not_judged"


class Scaled(nn.Module):
    """A causal language model that scales what it looks up, in place."""

    def __init__(self, vocab_size, dim, num_heads):
        super().__init__()
        self.table, self.first = nn.Embedding(vocab_size, dim), Heads(dim, num_heads)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        x = self.table(tokens)
        x *= math.sqrt(x.shape[-1])
        q, k, v = self.first.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.first.merged(y))


class Translator(nn.Module):
    """The target is causal, the source is not."""

    def __init__(self, vocab_size, d_model, nhead):
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_model)
        self.whole = nn.Transformer(d_model, nhead, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        y = self.whole(
            self.table(src), self.table(tgt), tgt_mask=mask.to(torch.float64)
        )
        return self.head(y)


class SASRecLike(nn.Module):
    """Padding zeroes rows; queries see padded keys."""

    def __init__(self, item_num, hidden_units, num_heads):
        super().__init__()
        self.table = nn.Embedding(item_num, hidden_units)
        self.attend = nn.MultiheadAttention(hidden_units, num_heads, batch_first=True)

    def forward(self, log_seqs):
        keep = ~(log_seqs == 0)
        x = self.table(log_seqs) * keep.unsqueeze(-1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (x + self.attend(x, x, x, attn_mask=mask)[0]) * keep.unsqueeze(-1)


@pytest.mark.parametrize("kind", [Scaled, Translator, SASRecLike])
def test_whole_models_that_are_right(kind):
    report = multihead.check(kind)
    assert report.judgement == "right_if" and not named(report), str(report)


class GPTCrossAttention(Heads):
    """Reads features of an image."""

    def forward(self, x, context):
        return self.merged(F.scaled_dot_product_attention(*self.heads(x, context)))


def test_what_is_named_gpt_and_reads_something_else_is_not_causal():
    assert multihead.check(GPTCrossAttention).judgement == "right"


class Classifier(nn.Module):
    """x: (seq, batch, feature)."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attend = nn.MultiheadAttention(dim, num_heads)
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        return self.head(self.attend(x, x, x)[0].mean(0))


def test_what_a_whole_model_returns_may_have_another_shape():
    assert multihead.check(Classifier).judgement == "not_judged"


class MixesBeside(nn.Module):
    """Attention, and a layer that mixes tokens, as MLP-Mixer has it."""

    def __init__(self, dim, num_heads, seq_len):
        super().__init__()
        self.attend = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.mix, self.norm = nn.Linear(seq_len, seq_len), nn.LayerNorm(dim)

    def forward(self, x):
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)


def test_a_layer_that_mixes_positions_does_not_scramble_them():
    assert "positions_scrambled" not in named(multihead.check(MixesBeside))


class Recurrent(Heads):
    """Keys of a memory stand before those of the sequence, which is causal."""

    def forward(self, x, memory):
        both, before = torch.cat([memory, x], 1), memory.shape[1]
        q, k, v = self.heads(x, both)
        mask = torch.ones(x.shape[1], both.shape[1], dtype=torch.bool).triu(1 + before)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class Tied(nn.Module):
    """tie_kv: keys are values, as in Reformer; v is kept for old files."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.count, self.tie_kv = num_heads, True
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm, self.up, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 64),
            nn.Linear(64, dim),
        )

    def forward(self, x):
        three = self.q(x), self.k(x), self.k(x) if self.tie_kv else self.v(x)
        q, k, v = (t.unflatten(-1, (self.count, -1)).transpose(1, 2) for t in three)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm(x + self.o(y))
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize("kind", [Recurrent, Tied])
def test_what_its_text_says_is_meant_is_not_accused(kind):
    report = multihead.check(kind)
    assert report.judgement != "wrong", str(report)
    assert "key_weight_for_values" not in conditions(report)


class ReadsColumn(Heads):
    """mask: (B, Lk, 1), as in code for routes."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :, 0], -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class AssignsByMask(nn.Module):
    """One head at a time; scores are set where a mask says so."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.parts = nn.ModuleList(Heads(dim, 1) for _ in range(num_heads))

    def one(self, part, x, masking):
        scores = part.q(x) @ part.k(x).mT / math.sqrt(x.shape[-1])
        scores[masking == False] = -1e38  # noqa: E712
        return scores.softmax(-1) @ part.v(x)

    def forward(self, x, masking):
        return sum(self.one(part, x, masking) for part in self.parts)


@pytest.mark.parametrize("kind", [ReadsColumn, AssignsByMask])
def test_masks_of_another_shape(kind):
    assert multihead.check(kind).judgement != "wrong"


def test_a_mask_that_is_a_column_is_judged():
    assert conditions(multihead.check(ReadsColumn)) == ["padding_blocks"]
