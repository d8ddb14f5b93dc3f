# SPDX-License-Identifier: MIT
"""What ordinary files have: counts of keys, sides of boards and images, flags that are
on by default, decoders that hide nothing, tokens that are views of an image."""

import math

import numpy as np
import pytest
import torch
from heads import Heads
from test_check_strays import named
from test_check_turning import Block, rotated
from test_check_unusual import conditions
from torch import nn

import multihead


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return scores.softmax(-1) @ v


class Plain(Heads):
    def forward(self, x):
        return self.merged(attention(*self.heads(x)))


class CausalByDefault(Plain):
    def __init__(self, dim, num_heads, causal=True):
        super().__init__(dim, num_heads)
        self.causal = causal


class MaskedByDefault(Plain):
    """Masked self-attention of a decoder."""

    def __init__(self, dim, num_heads, masked=True):
        super().__init__(dim, num_heads)
        self.masked = masked


class CausalIndeed(CausalByDefault):
    def forward(self, x):
        q, k, v = self.heads(x)
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return self.merged(attention(q, k, v, later if self.causal else None))


@pytest.mark.parametrize("kind", [CausalByDefault, MaskedByDefault])
def test_a_flag_that_is_on_by_default_and_does_nothing(kind):
    assert multihead.check(kind).cause == "causal_ignored"


def test_a_flag_that_is_on_by_default_and_is_heard():
    assert multihead.check(CausalIndeed).judgement != "wrong"


class CausalElsewhere(Plain):
    """A switch that is off by default, and of something else."""

    def __init__(self, dim, num_heads, causal=False):
        super().__init__(dim, num_heads)
        self.causal = causal

    def forward(self, x):
        out = super().forward(x)
        return out.cummax(1).values if self.causal else out


def test_a_switch_that_does_something_else_is_not_judged():
    assert multihead.check(CausalElsewhere).judgement == "right"


