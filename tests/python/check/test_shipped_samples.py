# SPDX-License-Identifier: MIT
"""PyTorch's own samples for attention, run on our module and functions.

The samples live in torch.testing._internal, which is private: elsewhere than in
the tested version of PyTorch they may differ, so the tests are skipped there.
"""

import itertools

import pytest
import torch
from equal import assert_equal
from torch import nn
from torch.testing import assert_close

import multihead

TESTED = "2.13."
if not torch.__version__.startswith(TESTED):
    pytest.skip(
        f"samples are known for torch {TESTED}*, not {torch.__version__}",
        allow_module_level=True,
    )
try:
    from torch.testing._internal import common_methods_invocations, common_modules
    from torch.testing._utils import wrapper_set_seed
except ModuleNotFoundError as error:
    pytest.skip(f"PyTorch's private samples: {error}", allow_module_level=True)

MODULE = next(
    info
    for info in common_modules.module_db
    if info.module_cls is nn.MultiheadAttention
)
OPERATORS = {info.name: info for info in common_methods_invocations.op_db}
ATTENTION = OPERATORS["nn.functional.scaled_dot_product_attention"]
MULTI_HEAD = OPERATORS["nn.functional.multi_head_attention_forward"]


def samples_of(operator, dtype, requires_grad):
    torch.manual_seed(0)
    return list(operator.sample_inputs("cpu", dtype, requires_grad))


def leaves(sample):
    """The tensors of a sample that take gradients."""
    values = (sample.input, *sample.args, *sample.kwargs.values())
    return [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]


def gradients(outputs, inputs):
    """Of the sum of squares of all outputs, None where there is no dependence."""
    outputs = [x for x in outputs if x is not None]
    loss = sum(x.square().sum() for x in outputs)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


# --- Modules -------------------------------------------------------------------------


def module_runs():
    """(module class → module with the sample's parameters, its sample) of each."""
    dtypes = (torch.float32, torch.float64)
    for dtype, training in itertools.product(dtypes, (True, False)):
        torch.manual_seed(0)
        for sample in MODULE.module_inputs_func(MODULE, "cpu", dtype, True, training):

            def make(module_class, sample=sample, dtype=dtype, training=training):
                torch.manual_seed(1)
                constructor = sample.constructor_input
                module = module_class(*constructor.args, **constructor.kwargs)
                return module.to(dtype).train(training)

            yield make, sample


def run_module(module, sample):
    """Output, weights, and gradients of inputs and parameters."""
    call = sample.forward_input
    results = module(*call.args, **call.kwargs)
    return results, gradients(results, [*call.args, *module.parameters()])


def test_module_samples_give_the_same_bits():
    count = 0
    with multihead.backend("exact"):
        for make, sample in module_runs():
            module = make(multihead.MultiheadAttention)
            ours = run_module(module, sample)
            assert_equal(ours, run_module(make(nn.MultiheadAttention), sample))
            call = sample.forward_input
            reference = sample.reference_fn(module, *call.args, **call.kwargs)
            assert_close(ours[0], reference, equal_nan=True)
            count += 1
    assert count == 256


def test_module_samples_by_default():
    """No sample blocks a row, so that "auto" too gives PyTorch's values. Gradients in
    float64: in float32 they cancel, in PyTorch as in ours."""
    count = 0
    for make, sample in module_runs():
        ours, our_gradients = run_module(make(multihead.MultiheadAttention), sample)
        theirs, gradients = run_module(make(nn.MultiheadAttention), sample)
        assert_close(ours, theirs)
        if ours[0].dtype == torch.float64:
            assert_close(our_gradients, gradients)
        count += 1
    assert count == 256


# --- scaled_dot_product_attention ----------------------------------------------------


def attention(function, sample):
    """Output and gradients, the generator seeded as PyTorch's own tests do."""
    out = wrapper_set_seed(function, sample.input, *sample.args, **sample.kwargs)
    return out, gradients([out], leaves(sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_samples_give_the_same_bits(dtype):
    samples = samples_of(ATTENTION, dtype, requires_grad=True)
    assert len(samples) == 25
    for sample in samples:
        theirs = attention(nn.functional.scaled_dot_product_attention, sample)
        with multihead.backend("exact"):
            ours = attention(multihead.scaled_dot_product_attention, sample)
        assert_equal(ours, theirs)


# Of this operator in PyTorch's own tests; empty: assert_close's defaults.
TOLERANCES = {torch.float32: dict(rtol=5e-6, atol=5e-5), torch.float64: {}}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention_samples_by_default(dtype):
    samples = samples_of(ATTENTION, dtype, requires_grad=True)
    assert len(samples) == 25
    compared = 0
    for sample in samples:
        out, grads = attention(nn.functional.scaled_dot_product_attention, sample)
        our_out, our_grads = attention(multihead.scaled_dot_product_attention, sample)
        if sample.kwargs["dropout_p"] > 0:
            # Only "exact" promises PyTorch's stream of dropout.
            assert our_out.shape == out.shape
            assert our_out.isfinite().all()
            continue
        assert_close(our_out, out, **TOLERANCES[dtype])
        if dtype == torch.float64:
            # The samples' scores reach 100: in float32 rounding alone
            # moves the gradients further than assert_close's defaults.
            assert_close(our_grads, grads)
        compared += 1
    assert compared == 13


# --- multi_head_attention_forward ----------------------------------------------------


def raises_or_returns(function, sample):
    """Result or exception, the generator seeded as PyTorch's own tests do."""
    try:
        return wrapper_set_seed(function, sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return error


@pytest.mark.parametrize("requires_grad, count", [(False, 192), (True, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_multi_head_samples(dtype, requires_grad, count):
    samples = samples_of(MULTI_HEAD, dtype, requires_grad)
    assert len(samples) == count
    for sample in samples:
        theirs = raises_or_returns(nn.functional.multi_head_attention_forward, sample)
        with multihead.backend("exact"):
            ours = raises_or_returns(multihead.multi_head_attention_forward, sample)
        assert type(ours) is type(theirs), ours
        assert not isinstance(theirs, Exception), theirs
        assert_equal(ours, theirs)
        if requires_grad:
            inputs = leaves(sample)
            assert_equal(gradients(ours, inputs), gradients(theirs, inputs))
