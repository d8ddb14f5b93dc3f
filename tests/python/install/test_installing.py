# SPDX-License-Identifier: MIT
"""Installing and uninstalling: often, in threads, in processes, and what is counted."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch
from budget import ways
from equal import assert_equal
from test_install import B, L, attention, tensors

import multihead

# --- Installing and uninstalling -----------------------------------------------------


def test_installing_twice_is_once():
    assert not multihead.is_installed()
    multihead.install()
    multihead.install()
    assert multihead.is_installed()
    multihead.uninstall()
    assert not multihead.is_installed()
    multihead.uninstall()
    assert not multihead.is_installed()
    multihead.install()
    assert multihead.is_installed()
    multihead.uninstall()


def test_blocks_may_be_nested():
    with multihead.installed():
        with multihead.installed():
            attention(*tensors())
        assert multihead.is_installed()
        attention(*tensors())
    assert not multihead.is_installed()
    attention(*tensors())
    assert ways(None) == {"fused": 2}


def test_blocks_and_install_together():
    multihead.install()
    with multihead.installed():
        multihead.uninstall()
        assert multihead.is_installed()
    assert not multihead.is_installed()
    with multihead.installed():
        multihead.install()
    assert multihead.is_installed()
    multihead.uninstall()


def test_a_block_ends_with_an_error_too():
    with pytest.raises(KeyError), multihead.installed():
        raise KeyError
    assert not multihead.is_installed()


def test_what_was_not_entered_cannot_be_left():
    ops = torch.ops.multihead
    text = "leave_installed: options must be those of an enter_installed before it, got"
    with pytest.raises(RuntimeError, match=f"{text} linear=false"):
        ops.leave_installed(False)
    with multihead.installed():
        with pytest.raises(RuntimeError, match=f"{text} linear=true"):
            ops.leave_installed(True)
        assert multihead.is_installed()
    assert not multihead.is_installed()


def run(code: str, **environment) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_changes_nothing_and_installing_prints_nothing():
    """Not even PyTorch's warning that a kernel takes the place of another."""
    code = """
import torch
x = torch.randn(1, 2, 5, 8)
before = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
import multihead
assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before
torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(multihead.stats())
multihead.install()
torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(multihead.stats().calls("fused", "installed"))
multihead.uninstall()
assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before
"""
    assert run(code) == "no calls of attention\n1\n"


def test_a_program_may_end_while_installed():
    code = """
import torch, multihead
multihead.install()
x = torch.randn(1, 2, 5, 8, requires_grad=True)
out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(multihead.stats().calls("fused"))
"""
    assert run(code) == "1\n"


CYCLES = """
import torch, multihead
torch.set_num_threads(1)
attention = torch.nn.functional.scaled_dot_product_attention
x = torch.randn(1, 2, 5, 8, requires_grad=True)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4

def cycle(times):
    for _ in range(times):
        multihead.install()
        attention(x, x, x).sum().backward()
        multihead.uninstall()
        attention(x, x, x)

theirs = attention(x, x, x)
cycle(100)
before = resident()
cycle(1000)
print(resident() - before)
assert torch.equal(attention(x, x, x), theirs)
assert multihead.stats().calls() == 1100
"""


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="memory is read from /proc"
)
def test_a_thousand_cycles_leak_nothing():
    """Less than 1 KiB a cycle: a registration that stayed would be more."""
    assert int(run(CYCLES)) < 1000


def test_threads_call_while_others_install():
    inputs = tensors()
    theirs = attention(*inputs)
    with multihead.installed():
        ours = attention(*inputs)
    assert not torch.equal(ours, theirs)  # else this test could not see a mixture
    wrong, ended = [], threading.Event()

    def call():
        while not ended.is_set():
            out = attention(*inputs)
            if not (torch.equal(out, ours) or torch.equal(out, theirs)):
                wrong.append(out)

    def cycle():
        for _ in range(300):
            with multihead.installed():
                assert multihead.is_installed()

    callers = [threading.Thread(target=call) for _ in range(2)]
    changers = [threading.Thread(target=cycle) for _ in range(2)]
    for thread in callers + changers:
        thread.start()
    for thread in changers:
        thread.join()
    ended.set()
    for thread in callers:
        thread.join()
    assert wrong == []
    assert not multihead.is_installed()
    assert_equal(attention(*inputs), theirs)
    assert multihead.stats().calls("fused") > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_children_forked_while_others_install_do_not_hang():
    done = threading.Event()
    x = torch.randn(5, 8)

    def others():
        while not done.is_set():
            with multihead.installed():
                attention(x, x, x)  # 2-D: counted under a lock

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                multihead.install()
                multihead.stats()
                os._exit(0)
            until = time.monotonic() + 30
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.002)
    finally:
        done.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_child_has_its_own():
    inputs = tensors()
    theirs = attention(*inputs)
    with multihead.installed():
        ours = attention(*inputs)
        child = os.fork()
        if child == 0:
            good = torch.equal(attention(*inputs), ours)
            for _ in range(3):
                with multihead.installed():
                    good = good and torch.equal(attention(*inputs), ours)
            os._exit(0 if good and multihead.is_installed() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_equal(attention(*inputs), ours)
    assert_equal(attention(*inputs), theirs)


# --- Counting ------------------------------------------------------------------------


def test_sources():
    x = torch.randn(B, L, 16)
    layer = multihead.MultiheadAttention(16, 4, batch_first=True)
    inputs = tensors()
    with multihead.installed():
        attention(*inputs)
        attention(*(y[0, 0] for y in inputs))
        multihead.scaled_dot_product_attention(*inputs)
        layer(x, x, x, need_weights=False)
        torch.ops.multihead.scaled_dot_product_attention(*inputs)
    counts = multihead.stats()
    assert [(c.source, c.way, c.calls) for c in counts] == [
        ("function", "fused", 2),
        ("module", "fused", 1),
        ("installed", "fused", 1),
        ("installed", "pytorch", 1),
    ]
    assert counts.calls() == 5 and counts.calls("fused") == 4
    assert counts.calls("pytorch", "installed") == 1 and counts.calls("exact") == 0


def test_the_function_under_exact_is_counted_once():
    with multihead.installed(), multihead.backend("exact"):
        ours = multihead.scaled_dot_product_attention(*tensors())
    torch.manual_seed(0)
    assert_equal(ours, attention(*tensors()))
    assert [(c.source, c.way) for c in multihead.stats()] == [("function", "pytorch")]


def test_printing_and_reset():
    assert str(multihead.stats()) == "no calls of attention"
    with multihead.installed():
        for _ in range(11):
            attention(*tensors())
        attention(*(x[0, 0] for x in tensors()))
    reason = "the kernels take 3-D and 4-D tensors, query is 2-D"
    assert str(multihead.stats()) == repr(multihead.stats())
    assert str(multihead.stats()).split("\n") == [
        "calls  source     way      reason",
        "   11  installed  fused",
        f"    1  installed  pytorch  {reason}",
    ]
    multihead.reset_stats()
    assert multihead.stats() == ()


def test_counting_in_threads():
    inputs = tensors()

    def call():
        for _ in range(100):
            attention(*inputs)
            attention(*(x[0, 0] for x in inputs))

    with multihead.installed():
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [c.calls for c in multihead.stats()] == [400, 400]
