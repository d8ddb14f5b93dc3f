# SPDX-License-Identifier: MIT
"""attention_summary: the largest weights of each query, their keys, the entropy.

Compared with the weights that the definition gives. That the kernels' numbers
are within the budget is tested with all options mixed in test_fused.py.
"""

import calls
import pytest
import torch
from equal import assert_equal
from error_budget import BUDGETS
from paths import fused_calls
from torch.testing import assert_close

import multihead
from multihead import AttentionSummary, attention_summary

B, H, LQ, LK, D = 2, 4, 9, 40, 16
MODES = pytest.mark.parametrize("mode", ["auto", "fused", "exact"])
RULES = {
    "none": {},
    "causal": dict(is_causal=True),
    "decoding": dict(
        is_causal=True,
        causal_alignment="bottom_right",
        key_lengths=torch.tensor([17, 40]),
    ),
    "offset": dict(is_causal=True, query_offset=torch.tensor([20, -3])),
    "lengths": dict(key_lengths=torch.tensor([0, 2])),
    "key mask": lambda: dict(key_mask=torch.rand(B, LK) < 0.4),
    "window": dict(window=(2, 1)),
    "window, blocked rows": dict(window=(0, -1), causal_alignment="bottom_right"),
    "keep mask": lambda: dict(attn_mask=torch.rand(B, 1, LQ, LK) < 0.4),
    "one key of many": lambda: dict(attn_mask=torch.arange(LK) == 23),
    "bias": lambda: dict(attn_mask=torch.randn(H, LQ, LK)),
    "bias per key": lambda: dict(attn_mask=torch.randn(B, 1, 1, LK)),
    "nothing seen": dict(attn_mask=torch.zeros(LQ, LK, dtype=torch.bool)),
    "softcap, slopes, sinks": lambda: dict(
        softcap=2.0, alibi_slopes=torch.rand(B, H), sinks=torch.randn(H)
    ),
    "scale": dict(scale=-2.0),
    "everything": lambda: dict(
        attn_mask=torch.randn(LQ, LK),
        is_causal=True,
        scale=0.7,
        query_offset=torch.tensor([21, 31]),
        window=(25, 3),
        key_lengths=torch.tensor([30, 40]),
        key_mask=torch.rand(B, LK) < 0.8,
        softcap=5.0,
        alibi_slopes=torch.rand(H),
        sinks=torch.randn(H),
    ),
}
EACH_RULE = pytest.mark.parametrize("name", RULES)
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])


def make(name="none", groups=2, dtype=torch.float64):
    """((query, key), options)"""
    torch.manual_seed(len(name))
    options = RULES[name]() if callable(RULES[name]) else RULES[name]
    query = torch.randn(B, H, LQ, D, dtype=dtype)
    return (query, torch.randn(B, groups, LK, D, dtype=dtype)), dict(
        options, enable_gqa=True
    )


def weights_of(query, key, options):
    """(B, H, Lq, Lk): what the definition gives for the unit vectors as values."""
    units = torch.eye(key.size(2), dtype=query.dtype)
    units = units.expand(*key.shape[:2], -1, -1)
    with multihead.backend("exact"):
        # return_lse: the definition, not PyTorch's function and its NaN
        weights, _ = multihead.scaled_dot_product_attention(
            query, key, units, **options, return_lse=True
        )
    return weights


def summary_of(weights, k):
    """Written out: no weight of a call here is 0 where its key is seen."""
    order = weights.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    largest = weights.gather(-1, order)
    keys = order.masked_fill(largest == 0, -1)
    return AttentionSummary(largest, keys, torch.special.entr(weights).sum(-1))


# --- Values --------------------------------------------------------------------------


@MODES
@GROUPS
@EACH_RULE
@pytest.mark.parametrize("k", [1, 3, LK])
def test_values(name, groups, k, mode):
    (query, key), options = make(name, groups)
    with multihead.backend(mode):
        summary = attention_summary(query, key, k, **options)
        reached = fused_calls(attention_summary, query, key, k, **options)
    assert reached == ([] if mode == "exact" else ["attention", "summary"])
    assert isinstance(summary, AttentionSummary)
    assert_close(summary, summary_of(weights_of(query, key, options), k))
    assert (summary.weights.diff(dim=-1) <= 0).all()


