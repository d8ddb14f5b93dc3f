# SPDX-License-Identifier: MIT
"""Attention as functions: docstrings, and one operator call each."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._call import as_tensor, call, check_type, in_our_words
from ._subclasses import Function, is_causal_bias, own_rules_of, takes_subclasses

if TYPE_CHECKING:  # a package that PyTorch brings; Python has it since 3.11
    from typing_extensions import Unpack

Backend = Literal["auto", "exact", "fused"]
Alignment = Literal["top_left", "bottom_right"]

_ops = torch.ops.multihead
_plain = _ops.scaled_dot_product_attention.plain
# What _plain(...) hands everything on to; a twelfth of a small call is saved.
_call_plain = _plain._op
_backend: contextvars.ContextVar[Backend] = contextvars.ContextVar(
    "multihead_backend", default="auto"
)
# The names of all blocks that are open, for torch.compile, which guards on
# globals, not on context variables. A list, because threads leave in any order.
_open_blocks: list[Backend] = []


@contextlib.contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Chooses the implementation inside a ``with`` block.

    "auto" (the default)
        fused kernels where they can run (on the CPU, training included), else
        the definition in ATen operations, which forms all weights. A row that
        sees no key gives 0.
    "exact"
        PyTorch's own order of operations: the same bits as
        torch.nn.MultiheadAttention, its NaN rows and its dropout stream.
    "fused"
        fused kernels, or RuntimeError with the reason why they cannot run.

    The choice holds for the current thread or task (it is a context variable);
    code under torch.compile follows the block that was entered last, whichever
    thread entered it, and is compiled again when the choice changes.
    Raises ValueError for any other name.
    """
    if name not in ("auto", "exact", "fused"):
        raise ValueError(
            f"backend: name must be 'auto', 'exact' or 'fused', got {name!r}"
        )
    _open_blocks.append(name)
    token = None if torch.compiler.is_compiling() else _backend.set(name)
    try:
        yield
    finally:
        del _open_blocks[len(_open_blocks) - 1 - _open_blocks[::-1].index(name)]
        if token is not None:
            _backend.reset(token)


def current_backend() -> Backend:
    """The name that the innermost ``backend`` block chose, else "auto"."""
    if torch.compiler.is_compiling():
        return _open_blocks[-1] if _open_blocks else "auto"
    return _backend.get()


class Rules(TypedDict, total=False):
    """What PyTorch's function lacks, for type checkers: the same in each overload."""

    causal_alignment: Alignment
    query_offset: int | Tensor | None
    window: tuple[int, int] | list[int] | None
    key_lengths: Tensor | None
    key_mask: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


_RULES = Rules.__annotations__


def _names_rules(function: Function) -> Function:
    """Decorates a function of ``**rules``: its signature names them, keyword-only and
    with the defaults of the operator."""
    arguments = _ops.scaled_dot_product_attention.default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    kind = inspect.Parameter.KEYWORD_ONLY
    rules = [
        inspect.Parameter(name, kind, default=defaults[name], annotation=annotation)
        for name, annotation in _RULES.items()
    ]
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    parameters = sorted([*rules, *own], key=lambda parameter: parameter.kind)
    named: Any = function
    named.__signature__ = signature.replace(parameters=parameters)
    return function


def _keywords(function: str, rules: Rules, query: Tensor) -> dict[str, Any]:
    """The ``**rules`` of a function as its operator takes them, and the backend."""
    for rule in rules:
        if rule not in _RULES:
            if function == "scaled_dot_product_attention":  # as Python says it
                said = f"{function}() got an unexpected keyword argument {rule!r}"
                raise TypeError(said)
            raise TypeError(
                f"{function}: arguments must be those of scaled_dot_product_attention, "
                f"got {rule}"
            )
    offset = as_tensor(function, rules.get("query_offset"), query)
    return {**rules, "query_offset": offset, "backend": current_backend()}


