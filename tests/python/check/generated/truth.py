# SPDX-License-Identifier: MIT
"""What a program computes, beside plain loops: the generator's own judgement, which
knows how it wrote the program and nothing of `check`."""

import itertools
import math
from dataclasses import dataclass, field

import torch
from error_budget import BUDGETS
from torch import Tensor, nn

from .norms import EPSILONS, Norm
from .program import input_names, mask_name
from .spec import Spec

BATCH, QUERIES, KEYS, EMBED, HEADS, GROUPS = 2, 5, 7, 48, 6, 2


@dataclass
class Computed:
    """Results of one program by name: "out", "weights", "gradients", "training". The
    loops have the first two, and how far rounding may take each element."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    allowed: dict[str, Tensor] = field(default_factory=dict)

    def differs(self, other: "Computed", name: str) -> bool:
        """From the loops beyond rounding, from another program at all."""
        a, b = self.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            return False
        if a.shape != b.shape:
            return True
        same = (a == b) | (a.isnan() & b.isnan())
        near = (a - b).abs() <= other.allowed.get(name, 0)
        return not bool((same | near).all())


@dataclass
class Sized:
    """A tensor, and the same formula on absolute values."""

    value: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Sized":
        return cls(x, x.abs())

    def map(self, change) -> "Sized":
        return Sized(change(self.value), change(self.scale))

    def __add__(self, other: "Sized") -> "Sized":
        return Sized(self.value + other.value, self.scale + other.scale)

    def __matmul__(self, other: "Sized") -> "Sized":
        return Sized(self.value @ other.value, self.scale @ other.scale)

    def normed(self, norm: Norm | None, *places: str) -> "Sized":
        """By the norm of a program if that is at one of the places."""
        if norm is None or norm.place not in places:
            return self
        x, eps = self.value, norm.eps or EPSILONS[norm.kind]
        if norm.kind == "rms":
            eps = torch.finfo(x.dtype).eps if eps is None else eps
            y, size = nn.functional.rms_norm(x, x.shape[-1:], eps=eps), self.scale
            deviation = (x**2).mean(-1, keepdim=True).add(eps).sqrt()
        else:
            y = nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
            size = self.scale + self.scale.mean(-1, keepdim=True)
            deviation = x.var(-1, correction=0, keepdim=True).add(eps).sqrt()
        size = size + y.abs() * (y.abs() * self.scale).mean(-1, keepdim=True)
        return Sized(y, size / deviation + y.abs())


@dataclass
class Call:
    """One call of a program, and what the loops are to make of it."""

    arguments: list
    options: dict
    inputs: tuple[Tensor, Tensor, Tensor]  # batch first, or heads
    blocked: Tensor | None = None  # (B, 1, Lq, Lk) or what broadcasts to that
    added: Tensor | None = None


def call_of(s: Spec, generator: torch.Generator) -> Call:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = KEYS if s.inputs == "self" or s.equal else QUERIES
    if s.is_core:
        inputs = tuple(draw(BATCH, HEADS, n, 8) for n in (queries, KEYS, KEYS))
    elif s.inputs == "self":
        inputs = (draw(BATCH, KEYS, EMBED),) * 3
    else:
        x, y = draw(BATCH, queries, EMBED), draw(BATCH, KEYS, EMBED)
        inputs = (x, y, y if s.inputs == "cross" else draw(BATCH, KEYS, EMBED))
    arguments = []
    named = dict(zip(s.names, inputs)) if s.is_core else {}
    named = named or dict(zip(input_names(s).values(), inputs))
    for x in named.values():
        x = x.transpose(0, 1) if s.sequence_first else x
        arguments.append(x.numpy() if s.is_numpy else x)
    call = Call(arguments, {}, inputs)
    keep = torch.rand(queries, KEYS, generator=generator) > 0.4
    keep[:, 0] = True
    if s.mask == "padding":
        padded = torch.rand(BATCH, KEYS, generator=generator) > 0.6
        padded[:, 0] = False
        call.options[mask_name(s)] = padded
        call.blocked = padded[:, None, None, :]
    elif s.mask == "additive":
        call.added = draw(queries, KEYS).masked_fill(~keep, -math.inf)
        call.options[mask_name(s)] = call.added
    elif s.mask:
        if s.masks_of:
            each = (BATCH, HEADS) if s.masks_of == "heads" else (BATCH,)
            shape = (*each, queries, KEYS)
            keep = torch.rand(shape, generator=generator) > 0.4
            keep[..., 0] = True
        call.blocked = ~keep[:, None] if s.masks_of == "items" else ~keep
        given = keep.long() if s.mask == "keep" else ~keep
        call.options[mask_name(s)] = given.numpy() if s.is_numpy else given
    if s.flag:
        call.options["is_causal"] = True
    hidden = hidden_by_place(s, queries)
    if hidden is not None:
        call.blocked = hidden if call.blocked is None else call.blocked | hidden
    if s.returns == "asked":
        call.options["need_weights"] = True
    return call


def hidden_by_place(s: Spec, queries: int) -> Tensor | None:
    """(Lq, Lk), True where a key is too late or too early for a query."""
    if not (s.causal or s.flag or s.window):
        return None
    ahead = KEYS - queries if s.last else 0
    distance = torch.arange(KEYS) - torch.arange(queries)[:, None] - ahead
    hidden = distance > 0
    return hidden | (distance <= -s.window) if s.window else hidden


def projected(x: Sized, layer: tuple[Tensor, Tensor | None]) -> Sized:
    matrix, bias = layer
    y = x @ Sized.of(matrix.T)
    return y if bias is None else y + Sized.of(bias)


def plain(s: Spec, call: Call, weights: dict[str, tuple[Tensor, Tensor | None]]):
    """Output, weights, and the size of the largest score, by loops over items, heads
    and queries."""
    q, k, v = map(Sized.of, call.inputs)
    if not s.is_core:
        q = q.normed(s.norm, "before", "before_all")
        k, v = (x.normed(s.norm, *before_keys(s)) for x in (k, v))
        q, k, v = (projected(x, weights[r]) for x, r in zip((q, k, v), "qkv"))
        q, k = (x.normed(s.norm, "whole") for x in (q, k))
        groups = GROUPS if s.groups else HEADS
        q = q.map(lambda x: x.unflatten(-1, (HEADS, -1)).transpose(1, 2))
        k, v = (
            x.map(lambda x: x.unflatten(-1, (groups, -1)).transpose(1, 2))
            for x in (k, v)
        )
        q, k = (of_heads(s, x) for x in (q, k))
    context, probabilities, largest = attended(s, call, q, k, v)
    if s.is_core:
        return context, probabilities, largest
    merged = context.map(lambda x: x.transpose(1, 2).flatten(2))
    out = projected(merged.normed(s.norm, "context"), weights["o"])
    out = out.normed(s.norm, "out")
    if s.residual:
        out = out + Sized.of(call.inputs[0])
    out = out.normed(s.norm, "after")
    if s.sequence_first:
        out = out.map(lambda x: x.transpose(0, 1))
    return out, probabilities, largest


def before_keys(s: Spec) -> tuple[str, ...]:
    """Places of norms of what keys and values are made from."""
    return ("before", "before_all") if s.inputs == "self" else ("before_all",)


def of_heads(s: Spec, x: Sized) -> Sized:
    """What is done to queries or keys (B, H, L, d) before they meet: pairs of features
    are complex numbers, which positions turn."""
    x = x.normed(s.norm, "heads")
    if s.heads not in ("rotary_halves", "rotary_pairs"):
        return x
    shape = (2, -1) if s.heads == "rotary_halves" else (-1, 2)
    axis = -2 if s.heads == "rotary_halves" else -1
    real, imaginary = x.value.unflatten(-1, shape).unbind(axis)
    half = real.shape[-1]
    rates = 10000 ** (-torch.arange(half).double() / half)
    places = torch.arange(real.shape[-2]).double()
    turned = torch.complex(real, imaginary) * torch.exp(1j * places[:, None] * rates)
    sizes = x.scale.unflatten(-1, shape).sum(axis)
    value = torch.stack((turned.real, turned.imag), axis).flatten(-2)
    return Sized(value, torch.stack((sizes, sizes), axis).flatten(-2))


def attended(s: Spec, call: Call, q: Sized, k: Sized, v: Sized):
    """The same of heads: context, weights, and the size of the largest score."""
    batch, heads, queries, width = q.value.shape
    groups, keys = k.value.shape[1:3]
    group = heads // groups
    probabilities = torch.zeros(batch, heads, queries, keys, dtype=q.value.dtype)
    context = Sized.of(torch.zeros(batch, heads, queries, v.value.shape[3]).double())
    blocked, largest = call.blocked, 0.0
    if blocked is not None:
        blocked = blocked.expand(probabilities.shape)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        kv = b, h // group
        scores = k.value[kv] @ q.value[b, h, i] / math.sqrt(width)
        sizes = k.scale[kv] @ q.scale[b, h, i] / math.sqrt(width)
        if s.heads == "alibi":
            slope = 2 ** (-8 * (h + 1) / heads)
            line = -slope * (torch.arange(keys) - i).abs().double()
            scores, sizes = scores + line, sizes + line.abs()
        if call.added is not None:
            scores, sizes = scores + call.added[i], sizes + call.added[i].abs()
        if blocked is not None:
            scores = scores.masked_fill(blocked[b, h, i], -math.inf)
        seen = scores > -math.inf
        largest = max(largest, float(sizes[seen].max()))
        powers = torch.exp(scores - scores.max())
        p = powers / powers.sum()
        probabilities[b, h, i] = p
        context.value[b, h, i] = p @ v.value[kv]
        context.scale[b, h, i] = p @ v.scale[kv]
    return context, probabilities, largest


def weights_of(s: Spec, owner: object) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Matrices (out, in) and biases by role. owner: a module, or the layers or
    matrices that a function used, in their order."""
    names = dict(zip("qkvo", s.matrices))
    if not isinstance(owner, nn.Module):
        parts = list(owner)
        if s.form == "made":
            return {r: (x.weight, x.bias) for r, x in zip("qkvo", parts)}
        return {r: (x.T, None) for r, x in zip("qkvo", parts)}
    if s.projections == "matrices":
        return {r: (getattr(owner, n).T, None) for r, n in names.items()}
    out = getattr(owner, names["o"])
    found = {"o": (out.weight, out.bias)}
    for fused, roles in (("qkv", "qkv"), ("to_kv", "kv")):
        layer = getattr(owner, fused, None)
        if layer is not None:
            n = len(roles)
            biases = [None] * n if layer.bias is None else layer.bias.chunk(n)
            found |= dict(zip(roles, zip(layer.weight.chunk(n), biases)))
    for role in set("qkv") - set(found):
        layer = getattr(owner, names[role])
        if s.projections == "lists":
            bias = torch.cat([x.bias for x in layer]) if s.bias else None
            found[role] = (torch.cat([x.weight for x in layer]), bias)
        else:
            found[role] = (layer.weight, layer.bias)
    return found


