# SPDX-License-Identifier: MIT
"""What `check` reads from unusual names: of masks, sizes, configurations, layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Layers(nn.Module):
    """Four layers, and attention as it should be."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.heads = num_heads
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(hidden_size, hidden_size))

    def attend(self, q, k, v, keep=None):
        q, k, v = self.query(q), self.key(k), self.value(v)
        q, k, v = (split(x, self.heads) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, keep)
        return self.out(out.transpose(1, 2).flatten(2))


class WithMasks(Layers):
    def forward(self, x, attention_masks=None):
        return self.attend(x, x, x, attention_masks)


class WithMasksUnused(Layers):
    def forward(self, x, attention_masks=None):
        return self.attend(x, x, x)


class WithMaskOfSourceTokens(Layers):
    def forward(self, x, additive_self_attention_mask):
        return self.attend(x, x, x, additive_self_attention_mask)


class WithMasksOfBoth(Layers):
    """The mask of queries says which count, and comes with that of keys."""

    def forward(self, query, key, value, q_mask=None, kv_mask=None):
        keep = None
        if kv_mask is not None:
            keep = (q_mask[:, :, None] * kv_mask[:, None]).unsqueeze(1)
        return self.attend(query, key, value, keep)


class WithBlockedOfBoth(Layers):
    def forward(self, query, key, value, q_mask=None, kv_mask=None):
        keep = None
        if kv_mask is not None:
            keep = ~(q_mask[:, :, None] | kv_mask[:, None]).unsqueeze(1)
        return self.attend(query, key, value, keep)


