# SPDX-License-Identifier: MIT
"""What code of small public repositories showed, each as a program of its own: ways to
be called, and faults, that textbooks do not have."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from attempts.steps import Attention
from torch import nn

import multihead


def faults(report) -> list[str]:
    return [fault["name"] for fault in (report.verdict or {}).get("faults", [])]


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


# ---- Dropout -------------------------------------------------------------------------


@dataclass
class Settings:
    n_embd: int = 48
    n_head: int = 6
    dropout: float = 0.1


class Forgets(nn.Module):
    """A layer of dropout is made, by a configuration's rate, and never called."""

    def __init__(self, config: Settings):
        super().__init__()
        self.heads = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.dropout)

    def weigh(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        weights = self.weigh(q @ k.mT / math.sqrt(q.shape[-1]))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class LeavesItToASetting(Forgets):
    """It speaks of the layer again, where nobody asks for it."""

    applies = False

    def weigh(self, scores):
        weights = scores.softmax(-1)
        return self.attn_dropout(weights) if self.applies else weights


class InAPart(nn.Module):
    """The layer belongs to a part, whose text speaks of it."""

    def __init__(self, config: Settings):
        super().__init__()
        self.inner = LeavesItToASetting(config)

    def forward(self, x):
        return self.inner(x)


class ForgetsAnother(LeavesItToASetting):
    """A layer for the output, whose name says so."""

    def __init__(self, config: Settings):
        super().__init__(config)
        self.attn_dropout, self.resid_dropout = None, nn.Dropout(config.dropout)


@pytest.mark.parametrize("module", [InAPart, ForgetsAnother])
def test_a_layer_of_dropout_that_may_be_called(module):
    assert multihead.check(module).judgement == "right"


def test_a_layer_of_dropout_that_is_never_called():
    assert faults(multihead.check(Forgets)) == ["dropout_missing"]
    report = multihead.check(LeavesItToASetting)
    assert report.judgement == "right"
    assert "dropout_unused" in [remark["name"] for remark in report.remarks]


# ---- Settings ------------------------------------------------------------------------


@dataclass
class Strict:
    """Settings that refuse some of those that a check would make up."""

    n_embd: int = 768
    n_head: int = 12
    n_expert: int = 0
    n_expert_groups: int | None = None
    n_topk_groups: int | None = None

    def __post_init__(self):
        groups = self.n_expert_groups, self.n_topk_groups
        assert self.n_expert or groups == (None, None)


class OfStrictSettings(LeavesItToASetting):
    def __init__(self, config: Strict, block_idx: int):
        nn.Module.__init__(self)
        self.heads = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)
        self.is_causal = [False, True][block_idx]


@dataclass
class OfChannels:
    in_channels: int


class OneHead(nn.Module):
    """Its configuration has no heads, so it has one."""

    def __init__(self, config: OfChannels):
        super().__init__()
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(config.in_channels, config.in_channels, 1) for _ in range(4)
        )

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (f(x).flatten(2).mT[:, None] for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y[:, 0].mT.reshape(b, c, h, w))


def test_settings_of_the_codes_own():
    assert multihead.check(OfStrictSettings).judgement == "right"
    report = multihead.check(OneHead)
    assert conditions(report) == ["residual_inside"], str(report)


class OfTwoInputs(nn.Module):
    """d_in_kv is how wide the other input is, and no head's width."""

    def __init__(self, d_in_q: int, d_in_kv: int, d_out: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv = nn.Linear(d_in_q, d_out), nn.Linear(d_in_kv, 2 * d_out)
        self.proj = nn.Linear(d_out, d_out)

    def forward(self, x_q, x_kv):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in (self.q(x_q), *self.kv(x_kv).chunk(2, -1))
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class WithAFeedForward(nn.Module):
    """A layer of the caller's, of no known name, and an argument without use."""

    def __init__(self, d, h, rff):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, h, batch_first=True)
        self.rff = rff

    def forward(self, x, t):
        return self.rff(self.attention(x, x, x)[0])


