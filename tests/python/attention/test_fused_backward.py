# SPDX-License-Identifier: MIT
"""The operator fused_attention_backward, and autograd of fused_attention by it.

Beside the definition in ATen operations, which torch.func always takes, and beside
slopes of the forward kernels. The error budget is for the tests of the kernels.
"""

import calls
import pytest
import torch
from equal import assert_equal
from error_budget import BUDGETS
from paths import fused_calls
from torch.autograd import forward_ad
from torch.testing import assert_close

import multihead

ops = torch.ops.multihead
ALL = [True] * 6
NAMES = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")


def forward(inputs, options):
    return ops.fused_attention(*inputs, **options)


def backward(dout, dlse, inputs, options, results=None, needs=ALL):
    out, lse = results or forward(inputs, options)
    return ops.fused_attention_backward(dout, dlse, *inputs, out, lse, needs, **options)


def output_gradients(inputs, options, dlse=True):
    out, lse = forward(inputs, options)
    return torch.randn_like(out), torch.randn_like(lse) if dlse else None


@pytest.mark.parametrize("name", calls.OPTIONS)
def test_gradients_are_those_of_the_definition(name):
    inputs, options = calls.make(name)
    extra = floating(options)
    tensors = (*inputs, *(options[n] for n in extra))
    function = differentiated(options, extra)
    dout, dlse = output_gradients(inputs, options)
    assert fused_calls(lambda: torch.func.vjp(function, *tensors)) == []
    _, pull = torch.func.vjp(function, *tensors)
    expected = dict(
        zip(("query", "key", "value", *extra), pull((dout, dlse)), strict=True)
    )
    results = dict(zip(NAMES, backward(dout, dlse, inputs, options), strict=True))
    assert {n for n, x in results.items() if x is not None} == set(expected)
    for n, gradient in expected.items():
        assert_close(results[n], gradient, msg=lambda text, n=n: f"{n}: {text}")
        assert results[n].dtype == gradient.dtype


def floating(options):
    """The names of the options that have gradients."""
    return [
        n for n, x in options.items() if torch.is_tensor(x) and x.is_floating_point()
    ]


def differentiated(options, extra):
    """attention as a function of query, key, value and the options `extra`."""
    rest = {n: x for n, x in options.items() if n not in extra}

    def function(query, key, value, *tensors):
        return multihead.scaled_dot_product_attention(
            query,
            key,
            value,
            **dict(zip(extra, tensors, strict=True)),
            **rest,
            return_lse=True,
        )

    return function


