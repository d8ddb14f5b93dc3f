# SPDX-License-Identifier: MIT
"""What names, docstrings and shapes say about masks, layouts and weights."""

import ast
import inspect
import pathlib
import re
import warnings

import check_samples as samples
import pytest
import torch
import torch.nn.functional as F
from attempts.right_fused import LikePyTorchs
from torch import nn

import multihead
from multihead.check.subject import documented

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "text, batch_first",
    [
        ("x: (batch, seq, hidden). pad: (batch, seq)", True),
        ("x (Tensor): shape (B, L, E)", True),
        ("x: [batch_size, seq_len, d_model]", True),
        ("takes (bs, n_tokens, d) and a mask (L, B, S)", True),
        ("takes (bs, n_tokens, d), keys (L, B, S)", None),
        ("x: (seq, batch, hidden). Attends over (batch, seq, hidden)", False),
        ("x: (L x N x E)", False),
        ("x: (batch, heads, seq)", None),
        ("x: (E, H, D)", None),
        ("attention", None),
    ],
)
def test_a_written_layout_is_believed(tmp_path, text, batch_first):
    subject = samples.subject_of(tmp_path, f'def attention(x):\n    """{text}"""\n')
    assert documented.batch_first(subject) is batch_first


@pytest.mark.parametrize(
    "source, batch_first",
    [
        ("def attention(x):  # (B, T, C)\n    pass\n", True),
        ("def attention(\n    x,  # (T, B, C)\n):\n    pass\n", False),
        (
            "def attention(x):\n    # x = [seq len, batch size, hid dim]\n    pass\n",
            False,
        ),
        ("def attention(x):\n    x = x.mT  # x: (B, T, C)\n", None),
        ("def attention(x):\n    # heads: (B, T, C)\n    pass\n", None),
    ],
)
def test_shapes_in_comments_are_of_the_inputs(tmp_path, source, batch_first):
    assert documented.batch_first(samples.subject_of(tmp_path, source)) is batch_first


