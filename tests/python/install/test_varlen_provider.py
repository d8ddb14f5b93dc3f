# SPDX-License-Identifier: MIT
"""torch.nn.attention.varlen on the CPU: installed, and as PyTorch's provider."""

import re
import subprocess
import sys

import pytest
import sequences
import torch
from budget import ways
from equal import assert_equal
from torch.nn import attention as registry
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.testing import assert_close

import multihead
from multihead.integrations import varlen

LSE = AuxRequest(lse=True)
WINDOWS = {(-1, -1): {}, (-1, 0): {"is_causal": True}, (9, 0): {}, (5, 2): {}}
flash = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    multihead.reset_stats()
    yield
    assert not is_active()


@pytest.fixture
def active():
    with multihead.installed(varlen=True):
        yield


def is_active():
    name = "aten::_flash_attention_forward"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def batch_of(dtype=torch.float32, **rules):
    return sequences.make([3, 70, 0, 1], [5, 70, 2, 9], (4, 2), dtype=dtype, **rules)


def pytorchs(batch, window=(-1, 0), **more):
    longest = (max(batch.queries), max(batch.keys))
    call = dict(window_size=window, enable_gqa=True, return_aux=LSE) | more
    return varlen_attn(*batch.tensors, *batch.bounds, *longest, **call)


# --- Being active --------------------------------------------------------------------


def test_without_it_pytorch_raises():
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        pytorchs(batch_of())


def test_installed_until_uninstalled():
    multihead.install()
    assert not is_active()
    multihead.install(varlen=True)
    multihead.install()
    assert is_active()
    with multihead.installed(varlen=True):
        multihead.uninstall()
        assert is_active()
    assert not is_active()


def test_as_a_provider():
    varlen.register()
    assert "multihead" in registry.list_flash_attention_impls()
    assert not is_active()
    for _ in range(2):  # activating twice is activating once
        registry.activate_flash_attention_impl("multihead")
    assert registry.current_flash_attention_impl() == "multihead"
    assert is_active() and not multihead.is_installed()
    pytorchs(batch_of())
    multihead.uninstall()
    assert is_active()  # each way is undone by its own
    registry.restore_flash_attention_impl()
    assert ways("installed") == {"fused": 1}


def test_leaving_what_was_not_entered():
    ops = torch.ops.multihead
    with pytest.raises(RuntimeError, match="leave_varlen: calls must follow"):
        ops.leave_varlen()
    ops.enter_installed()
    with pytest.raises(RuntimeError, match="got linear=false, varlen=true"):
        ops.leave_installed(varlen=True)
    ops.leave_installed()


