# SPDX-License-Identifier: MIT
"""install(linear=True): float32 matrix products by oneDNN, and nothing else changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from onednn import WHY_NOT, always, assert_as_exact, needs_onednn  # noqa: F401
from torch import Tensor, nn

import multihead

# The smallest product that is taken: 2²⁵ multiply-adds.
ROWS, IN, OUT = 256, 512, 256


@contextlib.contextmanager
def linear() -> Iterator[None]:
    multihead.reset_stats()
    with multihead.installed(linear=True):
        yield


def products(way: str = "onednn") -> int:
    return multihead.stats().calls(way, "linear")


def drawn(*shape: int, seed: int = 0, **options: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_(
        options.get("requires_grad", False)
    )


INPUTS = {
    "2-D": lambda: drawn(ROWS, IN),
    "3-D": lambda: drawn(2, ROWS // 2, IN),
    "4-D": lambda: drawn(2, 2, ROWS // 4, IN),
    "transposed": lambda: drawn(IN, ROWS).t(),
    "sliced": lambda: drawn(ROWS, IN + 7)[:, 3:-4],
    "every other row": lambda: drawn(2 * ROWS, IN)[::2],
    "batch second": lambda: drawn(ROWS // 2, 2, IN).transpose(0, 1),
}
WEIGHTS = {
    "plain": lambda: drawn(OUT, IN, seed=1),
    "transposed": lambda: drawn(IN, OUT, seed=1).t(),
    "sliced": lambda: drawn(OUT, IN + 5, seed=1)[:, 5:],
}


@needs_onednn
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("input", INPUTS)
def test_results(input: str, weight: str, bias: bool) -> None:
    x, w = INPUTS[input](), WEIGHTS[weight]()
    b = drawn(OUT, seed=2) if bias else None
    pytorchs = F.linear(x, w, b)
    with linear():
        ours = F.linear(x, w, b)
        assert products() == 1
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    assert_as_exact(ours, pytorchs, exact)
    assert torch.equal(F.linear(x, w, b), pytorchs)


FUNCTIONS = {
    "mm": lambda c, a, b: torch.mm(a, b),
    "mm, out": lambda c, a, b: torch.mm(a, b, out=torch.empty(ROWS, OUT)),
    "mm, out to be resized": lambda c, a, b: torch.mm(a, b, out=torch.empty(0)),
    "addmm": torch.addmm,
    "addmm, out": lambda c, a, b: torch.addmm(c, a, b, out=torch.empty(ROWS, OUT)),
    "relu": lambda c, a, b: torch.ops.aten._addmm_activation(c, a, b),
    "gelu": lambda c, a, b: torch.ops.aten._addmm_activation(c, a, b, use_gelu=True),
    "matmul": lambda c, a, b: torch.matmul(a, b),
}


@needs_onednn
@pytest.mark.parametrize("addend", [(OUT,), (ROWS, OUT), (1, OUT), (ROWS, 1), ()])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function: str, addend: tuple[int, ...]) -> None:
    call = FUNCTIONS[function]
    c, a, b = drawn(*addend, seed=2), drawn(ROWS, IN), drawn(IN, OUT, seed=1)
    pytorchs = call(c, a, b)
    with linear(), torch.inference_mode():
        ours = call(c, a, b)
        assert products() == ("resized" not in function)
    if function in ("relu", "gelu"):
        exact = torch.addmm(c.double(), a.double(), b.double())
        exact = exact.relu() if function == "relu" else F.gelu(exact)
    else:
        exact = a.double() @ b.double() + (c.double() if "add" in function else 0)
    assert_as_exact(ours, pytorchs, exact)


UNTOUCHED = {
    "too small": lambda: torch.mm(drawn(ROWS, IN), drawn(IN, OUT - 1)),
    "float64": lambda: torch.mm(drawn(ROWS, IN).double(), drawn(IN, OUT).double()),
    "bfloat16": lambda: torch.mm(drawn(ROWS, IN).bfloat16(), drawn(IN, OUT).bfloat16()),
    "a vector": lambda: F.linear(drawn(IN), drawn(OUT, IN), drawn(OUT)),
    "beta": lambda: torch.addmm(
        drawn(OUT), drawn(ROWS, IN), drawn(IN, OUT), beta=0.5, alpha=1
    ),
    "alpha": lambda: torch.addmm(drawn(OUT), drawn(ROWS, IN), drawn(IN, OUT), alpha=2),
    "no rows": lambda: F.linear(drawn(0, IN), drawn(OUT, IN), drawn(OUT)),
    "no columns": lambda: F.linear(drawn(ROWS, IN), drawn(0, IN), drawn(0)),
    "nothing to sum": lambda: F.linear(drawn(ROWS, 0), drawn(OUT, 0), drawn(OUT)),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_calls_are_pytorchs(name: str) -> None:
    pytorchs = UNTOUCHED[name]()
    with linear():
        assert torch.equal(UNTOUCHED[name](), pytorchs)
        assert products() == 0


def test_out_that_overlaps_is_pytorchs() -> None:
    a, b = drawn(ROWS, IN), drawn(IN, OUT)
    c = drawn(ROWS, OUT)
    pytorchs = torch.addmm(c, a, b)
    with linear():
        assert torch.equal(torch.addmm(c, a, b, out=c), pytorchs)
        assert products() == 0


WRONG = {
    "inner sizes": (lambda: drawn(ROWS, IN), lambda: drawn(OUT, IN + 1), None),
    "dtypes": (lambda: drawn(ROWS, IN), lambda: drawn(OUT, IN).double(), None),
    "dtype of bias": (
        lambda: drawn(ROWS, IN),
        lambda: drawn(OUT, IN),
        lambda: drawn(OUT).double(),
    ),
    "size of bias": (
        lambda: drawn(ROWS, IN),
        lambda: drawn(OUT, IN),
        lambda: drawn(OUT + 1),
    ),
    "rank of bias": (
        lambda: drawn(ROWS, IN),
        lambda: drawn(OUT, IN),
        lambda: drawn(2, ROWS, OUT),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_pytorchs(name: str) -> None:
    x, w, b = (make and make() for make in WRONG[name])
    with pytest.raises(RuntimeError) as pytorchs:
        F.linear(x, w, b)
    with linear(), pytest.raises(RuntimeError) as ours:
        F.linear(x, w, b)
    assert str(ours.value) == str(pytorchs.value)


def test_errors_of_a_shared_matrix_are_pytorchs() -> None:
    a, b = drawn(2, ROWS, IN), drawn(IN + 1, OUT).expand(2, -1, -1)
    for second in (b, b[:, :-1].double()):
        with pytest.raises(RuntimeError) as pytorchs:
            torch.bmm(a, second)
        with linear(), pytest.raises(RuntimeError) as ours:
            torch.bmm(a, second)
        assert str(ours.value) == str(pytorchs.value)


def gradients(needs: tuple[bool, bool, bool], dtype: torch.dtype) -> list[Tensor]:
    x, w, b = (
        drawn(*shape, seed=seed).to(dtype).requires_grad_(need)
        for seed, (shape, need) in enumerate(
            zip([(2, ROWS // 2, IN), (OUT, IN), (OUT,)], needs, strict=True)
        )
    )
    upstream = drawn(2, ROWS // 2, OUT, seed=3).to(dtype)
    inputs = [t for t in (x, w, b) if t.requires_grad]
    return list(torch.autograd.grad(F.linear(x, w, b), inputs, upstream))


@needs_onednn
@pytest.mark.parametrize(
    "needs",
    [
        (True, True, True),
        (True, False, False),
        (False, True, True),
        (False, True, False),
    ],
    ids=["all", "input", "weight and bias", "weight"],
)
def test_gradients(needs: tuple[bool, bool, bool]) -> None:
    pytorchs = gradients(needs, torch.float32)
    with linear():
        ours = gradients(needs, torch.float32)
        assert products() == 1 + needs[0] + needs[1]
    for o, p, e in zip(ours, pytorchs, gradients(needs, torch.float64), strict=True):
        assert_as_exact(o, p, e)


def second_gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = drawn(ROWS, IN).to(dtype).requires_grad_()
    w = drawn(OUT, IN, seed=1).to(dtype).requires_grad_()
    out = F.linear(x, w).square().mean()
    first = torch.autograd.grad(out, (x, w), create_graph=True)
    return torch.autograd.grad(sum(g.square().mean() for g in first), (x, w))


@needs_onednn
def test_second_gradients() -> None:
    pytorchs = second_gradients(torch.float32)
    with linear():
        ours = second_gradients(torch.float32)
        assert products() >= 7 and products("blas") == 0
    exact = second_gradients(torch.float64)
    for o, p, e in zip(ours, pytorchs, exact, strict=True):
        assert_as_exact(o, p, e)


@needs_onednn
def test_forward_mode_and_vmap() -> None:
    x, w, tangent = drawn(ROWS, IN), drawn(OUT, IN, seed=1), drawn(ROWS, IN, seed=2)
    with linear():
        _, ours = torch.func.jvp(lambda x: F.linear(x, w), (x,), (tangent,))
        assert (derived := products()) >= 2
        mapped = torch.func.vmap(lambda x: F.linear(x, w))(x)
        assert products() == derived + 1
    for out, plain in ((ours, tangent), (mapped, x)):
        assert_as_exact(out, F.linear(plain, w), plain.double() @ w.double().t())


@needs_onednn
def test_autocast_casts_first() -> None:
    x, w = drawn(ROWS, IN), drawn(OUT, IN, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        pytorchs = F.linear(x, w)
        with linear():
            assert torch.equal(F.linear(x, w), pytorchs)
            assert products() == 0
            with torch.autocast("cpu", enabled=False):
                assert F.linear(x, w).dtype == torch.float32
            assert products() == 1


@needs_onednn
def test_weights_that_change_are_seen() -> None:
    layer, x = nn.Linear(IN, OUT), drawn(ROWS, IN)
    with linear(), torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)
        layer.weight.data = torch.zeros(OUT, IN)
        torch.testing.assert_close(layer(x), layer.bias.expand(ROWS, OUT))


@needs_onednn
def test_switch_of_onednn() -> None:
    x, w = drawn(ROWS, IN), drawn(OUT, IN, seed=1)
    pytorchs = F.linear(x, w)
    with linear(), torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(F.linear(x, w), pytorchs)
        assert products() == 0


@needs_onednn
def test_modules_and_inference_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        512, 8, 1024, batch_first=True, activation="gelu"
    )
    x = drawn(2, 128, 512)
    layer.eval()
    with torch.no_grad():
        pytorchs = layer(x)
        with linear():
            ours = layer(x)
            assert products() == 4 and products("blas") == 0
    torch.testing.assert_close(ours, pytorchs)
    lengths = torch.tensor([128, 100])
    padding = torch.arange(128) >= lengths[:, None]
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    with torch.no_grad():
        pytorchs = encoder(x, src_key_padding_mask=padding)
        with linear():
            ours = encoder(x, src_key_padding_mask=padding)
            assert products() >= 3
    torch.testing.assert_close(ours, pytorchs)


@needs_onednn
def test_compiled_graphs() -> None:
    layer, x = nn.Linear(IN, OUT), drawn(ROWS, IN, requires_grad=True)
    compiled = torch.compile(lambda x: F.gelu(layer(x)).square())
    pytorchs = F.gelu(layer(x)).square()
    (pytorchs_gradient,) = torch.autograd.grad(pytorchs.sum(), x)
    with linear():
        ours = compiled(x)
        (gradient,) = torch.autograd.grad(ours.sum(), x)
        assert products() == 3  # that of the weight too
    torch.testing.assert_close(ours, pytorchs)
    torch.testing.assert_close(gradient, pytorchs_gradient)


def test_exported_graphs_have_pytorchs_operators() -> None:
    layer, x = nn.Linear(IN, OUT), drawn(ROWS, IN)
    with linear():
        program = torch.export.export(layer, (x,))
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert targets == {"aten.linear.default"}


@needs_onednn
def test_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIHEAD_LINEAR")
    is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    why_not = torch.ops.multihead.why_not_linear()
    assert why_not == ("" if is_amd else "MKL is fast on this processor")
    with linear():
        torch.mm(drawn(ROWS, IN), drawn(IN, OUT))
        assert products() == is_amd


@needs_onednn
def test_who_asks() -> None:
    x, w = drawn(ROWS, IN), drawn(IN, OUT, seed=1)

    def is_taken() -> bool:
        before = products()
        torch.mm(x, w)
        return products() > before

    assert not is_taken()
    try:
        multihead.install()
        assert not is_taken()
        multihead.install(linear=True)
        assert is_taken()
        multihead.install()  # takes nothing back
        assert is_taken()
        with multihead.installed(linear=True):
            multihead.uninstall()
            assert is_taken()
            with multihead.installed():
                assert is_taken()
            assert is_taken()
        assert not is_taken() and not multihead.is_installed()
        with multihead.installed():
            assert not is_taken()
            with multihead.installed(linear=True):
                assert is_taken()
            assert not is_taken()
    finally:
        multihead.uninstall()
    assert not is_taken()


def test_statistics() -> None:
    multihead.reset_stats()
    with multihead.installed():
        torch.mm(drawn(ROWS, IN), drawn(IN, OUT))
    assert not multihead.stats()
    if WHY_NOT:
        return
    with multihead.installed(linear=True):
        torch.mm(drawn(ROWS, IN), drawn(IN, OUT))
        torch.mm(drawn(8, 8), drawn(8, 8))
        torch.mm(drawn(ROWS, IN).double(), drawn(IN, OUT).double())
    assert [tuple(count) for count in multihead.stats()] == [
        ("linear", "onednn", "", 1),
        ("linear", "blas", "a small product", 1),
        ("linear", "blas", "another dtype, or other arguments", 1),
    ]
    multihead.reset_stats()
    assert not multihead.stats()
