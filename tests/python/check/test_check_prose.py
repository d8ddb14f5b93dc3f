# SPDX-License-Identifier: MIT
"""What sentences say of a mask, and what a check makes of it."""

import check_samples as samples
import pytest
import torch
from heads import Heads

import multihead
from multihead.check.subject import documented, signature

PLAIN = [
    ("mask: True for tokens that may influence others", "keep"),
    ("mask: True = blocked", "blocked"),
    ("mask: 0 = blocked", "keep"),
    ("mask where 1 means attend", "keep"),
    ("mask: True marks padding, False is kept", "blocked"),
    ("mask: 1 for tokens, 0 for padding", "keep"),
    ("mask: True for padding tokens", "blocked"),
    ("mask: 1 where attention is allowed, 0 where it is forbidden", "keep"),
    ("mask: (batch, seq). True = real token", "keep"),
    ("mask: True (1) = may attend", "keep"),
    ("mask: (Lq, Lk) of 0 and 1; 0 = hidden, gets -inf", "keep"),
    ("mask: 0/1 mask, 0 = hidden (set to -inf)", "keep"),
    (
        "Args:\n    q: 1 is blocked\n    mask (Tensor): of\n        bools; True: hides",
        "blocked",
    ),
    ("mask: True values are positions excluded from attention", "blocked"),
    ("mask : (B, L) bool tensor\n    True = visible", "keep"),
    # A "not" right before what it turns round leaves no doubt.
    ("mask: True where a query may not look", "blocked"),
    ("mask: 1 if the key can't be seen", "blocked"),
    ("mask: 1 where attention is NOT allowed", "blocked"),
    (
        "mask: a ``True`` value indicates a key that is not allowed to be seen",
        "blocked",
    ),
    ("mask: True values are positions that should NOT be attended", "blocked"),
    ("mask: nonzero entries hide a key", "blocked"),
    ("mask: positions marked 1 must be ignored", "blocked"),
    (
        "mask: array of shape (T, S) where mask[i,j] == 0 indicates token\n"
        "        i in the target should not be influenced by token j in the source.",
        "keep",
    ),
]
NEGATED = [
    ("mask: 1 = not masked, 0 = masked", "keep"),
    ("mask: True means the position will not be masked", "keep"),
    ("mask is 1 if the token isn't padding, 0 otherwise", "keep"),
    ("mask: 1 is never ignored, 0 always", "keep"),
    ("mask: True = unmasked", "keep"),
    ("mask: 1 for tokens that are **not masked**, 0 for those **masked**", "keep"),
]
SILENT = [
    "mask: True for positions whose influence is set to zero",
    "mask: 1 where the influence of a token is switched off",
    "a mask",
    "True = blocked",
    "The loss weight is 1 for masked tokens. Takes a mask",
    "q: 1 is masked\nmask: as usual",
    "mask: True = keep; 1 = blocked",
    "mask is True unless the token is padding",
    "mask: entries that are not True are excluded",
    "mask: anything not equal to 1 is masked",
    "mask: positions without a 1 are ignored",
    "mask: True keeps the query from seeing the key",
    "mask: 0 where a key is seen and -inf where it is not",
]


@pytest.mark.parametrize("text, meaning", PLAIN + NEGATED)
def test_a_documented_mask_is_believed(tmp_path, text, meaning):
    source = f'def attention(q, k, v, mask=None):\n    """{text}"""\n'
    subject = samples.subject_of(tmp_path, source)
    said = documented.meaning_of_mask(signature.read(subject), subject)
    assert said.meaning == meaning and said.quote in " ".join(text.split())
    assert said.is_plain is ((text, meaning) in PLAIN)


@pytest.mark.parametrize("text", SILENT)
def test_a_text_on_something_else_is_not(tmp_path, text):
    source = f'def attention(q, k, v, mask=None):\n    """{text}"""\n'
    subject = samples.subject_of(tmp_path, source)
    assert documented.meaning_of_mask(signature.read(subject), subject) is None