@pytest.mark.parametrize("name", ["none", "everything", "keep mask"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_are_slopes_of_the_kernels(name, p):
    inputs, options = calls.make(name)
    if p:
        state = torch.tensor([3, 4])
        options = options | dict(dropout_p=p, dropout_state=state)
    dout, dlse = output_gradients(inputs, options)
    extra = floating(options)
    tensors = dict(zip(NAMES[:3], inputs, strict=True)) | {n: options[n] for n in extra}
    steps = {n: torch.randn_like(x) for n, x in tensors.items()}

    def loss(t):
        moved = {n: x + t * steps[n] for n, x in tensors.items()}
        out, lse = forward(
            [moved[n] for n in NAMES[:3]], options | {n: moved[n] for n in extra}
        )
        return (
            (out * dout).sum() + (lse * dlse).nan_to_num(neginf=0, posinf=0).sum()
        ).item()

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    gradients = dict(zip(NAMES, backward(dout, dlse, inputs, options), strict=True))
    along = sum((gradients[n] * steps[n]).sum().item() for n in tensors)
    assert slope == pytest.approx(along, rel=1e-6)


def test_what_is_not_needed_is_none_and_changes_no_other():
    inputs, options = calls.make("everything")
    dout, dlse = output_gradients(inputs, options)
    everything = backward(dout, dlse, inputs, options)
    for n in range(64):
        needs = [bool(n >> i & 1) for i in range(6)]
        some = backward(dout, dlse, inputs, options, needs=needs)
        for needed, gradient, expected in zip(needs, some, everything, strict=True):
            assert (gradient is not None) == needed
            if needed:
                assert_equal(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_layouts(dtype):
    """(B, L, H, D) memory gives gradients in (B, L, H, D) memory, the same bits."""
    inputs, options = calls.make("everything", dtype)
    dout, _ = output_gradients(inputs, options)
    dense = backward(dout, None, inputs, options)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    results = backward(dout, None, turned, options)
    assert_equal(results, dense)
    for x, gradient in zip(turned, results[:3], strict=True):
        assert gradient.dtype == dtype
        assert gradient.stride() == x.stride()
    double = [x.double() for x in inputs]
    wide = options | {n: options[n].double() for n in floating(options)}
    exact = backward(dout.double(), None, double, wide)
    for gradient, expected in zip(results, exact, strict=True):
        allowed = BUDGETS[dtype].allowed(expected.abs().max(), largest=4)
        assert ((gradient.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1), (1, calls.H, 1, 1)])
def test_expanded_output_gradient(shape):
    inputs, options = calls.make("none")
    results = forward(inputs, options)
    dout = torch.randn(shape, dtype=torch.float64).expand_as(results[0])
    assert 0 in dout.stride()
    expanded = backward(dout, None, inputs, options, results)
    assert_equal(expanded, backward(dout.clone(), None, inputs, options, results))


def test_threads_and_waves_change_no_bit():
    q, k, v = (torch.randn(1, 1, 900, 16) for _ in range(3))
    slopes, sinks = torch.ones(1), torch.zeros(1)
    options = dict(
        is_causal=True,
        alibi_slopes=slopes,
        sinks=sinks,
        attn_mask=torch.randn(900, 900),
    )
    dout, dlse = output_gradients((q, k, v), options)
    results = []
    for threads in (1, 2, 3, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        results.append(backward(dout, dlse, (q, k, v), options))
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_equal(other, results[0])


def test_without_a_batch_dimension():
    inputs, options = calls.make("causal")
    dout, dlse = output_gradients(inputs, options)
    batched = backward(dout, dlse, inputs, options)
    single = backward(dout[1], dlse[1], [x[1] for x in inputs], options)
    for gradient, expected in zip(single[:3], batched[:3], strict=True):
        assert_equal(gradient, expected[1])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_sizes_of_zero(sizes):
    b, h, lq, lk = sizes
    q, k, v = (torch.randn(b, h, length, 4) for length in (lq, lk, lk))
    dout, dlse = output_gradients((q, k, v), {})
    for x, gradient in zip(
        (q, k, v), backward(dout, dlse, (q, k, v), {}), strict=False
    ):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("name", ["none", "everything"])
def test_opcheck_and_meta(name):
    inputs, options = calls.make(name)
    out, lse = forward(inputs, options)
    needs = [True, True, True, *([name == "everything"] * 3)]
    arguments = (torch.randn_like(out), torch.randn_like(lse), *inputs, out, lse, needs)
    torch.library.opcheck(
        ops.fused_attention_backward.default,
        arguments,
        options,
        test_utils=("test_schema", "test_faketensor"),
    )
    meta = [x.to("meta") if torch.is_tensor(x) else x for x in arguments]
    on_meta = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in options.items()}
    for a, b in zip(
        ops.fused_attention_backward(*arguments, **options),
        ops.fused_attention_backward(*meta, **on_meta),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda a: a | dict(dout=a["dout"][..., :2]), "dout must be Double"),
        (lambda a: a | dict(out=a["out"].float()), "out must be Double"),
        (lambda a: a | dict(lse=a["lse"][..., :2]), "logsumexp must be Double"),
        (lambda a: a | dict(dlse=a["dlse"].float()), "dlogsumexp must be Double"),
    ],
)
def test_errors(change, text):
    inputs, options = calls.make("none")
    out, lse = forward(inputs, options)
    given = dict(
        dout=torch.randn_like(out), dlse=torch.randn_like(lse), out=out, lse=lse
    )
    given = change(given)
    with pytest.raises(RuntimeError, match="fused_attention_backward: " + text):
        backward(
            given["dout"], given["dlse"], inputs, options, (given["out"], given["lse"])
        )


# --- Autograd ------------------------------------------------------------------------


@pytest.mark.parametrize("name", calls.OPTIONS)
def test_autograd_of_the_operator(name):
    """gradcheck runs twice and allows no difference."""
    inputs, options = calls.make(name, grad=True)
    extra = floating(options)
    rest = {n: x for n, x in options.items() if n not in extra}

    def function(query, key, value, *tensors):
        named = dict(zip(extra, tensors, strict=True))
        out, lse = ops.fused_attention(query, key, value, **named, **rest)
        return out, lse.nan_to_num(neginf=0, posinf=0)

    tensors = (*inputs, *(options[n] for n in extra))
    assert torch.autograd.gradcheck(function, tensors)