@MODES
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_dtypes(dtype, mode):
    (query, key), options = make("everything", 2, dtype)
    with multihead.backend(mode):
        summary = attention_summary(query, key, 4, **options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in summary] == [wide, torch.int64, wide]
    double = (query.double(), key.double())
    expected = attention_summary(*double, 4, **options)
    if mode != "exact" or dtype.itemsize > 2:
        # The formula rounds weights to 16 bits.
        assert_close(summary.weights, expected.weights.to(wide))
        assert_close(summary.entropy, expected.entropy.to(wide))
        assert torch.equal(summary.keys, expected.keys)


@MODES
def test_of_equal_weights_the_lower_key_comes_first(mode):
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 70, 4)
    key[:, :, [9, 33, 65]] = 1.0
    query[:, :, 1:] = 1.0
    with multihead.backend(mode):
        _, keys, _ = attention_summary(query, key, 6)
        _, causal, _ = attention_summary(query, key, 6, is_causal=True)
        _, backwards, _ = attention_summary(query, key, 6, scale=-1.0)
    assert keys[0, 0].tolist() == [[0, 1, 2, 3, 4, 5], *[[9, 33, 65, 0, 1, 2]] * 2]
    assert causal[0, 1].tolist() == [
        [0, -1, -1, -1, -1, -1],
        [0, 1, -1, -1, -1, -1],
        [0, 1, 2, -1, -1, -1],
    ]
    assert backwards[0, 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 3


@MODES
@pytest.mark.parametrize("name", ["none", "causal", "nothing seen"])
@pytest.mark.parametrize("extra", [0, 1, 30])
def test_more_keys_than_there_are(name, extra, mode):
    (query, key), options = make(name)
    with multihead.backend(mode):
        summary = attention_summary(query, key, LK + extra, **options)
    weights = weights_of(query, key, options)
    whole = summary_of(weights, LK)
    assert_close(summary.weights[..., :LK], whole.weights)
    assert torch.equal(summary.keys[..., :LK], whole.keys)
    assert (summary.weights[..., LK:] == 0).all()
    assert (summary.keys[..., LK:] == -1).all()
    assert summary.keys.shape == (B, H, LQ, LK + extra)


@MODES
def test_no_keys_wanted(mode):
    (query, key), options = make("everything")
    with multihead.backend(mode):
        weights, keys, entropy = attention_summary(query, key, 0, **options)
    assert weights.shape == keys.shape == (B, H, LQ, 0)
    expected = attention_summary(query, key, 1, **options).entropy
    assert_close(entropy, expected)


@MODES
def test_entropy_of_known_rows(mode):
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 8, 4)
    keep = torch.tensor([[True] * 8, [False] * 8, [False] * 7 + [True]])
    with multihead.backend(mode):
        largest, keys, entropy = attention_summary(query, key, 1, keep)
    expected = torch.tensor([8.0, 1.0, 1.0]).log()
    assert_close(entropy.flatten(), expected)
    assert keys.flatten().tolist() == [0, -1, 7]
    assert_close(largest.flatten(), torch.tensor([1 / 8, 0.0, 1.0]))
    assert (entropy >= 0).all()


@MODES
@pytest.mark.parametrize("name", ["none", "causal", "window", "softcap, slopes, sinks"])
def test_three_dimensions_are_one_batch_row(name, mode):
    (query, key), options = make(name)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][:1]
    with multihead.backend(mode):
        summary = attention_summary(query[0], key[0], 3, **options)
        whole = attention_summary(query[:1], key[:1], 3, **options)
    assert_equal(summary, AttentionSummary(*(x[0] for x in whole)))


@MODES
@pytest.mark.parametrize("planted", [float("nan"), float("inf")])
def test_keys_that_are_not_seen_change_nothing(planted, mode):
    (query, key), options = make("decoding")
    with multihead.backend(mode):
        expected = attention_summary(query, key, 3, **options)
        key[0, :, 17:] = planted
        summary = attention_summary(query, key, 3, **options)
    assert_equal(summary, expected)


def test_one_key_for_all():
    """A key batch or head of 1 stands for all, as in the attention function."""
    (query, key), _ = make()
    expected = attention_summary(query, key[:1, :1].expand(B, H, -1, -1), 3)
    for mode in ("auto", "fused", "exact"):
        with multihead.backend(mode):
            assert_close(attention_summary(query, key[:1, :1], 3), expected)