@pytest.mark.parametrize(
    "line, is_plain",
    [
        ("def attention(q, k, v, mask=None):  # 1 = blocked", True),
        ("def attention(q, k, v, mask=None):\n    # mask: 1 = blocked\n", True),
        (
            "def attention(q, k, v, mask=None):\n    q = q\n    # mask: 1 = blocked\n",
            False,
        ),
    ],
)
def test_comments_speak_too(tmp_path, line, is_plain):
    subject = samples.subject_of(tmp_path, f"{line}\n    return q\n")
    said = documented.meaning_of_mask(signature.read(subject), subject)
    assert (said.meaning, said.is_plain) == ("blocked", is_plain)
    assert said.quote.endswith("1 = blocked")


@pytest.mark.parametrize(
    "name, text, is_added",
    [
        ("attn_bias", "", True),
        ("mask", "An additive mask", True),
        ("mask", "mask is added to the scores", True),
        ("mask", "mask: 0 = seen, -inf = blocked", False),
        ("mask", "Additive biases", False),
        ("mask", "The mask is not added to the scores", False),
    ],
)
def test_a_mask_is_added_only_where_words_say_so(tmp_path, name, text, is_added):
    source = f'def attention(q, k, v, {name}=None):\n    """{text}"""\n'
    subject = samples.subject_of(tmp_path, source)
    said = documented.additive(signature.read(subject), subject)
    assert (said is not None) is is_added


def seen_where(mask, q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def says_plainly(q, k, v, mask=None):
    """mask: True = blocked"""
    return seen_where(mask, q, k, v)


def says_not(q, k, v, mask=None):
    """mask: 0 = not masked"""
    return seen_where(mask, q, k, v)


def adds_what_is_0_or_1(q, k, v, mask=None):
    """mask: (Lq, Lk) of 0 and 1; 0 = hidden, gets -inf"""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def adds_a_bias(q, k, v, attn_bias=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if attn_bias is None else scores + attn_bias).softmax(-1) @ v


def test_a_text_that_is_believed_is_quoted():
    report = multihead.check(says_plainly)
    assert report.cause == "mask_inverted"
    [fault], [assumed] = report.verdict["faults"], report.assumptions
    assert '"mask: True = blocked"' in fault["detail"]
    assert '"mask: True = blocked"' in assumed["sentence"]
    assert 'say mask="keep"' in assumed["remedy"]
    assert multihead.check(says_plainly, mask="keep").passed


def test_a_text_that_may_be_misread_accuses_nobody():
    report = multihead.check(says_not)
    assert report.cause is None, str(report)
    assert [c["name"] for c in report.conditions] == ["mask_keeps"]
    assert "mask_against_text" in [a["name"] for a in report.assumptions]
    assert multihead.check(says_not, mask="blocked").cause == "mask_inverted"


def test_zeros_and_infinities_in_a_text_are_no_additive_mask():
    assert multihead.check(adds_what_is_0_or_1).cause == "mask_added"
    report = multihead.check(adds_a_bias)
    assert report.passed and [a["name"] for a in report.assumptions] == [
        "mask_additive"
    ]


class _AsksForBool(Heads):
    """Has a way for bool masks, which leaves them bool; floats are added."""

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = self.heads(query, key, value)
        scores = q @ k.mT / q.size(-1) ** 0.5
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = attn_mask.masked_fill(attn_mask, float("-inf"))
            scores = scores + attn_mask
        return self.merged(scores.softmax(-1) @ v)


class _RefusesBool(_AsksForBool):
    def forward(self, query, key, value, attn_mask=None):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            raise TypeError("attn_mask is added: give floats")
        return super().forward(query, key, value, attn_mask)


def test_a_mask_that_the_code_asks_for_bool_is_not_meant_to_be_added():
    assert multihead.check(_AsksForBool).cause == "mask_added"
    refusing = multihead.check(_RefusesBool)
    assert refusing.judgement in ("right", "right_if"), str(refusing)
