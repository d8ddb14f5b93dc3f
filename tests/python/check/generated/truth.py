# SPDX-License-Identifier: MIT
"""What a program computes, beside plain loops: the generator's own judgement, which
knows how it wrote the program and nothing of `check`."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .program import input_names, mask_name
from .spec import Spec

BATCH, QUERIES, KEYS, EMBED, HEADS, GROUPS = 2, 5, 7, 48, 6, 2


@dataclass
class Computed:
    """Results of one program by name: "out", "weights", "gradients", "training". The
    loops have the first two."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def differs(self, other: "Computed", name: str) -> bool:
        a, b = self.tensors.get(name), other.tensors.get(name)
        if a is None or b is None:
            return False
        if a.shape != b.shape:
            return True
        return not torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


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

    queries = KEYS if s.inputs == "self" else QUERIES
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
        call.blocked = ~keep
        given = keep.long() if s.mask == "keep" else ~keep
        call.options[mask_name(s)] = given.numpy() if s.is_numpy else given
    if s.causal:
        later = torch.ones(queries, KEYS, dtype=torch.bool).triu(1)
        call.blocked = later if call.blocked is None else call.blocked | later
    if s.returns == "asked":
        call.options["need_weights"] = True
    return call


def plain(s: Spec, call: Call, weights: dict[str, tuple[Tensor, Tensor | None]]):
    """Output and weights by loops over items, heads and queries."""
    q, k, v = call.inputs
    if not s.is_core:
        q, k, v = (
            x @ weights[r][0].T + (0 if weights[r][1] is None else weights[r][1])
            for x, r in zip((q, k, v), "qkv")
        )
        groups = GROUPS if s.groups else HEADS
        q = q.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (x.unflatten(-1, (groups, -1)).transpose(1, 2) for x in (k, v))
    batch, heads, queries, width = q.shape
    group = heads // k.shape[1]
    probabilities = torch.zeros(batch, heads, queries, k.shape[2], dtype=q.dtype)
    context = torch.zeros(batch, heads, queries, v.shape[3], dtype=q.dtype)
    blocked = call.blocked
    if blocked is not None:
        blocked = blocked.expand(probabilities.shape)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                scores = k[b, h // group] @ q[b, h, i] / math.sqrt(width)
                if call.added is not None:
                    scores = scores + call.added[i]
                if blocked is not None:
                    scores = scores.masked_fill(blocked[b, h, i], -math.inf)
                powers = torch.exp(scores - scores.max())
                probabilities[b, h, i] = powers / powers.sum()
                context[b, h, i] = probabilities[b, h, i] @ v[b, h // group]
    if s.is_core:
        return context, probabilities
    merged = context.transpose(1, 2).flatten(2)
    matrix, bias = weights["o"]
    out = merged @ matrix.T + (0 if bias is None else bias)
    if s.around:
        out = out + call.inputs[0]
    if s.around == "norm":
        out = nn.functional.layer_norm(out, out.shape[-1:])
    return (out.transpose(0, 1) if s.sequence_first else out), probabilities


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
    out, probabilities = plain(s, call, weights)
    shown = probabilities.mean(1) if s.returns == "mean" else probabilities
    return Computed({"out": out, "weights": shown})
