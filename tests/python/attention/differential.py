# SPDX-License-Identifier: MIT
"""Random calls that both scaled_dot_product_attention functions have, and what comes
out in float64.

A call is drawn from a seed alone: ranks, sizes that broadcast, are 0 or do not fit,
grouped heads, memory layouts, masks of any rank and dtype, arguments out of range.
"""

import dataclasses
import math
import random

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "plain", "heads last", "gaps", "every other", "turned", "odd")
LAYOUTS = (*LAYOUTS, "expanded 0", "expanded 1", "expanded 2", "expanded 3")


@dataclasses.dataclass
class Call:
    """query, key and value, keyword arguments, and whose gradients are wanted."""

    tensors: list[Tensor]
    options: dict
    needs: list[bool]  # of query, key, value, attn_mask

    @property
    def mask(self) -> Tensor | None:
        return self.options.get("attn_mask")

    @property
    def has_no_elements(self) -> bool:
        return any(x.numel() == 0 for x in self.tensors)

    @property
    def has_no_scores(self) -> bool:
        return any(0 in x.shape[:-1] for x in self.tensors)


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values elsewhere in memory; "expanded" repeats one along a dimension."""
    if layout == "heads last" and x.dim() >= 3:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "turned" and x.dim() >= 2:
        return x.mT.contiguous().mT
    if layout in ("gaps", "every other") and x.dim() >= 1:
        width = x.size(-1)
        step = 2 if layout == "every other" else 1
        # What lies between them is 1: as a float or a bool, it would be noticed.
        memory = x.new_ones(*x.shape[:-1], 2 * width + 1)
        return memory[..., 1 : 1 + step * width : step].copy_(x)
    if layout == "odd":
        return x.new_ones(x.numel() + 3)[3:].view(x.shape).copy_(x)
    if layout.startswith("expanded") and x.dim() >= 2 and x.numel() > 0:
        return x.narrow(int(layout[-1]) % x.dim(), 0, 1).expand(x.shape)
    return x.clone()


def _leading(r: random.Random) -> tuple[list[list[int]], bool]:
    """The sizes before the last two, of query, key and value; whether heads group."""
    sizes = [
        0 if r.random() < 0.03 else r.randint(1, 3)
        for _ in range(r.choice((0, 1, 2, 2, 2, 3)))
    ]
    leading = [list(sizes), list(sizes), list(sizes)]
    grouped = bool(sizes) and r.random() < 0.25
    if grouped:
        leading[0][-1] = sizes[-1] * r.randint(1, 3) + (r.random() < 0.1)
        if r.random() < 0.15:
            leading[2][-1] = r.choice((1, leading[0][-1]))
    elif sizes and r.random() < 0.3:
        leading = [[1 if r.random() < 0.25 else n for n in part] for part in leading]
    if sizes and r.random() < 0.08:
        r.choice(leading).pop(0)
    if sizes and r.random() < 0.04:
        part = r.choice([part for part in leading if part])
        part[r.randrange(len(part))] += 1
    if len(leading[1]) and leading[1][-1] == 0 and any(leading[2][-1:]):
        leading[1][-1] = 1  # PyTorch divides by 0 where these are grouped
    return leading, grouped


def _mask(r: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    rank = r.choice((2, len(shape), r.randint(0, len(shape))))
    shape = [1 if r.random() < 0.2 else n for n in shape[len(shape) - rank :]]
    if shape and r.random() < 0.04:
        shape[r.randrange(len(shape))] += 1
    if r.random() < 0.03:
        shape = [1, *shape]
    kind = r.random()
    if kind < 0.05:
        return torch.randint(0, 2, shape, dtype=r.choice((torch.int64, torch.uint8)))
    if kind < 0.5:
        return torch.rand(shape) < r.choice((0.3, 0.6, 0.9))
    mask = torch.randn(shape, dtype=torch.float64)
    if r.random() < 0.4:
        mask = mask.masked_fill(torch.rand(shape) < 0.4, -math.inf)
    return mask.to(dtype if r.random() < 0.7 else r.choice(DTYPES))


def draw(seed: int) -> Call:
    """The call with this number."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    dtype = r.choice(DTYPES)
    leading, grouped = _leading(r)
    rows = 0 if r.random() < 0.05 else r.choice((1, 2, 5, 9, 17, 40))
    keys = 0 if r.random() < 0.05 else r.choice((1, 2, 5, 9, 17, 33, 130))
    width = 0 if r.random() < 0.03 else r.choice((1, 3, 4, 8, 16, 17, 64))
    value_width = width if r.random() < 0.7 else r.choice((0, 1, 5, 24))
    other = width + (r.random() < 0.03)
    # One longer or shorter value is not drawn: PyTorch reads beyond its end.
    ends = ((rows, width), (keys, other), (keys, value_width))
    tensors = []
    for part, end in zip(leading, ends, strict=True):
        x = torch.randn(*part, *end, dtype=torch.float64) * r.choice((0.1, 1.0, 4.0))
        own = r.choice(DTYPES) if r.random() < 0.01 else dtype
        tensors.append(_lay_out(x.to(own), r.choice(LAYOUTS)))
    options = {"enable_gqa": True} if grouped or r.random() < 0.05 else {}
    if r.random() < 0.5:
        pairs = zip(leading[0], leading[1], strict=False)
        shape = [*(max(a, b) for a, b in pairs), rows, keys]
        options["attn_mask"] = _lay_out(_mask(r, shape, dtype), r.choice(LAYOUTS))
    if r.random() < 0.3:
        options["is_causal"] = True
    if r.random() < 0.3:
        options["scale"] = r.choice((0.0, 0.3, 2.0, 1e-3, -0.5, math.inf, math.nan))
    if r.random() < 0.1:
        options["dropout_p"] = r.choice((0.0, 1.0, 1.0, -0.1, 1.5, math.nan))
    wants = r.random() < 0.6
    return Call(tensors, options, [wants and r.random() < 0.4 for _ in range(4)])


