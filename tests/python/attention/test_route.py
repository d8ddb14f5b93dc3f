# SPDX-License-Identifier: MIT
"""What does not run fused: the question, the answer, and the warning."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from equal import assert_equal
from paths import fused_calls
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

import multihead
from multihead import route, scaled_dot_product_attention

Q = torch.randn(2, 4, 5, 8)


def test_nothing_is_against_an_ordinary_call():
    lengths = torch.tensor([3, 5])
    for options in (
        {},
        dict(is_causal=True, window=(1, 0), key_lengths=lengths, softcap=2.0),
        dict(attn_mask=torch.zeros(5, 5), sinks=torch.zeros(4), dropout_p=0.5),
        dict(attn_mask=causal_lower_right(5, 5)),
        dict(causal_alignment="bottom_right", alibi_slopes=torch.zeros(4)),
    ):
        assert route(Q, Q, Q, **options) == ("fused", "")
        assert fused_calls(scaled_dot_product_attention, Q, Q, Q, **options)
    assert route(Q, Q, Q, None, 0.0, True, 0.5, True) == ("fused", "")


def test_it_takes_the_arguments_of_the_call_and_no_others():
    assert route(Q, Q, Q, return_lse=True, window=(1, 0)).reason == ""
    text = "route: arguments must be those of .*attention, got windw"
    with pytest.raises(TypeError, match=f"^{text}$"):
        route(Q, Q, Q, windw=3)
    with pytest.raises(ValueError, match="^route: query_offset must be betw"):
        route(Q, Q, Q, query_offset=2**63)


def test_reasons():
    five = Q[None]
    for tensors, reason in (
        ((Q.to("meta"),) * 3, "the kernels run on the CPU, a tensor is on meta"),
        ((Q.to(torch.float8_e5m2),) * 3, "there are kernels for float32, float64"),
        ((five,) * 3, "the kernels take 3-D and 4-D tensors, query is 5-D"),
        ((Q[0, 0],) * 3, "the kernels take 3-D and 4-D tensors, query is 2-D"),
        ((five, Q, Q), "query, key and value need broadcasting"),
        ((Q[:1], Q, Q), "query, key and value need broadcasting"),
        ((Q, Q, Q[:, :1]), "key and value have different numbers of heads"),
        ((Q.to_sparse(), Q, Q), "the kernels take dense tensors, one is Sparse"),
    ):
        assert route(*tensors).reason.startswith(reason)


def test_ways():
    lengths = torch.tensor([3, 5])
    meta = (Q.to("meta"),) * 3
    for mode, tensors, options, way in (
        ("auto", (Q, Q, Q), {}, "fused"),
        ("fused", (Q, Q, Q), dict(key_lengths=lengths), "fused"),
        ("exact", (Q, Q, Q), {}, "pytorch"),
        ("exact", (Q, Q, Q), dict(return_lse=True), "definition"),
        ("exact", (Q, Q, Q), dict(key_lengths=lengths), "definition"),
        ("auto", (Q[None],) * 3, {}, "pytorch"),
        ("auto", (Q, Q, Q[:, :1]), {}, "definition"),
        ("auto", meta, {}, "pytorch"),
        ("auto", meta, dict(softcap=2.0), "definition"),
        ("fused", meta, {}, "refused"),
    ):
        with multihead.backend(mode):
            got = route(*tensors, **options)
        assert got.way == way and bool(got.reason) == (way != "fused")
        if way == "refused":
            text = f'backend "fused" cannot run this call: {got.reason}'
            with multihead.backend(mode), pytest.raises(RuntimeError, match=text):
                scaled_dot_product_attention(*tensors, **options)


def test_transforms_are_a_reason_of_what_they_transform():
    reasons = []

    def function(q):
        reasons.append(route(q, q, q).reason)
        return scaled_dot_product_attention(q, q, q).sum()

    torch.vmap(function)(Q)
    torch.func.grad(function)(Q)
    torch.func.jvp(function, (Q,), (Q,))
    transform = "a transform of torch.func (vmap, grad) is at work"
    assert reasons == [transform] * 3


# --- The warning -------------------------------------------------------------------------

SLOW = {
    "vmap": (
        lambda: torch.vmap(lambda q: scaled_dot_product_attention(q, q, q))(Q),
        "scaled_dot_product_attention: .* a transform of torch.func",
    ),
    "grad": (
        lambda: torch.func.grad(lambda q: scaled_dot_product_attention(q, q, q).sum())(
            Q
        ),
        "scaled_dot_product_attention: .* a transform of torch.func",
    ),
    "five dimensions": (
        lambda: scaled_dot_product_attention(*[Q[None]] * 3),
        "scaled_dot_product_attention: .* query is 5-D",
    ),
    "broadcasting": (
        lambda: scaled_dot_product_attention(Q[:1], Q, Q),
        "scaled_dot_product_attention: .* need broadcasting",
    ),
    "layer": (
        lambda: torch.vmap(multihead.MultiheadAttention(8, 2))(*[Q] * 3),
        "multi_head_attention_forward: .* a transform of torch.func",
    ),
    "summary": (
        lambda: torch.vmap(lambda q: multihead.attention_summary(q, q, 1))(Q),
        "attention_summary: .* a transform of torch.func",
    ),
}


@pytest.fixture
def every_warning():
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.parametrize("name", SLOW)
def test_a_call_that_forms_all_weights_says_so(name, every_warning):
    call, text = SLOW[name]
    with pytest.warns(UserWarning, match=text) as caught:
        call()
    assert "forms all attention weights" in str(caught[0].message)
    assert caught[0].filename == __file__
    with multihead.backend("exact"), warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_what_runs_fused_or_is_pytorchs_does_not_warn(every_warning):
    meta = Q.to("meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_dot_product_attention(Q, Q, Q, is_causal=True)
        scaled_dot_product_attention(meta, meta, meta)
        multihead.MultiheadAttention(8, 2)(*[Q[0]] * 3)
        x = Q.clone().requires_grad_()
        out = scaled_dot_product_attention(x, x, x).sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        first.sum().backward()


def test_it_is_said_once():
    """Shapes may differ from call to call; the reason is the same."""
    code = (
        "import torch, warnings, multihead\n"
        "attend = multihead.scaled_dot_product_attention\n"
        "warnings.simplefilter('always')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    for length in (2, 3, 4):\n"
        "        q = torch.randn(1, 2, 3, length, 8)\n"
        "        attend(q, q, q)\n"
        "        torch.vmap(lambda q: attend(q, q, q))(q[0])\n"
        "print(len(caught))\n"
        "warnings.simplefilter('error')\n"
        "try:\n"
        "    attend(q[0, :1], q[0], q[0])\n"
        "except UserWarning as error:\n"
        "    print('need broadcasting' in str(error))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["2", "True"]


def test_what_shows_a_warning_may_call_again():
    code = (
        "import faulthandler, torch, warnings, multihead\n"
        "attend = multihead.scaled_dot_product_attention\n"
        "q = torch.randn(1, 2, 3, 5, 8)\n"
        "def show(*args, **kwargs):\n"
        "    attend(q[None], q[None], q[None])\n"
        "    print('shown')\n"
        "warnings.showwarning = show\n"
        "warnings.simplefilter('always')\n"
        "faulthandler.dump_traceback_later(60, exit=True)\n"
        "attend(q, q, q)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "shown" in run.stdout, run.stderr


def test_a_call_that_fails_does_not_warn(every_warning):
    one = torch.randn(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises((IndexError, RuntimeError)):
            scaled_dot_product_attention(one, one, one)


# --- The ways of calls that PyTorch has --------------------------------------------------


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_exact_keeps_pytorchs_bits_where_both_alignments_are_one(alignment):
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 4, 33, 16, dtype=dtype, requires_grad=True)
        with multihead.backend("exact"):
            out = scaled_dot_product_attention(
                q, q, q, is_causal=True, causal_alignment=alignment
            )
        expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert_equal(out, expected)
        name = type(expected.grad_fn).__name__
        assert type(out.grad_fn).__name__ == name


def test_the_operator_that_a_profiler_shows():
    """As docs/kernels.md names it."""
    from torch.profiler import profile

    x = Q.clone().requires_grad_()
    with profile() as profiler:
        scaled_dot_product_attention(x, x, x).sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {
        "multihead::fused_attention",
        "multihead::fused_attention_backward",
    } <= names
    with profile() as profiler:
        torch.vmap(lambda q: scaled_dot_product_attention(q, q, q))(Q)
    names = {event.key for event in profiler.key_averages()}
    assert "multihead::fused_attention" not in names and "aten::bmm" in names


def test_kernels_of_another_device_are_found_where_they_are_registered():
    """A room beside ops/cpu registers them; nothing else has to know of it."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, 8, device="cuda")
        assert route(q, q, q).reason.startswith("the kernels run on the CPU")
        library = torch.library.Library("multihead", "IMPL")
        operators = ("fused_attention", "fused_attention_backward")
        operators += ("attention_weights", "fused_attention_summary")
        try:
            for name in operators:
                assert route(q, q, q).way == "pytorch"
                library.impl(name, lambda *_: None, "CUDA")
            assert route(q, q, q, is_causal=True) == ("fused", "")
            out, lse = scaled_dot_product_attention(q, q, q, return_lse=True)
            assert (out.shape, lse.dtype) == (q.shape, torch.float32)
            torch.set_autocast_enabled("cuda", True)  # PyTorch's context asks for one
            assert scaled_dot_product_attention(q, q, q).dtype == torch.float16
        finally:
            torch.set_autocast_enabled("cuda", False)
            library._destroy()
        assert route(q, q, q).way == "pytorch"
