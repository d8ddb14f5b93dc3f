# SPDX-License-Identifier: MIT
"""Arguments of a wrong type: our TypeError names them, never the dispatcher's text."""

import re

import numpy
import pytest
import torch

import multihead
from multihead import textbook

Q = torch.rand(1, 2, 3, 4)
X = torch.rand(2, 3, 8)
LIST, ARRAY = X.tolist(), X.numpy()
sdpa = multihead.scaled_dot_product_attention


def mha(*inputs, **kwargs):
    return multihead.MultiheadAttention(8, 2, batch_first=True)(*inputs, **kwargs)


def gqa(*inputs, **kwargs):
    return multihead.GroupedQueryAttention(8, 2, 1, batch_first=True)(*inputs, **kwargs)


def functional(**changes):
    weights = dict(in_proj_weight=torch.rand(24, 8), out_proj_weight=torch.rand(8, 8))
    biases = dict(in_proj_bias=None, out_proj_bias=None, bias_k=None, bias_v=None)
    rest = dict(query=X, key=X, value=X, embed_dim_to_check=8, num_heads=2)
    rest |= dict(add_zero_attn=False, dropout_p=0.0)
    return multihead.multi_head_attention_forward(**weights | biases | rest | changes)


FUNCTION = "scaled_dot_product_attention: "
LAYER = "multi_head_attention_forward: "
GROUPED = "grouped_query_attention_forward: "
TEXTBOOK = "multi_head_attention: "
CALLS = {
    LAYER + "out_proj_weight must be a tensor, got None": (
        lambda: functional(out_proj_weight=None)
    ),
    FUNCTION + "window must be (left, right), got 4": lambda: sdpa(Q, Q, Q, window=4),
    FUNCTION + "window must be (left, right), got (4.5, 0)": (
        lambda: sdpa(Q, Q, Q, window=(4.5, 0))
    ),
    FUNCTION + "window must be (left, right), got 'ab'": (
        lambda: sdpa(Q, Q, Q, window="ab")
    ),
    FUNCTION + "query must be a tensor, got list": lambda: sdpa(Q.tolist(), Q, Q),
    FUNCTION + "query must be a tensor, got None": lambda: sdpa(None, Q, Q),
    FUNCTION + "key must be a tensor, got numpy.ndarray": lambda: sdpa(Q, ARRAY, Q),
    FUNCTION + "value must be a tensor, got tuple": lambda: sdpa(Q, Q, (Q,) * 9),
    FUNCTION + "attn_mask must be a tensor or None, got list": (
        lambda: sdpa(Q, Q, Q, [[True] * 3] * 3)
    ),
    FUNCTION + "attn_mask must be a tensor or None, got 'causal'": (
        lambda: sdpa(Q, Q, Q, "causal")
    ),
    FUNCTION + "dropout_p must be a number, got None": (
        lambda: sdpa(Q, Q, Q, dropout_p=None)
    ),
    FUNCTION + "is_causal must be True or False, got 'yes'": (
        lambda: sdpa(Q, Q, Q, is_causal="yes")
    ),
    FUNCTION + "scale must be a number or None, got '1'": (
        lambda: sdpa(Q, Q, Q, scale="1")
    ),
    FUNCTION + "key_lengths must be a tensor or None, got list": (
        lambda: sdpa(Q, Q, Q, key_lengths=[3])
    ),
    FUNCTION + "query_offset must be an int, a tensor or None, got 1.0": (
        lambda: sdpa(Q, Q, Q, query_offset=1.0)
    ),
    FUNCTION + "query_offset must be an int, a tensor or None, got list": (
        lambda: sdpa(Q, Q, Q, query_offset=[1])
    ),
    FUNCTION + "query must be a tensor, got tuple": (
        lambda: sdpa((Q,) * 9, Q, Q, query_offset=1)
    ),
    FUNCTION + "softcap must be a number or None, got 'off'": (
        lambda: sdpa(Q, Q, Q, softcap="off")
    ),
    FUNCTION + "alibi_slopes must be a tensor or None, got list": (
        lambda: sdpa(Q, Q, Q, alibi_slopes=[1.0, 0.5])
    ),
    FUNCTION + "sinks must be a tensor or None, got 0.5": (
        lambda: sdpa(Q, Q, Q, sinks=0.5)
    ),
    FUNCTION + "causal_alignment must be a str, got None": (
        lambda: sdpa(Q, Q, Q, causal_alignment=None)
    ),
    "attention_summary: k must be an int, got 2.0": (
        lambda: multihead.attention_summary(Q, Q, 2.0)
    ),
    "attention_summary: key must be a tensor, got list": (
        lambda: multihead.attention_summary(Q, Q.tolist(), 2)
    ),
    LAYER + "num_heads must be an int, got '2'": lambda: functional(num_heads="2"),
    LAYER + "in_proj_weight must be a tensor or None, got list": (
        lambda: functional(in_proj_weight=LIST)
    ),
    LAYER + "query must be a tensor, got list": lambda: mha(LIST, X, X),
    LAYER + "value must be a tensor, got None": lambda: mha(X, X, None),
    LAYER + "key must be a tensor, got numpy.ndarray": lambda: mha(X, ARRAY, X),
    LAYER + "attn_mask must be a tensor or None, got list": (
        lambda: mha(X, X, X, attn_mask=LIST)
    ),
    LAYER + "key_padding_mask must be a tensor or None, got numpy.ndarray": (
        lambda: mha(X, X, X, key_padding_mask=ARRAY)
    ),
    LAYER + "need_weights must be True or False, got 'no'": (
        lambda: mha(X, X, X, need_weights="no")
    ),
    GROUPED + "query must be a tensor, got list": lambda: gqa(LIST, X, X),
    LAYER + "key must be a tensor, got None": lambda: gqa(X, None, X),
    GROUPED + "attn_mask must be a tensor or None, got list": (
        lambda: gqa(X, X, X, attn_mask=LIST)
    ),
    "GroupedQueryAttention: embed_dim must be an int, got '8'": (
        lambda: multihead.GroupedQueryAttention("8", 2, 1)
    ),
    "GroupedQueryAttention: num_kv_heads must be an int, got 1.0": (
        lambda: multihead.GroupedQueryAttention(8, 2, 1.0)
    ),
    "GroupedQueryAttention: kdim must be an int, got 3.0": (
        lambda: multihead.GroupedQueryAttention(8, 2, 1, kdim=3.0)
    ),
    "from_multihead: mha must be a torch.nn.MultiheadAttention, got list": (
        lambda: multihead.GroupedQueryAttention.from_multihead([], 1)
    ),
    "backend: name must be 'auto', 'exact' or 'fused', got 4": (
        lambda: multihead.backend(4).__enter__()
    ),
    TEXTBOOK + "q must be a tensor, got list": (
        lambda: textbook.multi_head_attention(LIST, X, X, 2, 8)
    ),
    TEXTBOOK + "v must be a tensor, got numpy.ndarray": (
        lambda: textbook.multi_head_attention(X, X, ARRAY, 2, 8)
    ),
    TEXTBOOK + "mask must be a tensor or None, got list": (
        lambda: textbook.multi_head_attention(X, X, X, 2, 8, LIST)
    ),
    TEXTBOOK + "num_heads must be an int, got '2'": (
        lambda: textbook.multi_head_attention(X, X, X, "2", 8)
    ),
    TEXTBOOK + "weights of the query must be a tensor, got list": (
        lambda: textbook.multi_head_attention(X, X, X, 2, 8, weights=[LIST] * 4)
    ),
    TEXTBOOK + "weights must be a module, a dictionary or four matrices, got 3": (
        lambda: textbook.multi_head_attention(X, X, X, 2, 8, weights=3)
    ),
    "grouped_query_attention: k must be a tensor, got list": (
        lambda: textbook.grouped_query_attention(X, LIST, X, 2, 8)
    ),
    FUNCTION + "k must be a tensor, got list": (
        lambda: textbook.scaled_dot_product_attention(X, LIST, X)
    ),
    FUNCTION + "mask must be a tensor or None, got 0": (
        lambda: textbook.scaled_dot_product_attention(X, X, X, 0)
    ),
    "MultiHeadAttention: K must be a tensor, got list": (
        lambda: textbook.MultiHeadAttention(8, 2)(X, LIST, X)
    ),
    "MultiHeadAttention: d_model must be an int, got 8.0": (
        lambda: textbook.MultiHeadAttention(8.0, 2)
    ),
    "MultiHeadSelfAttention: x must be a tensor, got numpy.ndarray": (
        lambda: textbook.MultiHeadSelfAttention(8, 2)(ARRAY)
    ),
    "MultiHeadSelfAttention: dropout must be a number, got '0.1'": (
        lambda: textbook.MultiHeadSelfAttention(8, 2, "0.1")
    ),
}


