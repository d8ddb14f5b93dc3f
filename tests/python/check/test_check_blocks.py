# SPDX-License-Identifier: MIT
"""Blocks with several attentions, as the layers of a decoder: each is judged by itself,
with the masks that are meant for it, and so is what of the context reaches which."""

import math

import pytest
import torch
from torch import nn

import multihead


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


class Heads(nn.Module):
    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1):
        super().__init__()
        self.count, self.width = num_heads, d_model // num_heads
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def root(self) -> float:
        return math.sqrt(self.width)

    def forward(self, q, k, v, mask=None):
        q, k, v = (
            f(t).unflatten(-1, (self.count, -1)).transpose(1, 2)
            for f, t in ((self.w_q, q), (self.w_k, k), (self.w_v, v))
        )
        scores = q @ k.transpose(-2, -1) / self.root()
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        return self.w_o((weights @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A layer of a decoder, post-norm."""

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1):
        super().__init__()
        self.self_attn = Heads(d_model, num_heads, dropout)
        self.cross_attn = self.of_context(d_model, num_heads, dropout)
        self.wide, self.narrow = nn.Linear(d_model, 64), nn.Linear(64, d_model)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))

    def of_context(self, *sizes):
        return Heads(*sizes)

    def alone(self, x, src_mask, tgt_mask):
        return self.self_attn(x, x, x, tgt_mask)

    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, enc_out, src_mask)

    def forward(self, x, enc_out, src_mask=None, tgt_mask=None):
        x = self.norms[0](x + self.alone(x, src_mask, tgt_mask))
        x = self.norms[1](x + self.across(x, enc_out, src_mask, tgt_mask))
        return self.norms[2](x + self.narrow(self.wide(x).relu()))


def test_a_layer_of_a_decoder_is_right_in_both_attentions():
    report = multihead.check(Decoder)
    assert report.judgement == "right_if"
    assert set(conditions(report)) == {"mask_keeps", "layers_beside"}
    names = [case["name"] for case in report.cases]
    for place in (1, 2):
        assert f"no mask, attention {place}" in names
        assert f"causal mask of its own, attention {place}" in names
        assert f"mask (B, 1, Lq, Lk), attention {place}" in names


class WithMaskOfSelfForgotten(Decoder):
    def alone(self, x, src_mask, tgt_mask):
        return self.self_attn(x, x, x)


class WithMaskOfContextForgotten(Decoder):
    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, enc_out)


class Unscaled(Heads):
    def root(self) -> float:
        return 1.0


class WithUnscaledContext(Decoder):
    def of_context(self, *sizes):
        return Unscaled(*sizes)


@pytest.mark.parametrize(
    "block, fault, place",
    [
        (WithMaskOfSelfForgotten, "mask_ignored", 1),
        (WithMaskOfContextForgotten, "mask_ignored", 2),
        (WithUnscaledContext, "scale_missing", 2),
    ],
)
def test_a_fault_of_one_attention_is_found_beside_the_other(block, fault, place):
    report = multihead.check(block)
    assert list(report.causes) == [fault]
    assert all(f"attention {place}" in c["name"] for c in report.cases)


class WithContextUnread(Decoder):
    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, x, x)


class WithContextAsking(Decoder):
    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(enc_out, x, x, src_mask)


class WithContextHalfRead(Decoder):
    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, x, src_mask)


class WithMasksExchanged(Decoder):
    def alone(self, x, src_mask, tgt_mask):
        return self.self_attn(x, x, x, src_mask)

    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, enc_out, tgt_mask)


class WithOneMaskForBoth(Decoder):
    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, enc_out, tgt_mask)


class WithTheSourcesMaskAlone(Decoder):
    def alone(self, x, src_mask, tgt_mask):
        return self.self_attn(x, x, x, src_mask)


@pytest.mark.parametrize(
    "block, flaw",
    [
        (WithContextUnread, "context_unread"),
        (WithContextAsking, "context_asks"),
        (WithContextHalfRead, "context_half_read"),
        (WithMasksExchanged, "masks_exchanged"),
        (WithOneMaskForBoth, "mask_of_another"),
        (WithTheSourcesMaskAlone, "mask_of_another"),
    ],
)
def test_what_reaches_which_attention(block, flaw):
    report = multihead.check(block)
    assert report.judgement == "wrong"
    assert flaw in report.causes
    assert "no_weights_found" not in report.causes


class WithContextThatMayBeLeftOut(Decoder):
    """As blocks of diffusion models, whose second attention may be one of itself."""

    def forward(self, x, context=None, mask=None):
        x = self.norms[0](x + self.self_attn(x, x, x, mask))
        return self.norms[1](x + self.cross_attn(x, x, x))


class BothWays(Decoder):
    """Each reads the other, as image and prompt in a two-way block."""

    def forward(self, x, context):
        x = self.norms[0](x + self.self_attn(x, context, context))
        return self.norms[1](x + self.cross_attn(x, context, context))


class WithOneMask(Decoder):
    """Its one mask is for self-attention."""

    def forward(self, x, enc_out, mask=None):
        x = self.norms[0](x + self.self_attn(x, x, x, mask))
        return self.norms[1](x + self.cross_attn(x, enc_out, enc_out))


@pytest.mark.parametrize("block", [WithContextThatMayBeLeftOut, BothWays, WithOneMask])
def test_other_blocks_are_not_accused(block):
    assert multihead.check(block).judgement == "right_if"


class Pytorchs(nn.TransformerDecoderLayer):
    def __init__(self, d_model: int, nhead: int):
        super().__init__(d_model, nhead, dim_feedforward=64, batch_first=True)


class PytorchsDecoder(nn.TransformerDecoder):
    def __init__(self, d_model: int, nhead: int):
        super().__init__(Pytorchs(d_model, nhead), 2)


class PytorchsEncoder(nn.TransformerEncoderLayer):
    def __init__(self, d_model: int, nhead: int):
        super().__init__(d_model, nhead, dim_feedforward=64, batch_first=True)


@pytest.mark.parametrize("block", [Pytorchs, PytorchsDecoder, PytorchsEncoder])
def test_pytorchs_own_layers_are_right(block):
    report = multihead.check(block)
    assert report.judgement == "right_if"
    assert set(conditions(report)) == {"mask_blocks", "layers_beside"}


class OfPytorchsLayers(nn.Module):
    """As DETR has it: the sequence first, because nn.MultiheadAttention wants that."""

    def __init__(self, d_model: int, nhead: int):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead)
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, tgt, memory, tgt_mask=None, memory_mask=None, pos=None):
        read = memory if pos is None else memory + pos
        own = self.self_attn(tgt, tgt, tgt, attn_mask=tgt_mask)[0]
        tgt = self.norm1(tgt + own)
        crossed = self.multihead_attn(tgt, read, memory, attn_mask=memory_mask)[0]
        return self.norm2(tgt + crossed)


def test_pytorchs_layers_are_handed_the_sequence_first():
    report = multihead.check(OfPytorchsLayers)
    assert report.judgement == "right_if"
    assert "sequence_first" in conditions(report)


class WithOneMaskForgotten(WithOneMask):
    def forward(self, x, enc_out, mask=None):
        return super().forward(x, enc_out)


def test_the_one_mask_of_a_block_must_reach_an_attention():
    assert multihead.check(WithOneMaskForgotten).cause == "mask_ignored"


class Beside(Decoder):
    """The queries of the context's attention are what came in."""

    def forward(self, x, enc_out, src_mask=None, tgt_mask=None):
        first = self.norms[0](x + self.alone(x, src_mask, tgt_mask))
        second = self.norms[1](first + self.across(x, enc_out, src_mask, tgt_mask))
        return self.norms[2](second + self.narrow(self.wide(second).relu()))


def test_attentions_beside_each_other_are_a_condition():
    report = multihead.check(Beside)
    assert report.judgement == "right_if", str(report)
    assert "attentions_beside" in conditions(report)


class OfTwoContexts(Decoder):
    """The second is never read."""

    def forward(self, x, enc_out, image, src_mask=None, tgt_mask=None):
        return super().forward(x, enc_out, src_mask, tgt_mask)


class WithContextLeft(Decoder):
    """As diffusion's block, of which both attentions are of the sequence itself."""

    def forward(self, x, context=None):
        x = self.norms[0](x + self.self_attn(x, x, x))
        return self.norms[1](x + self.cross_attn(x, x, x))


def test_a_context_with_which_the_code_does_nothing():
    assert multihead.check(OfTwoContexts).cause == "context_unread"
    report = multihead.check(WithContextLeft)
    assert "context_left" in conditions(report), str(report)


class CausalDecoder(Decoder):
    """Its name says that no position of its own sequence sees a later one."""

    def earlier(self, queries, keys):
        return torch.ones(queries, keys, dtype=torch.bool).tril()

    def of_keys(self, x, enc_out):
        return None

    def forward(self, x, enc_out):
        own = self.earlier(x.shape[1], x.shape[1])
        x = self.norms[0](x + self.self_attn(x, x, x, own))
        read = self.cross_attn(x, enc_out, enc_out, self.of_keys(x, enc_out))
        return self.norms[1](x + read)


class CausalOfContext(CausalDecoder):
    def of_keys(self, x, enc_out):
        return self.earlier(x.shape[1], enc_out.shape[1])


def test_what_is_said_to_be_causal_is_not_the_attention_of_the_context():
    assert "causal_by_itself" not in conditions(multihead.check(CausalDecoder))
    assert multihead.check(CausalOfContext).cause == "mask_of_another"


class TwoMemories(nn.Module):
    """Of a text and of an image. Masks: (B, S), 1 for what is read."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.own, self.of_text = Heads(d_model, num_heads), Heads(d_model, num_heads)
        self.of_image = Heads(d_model, num_heads)

    def read(self, x, text, image, text_mask):
        return self.of_image(x, image, image)

    def forward(self, x, text, image, mask=None, text_mask=None):
        mask = None if mask is None else mask[:, None, None, :]
        text_mask = None if text_mask is None else text_mask[:, None, None, :]
        x = x + self.own(x, x, x, mask)
        x = x + self.of_text(x, text, text, text_mask)
        return x + self.read(x, text, image, text_mask)


class ReadsTheTextTwice(TwoMemories):
    def read(self, x, text, image, text_mask):
        return self.of_image(x, text, text, text_mask)

    def forward(self, x, text, image, mask=None, text_mask=None):
        return super().forward(x, text, None, mask, text_mask)


def test_a_second_context_of_another_kind_that_is_never_read():
    report = multihead.check(ReadsTheTextTwice)
    assert "context_unread" in [finding.name for finding in report.findings]
    other = multihead.check(TwoMemories)
    assert other.judgement != "wrong", str(other)
    assert "mask_additive" not in conditions(other)
