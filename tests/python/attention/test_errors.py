# SPDX-License-Identifier: MIT
"""Bad input: the exception types of torch.nn.MultiheadAttention, and our texts."""

import re

import pytest
import torch
from torch import nn

import multihead

E, H, B, L = 8, 2, 3, 4


def x(*shape, **kwargs):
    return torch.randn(*shape, **kwargs)


def blocked(*shape):
    return torch.zeros(*shape, dtype=torch.bool)


def call(sizes, module=None, **kwargs):
    """A test case: forward of a module with tensors of these sizes."""

    def run(module_class):
        mha = module_class(E, H, batch_first=True, **(module or {}))
        return mha(*(x(*s) for s in sizes), **kwargs)

    return run


SELF = [(B, L, E)] * 3
# name: (what is done with a module class, fragment of the message)
BAD = {
    "zero embed_dim": (lambda c: c(0, 2), "must be greater than 0"),
    "negative embed_dim": (lambda c: c(-8, 2), "must be greater than 0"),
    "zero heads": (lambda c: c(8, 0), "must be greater than 0"),
    "negative heads": (lambda c: c(8, -2), "must be greater than 0"),
    "heads do not divide": (lambda c: c(8, 3), "must be divisible by num_heads"),
    "4-D query": (call([(1, B, L, E)] * 3), "but received 4-D query tensor"),
    "1-D query": (call([(E,)] * 3), "but received 1-D query tensor"),
    "2-D key": (
        call([(B, L, E), (L, E), (B, L, E)]),
        "expected `key` and `value` to be 3-D but found 2-D and 3-D",
    ),
    "3-D key, 2-D query": (
        call([(L, E), (B, L, E), (B, L, E)]),
        "expected `key` and `value` to be 2-D but found 3-D and 3-D",
    ),
    "1-D padding": (
        call(SELF, key_padding_mask=blocked(L)),
        "expected `key_padding_mask` to be `None` or 2-D but found 1-D",
    ),
    "2-D padding, unbatched": (
        call([(L, E)] * 3, key_padding_mask=blocked(B, L)),
        "expected `key_padding_mask` to be `None` or 1-D but found 2-D",
    ),
    "1-D attn_mask": (
        call(SELF, attn_mask=blocked(L)),
        "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D",
    ),
    "4-D attn_mask": (
        call(SELF, attn_mask=blocked(B, H, L, L)),
        "expected `attn_mask` to be `None`, 2-D or 3-D but found 4-D",
    ),
    "unbatched 3-D attn_mask": (
        call([(L, E)] * 3, attn_mask=blocked(3, L, L)),
        r"Expected `attn_mask` shape to be \(2, 4, 4\)",
    ),
    "wrong 2-D attn_mask": (
        call(SELF, attn_mask=blocked(L, L + 1)),
        r"The shape of the 2D attn_mask is .*4, 5.*should be \(4, 4\)",
    ),
    "wrong 3-D attn_mask": (
        call(SELF, attn_mask=blocked(B, L, L)),
        r"The shape of the 3D attn_mask is .*3, 4, 4.*should be \(6, 4, 4\)",
    ),
    "one mask for all heads, 3-D": (
        call(SELF, attn_mask=blocked(1, L, L)),
        r"should be \(6, 4, 4\)",
    ),
    "uint8 attn_mask": (
        call(SELF, attn_mask=torch.ones(L, L, dtype=torch.uint8)),
        "only bool and floating types of attn_mask are supported",
    ),
    "int64 padding": (
        call(SELF, key_padding_mask=torch.ones(B, L, dtype=torch.long)),
        "only bool and floating types of key_padding_mask are supported",
    ),
    "padding of another batch": (
        call(SELF, key_padding_mask=blocked(B + 1, L)),
        r"Expected key_padded_mask.shape\[0\] to be 3, but got 4",
    ),
    "padding of another length": (
        call(SELF, key_padding_mask=blocked(B, L + 1)),
        r"Expected key_padded_mask.shape\[1\] to be",
    ),
    "query of another width": (
        call([(B, L, E + 1)] * 3),
        "was expecting embedding dimension of 8, but got 9",
    ),
    "key and value of two lengths": (
        call([(B, L, E), (B, L, E), (B, L + 1, E)]),
        "key shape .*does not match value shape",
    ),
    "key and value of two lengths, kdim": (
        call([(B, L, E), (B, L, 5), (B, L + 1, 6)], dict(kdim=5, vdim=6)),
        "do(es)? not match value",
    ),
    "another batch": (call([(2, L, E), (3, L, E), (3, L, E)]), "batch|shape"),
    "key of another width": (
        call([(B, L, E), (B, L, 4), (B, L, 6)], dict(kdim=5, vdim=6)),
        r"expecting key weights shape of \(8, 4\), but got .*8, 5",
    ),
    "double query, float weights": (
        lambda c: c(E, H)(*[x(L, B, E, dtype=torch.double)] * 3),
        "dtype",
    ),
    "dropout above 1, weights": (
        call(SELF, dict(dropout=1.5)),
        "between 0 and 1",
    ),
    "dropout above 1, no weights": (
        call(SELF, dict(dropout=1.5), need_weights=False),
        "between 0 and 1",
    ),
}


