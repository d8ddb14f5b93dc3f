# SPDX-License-Identifier: MIT
"""Heads shared out over processes: what one process computes, the same parameters."""

import subprocess
import sys

import pytest
import torch
from layers import CLOSE, inputs, layer, trained_on, values, whole
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.bias import causal_lower_right

import multihead
from multihead.distributed import AttentionParallel

KINDS = ["packed", "separate", "grouped"]


def parallel(module, world, **layouts):
    mesh = init_device_mesh("cpu", (world,))
    return parallelize_module(module, mesh, AttentionParallel(**layouts))


def check(kind, world, given, form=None, **options):
    """One process and `world` agree on results and gradients."""
    alone, shared = (layer(kind, **(form or {})) for _ in range(2))
    parallel(shared, world)
    expected = trained_on(alone, given, **options)
    torch.testing.assert_close(trained_on(shared, given, **options), expected, **CLOSE)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_those_of_one_process(world, kind, bias):
    query, key, value = inputs(layer(kind))
    check(kind, world, [query, key, value], dict(bias=bias))
    if kind != "separate":
        check(kind, world, [query, query, query], dict(bias=bias))
        check(kind, world, [query, key, key], dict(bias=bias))


def options_of(heads):
    """Masks of 3 rows, 5 queries and 6 keys, and what else changes a call."""
    torch.manual_seed(9)
    blocked = torch.rand(3 * heads, 5, 6) > 0.7
    padding = torch.tensor([[False] * each + [True] * (6 - each) for each in (6, 4, 1)])
    added = torch.randn(3 * heads, 5, 6, dtype=torch.float64)
    return {
        "per head": dict(attn_mask=blocked),
        "per head, added": dict(attn_mask=added, average_attn_weights=False),
        "shared": dict(attn_mask=blocked[0], key_padding_mask=padding),
        "shared, added": dict(attn_mask=added[0]),
        "causal": dict(is_causal=True, need_weights=False),
        "weights per head": dict(key_padding_mask=padding, average_attn_weights=False),
    }


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", options_of(1))
def test_masks_and_weights(world, kind, name):
    module = layer(kind)
    check(kind, world, inputs(module), **options_of(module.num_heads)[name])


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_what_one_process_would_drop(world, kind):
    """Forward, backward and in the weights, from the same state of the generator."""
    alone, shared = (layer(kind, dropout=0.4) for _ in range(2))
    parallel(shared, world)
    results = []
    for module in (alone, shared):
        torch.manual_seed(11)
        with multihead.backend("fused"):
            options = dict(average_attn_weights=False)
            results.append(trained_on(module, inputs(alone), **options))
        results[-1] += (torch.rand(()),)
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    assert 0.3 < (results[0][1] == 0).double().mean() < 0.5


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_batches(world, kind):
    module = layer(kind, batch_first=False)
    given, options = inputs(module), options_of(module.num_heads)
    check(kind, world, given, dict(batch_first=False), **options["per head"])
    one = [x[:, 0] for x in given]
    mask = options["per head, added"]["attn_mask"][: module.num_heads]
    for average in (True, False):
        check(kind, world, one, attn_mask=mask, average_attn_weights=average)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_bias_and_the_exact_path(world, kind):
    with multihead.backend("exact"):
        check(kind, world, inputs(layer(kind)), attn_mask=causal_lower_right(5, 6))


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_inference_mode(world, kind, bias):
    alone, shared = (layer(kind, bias=bias).eval() for _ in range(2))
    parallel(shared, world)
    given = inputs(alone)
    with torch.inference_mode():
        for options in ({}, dict(need_weights=False)):
            expected = alone(*given, **options)
            torch.testing.assert_close(shared(*given, **options), expected, **CLOSE)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(world, kind):
    """In one graph, forward and backward, with the bits of the module as it is."""
    module = parallel(layer(kind, dropout=0.3), world)
    options = dict(is_causal=True, need_weights=False)
    given = inputs(module, queries=6)

    def results(attention):
        torch.manual_seed(12)
        return trained_on(attention, given, **options)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        @torch.compile(backend="aot_eager", fullgraph=True)
        def forward(self, *tensors, **options):
            return self.attention(*tensors, **options)

    expected = results(module)
    out, _, leaves, parameters = results(Compiled())
    torch.testing.assert_close(
        (out, leaves), (expected[0], expected[2]), rtol=0, atol=0
    )
    for name, gradient in expected[3].items():
        assert torch.equal(parameters["attention." + name], gradient)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_inputs_and_outputs(rank, world, kind):
    """Sequences in shards around the layer, as between norms of a sequence parallel."""
    alone, shared = layer(kind), layer(kind)
    layouts = dict(input_layouts=Shard(1), output_layouts=Shard(1))
    parallel(shared, world, **layouts, use_local_output=False)
    given = inputs(alone, queries=6)
    expected, weights = alone(*given)
    parts = [x.chunk(world, 1)[rank].clone().requires_grad_() for x in given]
    out, got = shared(*parts)
    assert isinstance(out, DTensor) and out.placements == (Shard(1),)
    torch.testing.assert_close((whole(out), got), (expected, weights), **CLOSE)
    out.full_tensor().square().sum().backward()
    leaves = [x.clone().requires_grad_() for x in given]
    alone(*leaves)[0].square().sum().backward()
    for part, leaf in zip(parts, leaves):
        torch.testing.assert_close(part.grad, leaf.grad.chunk(world, 1)[rank], **CLOSE)