def _without_rules(function: Function) -> Function:
    """Decorates scaled_dot_product_attention: with PyTorch's arguments alone, and plain
    tensors, it is one call of an operator that takes nothing else. Small calls would
    notice every layer and argument more."""

    @functools.wraps(function)
    def wrapper(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **more: Any,
    ) -> Any:
        args = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if (
            type(query) is type(key) is type(value) is Tensor
            and (attn_mask is None or type(attn_mask) is Tensor)
            and not more
            and not torch.compiler.is_compiling()
            and _backend.get() == "auto"
        ):
            try:
                return _call_plain(*args)
            except RuntimeError as error:
                raise in_our_words(error, _plain, args, more) from None
        return function(*args, **more)

    return wrapper  # type: ignore[return-value]


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[False] = ...,
    **rules: "Unpack[Rules]",
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    **rules: "Unpack[Rules]",
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: bool,
    **rules: "Unpack[Rules]",
) -> Tensor | tuple[Tensor, Tensor]: ...
@_without_rules
@takes_subclasses(F.scaled_dot_product_attention, current_backend)
@_names_rules
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    **rules: "Unpack[Rules]",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · query · keyᵀ + mask) · value, and what PyTorch lacks.

    The first eight arguments are those of
    torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: (B, H, Lq, D) or (H, Lq, D), floating point.
        key: (B, G, Lk, D), of query's dtype; or stored narrower: bfloat16 under
            float32, or rows of to_mxint8.
        value: (B, G, Lk, Dv), of key's dtype.
        attn_mask: broadcastable to (B, H, Lq, Lk). bool: **True = may attend**.
            Floating point: added to the scores; -inf blocks. Or a
            torch.nn.attention.bias.CausalBias, without is_causal.
        dropout_p: probability of zeroing a weight; applied whenever > 0, there
            is no training flag.
        is_causal: query i sees keys j <= i + offset. With attn_mask both apply.
        scale: factor of query · key, default 1/sqrt(D); any finite number.
        enable_gqa: allows G to divide H; query head h reads head h // (H // G).
        return_lse: also return the logsumexp of the scores.

    Keyword Arguments:
        causal_alignment: "top_left" (offset 0, as in PyTorch) or
            "bottom_right" (offset = key length - Lq: the last query stands at
            the last key, as decoding with a cache needs it).
        query_offset: an int, or integers (B,): the offset itself. Query i of
            batch row b stands at key i + query_offset[b]; so a cache with room
            for more keys, or queries before its end, need no mask. From -2**62
            to 2**62; not together with "bottom_right".
        window: (left, right): query i sees keys from i + offset - left to
            i + offset + right; -1 = no limit on that side.
        key_lengths: integers (B,): keys from key_lengths[b] on do not exist.
        key_mask: bool (B, Lk): **True = may be attended to**. With attn_mask both
            apply, and nothing of the size (Lq, Lk) is formed.
        softcap: scores become softcap · tanh(scores / softcap), before masks;
            0 = None.
        alibi_slopes: (H,) or (B, H): scores lose slope · abs(i + offset - j).
        sinks: (H,): one more logit per head in the softmax's denominator.

    Returns:
        (B, H, Lq, Dv); with return_lse also logsumexp (B, H, Lq), float32
        (float64 for float64), -inf for a row that sees no key and no sink.
        A row that sees no key gives 0, and NaN in keys and values that a row
        does not see does not reach it. Under backend("exact") a call that
        PyTorch has returns what PyTorch returns. So does, always, a call with
        nested tensors or others whose class has rules of its own.

    Raises:
        TypeError: an argument of another type, such as a list for a tensor.
        ValueError: an argument outside its domain (window, key_lengths, key_mask,
            scale, softcap, sinks, alibi_slopes, causal_alignment, query_offset).
        RuntimeError: shapes, dtypes or devices that do not fit together.
    """
    pytorchs = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out, logsumexp = call(
        _ops.scaled_dot_product_attention.default,
        *pytorchs,
        return_lse=return_lse,
        **_keywords("scaled_dot_product_attention", rules, query),
    )
    return (out, logsumexp) if return_lse else out


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    *,
    causal_alignment: Alignment = ...,
    window: tuple[int, int] | list[int] | None = ...,
    key_lengths: Tensor | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    *,
    causal_alignment: Alignment = ...,
    window: tuple[int, int] | list[int] | None = ...,
    key_lengths: Tensor | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    *,
    causal_alignment: Alignment = ...,
    window: tuple[int, int] | list[int] | None = ...,
    key_lengths: Tensor | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    block_table: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@takes_subclasses(
    None, current_backend, ": of a jagged tensor give values() and offsets()"
)
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    causal_alignment: Alignment = "bottom_right",
    window: tuple[int, int] | list[int] | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences that lie one after the other, without padding.

    Only rows that exist are computed, forward and backward. Shapes: query (Tq, H, D),
    key (Tk, G, D), value (Tk, G, Dv), floating point and of one dtype (or key and value
    stored narrower, as scaled_dot_product_attention takes them); H is a multiple of G,
    and query head h reads head h // (H // G). Source: flash_attn_varlen_func of
    FlashAttention, in the words of scaled_dot_product_attention.

    The bits of a sequence are those that it has alone, and in a padded batch, forward
    and backward; dropout is that of batch row n.

    Args:
        query: (Tq, H, D).
        key: (Tk, G, D), or with block_table pages (P, page, G, D).
        value: (Tk, G, Dv), or (P, page, G, Dv).
        cu_seqlens_q: int32 or int64 (N + 1,) on the CPU: the queries of sequence n are
            rows cu_seqlens_q[n] to cu_seqlens_q[n + 1]. Begins with 0, ascends, ends
            with Tq. Sequences may be empty. Of a jagged torch.nested tensor these are
            its offsets(), and the rows its values().
        cu_seqlens_k: the same for keys and values, ending with Tk; None with
            block_table.
        dropout_p: applied to the weights whenever > 0.
        is_causal: query i sees keys j <= i + offset.
        scale: factor of query · key, default 1/sqrt(D); any finite number.
        causal_alignment: "bottom_right", **the default here** as in FlashAttention: the
            last query of a sequence stands at its last key; or "top_left".
        window: (left, right): query i sees keys from i + offset - left to
            i + offset + right; -1 = no limit on that side.
        key_lengths: int32 or int64 (N,): keys of sequence n from key_lengths[n] on are
            not read; None: all.
        softcap: scores become softcap · tanh(scores / softcap); 0 = None.
        alibi_slopes: (H,) or (N, H): scores lose slope · abs(i + offset - j).
        sinks: (H,): one more logit per head in the softmax's denominator.
        block_table: int32 (N, pages): key j of sequence n is row j % page of page
            block_table[n][j // page]. Needs key_lengths; entries beyond a length are
            not read. Where gradients are recorded, the keys are copied out of their
            pages.
        return_lse: also return the logsumexp of the scores.

    Returns:
        (Tq, H, Dv); with return_lse also logsumexp (H, Tq), float32 (float64 for
        float64), -inf for a row that sees no key and no sink. Such a row gives 0.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument outside its domain.
        RuntimeError: shapes, dtypes or devices that do not fit together.
    """
    out, logsumexp = call(
        _ops.varlen_attention.default,
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        dropout_p,
        is_causal,
        scale,
        causal_alignment=causal_alignment,
        window=window,
        key_lengths=key_lengths,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        block_table=block_table,
        return_lse=return_lse,
        backend=current_backend(),
    )
    return (out, logsumexp) if return_lse else out


