# SPDX-License-Identifier: MIT
"""The operators on DTensors: which axes may be shared out, and what follows.

Attention is independent over batch rows and over heads, so each process computes its
share by the same operator, and bits do not change. A table says which axis each
dimension of each argument and result is; everything else follows from it.

torch.distributed.tensor.experimental.register_sharding would be the public way, but it
never shares out keyword arguments (sinks, lengths, slopes), and it cannot say where in
the whole call a process's share begins, on which dropout depends. So the operators are
handled where PyTorch's dispatcher of DTensors keeps its own special cases.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import _tracing

_ops = torch.ops.multihead

# Axes: B batch rows, H heads, which query and key heads share out together; "." is
# nobody's. Fewer dimensions lack the first ones. "": a tensor without axes.
_ROWS = "BH.."
_ARGUMENTS = {
    "query": _ROWS,
    "key": _ROWS,
    "value": _ROWS,
    "out": _ROWS,
    "dout": _ROWS,
    "logsumexp": "BH.",
    "dlogsumexp": "BH.",
    "attn_mask": _ROWS,
    "query_offset": "B",
    "key_lengths": "B",
    "key_mask": "B.",
    "alibi_slopes": "BH",
    "sinks": "H",
    "dropout_state": ".",
}
# Of rows that belong to sequences: heads alone are shared out.
_VARLEN_ARGUMENTS = _ARGUMENTS | {
    **dict.fromkeys(("query", "key", "value", "out", "dout"), ".H."),
    **dict.fromkeys(("logsumexp", "dlogsumexp"), "H."),
    "key_lengths": ".",
    "alibi_slopes": ".H",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "."),
}
_GRADIENTS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
# operator: its arguments, and its results, by their axes or by the argument that they
# are the gradient of.
_RULES: dict[OpOverload, tuple[dict[str, str], tuple[str, ...]]] = {
    _ops.fused_attention.default: (_ARGUMENTS, (_ROWS, "BH.")),
    _ops.fused_attention_backward.default: (_ARGUMENTS, _GRADIENTS),
    _ops.attention_weights.default: (_ARGUMENTS, (_ROWS,)),
    _ops.fused_attention_summary.default: (_ARGUMENTS, (_ROWS, _ROWS, "BH.")),
    _ops.fused_varlen_attention.default: (_VARLEN_ARGUMENTS, (".H.", "H.")),
    _ops.fused_varlen_attention_backward.default: (_VARLEN_ARGUMENTS, _GRADIENTS),
}

# They consist of others. PyTorch sees through them itself, but not in inference mode.
_COMPOSITES: tuple[OpOverload, ...] = (
    _ops.scaled_dot_product_attention.default,
    _ops.scaled_dot_product_attention.plain,
    _ops.varlen_attention.default,
    _ops.attention_summary.default,
    _ops.merge_attention.default,
    _ops.multi_head_attention_forward.default,
    _ops.grouped_query_attention_forward.default,
    _ops.projected_attention_forward.default,
    _ops.pool_heads.default,
    _ops.repeat_heads.default,
)


def register() -> None:
    """From here on the operators take DTensors, sharded over batch rows or heads.

    So do multihead.scaled_dot_product_attention, and with multihead.install() PyTorch's
    own. Results and gradients are those of one process, to the bit; what depends on
    random numbers (dropout) is that of the first process of the mesh. Other shardings
    (of tokens, of widths, of heads that the processes do not divide) are gathered first:
    use context_parallel() for sequences too long for one process. Registering twice is
    registering once.

    Importing multihead.distributed does this; so do multihead.install() where PyTorch's
    DTensors are in use, and the first call with one.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operator in _RULES:
        handlers[operator] = _on_shares
    for operator in _COMPOSITES:
        handlers[operator] = _by_its_parts
    handlers[torch.ops.aten.scaled_dot_product_attention.default] = _pytorchs
    if DTensor not in _tracing.known_tensors:
        _tracing.known_tensors = (*_tracing.known_tensors, DTensor)


