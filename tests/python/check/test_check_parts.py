# SPDX-License-Identifier: MIT
"""Code of which only a part can be called or explained: what is wrong with that part
is said."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from attempts.steps import Attention

import multihead

# ---- What raises but where sizes hide it -----------------------------------


class OutputForEachHead(Attention):
    """The output layer takes as many features for each head as all have."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_o = nn.Linear(d_model * num_heads, d_model)

    def forward(self, query, key, value):
        return self.attend(query, key, value)


class KeysByHeads(Attention):
    """Items and heads of the keys change places, and back where they are as many."""

    def forward(self, query, key, value):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key)).transpose(0, 1)
        w = self.scores(q, k.transpose(0, 1).reshape(k.shape)).softmax(-1)
        return self.join(w @ self.split(self.W_v(value)))


class KeysOfAnotherWidth(Attention):
    """Its keys have a feature too few, in all sizes."""

    def forward(self, query, key, value):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))[..., 1:]
        return self.join(self.scores(q, k).softmax(-1) @ self.split(self.W_v(value)))


@pytest.mark.parametrize(
    "code, unless",
    [
        (OutputForEachHead, "it has one head"),
        (KeysByHeads, "there are as many items as heads"),
    ],
)
def test_code_that_runs_in_some_sizes_only_is_wrong(code, unless):
    report = multihead.check(code)
    assert report.judgement == "wrong" and report.cause == "raises", str(report)
    text = " ".join(str(report).split())
    assert f"It raises unless {unless}. RuntimeError: " in text


def test_code_that_runs_in_no_sizes_is_not_judged():
    report = multihead.check(KeysOfAnotherWidth)
    assert report.judgement == "not_judged", str(report)


# ---- What differs by call --------------------------------------------------


class OtherWeightsForOtherKeys(Attention):
    """Heads are joined without exchange; and the projections of self-attention are not
    those of cross-attention."""

    def forward(self, x, context=None):
        other = x if context is None else context
        q, k = self.split(self.W_q(x)), self.split(self.W_k(other))
        v = self.split(self.W_v(other))
        if context is not None:
            k, v = k.tanh() * v, k.cumsum(-1)
        return self.W_o((self.scores(q, k).softmax(-1) @ v).reshape(x.shape))


def test_a_fault_of_self_attention_is_named_whatever_becomes_of_other_keys():
    report = multihead.check(OtherWeightsForOtherKeys)
    assert report.cause == "merge_not_transposed", str(report)
    (left,) = [r for r in report.remarks if r["name"] == "others_left"]
    assert "other keys" in left["sentence"]


class OneMaskOrTheOther(Attention):
    """key_padding_mask: True = padding. attn_mask: True = blocked."""

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -torch.inf)
        elif key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        return self.join(scores.softmax(-1) @ v)


class PaddingOrElseTheMask(OneMaskOrTheOther):
    """key_padding_mask: True = padding. attn_mask: True = blocked."""

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        if key_padding_mask is not None:
            attn_mask = None
        return super().forward(x, key_padding_mask, attn_mask)


@pytest.mark.parametrize(
    "code, fault, where",
    [
        (OneMaskOrTheOther, "padding_ignored", "in calls with another mask"),
        (PaddingOrElseTheMask, "mask_ignored", "in calls with a padding mask"),
    ],
)
def test_a_mask_that_gives_way_to_the_other_is_ignored_there(code, fault, where):
    report = multihead.check(code)
    assert report.cause == fault, str(report)
    assert where in " ".join(str(report).split())


class CopiedOnTheWay(Attention):
    """No gradient passes; nothing says what the mask means."""

    def forward(self, query, key, value, mask=None):
        layers = zip((self.W_q, self.W_k, self.W_v), (query, key, value))
        q, k, v = (self.split(layer(x)).detach() for layer, x in layers)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


@pytest.mark.parametrize("stated", [{}, {"mask": "keep"}])
def test_where_no_gradient_passes_nothing_else_is_accused(stated):
    report = multihead.check(CopiedOnTheWay, allow="all", **stated)
    assert report.causes == ["gradient_detached"], str(report)


# ---- One head of several ---------------------------------------------------


@dataclass
class Settings:
    model_dim: int
    num_heads: int

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads


class OneOfTheHeads(nn.Module):
    def __init__(self, settings: Settings):
        super().__init__()
        width = settings.head_dim
        self.query = nn.Linear(settings.model_dim, width, bias=False)
        self.key = nn.Linear(settings.model_dim, width, bias=False)
        self.value = nn.Linear(settings.model_dim, width, bias=False)

    def forward(self, q, k, v):
        q, k = self.query(q), self.key(k)
        return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ self.value(v)


def test_one_of_the_heads_that_settings_count_is_one_head():
    report = multihead.check(OneOfTheHeads, allow="all")
    assert report.passed, str(report)
    assert [c["name"] for c in report.conditions] in ([], ["no_output_projection"])