class Filled(Heads):
    """mask: True for what is seen."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, -1e9)
        return self.merged(weights @ v)


def test_weights_that_are_filled_as_scores_are():
    report = multihead.check(Filled)
    assert report.judgement == "wrong" and named(report) == ["mask_after_softmax"]


class Turned(Heads):
    """Both masks hold True for what is seen."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)

    def forward(self, x, y, attn_mask=None, key_padding_mask=None):
        q, k, v = self.heads(x, y)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        if key_padding_mask is not None:
            scores = scores.masked_fill(~key_padding_mask[:, None, None], -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class TurnedOnce(Turned):
    """Only that of padding holds True for what is seen."""

    def forward(self, x, y, attn_mask=None, key_padding_mask=None):
        hidden = None if attn_mask is None else attn_mask.logical_not()
        return super().forward(x, y, hidden, key_padding_mask)


def test_padding_with_the_name_of_pytorchs_is_open_beside_a_mask_turned_as_it_is():
    assert conditions(multihead.check(Turned)) == ["mask_keeps", "padding_keeps"]


class InTheMask(Heads):
    """Attention. True in the mask means may attend."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        return self.merged(attention(q, k, v, mask))


def test_what_true_in_a_mask_means():
    assert multihead.check(InTheMask).cause == "mask_inverted"


class Board(Heads):
    """(B, N, E) of a square board."""

    def __init__(self, dim, num_heads, board_size: int = 15):
        super().__init__(dim, num_heads)
        self.board_size = board_size
        self.register_buffer("places", torch.randn(1, board_size**2, dim))

    def forward(self, x):
        B, N, E = x.shape
        q, k, v = self.heads(x + 0 * self.places)
        return self.merged((q @ k.mT * math.sqrt(q.shape[-1])).softmax(-1) @ v)


def test_the_side_of_a_board_is_small():
    report = multihead.check(Board)
    assert report.cause == "scale_multiplied"
    assert report.cases[0]["shape"] == [3, 9, 48]


class OfAnImage(Heads):
    def tokens(self, x):
        return x.flatten(2).mT

    def back(self, tokens, shape):
        return tokens.mT.reshape(shape)

    def forward(self, x):
        b, c, w, h = x.shape
        return self.back(Plain.forward(self, self.tokens(x)), x.shape)


class OfAnImageByView(OfAnImage):
    def tokens(self, x):
        b, c, w, h = x.shape
        return x.reshape(b, w * h, c)

    def back(self, tokens, shape):
        return tokens.reshape(shape)


def test_tokens_that_are_views_of_an_image_are_named():
    assert multihead.check(OfAnImage).judgement == "right"
    report = multihead.check(OfAnImageByView)
    assert report.judgement == "wrong" and named(report) == ["positions_scrambled"]


class Overwritten(nn.Module):
    """Queries are made of the values, by the rotary positions of the file."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.att, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def rope(self, x):
        place = torch.arange(x.shape[-2]).to(x)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (
            even * place.cos() - odd * place.sin(),
            even * place.sin() + odd * place.cos(),
        )
        return torch.stack(turned, -1).flatten(-2)

    def forward(self, x):
        parts = self.att(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        q, k = self.rope(v), self.rope(k)
        return self.o(attention(q, k, v).transpose(1, 2).flatten(2))


def test_queries_that_are_overwritten_are_named():
    report = multihead.check(Overwritten)
    assert report.judgement == "wrong"
    assert {*named(report), *report.causes} & {
        "projection_unused",
        "value_weight_for_queries",
    }


class Decoder(nn.Module):
    """A layer of a decoder, (B, L, E)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.own, self.cross = Heads(dim, num_heads), Heads(dim, num_heads)
        self.wide, self.narrow = nn.Linear(dim, 64), nn.Linear(64, dim)

    def forward(self, x, memory, memory_padding_mask=None):
        """memory_padding_mask: True for padding."""
        hidden = memory_padding_mask
        hidden = None if hidden is None else hidden[:, None, None]
        x = x + self.own.merged(attention(*self.own.heads(x)))
        heads = self.cross.heads(x, memory)
        x = x + self.cross.merged(attention(*heads, mask=hidden))
        return x + self.narrow(self.wide(x).relu())


class MaskedDecoder(Decoder):
    def forward(self, x, memory, tgt_mask=None):
        """tgt_mask: True for what is hidden."""
        x = x + self.own.merged(attention(*self.own.heads(x), mask=tgt_mask))
        x = x + self.cross.merged(attention(*self.cross.heads(x, memory)))
        return x + self.narrow(self.wide(x).relu())


def test_a_decoder_that_hides_no_later_keys_is_a_condition():
    assert "sees_later_keys" in conditions(multihead.check(Decoder))
    assert "sees_later_keys" not in conditions(multihead.check(MaskedDecoder))


class SoftMask(Heads):
    """A bias for each pair, 0 or 1, which hides nothing."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.edges = nn.Parameter(torch.randn(num_heads, 1, 1))

    def forward(self, x, adjacency=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if adjacency is not None:
            scores = scores + self.edges * adjacency[None, None]
        return self.merged(scores.softmax(-1) @ v)


def test_a_mask_that_is_a_bias_hides_nothing_that_it_should():
    assert "hidden_keys_read" not in named(multihead.check(SoftMask))


class Largest(Heads):
    """Attention to the largest scores."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        least = scores.topk(2, -1).values[..., -1:]
        return self.merged(attention(q, k, v, scores < least))


def test_attention_to_the_largest_scores_is_of_another_kind():
    assert multihead.check(Largest).judgement == "not_judged"


class OfASide(nn.Module):
    """Its constructor is told the side of an image."""

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.channels, self.size = channels, size
        self.norm = nn.LayerNorm(channels)
        self.mha = nn.MultiheadAttention(channels, 4, batch_first=True)

    def tokens(self, x):
        return x.view(-1, self.channels, self.size * self.size).mT

    def forward(self, x):
        normed = self.norm(self.tokens(x))
        out = self.mha(normed, normed, normed)[0] + self.tokens(x)
        return out.mT.reshape(-1, self.channels, self.size, self.size)


def test_a_constructor_that_is_told_the_side_of_an_image():
    report = multihead.check(OfASide)
    assert report.judgement.startswith("right"), str(report)


class OfNodes(Heads):
    """Nodes of a graph without a batch, heads in the middle of their scores."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.1):
        super().__init__(dim, num_heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        assert x.dim() == 2
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.q, self.k, self.v)
        )
        scores = torch.einsum("nhd,mhd->nhm", q, k) / math.sqrt(q.shape[-1])
        weights = self.dropout(scores.softmax(-1))
        return self.o(torch.einsum("nhm,mhd->nhd", weights, v).flatten(1))


def test_draws_on_weights_without_a_batch_are_told_apart():
    report = multihead.check(OfNodes)
    assert report.judgement == "right", str(report)
    assert "training" in [case["name"] for case in report.cases]


class Places(Heads):
    """A bias of relative positions, learned, and no scale."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(dim, num_heads)
        self.bias = nn.Parameter(torch.randn(num_heads, 127))

    def forward(self, x):
        q, k, v = self.heads(x)
        at = torch.arange(x.shape[1])
        scores = q @ k.mT + self.bias[:, at[:, None] - at + 63]
        return self.merged(scores.softmax(-1) @ v)


def test_a_scale_that_is_missing_beside_a_bias_is_a_condition():
    assert "unscaled_beside_number" in conditions(multihead.check(Places))


class OfAPlane(Block):
    """Rotary positions of the rows and the columns of an image, of two columns."""

    def turned(self, q, k):
        places = torch.arange(q.shape[-2])
        return (
            torch.cat(
                [
                    rotated(t[..., :4], -2, places // 2),
                    rotated(t[..., 4:], -2, places % 2),
                ],
                -1,
            )
            for t in (q, k)
        )


def test_turns_by_rows_and_columns_are_no_fault():
    assert conditions(multihead.check(OfAPlane(32, 4))) == ["layers_beside"]


# ---- Who reads whom, where no fault explains it ---------------------------------------


class HeadsOfAToken(Heads):
    """Groups of queries meet the keys of their own token."""

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.q, self.k, self.v)
        )
        scores = q.flip(-2) @ k[:, :, ::2].mT / math.sqrt(q.shape[-1])
        return self.o((scores.softmax(-1) @ v[:, :, ::2]).flatten(2))


def test_code_in_which_no_position_reads_another():
    report = multihead.check(HeadsOfAToken)
    assert report.judgement == "wrong" and named(report) == ["positions_apart"]


def lost_scale(query, key, value, mask=None):
    """Begins again without the scale where it is masked, and hides nothing."""
    scores = query @ key.transpose(-2, -1)
    scaled = scores / math.sqrt(query.shape[-1])
    if mask is not None:
        scaled = scores.masked_fill(mask == 0, -0.5) * 1.3
    return scaled.softmax(-1) @ value


def test_code_whose_masks_hide_nothing_that_is_named():
    report = multihead.check(lost_scale)
    assert report.judgement == "wrong"
    assert "hidden_keys_read" in named(report) or report.causes, str(report)


# ---- Arguments ------------------------------------------------------------------------


class OfMode(Heads):
    """A required text that says how it is called."""

    def forward(self, x, mode: str):
        if mode != "train":
            raise NotImplementedError(mode)
        return self.merged(attention(*self.heads(x)))


class MissesWhatItSays(Heads):
    """A length without which it has no mask of its own, but with which it needs another."""

    def __init__(self, dim: int, num_heads: int, seq_len: int = -1, hide: bool = False):
        super().__init__(dim, num_heads)
        self.seq_len = seq_len
        if hide:
            later = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
            self.register_buffer("later", later)

    def forward(self, x):
        hidden = self.later[: x.shape[1], : x.shape[1]] if self.seq_len > 0 else None
        return self.merged(attention(*self.heads(x), mask=hidden))


class WidthOfAll(Heads):
    """The size of a head is that of all, which their number divides."""

    def __init__(self, head_size: int, num_heads: int):
        assert head_size % num_heads == 0
        super().__init__(head_size, num_heads)

    forward = Plain.forward


@pytest.mark.parametrize("kind", [OfMode, MissesWhatItSays, WidthOfAll])
def test_arguments_are_what_a_person_would_give(kind):
    report = multihead.check(kind)
    assert report.judgement == "right", str(report)


def of_numpy(q, k, v):
    """Nothing of NumPy's own is taken for a weight."""
    weights = np.exp(np.dot(q, k.T))
    weights /= np.sum(weights, axis=1, keepdims=True)
    return np.dot(weights, v)


def test_what_numpy_calls_its_arguments_is_no_weight():
    assert multihead.check(of_numpy).cause == "scale_missing"


class HandedWeights:
    """Weights that are loaded, (out, in)."""

    def __init__(self, n_heads, wq, wk, wv, wo):
        self.heads = n_heads
        self.wq, self.wk, self.wv, self.wo = wq.T, wk.T, wv.T, wo.T

    def scale(self, width):
        return np.sqrt(width)

    def __call__(self, x):
        size, length, width = x.shape
        shape = size, length, self.heads, width // self.heads
        q, k, v = (
            (x @ w).reshape(shape).transpose(0, 2, 1, 3)
            for w in (self.wq, self.wk, self.wv)
        )
        weights = np.exp(q @ k.transpose(0, 1, 3, 2) / self.scale(shape[-1]))
        merged = (weights / weights.sum(-1, keepdims=True)) @ v
        return merged.transpose(0, 2, 1, 3).reshape(x.shape) @ self.wo


class HandedWeightsUnscaled(HandedWeights):
    def scale(self, width):
        return 1.0


def test_weights_that_a_constructor_is_handed():
    assert multihead.check(HandedWeights).judgement == "right"
    assert multihead.check(HandedWeightsUnscaled).cause == "scale_missing"