class AttentionSummary(NamedTuple):
    """What each query attends to, per head. See attention_summary."""

    weights: Tensor
    keys: Tensor
    entropy: Tensor


@takes_subclasses(None, current_backend)
@_names_rules
def attention_summary(
    query: Tensor,
    key: Tensor,
    k: int,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **rules: "Unpack[Rules]",
) -> AttentionSummary:
    """The k largest attention weights of each query, and the entropy of all.

    The weights are never formed: memory is O(Lq · k). query (B, H, Lq, D) and
    key (B, G, Lk, D), or without B; the other arguments are those of
    scaled_dot_product_attention. Nothing is differentiable.

    Returns:
        weights (B, H, Lq, k), descending (so weights[..., 0] is the largest);
        keys int64 (B, H, Lq, k), their positions, of equal weights the lower
        first, -1 where a row sees fewer keys; entropy (B, H, Lq), the sum of
        -w · ln w over all keys. float32, float64 for float64.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument outside its domain.
        RuntimeError: shapes, dtypes or devices that do not fit together.
    """
    operator = _ops.attention_summary.default
    arguments = (query, key, k, attn_mask, 0.0, is_causal, scale, enable_gqa)
    keywords = _keywords("attention_summary", rules, query)
    return AttentionSummary(*call(operator, *arguments, **keywords))


