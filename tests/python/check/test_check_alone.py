# SPDX-License-Identifier: MIT
"""What is right in the calls of a check and not in others: an item by itself, a token of
zeros, a document behind a longer one, several tokens on a cache."""

import numpy as np
import pytest
import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


def turned(x, places):
    """Rotary positions of halves: x (B, H, L, D), places (L,)."""
    half = x.shape[-1] // 2
    angles = torch.outer(places, 100.0 ** (-torch.arange(half) / half)).to(x)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Rotary(Heads):
    """Attention with rotary positions."""

    def places(self, x):
        return torch.arange(x.shape[1]).double()

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = (turned(y, self.places(x)) for y in (q, k))
        return self.merged((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class CountedByItem(Rotary):
    def places(self, x):
        return torch.arange(x.shape[1]).double() * len(x)


class Causal(Heads):
    """Causal by a triangle."""

    def hidden(self, scores):
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf"))

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = self.hidden(q @ k.mT / q.shape[-1] ** 0.5)
        return self.merged(scores.softmax(-1) @ v)


class ByWhatIsZero(Causal):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def hidden(self, scores):
        scores = scores.tril()
        return scores.masked_fill(scores == 0, float("-inf"))


class Packed(Heads):
    """Documents behind one another, (L, E), each filled up to the longest."""

    blocks = staticmethod(
        lambda filled: torch.zeros(filled.shape).masked_fill(filled, float("-inf"))
    )

    def forward(self, x, cu_seqlens=None):
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)
        filled = torch.arange(parts.shape[1]) >= torch.tensor(lengths)[:, None]
        q, k, v = (
            self.cut(y.masked_fill(filled[..., None], 0.0))
            for y in (self.q(parts), self.k(parts), self.v(parts))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.blocks(filled)[:, None, None]
        out = self.merged(scores.softmax(-1) @ v)
        return torch.cat([one[:n] for one, n in zip(out, lengths)])


class PackedByBool(Packed):
    """-inf in a mask of bool is True, which is added as 1."""

    blocks = staticmethod(lambda filled: (~filled).masked_fill(filled, float("-inf")))


@pytest.mark.parametrize(
    ("right", "wrong", "cause", "said"),
    [
        (
            Rotary,
            CountedByItem,
            "batch_size_counts",
            "something else for an item alone",
        ),
        (Causal, ByWhatIsZero, "zero_scores_blocked", "blocks scores that are 0"),
        (Packed, PackedByBool, "document_differs_alone", "for a document alone"),
    ],
)
def test_what_only_another_call_shows(right, wrong, cause, said):
    assert multihead.check(right).judgement == "right"
    report = multihead.check(wrong)
    assert report.cause == cause, str(report)
    assert said in " ".join(str(report).split())


class OnACache(Causal):
    """Causal; on a cache as others have it, one token at a time."""

    def forward(self, x, cache=None):
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = cache.update(k, v)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = self.hidden(scores) if cache is None else scores
        return self.merged(scores.softmax(-1) @ v)


class OnAnyCache(OnACache):
    def forward(self, x, cache=None):
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = cache.update(k, v)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = seen.tril(scores.shape[-1] - scores.shape[-2])
        return self.merged(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)


def test_caches_that_are_handed_in_need_no_class_of_the_file():
    report = multihead.check(OnACache)
    assert [one["name"] for one in report.conditions] == ["one_token_on_cache"]
    assert multihead.check(OnAnyCache).judgement == "right"


class AfterAnother(nn.Module):
    """Cross-attention."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x, context):
        q, (k, v) = self.q(x), self.kv(context).chunk(2, -1)
        split = (-1, q.shape[-1] // self.num_heads)
        q, k, v = (y.unflatten(-1, split).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


def test_an_argument_does_not_say_that_causal_is_meant_of_a_context():
    report = multihead.check(AfterAnother)
    names = [one["name"] for one in report.conditions]
    assert names == ["causal_by_itself"], str(report)


HEAD_SIZE = 16


class ByAnother(nn.Module):
    """A head, causal, whose queries are made with the matrix of values, and scaled by a
    number of the file."""

    def __init__(self, dim, head_size):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(dim, head_size, bias=False) for _ in range(3)
        )

    def forward(self, x):
        q, k, v = self.value(x), self.key(x), self.value(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * HEAD_SIZE**-0.5).masked_fill(future, float("-inf"))
        return scores.softmax(-1) @ v


def test_a_matrix_that_is_left_out_is_named_beside_another_fault():
    report = multihead.check(ByAnother)
    assert "value_weight_for_queries" in report.causes, str(report)
    assert "scale_of_another_number" in report.causes, str(report)


class AllByKeys(Heads):
    """One matrix for all: that of values is left out, and so is that of queries."""

    def forward(self, x):
        q = k = v = self.cut(self.k(x))
        return self.merged((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class ForgetsToProject(Heads):
    """Keys and values are the same numbers, which no matrix made."""

    def forward(self, x, context):
        q, k = self.cut(self.q(x)), self.cut(context)
        return self.merged((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ k)


@pytest.mark.parametrize(
    "kind, cause",
    [
        (AllByKeys, "one_projection_for_all"),
        (ForgetsToProject, "input_projection_forgotten"),
    ],
)
def test_matrices_that_are_left_out_by_one_fault_are_named_once(kind, cause):
    report = multihead.check(kind)
    assert set(report.causes) == {cause}, str(report)


class InFrames(nn.Module):
    """Each place in time, (B, T, N, D), with dropout of weights."""

    def __init__(self, dim, num_heads=8, dropout=0.1):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """x: (B, T, N, D): batch, time, tokens, features"""
        B, T, N, D = x.shape
        x = x.permute(0, 2, 1, 3).reshape(B * N, T, D)
        qkv = self.qkv(x).reshape(B * N, T, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = self.dropout((q @ k.mT * self.scale).softmax(-1))
        out = self.proj((weights @ v).transpose(1, 2).reshape(B * N, T, D))
        return out.reshape(B, N, T, D).permute(0, 2, 1, 3)


def test_weights_of_frames_are_dropped_as_others():
    report = multihead.check(InFrames)
    assert report.judgement == "right", str(report)


def sliding_window_attention(q, k, v, window_size: int, *, causal: bool = True):
    """Sliding windows of q, k, v (B, H, N, D): as many keys on both sides; causal: those
    up to its own."""
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k, v must have one shape")
    return F.scaled_dot_product_attention(q, k, v, band(q, window_size, causal))


def band(q, size, causal):
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    if causal:
        return (distance >= 0) & (distance < size)
    return distance.abs() <= size // 2


def test_a_window_is_of_halves_or_of_earlier_keys():
    report = multihead.check(sliding_window_attention)
    names = [one["name"] for one in report.conditions]
    assert names == ["equal_lengths_only"], str(report)
    assert "where it is causal, as w keys" in str(report)


ABSENT = """
import torch
from torch import nn
from .rope import RotaryEmbedding, apply_rotary_pos_emb
from .layers import repeat_kv

class Attention(nn.Module):
    def __init__(self, dim, num_heads, num_kv_heads=2, max_len=64):
        super().__init__()
        self.head_dim = dim // num_heads
        self.n_rep = num_heads // num_kv_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.rotary_emb = RotaryEmbedding(self.head_dim, max_len=max_len)

    def forward(self, x):
        cut = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, cut).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, cut).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, cut).transpose(1, 2)
        cos, sin = self.rotary_emb(v, seq_len=x.shape[1])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = repeat_kv(k, self.n_rep), repeat_kv(v, self.n_rep)
        context = (q @ k.mT / SCALE).softmax(-1) @ v
        return self.o_proj(context.transpose(1, 2).flatten(2))