@pytest.mark.parametrize("module", [OfTwoInputs, WithAFeedForward])
def test_arguments(module):
    report = multihead.check(module)
    assert report.judgement == "right", str(report)


class OfAContextIfBuiltForOne(Attention):
    def __init__(self, d_model, num_heads, dim_context=None):
        super().__init__(d_model, num_heads)
        self.is_cross = dim_context is not None

    def forward(self, x, context=None):
        return self.attend(x, *2 * (context if self.is_cross else x,))


class IgnoresItsContext(Attention):
    """For nothing that it is built with."""

    def forward(self, x, context=None):
        return self.attend(x, x, x)


def test_a_context_that_a_setting_leaves_out():
    report = multihead.check(OfAContextIfBuiltForOne)
    assert report.judgement == "right", str(report)
    assert "context, which it ignores as it is built" in " ".join(report.understood)
    assert multihead.check(IgnoresItsContext).judgement == "wrong"


class CutByNumbers(Attention):
    def forward(self, inputs):
        q = self.split(self.W_q(inputs[0]))
        k = self.split(self.W_k(inputs[1]))
        v = self.split(self.W_v(inputs[2]))
        return self.join((q @ k.mT / math.sqrt(self.d_k)).softmax(-1) @ v)


class CutByNumbersUnscaled(CutByNumbers):
    def forward(self, inputs):
        q = self.split(self.W_q(inputs[0]))
        k = self.split(self.W_k(inputs[1]))
        v = self.split(self.W_v(inputs[2]))
        return self.join((q @ k.mT).softmax(-1) @ v)


class CutInAnotherOrder(CutByNumbers):
    def forward(self, inputs):
        v = self.split(self.W_v(inputs[0]))
        k = self.split(self.W_k(inputs[1]))
        q = self.split(self.W_q(inputs[2]))
        return self.join((q @ k.mT / math.sqrt(self.d_k)).softmax(-1) @ v)


def test_a_list_of_inputs_that_is_cut_by_numbers():
    assert multihead.check(CutInAnotherOrder).judgement == "right"
    assert multihead.check(CutByNumbers).judgement == "right"
    assert faults(multihead.check(CutByNumbersUnscaled)) == ["scale_missing"]


def dropped(q, k, v, dropout: nn.Dropout):
    return dropout((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)) @ v


def test_a_layer_of_dropout_that_is_required():
    assert multihead.check(dropped).judgement == "right"


# ---- Heads that are handed -----------------------------------------------------------


class Slopes(nn.Module):
    """Attention to heads, by a bias that is not symmetric and meets no causal mask."""

    sign = 1.0

    def __init__(self, t_heads: int):
        super().__init__()
        self.register_buffer("slopes", 0.5 ** torch.arange(1, t_heads + 1))

    def forward(self, query, key, value, attn_mask=None):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        places = [torch.arange(t.size(-2)) for t in (query, key)]
        distance = places[0][:, None] - places[1]
        scores = scores + self.sign * distance * self.slopes[:, None, None]
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask == 0, float("-inf"))
        return scores.softmax(-1) @ value


class OtherSlopes(Slopes):
    sign = -1.0


def test_a_bias_of_keys_also_ahead_of_the_query():
    for module, name in ((Slopes, "early"), (OtherSlopes, "late")):
        report = multihead.check(module, mask="keep")
        assert conditions(report) == [f"bias_of_{name}_keys"], str(report)


# ---- Positions -----------------------------------------------------------------------


class TurnedAlike(Attention):
    """The angles come of the numbers of features, the same at every position."""

    def turn(self, x):
        numbers = torch.arange(0, self.d_k, 2, dtype=x.dtype)
        angle = (numbers * 10000.0 ** (-numbers / self.d_k)).expand(x.size(-2), -1)
        a, b, cos, sin = x[..., ::2], x[..., 1::2], angle.cos(), angle.sin()
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(self.turn(q), self.turn(k))
        return self.join(scores.softmax(-1) @ v)


