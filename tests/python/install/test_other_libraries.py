# SPDX-License-Identifier: MIT
"""Code that calls torch.nn.functional.scaled_dot_product_attention by its name needs
install() alone: a ViT of timm, and calls as diffusers and Whisper write them."""

import copy
import importlib.util
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from budget import assert_as_good, ways
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import multihead

# timm imports these for its data sets, and its models use none of them. torchvision as
# the index has it is for CUDA, and transformers cannot be imported beside it.
UNUSED = [
    "PIL",
    "torchvision",
    *(
        f"torchvision.{name}"
        for name in (
            "datasets",
            "models",
            "models.feature_extraction",
            "ops",
            "ops.misc",
            "transforms",
            "transforms.functional",
        )
    ),
]


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    """A ViT-tiny of timm with two layers and random weights, for pictures of 64 × 64."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is absent (requirements/timm.txt)")
    modules = {name: mock.MagicMock() for name in UNUSED}
    modules["PIL"].__version__ = "12.0"
    modules["torchvision.ops.misc"].FrozenBatchNorm2d = nn.Identity
    with mock.patch.dict(sys.modules, modules):
        timm = importlib.import_module("timm")
        torch.manual_seed(0)
        return timm.create_model(
            "vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10
        )


def logits_and_gradients(
    model: nn.Module, pictures: Tensor, training: bool
) -> tuple[Tensor, ...]:
    model = copy.deepcopy(model).to(pictures.dtype).train(training)
    if not training:
        with torch.no_grad():
            return (model(pictures),)
    logits = model(pictures)
    logits.square().sum().backward()
    return logits, *(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_a_vit_of_timm(vit: nn.Module, training: bool) -> None:
    pictures = torch.randn(2, 3, 64, 64)
    theirs = logits_and_gradients(vit, pictures, training)
    exact = logits_and_gradients(vit, pictures.double(), training)
    multihead.reset_stats()
    with multihead.installed():
        ours = logits_and_gradients(vit, pictures, training)
    assert ways() == {"fused": 2}
    assert_as_good(ours, theirs, exact)


def as_diffusers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every argument by its name; heads lie beside one another, (B, L, H, D)."""
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        query=query,
        key=key,
        value=value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
    )
    return out.permute(0, 2, 1, 3)


def as_whisper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The function imported by its name, before install()."""
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.permute(0, 2, 1, 3).flatten(start_dim=2)


@pytest.mark.parametrize("keys", [20, 7], ids=["self", "cross"])
@pytest.mark.parametrize("attend", [as_diffusers, as_whisper])
def test_other_code(attend: Callable[..., Tensor], keys: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 4, 40) for n in (20, keys, keys)]
    theirs, exact = attend(*inputs), attend(*(x.double() for x in inputs))
    multihead.reset_stats()
    with multihead.installed():
        ours = attend(*inputs)
    assert ways() == {"fused": 1}
    assert_as_good(ours, theirs, exact)
