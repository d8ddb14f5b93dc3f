# SPDX-License-Identifier: MIT
"""The projections of a layer by oneDNN, where MKL is the slower one."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from onednn import always, assert_as_exact, needs_onednn  # noqa: F401
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import multihead

# All products of the layer are taken: at least 2²⁵ multiply-adds.
N, L, E, HEADS = 2, 128, 384, 6


@pytest.fixture(autouse=True)
def _counted() -> None:
    multihead.reset_stats()


def products() -> int:
    return multihead.stats().calls("onednn", "linear")


def layers(**options: bool) -> tuple[multihead.MultiheadAttention, Tensor]:
    torch.manual_seed(0)
    ours = multihead.MultiheadAttention(E, HEADS, batch_first=True, **options)
    for parameter in ours.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return ours, torch.randn(N, L, E)


def results(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of x and of all parameters."""
    leaf = x.clone().requires_grad_()
    out = layer(leaf, leaf, leaf, need_weights=False)[0]
    inputs = (leaf, *layer.parameters())
    return (out, *torch.autograd.grad((out * torch.cos(x)).sum(), inputs))


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_results_and_gradients(bias: bool, batch_first: bool) -> None:
    layer, x = layers(bias=bias)
    layer.batch_first = batch_first
    ours = results(layer, x)
    assert products() == 6  # two, and two gradients of each
    with torch.backends.mkldnn.flags(enabled=False):
        pytorchs = results(layer, x)
    assert products() == 6
    exact = results(copy.deepcopy(layer).double(), x.double())
    for compared in zip(ours, pytorchs, exact):
        assert_as_exact(*compared)


@needs_onednn
def test_three_inputs_and_grouped_heads() -> None:
    layer, x = layers()
    others = torch.randn(N, 2 * L, E), torch.randn(N, 2 * L, E)
    with torch.no_grad():
        ours = layer(x, *others, need_weights=False)[0]
        assert products() == 4
        grouped = multihead.GroupedQueryAttention(E, HEADS, 2, batch_first=True)
        its = grouped(x, *others, need_weights=False)[0]
        assert products() == 6  # keys and values of two heads are small
        with torch.backends.mkldnn.flags(enabled=False):
            torch.testing.assert_close(ours, layer(x, *others, need_weights=False)[0])
            torch.testing.assert_close(its, grouped(x, *others, need_weights=False)[0])


@needs_onednn
def test_second_derivatives() -> None:
    layer, x = layers()

    def second(layer: nn.Module, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        out = layer(leaf, leaf, leaf, need_weights=False)[0]
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.in_proj_weight)[0]

    ours = second(layer, x)
    assert products() > 6
    with torch.backends.mkldnn.flags(enabled=False):
        pytorchs = second(layer, x)
    assert_as_exact(ours, pytorchs, second(copy.deepcopy(layer).double(), x.double()))


@needs_onednn
def test_frozen_parameters_have_no_products() -> None:
    layer, x = layers()
    layer.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf, leaf, leaf, need_weights=False)[0].sum().backward()
    assert products() == 4
    multihead.reset_stats()
    layer.out_proj.requires_grad_(True)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    assert products() == 3


@needs_onednn
def test_checkpoints_and_gradients_of_a_sum() -> None:
    layer, x = layers()
    plain = results(layer, x)
    leaf = x.clone().requires_grad_()
    out = checkpoint(
        lambda y: layer(y, y, y, need_weights=False)[0], leaf, use_reentrant=False
    )
    (gradient,) = torch.autograd.grad((out * torch.cos(x)).sum(), leaf)
    assert torch.equal(gradient, plain[1])
    leaf = x.clone().requires_grad_()
    layer(leaf, leaf, leaf, need_weights=False)[0].sum().backward()  # expanded ones
    assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_exact_is_pytorchs() -> None:
    layer, x = layers()
    pytorchs = nn.MultiheadAttention(E, HEADS, batch_first=True)
    pytorchs.load_state_dict(layer.state_dict())
    with multihead.backend("exact"):
        out = layer(x, x, x, need_weights=False)[0]
    assert products() == 0
    assert torch.equal(out, pytorchs(x, x, x, need_weights=False)[0])


def pytorchs_products() -> dict:
    def autocast(layer, x):
        with torch.autocast("cpu"):
            return layer(x, x, x)[0]

    def forward_mode(layer, x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return layer(dual, dual, dual)[0]

    def watched(layer, x):
        with FlopCounterMode(display=False) as counter:
            layer(x, x, x)
        assert "aten.addmm" in map(str, counter.get_flop_counts()["Global"])

    def exported(layer, x):
        program = torch.export.export(layer, (x, x, x)).run_decompositions()
        targets = {
            str(n.target) for n in program.graph.nodes if n.op == "call_function"
        }
        assert not any("mkldnn" in name for name in targets)
        assert targets & {"aten.addmm.default", "aten.linear.default"}

    return {
        "a small layer": lambda layer, x: layer(x[:1, :8], x[:1, :8], x[:1, :8]),
        "float64": lambda layer, x: layer.double()(*[x.double()] * 3),
        "no batch, one row": lambda layer, x: layer(*[x[0, :1]] * 3),
        "autocast": autocast,
        "forward-mode derivatives": forward_mode,
        "torch.func": lambda layer, x: torch.func.vmap(
            lambda y: layer(y, y, y)[0], randomness="different"
        )(x),
        "a mode that watches operators": watched,
        "torch.export": exported,
    }


@pytest.mark.parametrize("use", pytorchs_products().values(), ids=pytorchs_products())
def test_what_stays_pytorchs(use) -> None:
    layer, x = layers()
    use(layer, x)
    assert products() == 0


@needs_onednn
def test_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layers()
    monkeypatch.setenv("MULTIHEAD_LINEAR", "never")
    layer(x, x, x)
    assert products() == 0
    assert torch.ops.multihead.why_not_linear() == "MULTIHEAD_LINEAR is never"
    monkeypatch.setenv("MULTIHEAD_LINEAR", "yes")
    expected = 'MULTIHEAD_LINEAR must be always or never, got "yes"'
    with pytest.raises(ValueError, match=expected):
        layer(x, x, x)
    monkeypatch.delenv("MULTIHEAD_LINEAR")
    layer(x, x, x)
    assert products() == (0 if torch.ops.multihead.why_not_linear() else 2)


TRAINS = """
import torch, multihead
layer, x = multihead.MultiheadAttention(384, 6), torch.randn(128, 2, 384)
layer(x, x, x, need_weights=False)[0].sum().backward()
assert multihead.stats().calls("onednn", "linear") == 0
print(torch.ops.multihead.why_not_linear())
"""


@needs_onednn
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_library_that_is_held_to_less_is_left_alone(variable: str) -> None:
    """PyTorch's function for products refuses float32 too then."""
    run = subprocess.run(
        [sys.executable, "-c", TRAINS],
        env=os.environ | {variable: "AVX2"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{variable} holds oneDNN to less than AVX-512\n"