class TurnedByTheHead(TurnedAlike):
    """The number of the head stands in the place of the position."""

    def turn(self, x):
        heads = torch.arange(x.size(1), dtype=x.dtype)[:, None, None]
        angle = heads * 10000.0 ** -torch.linspace(0, 1, self.d_k // 2, dtype=x.dtype)
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def test_angles_that_cancel_are_a_condition_and_those_of_heads_a_flaw():
    assert conditions(multihead.check(TurnedAlike)) == ["turned_alike"]
    assert multihead.check(TurnedByTheHead).cause == "turned_alike"


# ---- Norms ---------------------------------------------------------------------------


class FromOne(nn.Module):
    """A layer norm whose gain is counted from 1."""

    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim, elementwise_affine=False)
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return self.ln(x) * (self.gamma + 1)


class NormedFromOne(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = FromOne(d_model)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))
        return self.join(self.scores(q, k).softmax(-1) @ v)


class NormsTheSumByGroups(Attention):
    """An image, whose residual connection is inside, before a group norm."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.GroupNorm(2, d_model)

    def forward(self, image):
        b, c, h, w = image.shape
        q, k, v = self.qkv(image.flatten(2).mT)
        out = self.join(self.scores(q, k).softmax(-1) @ v)
        return self.norm(out.mT.reshape(b, c, h, w) + image)


@pytest.mark.parametrize("module", [NormedFromOne, NormsTheSumByGroups])
def test_norms(module):
    report = multihead.check(module)
    assert report.judgement == "right", str(report)


class FusedWithGains(nn.Module):
    """The gains of the norms of its heads hold the scale, which PyTorch's fused
    attention is told to leave out; each of its masks has a shape of its own."""

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.q_gain = nn.Parameter(torch.ones(heads, 1, dim // heads))
        self.k_gain = nn.Parameter(torch.ones(heads, 1, dim // heads))
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None, attn_mask=None):
        """mask: True = a token. attn_mask: True = may attend."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.to_qkv(x).chunk(3, -1)
        )
        root = q.shape[-1] ** 0.5
        q = F.normalize(q, dim=-1) * root * self.q_gain
        k = F.normalize(k, dim=-1) * root * self.k_gain
        if mask is not None:
            mask = mask[:, None, None, :]
            attn_mask = mask if attn_mask is None else mask & attn_mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=1.0)
        return self.to_out(y.transpose(1, 2).flatten(2))


def test_a_scale_in_gains_of_fused_attention_and_masks_beside_masks():
    report = multihead.check(FusedWithGains)
    assert "scale_in_gains" in conditions(report) and not faults(report), str(report)
    taken = {case["name"] for case in report.verdict["cases"]}
    assert {"mask (Lq, Lk)", "padding"} <= taken


# ---- Masks ---------------------------------------------------------------------------


class AddsSmallMasks(Attention):
    """Masks (Lq, Lk) are added as 0 and 1; others block."""

    def forward(self, x, attn_mask=None):
        """attn_mask: True = may attend"""
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if attn_mask is not None and attn_mask.dim() == 4:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask.to(scores.dtype)
        return self.join(scores.softmax(-1) @ v)


def test_masks_of_one_shape_that_are_added_as_numbers():
    report = multihead.check(AddsSmallMasks)
    assert faults(report) == ["mask_added"], str(report)
    assert "masks of other shapes" in str(report)


# ---- What it returns -----------------------------------------------------------------


class ReturnsZeros(Attention):
    """In the place of weights that are never made."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.join(y), x.new_zeros(len(x), self.num_heads, *(2 * (x.size(1),)))


def test_zeros_in_the_place_of_weights():
    report = multihead.check(ReturnsZeros)
    assert report.cause is None and not faults(report), str(report)
    assert "zeros in the place of weights" in str(report)


class NeverSet(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W = nn.Parameter(torch.empty(d_model, d_model))

    def join(self, x):
        return x.transpose(1, 2).flatten(2) @ self.W

    def forward(self, x, mask=None):
        """mask: True = may attend"""
        q, k, v = self.qkv(x)
        scores = self.scores(q, k).masked_fill(mask == 0, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


def test_what_is_left_undone_is_remarked():
    report = multihead.check(NeverSet)
    names = [remark["name"] for remark in report.remarks]
    assert {"parameters_unset", "mask_left_out"} <= set(names), str(report)
    assert "constructor gives W no value" in " ".join(str(report).split())


class ForgetsItsZeros(Attention):
    """Weights are made, and zeros returned."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        weights = self.scores(q, k).softmax(-1)
        return self.join(weights @ v), torch.zeros_like(weights)


