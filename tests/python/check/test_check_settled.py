# SPDX-License-Identifier: MIT
"""Arguments that published code asks for, and what a person would give it: settings of
settings, rotary modules, numbers of positions, members of an enumeration, sizes of the
batch, flags that look like masks, and masks in the shape that their text gives."""

import enum
import textwrap

import pytest
import torch
from attempts.steps import Attention
from torch import nn

import multihead


class OfParts(Attention):
    """Settings have parts, whose names alone are those of sizes."""

    def __init__(self, cfg, d_model):
        super().__init__(d_model, cfg.attention.n_heads)
        self.longest = cfg.position.max_seq_len

    def forward(self, x):
        assert x.size(1) <= self.longest or x.size(1) == 130
        return self.attend(x, x, x)


class HandedARotary(Attention):
    def __init__(self, d_model, num_heads, rope):
        super().__init__(d_model, num_heads)
        self.rope = rope

    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = self.rope(q), self.rope.rotate_queries_or_keys(k)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class AnyTable(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.speed = base ** (-torch.arange(0, dim, 2).double() / dim)

    def forward(self, x, places):
        angle = places[:, None, :, None] * self.speed
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class OwnTable(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.table = AnyTable(dim, base)

    def forward(self, q, k):
        places = torch.arange(q.size(2)).expand(len(q), -1)
        return self.table(q, places), self.table(k, places)


class HandedItsOwnRotary(Attention):
    """The class of the module is known, so that it is made, and judged."""

    def __init__(self, d_model, num_heads, rope: OwnTable):
        super().__init__(d_model, num_heads)
        self.rope = rope

    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = self.turned(q, k)
        return self.join(self.scores(q, k).softmax(-1) @ v)

    def turned(self, q, k):
        return self.rope(q, k)


class TurnsQueriesAlone(HandedItsOwnRotary):
    def turned(self, q, k):
        return self.rope(q, k)[0], k


def test_rotary_positions_of_a_class_that_is_known_are_judged():
    report = multihead.check(TurnsQueriesAlone)
    assert report.cause == "rotary_misapplied", str(report)


def test_what_a_stand_in_does_not_turn_is_not_judged():
    report = multihead.check(HandedARotary)
    assert "a stand-in turned nothing" in " ".join(str(report).split())


class AsksForPlaces(Attention):
    """Numbers of positions, which it calls optional and needs."""

    def __init__(self, d_model, num_heads, rope_theta):
        super().__init__(d_model, num_heads)
        self.turn = AnyTable(self.d_k, rope_theta)

    def forward(self, x, position_ids=None):
        q, k, v = self.qkv(x)
        q, k = self.turn(q, position_ids), self.turn(k, position_ids)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class AsksForATable(Attention):
    """The pos_emb of another family: a vector for each distance."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.linear_pos = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, pos_emb):
        q, k, v = self.qkv(x)
        length = x.size(1)
        places = self.split(self.linear_pos(pos_emb[:, :length]))
        scores = self.scores(q, k) + self.scores(q, places.expand_as(k))
        return self.join(scores.softmax(-1) @ v)


Strategy = enum.Enum("Strategy", "PLAIN CAUSAL")


class OfAStrategy(Attention):
    def __init__(self, d_model, num_heads, strategy):
        super().__init__(d_model, num_heads)
        self.strategy = strategy

    def forward(self, z, x):
        if self.strategy == Strategy["PLAIN"]:
            seen = x
        elif self.strategy == Strategy["CAUSAL"]:
            raise NotImplementedError
        return self.attend(seen, z, z)


class OfABatch(Attention):
    """It is told all sizes, and an axis that is none."""

    def __init__(self, embedding_s, num_heads, batch_size, seq_len, batch_dim=0):
        super().__init__(embedding_s, num_heads)
        self.sizes, self.batch_dim = (batch_size, seq_len), batch_dim

    def forward(self, x):
        assert x.shape[:2] == self.sizes and self.batch_dim == 0
        return self.attend(x, x, x)


class MaskIsAFlag(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if mask:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


class LooksAhead(MaskIsAFlag):
    def forward(self, x, look_ahead_mask=False):
        return super().forward(x, look_ahead_mask)


class HandedItsHeads(nn.Module):
    """Told its heads, of which it is handed queries, keys and values."""

    def __init__(self, num_heads, head_dim):
        super().__init__()
        self.num_heads, self.scale = num_heads, head_dim**-0.5

    def forward(self, q, k, v):
        return (q @ k.mT * self.scale).softmax(-1) @ v


@pytest.mark.parametrize(
    "target",
    [
        OfParts,
        HandedARotary,
        HandedItsOwnRotary,
        AsksForPlaces,
        AsksForATable,
        OfAStrategy,
        OfABatch,
        MaskIsAFlag,
        LooksAhead,
        HandedItsHeads,
    ],
)
def test_it_is_called_as_a_person_would(target):
    report = multihead.check(target)
    assert report.cause is None and report.judgement in ("right", "right_if"), str(
        report
    )


class AsksWhetherItsMaskIsTrue(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if mask:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


def test_no_tensor_is_true():
    report = multihead.check(AsksWhetherItsMaskIsTrue)
    assert report.judgement == "wrong", str(report)
    assert "Boolean value of Tensor" in str(report)


class PlainMask(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill(self.laid_out(mask), -torch.inf)
        return self.join(scores.softmax(-1) @ v)

    def laid_out(self, mask):
        return mask


class SaidToBeOfKeys(PlainMask):
    """mask: (batch, seq_len), True = blocked."""


class SaidToBeOfRows(PlainMask):
    """mask: (batch, seq_len, seq_len), True = blocked."""


class SaidAndLaidOut(SaidToBeOfKeys):
    """mask: (batch, seq_len), True = blocked."""

    def laid_out(self, mask):
        return mask[:, None, None] if mask.dim() == 2 else mask


class SaidInPassing(PlainMask):
    """mask: (seq_len, seq_len), True = blocked; a padding mask (batch, seq_len) belongs
    to the loss."""


class SaidOfLengths(PlainMask):
    """mask: built from the lengths (batch, seq_len) by the caller. True = blocked."""


class SaidNotToBe(PlainMask):
    """The mask is never one of padding, (batch, seq_len). True = blocked."""


@pytest.mark.parametrize(
    "target, cause",
    [
        (PlainMask, None),
        (SaidInPassing, None),
        (SaidOfLengths, None),
        (SaidNotToBe, None),
        (SaidToBeOfKeys, "mask_batch_as_queries"),
        (SaidToBeOfRows, "mask_batch_as_heads"),
        (SaidAndLaidOut, None),
    ],
)
def test_a_mask_is_tried_in_the_shape_that_its_text_gives(target, cause):
    report = multihead.check(target)
    assert report.cause == cause, str(report)


def test_a_layer_of_an_absent_package_is_that_of_pytorch(tmp_path):
    text = """
        from days.w2 import Linear
        from torch import nn

        class Own(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.q, self.k, self.v = (Linear(dim, dim) for _ in range(3))

            def forward(self, x):
                scores = self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5
                return scores.softmax(-1) @ self.v(x)
        """
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(text))
    report = multihead.check(f"{path}:Own")
    assert report.judgement == "right", str(report)
    assert "days" in str(report)


def test_what_nobody_stated_is_not_the_codes_fault():
    class Unbound(Attention):
        def __init__(self, d_model, num_heads, what):
            super().__init__(d_model, num_heads)
            self.what = what

        def forward(self, x):
            if self.what == 7:
                seen = x
            return self.attend(seen, seen, seen)

    report = multihead.check(Unbound)
    assert report.judgement == "not_judged", str(report)
    assert "what" in str(report)


class ToldTheWidthOfAHead(Attention):
    def __init__(self, n_embd, h_size):
        super().__init__(n_embd, n_embd // h_size)
        self.n_head = n_embd // h_size

    def forward(self, x):
        return self.attend(x, x, x)


class OneHead(nn.Module):
    """Of two widths, of which the second is that of the head."""

    def __init__(self, model_dim: int, embedding_dim: int):
        super().__init__()
        self.q = nn.Linear(model_dim, embedding_dim)
        self.k = nn.Linear(in_features=model_dim, out_features=embedding_dim)
        self.v = nn.Linear(model_dim, embedding_dim)

    def width(self):
        return self.q.out_features

    def forward(self, queries, keys, values):
        q, k, v = self.q(queries), self.k(keys), self.v(values)
        return (q @ k.transpose(-2, -1) / self.width() ** 0.5).softmax(-1) @ v


class OneHeadByTheModel(OneHead):
    def width(self):
        return self.q.in_features


class OfAgents(Attention):
    def __init__(self, n_embd, n_head, n_agent, masked=False):
        super().__init__(n_embd, n_head)
        self.masked = masked
        self.register_buffer("mask", torch.tril(torch.ones(n_agent + 1, n_agent + 1)))

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores, length = self.scores(q, k), x.shape[1]
        if self.masked:
            seen = self.mask[:length, :length] == 1
            scores = scores.masked_fill(~seen, float("-inf"))
        return self.join(scores.softmax(-1) @ v)


@pytest.mark.parametrize("target", [ToldTheWidthOfAHead, OneHead, OfAgents])
def test_sizes_that_the_constructor_itself_explains(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)


class ShortNames(nn.Module):
    """One head, as wide as a name says that says nothing."""

    def __init__(self, n_embd, hs, ctx):
        super().__init__()
        self.key = nn.Linear(n_embd, hs, bias=False)
        self.query = nn.Linear(n_embd, hs, bias=False)
        self.value = nn.Linear(n_embd, hs, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(ctx, ctx)))

    def scale(self, k, x):
        return k.shape[-1] ** -0.5

    def forward(self, x):
        length = x.shape[1]
        k, q = self.key(x), self.query(x)
        scores = q @ k.transpose(-2, -1) * self.scale(k, x)
        scores = scores.masked_fill(self.tril[:length, :length] == 0, float("-inf"))
        return scores.softmax(-1) @ self.value(x)


class ShortNamesByTheModel(ShortNames):
    def scale(self, k, x):
        return x.shape[-1] ** -0.5


@pytest.mark.parametrize("target", [OneHeadByTheModel, ShortNamesByTheModel])
def test_the_width_of_one_head_is_not_the_models(target):
    assert multihead.check(target).causes == ["scale_by_embed_dim"]
    other = OneHead if target is OneHeadByTheModel else ShortNames
    assert multihead.check(other).judgement != "wrong"


class ByItsOwnMatrices(nn.Module):
    """Each head has matrices of its own, in lists of parameters, for (B, E, L)."""

    def __init__(self, encoder_size: int, num_header: int):
        super().__init__()
        self.count = num_header

        def matrices():
            width = int(encoder_size / num_header)
            made = [torch.empty(encoder_size, width) for _ in range(num_header)]
            return nn.ParameterList([nn.init.xavier_uniform_(one) for one in made])

        self.wq, self.wk, self.wv = matrices(), matrices(), matrices()
        self.wo = nn.Linear(encoder_size, encoder_size)

    def forward(self, x):
        x = x.transpose(1, 2)
        heads = []
        for i in range(self.count):
            q, k, v = x @ self.wq[i], x @ self.wk[i], x @ self.wv[i]
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            heads.append(scores.softmax(-1) @ v)
        return self.wo(torch.cat(heads, 2)).transpose(1, 2)


class MaybeRelative(Attention):
    """A length of 0 is off by default, as are the distances that it would count."""

    def __init__(self, d_model, num_heads, max_relative_positions=0):
        super().__init__(d_model, num_heads)
        self.far = max_relative_positions
        if max_relative_positions > 0:
            self.bias = nn.Embedding(max_relative_positions, num_heads)

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if self.far > 0:
            places = torch.arange(x.shape[1])
            far = (places - places[:, None]).abs().clamp(max=self.far - 1)
            scores = scores + self.bias(far).permute(2, 0, 1)
        return self.join(scores.softmax(-1) @ v)


def test_sequences_whose_features_come_first_are_turned_before_matrices_of_lists():
    report = multihead.check(ByItsOwnMatrices)
    assert report.judgement == "right" and "(B, E, L)" in str(report), str(report)


def test_a_length_of_nothing_by_default_stays_off():
    report = multihead.check(MaybeRelative)
    assert report.judgement == "right", str(report)
    assert "max_relative_positions" not in str(report)
