# SPDX-License-Identifier: MIT
"""query_offset: where queries stand, without a mask.

Its numbers are tested with all options mixed in test_definition.py and test_fused.py.
"""

import warnings

import pytest
import torch
from paths import fused_calls
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import multihead

attention = multihead.scaled_dot_product_attention
MODES = pytest.mark.parametrize("mode", ["auto", "fused", "exact"])


def make(queries=4, keys=16, batch=2):
    torch.manual_seed(queries + keys)
    q = torch.randn(batch, 4, queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, keys, 8, dtype=torch.float64).unbind()
    return q, k, v


def path_of(mode):
    return [] if mode == "exact" else ["attention"]


@MODES
def test_a_static_cache_needs_no_mask(mode):
    """A buffer with room, NaN behind the keys that are there; rows are not alike."""
    q, k, v = make()
    past = torch.tensor([3, 9])
    options = dict(is_causal=True, enable_gqa=True)
    with multihead.backend(mode):
        rows = [
            attention(
                q[b : b + 1],
                k[b : b + 1, :, : past[b] + 4],
                v[b : b + 1, :, : past[b] + 4],
                causal_alignment="bottom_right",
                **options,
            )
            for b in range(2)
        ]
        for b in range(2):
            k[b, :, past[b] + 4 :] = torch.nan
            v[b, :, past[b] + 4 :] = torch.nan
        # The causal end alone hides what is behind, and so do lengths with it.
        for lengths in (None, past + 4):
            options |= dict(query_offset=past, key_lengths=lengths)
            assert_close(attention(q, k, v, **options), torch.cat(rows))
            assert fused_calls(attention, q, k, v, **options) == path_of(mode)


@MODES
def test_a_number_is_that_of_every_row(mode):
    q, k, v = make()
    with multihead.backend(mode):
        for offset in (0, 5, -2, 100, -100, 2**62, -(2**62)):
            options = dict(window=(2, 1), enable_gqa=True, return_lse=True)
            expected = attention(
                q, k, v, query_offset=torch.tensor([offset] * 2), **options
            )
            for same in (offset, torch.tensor(offset)):
                ours = attention(q, k, v, query_offset=same, **options)
                assert all(map(torch.equal, ours, expected))
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
            narrow = torch.tensor([3, 5], dtype=dtype)
            ours = attention(q, k, v, query_offset=narrow, **options)
            wide = attention(q, k, v, query_offset=narrow.long(), **options)
            assert all(map(torch.equal, ours, wide))


@MODES
def test_the_alignments_are_offsets(mode):
    for queries, keys in ((4, 16), (16, 4)):
        q, k, v = make(queries, keys)
        options = dict(is_causal=True, enable_gqa=True, return_lse=True)
        with multihead.backend(mode):
            for lengths in (None, torch.tensor([2, 4])):
                options["key_lengths"] = lengths
                n = keys if lengths is None else lengths
                for alignment, offset in (
                    ("top_left", 0),
                    ("bottom_right", n - queries),
                ):
                    ours = attention(q, k, v, query_offset=offset, **options)
                    expected = attention(q, k, v, causal_alignment=alignment, **options)
                    assert all(map(torch.equal, ours, expected))


def test_route_takes_a_number_too():
    q, k, v = make()
    for offset in (3, torch.tensor(3), None):
        options = dict(is_causal=True, enable_gqa=True, query_offset=offset)
        assert multihead.route(q, k, v, **options) == ("fused", "")


def test_without_a_rule_of_positions_it_changes_nothing():
    """And exact leaves the call to PyTorch."""
    q, k, v = make()
    for mode in ("auto", "exact"):
        with multihead.backend(mode):
            ours = attention(q, k, v, query_offset=3, enable_gqa=True)
            assert torch.equal(ours, attention(q, k, v, enable_gqa=True))


