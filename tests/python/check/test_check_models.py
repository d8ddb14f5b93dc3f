# SPDX-License-Identifier: MIT
"""What models hand their attention beside sequences: videos, vectors for each item,
queries that they learn, the numbers of tokens."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


def faults(report) -> list[str]:
    return [fault["name"] for fault in (report.verdict or {}).get("faults", [])]


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


def said(report) -> str:
    return " ".join(report.understood)


class Attention(nn.Module):
    """Of the models below. of_width: the scores are divided by the root of it all."""

    def __init__(self, dim: int, heads: int, of_width: bool = False):
        super().__init__()
        self.heads, self.scale = heads, dim if of_width else dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        scores = q @ k.mT / math.sqrt(self.scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


# ---- Videos --------------------------------------------------------------------------


class NonLocal(nn.Module):
    """(B, C, T, H, W): all of it is one sequence."""

    def __init__(self, channels: int):
        super().__init__()
        self.theta, self.phi, self.g, self.out = (
            nn.Conv3d(channels, channels, 1) for _ in range(4)
        )

    def weigh(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        q, k, v = (f(x).flatten(2) for f in (self.theta, self.phi, self.g))
        context = v @ self.weigh(q.mT @ k).mT
        return self.out(context.view_as(x)) + x


class OverQueries(NonLocal):
    def weigh(self, scores):
        return scores.softmax(-2)


class InFrames(NonLocal):
    """Each frame is a sequence."""

    def forward(self, video):
        b, c, t, h, w = video.shape
        x = video.transpose(1, 2).flatten(0, 1).unsqueeze(2)
        out = super().forward(x)
        return out.squeeze(2).unflatten(0, (b, t)).transpose(1, 2)


class Crooked(NonLocal):
    """Rows and columns of the image are exchanged on the way back."""

    def forward(self, video):
        b, c, t, h, w = video.shape
        x = video.permute(0, 3, 4, 1, 2).reshape(b * h * w, c, t, 1, 1)
        out = super().forward(x).view(b, w, h, c, t)
        return out.permute(0, 3, 4, 2, 1)


class InTime(NonLocal):
    """Each pixel is one."""

    def forward(self, video):
        b, c, t, h, w = video.shape
        x = video.permute(0, 3, 4, 1, 2).reshape(b * h * w, c, t, 1, 1)
        out = super().forward(x).view(b, h, w, c, t)
        return out.permute(0, 3, 4, 1, 2)


@pytest.mark.parametrize("kind", [NonLocal, InFrames, InTime])
def test_videos_are_one_sequence_or_one_for_each_frame_or_pixel(kind):
    report = multihead.check(kind)
    assert report.passed is False and report.judgement == "right_if"
    assert {"residual_inside", "dot_product_attention"} >= set(conditions(report))
    assert "videos as (B, E, T, Y, X)" in said(report)


def test_exchanged_sides_of_a_video_are_not_right():
    assert multihead.check(Crooked).judgement not in ("right", "right_if")


def test_a_fault_in_a_video_is_named():
    assert faults(multihead.check(OverQueries)) == ["softmax_over_queries"]


class InTimeLast(Attention):
    """Each pixel is a sequence: (B, S, H, W, D)."""

    def forward(self, x):
        b, s, h, w, d = x.shape
        of_pixels = x.permute(0, 2, 3, 1, 4).reshape(b * h * w, s, d)
        return super().forward(of_pixels).view(b, h, w, s, d).permute(0, 3, 1, 2, 4)


class InFramesLast(Attention):
    """Each frame is one: (B, T, H, W, C)."""

    def forward(self, x):
        b, t, h, w, c = x.shape
        return super().forward(x.view(b * t, h * w, c)).view(x.shape)


class OfWidthInFrames(InFramesLast):
    """(B, T, H, W, C)"""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads, of_width=True)


@pytest.mark.parametrize("kind", [InTimeLast, InFramesLast])
def test_videos_may_have_their_features_last(kind):
    report = multihead.check(kind)
    assert report.judgement in ("right", "right_if")
    assert "videos as (B, T, Y, X, E)" in said(report)


def test_a_fault_in_a_video_of_features_last_is_named():
    assert faults(multihead.check(OfWidthInFrames)) == ["scale_by_embed_dim"]


# ---- Vectors for each item -----------------------------------------------------------


class Modulated(nn.Module):
    """A block of a diffusion model: c (B, E) shifts and scales what goes in."""

    of_width = False

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False)
        self.attn = Attention(hidden_size, num_heads, self.of_width)
        self.modulation = nn.Sequential(
            nn.SiLU(), nn.Linear(hidden_size, 3 * hidden_size)
        )

    def forward(self, x, c):
        shift, scale, gate = self.modulation(c).chunk(3, dim=1)
        normed = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return x + gate.unsqueeze(1) * self.attn(normed)


class ModulatedByWidth(Modulated):
    of_width = True


def test_a_block_takes_a_vector_for_each_item():
    report = multihead.check(Modulated)
    assert conditions(report) == ["layers_beside"]
    assert "c taken for a vector for each item, (B, E)" in said(report)
    assert faults(multihead.check(ModulatedByWidth)) == ["scale_by_embed_dim"]


# ---- Learned queries -----------------------------------------------------------------


class Seeds(nn.Module):
    """Pooling by attention, as set transformers have it."""

    def __init__(self, dim: int, num_heads: int, num_seeds: int):
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(1, num_seeds, dim))
        self.attn = Attention(dim, num_heads)

    def forward(self, x, mask=None):
        """mask (B, L): 1 for real tokens, 0 for padding."""
        if mask is not None:
            mask = mask[:, None, None]
        return self.attn(self.seeds.expand(len(x), -1, -1), x, mask)


class Labels(nn.Module):
    """The queries are those of a table, and tokens are what its mask hides."""

    def __init__(self, dim: int, num_heads: int, num_labels: int):
        super().__init__()
        self.table = nn.Embedding(num_labels, dim)
        self.attn = Attention(dim, num_heads)

    def forward(self, x, mask=None):
        """mask (B, L): 1 for real tokens, 0 for padding."""
        hidden = None if mask is None else (mask == 0)[:, None, None]
        numbers = torch.arange(self.table.num_embeddings)
        return self.attn(self.table(numbers).expand(len(x), -1, -1), x, hidden)


class OneQuery(Seeds):
    """It returns (B, E)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(dim, num_heads, 1)

    def forward(self, x):
        return super().forward(x).squeeze(1)


