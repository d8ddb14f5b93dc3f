# SPDX-License-Identifier: MIT
"""What heads do is judged by itself where nothing explains all of the code: layers beside
attention, matrices that nothing names, biases of relative positions, many faults."""

import math

import pytest
import torch
import torch.nn.functional as F
from heads import Heads
from torch import nn

import multihead


class _Convolved(nn.Module):
    """Projections of a depthwise convolution of the tokens, as in CvT."""

    scale_of = staticmethod(lambda dim, width: width**-0.5)

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, self.scale_of(dim, dim // num_heads)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        y = self.conv(x.mT).mT
        q, k, v = (
            layer(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.proj_q, self.proj_k, self.proj_v)
        )
        weights = (q @ k.mT * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class _ConvolvedByEmbedDim(_Convolved):
    scale_of = staticmethod(lambda dim, width: dim**-0.5)


def _conditions(report):
    return [condition["name"] for condition in report.conditions]


def test_a_convolution_before_the_projections():
    report = multihead.check(_Convolved)
    assert report.judgement == "right_if", str(report)
    assert _conditions(report) == ["layers_beside"]
    assert "conv.weight" in str(report)
    allowed = multihead.check(_Convolved, allow=["layers_beside"])
    assert allowed.judgement == "right", str(allowed)


def test_a_fault_beside_a_convolution_has_its_name():
    report = multihead.check(_ConvolvedByEmbedDim)
    assert report.cause == "scale_by_embed_dim", str(report)


class _NeverCut(_Convolved):
    """One head of all features, though it was told how many to cut."""

    divides_by = "head_width"

    def forward(self, x):
        y = self.conv(x.mT).mT
        q, k, v = self.proj_q(y), self.proj_k(y), self.proj_v(y)
        scale = self.scale if self.divides_by == "head_width" else x.shape[-1] ** -0.5
        return self.proj((q @ k.mT * scale).softmax(-1) @ v)


class _NeverCutByEmbedDim(_NeverCut):
    divides_by = "embed_dim"


@pytest.mark.parametrize("subject", [_NeverCut, _NeverCutByEmbedDim])
def test_heads_that_are_never_cut_beside_a_convolution(subject):
    report = multihead.check(subject)
    assert report.cause == "heads_not_split", str(report)


class _OfOneHead(nn.Module):
    """One head on purpose; it counts what it predicts from that."""

    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(dim, dim) for _ in range(num_heads)])

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        read = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return torch.stack([head(read).tanh() for head in self.heads]).mean(0)


