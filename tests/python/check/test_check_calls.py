# SPDX-License-Identifier: MIT
"""How `check` calls code: widths, arguments and defaults that are not the usual."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attempts.right_grouped import GroupsInPyTorch
from torch import nn

import multihead


class MaskOfTheOtherKeys(nn.Module):
    """Keys from elsewhere come with a mask of their own; both are added."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
    ):
        other = hidden_states
        if encoder_hidden_states is not None:
            other, attention_mask = encoder_hidden_states, encoder_attention_mask
        layers = (self.query, hidden_states), (self.key, other), (self.value, other)
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in layers
        )
        scores = q @ k.mT / q.size(-1) ** 0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        out = self.dropout(scores.softmax(dim=-1)) @ v
        return out.transpose(1, 2).flatten(2)


class EightOfSix(nn.Module):
    """Its sizes are nowhere but in a view."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x):
        B, L, E = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, 8, 6).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale(q))
        return self.o(out.transpose(1, 2).reshape(B, L, E))

    def scale(self, q):
        return q.size(-1) ** -0.5


class Unscaled(EightOfSix):
    def scale(self, q):
        return 1.0


class Tempered(EightOfSix):
    def scale(self, q):
        return 0.07


class HeadByHead(EightOfSix):
    """Whose heads are slices."""

    def forward(self, x):
        parts = [t.chunk(8, dim=-1) for t in self.qkv(x).chunk(3, dim=-1)]
        heads = [F.scaled_dot_product_attention(*qkv) for qkv in zip(*parts)]
        return self.o(torch.cat(heads, dim=-1))


class PaddingOnRowsOfTheQuery(nn.Module):
    """Runs only where there are as many queries as keys."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None):
        layers = (self.q_proj, query), (self.k_proj, key), (self.v_proj, value)
        q, k, v = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in layers
        )
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, :, None], -1e9)
        out = F.softmax(scores, dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


def attention(q, k, v, mask=None):
    scores = q @ k.mT / q.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -math.inf)
    return scores.softmax(-1) @ v


def keeping_count(q, k, v, c=(), h="heads", p="none", _mask=False, causal="no"):
    """Nothing here is what the names say."""
    assert (c, h, p, _mask, causal) == ((), "heads", "none", False, "no")
    return attention(q, k, v)