@pytest.mark.parametrize("sizes", [(0, 4, 3, 5), (2, 0, 3, 5), (2, 4, 0, 5)], ids=str)
@MODES
def test_sizes_of_zero(sizes, mode):
    batch, heads, queries, keys = sizes
    query, key = (
        torch.zeros(batch, heads, queries, 8),
        torch.zeros(batch, heads, keys, 8),
    )
    with multihead.backend(mode):
        summary = attention_summary(query, key, 2)
    shape = (batch, heads, queries)
    assert [x.shape for x in summary] == [(*shape, 2), (*shape, 2), shape]


@MODES
@pytest.mark.parametrize("k", [0, 2])
def test_no_keys_at_all(k, mode):
    query, key = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 0, 8)
    with multihead.backend(mode):
        weights, keys, entropy = attention_summary(query, key, k)
    assert weights.shape == keys.shape == (2, 4, 3, k)
    assert (weights == 0).all() and (keys == -1).all() and (entropy == 0).all()


# --- What it is not, and where it runs -----------------------------------------------


@MODES
def test_nothing_is_differentiable(mode):
    """It summarises what a model attends to, whether or not the model trains."""
    (query, key), options = make("softcap, slopes, sinks")
    tensors = (query, key, options["alibi_slopes"], options["sinks"])
    expected = attention_summary(query, key, 3, **options)
    for x in tensors:
        x.requires_grad_()
    with multihead.backend(mode):
        summary = attention_summary(query, key, 3, **options)
        reached = fused_calls(attention_summary, query, key, 3, **options)
    assert reached == ([] if mode == "exact" else ["attention", "summary"])
    assert not any(x.requires_grad for x in summary)
    assert_close(summary, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_and_exported(dynamic):
    torch.compiler.reset()
    (query, key), options = make("decoding", dtype=torch.float32)

    class Summary(torch.nn.Module):
        def forward(self, query, key, lengths):
            rules = dict(options, key_lengths=lengths)
            return attention_summary(query, key, 3, **rules)

    inputs = (query, key, options["key_lengths"])
    expected = Summary()(*inputs)
    compiled = torch.compile(
        Summary(), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    assert_equal(compiled(*inputs), expected)
    shapes = None
    if dynamic:
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        shapes = ({0: batch}, {0: batch, 2: length}, {0: batch})
    program = torch.export.export(Summary(), inputs, dynamic_shapes=shapes)
    assert_equal(program.module()(*inputs), expected)
    assert fused_calls(program.run_decompositions().module(), *inputs) == [
        "attention",
        "summary",
    ]


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("name", ["none", "everything"])
def test_meta_tensors(name, mode):
    (query, key), options = make(name)
    with multihead.backend(mode):
        real = attention_summary(query, key, 3, **options)
        moved = {
            n: x.to("meta") if torch.is_tensor(x) else x for n, x in options.items()
        }
        meta = attention_summary(query.to("meta"), key.to("meta"), 3, **moved)
    for a, b in zip(real, meta, strict=True):
        assert b.is_meta
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_vmap(mode):
    query, key = torch.randn(3, B, H, LQ, D), torch.randn(3, B, 2, LK, D)

    def one(query, key):
        return tuple(attention_summary(query, key, 3, is_causal=True, enable_gqa=True))

    with multihead.backend(mode):
        mapped = torch.vmap(one)(query, key)
        expected = [torch.stack(x) for x in zip(*map(one, query, key))]
    for ours, theirs in zip(mapped, expected, strict=True):
        assert_close(ours, theirs)


def test_memory_does_not_hold_the_weights():
    """O(Lq · k): one head's weights alone would be 64 MiB."""
    query, key = torch.randn(1, 1, 4096, 4), torch.randn(1, 1, 4096, 4)
    with torch.profiler.profile(profile_memory=True) as profile:
        attention_summary(query, key, 4, is_causal=True)
    allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.events())
    assert 4096 * 4 * 4 < allocated < 2**20


def test_operators_of_a_call_agree_with_the_forward_pass():
    """Largest weights are those that attention_weights returns, in float64."""
    inputs, options = calls.make("everything")
    query, key, value = inputs
    _, lse = torch.ops.multihead.fused_attention(query, key, value, **options)
    weights = torch.ops.multihead.attention_weights(query, key, lse, False, **options)
    summary = attention_summary(query, key, 2, **options)
    assert_close(summary.weights, weights.topk(2).values)
