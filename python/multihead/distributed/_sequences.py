# SPDX-License-Identifier: MIT
"""Sequences too long for one process: one operator call each."""

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._call import call
from ..functional import Rules, _keywords, _names_rules

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ops = torch.ops.multihead
Order = Literal["contiguous", "head_tail"]


def group_of(function: str, group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """A group, that of a mesh of one dimension, or the default one.

    ValueError for a mesh of more dimensions, TypeError for anything else.
    """
    if group is None:
        default: ProcessGroup = dist.distributed_c10d._get_default_group()
        return default
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{function}: group must be a mesh of one dimension, got {group.ndim}: "
                'take a part, as in mesh["cp"]'
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{function}: group must be a process group or a mesh, got "
            f"{type(group).__name__}"
        )
    return group


def name_of_group(function: str, group: ProcessGroup | DeviceMesh | None) -> str:
    """The name by which C++ finds it."""
    return group_of(function, group).group_name


@_names_rules
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    order: Order = "contiguous",
    return_lse: bool = False,
    **rules: "Unpack[Rules]",
) -> Tensor | tuple[Tensor, Tensor]:
    """scaled_dot_product_attention over a sequence whose tokens lie on several processes.

    Every process of the group calls this with its own rows and the same options, and
    gets its own rows of the output. Keys and values go round: a process never holds more
    than its own and one other's, and never more weights than the kernels do. Source:
    "Ring Attention with Blockwise Transformers for Near-Infinite Context".

    Positions (is_causal, window, query_offset, key_lengths, alibi_slopes, alignment) are
    those in the whole sequence. A weight is dropped where one process would drop it, by
    the numbers that the first process draws.

    Args:
        query: (B, H, Lq, D), the queries of this process. Lq, and Lk, may differ from
            process to process.
        key: (B, G, Lk, D), the keys of this process.
        value: (B, G, Lk, Dv).
        attn_mask: broadcastable to (B, H, Lq, all keys), the keys in the order of the
            sequence. bool: **True = may attend**. Floating point: added to the scores.
        dropout_p, is_causal, scale, enable_gqa: as in scaled_dot_product_attention.
        group: the processes, or a mesh of one dimension; default: all.
        order: which tokens a process has. "contiguous": those after the tokens of the
            process before. "head_tail": of 2·n pieces of the sequence, the first ones a
            token longer where they do not divide, process r has piece r and then piece
            2·n - 1 - r; under a causal mask all have the same work.
        return_lse: also return the logsumexp of the scores.

    The rules are those of scaled_dot_product_attention. key_mask, one row of keys for each
    batch item, goes with the process's keys. alibi_slopes and sinks are the same
    everywhere; their gradients, and that of an attn_mask that all have alike, are this
    process's summands.

    Returns:
        (B, H, Lq, Dv); with return_lse also logsumexp (B, H, Lq).

    Raises:
        RuntimeError, ValueError: on every process, for what one of them refuses, for
            shapes and options that are not the same everywhere, and where a process is
            gone, within the timeout of the group.
    """
    return _attend(
        _ops.ring_attention.default,
        (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        dict(group=group, order=order, return_lse=return_lse),
        rules,
    )


@_names_rules
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    order: Order = "contiguous",
    return_lse: bool = False,
    **rules: "Unpack[Rules]",
) -> Tensor | tuple[Tensor, Tensor]:
    """ring_attention by an exchange instead of a ring: every process gets all tokens of a
    share of the heads, computes those, and gives the rows back.

    Results and gradients have the bits of one process. A process holds as many elements
    as its own query, key, value and output have. Source: "DeepSpeed Ulysses: System
    Optimizations for Enabling Training of Extreme Long Sequence Transformer Models".

    The arguments are those of ring_attention; H and G must be multiples of the number of
    processes, and attn_mask must be None.

    Returns:
        (B, H, Lq, Dv); with return_lse also logsumexp (B, H, Lq).

    Raises:
        RuntimeError, ValueError: as ring_attention.
    """
    return _attend(
        _ops.ulysses_attention.default,
        (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        dict(group=group, order=order, return_lse=return_lse),
        rules,
    )


def _attend(
    operator: OpOverload,
    arguments: tuple[Any, ...],
    where: dict[str, Any],
    rules: Rules,
) -> Tensor | tuple[Tensor, Tensor]:
    name = operator.overloadpacket.__name__
    keywords = _keywords(name, rules, arguments[0])
    if keywords.pop("backend") == "exact":
        raise RuntimeError(
            f'{name}: the backend must not be "exact": PyTorch has no order of '
            "operations for parts of a sequence"
        )
    where["group"] = name_of_group(name, where["group"])
    out, logsumexp = call(operator, *arguments, **keywords, **where)
    return (out, logsumexp) if where["return_lse"] else out


def ring_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    causal_alignment: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int, int] | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    order: Order = "contiguous",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """varlen_attention over documents that lie one after the other on several processes,
    cut where that may be.

    Args:
        query: (Tq, H, D), the rows of this process.
        key: (Tk, G, D), likewise.
        value: (Tk, G, Dv), likewise.
        cu_seqlens_q: (N + 1), where the documents begin in the rows of all processes.
        cu_seqlens_k: likewise, for keys; default cu_seqlens_q.
        group, order: as in ring_attention; the others as in varlen_attention.

    Returns:
        (Tq, H, Dv); with return_lse also logsumexp (H, Tq).
    """
    return _attend_varlen(_ops.ring_varlen_attention.default, locals())


def ulysses_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    causal_alignment: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int, int] | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    order: Order = "contiguous",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """ring_varlen_attention as ulysses_attention does it: the arguments of the one, the
    bits and the limits of the other."""
    return _attend_varlen(_ops.ulysses_varlen_attention.default, locals())


def _attend_varlen(
    operator: OpOverload, arguments: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    name = operator.overloadpacket.__name__
    if arguments["cu_seqlens_k"] is None:
        arguments["cu_seqlens_k"] = arguments["cu_seqlens_q"]
    arguments["group"] = name_of_group(name, arguments["group"])
    out, logsumexp = call(operator, **arguments)
    return (out, logsumexp) if arguments["return_lse"] else out
