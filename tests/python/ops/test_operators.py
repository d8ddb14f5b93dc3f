# SPDX-License-Identifier: MIT
"""The operators: registered soundly, differentiable, of the right types and layouts."""

import itertools

import calls
import pytest
import sequences
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import multihead
from multihead._library import diagnosis

ops = diagnosis()  # those of diagnosis among them
attention = multihead.scaled_dot_product_attention
MODES = pytest.mark.parametrize("mode", ["auto", "exact"])
CALLS = pytest.mark.parametrize("name", calls.OPTIONS)
LSE = pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])


def randn(*shape, **options):
    return torch.randn(shape, **options)


# --- opcheck -------------------------------------------------------------------------


def checked_calls():
    """(operator, positional arguments, keyword arguments) of each sound call."""
    for name, return_lse in itertools.product(calls.OPTIONS, (False, True)):
        inputs, options = calls.make(name, torch.float32, grad=True)
        options["return_lse"] = return_lse
        yield ops.scaled_dot_product_attention.default, inputs, options
        if name in ("none", "causal", "keep mask", "groups") and not return_lse:
            exact = options | {"backend": "exact"}
            yield ops.scaled_dot_product_attention.default, inputs, exact
    for changes, backend in itertools.product(LAYER_CHANGES, ("auto", "exact")):
        arguments = LAYER | changes | {"backend": backend}
        yield ops.multi_head_attention_forward.default, (), arguments
    for changes, backend in itertools.product(GROUPED_CHANGES, ("auto", "exact")):
        arguments = GROUPED | changes | {"backend": backend}
        yield ops.grouped_query_attention_forward.default, (), arguments
        arguments = PROJECTED | changes | {"backend": backend}
        yield ops.projected_attention_forward.default, (), arguments
    for name in calls.OPTIONS:
        inputs, options = calls.make(name, torch.float32)
        yield from fused_calls(inputs, options)
        yield ops.attention_summary.default, (*inputs[:2], 2), options
    dropout = dict(dropout_p=0.5, dropout_state=torch.tensor([3, 4]))
    yield from fused_calls(inputs, options | dropout)
    yield from varlen_calls()
    yield from cache_calls()
    yield from stored_calls()
    yield ops.pool_heads.default, (randn(8, 3), 4, 2), {}
    yield ops.repeat_heads.default, (randn(4, 3), 4, 2), {}
    parts = (randn(2, 3, 4), randn(2, 3), randn(2, 3, 4), randn(2, 3))
    yield ops.merge_attention.default, parts, {}


def fused_calls(inputs, options):
    """Of the operators that the kernels implement."""
    q, k, v = inputs
    lse = torch.zeros(q.shape[:-1])
    out = torch.zeros(*q.shape[:-1], v.shape[-1])
    given = (out, lse, q, k, v, out, lse, [True] * 6)
    yield ops.fused_attention.default, inputs, options
    yield ops.fused_attention_backward.default, given, options
    yield ops.attention_weights.default, (q, k, lse, True), options
    yield ops.attention_weights.default, (q, k, lse, False), options
    yield ops.fused_attention_summary.default, (q, k, lse, 2), options


def varlen_calls():
    """Of sequences: rows, pages, and what the kernels implement."""
    slopes = parameter(3, 4)
    batch = sequences.make(
        [2, 0, 3], [3, 1, 4], alibi_slopes=slopes, softcap=2.0
    ).with_gradients()
    rows = (*batch.tensors, *batch.bounds)
    yield ops.varlen_attention.default, rows, batch.rules | {"return_lse": True}
    pools, places = sequences.in_pages(batch, 2, filler=0.0)
    pages = (batch.tensors[0], *pools, batch.bounds[0])
    yield ops.varlen_attention.default, pages, places
    pages = tuple(x.detach() for x in pages)
    yield ops.varlen_attention.default, pages, places
    rules = batch.rules | {"enable_gqa": True}
    yield ops.fused_varlen_attention.default, (*rows, None), rules
    q, k, v = (x.detach() for x in batch.tensors)
    out, lse = torch.zeros_like(q), torch.zeros(4, 5)
    given = (out, lse, q, k, v, out, lse, *batch.bounds, [True] * 6)
    rules = rules | {"alibi_slopes": slopes.detach()}
    yield ops.fused_varlen_attention_backward.default, given, rules