def test_queries_that_are_learned_are_exchanged_for_ours():
    report = multihead.check(Seeds)
    assert report.passed, report
    assert "queries of ours for those that it learns" in said(report)
    assert multihead.check(OneQuery).passed


class TwoOfASize(Seeds):
    """Queries, and positions of theirs, as of a resampler."""

    def __init__(self, dim: int, num_heads: int, num_queries: int):
        super().__init__(dim, num_heads, num_queries)
        self.places = nn.Parameter(torch.randn(1, num_queries, dim))

    def forward(self, x):
        seeds = (self.seeds + self.places).expand(len(x), -1, -1)
        return self.attn(seeds, x)


def test_one_of_two_learned_tables_is_exchanged_in_every_call():
    report = multihead.check(TwoOfASize)
    assert report.judgement == "right_if" and not faults(report), str(report)


def test_a_mask_before_learned_queries_is_judged():
    assert faults(multihead.check(Labels)) == ["padding_inverted"]


# ---- Numbers of tokens ---------------------------------------------------------------


class Language(nn.Module):
    """Of two layers, as its defaults have it."""

    of_width = False

    def __init__(self, vocab_size: int, d_model: int, n_heads: int, n_layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(512, d_model)
        self.layers = nn.ModuleList(
            Attention(d_model, n_heads, self.of_width) for _ in range(n_layers)
        )
        self.head = nn.Linear(d_model, vocab_size)

    def mask(self, length: int):
        return torch.ones(length, length, dtype=torch.bool).tril()

    def forward(self, idx, targets=None):
        length = idx.shape[1]
        x = self.tokens(idx) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = x + layer(x, mask=self.mask(length))
        return self.head(x), None


class LanguageByWidth(Language):
    of_width = True


class SeesLater(Language):
    def mask(self, length: int):
        return super().mask(length).mT


class Classifier(Language):
    """One answer for each item."""

    def mask(self, length: int):
        return None

    def forward(self, input_ids, attention_mask=None):
        """attention_mask (B, L): 1 is a token."""
        seen = None if attention_mask is None else attention_mask[:, None, None] != 0
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x, mask=seen)
        return self.head(x[:, 0])


def test_a_whole_model_is_handed_tokens():
    report = multihead.check(Language)
    assert set(conditions(report)) == {
        "causal_by_itself",
        "later_attentions",
        "layers_beside",
    }
    assert "idx taken for tokens, which are embedded as ours" in said(report)


@pytest.mark.parametrize(
    "kind, fault",
    [(LanguageByWidth, "scale_by_embed_dim"), (SeesLater, "causal_inverted")],
)
def test_the_fault_of_a_whole_model_is_named(kind, fault):
    assert faults(multihead.check(kind)) == [fault]


def test_a_model_with_one_answer_for_each_item_is_judged():
    report = multihead.check(Classifier)
    assert report.judgement == "right_if" and "layers_beside" in conditions(report)


# ---- What stands before the heads ----------------------------------------------------


class Cosines(nn.Module):
    """Ten times the cosines, and a layer beside."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.beside = nn.Linear(dim, dim)

    def weigh(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        weights = self.weigh(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10)
        context = (weights @ v).transpose(1, 2).flatten(2)
        return self.out(context) + self.beside(x).tanh()


class CosinesOverQueries(Cosines):
    def weigh(self, scores):
        return scores.softmax(-2)


class Placed(nn.Linear):
    def forward(self, x):
        at = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return super().forward(x) + torch.sin(at / torch.arange(1, x.shape[2] + 1))


class PlacedKeys(Attention):
    """Positions are added to the keys, behind their projection."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(dim, num_heads)
        self.k = Placed(dim, dim)

    def forward(self, x, mask=None):
        return super().forward(x, mask=mask)