class WithMaskOfX2(Layers):
    """A mask that says by its name of which sequence it is, beside one of the scores."""

    def forward(self, x1, x2, x2_mask=None, attn_mask=None):
        q, k, v = (
            split(layer(x), self.heads)
            for layer, x in ((self.query, x1), (self.key, x2), (self.value, x2))
        )
        scores = q @ k.mT / q.size(-1) ** 0.5
        if x2_mask is not None:
            scores = self.blocked(scores, x2_mask[:, None, None])
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -float("inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def blocked(self, scores, mask):
        return scores.masked_fill(mask, -float("inf"))


class WithMaskOfX2Multiplied(WithMaskOfX2):
    def blocked(self, scores, mask):
        return scores * ~mask


def test_a_mask_with_the_name_of_a_sequence():
    assert multihead.check(WithMaskOfX2).judgement in ("right", "right_if")
    report = multihead.check(WithMaskOfX2Multiplied)
    assert report.judgement == "wrong" and "mask_multiplied" in str(report), str(report)


@pytest.mark.parametrize(
    "target", [WithMasks, WithMaskOfSourceTokens, WithMasksOfBoth, WithBlockedOfBoth]
)
def test_masks_by_the_words_of_their_names(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)
    assert any(
        "mask" in case["name"] or "padding" in case["name"] for case in report.cases
    )


def test_a_mask_in_the_plural_that_is_not_used():
    assert multihead.check(WithMasksUnused).cause == "mask_ignored"


class OfHiddenSettings(nn.Module):
    """Python puts the name of the class before that of the parameter."""

    def __init__(self, __C):
        super().__init__()
        self.heads = __C.MULTI_HEAD
        self.linear_q = nn.Linear(__C.HIDDEN_SIZE, __C.HIDDEN_SIZE)
        self.linear_k = nn.Linear(__C.HIDDEN_SIZE, __C.HIDDEN_SIZE)
        self.linear_v = nn.Linear(__C.HIDDEN_SIZE, __C.HIDDEN_SIZE)
        self.linear_merge = nn.Linear(__C.HIDDEN_SIZE, __C.HIDDEN_SIZE)

    def forward(self, v, k, q):
        q, k, v = self.linear_q(q), self.linear_k(k), self.linear_v(v)
        q, k, v = (split(x, self.heads) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.linear_merge(out.transpose(1, 2).flatten(2))


class OfSettingsExchanged(OfHiddenSettings):
    def forward(self, v, k, q):
        return super().forward(k, v, q)


class OfOneLetter(Layers):
    def __init__(self, D, head_dim):
        super().__init__(D, D // head_dim)

    def forward(self, x):
        return self.attend(x, x, x)


class OfASizeThatCounts(Layers):
    def __init__(self, hidden_size, head_size=8):
        self_size = hidden_size // head_size
        super().__init__(hidden_size, hidden_size // self_size)

    def forward(self, x):
        return self.attend(x, x, x)


@pytest.mark.parametrize("target", [OfHiddenSettings, OfOneLetter, OfASizeThatCounts])
def test_sizes_by_unusual_names(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)
    assert len({case["name"] for case in report.cases}) > 1


def test_an_output_of_a_silent_name_beside_names_that_speak():
    assert multihead.check(OfSettingsExchanged).cause == "inputs_swapped"


class WithMaskOfThreeAxes(Layers):
    def forward(self, x, mask_3d):
        return self.attend(x, x, x, ~mask_3d.unsqueeze(1))


class OfMatricesOfWeights(nn.Module):
    """Parameters whose layers are called weights; of a width of attention."""

    def __init__(self, d_model, attention_dim):
        super().__init__()
        self.query_weight = nn.Linear(d_model, attention_dim)
        self.key_weight = nn.Linear(d_model, attention_dim)
        self.value_weight = nn.Linear(d_model, attention_dim)
        self.width = attention_dim

    def forward(self, x):
        q, k, v = self.query_weight(x), self.key_weight(x), self.value_weight(x)
        return (q @ k.mT / self.width**0.5).softmax(-1) @ v


class OfTheWidthOfTheModel(OfMatricesOfWeights):
    def __init__(self, d_model, attention_dim):
        super().__init__(d_model, attention_dim)
        self.width = d_model


class AddsWhatItProjects(OfMatricesOfWeights):
    """So both widths must be the same."""

    def forward(self, x):
        return x + super().forward(x)


def of_features(
    d_model: int,
    num_heads: int,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    in_features: torch.Tensor,
) -> torch.Tensor:
    weights = q_proj_weight, k_proj_weight, v_proj_weight
    q, k, v = (split(in_features @ w.T, num_heads) for w in weights)
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2) @ o_proj_weight.T


@pytest.mark.parametrize(
    "target", [WithMaskOfThreeAxes, OfMatricesOfWeights, of_features]
)
def test_what_names_with_more_words_take(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)
    names = {condition["name"] for condition in report.conditions}
    assert names <= {"mask_keeps", "mask_blocks"}, str(report)
    has_mask = target is WithMaskOfThreeAxes
    cases = [case["name"] for case in report.cases]
    assert has_mask == any(name.startswith("mask") for name in cases)


def test_the_width_of_attention_is_not_that_of_the_model():
    assert multihead.check(OfTheWidthOfTheModel).cause == "scale_by_embed_dim"
    report = multihead.check(AddsWhatItProjects)
    assert report.judgement != "not_judged" and report.cause is None, str(report)


class NeverDrops(Layers):
    """Nobody asks for dropout by name; its layer is made, and not called, where another
    attribute does not ask for it."""

    drops = False

    def __init__(self, config):
        super().__init__(config.hidden_size, config.num_heads)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        out = self.attend(x, x, x)
        return self.dropout(out) if self.drops else out


class DropsInside(NeverDrops):
    """By the layer's rate, inside of PyTorch's fused attention."""

    def forward(self, x):
        layers = self.query, self.key, self.value
        q, k, v = (split(layer(x), self.heads) for layer in layers)
        rate = self.dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.out(out.transpose(1, 2).flatten(2))


def test_a_layer_of_dropout_that_is_never_called_is_remarked():
    report = multihead.check(NeverDrops)
    assert report.judgement == "right" and "never calls it" in str(report)
    assert "never calls it" not in str(multihead.check(DropsInside))
