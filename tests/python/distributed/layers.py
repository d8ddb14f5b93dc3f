# SPDX-License-Identifier: MIT
"""Modules that the tests of several processes share out, and how results compare."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import multihead

# Sums of other order: sizes of tens, values of about 1, in float64.
CLOSE = dict(rtol=1e-11, atol=1e-13)


def layer(kind, **options):
    """A module of 4 key/value heads in float64, the same in every process."""
    torch.manual_seed(7)
    options = dict(batch_first=True, dtype=torch.float64) | options
    if kind == "grouped":
        module = multihead.GroupedQueryAttention(16, 8, 4, **options)
    else:
        if kind == "separate":
            options |= dict(kdim=12, vdim=20)
        module = multihead.MultiheadAttention(16, 4, **options)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)  # PyTorch's biases are 0
    return module


def inputs(module, queries=5, keys=6, batch=3):
    """query, key and value of a module, of their own where it takes other widths."""
    torch.manual_seed(8)
    widths = (module.embed_dim, module.kdim, module.vdim)
    lengths = (queries, keys, keys)
    made = [
        torch.randn(batch, length, width, dtype=torch.float64)
        for length, width in zip(lengths, widths)
    ]
    return [x if module.batch_first else x.transpose(0, 1) for x in made]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(module):
    return {name: whole(x.grad) for name, x in module.named_parameters()}


def values(module):
    return {name: whole(x.detach()).clone() for name, x in module.named_parameters()}


def trained_on(module, given, **options):
    """(output, weights or None, gradients of what is given, of the parameters)."""
    module.zero_grad()
    leaves = {id(x): x.clone().requires_grad_() for x in given}
    mask = options.get("attn_mask")
    if type(mask) is torch.Tensor and mask.is_floating_point():
        options["attn_mask"] = leaves["mask"] = mask.clone().requires_grad_()
    out, weights = module(*[leaves[id(x)] for x in given], **options)
    loss = whole(out).square().sum()
    if weights is not None:
        loss = loss + weights.square().sum()
    loss.backward()
    return whole(out), weights, [x.grad for x in leaves.values()], gradients(module)