def run(function, call: Call) -> dict[str, Tensor]:
    """The output and the gradients that are wanted, by name."""
    options = dict(call.options)
    leaves = [x.detach() for x in call.tensors]
    names = ["query", "key", "value"]
    if call.mask is not None and call.mask.is_floating_point():
        leaves.append(call.mask.detach())
        options["attn_mask"] = leaves[-1]
        names.append("attn_mask")
    for x, needed in zip(leaves, call.needs, strict=False):
        x.requires_grad_(needed)
    out = function(*leaves[:3], **options)
    if out.requires_grad:
        out.backward(output_gradient(out))
    gradients = {
        name: x.grad
        for name, x in zip(names, leaves, strict=True)
        if x.requires_grad and out.requires_grad
    }
    return {"out": out.detach(), **gradients}


def output_gradient(out: Tensor) -> Tensor:
    """The same for every function whose output has this shape."""
    generator = torch.Generator().manual_seed(out.numel())
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(
        out.dtype
    )


def golden(call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Results in float64, the same formulas on absolute values, the largest score."""
    q, k, v = (x.detach().double().requires_grad_() for x in call.tensors)
    key, value = (
        x.repeat_interleave(q.size(-3) // x.size(-3), -3)
        if call.options.get("enable_gqa") and x.size(-3)
        else x
        for x in (k, v)
    )
    scale = call.options.get("scale")
    scale = scale if scale is not None else 1 / math.sqrt(q.size(-1) or 1)
    scores = q @ key.mT * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if call.options.get("is_causal") else seen
    bias = None
    if call.mask is not None and call.mask.dtype == torch.bool:
        seen = seen & call.mask
    elif call.mask is not None:
        bias = call.mask.detach().double().requires_grad_()
        seen = seen & bias.ne(-math.inf)
        scores = scores + bias.masked_fill(bias.eq(-math.inf), 0.0)
    seen = seen.expand(scores.shape)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen, -math.inf).masked_fill(blind, 0.0).softmax(-1)
    weights = weights * seen * (call.options.get("dropout_p", 0.0) < 1.0)
    out = weights @ value
    upstream = output_gradient(out.to(call.tensors[0].dtype)).double()
    leaves = [x for x in (q, k, v, bias) if x is not None]
    names = ("query", "key", "value", "attn_mask")
    results = {"out": out.detach()}
    results |= zip(names, torch.autograd.grad(out, leaves, upstream, allow_unused=True))
    conditions = _conditions(weights, (q, key, value), upstream, scale)
    full = (out, q, key, value, bias)
    for name, x, short in zip(conditions, full, (out, q, k, v, bias), strict=True):
        if x is not None:
            condition = conditions[name].sum_to_size(x.shape)
            if x.shape != short.shape:
                condition = condition.unflatten(-3, (short.size(-3), -1)).sum(-3)
            conditions[name] = condition
    largest = (q.detach().abs() @ key.detach().abs().mT * abs(scale)).flatten()
    return results, conditions, largest.max().item() if largest.numel() else 0.0


def _conditions(weights, tensors, upstream, scale) -> dict[str, Tensor]:
    """The formulas of the results on absolute values, before what broadcast is summed."""
    p, (q, k, v) = weights.detach(), (x.detach().abs() for x in tensors)
    steps = p * (upstream.abs() @ v.mT)
    steps = steps + p * steps.sum(-1, keepdim=True)
    return {
        "out": p @ v,
        "query": steps @ k * abs(scale),
        "key": steps.mT @ q * abs(scale),
        "value": p.mT @ upstream.abs(),
        "attn_mask": steps,
    }
