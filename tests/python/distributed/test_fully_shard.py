# SPDX-License-Identifier: MIT
"""Modules under FSDP2, alone and with projections of their own, in encoders too."""

import copy

import pytest
import torch
from layers import CLOSE, gradients, inputs, layer, trained_on, values
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import multihead
from multihead.distributed import AttentionParallel

PROJECTIONS = ("out_proj", "q_proj", "k_proj", "v_proj")


@on_ranks(2)
@pytest.mark.parametrize("backend", ["auto", "exact"])
@pytest.mark.parametrize(
    ("kind", "children", "stays"),
    [
        ("packed", (), False),
        ("packed", ("out_proj",), False),
        ("packed", ("out_proj",), True),
        ("separate", ("out_proj",), False),
        ("grouped", (), False),
        ("grouped", ("out_proj",), False),
        ("grouped", PROJECTIONS, False),
    ],
)
def test_a_module_and_its_projections(world, backend, kind, children, stays):
    """stays: what a call has gathered stays gathered, up to the next step."""
    alone, sharded = layer(kind), layer(kind)
    options = dict(mesh=init_device_mesh("cpu", (world,)))
    options |= dict(reshard_after_forward=not stays)
    for name in children:
        fully_shard(getattr(sharded, name), **options)
    fully_shard(sharded, **options)
    assert all(isinstance(x, DTensor) for x in sharded.parameters())
    given = inputs(alone)
    with multihead.backend(backend):
        for _ in range(2):
            expected = trained_on(alone, given)
            torch.testing.assert_close(trained_on(sharded, given), expected, **CLOSE)
        with torch.no_grad():
            got, expected = (module.eval()(*given) for module in (sharded, alone))
        torch.testing.assert_close(got, expected, **CLOSE)


def encoder():
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    return nn.TransformerEncoder(one, 2, enable_nested_tensor=False)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("names", ["", "self_attn", "self_attn.out_proj", "all"])
def test_layers_of_an_encoder(world, when, names):
    """replace_attention before fully_shard, or after it."""
    alone, sharded = encoder(), encoder()
    mesh = init_device_mesh("cpu", (world,))
    if when == "before":
        multihead.replace_attention(sharded)
    names = ["self_attn.out_proj", "self_attn"] if names == "all" else [names]
    for each in sharded.layers:
        for name in filter(None, names):
            fully_shard(each.get_submodule(name), mesh=mesh)
        fully_shard(each, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    if when == "after":
        assert len(multihead.replace_attention(sharded).replaced) == 2
    attention = sharded.layers[0].self_attn
    assert isinstance(attention, multihead.MultiheadAttention)
    assert isinstance(attention, FSDPModule) == ("self_attn" in names)
    x = inputs(layer("packed"))[0]
    padding = torch.tensor(
        [[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]]
    )
    for module in (alone, sharded):
        module(x, src_key_padding_mask=padding).square().sum().backward()
    torch.testing.assert_close(gradients(sharded), gradients(alone), **CLOSE)
    with torch.no_grad():
        for module in (alone, sharded):
            module.eval()
        torch.testing.assert_close(sharded(x), alone(x), **CLOSE)


@on_ranks(2)
def test_what_was_replaced_before_it_was_wrapped_is_not_restored(world):
    """It would lose the methods of FSDPModule, or the forward of its heads."""
    mesh = init_device_mesh("cpu", (world,))

    def wrapped(wrap, kind):
        module = nn.MultiheadAttention(16, 4, batch_first=True)
        assert multihead.replace_attention(module).replaced
        wrap(module)
        same = type(module)
        (only,) = multihead.restore_attention(module)
        reason = f"has become {kind} since: restore it before it is wrapped"
        assert (only.replaced, only.reason, type(module)) == (False, reason, same)

    style = AttentionParallel()
    wrapped(lambda x: fully_shard(x, mesh=mesh), "FSDPMultiheadAttention")
    wrapped(lambda x: parallelize_module(x, mesh, style), "ParallelMultiheadAttention")
    # The other way round nothing is in the way.
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    fully_shard(module, mesh=mesh)
    same = type(module)
    assert multihead.replace_attention(module).replaced
    assert multihead.restore_attention(module).replaced and type(module) is same


@on_ranks(2)
@pytest.mark.parametrize("kind", ["packed", "grouped"])
def test_heads_are_shared_out_before_parameters_are_sharded(world, kind):
    mesh, module = init_device_mesh("cpu", (world,)), layer(kind)
    fully_shard(module, mesh=mesh)
    words = (
        "parameters must not be distributed already: parallelize_module comes before"
    )
    with pytest.raises(ValueError, match=f"^AttentionParallel: {words}"):
        parallelize_module(module, mesh, AttentionParallel())


@on_ranks(4)
@pytest.mark.parametrize("kind", ["packed", "separate", "grouped"])
@pytest.mark.parametrize("children", [(), PROJECTIONS])
def test_heads_shared_out_and_parameters_sharded(kind, children):
    """On a mesh of 2 x 2; the projections sharded by themselves, too."""
    alone, both = layer(kind), layer(kind)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    parallelize_module(both, mesh["heads"], AttentionParallel())
    for name in children:
        if hasattr(both, name):
            fully_shard(both.get_submodule(name), mesh=mesh["data"])
    fully_shard(both, mesh=mesh["data"])
    torch.testing.assert_close(values(both), values(alone), rtol=0, atol=0)
    given = inputs(alone, batch=2)
    expected = trained_on(copy.deepcopy(alone), given)
    torch.testing.assert_close(trained_on(both, given), expected, **CLOSE)
