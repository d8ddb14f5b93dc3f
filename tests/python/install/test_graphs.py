# SPDX-License-Identifier: MIT
"""install() and graphs: torch.compile with its caches in memory and on disk, and
torch.export, whose graphs stay PyTorch's."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from budget import assert_as_good, ways
from equal import assert_equal
from test_fused_graphs import Graphs
from torch import nn

import multihead

attention = nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch.compiler.reset()


def tensors(grad=False):
    return [torch.randn(2, 4, 5, 8, requires_grad=grad) for _ in range(3)]


def calls_of(graph) -> list[str]:
    """The operators of attention in a graph."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    names = (t.name() for t in targets if isinstance(t, torch._ops.OpOverload))
    return [name for name in names if "attention" in name]


def test_a_graph_is_found_again_in_its_state():
    with multihead.installed():
        pass  # the first time is another test
    graphs, inputs = Graphs(), tensors()
    compiled = graphs.compile(attention)
    theirs = compiled(*inputs)
    with multihead.installed():
        ours = compiled(*inputs)
    again = compiled(*inputs)
    assert graphs.fused == [[], ["fused_attention"]]
    assert_equal(again, theirs)
    assert_as_good(ours, theirs, attention(*(x.double() for x in inputs)))
    assert ways(None) == {"fused": 1}


# A process of its own, in which nothing was ever installed.
BEFORE = """
import torch, multihead
from torch._dynamo.utils import counters
compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention,
                         backend="aot_eager")
x = torch.randn(2, 4, 5, 8)
theirs = compiled(x, x, x)
with multihead.installed():
    ours = compiled(x, x, x)
for _ in range(2):
    assert torch.equal(compiled(x, x, x), theirs)
with torch.no_grad():
    assert torch.equal(ours, multihead.scaled_dot_product_attention(x, x, x))
print(counters["stats"]["unique_graphs"])
"""