def run(s: Spec, text: str) -> tuple[Computed, Computed]:
    """What the program computes, and the loops with its weights."""
    space: dict = {"__name__": "generated"}
    exec(compile(text, f"<{s.seed}>", "exec"), space)
    torch.manual_seed(0)
    call = call_of(s, torch.Generator().manual_seed(s.seed))
    if s.form == "module":
        sizes = [space["Config"]()] if s.config else [EMBED, HEADS]
        module = space[s.class_name](*sizes).double().eval()
        return _run_module(s, module, call)
    if s.is_core:
        called = space["scaled_dot_product_attention"](*call.arguments, **call.options)
        return _sorted(s, called), _of_loops(s, call, {})
    function = space["multi_head_attention"]
    if s.form == "made":
        layers: list[nn.Linear] = []
        space["nn"] = _Recording(layers)
        called = function(*call.arguments, EMBED, HEADS, **call.options)
        return _sorted(s, called), _of_loops(s, call, weights_of(s, layers))
    drawn = torch.randn(4, EMBED, EMBED, dtype=torch.float64) / 7
    given = [x.numpy() if s.is_numpy else x for x in drawn]
    called = function(*call.arguments, *given, HEADS, **call.options)
    return _sorted(s, called), _of_loops(s, call, weights_of(s, drawn))