class Fused(nn.Module):
    """One key and value head, beside the queries in one matrix."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d = n_heads, d_model // n_heads
        self.Wqkv = nn.Linear(d_model, d_model + 2 * self.d)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, attn_bias=None, attention_mask=None):
        q, k, v = self.Wqkv(x).split([x.shape[-1], self.d, self.d], -1)
        q = q.unflatten(-1, (self.n_heads, self.d)).transpose(1, 2)
        scores = q @ k.unsqueeze(1).mT / self.d**0.5
        if attn_bias is not None:
            scores = scores + attn_bias
        if attention_mask is not None:
            blocked = ~attention_mask[:, None, None, :].bool()
            scores = scores.masked_fill(blocked, -1e9)
        context = scores.softmax(-1) @ v.unsqueeze(1)
        return self.out_proj(context.transpose(1, 2).flatten(2))


def test_a_fused_projection_with_shared_heads_and_two_masks():
    report = multihead.check(Fused)
    assert report.passed, str(report)
    assert "attention_mask taken for one of the keys, 1 = a token" in report.understood


class PromisesBatchFirst(nn.Module):
    def __init__(self, embed_dim, num_heads, batch_first=True):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, x):
        return self.attn(x, x, x)[0]


def test_batch_first_is_a_promise():
    assert multihead.check(PromisesBatchFirst).cause == "batch_and_sequence_exchanged"


class SaysNothing(nn.Module):
    def __init__(self, hidden_dim=32, n_heads=4):
        super().__init__()
        self.attn = nn.MultiheadAttention(hidden_dim, n_heads)

    def forward(self, x, pad_mask=None):
        return self.attn(x, x, x, key_padding_mask=pad_mask)[0]


class SaysBatchFirst(SaysNothing):
    def forward(self, x, pad_mask=None):
        """x: (batch, seq, hidden). pad_mask: (batch, seq), True = padding."""
        return super().forward(x, pad_mask)


class SaysSequenceFirst(SaysNothing):
    def forward(self, x, pad_mask=None):
        """x: (seq, batch, hidden)."""
        return super().forward(x, pad_mask)


def test_a_layout_is_assumed_only_where_nothing_states_it():
    assumed = multihead.check(SaysNothing)
    assert [c["name"] for c in assumed.conditions] == ["sequence_first"], str(assumed)
    assert "sequence_first" in [a["name"] for a in assumed.assumptions]
    assert "say batch_first=True" in " ".join(str(assumed).split())
    assert multihead.check(SaysBatchFirst).cause == "batch_and_sequence_exchanged"
    stated = multihead.check(SaysSequenceFirst)
    assert stated.passed, str(stated)
    assert "sequence_first" not in [a["name"] for a in stated.assumptions]


class KeysOfAName(nn.Module):
    """A mask whose name says nothing: True = a token."""

    def __init__(self, hidden_dim=32, n_heads=4):
        super().__init__()
        self.attn = nn.MultiheadAttention(hidden_dim, n_heads, batch_first=True)

    def forward(self, x, key_mask=None):
        padding = None if key_mask is None else ~key_mask
        return self.attn(x, x, x, key_padding_mask=padding)[0]


def test_what_is_said_of_a_mask_goes_for_padding():
    [assumed] = multihead.check(KeysOfAName).assumptions
    assert assumed["name"] == "padding_keeps" and 'mask="blocked"' in assumed["remedy"]
    stated = multihead.check(KeysOfAName, mask="keep")
    assert stated.passed and not stated.assumptions
    assert multihead.check(KeysOfAName, mask="blocked").cause == "padding_inverted"


def strings_of_the_catalogue():
    # Neither operators nor the markup of the report, whose words have "=", too.
    diagnosis = ROOT / "diagnosis"
    texts = [*diagnosis.glob("[!r]*/*.cpp"), *diagnosis.glob("[!r]*/*_words.h")]
    for path in [diagnosis / "explain.cpp", *texts]:
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
        yield from re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)


def strings_of_check():
    for path in (ROOT / "python" / "multihead" / "check").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_sentences_name_arguments_that_exist():
    own = set(inspect.signature(multihead.check).parameters)
    pytorch = {"dim", "dtype", "diagonal", "training", "atol", "rtol"}
    pytorch |= {"keepdim", "keepdims", "axis", "attn_mask"}
    stated = 0
    for text in [*strings_of_the_catalogue(), *strings_of_check()]:
        for before, name in re.findall(r"(\w*)[ (`]+([a-z]\w*)=(?!=)", text):
            says = before in ("say", "state")
            stated += says
            assert name in own or (name in pytorch and not says), text
    assert stated >= 8


class KeysAndValuesSwapped(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        return self.attn(query, value, key, key_padding_mask, attn_mask=attn_mask)[0]


def test_a_layout_that_is_assumed_is_no_second_fault():
    report = multihead.check(KeysAndValuesSwapped)
    assert report.cause == "inputs_swapped", str(report)
    assert "sequence_first" in [a["name"] for a in report.assumptions]


class BlocksTokens(nn.Module):
    """Hands on what is True for tokens where True blocks."""

    def __init__(self, hidden_dim=32, n_heads=4):
        super().__init__()
        self.attn = nn.MultiheadAttention(hidden_dim, n_heads, batch_first=True)

    def forward(self, x, mask=None):
        """mask: (batch, seq), 1 for tokens, 0 for padding"""
        return self.attn(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def test_one_mask_has_one_fault():
    assert multihead.check(BlocksTokens()).cause == "padding_inverted"


def test_the_mask_that_was_assumed_is_named():
    def attention(q, k, v, mask=None):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask != 0, -torch.inf)
        return scores.softmax(-1) @ v

    report = multihead.check(attention)
    assert report.cause is None
    assert [a["name"] for a in report.assumptions] == ["mask_blocks"]


STACKED = torch.randn(4, 24, 24, dtype=torch.float64) / 24**0.5


def test_a_warning_is_no_print_and_a_stack_is_four_matrices():
    def attention(x):
        warnings.warn("of old", DeprecationWarning, stacklevel=1)
        warnings.warn("for everybody", stacklevel=1)
        w = STACKED.to(x.dtype)
        q, k, v = ((x @ w[i]).unflatten(-1, (4, 6)).transpose(1, 2) for i in range(3))
        weights = (q @ k.mT / 6**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ w[3]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        report = multihead.check(attention)
    assert report.passed, str(report)
    assert not any("prints" in remark["sentence"] for remark in report.remarks)


class Inverts(LikePyTorchs):
    """The arguments of nn.MultiheadAttention by name, of which one is read otherwise."""

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
    ):
        mask = None if attn_mask is None else self.read(attn_mask)
        return super().forward(
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            mask,
            average_attn_weights,
        )

    def read(self, mask):
        return ~mask


class Adds(Inverts):
    def read(self, mask):
        return mask.double()


def test_names_of_pytorchs_masks_mean_what_pytorch_means():
    assert multihead.check(Inverts).cause == "mask_inverted"
    assert multihead.check(Adds).cause == "mask_added"


def test_padding_may_be_all_of_a_name():
    def attend(q, k, v, padding=None):
        scores = q @ k.mT / q.size(-1) ** 0.5
        if padding is not None:
            scores = scores.masked_fill(~padding[:, None, None], -torch.inf)
        return scores.softmax(-1) @ v

    assert multihead.check(attend).cause == "padding_inverted"
    assert multihead.check(attend, mask="keep").passed


class CausalBeyondPadding(nn.Module):
    """(B, 1, 1, Lk) meets the triangle; (B, Lk) would only where B = Lq, as rows."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads = num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, q, k, v, pad_mask=None):
        """Causal attention."""
        layers = self.W_q(q), self.W_k(k), self.W_v(v)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in layers)
        seen = torch.ones(q.size(2), k.size(2)).tril()[None, None].bool()
        if pad_mask is not None:
            seen = self.keep(pad_mask.bool()) & seen
        out = F.scaled_dot_product_attention(q, k, v, seen)
        return self.W_o(out.transpose(1, 2).flatten(2))

    def keep(self, mask):
        return mask


class CausalBeyondKeyPadding(CausalBeyondPadding):
    def forward(self, q, k, v, key_padding_mask=None):
        """Causal attention."""
        return super().forward(q, k, v, key_padding_mask)


class CausalAndBlocked(CausalBeyondPadding):
    def keep(self, mask):
        return ~mask


def test_padding_is_tried_in_the_shape_that_is_taken():
    assert multihead.check(CausalAndBlocked).passed


def test_what_a_pad_mask_holds_is_open_but_not_what_a_key_padding_mask_does():
    report = multihead.check(CausalBeyondPadding)
    assert report.cause is None, str(report)
    assert [c["name"] for c in report.conditions] == ["padding_keeps"]
    assert multihead.check(CausalBeyondPadding, mask="blocked").cause
    assert multihead.check(CausalBeyondKeyPadding).cause == "padding_inverted"
