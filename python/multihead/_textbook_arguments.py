# SPDX-License-Identifier: MIT
"""Arguments of the textbook forms: where weights come from, and what must hold.

Kept apart from textbook.py, which is about attention. `name` is the form that asks;
errors are ValueError, or TypeError for another type, and read "<name>: <argument> must
<condition>, got <value>".
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._call import check_int, check_type, shown
from ._subclasses import has_own_rules

Weights = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]


class Projection(NamedTuple):
    """One learned linear map, x (…, in) → x·weightᵀ + bias (…, out).

    An nn.Linear has the same two members and may stand in its place.
    """

    weight: Tensor  # (out, in)
    bias: Tensor | None = None  # (out)


class AttentionWeights(NamedTuple):
    """The four learned maps of an attention layer."""

    query: Projection | nn.Linear  # (E, E)
    key: Projection | nn.Linear  # (G·d, E)
    value: Projection | nn.Linear  # (G·d, E)
    output: Projection | nn.Linear  # (E, E)


# --- Weights: read from elsewhere, or drawn ------------------------------------------


def read_weights(
    name: str, weights: Weights, widths: tuple[int, int]
) -> AttentionWeights:
    """The four maps from whatever `weights` is; widths = (E, G·d)."""
    if isinstance(weights, nn.Module):
        zero_attn = getattr(weights, "add_zero_attn", False)
        _require(not zero_attn, name, "weights must be without add_zero_attn", True)
        weights = dict(weights.named_parameters())
    if isinstance(weights, Mapping):
        layer = _from_names(name, weights)
    else:
        words = "a module, a dictionary or four matrices"
        check_type(name, "weights", weights, Sequence, words)
        condition = "weights must be the query, key, value and output matrix"
        _require(len(weights) == 4, name, condition, f"{len(weights)} of them")
        layer = AttentionWeights(*map(Projection, weights))
    width, kv_width = widths
    rows = (width, kv_width, kv_width, width)
    for role, size, by in zip(layer._fields, rows, layer, strict=True):
        weight, bias = by.weight, by.bias
        _check_tensor(name, f"weights of the {role}", weight)
        condition = f"weights must have the {role} matrix of shape {(size, width)}"
        _require(weight.shape == (size, width), name, condition, tuple(weight.shape))
        condition = f"weights must have the {role} bias of shape {(size,)}"
        fits = bias is None or bias.shape == (size,)
        _require(fits, name, condition, None if bias is None else tuple(bias.shape))
    return layer


def _from_names(name: str, tensors: Mapping[str, Tensor]) -> AttentionWeights:
    """From the names of nn.MultiheadAttention or multihead.GroupedQueryAttention."""
    names = sorted(tensors)
    extra = {"bias_k", "bias_v"} & tensors.keys()
    _require(not extra, name, "weights must be without bias_k and bias_v", names)
    packed = "in_proj_weight" in tensors
    separate = ("out_proj",) if packed else ("q_proj", "k_proj", "v_proj", "out_proj")
    condition = (
        "weights must have in_proj_weight, or q_proj.weight, k_proj.weight and "
        "v_proj.weight, and out_proj.weight"
    )
    found = all(f"{role}.weight" in tensors for role in separate)
    _require(found, name, condition, names)
    maps = [
        Projection(tensors[f"{role}.weight"], tensors.get(f"{role}.bias"))
        for role in separate
    ]
    if packed:
        weights = tensors["in_proj_weight"].tensor_split(3)
        bias = tensors.get("in_proj_bias")
        biases = (None,) * 3 if bias is None else bias.tensor_split(3)
        maps = [*map(Projection, weights, biases), *maps]
    condition = "weights must have biases for query, key and value, or for none of them"
    _require(len({each.bias is None for each in maps[:3]}) == 1, name, condition, names)
    return AttentionWeights(*maps)


def draw(width: int, rows: tuple[int, ...], like: Tensor) -> AttentionWeights:
    """The output matrix as nn.Linear draws it, then one by Xavier for each of rows:
    for query, key and value, which may be narrower, or for the three together, as
    nn.MultiheadAttention(bias=False) draws them.

    Xavier draws from ±√(6 / (rows + columns)), which keeps the variance of activations
    the same from layer to layer, forward and backward.
    """
    dtype, device = like.dtype, like.device
    output = nn.Linear(width, width, bias=False, dtype=dtype, device=device).weight
    drawn = [
        nn.init.xavier_uniform_(
            nn.Parameter(torch.empty(count, width, dtype=dtype, device=device))
        )
        for count in rows
    ]
    inputs = drawn[0].chunk(3) if len(rows) == 1 else drawn
    return AttentionWeights(*map(Projection, (*inputs, output)))


# --- Checks --------------------------------------------------------------------------


def _require(holds: bool, name: str, condition: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: {condition}, got {got}")


def _check_tensor(name: str, argument: str, x: Tensor, words: str = "a tensor") -> None:
    """A plain one: the memory of a CausalBias, say, does not hold what it means."""
    check_type(name, argument, x, Tensor, words)
    if has_own_rules(x):
        raise TypeError(f"{name}: {argument} must be a plain tensor, got {shown(x)}")


def check_heads(name: str, whole: str, size: int, part: str, count: int) -> None:
    """So many features or heads (size) must fall into count equal parts."""
    check_int(name, whole, size)
    check_int(name, part, count)
    _require(count > 0, name, f"{part} must be positive", count)
    condition = f"{whole} must be a positive multiple of {part}"
    divides = size > 0 and size % count == 0
    _require(divides, name, condition, f"{size} ({part}={count})")


def check_share(name: str, argument: str, share: float) -> None:
    check_type(name, argument, share, Real, "a number")
    _require(0.0 <= share <= 1.0, name, f"{argument} must be from 0 to 1", share)


def check_inputs(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    width: int,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> None:
    """q (N, Lq, E), k and v (N, Lk, E)."""
    for argument, x in zip(names, inputs, strict=True):
        _check_tensor(name, argument, x)
    q, k, v = (tuple(x.shape) for x in inputs)
    for argument, shape in zip(names, (q, k, v), strict=True):
        condition = f"{argument} must have the shape (N, L, {width})"
        _require(len(shape) == 3 and shape[2] == width, name, condition, shape)
    query, key, value = names
    condition = f"{key} must have the batch size of {query}"
    _require(k[0] == q[0], name, condition, f"{k} ({query}.shape={q})")
    condition = f"{value} must have the shape of {key}"
    _require(v == k, name, condition, f"{v} ({key}.shape={k})")


def check_attention_inputs(
    name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> None:
    """q (…, Lq, d), k (…, Lk, d), v (…, Lk, dv), mask broadcastable to (…, Lq, Lk)."""
    for argument, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, argument, x)
    queries, keys, values = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    fits = len(queries) >= 2 and queries[-1] > 0
    _require(fits, name, "q must have the shape (…, Lq, d), d > 0", queries)
    fits = len(keys) > 1 and (*keys[:-2], keys[-1]) == (*queries[:-2], queries[-1])
    condition = "k must have the shape (…, Lk, d) of q"
    _require(fits, name, condition, f"{keys} (q.shape={queries})")
    fits = len(values) == len(keys) and values[:-1] == keys[:-1]
    condition = "v must have the shape (…, Lk, dv) of k"
    _require(fits, name, condition, f"{values} (k.shape={keys})")
    if mask is not None:
        _check_tensor(name, "mask", mask, "a tensor or None")
        _check_mask(name, mask, (*queries[:-1], keys[-2]))


def _check_mask(name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    fits = mask.dim() <= len(shape) and all(
        size in (1, full)
        for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    _require(fits, name, f"mask must broadcast to {shape}", tuple(mask.shape))


def mask_per_head(name: str, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask in a shape that broadcasts to (N, H, Lq, Lk); q, k (N, H, L, d)."""
    batch, heads, queries, _ = q.shape
    _check_tensor(name, "mask", mask, "a tensor or None")
    if mask.dim() == 3:
        per_head = mask.size(0) == batch * heads
        mask = (
            torch.unflatten(mask, 0, (batch, heads)) if per_head else mask.unsqueeze(1)
        )
    _check_mask(name, mask, (batch, heads, queries, k.size(-2)))
    return mask