@pytest.mark.parametrize("text", CALLS)
def test_wrong_types_are_named(text):
    error = ValueError if text.startswith("backend") else TypeError
    with pytest.raises(error, match=re.escape(text)) as info:
        CALLS[text]()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "options",
    [
        dict(window=[1, 0]),
        dict(window=numpy.array([1, 0])),
        dict(window=(numpy.int64(1), 0)),
        dict(scale=1),
        dict(scale=numpy.float32(0.5)),
        dict(softcap=numpy.float64(3)),
        dict(is_causal=1),
    ],
    ids=str,
)
def test_what_stands_for_the_type_is_taken(options):
    plain = {
        name: tuple(map(int, value)) if name == "window" else float(value)
        for name, value in options.items()
    }
    plain = {n: bool(v) if n == "is_causal" else v for n, v in plain.items()}
    assert torch.equal(sdpa(Q, Q, Q, **options), sdpa(Q, Q, Q, **plain))


def test_under_vmap():
    """torch.compile says it in its own words: it tries the call with fake tensors."""
    with pytest.raises(TypeError, match=r"window must be \(left, right\), got 4"):
        torch.func.vmap(lambda q: sdpa(q, q, q, window=4))(Q[None])


def test_fx_traces_proxies():
    def model(q, scale):
        return sdpa(q, q, q, scale=scale, window=(1, 0))

    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(Q, 0.5), model(Q, 0.5))


def test_compiled_sizes_may_be_symbols():
    def model(q):
        length = q.size(2)
        return sdpa(q, q, q, window=(length - 2, 0), scale=1 / length)

    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    for length in (3, 5, 8):
        q = torch.rand(1, 2, length, 4)
        torch.testing.assert_close(compiled(q), model(q))


def test_an_error_of_the_same_kind_elsewhere_is_left_alone():
    """A mask that raises when it is read is not an argument of a wrong type."""

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_):
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        sdpa(Q.as_subclass(Refuses), Q, Q)


def test_an_unknown_keyword_is_named():
    q = torch.randn(1, 2, 4)
    said = (
        r"^scaled_dot_product_attention\(\) got an unexpected keyword argument 'cap'$"
    )
    with pytest.raises(TypeError, match=said):
        multihead.scaled_dot_product_attention(q, q, q, cap=1.0)
