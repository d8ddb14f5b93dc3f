# SPDX-License-Identifier: MIT
"""What `check` calls: functions in C, scripted and wrapped ones, odd modules."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


class CallsItself(nn.Module):
    """A module without forward."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def __call__(self, x):
        return self.inner(x, x, x)[0]


def test_what_a_module_calls_need_not_be_forward():
    report = multihead.check(CallsItself)
    assert report.cause is None, str(report)


def test_a_function_in_c_is_called_as_its_docstring_says():
    report = multihead.check(F.scaled_dot_product_attention)
    assert report.cause is None, str(report)
    names = {case["name"] for case in report.cases}
    assert names >= {"is_causal", "mask (Lq, Lk)", "2 groups"}


@torch.jit.script
def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    if causal:
        later = torch.ones_like(scores).triu(1) == 1
        scores = scores.masked_fill(later, -float("inf"))
    return scores.softmax(-1) @ v


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1) @ v


@torch.vmap
def over_the_batch(q, k, v):
    return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


@pytest.mark.parametrize(
    "target", [scripted, torch.jit.script(Attend()), over_the_batch]
)
def test_functions_that_are_no_plain_ones(target):
    report = multihead.check(target)
    assert report.cause is None, str(report)
    is_causal = any(case["name"] == "is_causal" for case in report.cases)
    assert is_causal == (target is scripted)