class _Call:
    """A call with DTensors: its mesh, and which axis each dimension of that shares out."""

    def __init__(self, operator: OpOverload, given: dict[str, Any]) -> None:
        self.operator, self.given = operator, given
        self.arguments, self.results = _RULES[operator]
        self.mesh: DeviceMesh = next(
            x.device_mesh for x in given.values() if isinstance(x, DTensor)
        )
        for name, x in given.items():
            if isinstance(x, DTensor) and x.device_mesh != self.mesh:
                raise ValueError(
                    f"{operator.overloadpacket.__name__}: tensors must be on one mesh, "
                    f"{name} is on {x.device_mesh}, others on {self.mesh}"
                )
        self.is_ragged = self.arguments is _VARLEN_ARGUMENTS
        self.split: list[str] = []  # by dimension of the mesh: B, H, or "." for nothing
        for mesh_dim in range(self.mesh.ndim):
            self.split.append(self._axis_of(mesh_dim))

    def axes(self, name: str, dims: int) -> str:
        """One for each dimension of an argument, the leading ones left out."""
        axes = self.arguments.get(name, "")
        return axes[len(axes) - dims :] if dims else ""

    def _axis_of(self, mesh_dim: int) -> str:
        """What a dimension of the mesh shares out: what query, key or value ask for."""
        for name in ("query", "key", "value"):
            x = self.given[name]
            if not isinstance(x, DTensor):
                continue
            placement = x.placements[mesh_dim]
            if not isinstance(placement, Shard):
                continue
            axis = self.axes(name, x.dim())[placement.dim]
            # One row, of which all but one process have nothing, is everybody's.
            if axis == "B" and x.shape[placement.dim] > 1:
                return axis
            if axis == "H" and self._heads_divide(mesh_dim):
                return axis
        return "."

    def heads(self, name: str) -> int:
        count: int = self.given[name].shape[1 if self.is_ragged else -3]
        return count

    def _heads_divide(self, mesh_dim: int) -> bool:
        """Whether every process can have as many heads, of queries and of keys."""
        shares = self.mesh.size(mesh_dim)
        for before, axis in enumerate(self.split):
            shares *= self.mesh.size(before) if axis == "H" else 1
        return all(self.heads(name) % shares == 0 for name in ("query", "key"))

    def placements(self, name: str, x: Tensor) -> list[Placement]:
        """Where an argument must lie: broadcast dimensions are everybody's."""
        axes = self.axes(name, x.dim())
        found: list[Placement] = []
        for axis in self.split:
            dim = axes.find(axis) if axis != "." else -1
            shared = dim >= 0 and x.shape[dim] > 1
            found.append(Shard(dim) if shared else Replicate())
        return found

    def share(self, name: str, x: Any) -> Any:
        """This process's part of an argument."""
        if not isinstance(x, Tensor):
            return x
        if name == "dropout_state":
            return self._place_in_whole(x)
        if not isinstance(x, DTensor):
            if self.arguments.get(name) == ".":  # integers that all have alike
                return x
            raise TypeError(
                f"{self.operator.overloadpacket.__name__}: {name} must be a DTensor as "
                f"others are, got {type(x).__name__}"
            )
        return x.redistribute(placements=self.placements(name, x)).to_local()

    def _place_in_whole(self, state: Tensor) -> Tensor:
        """The numbers of the first process, and where this one's share begins."""
        state = (state.full_tensor() if isinstance(state, DTensor) else state).clone()
        for dim in range(self.mesh.ndim):
            dist.broadcast(state, group=self.mesh.get_group(dim), group_src=0)
        query, heads = self.given["query"], self.heads("query")
        batch = query.shape[0] if query.dim() == 4 else 1
        place = [self._begin("B", batch), self._begin("H", heads), heads, 0, 0]
        return torch.cat((state[:2], torch.tensor(place)))

    def _begin(self, axis: str, size: int) -> int:
        """The first of this process's share of an axis."""
        first, left = 0, size
        for dim, each in enumerate(self.split):
            if each != axis:
                continue
            count = self.mesh.size(dim)
            local = self.mesh.get_local_rank(dim)
            chunk = -(-left // count)
            begin = min(local * chunk, left)
            first, left = first + begin, min(chunk, left - begin)
        return first

    def result(self, rule: str, x: Tensor | None) -> DTensor | None:
        """The DTensor of which x is this process's part."""
        if x is None:
            return None
        is_gradient = rule in self.arguments
        if is_gradient:
            axes, shape = self.axes(rule, x.dim()), self.given[rule].shape
        else:
            averaged = self.given.get("average_attn_weights", False)
            axes = rule.replace("H", "") if averaged else rule
            axes = axes[len(axes) - x.dim() :]
            shape = self._whole_shape(axes, x)
        return DTensor.from_local(
            x,
            self.mesh,
            [self._placement_of_result(each, axes, shape) for each in self.split],
            run_check=False,
            shape=torch.Size(shape),
            stride=_dense_strides(shape, x),
        )

    def _placement_of_result(
        self, axis: str, axes: str, shape: Sequence[int]
    ) -> Placement:
        """What shares out an axis that a result lacks has a summand of it each: of a
        gradient the sum is meant, of weights the average over all heads."""
        if axis == ".":
            return Replicate()
        dim = axes.find(axis)
        if dim >= 0 and shape[dim] > 1:
            return Shard(dim)
        return Partial("avg" if "average_attn_weights" in self.given else "sum")

    def _whole_shape(self, axes: str, x: Tensor) -> list[int]:
        query = self.given["query"]
        of_query = self.axes("query", query.dim())
        return [
            query.shape[of_query.find(axis)] if axis in "BH" else size
            for axis, size in zip(axes, x.shape, strict=True)
        ]


def _dense_strides(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """Those of memory without gaps whose dimensions lie in the order of like's."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like.stride(d), -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@torch.no_grad()
def _on_shares(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The operator on each process's part."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    call = _Call(operator, given)
    local = {name: call.share(name, x) for name, x in given.items()}
    keyword_only = {a.name for a in operator._schema.arguments if a.kwarg_only}
    positional = [
        local[name] for name in names if name in local and name not in keyword_only
    ]
    named = {name: x for name, x in local.items() if name in keyword_only}
    results = operator(*positional, **named)
    if isinstance(results, Tensor):
        return call.result(call.results[0], results)
    return tuple(
        call.result(rule, x) for rule, x in zip(call.results, results, strict=True)
    )


def _by_its_parts(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return operator.decompose(*args, **kwargs)


def _pytorchs(_: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch's function by its parts, or on the kernels where that is installed."""
    return _tracing.attention(*args, **kwargs)