def raised_by(action, module_class) -> BaseException:
    with pytest.raises(Exception) as info:
        action(module_class)
    return info.value


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("name", BAD)
def test_type_is_that_of_pytorch_and_text_says_why(name, mode):
    action, text = BAD[name]
    theirs = raised_by(action, nn.MultiheadAttention)
    with multihead.backend(mode):
        ours = raised_by(action, multihead.MultiheadAttention)
    assert type(ours) is type(theirs), (ours, theirs)
    assert re.search(text, str(ours)), str(ours)


FUNCTIONAL = {
    "bias with static key": (
        dict(bias_k=x(1, 1, E), bias_v=x(1, 1, E), static_k=x(B * H, L, E // H)),
        "bias cannot be added to static key.",
    ),
    "bias with static value": (
        dict(bias_k=x(1, 1, E), bias_v=x(1, 1, E), static_v=x(B * H, L, E // H)),
        "bias cannot be added to static value.",
    ),
    "bias_k alone": (dict(bias_k=x(1, 1, E)), "bias_k is set but bias_v is None"),
    "bias_v alone": (dict(bias_v=x(1, 1, E)), "bias_v is set but bias_k is None"),
    "static_k batch": (
        dict(static_k=x(5, L, E // H)),
        r"expecting static_k.size\(0\) of 6, but got 5",
    ),
    "static_v width": (
        dict(static_v=x(B * H, L, 3)),
        r"expecting static_v.size\(2\) of 4, but got 3",
    ),
    "no packed weight": (
        dict(in_proj_weight=None),
        "use_separate_proj_weight is False but in_proj_weight is None",
    ),
    "no weights at all": (
        dict(use_separate_proj_weight=True),
        "use_separate_proj_weight is True but q_proj_weight is None",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional(name):
    changes, text = FUNCTIONAL[name]
    arguments = dict(
        query=x(L, B, E),
        key=x(L, B, E),
        value=x(L, B, E),
        embed_dim_to_check=E,
        num_heads=H,
        in_proj_weight=x(3 * E, E),
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=x(E, E),
        out_proj_bias=None,
    )
    arguments.update(changes)
    for function in (
        nn.functional.multi_head_attention_forward,
        multihead.multi_head_attention_forward,
    ):
        with pytest.raises(AssertionError, match=text):
            function(**arguments)


Q, K = x(2, 4, 5, 8), x(2, 2, 7, 8)
NAN = float("nan")
# name: (changed arguments, exception, fragment of the message)
ATTENTION = {
    "scale": (dict(scale=NAN), ValueError, "scale must be finite, got nan"),
    "softcap": (
        dict(softcap=-1.0),
        ValueError,
        "softcap must be finite and at least 0",
    ),
    "softcap nan": (dict(softcap=NAN), ValueError, "softcap .* got nan"),
    "window": (dict(window=(-2, 0)), ValueError, r"window .* got \(-2, 0\)"),
    "window of three": (dict(window=(1, 2, 3)), ValueError, "window must be two"),
    "alignment": (
        dict(causal_alignment="middle"),
        ValueError,
        'causal_alignment must be "top_left" or "bottom_right", got "middle"',
    ),
    "dropout": (dict(dropout_p=1.5), RuntimeError, "dropout_p .* got 1.5"),
    "lengths too large": (
        dict(key_lengths=torch.tensor([7, 8])),
        ValueError,
        "key_lengths must be between 0 and 7, got 8",
    ),
    "lengths negative": (
        dict(key_lengths=torch.tensor([-1, 7])),
        ValueError,
        "key_lengths must be between 0 and 7, got -1",
    ),
    "lengths of int8 too large": (
        dict(key_lengths=torch.tensor([7, 8], dtype=torch.int8)),
        ValueError,
        "key_lengths must be between 0 and 7, got 8",
    ),
    "lengths of floats": (
        dict(key_lengths=torch.tensor([7.0, 7.0])),
        ValueError,
        "key_lengths must be integers, got Float",
    ),
    "lengths of another batch": (
        dict(key_lengths=torch.tensor([7])),
        ValueError,
        r"key_lengths must have the shape \(2,\), got \(1,\)",
    ),
    "sinks": (dict(sinks=x(3)), ValueError, r"sinks .* \(4,\), got \(3,\)"),
    "sinks of int": (dict(sinks=torch.ones(4).long()), ValueError, "sinks .* float"),
    "slopes": (
        dict(alibi_slopes=x(3, 4)),
        ValueError,
        r"alibi_slopes .* \(4,\) or \(2, 4\), got \(3, 4\)",
    ),
    "heads": (
        dict(enable_gqa=False),
        RuntimeError,
        "key must have as many heads as query, or enable_gqa, got 2 and 4",
    ),
    "heads do not divide": (
        dict(key=x(2, 3, 7, 8), value=x(2, 3, 7, 8)),
        RuntimeError,
        "key must have a number of heads that divides that of query, got 3 and 4",
    ),
    "head width": (
        dict(key=x(2, 2, 7, 9)),
        RuntimeError,
        "key must have the head width of query, got 9 and 8",
    ),
    "lengths of key and value": (
        dict(value=x(2, 2, 6, 8)),
        RuntimeError,
        r"value must have the length of key, got 6 and 7 \(key.shape=\(2, 2, 7, 8\)",
    ),
    "batch": (
        dict(key=x(3, 2, 7, 8), value=x(3, 2, 7, 8)),
        RuntimeError,
        "key must have the batch size of query, got 3 and 2",
    ),
    "rank": (
        dict(key=x(2, 7, 8), softcap=1.0),
        RuntimeError,
        "key must be 3-D or 4-D",
    ),
    "dtype": (dict(key=K.double()), RuntimeError, "key must have the dtype of query"),
    "integers": (
        dict(query=Q.long(), key=K.long(), value=K.long()),
        RuntimeError,
        "query must be floating point, got Long",
    ),
    "mask dtype": (
        dict(attn_mask=torch.ones(5, 7, dtype=torch.uint8)),
        RuntimeError,
        "attn_mask must be bool or floating point, got Byte",
    ),
    "mask shape": (
        dict(attn_mask=torch.ones(5, 6, dtype=torch.bool)),
        RuntimeError,
        r"attn_mask must broadcast to \(2, 4, 5, 7\), got \(5, 6\)",
    ),
    "sparse": (dict(query=Q.to_sparse()), RuntimeError, "query must be a dense"),
    "device": (
        dict(key=K.to("meta")),
        RuntimeError,
        "key must be on the device of query, got meta and cpu",
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_scaled_dot_product_attention(name):
    changes, error, text = ATTENTION[name]
    arguments = dict(query=Q, key=K, value=K, enable_gqa=True) | changes
    with pytest.raises(error, match=text):
        multihead.scaled_dot_product_attention(**arguments)


GROUPED = {
    "no kv heads": (lambda: multihead.GroupedQueryAttention(8, 4, 0), "num_kv_heads"),
    "kv heads": (
        lambda: multihead.GroupedQueryAttention(8, 4, 3),
        "num_kv_heads must divide num_heads, got num_kv_heads=3 and num_heads=4",
    ),
    "head_dim": (
        lambda: multihead.GroupedQueryAttention(8, 4, 2, head_dim=-1),
        "head_dim must be greater than 0, got -1",
    ),
    "bias_kv": (
        lambda: multihead.GroupedQueryAttention.from_multihead(
            nn.MultiheadAttention(8, 4, add_bias_kv=True), 2
        ),
        "mha must have neither add_bias_kv nor add_zero_attn",
    ),
    "pooling": (
        lambda: multihead.GroupedQueryAttention.from_multihead(
            nn.MultiheadAttention(8, 4), 3
        ),
        "num_kv_heads must divide num_heads",
    ),
    "own head_dim": (
        lambda: multihead.GroupedQueryAttention(8, 4, 2, head_dim=3).to_multihead(),
        r"head_dim \* num_heads must be embed_dim, got 3 \* 4 and 8",
    ),
    "backend": (lambda: multihead.backend("quick").__enter__(), "got 'quick'"),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_query_attention_and_backend(name):
    action, text = GROUPED[name]
    with pytest.raises(ValueError, match=text):
        action()


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_value_as_long_as_key(mode):
    """PyTorch's fused function reads beyond the end of the shorter one."""
    with (
        multihead.backend(mode),
        pytest.raises(RuntimeError, match="value must have the length of key, got 9"),
    ):
        multihead.scaled_dot_product_attention(Q, Q, x(2, 4, 9, 8))


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 1)])
def test_grouped_heads_of_keys_without_heads(batch, mode):
    """PyTorch's function divides by their number: the process is killed."""
    query, key = x(*batch, 1, 3, 8), x(*batch, 0, 3, 8)
    with (
        multihead.backend(mode),
        pytest.raises(RuntimeError, match="heads where value has some, got 0 and 1"),
    ):
        multihead.scaled_dot_product_attention(query, key, query, enable_gqa=True)


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("static", [dict(static_k=9), dict(static_v=9)])
def test_static_key_as_long_as_value(static, mode):
    static = {name: x(B * H, length, E // H) for name, length in static.items()}
    with (
        multihead.backend(mode),
        pytest.raises(RuntimeError, match="leave as many keys as values"),
    ):
        multihead.multi_head_attention_forward(
            *[x(L, B, E)] * 3,
            E,
            H,
            x(3 * E, E),
            None,
            None,
            None,
            False,
            0.0,
            x(E, E),
            None,
            need_weights=False,
            **static,
        )