"""


def test_rotary_positions_that_are_not_there_are_a_condition(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(ABSENT.replace("SCALE", "self.head_dim**0.5"))
    report = multihead.check(f"{path}:Attention")
    names = [one["name"] for one in report.conditions]
    assert names == ["positions_left_out"], str(report)
    path.write_text(ABSENT.replace("SCALE", "1"))
    assert multihead.check(f"{path}:Attention").cause == "scale_missing"


def test_what_stands_in_is_no_error_of_the_code(tmp_path):
    path = tmp_path / "attention.py"
    kept = "self.register_buffer('freqs', RotaryEmbedding(self.head_dim))"
    made = "self.rotary_emb = RotaryEmbedding(self.head_dim, max_len=max_len)"
    assert made in ABSENT
    path.write_text(ABSENT.replace(made, kept))
    assert multihead.check(f"{path}:Attention").judgement == "not_judged"


class Guarded(Causal):
    """Cosines, and rows of which all is hidden, which are asked for."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = self.hidden(10 * q @ k.mT)
        dead = (scores == float("-inf")).all(-1, keepdim=True)
        return self.merged(scores.softmax(-1).masked_fill(dead, 0.0) @ v)


class OfPadding(Heads):
    """Rows of zeros are padding, which nobody sees."""

    def forward(self, x):
        q, k, v = self.heads(x)
        hidden = (x.abs().sum(-1) == 0)[:, None, None, :]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
        return self.merged(scores.softmax(-1) @ v)


class Drawn(Heads):
    """Matrices of NumPy's generator, which nobody seeds."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        draw = np.random.default_rng()
        for layer in (self.q, self.k, self.v, self.o):
            weight = torch.as_tensor(draw.normal(size=(dim, dim)) / dim**0.5)
            layer.weight = nn.Parameter(weight.float())

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class OverTheBatch(Drawn):
    """With a norm over the batch, which evaluates by what it kept in training."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.bn = nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.bn(super().forward(x).transpose(1, 2)).transpose(1, 2)


class OfAVideo(Heads):
    """(B, T, N, C): all places of all frames are one sequence."""

    def forward(self, x):
        B, T, N, C = x.shape
        q, k, v = self.heads(x.reshape(B, T * N, C))
        out = self.merged((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)
        return out.reshape(B, T, N, C)


@pytest.mark.parametrize("kind", [Guarded, OfPadding, Drawn, OverTheBatch, OfAVideo])
def test_what_differs_for_other_reasons_is_not_accused(kind):
    report = multihead.check(kind)
    assert report.judgement in ("right", "right_if"), str(report)


class MayBePacked(Packed):
    """Packed rows or a batch; the batch is wrong."""

    def forward(self, x, cu_seqlens=None):
        packed = cu_seqlens is not None
        if packed:
            return super().forward(x, cu_seqlens)
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT).softmax(-1) @ v)


def test_bounds_that_may_be_left_out_are():
    assert multihead.check(MayBePacked).cause == "scale_missing"


class CountsShown(Heads):
    """Rotary positions of what a mask shows, as behind padding on the left."""

    def forward(self, x, attention_mask):
        """attention_mask: (B, L), 1 = a token, 0 = padding"""
        places = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        q, k, v = self.heads(x)
        half = q.shape[-1] // 2
        rates = 100.0 ** (-torch.arange(half).to(x) / half)
        angles = places[:, None, :, None] * rates
        cos, sin = angles.cos(), angles.sin()
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        q = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        k = torch.cat((c * cos - d * sin, c * sin + d * cos), -1)
        hidden = attention_mask[:, None, None, :] == 0
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
        return self.merged(scores.softmax(-1) @ v)


def test_positions_that_follow_a_mask_are_not_judged():
    report = multihead.check(CountsShown)
    assert report.judgement == "not_judged", str(report)