class Beside(nn.Module):
    """A block whose gate nothing here explains."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out, self.gate = (nn.Linear(dim, n * dim) for n in (3, 1, 1))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, context):
        return context.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = map(self.split, self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.out(self.merge(weights @ v)) * self.gate(x).sigmoid()


class MergedAsViewed(Beside):
    def merge(self, context):
        return context.reshape(len(context), context.shape[2], -1)


class MergedTurned(Beside):
    def merge(self, context):
        return context.mT.reshape(len(context), context.shape[2], -1)


class MergedByFeature(Beside):
    def merge(self, context):
        return context.permute(0, 2, 3, 1).flatten(2)


class FusedAsViewed(Beside):
    """All three at once, without a permute."""

    def forward(self, x):
        fused = self.qkv(self.norm(x))
        q, k, v = fused.reshape(len(x), 3, self.heads, x.shape[1], -1).unbind(1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.out(self.merge(weights @ v)) * self.gate(x).sigmoid()


class ItemsExchanged(Beside):
    def merge(self, context):
        size = len(context), context.shape[2], -1
        return context.permute(2, 0, 1, 3).reshape(size)


class SplitAsViewed(Beside):
    def split(self, x):
        return x.reshape(len(x), self.heads, x.shape[1], -1)


@pytest.mark.parametrize("kind", [Beside, MergedByFeature])
def test_what_moves_no_number_to_another_position_is_no_fault(kind):
    report = multihead.check(kind)
    assert conditions(report) == ["layers_beside"] and not faults(report)


@pytest.mark.parametrize(
    "kind, fault",
    [
        (MergedAsViewed, "merge_not_transposed"),
        (MergedTurned, "merge_not_transposed"),
        (SplitAsViewed, "heads_not_transposed"),
        (FusedAsViewed, "heads_not_transposed"),
        (ItemsExchanged, "merge_of_batch_and_heads"),
    ],
)
def test_how_heads_are_cut_and_joined_shows_beside_other_layers(kind, fault):
    report = multihead.check(kind)
    assert faults(report) == [fault]
    assert "numbers of several positions in one row" in " ".join(str(report).split())


def test_scores_may_have_a_scale_of_their_own():
    report = multihead.check(Cosines)
    assert set(conditions(report)) == {"own_scale", "layers_beside"}
    assert faults(multihead.check(CosinesOverQueries)) == ["softmax_over_queries"]


def test_positions_that_are_added_to_keys_are_no_fault():
    report = multihead.check(PlacedKeys)
    assert "layers_beside" in conditions(report) and not faults(report)


class Masked(Language):
    """Nothing of padding is seen, which is the number that it is told."""

    def __init__(self, vocab_size: int, pad_idx: int, d_model: int, n_heads: int):
        super().__init__(vocab_size, d_model, n_heads)
        self.pad_idx = pad_idx

    def seen(self, src):
        return (src != self.pad_idx)[:, None, None]

    def forward(self, src):
        x = F.embedding(src, self.tokens.weight)
        for layer in self.layers:
            x = x + layer(x, mask=self.seen(src))
        return x


class SeesPadding(Masked):
    def seen(self, src):
        return (src == self.pad_idx)[:, None, None]


class Translates(Masked):
    """The target is causal, and nobody tells which of its tokens are padding."""

    def forward(self, src, trg):
        memory, x = super().forward(src), self.tokens(trg)
        for layer in self.layers:
            x = x + layer(x, mask=self.mask(trg.shape[1]))
        return x + memory.mean(1, keepdim=True)


class TranslatesPadding(Translates, SeesPadding):
    pass


@pytest.mark.parametrize("kind", [Masked, Translates])
def test_padding_among_tokens_is_judged(kind):
    report = multihead.check(kind)
    assert set(conditions(report)) == {"later_attentions", "layers_beside"}
    assert "lengths" in [case["name"] for case in report.cases]
    assert "src taken for tokens" in said(report) and "trg taken" not in said(report)


@pytest.mark.parametrize("kind", [SeesPadding, TranslatesPadding])
def test_padding_that_is_seen_among_tokens_is_named(kind):
    assert faults(multihead.check(kind)) == ["padding_inverted"]


class SkipsPaddingInItsLoss(Language):
    """Padding is behind all tokens, which see none of it: only the loss leaves it out."""

    pad = 0

    def forward(self, idx, targets=None, layer_idx=0):
        if layer_idx == 0 and targets is not None:
            targets = targets[targets != self.pad]
        return super().forward(idx)[0]


def test_padding_that_only_a_loss_leaves_out_is_no_mask():
    report = multihead.check(SkipsPaddingInItsLoss)
    assert report.judgement == "right_if", str(report)
    assert "lengths" not in [case["name"] for case in report.cases]


class LogitsInRows(TranslatesPadding):
    """As a loss takes them, (B * L, V)."""

    def forward(self, src, trg):
        return self.head(super().forward(src, trg)).flatten(0, 1)


def test_logits_may_be_rows():
    assert faults(multihead.check(LogitsInRows)) == ["padding_inverted"]