@on_ranks(2)
def test_dtensors_are_taken_as_they_lie(world):
    alone, shared = layer("packed"), layer("packed")
    parallel(shared, world)
    query, key, value = inputs(alone)
    mesh = shared.in_proj_weight.device_mesh
    placed = [
        torch.distributed.tensor.distribute_tensor(x, mesh, [Shard(2)])
        for x in (query, key, value)
    ]
    torch.testing.assert_close(shared(*placed), alone(query, key, value), **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_dtensors_of_the_first_rank(rank, world, kind):
    shared = layer(kind)
    expected = values(shared)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.add_(rank)
    shared.out_proj.weight.requires_grad_(False)
    parallel(shared, world)
    assert list(shared.state_dict()) == list(layer(kind).state_dict())
    torch.testing.assert_close(values(shared), expected, rtol=0, atol=0)
    for name, parameter in shared.named_parameters():
        layouts = {"out_proj.weight": Shard(1), "out_proj.bias": Replicate()}
        assert parameter.placements == (layouts.get(name, Shard(0)),)
        assert parameter.requires_grad == (name != "out_proj.weight")
        shared_out = name != "out_proj.bias"
        assert parameter.to_local().numel() == parameter.numel() // world**shared_out


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_steps_of_an_optimizer(world, kind):
    alone, shared = layer(kind), layer(kind)
    parallel(shared, world)
    norms = []
    for module in (alone, shared):
        # Of the keys' bias the gradient is 0 but for rounding: no steps from that.
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-3)
        for _ in range(3):
            trained_on(module, inputs(alone))
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            norms.append(whole(norm))
            optimizer.step()
    torch.testing.assert_close(norms[3:], norms[:3], **CLOSE)
    torch.testing.assert_close(values(shared), values(alone), rtol=1e-9, atol=1e-11)


@on_ranks(2)
def test_modules_inside_a_model(world):
    """By names with wildcards, PyTorch's attention made this package's first."""
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        one = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64
        )
        models.append(nn.TransformerEncoder(one, 2, enable_nested_tensor=False))
    alone, shared = models
    multihead.replace_attention(shared)
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(shared, mesh, {"layers.*.self_attn": AttentionParallel()})
    x = inputs(layer("packed"))[0]
    for module in models:
        module.eval()
    torch.testing.assert_close(shared(x), alone(x), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(shared(x), alone(x), **CLOSE)


@on_ranks(3)
def test_heads_that_do_not_divide(world):
    for kind, sizes in (
        ("packed", "num_heads=4 and num_kv_heads=4"),
        ("grouped", "num_heads=8 and num_kv_heads=4"),
    ):
        words = f"num_heads and num_kv_heads must be divisible .*mesh, 3, got {sizes}$"
        module = layer(kind)
        with pytest.raises(ValueError, match=words):
            parallel(module, world)
        assert not any(isinstance(x, DTensor) for x in module.parameters())


@on_ranks(2)
def test_what_cannot_be_shared_out(world):
    def refused(error, words, module, mesh=None):
        mesh = mesh or init_device_mesh("cpu", (world,))
        with pytest.raises(error, match=f"^AttentionParallel: {words}"):
            parallelize_module(module, mesh, AttentionParallel())

    refused(
        TypeError,
        r"module must be .*got torch.nn.modules.activation.MultiheadAttention: "
        r"multihead.replace_attention\(model\) makes it one",
        nn.MultiheadAttention(16, 4),
    )
    refused(TypeError, "module must be .*linear.Linear$", nn.Linear(16, 16))
    for option in ("add_bias_kv", "add_zero_attn"):
        words = "module must have no add_bias_kv nor add_zero_attn"
        refused(ValueError, words, layer("packed", **{option: True}))
    mesh = init_device_mesh("cpu", (1, world))
    refused(ValueError, "device_mesh must be 1-D, got 2-D", layer("packed"), mesh)
    twice = parallel(layer("grouped"), world)
    refused(ValueError, "parameters must not be distributed already", twice)
    adapted = layer("grouped")
    adapted.k_proj = nn.Sequential(adapted.k_proj)
    refused(TypeError, "k_proj must be a torch.nn.Linear, got Sequential", adapted)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_refused(world, kind):
    module = parallel(layer(kind), world)
    given = inputs(module)
    heads = module.num_heads
    words = rf"attn_mask must be \(B·H, .* = {3 * heads}, got \({2 * heads}, 5, 6\)"
    with pytest.raises(ValueError, match=words):
        module(*given, attn_mask=torch.ones(2 * heads, 5, 6, dtype=torch.bool))
    cache = multihead.KVCache(3, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="^forward: cache must be None"):
        module(given[0], given[0], given[0], cache=cache)
    with pytest.raises(ValueError, match="^append_to_cache: cache must be None"):
        module.append_to_cache(cache, *given[1:])
    with pytest.raises(TypeError, match="tensors must be dense ones, got 'query'"):
        module("query", *given[1:])
    nested = torch.nested.nested_tensor([given[0][0]])
    with pytest.raises(TypeError, match="must be dense ones, got a nested one"):
        module(nested, *given[1:])


def test_importing_the_package_imports_no_engine():
    code = "import sys, multihead; print('torch.distributed.tensor.parallel' in sys.modules)"
    code += "; import multihead.distributed as d; print(d.AttentionParallel())"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.splitlines() == [
        "False",
        "AttentionParallel(input_layouts=R, output_layouts=R, use_local_output=True)",
    ]