# ---- What ordinary code does -----------------------------------------------


class TurnedOnceRepeated(nn.Module):
    """Groups are repeated first; turned heads are filled in, and stand nowhere but where
    they meet."""

    def __init__(self, embed_size, num_heads, num_kv_heads, max_len):
        super().__init__()
        self.head_dim, self.times = embed_size // num_heads, num_heads // num_kv_heads
        self.q_proj = nn.Linear(embed_size, embed_size, bias=False)
        self.k_proj = nn.Linear(embed_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(embed_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(embed_size, embed_size, bias=False)
        speed = 1e4 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(max_len)[:, None] * speed
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x):
        cos, sin = self.cos[: x.size(-2)], self.sin[: x.size(-2)]
        turned = torch.empty_like(x)
        turned[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        turned[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return turned

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (heads.repeat_interleave(self.times, dim=2) for heads in (k, v))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        scores = self.turn(q) @ self.turn(k).transpose(-2, -1) / self.head_dim**0.5
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class HeadsAsWideAsTheModel(nn.Module):
    """One matrix (in, out) for each head, both of one size."""

    def __init__(self, num_heads, dim, dim_k, dim_v):
        super().__init__()
        self.query_projection = nn.Parameter(torch.randn(num_heads, dim, dim_k) / 7)
        self.key_projection = nn.Parameter(torch.randn(num_heads, dim, dim_k) / 7)
        self.value_projection = nn.Parameter(torch.randn(num_heads, dim, dim_v) / 7)
        self.final_projection = nn.Linear(num_heads * dim_v, dim)

    def forward(self, query, key, value):
        q = torch.einsum("bld,hde->bhle", query, self.query_projection)
        k = torch.einsum("bld,hde->bhle", key, self.key_projection)
        v = torch.einsum("bld,hde->bhle", value, self.value_projection)
        w = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return self.final_projection((w @ v).transpose(1, 2).flatten(2))


class WidthsThatGoTogether(nn.Module):
    """embed_dim=None, val_dim=None: one of them is asked for."""

    def __init__(self, n_heads, input_dim, embed_dim=None, val_dim=None):
        super().__init__()
        assert val_dim or embed_dim
        val_dim = val_dim or embed_dim // n_heads
        shape = n_heads, input_dim, val_dim
        self.W_query = nn.Parameter(torch.randn(shape) / 7)
        self.W_key = nn.Parameter(torch.randn(shape) / 7)
        self.W_val = nn.Parameter(torch.randn(shape) / 7)
        self.W_out = nn.Parameter(torch.randn(n_heads, val_dim, embed_dim) / 7)

    def forward(self, q, h=None):
        h = q if h is None else h
        query = torch.einsum("bld,hde->bhle", q, self.W_query)
        key = torch.einsum("bld,hde->bhle", h, self.W_key)
        value = torch.einsum("bld,hde->bhle", h, self.W_val)
        w = (query @ key.mT / math.sqrt(query.size(-1))).softmax(-1)
        return torch.einsum("bhle,hed->bld", w @ value, self.W_out)


class MaskByName(Attention):
    """mask: None, or "subsequent" for a causal one."""

    def forward(self, query, key, value, mask: str | None = None):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        scores = self.scores(q, k)
        if mask == "subsequent":
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return self.join(scores.softmax(-1) @ self.split(self.W_v(value)))


class MeanOfSomeHeads(Attention):
    """Beside the output, the mean weights of the last two heads."""

    def forward(self, query, key, value):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        weights = self.scores(q, k).softmax(-1)
        out = self.join(weights @ self.split(self.W_v(value)))
        return out, weights[:, -2:].detach().sum(dim=1) / 2


@pytest.mark.parametrize(
    "code",
    [
        TurnedOnceRepeated,
        HeadsAsWideAsTheModel,
        WidthsThatGoTogether,
        MaskByName,
        MeanOfSomeHeads,
    ],
)
def test_ordinary_code_is_right(code):
    report = multihead.check(code, allow="all")
    assert report.passed, str(report)


def test_what_is_not_its_weights_is_not_judged():
    report = multihead.check(MeanOfSomeHeads)
    assert [r["name"] for r in report.remarks].count("other_weights") == 1, str(report)


# ---- Masks that every call needs, and that nothing explains ------------------


class NeedsBoth(Attention):
    """One mask is added to the scores, one meets the weights; values are keys."""

    def forward(self, x, attention_mask, padding_mask):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        weights = (self.scores(q, k) + attention_mask / 3).softmax(-1)
        return self.join((weights * padding_mask) @ k)


def test_masks_that_block_nothing_show_what_else_is_wrong():
    report = multihead.check(NeedsBoth)
    assert report.cause == "key_weight_for_values", str(report)
    assert {case["name"] for case in report.cases} == {"masks that block nothing"}
    assert "What it makes of masks that block" in " ".join(str(report).split())