def test_what_was_compiled_before_the_first_install_is_compiled_again():
    done = subprocess.run(
        [sys.executable, "-c", BEFORE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"


def test_graphs_of_both_states_are_kept():
    graphs, inputs = Graphs(), tensors()
    compiled, other = graphs.compile(attention), graphs.compile(torch.sin)
    for _ in range(3):
        with multihead.installed():
            compiled(*inputs)
            other(inputs[0])
        compiled(*inputs)
        other(inputs[0])
    assert len(graphs.fused) == 3  # two of attention, one of what has none
    assert ways(None) == {"fused": 3}


# A process of its own: a crash must not end this one.
THREADS = """
import threading, time
import torch, multihead
torch.set_num_threads(1)
attention = torch.nn.functional.scaled_dot_product_attention
x = torch.randn(1, 2, 5, 64)
theirs = attention(x, x, x)
with torch.no_grad():
    ours = multihead.scaled_dot_product_attention(x, x, x)
assert not torch.equal(ours, theirs)
functions = [
    torch.compile(lambda x, y=float(y): attention(x, x, x) * 1 + 0 * y,
                  backend="aot_eager")
    for y in range(6)
]
for function in functions:  # before the first install()
    function(x)
wrong, ended = [], threading.Event()

def call():
    while not ended.is_set():
        for function in functions:
            out = function(x)
            if not (torch.equal(out, ours) or torch.equal(out, theirs)):
                wrong.append(out)

threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
until = time.monotonic() + 4
while time.monotonic() < until:
    with multihead.installed():
        time.sleep(0.005)
    time.sleep(0.005)
ended.set()
for thread in threads:
    thread.join()
assert wrong == []
print(multihead.stats().calls("fused", "operator") > 0)
"""


def test_threads_run_compiled_code_while_others_install():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", THREADS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_training_in_a_graph():
    graphs, inputs = Graphs(), tensors(grad=True)
    compiled = graphs.compile(lambda *x: attention(*x, is_causal=True))

    def gradients(call, inputs):
        return torch.autograd.grad(call(*inputs).square().sum(), inputs)

    theirs = gradients(compiled, inputs)
    with multihead.installed():
        ours = gradients(compiled, inputs)
    assert graphs.fused[-2:] == [["fused_attention"], ["fused_attention_backward"]]
    double = [x.detach().double().requires_grad_() for x in inputs]
    exact = gradients(lambda *x: attention(*x, is_causal=True), double)
    assert_as_good(ours, theirs, exact)


def encoder(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return layer.train(training)


@pytest.mark.parametrize("training", [True, False])
def test_layers_in_a_graph(training):
    graphs, layer = Graphs(), encoder(training)
    compiled = graphs.compile(layer)
    x = torch.randn(2, 5, 16)
    with torch.set_grad_enabled(training):
        theirs = layer(x)
        with multihead.installed():
            ours = compiled(x)
        exact = encoder(training).double()(x.double())
    assert_as_good(ours.detach(), theirs.detach(), exact.detach())
    assert sum(ways(None).values()) == ways(None)["fused"] == 1


def test_dynamic_shapes():
    compiled = torch.compile(attention, backend="aot_eager", dynamic=True)
    with multihead.installed():
        for length in (5, 9, 6):
            q = torch.randn(2, 4, length, 8)
            assert_equal(compiled(q, q, q), attention(q, q, q))
    assert set(ways(None)) == {"fused"}


# --- Inductor ------------------------------------------------------------------------

COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++")))),
    reason="inductor needs a C++ compiler",
)


@COMPILER
def test_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer = encoder(training=True)
    compiled = torch.compile(layer)
    x = torch.randn(2, 5, 16)

    def step(layer, x):
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        return out.detach(), tuple(p.grad.clone() for p in layer.parameters())

    theirs, exact = step(layer, x), step(encoder(True).double(), x.double())
    with multihead.installed():
        ours = step(compiled, x)
    assert ways(None) == {"fused": 1}
    assert_as_good(ours, theirs, exact, roundings=32)


# One process: a call that is compiled, with or without install(), and whether its
# graph came from the cache.
PROCESS = """
import sys, threading
import torch, multihead
from torch._dynamo.utils import counters
torch.manual_seed(0)
x = torch.randn(1, 2, 5, 8)

attention = torch.compile(torch.nn.functional.scaled_dot_product_attention)

for when in sys.argv[2:]:
    multihead.install() if when == "installed" else multihead.uninstall()
    multihead.reset_stats()
    counters.clear()
    if sys.argv[1] == "thread":
        thread = threading.Thread(target=attention, args=(x, x, x))
        thread.start()
        thread.join()
    else:
        attention(x, x, x)
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    print(when, multihead.stats().calls("fused"), hits)
"""


@COMPILER
@pytest.mark.parametrize("where", ["main", "thread"])
def test_caches_on_disk_know_what_is_installed(tmp_path, where):
    """Neither state is served graphs of the other, in this process or in another."""

    def run(*states):
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        }
        command = [sys.executable, "-c", PROCESS, where, *states]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    assert run("plain", "installed") == ["plain 0 0", "installed 1 0"]
    assert run("installed", "plain") == ["installed 1 1", "plain 0 1"]


def test_the_users_own_tag_stays():
    config = torch.compiler.config
    before = config.cache_key_tag
    with multihead.installed():
        within = config.cache_key_tag
    assert config.cache_key_tag == before != within
    config.cache_key_tag = "mine"
    try:
        with multihead.installed():
            assert config.cache_key_tag.startswith("mine ")
        assert config.cache_key_tag == "mine"
    finally:
        config.cache_key_tag = before


# --- torch.export --------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = encoder(training=False)

    def forward(self, x):
        y = self.layer(x)
        heads = y.unflatten(-1, (4, 4)).transpose(1, 2)
        return attention(heads, heads, heads, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_pytorchs_operators(strict):
    model, x = Model(), torch.randn(2, 5, 16)
    theirs = model(x)
    with multihead.installed():
        program = torch.export.export(model, (x,), strict=strict)
        found = calls_of(program.graph)
        assert "aten::scaled_dot_product_attention" in found
        assert not [name for name in found if name.startswith("multihead")]
        decomposed = program.run_decompositions()
        assert not [n for n in calls_of(decomposed.graph) if n.startswith("multihead")]
        multihead.reset_stats()
        ours = program.module()(x)
        assert set(ways(None)) == {"fused"}
    torch.testing.assert_close(ours, theirs)
    assert_equal(program.module()(x), theirs)
    torch.testing.assert_close(decomposed.module()(x), theirs)


@pytest.mark.parametrize("table", [None, {}], ids=["core", "nothing"])
def test_decompositions_are_pytorchs(table):
    """Also after an install(), which stays known to Python's dispatcher."""
    model, x = Model(), torch.randn(2, 5, 16)

    def operators():
        program = torch.export.export(model, (x,)).run_decompositions(table)
        return [str(node.target) for node in program.graph.nodes]

    with multihead.installed():
        within = operators()
    decomposed = not any("attention" in name for name in within)
    assert decomposed == (table is None)
    assert within == operators()
    code = f"""
import sys, torch
from torch import nn
sys.path[:0] = {sys.path}
import test_graphs, multihead
torch.manual_seed(0)
program = torch.export.export(test_graphs.Model(), (torch.randn(2, 5, 16),))
program = program.run_decompositions({table})
print([str(node.target) for node in program.graph.nodes])
assert not multihead._tracing._ATTENTION.py_kernels
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{within}\n"


def test_an_exported_program_runs_without_multihead(tmp_path):
    model, x = Model(), torch.randn(2, 5, 16)
    with multihead.installed():
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save((x, model(x)), tmp_path / "x.pt")
    code = """
import sys, torch
x, expected = torch.load("x.pt")
program = torch.export.load("model.pt2")
torch.testing.assert_close(program.module()(x), expected)
assert "multihead" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_fx_records_the_kernel():
    """A graph for this process, as torch.compile makes it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = tensors()
    with multihead.installed():
        graph = make_fx(attention)(*inputs)
        out = graph(*inputs)
        assert_equal(out, attention(*inputs))
    assert calls_of(graph.graph) == ["multihead::fused_attention"]
