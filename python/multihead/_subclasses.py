# SPDX-License-Identifier: MIT
"""Arguments that are not plain tensors: subclasses with rules of their own, proxies.

An operator reads the memory of a tensor, and that of a CausalBias, a nested tensor
or a DTensor does not hold what it means. A CausalBias is written as arguments. Other
such tensors go to PyTorch's function, where their classes have a say, or are refused.
The proxies with which torch.fx traces record the call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Function = TypeVar("Function", bound=Callable[..., Any])

# Looked at first, because nearly all arguments are of these types.
_PLAIN = frozenset(
    (Tensor, nn.Parameter, nn.Buffer, type(None), bool, int, float, str, tuple)
)
# What depends on causal_alignment beside is_causal, or changes what it means.
_OF_POSITIONS = ("window", "key_lengths", "alibi_slopes", "query_offset")


def are_plain(*values: object) -> bool:
    """Whether no value can be anything else than it looks like, by its type.

    False says only that a closer look is needed.
    """
    for value in values:
        if type(value) not in _PLAIN:
            return False
    return True


def has_own_rules(value: object) -> bool:
    """Whether value is a tensor whose class says what operations on it mean.

    Either by __torch_function__ (CausalBias, MaskedTensor, a jagged NestedTensor) or
    as a wrapper around other tensors (DTensor). A subclass that only adds attributes
    has none, nor have the tensors with which torch.compile and torch.export trace.
    """
    if type(value) in _PLAIN or not isinstance(value, Tensor):
        return False
    override: Any = type(value).__torch_function__
    default: Any = Tensor.__torch_function__
    return is_traceable_wrapper_subclass(value) or (
        override is not torch._C._disabled_torch_function_impl
        and getattr(override, "__func__", None) is not default.__func__
    )


def own_rules_of(arguments: dict[str, Any], but_wrappers: bool = False) -> str | None:
    """Which of the arguments has_own_rules, in words; None: none has.

    but_wrappers: wrappers around other tensors are not counted.
    """
    for name, value in arguments.items():
        if has_own_rules(value) and not (
            but_wrappers and is_traceable_wrapper_subclass(value)
        ):
            kind = type(value)
            return (
                f"{name}, a {kind.__module__}.{kind.__qualname__}, which has rules of "
                "its own"
            )
    return None


def refuse_fused(function: str, backend: str, reason: str) -> None:
    """RuntimeError where backend is "fused", in the words of the library."""
    if backend == "fused":
        raise RuntimeError(
            f'{function}: backend "fused" cannot run this call: {reason}'
        )


def takes_subclasses(
    pytorch: Callable[..., Any] | None, backend: Callable[[], str]
) -> Callable[[Function], Function]:
    """Decorates a function of tensors that by itself takes plain ones only.

    pytorch: PyTorch's function of the arguments that are not keyword-only, if there
    is one. backend() names the current backend.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        extra = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        positional = [p.name for p in parameters if p.name not in extra]
        in_layer = "causal_alignment" not in extra
        name = function.__name__

        def call_with_subclasses(arguments: dict[str, Any]) -> Any:
            given = [x for x in extra if arguments.get(x, extra[x]) is not extra[x]]
            theirs = None if given else pytorch
            if isinstance(arguments.get("attn_mask"), CausalBias):
                if theirs and not in_layer and backend() == "exact":
                    # What its __torch_function__ would call, if that did not know
                    # PyTorch's function by a name under which ours may stand.
                    return CausalBias._dispatch(**arguments)
                arguments = without_causal_bias(name, arguments, in_layer)
            reason = own_rules_of(arguments)
            if reason is None:
                return function(**arguments)
            if theirs is None:
                which = f" with {given[0]}" if given else ""
                raise TypeError(
                    f"{name}: tensors must be plain ones{which}, got {reason}"
                )
            refuse_fused(name, backend(), reason)
            return theirs(**arguments)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if are_plain(*values) or len(args) > len(positional):
                return function(*args, **kwargs)
            if any(isinstance(x, fx.Proxy) for x in values):
                return handle_torch_function(wrapper, values, *args, **kwargs)
            return call_with_subclasses(
                dict(zip(positional, args, strict=False)) | kwargs
            )

        return wrapper  # type: ignore[return-value]

    return decorate


def without_causal_bias(
    function: str, arguments: dict[str, Any], in_layer: bool
) -> dict[str, Any]:
    """The same arguments with attn_mask, a CausalBias, written in others.

    in_layer: masks are (Lq, Lk), True = blocked. Else they are True = may attend, and
    is_causal says the same where nothing else depends on where the queries stand.
    Raises ValueError with is_causal, and for another size than that of the scores.
    """
    bias: CausalBias = arguments["attn_mask"]
    if arguments.get("is_causal"):
        raise ValueError(
            f"{function}: CausalBias should not be used with causal=True: is_causal "
            "must be False with a CausalBias as attn_mask, got True"
        )
    query, key = arguments["query"], arguments["key"]
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    bottom_right = bias.variant == CausalVariant.LOWER_RIGHT
    if not in_layer and lengths != (query.size(-2), key.size(-2)):
        raise ValueError(
            f"{function}: attn_mask must be a CausalBias of the lengths of query and "
            f"key, {(query.size(-2), key.size(-2))}, got {lengths}"
        )
    if not in_layer and _positions_are_free(arguments):
        alignment = "bottom_right" if bottom_right else "top_left"
        changes: dict[str, Any] = dict(
            attn_mask=None, is_causal=True, causal_alignment=alignment
        )
    else:
        sees = torch.ones(lengths, dtype=torch.bool, device=query.device)
        sees = sees.tril(lengths[1] - lengths[0] if bottom_right else 0)
        changes = dict(attn_mask=~sees if in_layer else sees)
    return arguments | changes


def _positions_are_free(arguments: dict[str, Any]) -> bool:
    """Whether another causal_alignment changes nothing but which keys are causal.

    And whether no shape is to be broadcast, which PyTorch's alignment alone allows.
    """
    query, key = arguments["query"], arguments["key"]
    return (
        all(arguments.get(name) is None for name in _OF_POSITIONS)
        and arguments.get("causal_alignment", "top_left") == "top_left"
        and query.dim() == key.dim()
        and query.dim() in (3, 4)
        and query.shape[:-3] == key.shape[:-3]
        and query.size(-3) >= key.size(-3)
    )
