# SPDX-License-Identifier: MIT
"""Modules that train on the kernels: which path runs, gradients, what is random.

Gradients are those of the exact backend, PyTorch's, in float64. test_gradients.py has
derivatives against differences.
"""

import contextlib

import pytest
import torch
from equal import assert_equal
from paths import fused_calls
from test_fused_modules import DTYPES, EACH_MODULE, MODULES, B, E, H, L, S, sequences
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import multihead

WEIGHTS = pytest.mark.parametrize(
    "weights",
    [
        dict(need_weights=False),
        dict(need_weights=True),
        dict(need_weights=True, average_attn_weights=False),
    ],
    ids=["none", "averaged", "per head"],
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def masks():
    """name: arguments; the float ones require gradients."""
    return {
        "none": {},
        "causal": dict(attn_mask=torch.ones(L, S).triu(1).bool()),
        "padding": dict(
            key_padding_mask=torch.arange(S) >= torch.tensor([[7], [4], [1]])
        ),
        "bias": dict(attn_mask=torch.randn(L, S).double().requires_grad_()),
        "bias per head": dict(
            attn_mask=torch.randn(B * H, L, S).double().requires_grad_()
        ),
        "float padding": dict(
            key_padding_mask=torch.randn(B, S).double().requires_grad_()
        ),
    }


def loss_of(out, weights, with_weights):
    """A number that depends on every element in a way of its own."""
    loss = (out * torch.arange(out.numel()).view_as(out).cos()).sum()
    if weights is not None and with_weights:
        loss = loss + (weights.square() * weights.cumsum(-1)).sum()
    return loss


def gradients(module, inputs, options, with_weights=False):
    """Of the loss, for parameters, inputs and masks; the calls on the way."""
    wanted = [*module.parameters(), *inputs]
    wanted += [x for x in options.values() if torch.is_tensor(x) and x.requires_grad]
    found = []

    def step():
        torch.manual_seed(1)
        loss = loss_of(*module(*inputs, **options), with_weights)
        found.extend(torch.autograd.grad(loss, wanted))

    reached = fused_calls(step)
    return found, reached


@EACH_MODULE
@WEIGHTS
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("with_weights", [False, True], ids=["out", "out and weights"])
def test_gradients_are_those_of_pytorch(module, weights, mask, with_weights):
    module = MODULES[module]().double()
    inputs = [x.requires_grad_() for x in sequences(dtype=torch.float64)]
    options = weights | masks()[mask]
    with multihead.backend("exact"):
        expected, _ = gradients(module, inputs, options, with_weights)
    for backend in ("auto", "fused"):
        with multihead.backend(backend):
            results, reached = gradients(module, inputs, options, with_weights)
        second = ["weights"] if weights["need_weights"] else []
        assert reached == ["attention", *second, "backward"]
        assert_close(results, expected)


@EACH_MODULE
def test_each_parameter_alone(module):
    module = MODULES[module]().requires_grad_(False)
    inputs = sequences()

    def step():
        module(*inputs)[0].sum().backward()

    for name, parameter in module.named_parameters():
        parameter.requires_grad_()
        # The last projection's own gradient needs none of attention.
        outside = name.startswith("out_proj")
        expected = ["attention", "weights", *([] if outside else ["backward"])]
        assert fused_calls(step) == expected, name
        assert parameter.grad is not None
        parameter.requires_grad_(False)


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.all = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all.add(func.name())
        return func(*args, **(kwargs or {}))


def test_weights_that_no_loss_uses_cost_nothing():
    """Their derivative would be the definition's softmax and its products."""
    module = MODULES["packed"]()
    for with_weights in (False, True):
        with _Names() as names:
            loss_of(*module(*sequences()), with_weights).backward()
        assert ("aten::exp" in names.all) == with_weights
        assert ("aten::bmm" in names.all) == with_weights


@EACH_MODULE
def test_a_second_derivative(module):
    module = MODULES[module]().double()
    query, key, value = (x[:2, :1].contiguous() for x in sequences(dtype=torch.float64))
    query.requires_grad_()
    parameter = next(module.parameters())

    def penalty():
        out, _ = module(query, key, value)
        (slope,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [query, parameter])

    with multihead.backend("exact"):
        expected = penalty()
    assert_close(penalty(), expected)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant, p):
    module = MODULES["grouped"](dropout=p)

    def step(wrap):
        torch.manual_seed(2)
        inputs = [x.requires_grad_() for x in sequences()]
        wrap(lambda *x: module(*x)[0], *inputs).square().sum().backward()
        return [x.grad for x in inputs]

    def checkpointed(function, *inputs):
        return checkpoint(function, *inputs, use_reentrant=reentrant)

    assert_equal(step(checkpointed), step(lambda function, *x: function(*x)))


@DTYPES
def test_autocast(dtype):
    """Parameters stay float32, their gradients too; products and kernels run in the
    dtype of autocast."""
    module = MODULES["packed"]()
    inputs = [x.requires_grad_() for x in sequences()]
    low = dtype in (torch.bfloat16, torch.float16)
    context = torch.autocast("cpu", dtype) if low else contextlib.nullcontext()
    with context:
        out, weights = module(*inputs)
    assert out.dtype == (dtype if low else torch.float32) and weights.dtype == out.dtype
    reached = fused_calls(lambda: (out.sum() + weights.square().sum()).backward())
    assert reached == ["backward"]
    for x in (*inputs, *module.parameters()):
        assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


def test_dropout_in_training_is_the_generators():
    module = MODULES["packed"](dropout=0.5)
    inputs = [x.requires_grad_() for x in sequences()]
    first, _ = gradients(module, inputs, {})
    assert_equal(gradients(module, inputs, {})[0], first)
    module.eval()
    assert not torch.equal(gradients(module, inputs, {})[0][0], first[0])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_do_not_depend_on_threads_or_the_batch(p):
    attention = multihead.scaled_dot_product_attention
    tensors = [torch.randn(3, 4, n, 16) for n in (70, 300, 300)]
    dout = torch.randn(3, 4, 70, 16)

    def gradients_of(batch, threads=1):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        inputs = [x[:batch].clone().requires_grad_() for x in tensors]
        out = attention(*inputs, is_causal=True, dropout_p=p)
        results = torch.autograd.grad(out, inputs, dout[:batch])
        torch.set_num_threads(before)
        return results

    expected = gradients_of(3)
    for threads in (1, 2, 3, 5):
        assert_equal(gradients_of(3, threads), expected)
    for batch in (1, 2):
        assert_equal(gradients_of(batch), tuple(x[:batch] for x in expected))


def test_rows_that_see_nothing_give_no_gradient():
    """And take none from elsewhere, whatever they hold, nor from hidden keys."""
    attention = multihead.scaled_dot_product_attention
    clean = [torch.randn(2, 3, n, E) for n in (5, 7, 7)]
    keep = torch.rand(2, 1, 5, 7) < 0.5
    keep[..., 0] = True
    keep[0, :, 2] = False
    keep[..., 4] = False
    poisoned = [x.clone() for x in clean]
    poisoned[0][0, :, 2] = torch.nan
    for x in poisoned[1:]:
        x[..., 4, :] = torch.inf

    def gradients_of(tensors):
        inputs = [x.clone().requires_grad_() for x in tensors]
        out = attention(*inputs, keep)
        assert not out[0, :, 2].any()
        return torch.autograd.grad(out.cos().sum(), inputs)

    expected = gradients_of(clean)
    assert_equal(gradients_of(poisoned), expected)
    dq, dk, dv = expected
    assert not dq[0, :, 2].any()
    assert not dk[..., 4, :].any() and not dv[..., 4, :].any()
