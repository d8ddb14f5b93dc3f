# SPDX-License-Identifier: MIT
"""Keys and values that are stored narrower than query: bfloat16 under float32, MXINT8."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from equal import assert_equal
from sequences import Batch, in_pages
from torch.testing import assert_close

import multihead

attention = multihead.scaled_dot_product_attention
B, H, G, D, DV = 2, 6, 2, 72, 40
RULES = {
    "plain": {},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window and sinks": {"window": (100, 3), "sinks": torch.linspace(-1, 2, H)},
    "softcap and alibi": {"softcap": 4.0, "alibi_slopes": 2.0 ** -torch.arange(1.0, 7)},
    "lengths": {"key_lengths": torch.tensor([0, 401])},
    "dropout": {"dropout_p": 0.25},
}
# query's dtype, and how key and value are stored
FORMATS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.int8),
]
formats = pytest.mark.parametrize(
    ("dtype", "storage"), FORMATS, ids=[f"{s} under {d}" for d, s in FORMATS]
)


def stored(x, storage):
    return multihead.to_mxint8(x) if storage == torch.int8 else x.to(storage)


def restored(x, dtype):
    return multihead.from_mxint8(x, dtype) if x.dtype == torch.int8 else x.to(dtype)


def inputs(dtype, lq, lk=530):
    torch.manual_seed(lq)
    sizes = ((H, lq, D), (G, lk, D), (G, lk, DV))
    return [torch.randn(B, *size).to(dtype) for size in sizes]


def with_seed(function, *args, **kwargs):
    torch.manual_seed(1)
    multihead.reset_stats()
    out = function(*args, **kwargs)
    stats = multihead.stats()
    assert stats.calls("fused") == stats.calls() > 0, stats
    return out


@formats
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lq", [1, 5, 70])
def test_bits_of_the_restored_numbers(dtype, storage, rule, lq):
    q, k, v = inputs(dtype, lq)
    ks, vs = stored(k, storage), stored(v, storage)
    options = dict(enable_gqa=True, return_lse=True, **RULES[rule])
    ours = with_seed(attention, q, ks, vs, **options)
    same = with_seed(attention, q, restored(ks, dtype), restored(vs, dtype), **options)
    for x, y in zip(ours, same, strict=True):
        assert torch.equal(x, y)


@formats
def test_ragged_rows_and_pages(dtype, storage):
    torch.manual_seed(0)
    q = torch.randn(7, H, D).to(dtype)
    ks, vs = (stored(torch.randn(346, G, w).to(dtype), storage) for w in (D, DV))
    batch = Batch([1, 1, 5], [300, 1, 45], (q, ks, vs))
    expected = multihead.varlen_attention(
        q, restored(ks, dtype), restored(vs, dtype), *batch.bounds, is_causal=True
    )
    out = with_seed(
        multihead.varlen_attention, q, ks, vs, *batch.bounds, is_causal=True
    )
    assert torch.equal(out, expected)
    filler = -1 if storage == torch.int8 else torch.nan  # scales of NaN
    pools, places = in_pages(batch, 16, filler)
    out = with_seed(
        multihead.varlen_attention, q, *pools, batch.bounds[0], is_causal=True, **places
    )
    assert torch.equal(out, expected)


@formats
def test_gradients_are_those_of_the_restored_numbers(dtype, storage):
    q, k, v = inputs(dtype, 3, 40)
    ks, vs = stored(k, storage), stored(v, storage)
    grads = []
    for key, value in ((ks, vs), (restored(ks, dtype), restored(vs, dtype))):
        x = q.clone().requires_grad_()
        out = with_seed(attention, x, key, value, enable_gqa=True)
        grads += torch.autograd.grad(out.float().square().sum(), x)
    assert torch.equal(*grads)


def test_bfloat16_keys_have_gradients_under_float32():
    q, k, v = inputs(torch.float32, 3, 40)
    keys = [x.bfloat16().requires_grad_() for x in (k, v)]
    attention(q, *keys, enable_gqa=True).sum().backward()
    wide = [x.detach().float().requires_grad_() for x in keys]
    attention(q, *wide, enable_gqa=True).sum().backward()
    for x, y in zip(keys, wide, strict=True):
        assert torch.equal(x.grad, y.grad.bfloat16())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
def test_other_ways_restore_them(storage):
    q, k, v = inputs(torch.float32, 3, 40)
    ks, vs = stored(k, storage), stored(v, storage)
    kr, vr = restored(ks, torch.float32), restored(vs, torch.float32)
    with multihead.backend("exact"):
        assert torch.equal(
            attention(q, ks, vs, enable_gqa=True, window=(9, 9)),
            attention(q, kr, vr, enable_gqa=True, window=(9, 9)),
        )
    summaries = [
        multihead.attention_summary(q, x, k=3, enable_gqa=True) for x in (ks, kr)
    ]
    for x, y in zip(*summaries, strict=True):
        assert torch.equal(x, y)
    if storage == torch.int8:
        assert_equal(
            attention(q.double(), ks, vs, enable_gqa=True),
            attention(q.double(), kr.double(), vr.double(), enable_gqa=True),
        )


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
def test_compiled(storage):
    def step(q, k, v):
        return attention(q, stored(k, storage), stored(v, storage), enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given = inputs(torch.float32, 2, 40)
    assert torch.equal(compiled(*given), step(*given))


def test_autocast_narrows_the_query():
    q, k, v = inputs(torch.float32, 2, 40)
    ks, vs = multihead.to_mxint8(k), multihead.to_mxint8(v)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, ks, vs, enable_gqa=True)
    assert torch.equal(out, attention(q.bfloat16(), ks, vs, enable_gqa=True))


# ---- The format -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 128, 130])
def test_error_of_a_number(dtype, width):
    """At most 2^-7 of the largest of its 32, and what was rounded stays as it is."""
    torch.manual_seed(width)
    scales = 10.0 ** torch.linspace(-4, 4, 200)[:, None]
    x = (torch.randn(200, width) * scales).to(dtype)
    rows = multihead.to_mxint8(x)
    assert rows.dtype == torch.int8
    assert rows.shape == (200, width + -(-width // 32))
    y = multihead.from_mxint8(rows, dtype)
    assert torch.equal(y.float(), multihead.from_mxint8(rows))  # exact in dtype
    groups = F.pad(x.float(), (0, -width % 32)).unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).repeat_interleave(32, -1)[:, :width]
    error = (y.float() - x.float()).abs()
    assert (error <= (largest / 128).clamp_min(2.0**-25)).all()
    assert (error > largest / 1024).any()
    assert torch.equal(multihead.from_mxint8(multihead.to_mxint8(y), dtype), y)


def test_numbers_that_are_not_finite_spoil_their_32():
    x = torch.ones(3, 70)
    x[0, 5], x[1, 40], x[2, 69] = torch.nan, torch.inf, -torch.inf
    y = multihead.from_mxint8(multihead.to_mxint8(x))
    for row, (begin, end) in enumerate(((0, 32), (32, 64), (64, 70))):
        assert y[row, begin:end].isnan().all()
        assert y[row].isfinite().sum() == 70 - (end - begin)


def test_any_layout_and_no_rows():
    x = torch.randn(4, 3, 50).transpose(0, 1)
    rows = multihead.to_mxint8(x)
    assert torch.equal(rows, multihead.to_mxint8(x.contiguous()))
    turned = rows.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(multihead.from_mxint8(turned), multihead.from_mxint8(rows))
    assert multihead.to_mxint8(torch.empty(0, 40)).shape == (0, 42)
    assert multihead.from_mxint8(multihead.to_mxint8(torch.empty(2, 0))).shape == (2, 0)


Q, K, V = inputs(torch.float32, 2, 9)
BAD = {
    "integers": (
        lambda: multihead.to_mxint8(torch.ones(3, dtype=torch.int64)),
        ValueError,
        "to_mxint8: x must be floating point of at least one dimension, got Long",
    ),
    "a number": (
        lambda: multihead.to_mxint8(torch.tensor(1.0)),
        ValueError,
        "to_mxint8: x must be floating point of at least one dimension",
    ),
    "rows of another dtype": (
        lambda: multihead.from_mxint8(torch.ones(3, 33)),
        ValueError,
        "from_mxint8: rows must be rows of MXINT8, .* got Float",
    ),
    "rows of another width": (
        lambda: multihead.from_mxint8(torch.ones(3, 34, dtype=torch.int8)),
        ValueError,
        r"from_mxint8: rows must be rows of MXINT8, .* got Char \(3, 34\)",
    ),
    "another result": (
        lambda: multihead.from_mxint8(multihead.to_mxint8(V), torch.int32),
        ValueError,
        "from_mxint8: dtype must be floating point, got Int",
    ),
    "no tensor": (lambda: multihead.to_mxint8(None), TypeError, "x must be a tensor"),
    "another device": (
        lambda: multihead.KVCache(1, G, D, dtype=torch.int8, device="meta"),
        ValueError,
        "KVCache: device must be the CPU with dtype int8, got meta",
    ),
    "one of two": (
        lambda: attention(Q, multihead.to_mxint8(K), V, enable_gqa=True),
        RuntimeError,
        "value must have the dtype of key, got Float and Char",
    ),
    "another width": (
        lambda: attention(
            Q, multihead.to_mxint8(K[..., :71]), multihead.to_mxint8(V), enable_gqa=True
        ),
        RuntimeError,
        "key must have the head width of query, got 71 and 72",
    ),
    "bytes": (
        lambda: attention(Q, K.to(torch.int8)[..., :34], V.to(torch.int8)),
        ValueError,
        "key must be rows of MXINT8",
    ),
    "ragged": (
        lambda: multihead.varlen_attention(
            Q[0].transpose(0, 1),
            multihead.to_mxint8(K[0].transpose(0, 1)),
            V[0].transpose(0, 1),
            torch.tensor([0, 2]),
            torch.tensor([0, 9]),
        ),
        RuntimeError,
        "varlen_attention: value must have the dtype of key, got Float and Char",
    ),
    "half under double": (
        lambda: attention(Q.double(), K.half(), V.half(), enable_gqa=True),
        RuntimeError,
        "key must have the dtype of query, got Half and Double",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    run, error, text = BAD[name]
    with pytest.raises(error, match=text):
        run()


def test_the_backward_operator_refuses_them():
    out, lse = torch.ops.multihead.fused_attention(
        Q, K.bfloat16(), V.bfloat16(), enable_gqa=True
    )
    with pytest.raises(
        RuntimeError, match="backward: key must have the dtype of query"
    ):
        torch.ops.multihead.fused_attention_backward(
            out, None, Q, K.bfloat16(), V.bfloat16(), out, lse, [True] * 6,
            enable_gqa=True,
        )  # fmt: skip


def test_exact_refuses_them_as_pytorch_does():
    calls = (K.bfloat16(), V.bfloat16()), (multihead.to_mxint8(K), V)
    for key, value in calls:
        with (
            multihead.backend("exact"),
            pytest.raises(RuntimeError, match="same dtype"),
        ):
            attention(Q, key, value, enable_gqa=True)


def test_installed_they_stay_pytorchs_error():
    call = (Q[:, :2], K.bfloat16(), V.bfloat16())
    errors = []
    for context in (multihead.backend("auto"), multihead.installed()):
        with context, pytest.raises(RuntimeError) as error:
            F.scaled_dot_product_attention(*call)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


# ---- Caches ---------------------------------------------------------------


@formats
def test_a_cache_holds_them(dtype, storage):
    """Token by token and in chunks: the bits of prefill over what the cache holds."""
    q, k, v = inputs(dtype, 530)
    ks, vs = (restored(stored(x, storage), dtype) for x in (k, v))
    rules = dict(is_causal=True, enable_gqa=True, causal_alignment="bottom_right")
    expected = attention(q, ks, vs, **rules)
    cache = multihead.KVCache(B, G, D, DV, dtype=storage)
    begin = 0
    for size in itertools.cycle([1, 2, 40, 1, 7, 200]):
        if begin == 530:
            break
        end = min(530, begin + size)
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
        out = attention(
            q[:, :, begin:end],
            cache.key(),
            cache.value(),
            key_lengths=cache.lengths(),
            **rules,
        )
        assert torch.equal(out, expected[:, :, begin:end])
        begin = end
    widths = [-(-33 * D // 32), -(-33 * DV // 32)] if storage == torch.int8 else None
    if widths:
        assert cache.nbytes == cache.capacity * B * G * sum(widths)


def test_an_int8_cache_in_every_other_way(tmp_path):
    cache = multihead.KVCache(2, G, D, DV, dtype=torch.int8)
    assert "head_dim=72, value_dim=40, dtype=int8" in repr(cache)
    _, k, v = inputs(torch.float32, 1, 20)
    cache.append(k, v, torch.tensor([20, 3]))
    cache.truncate([10, 3])
    cache.reorder([1, 0, 0])
    held = cache.clone()
    cache.save(tmp_path / "cache.safetensors")
    for one in (held, multihead.KVCache.load(tmp_path / "cache.safetensors")):
        assert one.lengths().tolist() == [3, 10, 10]
        assert torch.equal(one.key()[1], multihead.to_mxint8(k[0, :, :10]))
        assert torch.equal(one.value()[2], multihead.to_mxint8(v[0, :, :10]))
    with pytest.raises(ValueError, match="dtype must be float32, .* or int8, got Byte"):
        multihead.KVCache(2, G, D, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"key must have the shape .*72\), got"):
        cache.append(torch.zeros(3, G, 1, 75), torch.zeros(3, G, 1, DV))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_layer_reads_them(storage, need_weights):
    torch.manual_seed(0)
    layer = multihead.GroupedQueryAttention(128, 4, num_kv_heads=2, batch_first=True)
    layer.eval()
    cache = multihead.KVCache(2, 2, 32, dtype=storage)
    x = torch.randn(2, 9, 128)
    multihead.reset_stats()
    with torch.no_grad():
        for token in x.split([5, 1, 3], 1):
            out, weights = layer(
                token, token, token, need_weights=need_weights, cache=cache
            )
            assert (weights is not None) == need_weights
            heads = attention(
                layer.q_proj(token).unflatten(-1, (4, 32)).transpose(1, 2),
                cache.key(), cache.value(), key_lengths=cache.lengths(),
                is_causal=True, causal_alignment="bottom_right", enable_gqa=True,
            )  # fmt: skip
            assert_close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))
    stats = multihead.stats()
    assert stats.calls("fused") == stats.calls()
