# SPDX-License-Identifier: MIT
"""torch._native_multi_head_attention called directly, as PyTorch's modules never do:
the same results or the same errors with install()."""

import pytest
import torch
from budget import ways
from equal import assert_equal

import multihead

B, H, L, E = 2, 2, 3, 4
MASKS = {
    "B11L": (B, 1, 1, L),
    "11LL": (1, 1, L, L),
    "BHLL": (B, H, L, L),
    "BLL": (B, L, L),
    "of each head": (B * H, L, L),
    "LL": (L, L),
    "BL": (B, L),
    "L": (L,),
    "too wide": (B, H, L, L + 1),
    "5-D": (1, B, H, L, L),
}


def arguments(**other):
    x = torch.randn(B, L, E)
    each = dict(
        query=x,
        key=x,
        value=x,
        embed_dim=E,
        num_head=H,
        qkv_weight=torch.randn(3 * E, E),
        qkv_bias=torch.randn(3 * E),
        proj_weight=torch.randn(E, E),
        proj_bias=torch.randn(E),
    )
    return each | other


def outcome(**arguments):
    try:
        with torch.no_grad():
            return torch._native_multi_head_attention(**arguments)
    except (RuntimeError, IndexError) as error:
        return type(error), str(error)


def assert_as_without(**arguments):
    theirs = outcome(**arguments)
    with multihead.installed():
        ours = outcome(**arguments)
    if isinstance(theirs[0], type):
        assert ours == theirs
        assert multihead.stats().calls("fused") == 0
    elif ways().get("fused"):
        torch.testing.assert_close(ours, theirs)
    else:
        assert_equal(ours, theirs)


@pytest.mark.parametrize("mask_type", [None, 0, 1, 2, 3, -1])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, mask_type):
    mask = torch.rand(MASKS[name]) < 0.3
    mask[..., 0] = False
    assert_as_without(**arguments(mask=mask, mask_type=mask_type))
    taken = [("BHLL", 2), ("LL", 0), ("BL", 1)]
    assert ("fused" in ways()) == ((name, mask_type) in taken)


WRONG = {
    "2-D": dict.fromkeys(("query", "key", "value"), torch.randn(L, E)),
    "cross-attention": dict.fromkeys(("key", "value"), torch.randn(B, L + 1, E)),
    "embed_dim": dict(embed_dim=2 * E),
    "num_head": dict(num_head=3),
    "weight": dict(qkv_weight=torch.randn(2 * E, E)),
    "bias": dict(qkv_bias=torch.randn(E)),
    "output": dict(proj_weight=torch.randn(E, E + 1)),
    "dtype": dict(qkv_weight=torch.randn(3 * E, E, dtype=torch.float64)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "nested"),
    [(name, False) for name in WRONG]
    + [(name, True) for name in WRONG if "key" not in WRONG[name]],
)
def test_errors_are_pytorchs(name, nested):
    wrong = dict(WRONG[name])
    if nested:
        x = torch.nested.nested_tensor([torch.randn(n, E) for n in (2, L)])
        wrong |= dict(query=x, key=x, value=x, need_weights=False)
    assert isinstance(outcome(**arguments(**wrong))[0], type)
    assert_as_without(**arguments(**wrong))
