# SPDX-License-Identifier: MIT
"""What the fused operators refuse, and why a call cannot be fused."""

import re

import pytest
import torch
from torch.autograd import forward_ad

import multihead

attention = multihead.scaled_dot_product_attention
ops = torch.ops.multihead
B, H, G, LQ, LK, D = 2, 4, 2, 5, 7, 8
Q, K, V = torch.randn(B, H, LQ, D), torch.randn(B, G, LK, D), torch.randn(B, G, LK, 3)
LSE = torch.zeros(B, H, LQ)


# --- backend("fused") ----------------------------------------------------------------


def forward_mode(q):
    with forward_ad.dual_level():
        attention(forward_ad.make_dual(q, q), q, q)


TRANSFORM = r"a transform of torch.func \(vmap, grad\) is at work"
# name: (call, reason)
REASONS = {
    "vmap": (lambda: torch.vmap(lambda q: attention(q, q, q))(Q), TRANSFORM),
    "grad": (
        lambda: torch.func.grad(lambda q: attention(q, q, q).sum())(Q),
        TRANSFORM,
    ),
    "jvp": (
        lambda: torch.func.jvp(lambda q: attention(q, q, q), (Q,), (Q,)),
        TRANSFORM,
    ),
    "forward mode": (
        lambda: forward_mode(Q),
        "forward-mode differentiation is at work",
    ),
    "device": (
        lambda: attention(*[Q.to("meta")] * 3),
        "the kernels run on the CPU, a tensor is on meta",
    ),
    "sparse": (
        lambda: attention(Q.to_sparse(), Q, Q),
        "the kernels take dense tensors, one is Sparse",
    ),
    "nested": (
        lambda: attention(*[torch.nested.nested_tensor([Q[0], Q[1]])] * 3),
        "the kernels take dense tensors, one is nested",
    ),
    "dtype": (
        lambda: attention(*[Q.to(torch.float8_e5m2)] * 3),
        "there are kernels for float32, float64, bfloat16 and float16, query is "
        "Float8_e5m2",
    ),
    "broadcast query": (
        lambda: attention(Q[:1], Q, Q),
        r"query, key and value need broadcasting \(query.shape=\(1, 4, 5, 8\), "
        r"key.shape=\(2, 4, 5, 8\), value.shape=\(2, 4, 5, 8\)\)",
    ),
    "broadcast heads": (
        lambda: attention(Q[:, :1], Q, Q),
        "query, key and value need broadcasting",
    ),
    "rank 2": (
        lambda: attention(*[Q[0, 0]] * 3),
        "the kernels take 3-D and 4-D tensors, query is 2-D",
    ),
    "rank 5": (
        lambda: attention(*[Q[None]] * 3),
        r"the kernels take 3-D and 4-D tensors, query is 5-D \(query.shape=\(1, 2, ",
    ),
    "heads of key and value": (
        lambda: attention(Q, K, V[:, :1], enable_gqa=True),
        r"key and value have different numbers of heads \(query.shape=.*, "
        r"value.shape=\(2, 1, 7, 3\)\)",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_fused_says_why_it_cannot(name):
    call, reason = REASONS[name]
    function = 'scaled_dot_product_attention: backend "fused" cannot run this call: '
    with (
        multihead.backend("fused"),
        pytest.raises(RuntimeError, match=re.escape(function) + reason),
    ):
        call()


@pytest.mark.parametrize(
    "name", ["vmap", "jvp", "forward mode", "device", "broadcast query", "rank 5"]
)
def test_auto_runs_what_fused_cannot(name):
    REASONS[name][0]()


def test_fused_says_why_it_cannot_of_a_layer():
    mha, x = multihead.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    gqa = multihead.GroupedQueryAttention(8, 2, 1).to(torch.float8_e5m2)
    with multihead.backend("fused"):
        low = x.to(torch.float8_e5m2)
        with torch.no_grad(), pytest.raises(RuntimeError, match="query is Float8_e5m2"):
            gqa(low, low, low)
        with pytest.raises(RuntimeError, match="a tensor is on meta"):
            mha.to("meta").requires_grad_(False)(*[x.to("meta")] * 3)


def test_fused_says_why_it_cannot_summarize():
    for call, reason in (
        (lambda: torch.vmap(lambda q: attend_summary(q, q))(Q), TRANSFORM),
        (lambda: attend_summary(Q.to("meta"), Q.to("meta")), "a tensor is on meta"),
        (lambda: attend_summary(Q[:1], Q), "key must have the batch size of query"),
    ):
        with multihead.backend("fused"), pytest.raises(RuntimeError, match=reason):
            call()


def attend_summary(q, k):
    return multihead.attention_summary(q, k, 2)


# --- The operators themselves --------------------------------------------------------


def fused(query=Q, key=K, value=V, **options):
    return ops.fused_attention(query, key, value, **dict(enable_gqa=True) | options)


def weights(query=Q, key=K, lse=LSE, **options):
    return ops.attention_weights(
        query, key, lse, True, **dict(enable_gqa=True) | options
    )


def summary(query=Q, key=K, lse=LSE, k=2, **options):
    return ops.fused_attention_summary(
        query, key, lse, k, **dict(enable_gqa=True) | options
    )


DROPOUT_STATE = (
    r"dropout_state must be int64 of shape \(2,\), or \(7,\) for a part of a call, "
    "when dropout_p > 0, got "
)
# Of every operator. name: (changed arguments, exception, fragment of the message)
REFUSED = {
    "rank": (
        dict(query=Q[0, 0]),
        RuntimeError,
        "query must be 3-D or 4-D, got 2-D",
    ),
    "other rank": (dict(key=K[0]), RuntimeError, "key must be 3-D or 4-D .* got 3-D"),
    "dtypes": (
        dict(key=K.double()),
        RuntimeError,
        "key must have the dtype of query, got Double and Float",
    ),
    "integers": (
        dict(query=Q.long()),
        RuntimeError,
        "query must be floating point, got Long",
    ),
    "head width": (
        dict(key=torch.randn(B, G, LK, D + 1)),
        RuntimeError,
        "key must have the head width of query, got 9 and 8",
    ),
    "batch": (
        dict(query=Q[:1]),
        RuntimeError,
        "key must have the batch size of query, got 2 and 1",
    ),
    "heads": (
        dict(enable_gqa=False),
        RuntimeError,
        "key must have as many heads as query, or enable_gqa, got 2 and 4",
    ),
    "groups": (
        dict(query=torch.randn(B, 3, LQ, D), lse=torch.zeros(B, 3, LQ)),
        RuntimeError,
        "key must have a number of heads that divides that of query, got 2 and 3",
    ),
    "mask shape": (
        dict(attn_mask=torch.ones(LQ, LK + 1)),
        RuntimeError,
        r"attn_mask must broadcast to \(2, 4, 5, 7\), got \(5, 8\)",
    ),
    "mask dtype": (
        dict(attn_mask=torch.ones(LQ, LK).long()),
        RuntimeError,
        "attn_mask must be bool or floating point, got Long",
    ),
    "window of three": (
        dict(window=[1, 2, 3]),
        ValueError,
        r"window must be two sizes, got \[1, 2, 3\]",
    ),
    "window below -1": (dict(window=[0, -2]), ValueError, r"got \(0, -2\)"),
    "alignment": (
        dict(causal_alignment="left"),
        ValueError,
        'causal_alignment must be "top_left" or "bottom_right", got "left"',
    ),
    "two alignments": (
        dict(query_offset=torch.tensor(1), causal_alignment="bottom_right"),
        ValueError,
        "query_offset must not be given with",
    ),
    "offset": (
        dict(query_offset=torch.tensor([1.0, 2.0])),
        ValueError,
        "query_offset must be an integer or integers, got Float",
    ),
    "scale": (
        dict(scale=float("inf")),
        ValueError,
        "scale must be finite, got inf",
    ),
    "softcap": (
        dict(softcap=-1.0),
        ValueError,
        "softcap must be finite and at least 0, got -1",
    ),
    "lengths": (
        dict(key_lengths=torch.tensor([8, 7])),
        ValueError,
        "key_lengths must be between 0 and 7, got 8",
    ),
    "slopes": (dict(alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes .* \(3,\)"),
    "sinks": (dict(sinks=torch.ones(2, 4)), ValueError, r"sinks .* got \(2, 4\)"),
    "dropout below 0": (
        dict(dropout_p=-0.1),
        RuntimeError,
        "dropout_p must be between 0 and 1, got -0.1",
    ),
    "dropout above 1": (dict(dropout_p=1.1), RuntimeError, "dropout_p .* got 1.1"),
    "dropout nan": (dict(dropout_p=float("nan")), RuntimeError, "dropout_p .* got nan"),
    "no state": (dict(dropout_p=0.5), ValueError, DROPOUT_STATE + "None"),
    "state of three": (
        dict(dropout_p=0.5, dropout_state=torch.tensor([1, 2, 3])),
        ValueError,
        DROPOUT_STATE,
    ),
    "state of floats": (
        dict(dropout_p=0.5, dropout_state=torch.zeros(2)),
        ValueError,
        DROPOUT_STATE,
    ),
    "state of two dimensions": (
        dict(dropout_p=0.5, dropout_state=torch.tensor([[1, 2]])),
        ValueError,
        DROPOUT_STATE,
    ),
}


@pytest.mark.parametrize("operator", [fused, weights, summary])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, operator):
    changes, error, text = REFUSED[name]
    if operator is fused:
        changes = {option: x for option, x in changes.items() if option != "lse"}
    with pytest.raises(error, match=text):
        operator(**changes)


@pytest.mark.parametrize("name", ["state of three", "state of floats"])
def test_a_wrong_state_is_shown(name):
    """As the shape and the dtype that it has."""
    changes, error, text = REFUSED[name]
    shown = {"state of three": r".*\(3,\)", "state of floats": ".*Float"}[name]
    with pytest.raises(error, match=text + shown):
        fused(**changes)


@pytest.mark.parametrize("name", ["dropout above 1", "mask shape", "no state"])
def test_meta_tensors_are_checked_too(name):
    """What the values of tensors do not decide is refused before there are any."""
    changes, error, text = REFUSED[name]
    changes = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in changes.items()}
    with pytest.raises(error, match=text):
        fused(*(x.to("meta") for x in (Q, K, V)), **changes)


def test_values_are_checked():
    with pytest.raises(RuntimeError, match="value must have the length of key"):
        fused(value=V[:, :, 1:])
    with pytest.raises(RuntimeError, match="value must have as many heads as key"):
        fused(value=V[:, :1])
    low = [x.to(torch.float8_e5m2) for x in (Q, K, V)]
    with pytest.raises(RuntimeError, match="float16, got Float8_e5m2"):
        fused(*low)


@pytest.mark.parametrize("operator", [weights, summary])
@pytest.mark.parametrize(
    "lse, got",
    [
        (LSE[:1], r"Float \(1, 4, 5\)"),
        (LSE[..., None], r"Float \(2, 4, 5, 1\)"),
        (LSE.double(), r"Double \(2, 4, 5\)"),
        (LSE.bfloat16(), r"BFloat16 \(2, 4, 5\)"),
    ],
    ids=["batch", "rank", "double", "bfloat16"],
)
def test_logsumexp_must_fit(operator, lse, got):
    wanted = "logsumexp must be Float of query's shape without the last dimension, got "
    with pytest.raises(RuntimeError, match=wanted + got):
        operator(lse=lse)
    meta = {name: x.to("meta") for name, x in dict(query=Q, key=K, lse=lse).items()}
    with pytest.raises(RuntimeError, match=wanted + got):
        operator(**meta)


def test_number_of_keys_of_a_summary():
    for call in (lambda: summary(k=-1), lambda: multihead.attention_summary(Q, Q, -1)):
        with pytest.raises(ValueError, match="k must be at least 0, got -1"):
            call()


def test_a_summary_has_no_derivative():
    text = "derivative for multihead::fused_attention_summary is not implemented"
    with pytest.raises(RuntimeError, match=text):
        summary(query=Q.clone().requires_grad_())[0].sum().backward()
