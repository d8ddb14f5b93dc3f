# SPDX-License-Identifier: MIT
"""The projections of a module: which are to be called, which may be read instead,
and what multi-head attention and grouped-query attention make of each other's."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from ._call import call
from ._subclasses import has_own_rules

_ops = torch.ops.multihead
_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
_INPUTS = ("q_proj", "k_proj", "v_proj")


def is_plain(linear: nn.Module) -> bool:
    """Whether calling linear is to multiply by its weight and to add its bias.

    So that one operator may do it with others. Not so where it was replaced, also by
    a subclass (LoRA, quantized, parametrized), has hooks or a forward of its own, or
    has weights with rules of their own (DTensor).
    """
    return not (
        type(linear) not in _LINEAR
        or linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or "forward" in linear.__dict__
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
        or has_own_rules(linear._parameters["weight"])
    )


def is_gathered_on_call(linear: nn.Module) -> bool:
    """Whether the weight of linear lies on several processes until it is called: it is
    a DTensor, or fully_shard was called with linear itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = fsdp is not None and isinstance(linear, fsdp.FSDPModule)
    return sharded or has_own_rules(linear._parameters.get("weight"))


def check_readable(function: str, **linears: nn.Module) -> None:
    """TypeError where a weight is not all that a projection does: a LoRA, say.

    One that was parametrized is read as it is now.
    """
    for name, linear in linears.items():
        if parametrize.type_before_parametrizations(linear) not in _LINEAR:
            raise TypeError(
                f"{function}: {name} must be a torch.nn.Linear, got "
                f"{type(linear).__qualname__}: merge it into one"
            )


def pooled_state(mha: nn.MultiheadAttention, num_kv_heads: int) -> dict[str, Tensor]:
    """The state_dict of a GroupedQueryAttention: key/value heads averaged in groups.

    TypeError where out_proj does more than its weight says.
    """
    check_readable("from_multihead", out_proj=mha.out_proj)

    def pool(rows: Tensor) -> Tensor:
        pooled: Tensor = call(
            _ops.pool_heads.default, rows, mha.num_heads, num_kv_heads
        )
        return pooled

    packed = mha.in_proj_weight
    weights = (
        (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
        if packed is None
        else packed.chunk(3)
    )
    kinds = {"weight": weights}
    if mha.in_proj_bias is not None:
        kinds["bias"] = mha.in_proj_bias.chunk(3)
    state: dict[str, Tensor] = {}
    for kind, (query, key, value) in kinds.items():
        parts = (query, pool(key), pool(value), getattr(mha.out_proj, kind))
        names = (f"{name}.{kind}" for name in (*_INPUTS, "out_proj"))
        state.update(zip(names, parts, strict=True))
    return state


def repeated_state(
    gqa: nn.Module, num_heads: int, num_kv_heads: int
) -> dict[str, Tensor]:
    """The state_dict of a MultiheadAttention: each key/value head for its group.

    The weights stay apart unless they can be packed. TypeError where a projection
    does more than its weight says.
    """
    children: dict[str, Any] = {
        name: gqa.get_submodule(name) for name in (*_INPUTS, "out_proj")
    }
    check_readable("to_multihead", **children)
    out_proj = children.pop("out_proj")

    def repeat(rows: Tensor) -> Tensor:
        repeated: Tensor = _ops.repeat_heads(rows, num_heads, num_kv_heads)
        return repeated

    query, key, value = children.values()
    weights = (query.weight, repeat(key.weight), repeat(value.weight))
    state = {"out_proj.weight": out_proj.weight}
    if weights[0].shape == weights[1].shape == weights[2].shape:
        state["in_proj_weight"] = torch.cat(weights)
    else:
        named = zip(_INPUTS, weights, strict=True)
        state |= {f"{name}_weight": weight for name, weight in named}
    if out_proj.bias is not None:
        biases = (query.bias, repeat(key.bias), repeat(value.bias))
        state["in_proj_bias"] = torch.cat(biases)
        state["out_proj.bias"] = out_proj.bias
    return state
