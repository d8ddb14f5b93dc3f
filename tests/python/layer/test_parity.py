# SPDX-License-Identifier: MIT
"""backend("exact") against torch.nn.MultiheadAttention: the same bits.

Outputs, weights, strides, gradients of inputs, masks and parameters, and the
final state of the random generator, in random configurations.
"""

import collections
import os

import parity
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead

LONG = bool(os.environ.get("MULTIHEAD_LONG"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PER_TEST = 100
TESTS = 200 if LONG else 22


def assert_same_bits(seeds, dtypes, make_context=lambda: None):
    for seed in seeds:
        c = parity.draw(seed, dtypes)
        theirs = parity.run(torch.nn.MultiheadAttention, c, make_context())
        with multihead.backend("exact"):
            ours = parity.run(multihead.MultiheadAttention, c, make_context())
        assert not list(parity.differences(ours, theirs)), c


@pytest.mark.parametrize("part", range(TESTS))
def test_random_configurations(part):
    seeds = range(part * PER_TEST, (part + 1) * PER_TEST)
    assert_same_bits(seeds, DTYPES)


def test_cpu_autocast():
    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert_same_bits(range(20_000, 20_150), (torch.float32,), autocast)


def test_two_threads():
    torch.set_num_threads(2)
    try:
        assert_same_bits(range(40_000, 40_150), (torch.float32, torch.float64))
    finally:
        torch.set_num_threads(1)


def test_math_backend_of_pytorch():
    def math():
        return sdpa_kernel(SDPBackend.MATH)

    assert_same_bits(range(30_000, 30_100), (torch.float32, torch.float64), math)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("given", ["static_k", "static_v", "both"])
@pytest.mark.parametrize("zero_attn", [True, False])
def test_static_keys_and_values(given, need_weights, zero_attn):
    """The functional with static_k and static_v in place of what is projected."""
    E, H, B, L, S = 12, 3, 2, 4, 7
    torch.manual_seed(5)
    static = {n: torch.randn(B * H, S, E // H) for n in ("static_k", "static_v")}
    if given != "both":
        static = {given: static[given]}
    arguments = dict(
        query=torch.randn(L, B, E),
        key=torch.randn(S, B, E),
        value=torch.randn(S, B, E),
        embed_dim_to_check=E,
        num_heads=H,
        in_proj_weight=torch.randn(3 * E, E),
        in_proj_bias=torch.randn(3 * E),
        bias_k=None,
        bias_v=None,
        add_zero_attn=zero_attn,
        dropout_p=0.0,
        out_proj_weight=torch.randn(E, E),
        out_proj_bias=torch.randn(E),
        key_padding_mask=torch.rand(B, S) < 0.3,
        need_weights=need_weights,
        **static,
    )
    theirs = torch.nn.functional.multi_head_attention_forward(**arguments)
    with multihead.backend("exact"):
        ours = multihead.multi_head_attention_forward(**arguments)
    names = ("out", "weights")
    assert not list(
        parity.differences(dict(zip(names, ours)), dict(zip(names, theirs)))
    )
    by_default = multihead.multi_head_attention_forward(**arguments)
    torch.testing.assert_close(by_default, theirs)


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("zero_attn", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_over_static_keys(mode, zero_attn, need_weights):
    """The causal mask has the length of the static keys, not of the projected."""
    E, H, B, L, S = 8, 2, 2, 4, 7
    torch.manual_seed(6)
    arguments = dict(
        embed_dim_to_check=E,
        num_heads=H,
        in_proj_weight=torch.randn(3 * E, E),
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=zero_attn,
        dropout_p=0.0,
        out_proj_weight=torch.randn(E, E),
        out_proj_bias=None,
        need_weights=need_weights,
        static_k=torch.randn(B * H, S, E // H),
        static_v=torch.randn(B * H, S, E // H),
    )
    query, key = torch.randn(L, B, E), torch.randn(5, B, E)
    with multihead.backend(mode):
        out, _ = multihead.multi_head_attention_forward(
            query, key, key, **arguments, is_causal=True
        )
    long = torch.randn(S, B, E)
    expected, _ = torch.nn.functional.multi_head_attention_forward(
        query,
        long,
        long,
        **arguments,
        attn_mask=torch.ones(L, S, dtype=torch.bool).triu(1),
    )
    torch.testing.assert_close(out, expected)


def test_configurations_cover_every_class():
    """A guard against a generator that stopped drawing what the tests claim."""
    seen = collections.Counter()
    for seed in range(TESTS * PER_TEST):
        c = parity.draw(seed, (torch.float32,))
        native = not c.grad and not c.training and c.sharing == "self"
        seen["native"] += native and c.bias and c.batch_first and c.batched
        seen["separate"] += c.kdim is not None
        seen["gradients"] += c.grad
        seen["3-D masks"] += c.attn_mask != "none" and c.mask_rank == 3
        seen["both masks"] += c.attn_mask != "none" and c.padding != "none"
        seen["hints"] += c.hint and not c.need_weights
        seen["dropout"] += c.training and c.dropout > 0
        seen["appended keys"] += c.add_bias_kv or c.add_zero_attn
        seen["unbatched"] += not c.batched
        seen["odd addresses"] += c.layout == "odd"
        seen["odd parameters"] += c.odd_parameters
        seen["long"] += c.query_length > 100
        seen["batches above four"] += c.batch > 4 and c.batched
        seen["bias_kv with gradients"] += c.add_bias_kv and c.grad and c.batch > 4
    assert min(seen.values()) >= 60, seen


def test_fast_path_is_taken_where_pytorch_takes_it(monkeypatch):
    """The native operator runs in eval without gradients, and not otherwise."""
    mha = multihead.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)

    def native_calls(**kwargs) -> int:
        with torch.profiler.profile() as profile:
            mha(x, x, x, **kwargs)
        names = [event.key for event in profile.key_averages()]
        return names.count("aten::_native_multi_head_attention")

    blocked = torch.ones(3, 3, dtype=torch.bool).triu(1)
    with multihead.backend("exact"):
        assert native_calls() == 0  # parameters require gradients
        with torch.no_grad():
            assert native_calls() == 1
            assert native_calls(attn_mask=blocked) == 1
            assert native_calls(attn_mask=blocked.float()) == 0
            assert native_calls(is_causal=True) == 0
            monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: 0)
            assert native_calls() == 0


@pytest.mark.parametrize("masked", [False, True])
def test_inference_takes_the_native_path_under_exact_only(masked):
    """What docs/parity.md says of a CPU: auto runs the fused kernels there."""
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ours = multihead.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.rand(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool) if masked else None

    def ran(mha, backend) -> set[str]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.no_grad(), multihead.backend(backend):
            with torch.profiler.profile(activities=activities) as profile:
                mha(x, x, x, key_padding_mask=padding)
        events = {event.key for event in profile.key_averages()}
        names = ("aten::_native_multi_head_attention", "multihead::fused_attention")
        return events.intersection(names)

    assert ran(theirs, "auto") == {"aten::_native_multi_head_attention"}
    assert ran(ours, "exact") == {"aten::_native_multi_head_attention"}
    assert ran(ours, "auto") == {"multihead::fused_attention"}
