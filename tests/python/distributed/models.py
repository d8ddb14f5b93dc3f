# SPDX-License-Identifier: MIT
"""A model of four layers on several processes: how it is laid out, trained, compared."""

import contextlib
import math

import torch
from layers import values, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import multihead
from multihead.distributed import AttentionParallel, context_parallel

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 26, 4  # 26 tokens divide by nothing

# Names of layouts → sizes (data parallel, tensor parallel, context parallel); None: as
# it is made. Parameters are sharded over data and tokens.
LAYOUTS = {
    "whole": None,
    "fsdp 2": (2, 0, 0),
    "fsdp 4": (4, 0, 0),
    "tp 2": (0, 2, 0),
    "tp 4": (0, 4, 0),
    "fsdp 2 x tp 2": (2, 2, 0),
    "fsdp 1 x tp 2": (1, 2, 0),
    "cp 2": (0, 0, 2),
    "cp 4": (0, 0, 4),
    "fsdp 2 x cp 2": (2, 0, 2),
    "tp 2 x cp 2": (0, 2, 2),
}


def world_of(layout):
    """How many processes a layout has."""
    return math.prod(max(size, 1) for size in LAYOUTS[layout] or ())


class Block(nn.Module):
    """Causal attention, packed or grouped, and two linear layers."""

    def __init__(self, grouped, dtype):
        super().__init__()
        options = dict(batch_first=True, dtype=dtype)
        sizes = (WIDTH, HEADS)
        self.attn = (
            multihead.GroupedQueryAttention(WIDTH, 2 * HEADS, HEADS, **options)
            if grouped
            else multihead.MultiheadAttention(*sizes, **options)
        )
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, dtype=dtype) for _ in range(2))
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, is_causal=True, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(index % 2, dtype) for index in range(4)])


class Run:
    """A model in a layout, its optimizer, and the part of a batch that it reads."""

    def __init__(self, layout="whole", dtype=torch.float64, seed=0):
        self.model = model(dtype, seed)
        self.data = self.tokens = None
        self.shards = 1
        sizes = LAYOUTS[layout]
        if sizes:
            names = dict(zip(("data", "heads", "tokens"), sizes, strict=True))
            names = {name: size for name, size in names.items() if size}
            mesh = init_device_mesh(
                "cpu", tuple(names.values()), mesh_dim_names=tuple(names)
            )
            if "heads" in names:
                self._share_out(mesh["heads"])
            self.data = mesh["data"] if "data" in names else None
            self.tokens = mesh["tokens"] if "tokens" in names else None
            self._shard_over(mesh, [name for name in names if name != "heads"])
        # A large eps: of the keys' bias the gradient is 0 but for rounding.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)

    def _shard_over(self, mesh, names):
        if not names:
            return
        mesh = mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten()
        self.shards = mesh.size()
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _share_out(self, mesh):
        plan = {
            "*.attn": AttentionParallel(),
            "*.up": ColwiseParallel(),
            "*.down": RowwiseParallel(),
        }
        parallelize_module(self.model, mesh, plan)

    def step(self, number):
        """One step of training; the loss of the whole batch."""
        generator = torch.Generator().manual_seed(number)
        shape = (2, BATCH, LENGTH, WIDTH)
        batch = torch.randn(shape, dtype=torch.float64, generator=generator)
        x, target = batch.to(self.model[0].norm1.weight.dtype)
        if self.data:
            rank, size = self.data.get_local_rank(), self.data.size()
            x, target = x.chunk(size)[rank], target.chunk(size)[rank]
        with contextlib.ExitStack() as stack:
            if self.tokens:
                buffers = dict(buffers=[x, target], buffer_seq_dims=[1, 1])
                stack.enter_context(context_parallel(self.tokens, **buffers))
            return self._step(x, target)

    def _step(self, x, target):
        self.optimizer.zero_grad()
        # FSDP averages gradients over the processes.
        share = self.shards / (BATCH * LENGTH * WIDTH)
        loss = (self.model(x) - target).square().sum() * share
        loss.backward()
        self.optimizer.step()
        loss = loss.detach() / self.shards
        for mesh in (self.data, self.tokens):
            if mesh:
                torch.distributed.all_reduce(loss, group=mesh.get_group())
        return loss

    def values(self):
        return values(self.model)

    def moments(self):
        """AdamW's averages of gradients, by the parameters' names."""
        named = dict(self.model.named_parameters())
        states = self.optimizer.state
        return {name: whole(states[x]["exp_avg"]).clone() for name, x in named.items()}