class Linear(nn.Module):
    """Attention by a feature map instead of a softmax."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = q @ k.sum(-2).unsqueeze(-1)
        return self.out((q @ (k.mT @ v) / sums).transpose(1, 2).flatten(2))


class ByDistance(nn.Module):
    """Of Nadaraya and Watson."""

    def forward(self, q, k, v):
        squares = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
        return (-squares / 2).softmax(-1) @ v


class Additive(nn.Module):
    """Of Bahdanau; it returns the weights of regions."""

    def __init__(self, dim):
        super().__init__()
        self.inner, self.score = nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x):
        return self.score(self.inner(x).tanh()).softmax(1)


class SparseAttention(Linear):
    """Of the keys at hand, and of every fourth."""

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        places = torch.arange(x.size(1))
        far = (places[:, None] - places).abs()
        seen = (far <= 1) | (places % 4 == 3)
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~seen, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("target", "lacks"),
    [
        (SparseAttention, "what its name calls sparse attention"),
        (Linear, "no softmax"),
        (ByDistance, "no product of queries and keys"),
        (Additive, "no product of queries and keys"),
    ],
)
def test_attention_of_another_kind_is_not_judged(target, lacks):
    report = multihead.check(target)
    assert report.cause == "outside" and report.unchecked, str(report)
    assert lacks in report.findings[0].sentence


class Pool(nn.Module):
    """One vector asks, which is learned."""

    asks = 1

    def __init__(self, dim, heads):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, self.asks, dim))
        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        return self.inner(self.query.expand(len(x), -1, -1), x, x)[0].squeeze(1)


class Latents(Pool):
    asks = 13


class Mean(Pool):
    def forward(self, x):
        return self.inner(x, x, x)[0].mean(1)


@pytest.mark.parametrize("target", [Pool, Latents])
def test_what_asks_by_itself_is_asked_our_queries(target):
    report = multihead.check(target)
    assert report.passed, str(report)
    assert any("that it learns" in one for one in report.understood)


def test_a_mean_of_outputs_is_what_a_head_makes_of_them():
    report = multihead.check(Mean)
    assert report.judgement == "right_if", str(report)


def luong(decoder_state, encoder_outputs, src_mask=None):
    """decoder_state (batch, hidden), encoder_outputs (batch, src_len, hidden).
    src_mask: 1 for real tokens. Dot-product attention of Luong et al.: no scale."""
    scores = torch.bmm(encoder_outputs, decoder_state.unsqueeze(2)).squeeze(2)
    if src_mask is not None:
        scores = scores.masked_fill(src_mask == 0, -1e9)
    weights = scores.softmax(1)
    return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


def test_one_query_beside_a_sequence():
    report = multihead.check(luong)
    assert [c["name"] for c in report.conditions] == ["dot_product_attention"]


def test_a_call_of_one_query_is_one_of_a_decoder():
    report = multihead.check(luong, inputs=(torch.randn(2, 8), torch.randn(2, 5, 8)))
    assert [c["name"] for c in report.conditions] == ["dot_product_attention"]


class InADictionary(nn.Module):
    """With the steps on the way, in their order."""

    def __init__(self, dim, heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, query, key, value):
        out, weights = self.inner(query, key, value)
        return {"q": query, "k": key, "weights": weights, "x": out}


@dataclasses.dataclass
class Output:
    input: torch.Tensor
    context: torch.Tensor
    weights: torch.Tensor


class InADataclass(InADictionary):
    def forward(self, query, key, value):
        found = super().forward(query, key, value)
        return Output(query, found["x"], found["weights"])


class Nested(InADictionary):
    def forward(self, query, key, value):
        found = super().forward(query, key, value)
        return {"weights": found["weights"], "out": (found["x"], found["weights"])}


@pytest.mark.parametrize("target", [InADictionary, InADataclass, Nested])
def test_an_output_among_others_is_found(target):
    report = multihead.check(target)
    assert report.passed, str(report)


class MasksIfAsked(nn.Module):
    """use_mask: whether the mask is used. mask: True = blocked."""

    def __init__(self, dim, heads, use_mask=False):
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.use_mask = use_mask

    def forward(self, x, mask=None):
        mask = mask if self.use_mask else None
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


def masks_if_asked(q, k, v, mask=None, use_mask=False):
    """mask: True = blocked."""
    scores = q @ k.mT / q.size(-1) ** 0.5
    if use_mask:
        scores = scores.masked_fill(mask, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("target", [MasksIfAsked, masks_if_asked])
def test_a_mask_that_a_flag_asks_for(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)


def test_a_file_leaves_time_for_what_it_defines(tmp_path):
    file = tmp_path / "attention.py"
    file.write_text(
        "import torch.nn.functional as F\n"
        "while True: pass\n"
        "def attend(q, k, v): return F.scaled_dot_product_attention(q, k, v)\n"
    )
    report = multihead.check(f"{file}:attend", time_limit=2.0)
    assert report.cause is None, str(report)


def linear_attention(q, k, v):
    """Without a softmax on purpose."""
    inverse = 1 / torch.einsum("...nd,...d->...n", q, k.sum(-2))
    context = torch.einsum("...nd,...ne->...de", k, v)
    return torch.einsum("...de,...nd,...n->...ne", context, q, inverse)


def attention_of_shares(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores / scores.sum(-1, keepdim=True) @ v


def test_attention_without_a_softmax():
    assert multihead.check(linear_attention).cause == "outside"
    report = multihead.check(attention_of_shares)
    assert report.cause == "scores_normalised_without_exp"


class Hooked(nn.Module):
    """Keeps the gradients of its weights, as explanations of attention do."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def keep(self, gradient):
        self.kept = gradient

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        weights.register_hook(self.keep)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OfItself(Hooked):
    """Keys are made before, or here if it is asked to."""

    def __init__(self, dim, num_heads, is_self_attn=False):
        super().__init__(dim, num_heads)
        self.is_self_attn = is_self_attn

    def set_keys(self, x):
        self.keys, self.values = self.qkv(x).chunk(3, -1)[1:]

    def forward(self, x):
        if self.is_self_attn:
            self.set_keys(x)
        parts = self.qkv(x).chunk(3, -1)[0], self.keys, self.values
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("target", [Hooked, OfItself])
def test_what_hangs_on_gradients_or_on_a_flag(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)


def attention_steps(q, k, v):
    """A benchmark of its steps."""
    weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
    yield weights
    yield weights @ v


def attention_of_another(q, k, v):
    raise ImportError("Please install the other package")


@pytest.mark.parametrize("target", [attention_steps, attention_of_another])
def test_what_is_no_fault_of_attention(target):
    assert multihead.check(target).judgement == "not_judged"