def test_autograd_with_dropout():
    inputs, options = calls.make("everything", grad=True)
    state = torch.tensor([3, 4])

    def function(*tensors):
        return ops.fused_attention(
            *tensors, **options, dropout_p=0.4, dropout_state=state
        )[0]

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_runs_the_operators(dynamic):
    inputs, options = calls.make("everything", torch.float32, grad=True)

    def step(query, key, value):
        return ops.fused_attention(query, key, value, **options)[0].square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected = torch.autograd.grad(step(*inputs), inputs)
    assert_equal(torch.autograd.grad(compiled(*inputs), inputs), expected)


# --- What others tripped over ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shared", [("key",), ("value",), ("key", "value")])
def test_one_batch_of_keys_for_many(shared, dtype):
    """Its gradient is the sum of those that copies have."""
    batch, length = 3, 70
    tensors = {"query": torch.randn(batch, 4, 9, 16, dtype=dtype)}
    for name in ("key", "value"):
        rows = 1 if name in shared else batch
        tensors[name] = torch.randn(rows, 2, length, 16, dtype=dtype)
    dout = torch.randn(batch, 4, 9, 16, dtype=dtype)

    def gradients_of(tensors):
        inputs = [x.clone().requires_grad_() for x in tensors.values()]

        def step():
            out = multihead.scaled_dot_product_attention(*inputs, enable_gqa=True)
            out.backward(dout)

        assert fused_calls(step) == ["attention", "backward"]
        return [x.grad for x in inputs]

    copied = {n: x.expand(batch, -1, -1, -1) for n, x in tensors.items()}
    for x, gradient, copies in zip(
        tensors.values(), gradients_of(tensors), gradients_of(copied), strict=True
    ):
        assert gradient.shape == x.shape
        expected = copies.sum(0, keepdim=True) if x.size(0) == 1 else copies
        assert_equal(gradient, expected)


@pytest.mark.parametrize("blocked", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("average", [False, True])
def test_weights_of_rows_that_a_finite_mask_hides(blocked, average):
    """Their logsumexp is so large that it has lost the number of keys. The mask's
    numbers are coarse there too, so scores are 0: of equal keys all is exact."""
    keys = 6
    query = torch.randn(1, 2, 3, 4)
    key = torch.randn(1, 2, 1, 4).repeat(1, 1, keys, 1) * 0
    mask = torch.full((keys,), blocked)
    inputs = [x.requires_grad_() for x in (query, key)]
    _, lse = ops.fused_attention(*inputs, key, mask)
    weights = ops.attention_weights(*inputs, lse, average, mask)
    assert_close(weights, torch.full_like(weights, 1 / keys))
    factors = torch.randn_like(weights)
    (dkey,) = torch.autograd.grad((weights * factors).sum(), key)
    # Of softmax: w·(f − Σ w·f), times scale·q.
    slope = (factors - factors.mean(-1, keepdim=True)) / keys
    if average:
        slope = slope[:, None].expand(1, 2, 3, keys) / 2
    assert_close(dkey, slope.mT @ query.detach() / 2)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_mask_of_a_call_without_elements(sizes):
    batch, queries, keys = sizes
    mask = torch.randn(2, 1, 1, requires_grad=True)
    q = torch.randn(batch, 2, queries, 4)
    k = torch.randn(batch, 2, keys, 4)
    out = multihead.scaled_dot_product_attention(q, k, k, mask)
    (gradient,) = torch.autograd.grad(out.sum(), mask)
    assert_equal(gradient, torch.zeros_like(mask))


def test_forward_mode_of_a_recorded_backward_is_refused():
    inputs, _ = calls.make("none", grad=True)
    out, lse = forward(inputs, {})
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn_like(out), torch.randn_like(out))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            backward(dual, None, inputs, {}, (out.detach(), lse.detach()))


def test_compiled_autograd():
    inputs, options = calls.make("everything", grad=True)

    def step():
        out, _ = ops.fused_attention(*inputs, **options)
        return torch.autograd.grad(out.square().sum(), inputs)

    expected = step()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert_equal(step(), expected)
