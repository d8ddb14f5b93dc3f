# SPDX-License-Identifier: MIT
"""A CausalBias beside other arguments, and where it is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

import multihead
from multihead import attention_summary, scaled_dot_product_attention, textbook

X = torch.randn(2, 5, 8)
Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
FORM, MODULE = "multi_head_attention", "MultiHeadAttention"
SDPA = "scaled_dot_product_attention"


class Peculiar(torch.Tensor):
    """Has rules of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_textbook_forms_take_plain_tensors_only():
    """They would read the memory of a CausalBias, which holds nothing."""
    bias, own = causal_upper_left(5, 5), X.as_subclass(Peculiar)
    for call, text in (
        (lambda: textbook.scaled_dot_product_attention(X, X, X, bias), f"{SDPA}: mask"),
        (lambda: textbook.multi_head_attention(X, X, X, 2, 8, bias), f"{FORM}: mask"),
        (lambda: textbook.MultiHeadAttention(8, 2)(X, X, X, bias), f"{MODULE}: mask"),
        (lambda: textbook.scaled_dot_product_attention(X, own, X), f"{SDPA}: k"),
        (lambda: textbook.multi_head_attention(own, X, X, 2, 8), f"{FORM}: q"),
    ):
        with pytest.raises(TypeError, match=f"^{text} must be a plain tensor, got .*"):
            call()


# --- One position per query ---------------------------------------------------------------

BESIDE = {
    "window": (1, 0),
    "key_lengths": torch.tensor([4, 9]),
    "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
}
MAKE = {"top_left": causal_upper_left, "bottom_right": causal_lower_right}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("alignment", MAKE)
def test_what_depends_on_positions_needs_the_alignment_of_the_bias(alignment, name):
    bias, options = MAKE[alignment](5, 9), {name: BESIDE[name]}
    other = next(x for x in MAKE if x != alignment)
    text = (
        f'causal_alignment must be "{alignment}" with this CausalBias as attn_mask and '
        f"{name}, got '{other}'"
    )
    sees = torch.ones(5, 9, dtype=torch.bool)
    sees = sees.tril(4 if alignment == "bottom_right" else 0)
    for mode in ("auto", "exact", "fused"):
        with multihead.backend(mode):
            named = options | dict(causal_alignment=alignment)
            if name != "key_lengths":  # "bottom_right" is counted from their ends
                assert_close(
                    scaled_dot_product_attention(Q, K, K, bias, **named),
                    scaled_dot_product_attention(Q, K, K, sees, **named),
                )
            assert_close(
                scaled_dot_product_attention(Q, K, K, bias, **named),
                scaled_dot_product_attention(Q, K, K, is_causal=True, **named),
            )
            with pytest.raises(ValueError, match=f"^{SDPA}: {text}"):
                named["causal_alignment"] = other
                scaled_dot_product_attention(Q, K, K, bias, **named)
            with pytest.raises(ValueError, match=f"^attention_summary: {text}"):
                attention_summary(Q, K, 2, bias, **named)
    if alignment == "bottom_right":  # not the usual one
        with pytest.raises(ValueError, match=text):
            scaled_dot_product_attention(Q, K, K, bias, **options)


@pytest.mark.parametrize("alignment", MAKE)
def test_a_causal_bias_says_itself_where_queries_stand(alignment):
    with pytest.raises(
        ValueError, match="query_offset must be None with a Caus.*got 3"
    ):
        scaled_dot_product_attention(Q, K, K, MAKE[alignment](5, 9), query_offset=3)


def test_an_unknown_alignment_beside_a_causal_bias():
    with pytest.raises(ValueError, match="causal_alignment must be .* got .?middle"):
        scaled_dot_product_attention(
            Q, K, K, causal_upper_left(5, 9), causal_alignment="middle"
        )


# --- How arguments are bound --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_wrong_types_beside_a_causal_bias(mode):
    bias, rows = causal_lower_right(5, 9), [1, 2]
    mha = multihead.MultiheadAttention(8, 2, batch_first=True)
    computed = "attn_mask must be a CausalBias as it was made, got one that was comp"
    with multihead.backend(mode):
        for call, text in (
            (lambda: scaled_dot_product_attention(rows, K, K, bias), "query must be a"),
            (lambda: scaled_dot_product_attention(Q, rows, K, bias), "key must be a"),
            (lambda: attention_summary(rows, K, 2, bias), "query must be a tensor"),
            (lambda: mha(rows, X, X, attn_mask=bias), "query must be a tensor, got li"),
            (lambda: scaled_dot_product_attention(Q, K, K, -bias), computed),
            (lambda: mha(X, X, X, attn_mask=-causal_upper_left(5, 5)), computed),
        ):
            with pytest.raises(TypeError, match=f"^[A-Za-z_]*: {text}"):
                call()


def test_arguments_are_bound_as_those_of_any_call():
    bias = causal_lower_right(5, 9)
    mha = multihead.MultiheadAttention(8, 2, batch_first=True)
    for call, text in (
        (lambda: scaled_dot_product_attention(Q, K, K, bias, query=Q), "multiple val"),
        (lambda: mha(X, X, X, None, True, bias, query=X), "multiple values for arg"),
        (lambda: scaled_dot_product_attention(Q, K, attn_mask=bias), "missing 1 requ"),
        (lambda: scaled_dot_product_attention(Q, K, K, bias, windw=3), "unexpected"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_what_is_usual_or_off_is_not_given():
    """Else a tensor that is PyTorch's to attend would be refused."""

    class Answers(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "as PyTorch"

    own = torch.randn(5, 9).as_subclass(Answers)
    for options in (
        dict(causal_alignment="_".join(["top", "left"])),  # another str, the same text
        dict(softcap=0.0),
        dict(softcap=0),
        dict(window=(-1, -1)),
        dict(window=[-1, -1]),
        dict(sinks=None, return_lse=False),
    ):
        assert scaled_dot_product_attention(Q, K, K, own, **options) == "as PyTorch"
    for options in (dict(window=(-1, 0)), dict(softcap=torch.tensor(0.0))):
        with pytest.raises(TypeError, match="tensors must be plain ones with"):
            scaled_dot_product_attention(Q, K, K, own, **options)
    bias = causal_lower_right(5, 9)
    expected = F.scaled_dot_product_attention(Q, K, K, bias)
    for mode in ("auto", "exact"):
        with multihead.backend(mode):
            off = dict(window=(-1, -1), softcap=0.0)
            assert_close(scaled_dot_product_attention(Q, K, K, bias, **off), expected)
