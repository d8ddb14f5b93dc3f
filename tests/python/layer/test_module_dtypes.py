# SPDX-License-Identifier: MIT
"""A bias of the in-projection that has another dtype than its weight."""

import itertools

import pytest
import torch
from equal import assert_equal
from paths import fused_calls
from torch import nn
from torch.testing import assert_close

from multihead import MultiheadAttention, backend

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PAIRS = list(itertools.permutations(DTYPES, 2))


def pair(dtype, bias_dtype, kdim):
    theirs = nn.MultiheadAttention(8, 4, batch_first=True, dtype=dtype, kdim=kdim)
    ours = MultiheadAttention(8, 4, batch_first=True, dtype=dtype, kdim=kdim)
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
    ours.load_state_dict(theirs.state_dict())
    for mha in (ours, theirs):
        mha.in_proj_bias = nn.Parameter(mha.in_proj_bias.to(bias_dtype))
    return ours, theirs


@pytest.mark.parametrize("kdim", [8, 6])
@pytest.mark.parametrize("dtype, bias_dtype", PAIRS, ids=str)
def test_an_in_projection_bias_of_another_dtype(dtype, bias_dtype, kdim):
    """As PyTorch takes it, where batches come first."""
    torch.manual_seed(0)
    ours, theirs = pair(dtype, bias_dtype, kdim)
    x, y = torch.randn(2, 5, 8, dtype=dtype), torch.randn(2, 5, kdim, dtype=dtype)
    out, weights = ours(x, y, x)
    assert out.dtype == weights.dtype == dtype
    out.float().square().sum().backward()
    assert ours.in_proj_bias.grad.dtype == bias_dtype
    assert ours.in_proj_bias.grad.isfinite().all()
    assert "attention" in fused_calls(ours, x, y, x)
    same = MultiheadAttention(8, 4, batch_first=True, dtype=dtype, kdim=kdim)
    same.load_state_dict(ours.state_dict())
    assert_close(same(x, y, x), (out, weights))
    expected = theirs(x, y, x)
    with backend("exact"):
        assert_equal(ours(x, y, x), expected)


def test_sequence_first_pytorch_refuses_it():
    """Its own function adds in another way there. auto has no reason to refuse."""
    theirs = nn.MultiheadAttention(8, 4)
    ours = MultiheadAttention(8, 4)
    for mha in (ours, theirs):
        mha.in_proj_bias = nn.Parameter(mha.in_proj_bias.double())
    x = torch.randn(5, 2, 8)
    text = "self and mat2 must have the same dtype"
    with pytest.raises(RuntimeError, match=text):
        theirs(x, x, x)
    with backend("exact"), pytest.raises(RuntimeError, match=text):
        ours(x, x, x)
    assert ours(x, x, x)[0].dtype == torch.float32