def cache_calls():
    """Of a step with a cache: keys, values and lengths, all of the room in use where
    what lies beyond a length would come out."""
    rooms = (randn(2, 2, 8, 2), randn(2, 2, 8, 2))
    state, full = (*rooms, torch.tensor([1, 4])), (*rooms, torch.tensor([8, 8]))
    new, counts = (randn(2, 2, 3, 2), randn(2, 2, 3, 2)), torch.tensor([2, 3])
    yield ops.kv_cache_append.default, (*state, *new, counts), {}
    yield ops.kv_cache_append.default, (*state, *new), {}
    yield ops.kv_cache_truncate.default, (*state, torch.tensor([0, 2])), {}
    yield ops.kv_cache_reorder.default, (*full, torch.tensor([1, 0, 1])), {}
    x, padding = randn(3, 2, 8), torch.arange(3) >= counts[:, None]
    yield ops.kv_cache_counts.default, (padding, x, False, "forward"), {}
    names = [f"{role}_proj" for role in ("q", "k", "v", "out")]
    linears = {
        f"{name}_{kind}": GROUPED[f"{name}_{kind}"].detach()
        for name in names
        for kind in ("weight", "bias")
    }
    for each, need_weights in ((None, True), (counts, False)):
        arguments = ((x, x, x), state, (each, None), (E, H, G, E // H))
        flat = tuple(itertools.chain(*arguments))
        options = linears | {"need_weights": need_weights}
        yield ops.cached_attention_forward.default, flat, options
    arguments = ((x, None, None), state, (None, None), (E, H, G, E // H))
    flat = tuple(itertools.chain(*arguments))
    yield ops.cached_attention_forward.default, flat, linears


def stored_calls():
    """On keys and values that are stored narrower than query."""
    q, x = randn(2, 4, 3, 40), randn(2, 2, 5, 40)
    rows = multihead.to_mxint8(x)
    yield ops.to_mxint8.default, (x,), {}
    yield ops.from_mxint8.default, (rows, torch.bfloat16), {}
    for stored in (rows, x.bfloat16()):
        for op in (ops.fused_attention, ops.scaled_dot_product_attention):
            yield op.default, (q, stored, stored), {"enable_gqa": True}
    state = (rows, rows.clone(), torch.tensor([1, 2]))
    yield ops.kv_cache_append.default, (*state, x[:, :, :2], x[:, :, :2]), {}


def parameter(*shape):
    return randn(*shape, requires_grad=True)


E, H, G, B, LQ, LK = 8, 4, 2, 2, 3, 5
BLOCKED = torch.ones(LQ, LK, dtype=torch.bool).triu(1)
PADDING = torch.arange(LK) >= torch.tensor([[3], [5]])
INPUTS = dict(
    query=parameter(LQ, B, E), key=parameter(LK, B, E), value=parameter(LK, B, E)
)
LAYER = INPUTS | dict(
    embed_dim_to_check=E,
    num_heads=H,
    in_proj_weight=parameter(3 * E, E),
    in_proj_bias=parameter(3 * E),
    bias_k=None,
    bias_v=None,
    add_zero_attn=False,
    dropout_p=0.0,
    out_proj_weight=parameter(E, E),
    out_proj_bias=parameter(E),
)
MASKS = [
    dict(attn_mask=BLOCKED),
    dict(attn_mask=parameter(B * H, LQ, LK), average_attn_weights=False),
    dict(key_padding_mask=PADDING, need_weights=False),
    dict(is_causal=True, key_padding_mask=PADDING),
]
LAYER_CHANGES = [
    {},
    dict(need_weights=False),
    *MASKS,
    dict(bias_k=parameter(1, 1, E), bias_v=parameter(1, 1, E), add_zero_attn=True),
    dict(
        key=randn(LK, B, 6),
        value=randn(LK, B, 7),
        in_proj_weight=None,
        in_proj_bias=None,
        out_proj_bias=None,
        use_separate_proj_weight=True,
        q_proj_weight=parameter(E, E),
        k_proj_weight=parameter(E, 6),
        v_proj_weight=parameter(E, 7),
    ),
]
GROUPED = INPUTS | dict(
    num_heads=H,
    num_kv_heads=G,
    q_proj_weight=parameter(E, E),
    q_proj_bias=parameter(E),
    k_proj_weight=parameter(E // 2, E),
    k_proj_bias=parameter(E // 2),
    v_proj_weight=parameter(E // 2, E),
    v_proj_bias=parameter(E // 2),
    out_proj_weight=parameter(E, E),
    out_proj_bias=parameter(E),
)
GROUPED_CHANGES = [{}, dict(need_weights=False), *MASKS]
KV = {name: parameter(LK, B, E // 2) for name in ("key", "value")}
PROJECTED = KV | dict(query=parameter(LQ, B, E), head_dim=E // H)


def detached(arguments):
    """The same call without a gradient: fused."""
    return {
        name: x.detach() if isinstance(x, torch.Tensor) else x
        for name, x in arguments.items()
    }


CHECKED = list(checked_calls())
QKV = parameter(2, H, LQ, 8)
# What is traced by AOT autograd with symbolic sizes, seconds each: one call of
# each operator, with all it can do.
TRACED = [
    (ops.scaled_dot_product_attention.default, *calls.make("everything")),
    (ops.scaled_dot_product_attention.plain, (QKV, QKV, QKV), dict(is_causal=True)),
    (ops.multi_head_attention_forward.default, (), LAYER | MASKS[3]),
    (ops.grouped_query_attention_forward.default, (), GROUPED | MASKS[1]),
    (ops.projected_attention_forward.default, (), PROJECTED | MASKS[1]),
    (ops.multi_head_attention_forward.default, (), detached(LAYER | MASKS[3])),
    (ops.grouped_query_attention_forward.default, (), detached(GROUPED | MASKS[1])),
    *fused_calls(*calls.make("everything", torch.float32)),
    *varlen_calls(),
    *cache_calls(),
    *stored_calls(),
    (ops.attention_summary.default, (randn(2, 4, 3, 8), randn(2, 4, 5, 8), 2), {}),
    *CHECKED[-3:],
]
# They return a size, text or nothing, no tensor: opcheck has nothing to trace.
WITHOUT_TENSORS = {
    "multihead::enter_context_parallel",
    "multihead::enter_installed",
    "multihead::enter_varlen",
    "multihead::conditions",
    "multihead::explain",
    "multihead::fault_catalogue",
    "multihead::faults",
    "multihead::fewest_faults",
    "multihead::head_dim",
    "multihead::install",
    "multihead::refusal_in_python",
    "multihead::is_better_reading",
    "multihead::is_context_parallel",
    "multihead::is_installed",
    "multihead::is_reserved",
    "multihead::leave_context_parallel",
    "multihead::leave_installed",
    "multihead::leave_varlen",
    "multihead::outcome",
    "multihead::render_report",
    "multihead::reset_stats",
    "multihead::route",
    "multihead::stats",
    "multihead::token_positions",
    "multihead::uninstall",
    "multihead::warn",
    "multihead::why_not_linear",
}
# PyTorch's tracing has no nested tensors of its inference path.
NOT_TRACED = {"multihead::nested_multi_head_attention"}
# Nor can it follow a cache that may become other tensors.
NOT_TRACED |= {
    f"multihead::kv_cache_{name}"
    for name in "make empty extend room reserve clone save load text".split()
}
# They need a group of processes: tests/python/distributed.
DISTRIBUTED = {
    f"multihead::{name}"
    for name in (
        "ring_attention",
        "ring_varlen_attention",
        "fused_ring_attention",
        "fused_ring_attention_backward",
        "ulysses_attention",
        "ulysses_varlen_attention",
        "tokens_to_heads",
        "heads_to_tokens",
    )
}


@pytest.mark.parametrize("number", range(len(CHECKED)))
def test_opcheck(number):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(*CHECKED[number], test_utils=checks)


@pytest.mark.parametrize("call", TRACED, ids=lambda call: call[0].name())
def test_opcheck_traced(call):
    torch.library.opcheck(*call, test_utils="test_aot_dispatch_dynamic")


def test_opcheck_covers_every_operator():
    registered = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("multihead::")
    }
    for checked in (CHECKED, TRACED):
        names = {op.name().partition(".")[0] for op, *_ in checked}
        assert names | WITHOUT_TENSORS | NOT_TRACED | DISTRIBUTED == registered


# --- Values --------------------------------------------------------------------------


@CALLS
def test_values_are_those_of_the_definition(name):
    inputs, options = calls.make(name)
    expected = calls.reference(inputs, options)
    assert_close(attention(*inputs, **options, return_lse=True), expected)
    assert_close(attention(*inputs, **options), expected[0])
    single = [x.float() for x in inputs]
    options = {
        option: x.float()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for option, x in options.items()
    }
    out, logsumexp = attention(*single, **options, return_lse=True)
    assert_close((out, logsumexp), tuple(x.float() for x in expected))


# --- Gradients -----------------------------------------------------------------------


@LSE
@CALLS
def test_gradients(name, return_lse):
    function, tensors = calls.differentiable(name, return_lse)
    assert gradcheck(silent_on_blocked(function), tensors, nondet_tol=0.0)


@LSE
@CALLS
def test_second_gradients(name, return_lse):
    function, tensors = calls.differentiable(name, return_lse)
    checked = silent_on_blocked(function)
    assert gradgradcheck(checked, tensors, nondet_tol=0.0, fast_mode=True)


@CALLS
def test_forward_gradients(name):
    function, tensors = calls.differentiable(name)
    assert gradcheck(
        function,
        tensors,
        check_forward_ad=True,
        check_backward_ad=False,
        nondet_tol=0.0,
        fast_mode=True,
    )


def silent_on_blocked(function):
    """With 0 for the -inf that logsumexp has in blocked rows: no differences of it."""

    def finite(*tensors):
        results = function(*tensors)
        if isinstance(results, torch.Tensor):
            return results
        out, logsumexp = results
        return out, logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)

    return finite


@pytest.mark.parametrize(
    "operator, arguments, changes",
    [
        *[(ops.multi_head_attention_forward, LAYER, c) for c in LAYER_CHANGES],
        *[(ops.grouped_query_attention_forward, GROUPED, c) for c in GROUPED_CHANGES],
        *[(ops.projected_attention_forward, PROJECTED, c) for c in GROUPED_CHANGES],
    ],
)
def test_gradients_of_layers(operator, arguments, changes):
    arguments = {
        name: x.detach().double().requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for name, x in (arguments | changes).items()
    }
    names = [n for n, x in arguments.items() if getattr(x, "requires_grad", False)]

    def function(*tensors):
        results = operator(**arguments | dict(zip(names, tensors, strict=True)))
        return tuple(x for x in results if x is not None)

    tensors = [arguments[name] for name in names]
    assert gradcheck(function, tensors, nondet_tol=0.0, fast_mode=True)
    assert gradgradcheck(function, tensors, nondet_tol=0.0, fast_mode=True)


@pytest.mark.parametrize("rows", ["pool_heads", "repeat_heads"])
def test_gradients_of_head_groups(rows):
    x = randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: getattr(ops, rows)(x, 4, 2), x, nondet_tol=0.0)


# --- Types, devices, layouts ---------------------------------------------------------


@MODES
def test_autocast_gives_the_types_that_pytorch_gives(mode):
    q, k = randn(2, 4, 3, 8), randn(2, 4, 5, 8)
    x = randn(3, 2, 8)
    with torch.autocast("cpu", torch.bfloat16), multihead.backend(mode):
        theirs = nn.functional.scaled_dot_product_attention(q, k, k)
        ours = attention(q, k, k)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        reference = nn.MultiheadAttention(8, 2)
        module = multihead.MultiheadAttention(8, 2)
        grouped = multihead.GroupedQueryAttention(8, 2, 1)
        expected = [result.dtype for result in reference(x, x, x)]
        assert [result.dtype for result in module(x, x, x)] == expected
        assert [result.dtype for result in grouped(x, x, x)] == expected


@MODES
@CALLS
def test_meta_tensors_have_the_shapes_of_the_results(name, mode):
    inputs, options = calls.make(name)
    moved = {
        option: x.to("meta") if isinstance(x, torch.Tensor) else x
        for option, x in options.items()
    }
    if name == "bias, causal" and mode == "exact":
        del moved["is_causal"], options["is_causal"]  # PyTorch refuses both at once
    with multihead.backend(mode):
        out = attention(*inputs, **options)
        meta = attention(*(x.to("meta") for x in inputs), **moved)
    assert meta.is_meta
    assert (meta.shape, meta.dtype) == (out.shape, out.dtype)
    assert meta.stride() == out.stride()


@MODES
def test_inference_mode(mode):
    inputs, options = calls.make("bias")
    with multihead.backend(mode):
        expected = attention(*inputs, **options)
        with torch.inference_mode():
            out = attention(*inputs, **options)
    assert out.is_inference()
    assert torch.equal(out, expected)


def strided(x, layout):
    """Equal values in other memory."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last dimension strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    if layout == "gapped":
        return torch.cat([x, x], dim=-1)[..., : x.size(-1)]
    return x[:1, :1].expand_as(x)


@pytest.mark.parametrize(
    "layout", ["transposed", "last dimension strided", "gapped", "expanded"]
)
@pytest.mark.parametrize("name", ["none", "decoding", "bias", "groups", "everything"])
def test_layout_of_inputs_does_not_matter(name, layout):
    inputs, options = calls.make(name)
    views = [strided(x, layout) for x in inputs]
    assert not any(x.is_contiguous() for x in views)
    out = attention(*views, **options)
    assert_close(out, attention(*(x.contiguous() for x in views), **options))


@MODES
@pytest.mark.parametrize("name", ["none", "causal", "keep mask", "groups"])
def test_layout_of_output_is_that_of_query(name, mode):
    inputs, options = calls.make(name, torch.float32)
    with multihead.backend(mode):
        contiguous = attention(*inputs, **options)
        views = [strided(x, "transposed") for x in inputs]
        transposed = attention(*views, **options)
    assert contiguous.is_contiguous()
    if mode == "auto":
        assert transposed.transpose(1, 2).is_contiguous()


EMPTY = [
    sizes for sizes in itertools.product((0, 2), (0, 4), (0, 3), (0, 5)) if 0 in sizes
]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_sizes_of_zero(sizes, group):
    batch, heads, queries, keys = sizes
    q = randn(batch, heads, queries, 8, requires_grad=True)
    kv_heads = heads // group
    k, v = (randn(batch, kv_heads, keys, 8, requires_grad=True) for _ in range(2))
    for options in ({}, dict(is_causal=True), dict(window=(1, 1), softcap=2.0)):
        options["enable_gqa"] = True
        out, logsumexp = attention(q, k, v, **options, return_lse=True)
        assert out.shape == q.shape
        assert logsumexp.shape == q.shape[:-1]
        assert (out == 0).all()
        assert (logsumexp == -torch.inf).all()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("queries, keys", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_layers_on_sequences_of_zero(batch, queries, keys):
    q, k = randn(queries, batch, E), randn(keys, batch, E)
    mha = multihead.MultiheadAttention(E, H)
    theirs = nn.MultiheadAttention(E, H)
    theirs.load_state_dict(mha.state_dict())
    assert_close(mha(q, k, k), theirs(q, k, k))
    out, weights = multihead.GroupedQueryAttention(E, H, G)(q, k, k)
    assert out.shape == q.shape
    assert weights.shape == (batch, queries, keys)