class Route(NamedTuple):
    """The way of a call: see route."""

    way: Literal["fused", "definition", "torch_order", "pytorch", "refused"]
    reason: str


@_names_rules
def route(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    **rules: "Unpack[Rules]",
) -> Route:
    """Which way a call of scaled_dot_product_attention would go, and why not fused.

    Takes its arguments. Nothing is computed, and the arguments are not checked: calls
    that raise have a way too. TypeError for unknown names and other types.

    Returns:
        Route: its way is "fused"; "definition", in ATen operations; "pytorch",
        PyTorch's own function; or "refused" where backend("fused") would raise.
        ("torch_order", its order in ATen operations, is a way of layers.) Its reason
        says why not fused, and is "" where it is.
    """
    keywords = _keywords("route", rules, query)
    if is_causal_bias(attn_mask):
        attn_mask, is_causal = None, True
    tensors = dict(query=query, key=key, value=value, attn_mask=attn_mask)
    if reason := own_rules_of(tensors | keywords):
        return Route("refused" if current_backend() == "fused" else "pytorch", reason)
    arguments = (*tensors.values(), dropout_p, is_causal, scale, enable_gqa)
    operator = _ops.route.default
    return Route(*call(operator, *arguments, return_lse=return_lse, **keywords))


@takes_subclasses(F.multi_head_attention_forward, current_backend)
def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch.nn.functional.multi_head_attention_forward: its arguments, its results.

    query (Lq, B, E), key (Lk, B, kdim), value (Lk, B, vdim), or all without B;
    attn_mask (Lq, Lk) or (B·H, Lq, Lk) and key_padding_mask (B, Lk):
    **True = blocked**, floating point is added to the scores. is_causal without
    attn_mask means causal, which PyTorch's function refuses.
    Returns the output, shaped like query, and the weights (B, Lq, Lk), per head
    (B, H, Lq, Lk), or None without need_weights.
    Raises AssertionError, ValueError and RuntimeError where PyTorch does, and
    TypeError for an argument of another type.
    """
    # The operator takes None too, for a layer that projects by itself.
    name, weight = "multi_head_attention_forward", out_proj_weight
    check_type(name, "out_proj_weight", weight, Tensor, "a tensor")
    separate = (use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight)
    result: tuple[Tensor, Tensor | None] = call(
        _ops.multi_head_attention_forward.default,
        query,
        key,
        value,
        embed_dim_to_check,
        num_heads,
        in_proj_weight,
        in_proj_bias,
        bias_k,
        bias_v,
        add_zero_attn,
        dropout_p,
        out_proj_weight,
        out_proj_bias,
        training,
        key_padding_mask,
        need_weights,
        attn_mask,
        *separate,
        static_k,
        static_v,
        average_attn_weights,
        is_causal,
        fast_path=False,
        backend=current_backend(),
    )
    return result
