# SPDX-License-Identifier: MIT
"""A model over a sequence that lies on several processes, as it is: every attention in
it is redirected."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import config as _compiler
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import functional as _functional
from .._call import call
from ._sequences import Order, group_of, name_of_group

_ops = torch.ops.multihead
Method = Literal["auto", "ring", "ulysses"]
Group = ProcessGroup | DeviceMesh | None


@contextlib.contextmanager
def context_parallel(
    mesh: Group = None,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[Tensor] | None = None,
    order: Order = "head_tail",
    method: Method = "auto",
) -> Iterator[None]:
    """Within the block, attention is over the tokens of all processes of a mesh.

    torch.distributed.tensor.experimental.context_parallel, with its arguments, on every
    backend that has kernels, for lengths that do not divide too. Redirected, in this
    thread, are torch.nn.functional.scaled_dot_product_attention, what calls it
    (torch.nn.MultiheadAttention and its layers with need_weights=False, models), and
    this package's functions and modules; their arguments are those of ring_attention.
    What cannot be computed so is an error: weights, attn_mask of a module, caches,
    backend "exact". Everything else of a model works on a token by itself and stays as
    it is, but for what knows positions: give those as buffers, or by token_positions.

    Run backward within the block too where activations are computed again
    (torch.utils.checkpoint). torch.compile keeps graphs of this state for themselves.

    Args:
        mesh: a mesh of one dimension or a process group; default: all processes.
        buffers: tensors with a dimension of all tokens (input, labels, positions), alike
            on all processes. Within the block each has this process's tokens alone.
        buffer_seq_dims: that dimension, for each.
        no_restore_buffers: those of buffers that need not be whole again afterwards.
        order: which tokens a process has: see ring_attention.
        method: "ring", "ulysses", or "auto": ulysses_attention where the processes
            divide the heads of query, H, and of key, G, where H + G ≤ n·G for n
            processes, so that it sends no more, and without attn_mask; ring_attention
            elsewhere, and in graphs of torch.compile.

    Raises:
        ValueError: for buffers and dimensions that do not fit, and names that are none.
    """
    name = name_of_group("context_parallel", mesh)
    whole = _checked(buffers, buffer_seq_dims, no_restore_buffers)
    positions = {
        length: token_positions(length, mesh, order=order)
        for length in {x.shape[dim] for x, dim, _ in whole}
    }
    kept = [(x, x.clone()) for x, _, restored in whole if restored]
    call(_ops.enter_context_parallel.default, name, order, method)
    try:
        for x, dim, _ in whole:
            _become(x, x.index_select(dim, positions[x.shape[dim]].to(x.device)))
        tag = f"{_compiler.cache_key_tag} multihead {name} {order} {method}"
        graphs = _compiler.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
        with graphs, _redirected(name, order, method)():
            yield
    finally:
        _ops.leave_context_parallel.default()
        for x, before in kept:
            _become(x, before)


def token_positions(
    length: int,
    group: Group = None,
    *,
    order: Order = "head_tail",
) -> Tensor:
    """The positions of this process's tokens in a sequence of that length: int64.

    What context_parallel gives a process of its buffers; for position embeddings, rotary
    tables and masks.
    """
    group = group_of("token_positions", group)
    found: Tensor = call(
        _ops.token_positions.default,
        length,
        dist.get_rank(group),
        dist.get_world_size(group),
        order,
    )
    return found


@torch.no_grad()
def context_parallel_unshard(
    mesh: Group,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    *,
    order: Order = "head_tail",
) -> list[Tensor]:
    """The tokens of all processes, in the order of the sequence, on every process.

    torch.distributed.tensor.experimental.context_parallel_unshard, for lengths that do
    not divide too. Nothing is differentiated.

    Args:
        mesh: as of context_parallel.
        buffers: what this process has: outputs, losses per token.
        seq_dims: the dimension of tokens of each.
        order: that of the context_parallel block.
    """
    function = "context_parallel_unshard"
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"{function}: seq_dims must be as many as buffers, {len(buffers)}, got "
            f"{len(seq_dims)}"
        )
    group = group_of(function, mesh)
    return [
        _whole(x, dim, group, order) for x, dim in zip(buffers, seq_dims, strict=True)
    ]


def _whole(x: Tensor, dim: int, group: ProcessGroup, order: Order) -> Tensor:
    processes = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(processes)]
    dist.all_gather(lengths, torch.tensor([x.shape[dim]]), group=group)
    counts = [int(count) for count in lengths]
    first = x.movedim(dim, 0)
    padded = first.new_zeros(max(counts), *first.shape[1:])
    padded[: len(first)] = first
    pieces = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(pieces, padded, group=group)
    whole = first.new_empty(sum(counts), *first.shape[1:])
    for rank, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        places = _ops.token_positions.default(sum(counts), rank, processes, order)
        if len(places) != count:
            raise ValueError(
                f"context_parallel_unshard: process {rank} must have {len(places)} of "
                f'the {sum(counts)} tokens in the order "{order}", got {count}'
            )
        whole[places.to(whole.device)] = piece[:count]
    return whole.movedim(0, dim)


@functools.cache
def _redirected(*_context: str) -> type[TorchFunctionMode]:
    """A class for each kind of context: it is by them that torch.compile tells modes
    apart."""
    return type("Redirected", (_Redirected,), {})


class _Redirected(TorchFunctionMode):
    """PyTorch's functions are this package's, which ask for the open context. Where
    there is no mode, as in backward, PyTorch's operator asks for it too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        ours = _OURS.get(func, func)
        return ours(*args, **(kwargs or {}))


_OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _functional.scaled_dot_product_attention,
    F.multi_head_attention_forward: _functional.multi_head_attention_forward,
}


def _checked(
    buffers: Sequence[Tensor] | None,
    dims: Sequence[int] | None,
    no_restore: AbstractSet[Tensor] | None,
) -> list[tuple[Tensor, int, bool]]:
    """Each buffer, its dimension of tokens, and whether it is to be whole again."""
    buffers, dims = list(buffers or ()), list(dims or ())
    function = "context_parallel"
    if len(buffers) != len(dims):
        raise ValueError(
            f"{function}: buffer_seq_dims must be as many as buffers, {len(buffers)}, "
            f"got {len(dims)}"
        )
    given_up = {id(x) for x in no_restore or ()}
    if not given_up <= {id(x) for x in buffers}:
        raise ValueError(f"{function}: no_restore_buffers must be some of buffers")
    for x, dim in zip(buffers, dims, strict=True):
        if x.requires_grad or not x.is_leaf:
            raise ValueError(
                f"{function}: buffers must not be differentiated, one of shape "
                f"{tuple(x.shape)} is"
            )
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{function}: buffer_seq_dims must be dimensions of buffers, got {dim} "
                f"for shape {tuple(x.shape)}"
            )
    return [
        (x, dim, id(x) not in given_up) for x, dim in zip(buffers, dims, strict=True)
    ]


@torch.no_grad()
def _become(x: Tensor, other: Tensor) -> None:
    x.resize_(other.shape)
    x.copy_(other)