class OfOneShape(nn.Module):
    """Takes (2, 10, 64) and nothing else."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 10, 3, 8, 8).permute(2, 0, 3, 1, 4)
        return self.o(attention(q, k, v).transpose(1, 2).reshape(2, 10, 64))


LAYERS = nn.ModuleDict({name: nn.Linear(24, 24) for name in "qkvo"})


def beside_layers(x):
    return with_layers(x, LAYERS, 4)


def dropped_by_default(x, num_heads=4, p=0.1):
    """Nobody who leaves p alone gets the same output twice."""
    qkv = nn.Linear(x.size(-1), 3 * x.size(-1))
    out = nn.Linear(x.size(-1), x.size(-1))
    q, k, v = qkv(x).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    weights = F.dropout(F.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1), p)
    return out((weights @ v).transpose(1, 2).flatten(2))


def with_layers(x, layers, n_heads):
    split = (-1, (n_heads, -1))
    q, k, v = (layers[n](x).unflatten(*split).transpose(1, 2) for n in "qkv")
    out = F.scaled_dot_product_attention(q, k, v)
    return layers["o"](out.transpose(1, 2).flatten(2))


def test_widths_and_groups_of_an_instance():
    other = nn.MultiheadAttention(24, 4, kdim=10, vdim=12, batch_first=True)
    for module in (other, GroupsInPyTorch(48, 6, 2)):
        report = multihead.check(module)
        assert report.cause is None, str(report)


def test_layers_that_are_given_run_in_their_type_and_width():
    layers = nn.ModuleDict({name: nn.Linear(32, 32) for name in "qkvo"})
    report = multihead.check(functools.partial(with_layers, layers=layers, n_heads=4))
    assert report.cause is None, str(report)


@pytest.mark.parametrize("kind", [EightOfSix, HeadByHead])
def test_heads_that_only_shapes_count(kind):
    report = multihead.check(kind)
    assert report.cause is None, str(report)


@pytest.mark.parametrize("kind", [Unscaled, Tempered])
def test_a_verdict_on_a_guessed_number_of_heads_says_so(kind):
    report = multihead.check(kind)
    missing = kind is Unscaled
    assert report.cause == ("scale_missing" if missing else "scale_of_another_number")
    assert "num_heads" in [a["name"] for a in report.assumptions]
    assert "taken to have 8 heads" in " ".join(str(report).split())


def test_a_stated_number_of_heads_is_no_assumption():
    report = multihead.check(Unscaled, num_heads=8)
    assert report.cause == "scale_missing" and not report.assumptions


def test_other_keys_have_a_mask_of_their_own():
    report = multihead.check(MaskOfTheOtherKeys, mask="additive")
    assert report.cause is None, str(report)
    assert any("self-attention, mask" in case["name"] for case in report.cases)


def test_padding_that_runs_only_with_as_many_queries_as_keys():
    assert multihead.check(PaddingOnRowsOfTheQuery).cause == "padding_on_queries"


def test_an_argument_that_no_call_can_use():
    def unusable(query, key, value, key_padding_mask=None):
        if key_padding_mask is not None:
            query = query.masked_fill(key_padding_mask.view(1, 1, 1), 0)
        return F.scaled_dot_product_attention(query, key, value)

    report = multihead.check(unusable)
    assert not report.passed and report.cause == "raises", str(report)


@pytest.mark.parametrize("shape", [(2, 4, 3, 6), (2, 3, 6), (3, 6)], ids=len)
def test_inputs_of_the_user_have_a_layout_of_their_own(shape):
    other = (*shape[:-2], 5, shape[-1])
    inputs = {"q": torch.randn(shape), "k": torch.randn(other), "v": torch.randn(other)}
    inputs["mask"] = torch.ones(3, 5).tril() > 0
    report = multihead.check(attention, inputs=inputs)
    assert report.cause is None, str(report)
    [own] = [case for case in report.cases if case["name"] == "your inputs"]
    assert own["agrees"] and math.prod(own["shape"]) == math.prod(shape)


def test_inputs_of_a_layer_without_a_batch():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    report = multihead.check(layer, inputs=[torch.randn(3, 8)] * 3)
    assert report.cause is None, str(report)
    assert [1, 3, 8] in [case["shape"] for case in report.cases]


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(3, 6).int()], ids=str)
def test_inputs_that_cannot_be(x):
    with pytest.raises(ValueError, match="inputs must be floating-point tensors"):
        multihead.check(attention, inputs=(x, x, x))


def test_defaults_of_another_kind_are_kept():
    report = multihead.check(keeping_count)
    assert report.cause is None, str(report)


@pytest.mark.parametrize("refuses", [lambda n: n % 2 == 0, lambda n: n > 1])
def test_code_that_raises_now_and_then(refuses):
    calls = []

    def sometimes(q, k, v):
        calls.append(1)
        assert not refuses(len(calls)), "not now"
        return attention(q, k, v)

    report = multihead.check(sometimes)
    assert not report.passed and report.cause == "raises", str(report)


def test_layers_outside_a_function_are_seen_in_several_cases():
    report = multihead.check(beside_layers, num_heads=4)
    assert report.cause is None and len(report.cases) >= 3, str(report)


def test_a_class_is_called_in_the_width_of_its_layers():
    report = multihead.check(OfOneShape)
    assert report.cause == "raises"
    assert "OfOneShape(x (3, 5, 64))" in report.findings[0].detail


def test_a_softmax_that_overflows_is_a_remark():
    def in_pytorch(q, k, v):
        e = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
        return e / e.sum(-1, keepdim=True) @ v

    def in_numpy(Q, K, V):
        e = np.exp(Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1]))
        return e / e.sum(-1, keepdims=True) @ V

    for function in (in_pytorch, in_numpy):
        report = multihead.check(function)
        assert report.cause is None, str(report)
        assert [r["name"] for r in report.remarks] == ["softmax_overflows"]


def test_a_softmax_that_subtracts_the_maximum_has_no_remark():
    def stable(Q, K, V):
        scores = Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ V

    report = multihead.check(stable)
    assert report.cause is None and not report.remarks, str(report)


def test_dropout_by_default():
    assert multihead.check(dropped_by_default).cause == "dropout_left_on"


def test_a_configuration_with_more_than_usual_names():
    class Particular(MaskOfTheOtherKeys):
        def __init__(self, config):
            super().__init__(config)
            self.window = config.way_of_the_dialect
            self.other = getattr(config, "other_of_the_dialect", 3)

    report = multihead.check(Particular, mask="additive")
    assert report.cause is None, str(report)
    [said] = [a for a in report.assumptions if a["name"] == "settings"]
    assert "`way_of_the_dialect` of its configuration" in said["sentence"]
    assert "other_of_the_dialect" not in str(report)


class MaskTurned(nn.Module):
    """Its mask fits only where there are as many queries as keys."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, q, k, v, mask=None):
        layers = (self.w_q, q), (self.w_k, k), (self.w_v, v)
        q, k, v = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in layers
        )
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.mT == 0, -1e9)
        return self.w_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_that_fits_only_with_as_many_queries_as_keys():
    report = multihead.check(MaskTurned)
    assert report.cause == "mask_transposed", str(report)
    assert any("unless keys are as many" in r["sentence"] for r in report.remarks)


def without_output(q, k, v, num_heads, d_model):
    layers = [nn.Linear(d_model, d_model) for _ in range(3)]
    q, k, v = (
        layer(t).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for layer, t in zip(layers, (q, k, v))
    )
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def test_a_missing_output_projection_is_said():
    report = multihead.check(without_output)
    assert report.cause is None, str(report)
    assert [a["name"] for a in report.assumptions] == ["no_output_projection"]


class CausalWithAMask(MaskTurned):
    """Some queries see no key; what they give has no part in the gradients."""

    def forward(self, q, k, v, mask=None):
        layers = (self.w_q, q), (self.w_k, k), (self.w_v, v)
        q, k, v = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in layers
        )
        scores = q @ k.mT / math.sqrt(q.size(-1))
        later = scores.new_ones(scores.shape[-2:]).triu(1) == 1
        scores = scores.masked_fill(later, -1e9)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -math.inf)
        return self.w_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_code_that_is_causal_by_itself_and_takes_a_mask():
    report = multihead.check(CausalWithAMask)
    assert report.cause is None, str(report)
    assert "causal_by_itself" in [a["name"] for a in report.assumptions]
