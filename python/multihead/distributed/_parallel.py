# SPDX-License-Identifier: MIT
"""Tensor parallel: the heads of a module, shared out over the processes of a mesh."""

import functools
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from .._call import call, shown
from .._projections import check_readable
from .._subclasses import check_causal_bias, is_causal_bias, without_causal_bias
from ..functional import current_backend
from ..modules import GroupedQueryAttention, MultiheadAttention

_ops = torch.ops.multihead
_NAME = "AttentionParallel"
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AttentionParallel(ParallelStyle):
    """How parallelize_module shares out the heads of this package's attention::

        parallelize_module(model, mesh, {"layers.*.attn": AttentionParallel()})

    Each process of the 1-D mesh computes H / n query heads with the G / n key/value
    heads that they read; one all-reduce makes the output whole, one the gradient of the
    inputs. Arguments, results and errors stay those of the module: masks per head,
    (B·H, Lq, Lk), are given whole, and weights come back of all heads, each process
    gathering those of the others; averaged, they are averaged over all. With dropout the
    fused kernels drop what one process would, if torch's generators of all processes
    are in one state, as after ``torch.manual_seed(n)``; backend "exact" draws on each
    process by itself, and so alike for its first heads, its second, ...

    Parameters keep their names and become DTensors: weights of q, k and v, and their
    biases, Shard(0); out_proj's weight Shard(1), its bias Replicate(), added once. A
    MultiheadAttention whose in_proj_weight is packed has it in contiguous thirds of n,
    because that is a layout that FSDP2, torch.distributed.checkpoint and optimizers know;
    each forward then brings the rows of a process' heads to it, (3·E·E) / n elements to
    send and to receive at most, and as many backward. A GroupedQueryAttention, and one
    with kdim or vdim of its own, has each process' rows where they are used; so has
    ``GroupedQueryAttention.from_multihead(mha, mha.num_heads)``.

    Combine it with FSDP2 in PyTorch's order: parallelize_module, then fully_shard on
    another dimension of the mesh.

    Args:
        input_layouts: how query, key and value lie that are no DTensors; default
            Replicate(), the same on every process.
        output_layouts: how the output is to lie; default Replicate().
        use_local_output: return a plain tensor, this process' part of the output,
            instead of a DTensor.

    Raises (in parallelize_module):
        TypeError: for another module, a torch.nn.MultiheadAttention too, which
            :func:`multihead.replace_attention` makes one of this package's; and where a
            projection was replaced by more than a torch.nn.Linear.
        ValueError: where n divides num_heads or num_kv_heads not, for a mesh that is
            not 1-D, with add_bias_kv or add_zero_attn, and for a module whose
            parameters are distributed already.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        source = self.src_data_rank
        if isinstance(module, MultiheadAttention):
            names = ("in_proj_weight", "in_proj_bias", *_SEPARATE)
            for name in names:
                parameter = module._parameters.get(name)
                if parameter is not None:
                    placed = distribute_tensor(
                        parameter, device_mesh, [Shard(0)], src_data_rank=source
                    )
                    trained = parameter.requires_grad
                    module.register_parameter(name, nn.Parameter(placed, trained))
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                _place(
                    module.get_submodule(name), device_mesh, ColwiseParallel(), source
                )
        to_out = RowwiseParallel(
            output_layouts=self.output_layouts, use_local_output=self.use_local_output
        )
        _place(module.get_submodule("out_proj"), device_mesh, to_out, source)
        vars(module).update(_mesh=device_mesh, _input_layouts=self.input_layouts)
        module.__class__ = _parallel(type(module))  # type: ignore[arg-type]
        return module

    def __repr__(self) -> str:
        return (
            f"{_NAME}(input_layouts={self.input_layouts}, output_layouts="
            f"{self.output_layouts}, use_local_output={self.use_local_output})"
        )


def _place(
    linear: nn.Module, mesh: DeviceMesh, style: ParallelStyle, source: int | None
) -> None:
    style.src_data_rank = source
    style._apply(linear, mesh)


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """The errors of AttentionParallel, before anything is changed."""
    if not isinstance(module, (MultiheadAttention, GroupedQueryAttention)):
        hint = ""
        if isinstance(module, nn.MultiheadAttention):
            hint = ": multihead.replace_attention(model) makes it one"
        raise TypeError(
            f"{_NAME}: module must be a multihead.MultiheadAttention or "
            f"GroupedQueryAttention, got {shown(module)}{hint}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{_NAME}: device_mesh must be 1-D, got {mesh.ndim}-D: slice it"
        )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError(
            f"{_NAME}: parameters must not be distributed already: parallelize_module "
            "comes before fully_shard, and once"
        )
    heads, kv_heads = (
        module.num_heads,
        getattr(module, "num_kv_heads", module.num_heads),
    )
    if heads % mesh.size() or kv_heads % mesh.size():
        raise ValueError(
            f"{_NAME}: num_heads and num_kv_heads must be divisible by the size of the "
            f"mesh, {mesh.size()}, got num_heads={heads} and num_kv_heads={kv_heads}"
        )
    linears = {"out_proj": module.out_proj}
    if isinstance(module, GroupedQueryAttention):
        linears |= {x: getattr(module, x) for x in ("q_proj", "k_proj", "v_proj")}
    elif module.bias_k is not None or module.add_zero_attn:
        raise ValueError(f"{_NAME}: module must have no add_bias_kv nor add_zero_attn")
    check_readable(_NAME, **linears)


@functools.cache
def _parallel(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Parallel{kind.__name__}", (_Parallel, kind), {})


class _Parallel(nn.Module):
    """Before a module's class in the order of methods: its forward, on some heads."""

    _mesh: DeviceMesh
    _input_layouts: Placement
    num_heads: int

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        cache: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The module's forward; its docstring says what of."""
        module: Any = self
        if cache is not None:
            self._cached("forward")
        if is_causal_bias(attn_mask):
            arguments: dict[str, Any] = dict(query=query, key=key, attn_mask=attn_mask)
            arguments["is_causal"] = is_causal
            check_causal_bias(_NAME, arguments)
            attn_mask = without_causal_bias(_NAME, arguments, in_layer=True)[
                "attn_mask"
            ]
        inputs = self._whole(self._input_layouts, query, key, value)
        masks = self._whole(Replicate(), key_padding_mask, attn_mask)
        padding, mask = (x if x is None else _local(x) for x in masks)
        batch_dim = 0 if module.batch_first else 1
        batch = inputs[0].size(batch_dim) if inputs[0].dim() == 3 else 1
        if mask is not None and mask.dim() == 3:
            mask = self._of_own_heads(mask, batch)
        projected = _projected(module, inputs)
        options = (module.dropout, module.training, padding, need_weights, mask)
        out, weights = call(
            _ops.projected_attention_forward.default,
            *projected,
            module.head_dim,
            *options,
            average_attn_weights,
            is_causal,
            batch_first=module.batch_first,
            heads_in_all=self.num_heads,
            first_head=self._first_head,
            backend=current_backend(),
        )
        if weights is not None:
            weights = self._of_all_heads(weights, average_attn_weights)
        return module.out_proj(out), weights

    def _cached(self, function: str, *_: Any) -> Any:
        raise ValueError(
            f"{function}: cache must be None where {_NAME} has shared out the heads"
        )

    def _whole(self, layout: Placement, *tensors: Any) -> list[Any]:
        """tensors as DTensors, Replicate(): once each, for one all-reduce backward."""
        whole: dict[int, Any] = {id(None): None}
        for x in tensors:
            if id(x) not in whole:
                kind = x if isinstance(x, Tensor) else None
                if kind is None or x.is_nested:
                    raise TypeError(
                        f"{_NAME}: tensors must be dense ones, got "
                        + ("a nested one" if kind is not None else shown(x))
                    )
                placed = x
                if not isinstance(x, DTensor):
                    placed = DTensor.from_local(
                        x, self._mesh, [layout], run_check=False
                    )
                whole[id(x)] = placed.redistribute(placements=[Replicate()])
        return [whole[id(x)] for x in tensors]

    def _of_own_heads(self, mask: Tensor, batch: int) -> Tensor:
        """(B·H, Lq, Lk) → (B·H / n, Lq, Lk), head index innermost in both."""
        heads = self.num_heads
        if mask.size(0) != batch * heads:
            raise ValueError(
                f"{_NAME}: attn_mask must be (B·H, Lq, Lk) where it is 3-D, with B·H = "
                f"{batch * heads}, got {tuple(mask.shape)}"
            )
        by_head = mask.reshape(batch, heads, *mask.shape[1:])
        own = by_head.narrow(1, self._first_head, heads // self._mesh.size())
        return own.flatten(0, 1)

    @property
    def _first_head(self) -> int:
        """The first of this process' query heads, which are neighbours."""
        return self._mesh.get_local_rank() * (self.num_heads // self._mesh.size())

    def _of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        """(B, H / n, Lq, Lk) → (B, H, Lq, Lk), or the averages (B, Lq, Lk)."""
        layout: Placement = Partial() if average else Shard(weights.dim() - 3)
        own = weights / self._mesh.size() if average else weights
        all_heads = DTensor.from_local(own, self._mesh, [layout], run_check=False)
        return all_heads.redistribute(placements=[Replicate()]).to_local()


def _local(whole: DTensor) -> Tensor:
    """What is the same on every process, and whose gradient each has a part of."""
    return whole.to_local(grad_placements=[Partial()])


def _projected(module: Any, inputs: list[DTensor]) -> list[Tensor]:
    """query, key and value of this process' heads, (…, L, H·D / n)."""
    if isinstance(module, GroupedQueryAttention):
        linears = (module.q_proj, module.k_proj, module.v_proj)
        return [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    separate = [getattr(module, name) for name in _SEPARATE]
    packed, bias = module.in_proj_weight, module.in_proj_bias
    weights: Any
    biases: Any = (None, None, None)
    if packed is None:
        weights = [weight.to_local() for weight in separate]
        if bias is not None:
            column = bias.to_local().unsqueeze(1)
            biases = _own_rows(column, module).squeeze(1).chunk(3)
    elif bias is None:
        weights = _own_rows(packed.to_local(), module).chunk(3)
    else:
        held = torch.cat((packed.to_local(), bias.to_local().unsqueeze(1)), 1)
        both = _own_rows(held, module).chunk(3)
        weights = [rows[:, :-1] for rows in both]
        biases = [rows[:, -1] for rows in both]
    of = {id(x): _local(x) for x in inputs}
    return [
        functional.linear(of[id(x)], weight, bias)
        for x, weight, bias in zip(inputs, weights, biases, strict=True)
    ]


def _own_rows(own: Tensor, module: Any) -> Tensor:
    """The rows of this process' heads of q, of k and of v, (3·E / n, …).

    own: this process' share of the 3·E rows, contiguous ones, which it sends to those
    whose heads they belong to.
    """
    mesh: DeviceMesh = module._mesh
    ranks, rank = mesh.size(), mesh.get_local_rank()
    place = (module.embed_dim, ranks)
    sent = [_held_for(*place, rank, other) for other in range(ranks)]
    received = [_count(_held_for(*place, other, rank)) for other in range(ranks)]
    pieces = [own[start:stop] for each in sent for start, stop in each]
    group = mesh.get_group()
    got: Tensor = collectives.all_to_all_single_autograd(
        torch.cat(pieces), received, list(map(_count, sent)), group
    )
    return got


def _held_for(width: int, ranks: int, holder: int, owner: int) -> list[tuple[int, int]]:
    """The rows that holder has for the heads of owner, of q, k and v, (start, stop)
    counted from holder's first: each holds as many neighbours of the 3 · width rows."""
    first, last = (3 * width // ranks * end for end in (holder, holder + 1))
    own = width // ranks
    starts = (part * width + owner * own for part in range(3))
    held = [(max(x, first) - first, min(x + own, last) - first) for x in starts]
    return [(start, stop) for start, stop in held if start < stop]


def _count(pieces: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in pieces)