def test_importing_changes_nothing():
    code = (
        "import multihead, sys; assert 'torch.nn.attention.varlen' not in sys.modules;"
        "from torch.nn.attention import list_flash_attention_impls as impls;"
        "import multihead.integrations.varlen; assert 'multihead' not in impls()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- What it computes ----------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_varlen_attention(active, dtype, window):
    rules = {"window": window} | WINDOWS[window]
    ours = batch_of(dtype, scale=0.3, **rules).with_gradients()
    theirs = sequences.Batch(ours.queries, ours.keys, ours.tensors)
    out, lse = pytorchs(theirs, window, scale=0.3)
    expected = sequences.ragged(ours)
    assert_equal((out, lse), expected)
    assert ways("installed") == {"fused": 1}
    by = torch.randn_like(out)
    assert_equal(
        torch.autograd.grad(out, theirs.tensors, by),
        torch.autograd.grad(expected[0], ours.tensors, by),
    )


def test_gradients_in_float64(active):
    batch = sequences.make([2, 3], [3, 4], (2, 1), (3, 3), torch.float64)
    batch = batch.with_gradients()

    def function(*tensors):
        batch.tensors = tensors
        return pytorchs(batch, return_aux=None)

    assert torch.autograd.gradcheck(function, batch.leaves)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("told_by", ["seqused_k", "cu_seq_k"])
def test_pages(active, page, told_by):
    batch = batch_of(is_causal=True)
    pools, places = sequences.in_pages(batch, page)
    query, keys = batch.bounds
    used = {"seqused_k": places["key_lengths"].int()} if told_by == "seqused_k" else {}
    results = varlen_attn(
        batch.tensors[0],
        *pools,
        query,
        None if used else keys,
        max(batch.queries),
        max(batch.keys),
        window_size=(-1, 0),
        enable_gqa=True,
        return_aux=LSE,
        block_table=places["block_table"],
        num_splits=1,
        **used,
    )
    assert_equal(results, sequences.ragged(batch))


def test_used_keys(active):
    used = torch.tensor([2, 70, 0, 5], dtype=torch.int32)
    batch = batch_of(key_lengths=used)
    assert_equal(pytorchs(batch, (-1, -1), seqused_k=used), sequences.ragged(batch))


def test_into_a_given_tensor(active):
    batch = batch_of(is_causal=True)
    expected = sequences.ragged(batch)
    out = torch.full_like(batch.tensors[0], float("nan"))
    arguments = (*batch.tensors, *batch.bounds, 70, 70)
    rules = dict(window_size=(-1, 0), enable_gqa=True)
    result, lse = varlen_attn_out(out, *arguments, **rules, return_aux=LSE)
    assert result is out
    assert_equal((out, lse), expected)
    with pytest.raises(RuntimeError, match="varlen_attn_out: out must be Float"):
        varlen_attn_out(out[1:], *arguments, **rules)


def test_under_autocast_it_computes_in_the_dtype_that_it_is_given(active):
    """As PyTorch's operators, which are below autocast."""
    batch = batch_of().with_gradients()
    expected = pytorchs(batch)
    wanted = torch.autograd.grad(expected[0].sum(), batch.tensors)
    with torch.autocast("cpu", torch.bfloat16):
        results = pytorchs(batch)
    assert_equal(results, expected)
    assert_equal(torch.autograd.grad(results[0].sum(), batch.tensors), wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(active, backend):
    batch = batch_of().with_gradients()
    expected = pytorchs(batch)
    by = torch.randn_like(expected[0])
    wanted = torch.autograd.grad(expected[0], batch.tensors, by)
    compiled = torch.compile(pytorchs, backend=backend, fullgraph=True)
    results = compiled(batch)
    assert_equal(results, expected)
    assert_equal(torch.autograd.grad(results[0], batch.tensors, by), wanted)


def test_dropout_and_slopes_of_the_operator(active):
    """varlen_attn has neither; the operators do."""
    batch = batch_of(dropout_p=0.3, is_causal=True, alibi_slopes=torch.rand(4, 4))
    slopes = batch.rules["alibi_slopes"]
    torch.manual_seed(1)
    expected = sequences.ragged(batch)
    torch.manual_seed(1)
    out, lse, *_ = flash._flash_attention_forward(
        *batch.tensors, *batch.bounds, 70, 70, 0.3, True, False, alibi_slopes=slopes
    )
    assert_equal((out, lse), expected)
    batch = batch_of(dropout_p=0.3, is_causal=True).with_gradients()
    torch.manual_seed(1)
    expected = torch.autograd.grad(sequences.ragged(batch)[0].sum(), batch.tensors)
    torch.manual_seed(1)
    out, *_ = flash._flash_attention_forward(
        *batch.tensors, *batch.bounds, 70, 70, 0.3, True, False
    )
    assert_close(torch.autograd.grad(out.sum(), batch.tensors), expected)


PAGES = torch.zeros(3, 4, 2, 16)
TABLE = torch.tensor([[0], [1], [2], [0]], dtype=torch.int32)
USED = torch.tensor([5, 70, 2, 10], dtype=torch.int32)
# name: (arguments that differ, exception, text)
BAD = {
    "no bounds": (
        dict(cu_seq_q=None),
        ValueError,
        "cu_seq_q must be given on the CPU, got None",
    ),
    "bounds of queries": (
        dict(cu_seq_q=torch.tensor([0, 1, 2, 3, 4])),
        ValueError,
        "cu_seq_q must end with the 74 rows of query, got 4",
    ),
    "bounds of keys": (
        dict(cu_seq_k=torch.tensor([0, 1, 2, 3, 4])),
        ValueError,
        "cu_seq_k must end with the 86 rows of key, got 4",
    ),
    "used keys": (
        dict(seqused_k=USED),
        ValueError,
        "seqused_k must be between 0 and the 9 rows of sequence 3, got 10",
    ),
    "used keys of another batch": (
        dict(seqused_k=USED[1:]),
        ValueError,
        "seqused_k must have the shape (N,), got (3,)",
    ),
    "no lengths": (
        dict(key=PAGES, value=PAGES, block_table=TABLE, cu_seq_k=None),
        ValueError,
        "seqused_k must be given with block_table, got None",
    ),
    "keys beyond the pages": (
        dict(key=PAGES, value=PAGES, block_table=TABLE, seqused_k=USED),
        ValueError,
        "seqused_k must be between 0 and the 4 rows of sequence 0, got 5",
    ),
    "bounds beyond the pages": (
        dict(key=PAGES, value=PAGES, block_table=TABLE),
        ValueError,
        "cu_seq_k.diff() must be between 0 and the 4 rows of sequence 0, got 5",
    ),
    "no such page": (
        dict(key=PAGES, value=PAGES, block_table=TABLE + 2, seqused_k=USED // 70),
        ValueError,
        "block_table must name pages from 0 to 2, got 3 for page 0 of sequence 1",
    ),
    "window": (
        dict(window_size=(-2, 0)),
        ValueError,
        "window_size must be two sizes of at least -1, got (-2, 0)",
    ),
    "dtype": (
        dict(key=torch.zeros(86, 2, 16).double()),
        RuntimeError,
        "key must have the dtype of query, got Double and Float",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_arguments_of_varlen_attn(active, name):
    more, kind, text = BAD[name]
    batch = batch_of()
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
    good = dict(zip(names, (*batch.tensors, *batch.bounds), strict=True))
    with pytest.raises(kind, match=re.escape(f"varlen_attn: {text}")):
        varlen_attn(**good | dict(max_q=70, max_k=70, enable_gqa=True) | more)
