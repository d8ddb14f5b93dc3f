# SPDX-License-Identifier: MIT
"""Forward of a module with arguments that are not plain tensors: see _subclasses."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx, nn

from ._subclasses import (
    are_plain,
    check_causal_bias,
    is_causal_bias,
    own_rules_of,
    refuse_fused,
    without_causal_bias,
)

Forward = TypeVar("Forward", bound=Callable[..., Any])


def takes_others(backend: Callable[[], str]) -> Callable[[Forward], Forward]:
    """Decorates forward of a module that by itself takes plain tensors only.

    Other classes with rules of their own are nn.MultiheadAttention's where the module
    is one. Elsewhere those are refused whose memory could be read: wrappers around
    other tensors, as DTensor, have none. backend() names the current backend.
    """

    def decorate(forward: Forward) -> Forward:
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
