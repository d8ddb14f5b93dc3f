# SPDX-License-Identifier: MIT
"""What the bits of fused results do not depend on, and the memory of the output.

Not on threads, repeats, the batch a row is in, the memory of inputs, nor on keys
that a row does not see. (Instruction sets: test_fused_isa.py.)
"""

import concurrent.futures
import itertools

import pytest
import torch
from error_budget import BUDGETS

import multihead

attention = multihead.scaled_dot_product_attention
ops = torch.ops.multihead
DTYPES = pytest.mark.parametrize("dtype", BUDGETS, ids=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def results_of(q, k, v, **options):
    """Everything that the fused operators compute of a call, by name."""
    out, lse = ops.fused_attention(q, k, v, **options)
    results = {
        "out": out,
        "logsumexp": lse,
        "weights": ops.attention_weights(q, k, lse, False, **options),
        "mean": ops.attention_weights(q, k, lse, True, **options),
    }
    if "dropout_p" not in options:
        summary = ops.fused_attention_summary(q, k, lse, 3, **options)
        results |= zip(("largest", "keys", "entropy"), summary, strict=True)
    return results


def different(ours, theirs):
    """Names of results whose bits differ; NaN equals NaN."""
    return [
        name
        for name, x in ours.items()
        if not torch.equal(x.nan_to_num(7), theirs[name].nan_to_num(7))
        or not torch.equal(x.isnan(), theirs[name].isnan())
    ]


# --- Threads -------------------------------------------------------------------------


B, H, G, LQ, LK, D, DV = 3, 4, 2, 70, 150, 40, 24
torch.manual_seed(2)  # the same rules in every process
RULES = {
    "none": {},
    "causal": dict(is_causal=True, causal_alignment="bottom_right"),
    "mask": dict(attn_mask=torch.randn(B, 1, LQ, LK)),
    "mixed": dict(
        attn_mask=torch.rand(H, 1, LK) < 0.7,
        key_mask=torch.rand(B, LK) < 0.7,
        window=(40, 9),
        query_offset=torch.tensor([80, -3, 0]),
        key_lengths=torch.tensor([150, 0, 77]),
        softcap=3.0,
        alibi_slopes=torch.rand(H),
        sinks=torch.randn(H),
    ),
    "dropout": dict(dropout_p=0.3, dropout_state=torch.tensor([5, 11]), is_causal=True),
}
EACH_RULE = pytest.mark.parametrize("name", RULES)


def large(dtype=torch.float32):
    return (
        torch.randn(B, H, LQ, D).to(dtype),
        torch.randn(B, G, LK, D).to(dtype),
        torch.randn(B, G, LK, DV).to(dtype),
    )


@DTYPES
@EACH_RULE
def test_threads_and_repeats(name, dtype):
    inputs, options = large(dtype), RULES[name] | dict(enable_gqa=True)
    assert B * H * LQ * LK * (D + DV) > 1e6  # less runs on one thread anyway
    expected = results_of(*inputs, **options)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5, 2):
            torch.set_num_threads(threads)
            assert different(results_of(*inputs, **options), expected) == []
    finally:
        torch.set_num_threads(before)


def test_calls_at_once():
    """Scratch memory is a thread's own."""
    inputs, options = large(), RULES["mixed"] | dict(enable_gqa=True)
    expected = results_of(*inputs, **options)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(results_of, *inputs, **options) for _ in range(16)]
    for call in calls:
        assert different(call.result(), expected) == []


# --- What else is in the call --------------------------------------------------------


def part(x, rows):
    """Of a rule that has one entry for each batch row, those of `rows`."""
    if isinstance(x, torch.Tensor) and x.dim() in (1, 2, 4) and x.size(0) == B:
        return x[rows]
    return x


@DTYPES
@EACH_RULE
def test_a_batch_row_alone(name, dtype):
    (q, k, v), options = large(dtype), RULES[name] | dict(enable_gqa=True)
    if name == "dropout":
        del options["dropout_p"], options["dropout_state"]  # keyed by batch row
    whole = results_of(q, k, v, **options)
    for b in range(B):
        rows = slice(b, b + 1)
        own = {option: part(x, rows) for option, x in options.items()}
        alone = results_of(q[rows], k[rows], v[rows], **own)
        assert different(alone, {n: x[rows] for n, x in whole.items()}) == []