class NeedsItsMask(Attention):
    def forward(self, x, mask=None):
        """mask: True = may attend"""
        if mask is None:
            raise ValueError("a mask is needed")
        q, k, v = self.qkv(x)
        scores = self.scores(q, k).masked_fill(mask == 0, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


def test_what_is_meant_is_not_remarked():
    assert multihead.check(ForgetsItsZeros).judgement == "wrong"
    names = [remark["name"] for remark in multihead.check(NeedsItsMask).remarks]
    assert "mask_left_out" not in names


class OfItems(nn.Module):
    """SASRec: a table of items, and blocks of attention; 0 is padding."""

    def __init__(
        self, item_num: int, hidden_size: int, num_blocks: int, num_heads: int
    ):
        super().__init__()
        self.items = nn.Embedding(item_num + 1, hidden_size)
        self.blocks = nn.ModuleList(
            nn.MultiheadAttention(hidden_size, num_heads, batch_first=True)
            for _ in range(num_blocks)
        )

    def hidden(self, length):
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward(self, inputs):
        x = self.items(inputs)
        for block in self.blocks:
            x = block(x, x, x, attn_mask=self.hidden(inputs.shape[1]))[0]
        return x


class OfItemsAhead(OfItems):
    def hidden(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril(-1)


def test_counts_of_items_and_of_blocks_are_no_guess():
    assert multihead.check(OfItems).judgement in ("right", "right_if")
    assert multihead.check(OfItemsAhead).causes == ["causal_inverted"]


class OfThePaperOfBert(nn.Module):
    """H: the width; A: how many heads there are."""

    def __init__(self, H, A):
        super().__init__()
        self.A, self.d_k = A, H // A
        self.W_Q, self.W_K = nn.Linear(H, H), nn.Linear(H, H)
        self.W_V, self.W_O = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x, key_padding_mask=None):
        B, S, H = x.size()
        q, k, v = (
            f(x).view(B, S, self.A, self.d_k).transpose(1, 2)
            for f in (self.W_Q, self.W_K, self.W_V)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if key_padding_mask is not None:
            key_padding_mask = ~key_padding_mask[:, None, None, :]
            scores = scores.masked_fill(key_padding_mask, -torch.inf)
        return self.W_O((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, H))


def test_letters_of_the_paper_of_bert():
    """And a mask that is turned round in a line of its own: its name is no promise."""
    report = multihead.check(OfThePaperOfBert)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["padding_keeps"]


class OverTheBatch(nn.Module):
    """x is (b, c, h, w)"""

    batch_first = False

    def __init__(self, channels, im_size):
        super().__init__()
        self.channels, self.im_size = channels, im_size
        self.mha = nn.MultiheadAttention(channels, 8, batch_first=self.batch_first)
        self.mlp = nn.Linear(channels, channels)

    def forward(self, x):
        # x is (b, c, H, W); attention needs (B, T, C)
        x = x.view(-1, self.channels, self.im_size * self.im_size).swapaxes(1, 2)
        x = self.mlp(x + self.mha(x, x, x)[0]).relu()
        return x.swapaxes(1, 2).view(-1, self.channels, self.im_size, self.im_size)


class OverPixels(OverTheBatch):
    """x is (b, c, h, w)"""

    batch_first = True


def test_an_image_whose_axes_a_comment_names():
    wrong = multihead.check(OverTheBatch)
    assert "items_mixed" in [finding.name for finding in wrong.findings], str(wrong)
    assert multihead.check(OverPixels).judgement != "wrong"
