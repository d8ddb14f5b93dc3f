# SPDX-License-Identifier: MIT
"""Calls over whole sequences, and what one of several processes has of them."""

import torch
from rows import leaf, loss, rows_of

B, H, G, D, DV = 2, 4, 2, 8, 5

# name: (queries, keys, options of the whole call, in float64 where they float)
LQ, LK = 37, 41  # divide by nothing
CASES = {
    "plain": (LQ, LK, {}),
    "causal": (LQ, LQ, dict(is_causal=True)),
    "causal, divides": (32, 32, dict(is_causal=True)),
    "causal, bottom right": (
        LQ,
        LK,
        dict(is_causal=True, causal_alignment="bottom_right"),
    ),
    "offsets": (LQ, LK, dict(is_causal=True, query_offset=torch.tensor([9, -7]))),
    "window": (LQ, LK, dict(window=(6, 2))),
    "narrow window": (64, 64, dict(is_causal=True, window=(3, -1))),
    "sinks": (LQ, LK, dict(sinks=torch.linspace(-2, 2, H, dtype=torch.double))),
    "causal window and sinks": (
        LQ,
        LQ,
        dict(is_causal=True, window=(9, 0), sinks=torch.ones(H, dtype=torch.double)),
    ),
    "lengths": (LQ, LK, dict(key_lengths=torch.tensor([LK - 3, 11]))),
    "a row without keys": (LQ, LK, dict(key_lengths=torch.tensor([0, LK]))),
    "key mask": (LQ, LK, dict(key_mask=torch.arange(2 * LK).view(2, LK) % 3 > 0)),
    "alibi": (LQ, LQ, dict(is_causal=True, alibi_slopes=2.0 ** -torch.arange(1.0, 5))),
    "softcap and scale": (LQ, LK, dict(softcap=4.0, scale=0.7)),
    "dropout": (LQ, LK, dict(dropout_p=0.3)),
    "causal with dropout": (LQ, LQ, dict(dropout_p=0.5, is_causal=True)),
    "keep mask": (
        LQ,
        LK,
        dict(attn_mask=torch.arange(LQ * LK).view(1, 1, LQ, LK) % 5 > 1),
    ),
    "bias per head": (
        LQ,
        LK,
        dict(attn_mask=torch.sin(torch.arange(4.0 * LQ * LK).double()).view(4, LQ, LK)),
    ),
    "bias of keys": (LQ, LK, dict(attn_mask=torch.linspace(-3, 3, LK).double())),
    "fewer tokens than pieces": (3, 2, dict(is_causal=True)),
    "no queries": (0, 4, {}),
    "no keys": (4, 0, dict(sinks=torch.zeros(H, dtype=torch.double))),
}
FLOATING = ("attn_mask", "sinks", "alibi_slopes")  # what has a gradient where it floats


def whole_call(name, dtype, groups=G):
    """(query, key, value), options, upstream gradients; values that dtype can hold."""
    queries, keys, options = CASES[name]
    generator = torch.Generator().manual_seed(len(name))

    def numbers(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).double()

    tensors = [numbers(B, H, queries, D), numbers(B, groups, keys, D)]
    tensors.append(numbers(B, groups, keys, DV))
    held = {
        name: x.to(dtype).double() if name in FLOATING and x.is_floating_point() else x
        for name, x in options.items()
    }
    return tensors, held, (numbers(B, H, queries, DV), numbers(B, H, queries))


def run(operator, tensors, options, upstream, **more):
    """name → result or gradient."""
    tensors = [leaf(x) for x in tensors]
    options = {
        name: leaf(x) if name in FLOATING and x.is_floating_point() else x
        for name, x in options.items()
    }
    torch.manual_seed(3)  # of dropout
    out, lse = operator(*tensors, **options, enable_gqa=True, return_lse=True, **more)
    loss(out, lse, *upstream).backward()
    results = dict(out=out, logsumexp=lse.masked_fill(lse.isinf(), 0.0))
    results |= zip(("query", "key", "value"), (x.grad for x in tensors), strict=True)
    results |= {x: options[x].grad for x in FLOATING if has_gradient(options, x)}
    return {name: x.detach().double() for name, x in results.items()}


def has_gradient(options, name):
    return name in options and options[name].is_floating_point()


def cut(tensors, options, upstream, order, rank, world):
    """What one process has of a whole call, and the positions of its rows."""
    q, k, v = tensors
    mine = rows_of(order, q.size(2), rank, world)
    keys = rows_of(order, k.size(2), rank, world)
    options = dict(options)
    mask = options.get("attn_mask")
    if mask is not None and mask.dim() > 1:
        options["attn_mask"] = mask[..., mine, :]
    if "key_mask" in options:
        options["key_mask"] = options["key_mask"][:, keys]
    part = [q[:, :, mine], k[:, :, keys], v[:, :, keys]]
    return part, options, [x[:, :, mine] for x in upstream], mine, keys


def expected_here(name, x, mine, keys):
    if name in ("out", "query", "logsumexp"):
        return x[:, :, mine]
    if name in ("key", "value"):
        return x[:, :, keys]
    if name == "attn_mask" and x.dim() > 1:
        return x[..., mine, :]
    return x


SUMMED = ("sinks", "alibi_slopes", "attn_mask")  # shares of a sum, where all have them