def test_broadcast_queries():
    """A query head of 1 leaves the kernels; offsets mean the same."""
    q, k, v = make()
    options = dict(is_causal=True, query_offset=torch.tensor([2, 7]))
    ours = attention(q[:, :1], k[:, :1], v[:, :1], **options)
    expected = attention(q, k[:, :1], v[:, :1], **options)[:, :1]
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_an_int_that_changes_compiles_as_often_as_pytorch(grad):
    q, k, v = (x.requires_grad_(grad) for x in make())

    def ours(q, k, v, offset):
        return attention(q, k, v, is_causal=True, enable_gqa=True, query_offset=offset)

    def theirs(q, k, v, offset):
        keep = torch.arange(16) <= torch.arange(4)[:, None] + offset
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, keep, enable_gqa=True
        )

    counts = []
    for function in (ours, theirs):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for offset in range(1, 12):
            assert_close(compiled(q, k, v, offset), ours(q, k, v, offset))
        counts.append(counter.frame_count)
    assert counts[0] <= counts[1]


def test_exported_with_an_offset_tensor():
    class Decoding(torch.nn.Module):
        def forward(self, q, k, v, past):
            return attention(
                q, k, v, is_causal=True, enable_gqa=True, query_offset=past
            )

    q, k, v = make()
    program = torch.export.export(Decoding(), (q, k, v, torch.tensor([1, 2]))).module()
    for past in ([0, 11], [-3, 50]):
        inputs = (q, k, v, torch.tensor(past))
        assert_close(program(*inputs), Decoding()(*inputs))
    with pytest.raises(ValueError, match="query_offset must be between"):
        program(q, k, v, torch.tensor([0, 2**62 + 1]))


@pytest.mark.parametrize("option", ["query_offset", "key_lengths"])
def test_vmap_over_offsets_alone(option):
    """No loop over the mapped dimension, of which PyTorch would warn."""
    q, k, v = make()

    def one(n):
        return attention(q, k, v, is_causal=True, enable_gqa=True, **{option: n})

    each = torch.tensor([[2, 7], [1, 3], [0, 16]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*forms all attention weights")
        mapped = torch.vmap(one)(each)
    assert_close(mapped, torch.stack([one(n) for n in each]))


Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
LIMIT = 2**62
# name: (query_offset, other options, fragment of the message)
BAD = {
    "two alignments": (
        1,
        dict(causal_alignment="bottom_right"),
        'query_offset must not be given with causal_alignment "bottom_right", got both',
    ),
    "of another batch": (
        torch.tensor([1, 2, 3]),
        {},
        r"query_offset must have the shape \(\) or \(2,\), got \(3,\)",
    ),
    "two dimensions": (torch.tensor([[1], [2]]), {}, r"query_offset .* got \(2, 1\)"),
    "float": (
        torch.tensor(1.0),
        {},
        "query_offset must be an integer or integers, got Float",
    ),
    "bool": (True, {}, "query_offset .* got Bool"),
    "uint64": (torch.tensor(1, dtype=torch.uint64), {}, "query_offset .* got UInt64"),
    "too large": (
        LIMIT + 1,
        {},
        f"query_offset must be between -{LIMIT} and {LIMIT}, got {LIMIT + 1}",
    ),
    "beyond int64": (2**63, {}, f"query_offset .* {LIMIT}, got {2**63}"),
    "below int64": (-(2**63) - 1, {}, f"query_offset .* {LIMIT}, got -{2**63 + 1}"),
    "too small": (torch.tensor([0, -LIMIT - 1]), {}, f"got -{LIMIT + 1}"),
}


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("name", BAD)
def test_errors(name, mode):
    offset, options, text = BAD[name]
    options = dict(options, is_causal=True, query_offset=offset)
    with multihead.backend(mode):
        with pytest.raises(ValueError, match=text):
            attention(Q, K, K, **options)
        with pytest.raises(ValueError, match=text):
            multihead.attention_summary(Q, K, 2, **options)