@DTYPES
@pytest.mark.parametrize("name", ["none", "mixed"])
def test_query_rows_alone(name, dtype):
    """Without causal masks and windows, which place rows, a row is itself."""
    (q, k, v), options = large(dtype), RULES[name] | dict(enable_gqa=True)
    for placed in ("window", "alibi_slopes"):
        options.pop(placed, None)
    whole = results_of(q, k, v, **options)
    for rows in (slice(0, 1), slice(13, 14), slice(3, 20), slice(37, LQ)):
        alone = results_of(q[:, :, rows], k, v, **options)
        expected = {
            n: x[:, rows] if n == "mean" else x[:, :, rows] for n, x in whole.items()
        }
        assert different(alone, expected) == []


@DTYPES
def test_heads_alone_and_repeated(dtype):
    """Grouped heads fill the lanes of one tile; their bits are those of a head."""
    q, k, v = large(dtype)
    whole = results_of(q, k, v, enable_gqa=True, is_causal=True)
    repeated = (x.repeat_interleave(H // G, 1) for x in (k, v))
    assert different(results_of(q, *repeated, is_causal=True), whole) == []
    for h in range(H):
        kv = (x[:, h // (H // G)].unsqueeze(1) for x in (k, v))
        alone = results_of(q[:, h : h + 1], *kv, is_causal=True)
        del alone["mean"]
        assert different(alone, {n: x[:, h : h + 1] for n, x in whole.items()}) == []


# --- Memory --------------------------------------------------------------------------


def memories(x):
    """Equal tensors in other memory, by name."""
    yield "(B, L, H, D)", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "(L, B, H, D)", x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    yield "sliced", torch.cat([x, x, x], -1)[..., x.size(-1) : 2 * x.size(-1)]
    misaligned = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    yield "misaligned", misaligned.copy_(x)
    yield "last stride 2", torch.stack([x, x], -1)[..., 1]
    yield "last two exchanged", x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield "reversed rows", torch.cat([x, x], 2)[:, :, : x.size(2)]


MEMORIES = [name for name, _ in memories(torch.empty(1, 1, 1, 1))]


@DTYPES
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["none", "mixed", "dropout"])
def test_memory_of_inputs(name, memory, dtype):
    (q, k, v), options = large(dtype), RULES[name] | dict(enable_gqa=True)
    expected = results_of(q, k, v, **options)
    views = [dict(memories(x))[memory] for x in (q, k, v)]
    for chosen in ((0, 1, 2), (0,), (1,), (2,)):
        inputs = [views[i] if i in chosen else x for i, x in enumerate((q, k, v))]
        ours = results_of(*inputs, **options)
        assert different(ours, expected) == []
        assert all(x.is_contiguous() for n, x in ours.items() if n != "out")


@DTYPES
def test_expanded_inputs(dtype):
    """Strides of 0: one batch row, one head, one key for all."""
    q, k, v = large(dtype)
    for cut in itertools.product((slice(None), slice(0, 1)), repeat=3):
        views = [x[cut].expand_as(x) for x in (q, k, v)]
        copies = (x.contiguous() for x in views)
        options = dict(enable_gqa=True, is_causal=True)
        ours = results_of(*views, **options)
        assert different(ours, results_of(*copies, **options)) == []
    single = (q, k[:1, :1], v[:1, :1])  # sizes of 1 that stand for all
    repeated = (q, k[:1, :1].expand(B, H, -1, -1), v[:1, :1].expand(B, H, -1, -1))
    assert different(results_of(*single), results_of(*repeated)) == []


def strided_rules():
    """The small tensors among the rules, as views of larger ones."""
    lengths = torch.tensor([[150, 1], [0, 2], [77, 3]])[:, 0]
    offsets = torch.tensor([[7, 0], [-2, 0], [70, 0]], dtype=torch.int32)[:, 0]
    slopes, sinks = torch.rand(H, B).t(), torch.randn(H, 3)[:, 1]
    return dict(
        query_offset=offsets,
        key_lengths=lengths,
        key_mask=(torch.rand(LK, 2 * B) < 0.7).t()[::2],
        alibi_slopes=slopes,
        sinks=sinks,
    )


@DTYPES
def test_memory_of_rules(dtype):
    inputs, options = large(dtype), strided_rules()
    assert not any(x.is_contiguous() for x in options.values())
    dense = {name: x.contiguous() for name, x in options.items()}
    ours = results_of(*inputs, **options, enable_gqa=True)
    assert different(ours, results_of(*inputs, **dense, enable_gqa=True)) == []


def ordered(sizes, order):
    """A tensor whose dimensions lie in memory in this order."""
    x = torch.randn([sizes[d] for d in order])
    return x.permute([order.index(d) for d in range(len(sizes))])


@pytest.mark.parametrize("rank", [3, 4])
def test_layout_of_output(rank):
    """That of query, with the width of value; formula and meta tensors agree."""
    for order in itertools.permutations(range(rank)):
        for ones in itertools.product((False, True), repeat=rank):
            sizes = [1 if one else n for one, n in zip(ones, (2, 3, 4, 5)[-rank:])]
            whole = ordered(sizes, order)
            v = torch.randn(*sizes[:-2], 6, 7)
            for query in (whole, whole[..., :1, :].expand(sizes), whole[..., ::2]):
                k = torch.randn(*sizes[:-2], 6, query.size(-1))
                out, lse = ops.fused_attention(query, k, v)
                # .to("meta") would make expanded tensors dense.
                there = torch.empty_strided(query.shape, query.stride(), device="meta")
                meta, meta_lse = ops.fused_attention(there, k.to("meta"), v.to("meta"))
                # PyTorch returns no logsumexp: exact is the formula.
                with multihead.backend("exact"):
                    formula, _ = attention(query, k, v, return_lse=True)
                assert out.stride() == meta.stride() == formula.stride()
                assert lse.is_contiguous() and meta_lse.is_contiguous()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_output_lies_in_memory_as_query_does(order):
    order = (*order, 3)
    q, k, v = large()
    query = q.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    out, _ = ops.fused_attention(query, k, v, enable_gqa=True)
    assert out.permute(order).is_contiguous()


def test_negated_views():
    """Of PyTorch's tensors some are lazily negated: x.conj().imag."""
    q, k, v = large()
    views = [torch._neg_view(-x) for x in (q, k, v)]
    assert (
        different(
            results_of(*views, enable_gqa=True), results_of(q, k, v, enable_gqa=True)
        )
        == []
    )


# --- Keys that are not seen ----------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("planted", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_seen_changes_nothing(dtype, planted):
    q, k, v = large(dtype)
    keys = torch.arange(LK)
    cases = {
        "lengths": (dict(key_lengths=torch.tensor([100, 90, 3])), keys >= 100),
        "causal": (dict(is_causal=True), keys >= LQ),
        "offset": (
            dict(is_causal=True, query_offset=torch.tensor([5, 30, 2])),
            keys >= LQ + 30,
        ),
        "window": (dict(window=(5, 2), causal_alignment="bottom_right"), keys < 75),
        "key mask": (dict(key_mask=(keys % 5 != 1).repeat(B, 1)), keys % 5 == 1),
        "key mask and bias": (
            dict(key_mask=(keys < 77).repeat(B, 1), attn_mask=torch.randn(LQ, LK)),
            keys >= 77,
        ),
        "keep": (dict(attn_mask=keys % 3 != 1), keys % 3 == 1),
        "bias": (
            dict(attn_mask=torch.zeros(LK).masked_fill(keys % 7 == 2, -torch.inf)),
            keys % 7 == 2,
        ),
    }
    for name, (options, hidden) in cases.items():
        expected = results_of(q, k, v, **options, enable_gqa=True)
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, hidden] = planted
        bad_v[:, :, hidden] = planted
        ours = results_of(q, bad_k, bad_v, **options, enable_gqa=True)
        assert different(ours, expected) == [], name
        assert all(x.isfinite().all() for x in ours.values()), name


@DTYPES
def test_nan_in_a_key_reaches_the_rows_that_see_it(dtype):
    q, k, v = large(dtype)
    clean = results_of(q, k, v, enable_gqa=True, is_causal=True)
    k[1, 0, 50, 3] = float("nan")
    ours = results_of(q, k, v, enable_gqa=True, is_causal=True)
    sees = torch.zeros(B, H, LQ, dtype=torch.bool)
    sees[1, : H // G, 50:] = True
    for name in ("out", "logsumexp", "weights", "entropy"):
        assert torch.equal(ours[name][~sees], clean[name][~sees]), name
        assert ours[name][sees].isnan().any(-1).all(), name
