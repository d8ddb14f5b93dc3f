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
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._call import check_type, shown
from ._tracing import is_known
from .cache import KVCache

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

Function = TypeVar("Function", bound=Callable[..., Any])

# Looked at first, because nearly all arguments are of these types.
_PLAIN = frozenset(
    (Tensor, nn.Parameter, nn.Buffer, type(None), bool, int, float, str, tuple, KVCache)
)
# What depends on where queries stand, beside is_causal, or changes it.
_OF_POSITIONS = ("window", "key_lengths", "alibi_slopes")
# Values that mean the same as None.
_OFF: dict[str, tuple[Any, ...]] = {"softcap": (0,), "window": ((-1, -1), [-1, -1])}


def are_plain(*values: object) -> bool:
    """Whether all values are what they look like, by their types; else look closer."""
    return _PLAIN.issuperset(map(type, values))


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


def _is_dtensor(value: object) -> bool:
    """Whether value is a DTensor, of which the operators know the shares."""
    return (
        has_own_rules(value)
        and type(value).__module__ == "torch.distributed.tensor"
        and isinstance(value, Tensor)
        and is_known(value)
    )


def is_causal_bias(value: object) -> bool:
    """Whether value is a CausalBias. Its module, which imports torch._dynamo and takes
    a second for it, is looked into only where value is a tensor with rules of its own."""
    if not has_own_rules(value):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(value, CausalBias)


def own_rules_of(arguments: dict[str, Any], but_wrappers: bool = False) -> str | None:
    """Which of the arguments has_own_rules, in words; None: none has.

    but_wrappers: wrappers around other tensors are not counted.
    """
    for name, value in arguments.items():
        kind = type(value)
        counted = not (but_wrappers and is_traceable_wrapper_subclass(value))
        if counted and has_own_rules(value):
            which = f"{name}, a {kind.__module__}.{kind.__qualname__}"
            return f"{which}, which has rules of its own"
    return None


def _is_given(name: str, value: object, usual: object = None) -> bool:
    """Whether an argument says anything else than its usual value."""
    if isinstance(value, (str, Real, tuple, list)):
        return value != usual and value not in _OFF.get(name, ())
    return value is not usual


def refuse_fused(function: str, backend: str, reason: str) -> None:
    """RuntimeError where backend is "fused", in the words of the library."""
    if backend == "fused":
        raise RuntimeError(
            f'{function}: backend "fused" cannot run this call: {reason}'
        )


