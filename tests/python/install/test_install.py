# SPDX-License-Identifier: MIT
"""multihead.install(): which calls of PyTorch's function the kernels take, and what
the others give."""

import subprocess
import sys

import pytest
import torch
from budget import assert_as_good, ways
from equal import assert_equal
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import multihead

B, H, L, S, D = 2, 4, 5, 7, 8
attention = F.scaled_dot_product_attention


def tensors(dtype=torch.float32, grad=False, heads=H, width=D):
    query = torch.randn(B, H, L, D)
    key, value = torch.randn(B, heads, S, D), torch.randn(B, heads, S, width)
    return [x.to(dtype).requires_grad_(grad) for x in (query, key, value)]


def blocked_at_random(dtype=torch.bool):
    keep = torch.rand(B, 1, L, S) < 0.6
    keep[..., 0] = True
    if dtype == torch.bool:
        return keep
    return torch.randn(H, L, S).to(dtype).masked_fill(~keep[:1, 0], -torch.inf)


# --- Calls that the kernels take -----------------------------------------------------

TAKEN = {
    "plain": lambda t: (tensors(t), {}),
    "one batch of keys for all": lambda t: (
        [x[:1] if x.size(2) == S else x for x in tensors(t)],
        {},
    ),
    "one head of keys for all": lambda t: (tensors(t, heads=1), {}),
    "3-D": lambda t: ([x[0] for x in tensors(t)], {}),
    "3-D, float mask": lambda t: (
        [x[0] for x in tensors(t)],
        dict(attn_mask=blocked_at_random(t)),
    ),
    "grouped": lambda t: (tensors(t, heads=2), dict(enable_gqa=True)),
    "narrow values": lambda t: (tensors(t, width=3), {}),
    "no queries": lambda t: (
        [x[:, :, :0] if x.size(2) == L else x for x in tensors(t)],
        {},
    ),
    "causal": lambda t: (tensors(t), dict(is_causal=True)),
    "scale": lambda t: (tensors(t), dict(scale=-0.3)),
    "keep mask": lambda t: (tensors(t), dict(attn_mask=blocked_at_random())),
    "float mask": lambda t: (tensors(t), dict(attn_mask=blocked_at_random(t))),
    "mask of all": lambda t: (tensors(t), dict(attn_mask=torch.randn(1, S).to(t))),
    "heads last": lambda t: (
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(t)],
        {},
    ),
    "no dropout": lambda t: (tensors(t), dict(dropout_p=0.0)),
    "dropout of all": lambda t: (tensors(t), dict(dropout_p=1.0)),
}
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def results(inputs, options):
    """The output and gradients of everything that is floating point."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.detach().clone().requires_grad_())
        options = options | dict(attn_mask=leaves[-1])
    out = attention(*leaves[:3], **options)
    wanted = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out.detach(), *torch.autograd.grad(out, leaves, wanted))


def in_float64(inputs, options):
    options = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }
    return [x.double() for x in inputs], options


@DTYPES
@pytest.mark.parametrize("name", TAKEN)
def test_what_the_kernels_take(name, dtype):
    inputs, options = TAKEN[name](dtype)
    theirs, exact = results(inputs, options), results(*in_float64(inputs, options))
    assert multihead.stats() == ()
    with multihead.installed():
        ours = results(inputs, options)
    assert ways() == {"fused": 1}
    assert_as_good(ours, theirs, exact)
    assert_equal(results(inputs, options), theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient(mode):
    with mode():
        inputs = tensors()
        theirs = attention(*inputs)
        with multihead.installed():
            ours = attention(*inputs)
    assert ways() == {"fused": 1}
    assert ours.is_inference() == theirs.is_inference()
    assert_as_good(ours, theirs, attention(*(x.double() for x in inputs)))


def test_a_row_that_sees_no_key_is_0():
    keep = torch.ones(L, S, dtype=torch.bool)
    keep[2] = False
    with multihead.installed():
        out = attention(*tensors(), attn_mask=keep)
    assert (out[:, :, 2] == 0).all() and (out[:, :, 1] != 0).all()


def test_dropout_is_drawn_from_the_same_generator():
    inputs = tensors()
    with multihead.installed():
        torch.manual_seed(3)
        first, second = (attention(*inputs, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(3)
        again = attention(*inputs, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert ways() == {"fused": 3}


def test_autocast():
    inputs = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = attention(*inputs)
        with multihead.installed():
            ours = attention(*inputs)
    assert ways() == {"fused": 1} and ours.dtype == torch.bfloat16
    exact = attention(*(x.bfloat16().double() for x in inputs))
    assert_as_good(ours, theirs, exact)


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
def test_causal_bias(variant):
    from torch.nn.attention import bias

    inputs = tensors()
    mask = getattr(bias, f"causal_{variant}")(L, S)
    theirs = attention(*inputs, mask)
    exact = attention(*(x.double() for x in inputs), mask)
    with multihead.installed():
        ours = attention(*inputs, mask)
    assert sum(ways().values()) == ways()["fused"] == 1
    assert_as_good(ours, theirs, exact)


# --- Calls that stay PyTorch's -------------------------------------------------------


def tangent(query, key, value):
    def output(query):
        return attention(query, key, value)

    return torch.func.jvp(output, (query,), (torch.ones_like(query),))


def dual(query, key, value):
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        out = attention(forward.make_dual(query, torch.ones_like(query)), key, value)
        return tuple(forward.unpack_dual(out))


def functional_gradient(query, key, value):
    return torch.func.grad(lambda q: attention(q, key, value).sum())(query)


def math_only(*inputs):
    with sdpa_kernel(SDPBackend.MATH):
        return attention(*inputs)


def flash_switched_off(*inputs):
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        return attention(*inputs)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


TRANSFORM = "a transform of torch.func"
LEFT_OUT = "sdpa_kernel leaves out FLASH_ATTENTION"
# Name: the call of three tensors, and the reason. None: PyTorch's composite is taken
# apart before it gets here.
LEFT = {
    "2-D": (
        lambda *x: attention(*(y[0, 0] for y in x)),
        "the kernels take 3-D and 4-D",
    ),
    "5-D": (
        lambda *x: attention(*(y[None] for y in x)),
        "the kernels take 3-D and 4-D",
    ),
    "broadcast": (
        lambda q, k, v: attention(q[:1], k, v),
        "query, key and value need broadcasting",
    ),
    "broadcast heads": (
        lambda q, k, v: attention(q[:, :1], k, v),
        "query, key and value need broadcasting",
    ),
    "mask and causal": (
        lambda *x: attention(*x, torch.ones(L, S), is_causal=True),
        "attn_mask and is_causal at once",
    ),
    "vmap": (lambda *x: torch.vmap(attention)(*x), None),
    "vmap over one": (
        lambda q, k, v: torch.vmap(attention, (0, None, None))(q, k[0], v[0]),
        None,
    ),
    "torch.func.grad": (functional_gradient, TRANSFORM),
    "MATH": (math_only, LEFT_OUT),
    "switched off": (flash_switched_off, LEFT_OUT),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_pytorchs(name):
    call, reason = LEFT[name]
    inputs = tensors()
    theirs = call(*inputs)
    with multihead.installed():
        ours = call(*inputs)
    assert_equal(ours, theirs)
    assert bool(ways()) == bool(reason)
    assert all(found.startswith(reason) for found in ways())
    assert multihead.stats().calls("fused") == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_stay_pytorchs(layout):
    parts = [torch.randn(n, H, D) for n in (3, 5)]
    if layout == torch.jagged:
        x = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    else:
        parts = [part.transpose(0, 1).contiguous() for part in parts]
        x = torch.nested.nested_tensor(parts)
    theirs = attention(x, x, x)
    with multihead.installed():
        ours = attention(x, x, x)
    assert ours.is_nested and ours.layout == layout
    assert_equal(list(ours.unbind()), list(theirs.unbind()))
    assert multihead.stats().calls("fused") == 0


def test_the_formula_is_the_bits_of_the_formula():
    """Long enough that PyTorch's formula and its kernel differ."""
    inputs = [torch.randn(1, 2, 300, 64) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = attention(*inputs)
        with multihead.installed():
            assert_equal(attention(*inputs), theirs)
    with multihead.installed():
        assert not torch.equal(attention(*inputs), theirs)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            attention(*inputs)
    assert ways() == {"fused": 2, LEFT_OUT: 1}


# Calls that PyTorch refuses, each in its own words.
WRONG = {
    "integers": lambda q, k, v: (q.int(), k.int(), v.int()),
    "bool": lambda q, k, v: (q.bool(), k.bool(), v.bool()),
    "float8": lambda *x: tuple(y.to(torch.float8_e4m3fn) for y in x),
    "complex": lambda *x: tuple(y.cfloat() for y in x),
    "two dtypes": lambda q, k, v: (q, k.double(), v),
    "1-D": lambda *x: tuple(y[0, 0, 0] for y in x),
    "widths": lambda q, k, v: (q[..., :4], k, v),
    "batches": lambda q, k, v: (q, torch.cat([k, k[:1]]), v),
    "heads": lambda q, k, v: (q, k[:, :3], v[:, :3]),
    "mask of integers": lambda *x: (*x, torch.ones(L, S, dtype=torch.long)),
    "mask of another dtype": lambda *x: (*x, torch.ones(L, S, dtype=torch.bfloat16)),
    "mask of another shape": lambda *x: (*x, torch.ones(L, S + 1)),
    "mask of a dimension": lambda *x: (*x, torch.ones(S)),
    "mask without dimensions": lambda *x: (*x, torch.tensor(1.0)),
    "mask of 5 dimensions": lambda *x: (*x, torch.ones(3, 1, 1, L, S)),
    "mask of 3 dimensions and causal": lambda *x: (*x, torch.ones(1, L, S), 0.0, True),
    "dropout": lambda *x: (*x, None, 1.5),
    "negative dropout": lambda *x: (*x, None, -0.5),
    "no tensor": lambda q, k, v: (q, k, 3),
    "too few": lambda q, k, v: (q, k),
}


def outcome(arguments):
    try:
        return attention(*arguments)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as e:
        return type(e), str(e)


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_pytorchs(name):
    arguments = WRONG[name](*tensors())
    theirs = outcome(arguments)
    with multihead.installed():
        ours = outcome(arguments)
    assert isinstance(theirs, tuple)
    assert ours == theirs
    assert multihead.stats().calls("fused") == 0


@pytest.mark.parametrize("call", [tangent, dual])
def test_forward_mode_is_pytorchs(call):
    """Its kernel has none, its formula has."""
    inputs = tensors()
    with pytest.raises(NotImplementedError, match="forward AD"), multihead.installed():
        call(*inputs)
    assert multihead.stats().calls("fused") == 0
    with sdpa_kernel(SDPBackend.MATH):
        theirs = call(*inputs)
        with multihead.installed():
            assert_equal(call(*inputs), theirs)


# --- Derivatives ---------------------------------------------------------------------


def test_second_derivatives():
    inputs = tensors(torch.float64, grad=True)
    with multihead.installed():
        assert torch.autograd.gradcheck(attention, inputs)
        assert torch.autograd.gradgradcheck(attention, inputs)
    assert set(ways()) == {"fused"}


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_of_one_input(which):
    inputs = tensors()
    inputs[which].requires_grad_()

    def gradient(inputs):
        return torch.autograd.grad(attention(*inputs).square().sum(), inputs[which])

    theirs = gradient(inputs)
    with multihead.installed():
        ours = gradient(inputs)
    double = [x.detach().double() for x in inputs]
    double[which].requires_grad_()
    assert_as_good(ours, theirs, gradient(double))
    assert ways() == {"fused": 1}


def test_a_gradient_of_the_mask_alone():
    inputs, mask = tensors(), torch.randn(1, H, L, S, requires_grad=True)

    def gradient(inputs, mask):
        out = attention(*inputs, attn_mask=mask)
        return torch.autograd.grad(out.square().sum(), mask)

    theirs = gradient(inputs, mask)
    with multihead.installed():
        ours = gradient(inputs, mask)
    double = mask.detach().double().requires_grad_()
    exact = gradient([x.double() for x in inputs], double)
    assert_as_good(ours, theirs, exact)
    assert ways() == {"fused": 1}


@pytest.mark.parametrize("empty", ["batch", "query", "key", "value"])
def test_a_mask_beside_an_empty_tensor_has_no_gradient(empty):
    query, key, value = tensors(grad=True, width=0 if empty == "value" else D)
    if empty == "batch":
        query, key, value = (x[:0] for x in (query, key, value))
    if empty == "query":
        query = query[:, :, :0]
    if empty == "key":
        key, value = (x[:, :, :0] for x in (key, value))
    mask = torch.randn(query.size(2), key.size(2), requires_grad=True)
    with multihead.installed():
        out = attention(query, key, value, mask)
    assert torch.autograd.grad(out.sum(), mask, allow_unused=True) == (None,)
    reason = "PyTorch gives attn_mask no gradient where a tensor is empty"
    assert ways() == {reason: 1}
    with multihead.installed():
        attention(query, key, value, mask.detach())
    assert ways()["fused"] == 1


# More than any machine has, of a query that takes no memory.
MEMORY = """
import resource
import torch, multihead
resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
query = torch.zeros(1, 1, 1, 64).expand(1, 1, 2**32, 64)
key = torch.zeros(1, 1, 1, 64)
multihead.install()
try:
    torch.nn.functional.scaled_dot_product_attention(query, key, key)
except RuntimeError as error:
    print("memory" in str(error), multihead.stats())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by Linux' means")
def test_want_of_memory_is_no_refusal():
    """PyTorch is not asked to try the same again."""
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True no calls of attention\n"


def test_backward_after_uninstall():
    """The graph keeps the kernels that its forward ran on, in either direction."""
    inputs = tensors(grad=True)
    theirs = torch.autograd.grad(attention(*inputs).sum(), inputs)
    before = attention(*inputs)
    with multihead.installed():
        within = attention(*inputs)
        assert_equal(torch.autograd.grad(before.sum(), inputs), theirs)
    double = tensors(torch.float64)
    double = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(attention(*double).sum(), double)
    assert_as_good(torch.autograd.grad(within.sum(), inputs), theirs, exact)


# --- Tensors with rules of their own -------------------------------------------------


class Logged(torch.Tensor):
    """Wraps a tensor; its operators are noted."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Logged) else x

        cls.seen.append(func.name())
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        wrap = torch.utils._pytree.tree_map_only
        return wrap(torch.Tensor, Logged, result)


@pytest.mark.parametrize(
    "wrapped", [(0, 1, 2), (0, 1, 2, 3), (1,), (2,), (3,)], ids=str
)
def test_a_subclass_with_torch_dispatch(wrapped):
    """It may know PyTorch's operators alone, so it sees no others."""
    inputs = [*tensors(), torch.randn(L, S)]
    for which in wrapped:
        inputs[which] = Logged(inputs[which])
    Logged.seen.clear()
    theirs = attention(*inputs)
    seen, Logged.seen = Logged.seen, []
    with multihead.installed():
        ours = attention(*inputs)
    assert type(ours) is type(theirs) is Logged
    assert_equal(ours.inner, theirs.inner)
    assert Logged.seen == seen != []
    assert ways() == {"Logged may know PyTorch's operators alone": 1}


def test_distributed_tensors(tmp_path):
    """PyTorch has no kernel with a rule of sharding on the CPU, only its formula."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate, Shard

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        inputs = [*tensors(), torch.randn(B, H, L, S)]

        def results(wrap):
            leaves = [wrap(x).requires_grad_() for x in inputs]
            out = attention(*leaves)
            out.sin().sum().backward()
            found = (out.detach(), *(x.grad for x in leaves))
            return [x.to_local() if isinstance(x, DTensor) else x for x in found]

        for placement in (Shard(1), Replicate()):
            with multihead.installed():
                plain = results(torch.clone)
                shared = results(lambda x: DTensor.from_local(x, mesh, [placement]))
                assert_equal(shared, plain)
        assert ways() == {"fused": 4}
    finally:
        distributed.destroy_process_group()


def test_a_subclass_with_torch_function():
    class Named(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += func is attention
            return super().__torch_function__(func, types, args, kwargs or {})

    inputs = tensors()
    named = [x.as_subclass(Named) for x in inputs]
    with multihead.installed():
        ours = attention(*named)
        plain = attention(*inputs)
    assert isinstance(ours, Named) and Named.calls == 1
    assert_equal(ours.as_subclass(torch.Tensor), plain)
    assert ways() == {"fused": 2}


def test_a_dispatch_mode_sees_the_kernel():
    class Names(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with multihead.installed(), Names():
        attention(*tensors())
    assert "multihead::fused_attention" in Names.seen


@pytest.mark.parametrize("device", ["fake", "meta"])
@pytest.mark.parametrize("heads_last", [False, True])
def test_shapes_without_data(device, heads_last):
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = tensors(torch.bfloat16, width=3)
    if heads_last:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]

    def shape():
        if device == "meta":
            return attention(*(x.to("meta") for x in inputs))
        with FakeTensorMode() as mode:
            return attention(*map(mode.from_tensor, inputs))

    theirs = shape()
    with multihead.installed():
        ours = shape()
        real = attention(*inputs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert ours.device == theirs.device
    if device == "fake":
        assert ours.stride() == real.stride()