class _Recording:
    """Stands for torch.nn: layers in float64, each kept."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers

    def Linear(self, *args: object, **options: object) -> nn.Linear:
        self.layers.append(nn.Linear(*args, **options, dtype=torch.float64))
        return self.layers[-1]


def _run_module(s: Spec, module: nn.Module, call: Call) -> tuple[Computed, Computed]:
    found = _sorted(s, module(*call.arguments, **call.options))
    expected = _of_loops(s, call, weights_of(s, module))
    out = found.tensors["out"]
    if out.requires_grad:
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.tensors["gradients"] = torch.cat([g.flatten() for g in gradients])
    module.train()
    torch.manual_seed(1)
    found.tensors["training"] = _sorted(
        s, module(*call.arguments, **call.options)
    ).tensors["out"]
    return found, expected


def _sorted(s: Spec, result: object) -> Computed:
    parts = result if isinstance(result, tuple) else (result,)
    tensors = [torch.as_tensor(part) for part in parts]
    return Computed(dict(zip(("out", "weights"), tensors)))


@torch.no_grad()
def _of_loops(s: Spec, call: Call, weights: dict) -> Computed:
    out, probabilities, largest = plain(s, call, weights)
    shown = probabilities.mean(1) if s.returns == "mean" else probabilities
    budget = BUDGETS[torch.float64]
    allowed = {
        "out": budget.allowed(out.scale, largest),
        "weights": budget.allowed(shown, largest),
    }
    return Computed({"out": out.value, "weights": shown}, allowed)