class _NormedByGroups(nn.Module):
    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.norm = nn.GroupNorm(num_heads, dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        y = self.norm(x.mT).mT
        q, k, v = self.query(y), self.key(y), self.value(y)
        return x + (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize("subject", [_OfOneHead, _NormedByGroups])
def test_heads_that_count_something_else(subject):
    report = multihead.check(subject)
    assert report.judgement.startswith("right"), str(report)


class _DropsBefore(_Convolved):
    """What is dropped on the way to the heads says nothing of their weights."""

    def __init__(self, dim, num_heads, dropout=0.1):
        super().__init__(dim, num_heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return super().forward(self.dropout(x))


def test_dropout_before_the_heads_is_none_that_they_forget():
    report = multihead.check(_DropsBefore)
    assert report.judgement == "right_if", str(report)


class _OfOneSequence(_Convolved):
    def forward(self, query, key, value):
        assert query is key or torch.equal(query, key), "one sequence"
        return super().forward(query)


def test_what_calls_refuse_is_a_condition_beside_layers_too():
    report = multihead.check(_OfOneSequence)
    assert _conditions(report) == ["layers_beside", "self_attention_only"], str(report)


class _Grouped(_Convolved):
    """Two key/value heads, which PyTorch's attention repeats by itself."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        width = 2 * dim // num_heads
        self.proj_k, self.proj_v = nn.Linear(dim, width), nn.Linear(dim, width)

    def forward(self, x):
        y = self.conv(x.mT).mT
        q, k, v = (
            layer(y).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.proj_q, self.num_heads),
                (self.proj_k, 2),
                (self.proj_v, 2),
            )
        )
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(out.transpose(1, 2).flatten(2))


def test_grouped_heads_beside_a_convolution():
    report = multihead.check(_Grouped)
    assert _conditions(report) == ["layers_beside"], str(report)


class _InOne(nn.Module):
    """One matrix for attention and feed-forward, keys that all heads share, as in PaLM."""

    def __init__(self, dim, heads, dim_head):
        super().__init__()
        self.heads, self.widths = heads, (heads * dim_head, dim_head, dim_head, dim)
        self.fused = nn.Linear(dim, sum(self.widths), bias=False)
        self.first = nn.Linear(heads * dim_head, dim, bias=False)
        self.second = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v, ff = self.fused(x).split(self.widths, -1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2) * k.size(-1) ** -0.5
        weights = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
        out = torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2)
        return self.first(out) + self.second(F.gelu(ff))


def test_matrices_that_cannot_be_told_apart():
    report = multihead.check(_InOne)
    assert report.judgement == "right_if", str(report)
    assert _conditions(report) == ["layers_beside"]


class _Paired(nn.Module):
    """One matrix for queries and keys, feature by feature, which has no name here; the
    weights are divided by the root of all heads' width, which may be that of the input."""

    def __init__(self, embed_dim, dim_keys, dim_values, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, dim_keys**0.5
        self.Wq_Wk = nn.Linear(embed_dim, 2 * dim_keys)
        self.Wv = nn.Linear(embed_dim, dim_values)
        self.W_o = nn.Linear(dim_values, embed_dim)

    def forward(self, x):
        pairs = self.Wq_Wk(x).unflatten(-1, (self.num_heads, -1, 2))
        q, k = pairs.permute(4, 0, 2, 1, 3)
        v = self.Wv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        weights = (q @ k.mT).softmax(-1) / self.scale
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


def test_a_divisor_of_weights_that_is_the_width_of_the_input_in_some_calls():
    report = multihead.check(_Paired)
    assert report.cause == "scale_after_softmax", str(report)


class _Loop(nn.Module):
    """A module for each head, whose scores are scaled for another size."""

    def __init__(self, dim, heads):
        super().__init__()
        layers = [nn.Linear(dim, dim // heads) for _ in range(3 * heads)]
        self.layers, self.out = nn.ModuleList(layers), nn.Linear(dim, dim)
        self.mixed = nn.Linear(dim, dim)

    def forward(self, x):
        y = x * torch.sigmoid(self.mixed(x))
        heads = []
        for i in range(0, len(self.layers), 3):
            q, k, v = (layer(y) for layer in self.layers[i : i + 3])
            heads.append((q @ k.mT * 0.3).softmax(-1) @ v)
        return self.out(torch.cat(heads, -1))


def test_heads_one_after_the_other():
    report = multihead.check(_Loop)
    assert report.cause == "scale_of_another_number", str(report)


class _HeadsFirst(Heads):
    """Heads before items in one axis, with a layer beside; masks are repeated so, too."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.last = nn.Linear(2 * dim, dim)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            torch.cat(layer(t).chunk(self.num_heads, -1), 0)
            for layer, t in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if mask is not None:  # (B, Lq, Lk), True = blocked
            scores = scores.masked_fill(mask.repeat(self.num_heads, 1, 1), -torch.inf)
        heads = (scores.softmax(-1) @ v).chunk(self.num_heads, 0)
        return self.last(torch.cat((self.o(torch.cat(heads, -1)), query), -1))


def test_heads_before_items_are_not_accused():
    report = multihead.check(_HeadsFirst)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "layers_beside" in _conditions(report)


class _Relative(Heads):
    """A bias that depends on the query and the distance (Shaw et al. 2018)."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.table = nn.Parameter(torch.randn(9, dim // num_heads))

    def products(self, query, key, value):
        q, k, v = self.heads(query, key, value)
        rows, columns = torch.arange(q.size(2)), torch.arange(k.size(2))
        distance = (columns - rows[:, None]).clamp(-4, 4) + 4
        relative = torch.einsum("bhid,ijd->bhij", q, self.table[distance])
        return q @ k.mT, relative, v

    def weighed(self, scores, v):
        return self.merged(scores.softmax(-1) @ v)


class ScaledTogether(_Relative):
    def forward(self, query, key, value):
        scores, relative, v = self.products(query, key, value)
        return self.weighed((scores + relative) / math.sqrt(v.size(-1)), v)


class ScaledBefore(_Relative):
    def forward(self, query, key, value):
        scores, relative, v = self.products(query, key, value)
        return self.weighed(scores / math.sqrt(v.size(-1)) + relative, v)


class ScaledByAll(_Relative):
    def forward(self, query, key, value):
        scores, relative, v = self.products(query, key, value)
        return self.weighed((scores + relative) / math.sqrt(query.size(-1)), v)


class NotScaled(_Relative):
    """By design, perhaps, as learned tables beside it may make up for that."""

    def forward(self, query, key, value):
        scores, relative, v = self.products(query, key, value)
        return self.weighed(scores + relative, v)


@pytest.mark.parametrize("target", [ScaledTogether, ScaledBefore, NotScaled])
def test_relative_positions_beside_the_query(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "position_bias" in [fact["name"] for fact in report.assumptions]


def test_relative_positions_hide_no_wrong_scale():
    report = multihead.check(ScaledByAll)
    assert report.cause == "scale_by_embed_dim", str(report)


class Transposed(_Relative):
    """Positions as (B, 2·L - 1, E), shifted by their distance (Dai et al. 2019)."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.positions = nn.Linear(dim, dim, bias=False)

    def forward(self, query, key, value, pos_embedding):
        scores, _, v = self.products(query, key, value)
        r = self.cut(self.positions(pos_embedding))
        relative = self.cut(self.q(query)) @ r.mT
        batch, heads, length, count = relative.shape
        padded = F.pad(relative, (1, 0)).view(batch, heads, count + 1, length)
        shifted = padded[:, :, 1:].reshape(batch, heads, length, count)
        scores = scores + shifted[..., : scores.size(-1)]
        return self.weighed(scores / math.sqrt(v.size(-1)), v)


def test_positions_of_all_distances():
    report = multihead.check(Transposed)
    assert report.judgement == "right_if", str(report)
    assert _conditions(report) == ["layers_beside"]


class _Temperature(Heads):
    """Queries of length 1, multiplied by a learned number for each head: no scale is
    missing."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.temperature = nn.Parameter(torch.rand(num_heads, 1, 1) + 0.5)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = F.normalize(q, dim=-1) * self.temperature, F.normalize(k, dim=-1)
        out = self.merged((q @ k.mT).softmax(-1) @ v)
        return out * torch.sigmoid(self.gate(x))


def test_a_learned_scale_is_not_a_missing_one():
    report = multihead.check(_Temperature)
    assert report.judgement != "wrong", str(report)


def _plain(q, k, v, embed):
    weights = (q @ k.mT / math.sqrt(embed)).softmax(-1)
    return weights @ v


class WrongInManyPlaces(Heads):
    """What comes before and after the heads is no attention, and the scale is wrong."""

    def forward(self, x):
        q, k, v = self.heads(x.flip(-1))
        out = _plain(q, k, v, x.size(-1)).mT.flatten(1).view_as(x)
        return self.o(out.roll(1, -1) - x)


def test_one_of_many_faults_has_its_name():
    report = multihead.check(WrongInManyPlaces)
    assert report.cause == "scale_by_embed_dim", str(report)
    assert "heads_only" in [fact["name"] for fact in report.assumptions]


class RightHeadsInAWrongPlace(WrongInManyPlaces):
    def forward(self, x):
        q, k, v = self.heads(x.flip(-1))
        out = _plain(q, k, v, q.size(-1)).transpose(1, 2).flatten(2)
        return self.o(out.roll(1, -1) - x)


def test_right_heads_excuse_nothing():
    report = multihead.check(RightHeadsInAWrongPlace)
    assert report.judgement == "wrong" and report.cause == "unknown", str(report)
    assert any(remark["name"] == "heads_right" for remark in report.remarks)


class MasksLikeNothing(Heads):
    """Scaled wrongly, and its mask does what no attention does."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(x.size(-1))
        if mask is not None:
            scores = scores * (1.5 + mask.cumsum(-1)) - mask.roll(2, -1) * 3
        return self.merged(scores.softmax(-1) @ v)


def test_what_becomes_of_masks_hides_no_other_fault():
    report = multihead.check(MasksLikeNothing)
    assert report.cause == "scale_by_embed_dim", str(report)
    assert any(remark["name"] == "others_left" for remark in report.remarks)


def merges_by_itself(q, k, v, mask=None):
    """Heads (batch, heads, length, width); returns (batch, length, heads * width)."""
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_heads_that_come_back_merged():
    report = multihead.check(merges_by_itself)
    assert report.judgement in ("right", "right_if"), str(report)
    assert any("(B, H, L, D)" in said for said in report.understood)


class AmongItsOwnHeads(nn.Module):
    """Heads are never exchanged with positions; dropout is drawn for their scores."""

    def __init__(self, dim, num_heads, dropout):
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1))
            for layer in (self.q, self.k, self.v)
        )
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return self.o((self.dropout(weights) @ v).flatten(2))


def test_heads_that_attend_to_heads_with_dropout():
    report = multihead.check(AmongItsOwnHeads)
    assert report.cause == "heads_not_transposed", str(report)
    assert "training" in [case["name"] for case in report.cases]


class TwelveHeads(nn.Module):
    """Dropout is drawn for each head by itself, for more than ten of them."""

    def __init__(self, dropout):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(48, 12) for _ in range(12))
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(48, 48)

    def forward(self, x):
        found = []
        for head in self.heads:
            q, k, v = head(x).split(4, -1)
            weights = self.dropout((q @ k.mT / 2.0).softmax(-1))
            found.append(weights @ v)
        return self.out(torch.cat(found, -1))


def test_draws_of_more_than_ten_heads():
    layer = TwelveHeads(0.25).double()
    report = multihead.check(layer)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "training" in [case["name"] for case in report.cases]


class ChoosesKernels(_Convolved):
    """As somebody does who wants the fast ones."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        torch.backends.cuda.enable_math_sdp(False)


def test_to_choose_kernels_is_no_fault():
    report = multihead.check(ChoosesKernels)
    assert report.judgement == "right_if", str(report)
    assert any(r["name"] == "changes_global_state" for r in report.remarks)


class AroundPyTorchs(nn.Module):
    """A block around PyTorch's layer, whose short way would hide its products."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU())
        self.down = nn.Linear(2 * dim, dim)

    def read(self, mask):
        return mask

    def forward(self, x, mask=None):
        """mask: True = blocked."""
        mask = None if mask is None else self.read(mask)
        y = self.norm(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.down(self.mlp(self.norm_2(x)))


class AroundPyTorchsInverted(AroundPyTorchs):
    def read(self, mask):
        return ~mask


def test_a_block_around_pytorchs_layer():
    before = torch.backends.mha.get_fastpath_enabled()
    report = multihead.check(AroundPyTorchs)
    assert report.judgement == "right_if", str(report)
    assert _conditions(report) == ["layers_beside"]
    inverted = multihead.check(AroundPyTorchsInverted)
    assert inverted.cause == "mask_inverted", str(inverted)
    assert torch.backends.mha.get_fastpath_enabled() == before


class SharedByAllHeads(nn.Module):
    """One head of keys and values, which have no axis for it (Shazeer, 2019)."""

    def __init__(self, config=(True, True)):
        super().__init__()
        self.config = config

    def forward(self, q, k, v):
        scores = torch.einsum("bhid,bjd->bhij", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


def test_keys_without_an_axis_of_heads_have_no_groups():
    report = multihead.check(SharedByAllHeads)
    assert report.judgement.startswith("right"), str(report)