def takes_subclasses(
    pytorch: Callable[..., Any] | None, backend: Callable[[], str], hint: str = ""
) -> Callable[[Function], Function]:
    """Decorates a function of tensors that by itself takes plain ones only.

    pytorch: PyTorch's function of the arguments that are not keyword-only, if there
    is one. backend() names the current backend. hint: what to do where it refuses.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        extra = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        in_layer = "causal_alignment" not in extra
        name = function.__name__

        def call_with_subclasses(arguments: dict[str, Any]) -> Any:
            given = [
                x for x in extra if _is_given(x, arguments.get(x, extra[x]), extra[x])
            ]
            theirs = None if given else pytorch
            if theirs:
                arguments = {x: y for x, y in arguments.items() if x not in extra}
            if is_causal_bias(arguments.get("attn_mask")):
                check_causal_bias(name, arguments)
                if theirs and not in_layer and backend() == "exact":
                    # What its __torch_function__ would call, if that did not know
                    # PyTorch's function by a name under which ours may stand.
                    return arguments["attn_mask"]._dispatch(**arguments)
                arguments = without_causal_bias(name, arguments, in_layer)
            # The operators take DTensors; layers of this package are sharded as modules.
            taken = (
                () if in_layer else [x for x in arguments if _is_dtensor(arguments[x])]
            )
            others = {x: y for x, y in arguments.items() if x not in taken}
            reason = own_rules_of(others)
            if reason is None:
                return function(**arguments)
            if theirs is None:
                which = f" with {given[0]}" if given else ""
                raise TypeError(
                    f"{name}: tensors must be plain ones{which}, got {reason}{hint}"
                )
            refuse_fused(name, backend(), reason)
            return theirs(**arguments)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if are_plain(*args) and (not kwargs or are_plain(*kwargs.values())):
                return function(*args, **kwargs)
            values = (*args, *kwargs.values())
            if any(isinstance(x, fx.Proxy) for x in values):
                # By its public name, whatever decorates it beside.
                public = getattr(function, "__globals__", {}).get(name, wrapper)
                return handle_torch_function(public, values, *args, **kwargs)
            return call_with_subclasses(signature.bind(*args, **kwargs).arguments)

        return wrapper  # type: ignore[return-value]

    return decorate


def forward_takes_subclasses(
    backend: Callable[[], str],
) -> Callable[[Function], Function]:
    """Decorates forward of a module that by itself takes plain tensors only.

    Other classes with rules of their own are nn.MultiheadAttention's where the module
    is one. Elsewhere those are refused whose memory could be read: wrappers around
    other tensors, as DTensor, have none. backend() names the current backend.
    """

    def decorate(forward: Function) -> Function:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if are_plain(*args) and (not kwargs or are_plain(*kwargs.values())):
                return forward(self, *args, **kwargs)
            arguments = signature.bind(self, *args, **kwargs).arguments
            del arguments["self"]
            recorded = recorded_by_fx(self, arguments)
            if recorded is not None:
                return recorded
            name = type(self).__name__
            if is_causal_bias(arguments.get("attn_mask")):
                check_causal_bias(name, arguments)
                arguments = without_causal_bias(name, arguments, in_layer=True)
            reason = own_rules_of(arguments)
            if reason is None:
                return forward(self, **arguments)
            if isinstance(self, nn.MultiheadAttention):
                refuse_fused(name, backend(), reason)
                return nn.MultiheadAttention.forward(self, **arguments)
            if own_rules_of(arguments, but_wrappers=True) is not None:
                raise TypeError(f"{name}: tensors must be plain ones, got {reason}")
            return forward(self, **arguments)

        return wrapper  # type: ignore[return-value]

    return decorate


def recorded_by_fx(module: nn.Module, arguments: dict[str, Any]) -> Any:
    """The call of module as one node of the graph that torch.fx is tracing.

    As the call of a module of torch.nn, which torch.fx knows for a leaf by its name.
    None where nothing is traced, or where module is what is traced.
    """
    tracers: list[Any] = [
        x.tracer for x in arguments.values() if isinstance(x, fx.Proxy)
    ]
    path = tracers[0].path_of_module(module) if tracers else ""
    if not path:
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        raise fx.proxy.TraceError(
            f"{type(module).__name__}: forward hooks would run twice; trace with a "
            f"Tracer whose is_leaf_module is True for {path!r}"
        )
    return tracers[0].create_proxy("call_module", path, (), arguments)


def check_causal_bias(function: str, arguments: dict[str, Any]) -> None:
    """TypeError for a CausalBias that was computed with, since the result means nothing,
    and for a query or key that is no tensor, since their lengths are asked for."""
    if not hasattr(arguments["attn_mask"], "variant"):
        raise TypeError(
            f"{function}: attn_mask must be a CausalBias as it was made, got one that "
            "was computed with"
        )
    for name in ("query", "key"):
        check_type(function, name, arguments[name], Tensor, "a tensor")


def without_causal_bias(
    function: str, arguments: dict[str, Any], in_layer: bool
) -> dict[str, Any]:
    """The same arguments with attn_mask, a CausalBias, written in others.

    in_layer: masks are (Lq, Lk), True = blocked. Else they are True = may attend, and
    is_causal says the same where no shape is to be broadcast.
    Raises ValueError with is_causal, for another size than that of the scores, and
    where other arguments would put the queries elsewhere.
    """
    from torch.nn.attention.bias import CausalVariant

    bias: CausalBias = arguments["attn_mask"]
    if arguments.get("is_causal"):
        raise ValueError(
            f"{function}: CausalBias should not be used with causal=True: is_causal "
            "must be False with a CausalBias as attn_mask, got True"
        )
    query, key = arguments["query"], arguments["key"]
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    bottom_right = bias.variant == CausalVariant.LOWER_RIGHT
    if not in_layer:
        sizes = (*query.shape[-2:-1], *key.shape[-2:-1])
        if lengths != sizes:
            raise ValueError(
                f"{function}: attn_mask must be a CausalBias of the lengths of query "
                f"and key, {sizes}, got {lengths}"
            )
        alignment = "bottom_right" if bottom_right else "top_left"
        usual = arguments.get("causal_alignment", "top_left") in ("top_left", alignment)
        beside = _check_positions(function, arguments, alignment)
        if beside or (usual and not _is_broadcast(query, key)):
            return arguments | dict(
                attn_mask=None, is_causal=True, causal_alignment=alignment
            )
    sees = torch.ones(lengths, dtype=torch.bool, device=query.device)
    sees = sees.tril(lengths[1] - lengths[0] if bottom_right else 0)
    return arguments | dict(attn_mask=~sees if in_layer else sees)


def _check_positions(function: str, arguments: dict[str, Any], alignment: str) -> bool:
    """Whether more depends on where queries stand than a CausalBias of alignment.

    ValueError where that would be elsewhere: one call has one position per query.
    """
    offset = arguments.get("query_offset")
    if offset is not None:
        raise ValueError(
            f"{function}: query_offset must be None with a CausalBias as attn_mask, "
            f"got {shown(offset)}"
        )
    named = arguments.get("causal_alignment", "top_left")
    beside = [x for x in _OF_POSITIONS if _is_given(x, arguments.get(x))]
    if beside and named != alignment:
        raise ValueError(
            f'{function}: causal_alignment must be "{alignment}" with this CausalBias '
            f"as attn_mask and {beside[0]}, got {shown(named)}"
        )
    return bool(beside)


def _is_broadcast(query: Tensor, key: Tensor) -> bool:
    """Whether shapes are to be broadcast, which PyTorch's alignment alone allows."""
    return (
        query.dim() != key.dim()
        or query.dim() not in (3, 4)
        or query.shape[:-3] != key.shape[:-3]
        or query.size(-3) < key.size(-3)
    )
