# SPDX-License-Identifier: MIT
"""Calls an operator, and gives its errors the types that Python's users expect."""

import re
from collections.abc import Callable
from numbers import Integral
from typing import Any, cast

import torch

_ASSERTION = "AssertionError: "
# What PyTorch's dispatcher says of a value that it cannot convert.
_REFUSED = re.compile(r"\S+ Expected a value of type '(.+?)' for argument '(\w+)'")
# What its tracer says of an optional result.
_UNTRACEABLE = "unsupported output type"
# The dispatcher's types in words, or an argument's own. `window` is the only pair.
_TYPES = {
    "query_offset": "an int, a tensor or None",
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "int": "an int",
    "Optional[int]": "an int or None",
    "float": "a number",
    "Optional[float]": "a number or None",
    "bool": "True or False",
    "str": "a str",
    "Optional[List[int]]": "(left, right)",
}
_MULTI_HEAD = torch.ops.multihead.multi_head_attention_forward.default
# The public names of operators that are called otherwise.
_FUNCTIONS = {
    "head_dim": "GroupedQueryAttention",
    "pool_heads": "from_multihead",
    "repeat_heads": "to_multihead",
    "kv_cache_make": "KVCache",
    "kv_cache_append": "KVCache.append",
    "kv_cache_extend": "KVCache.append",
    "kv_cache_reserve": "KVCache.reserve",
    "cached_attention_forward": "forward",
}


def call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """operator(*args, **kwargs), an overload of torch.ops.multihead.

    A value of a type that the operator does not take is a TypeError in our words.
    What torch.nn.MultiheadAttention raises as AssertionError the library marks as
    such, because C++ operators cannot raise it in Python.
    """
    try:
        return operator(*args, **kwargs)
    except RuntimeError as error:
        raise in_our_words(error, operator, args, kwargs) from None


def in_our_words(
    error: RuntimeError, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception:
    """What operator(*args, **kwargs) raised, as Python's users expect it."""
    # Looked at only now: nothing is judged beforehand, since a good call should not
    # pay, and may come with proxies of torch.fx for its values.
    message = str(error)
    if message.startswith(_ASSERTION):
        return AssertionError(message.removeprefix(_ASSERTION))
    if refused := _REFUSED.match(message):
        return _wrong_type(operator, args, kwargs, refused)
    if message.startswith(_UNTRACEABLE) and torch._C._get_tracing_state() is not None:
        # The module alone says how its batches lie.
        named = operator is _MULTI_HEAD and "batch_first" in kwargs
        return no_torchscript("trace", named)
    return error


def no_torchscript(tool: str, has_counterpart: bool) -> RuntimeError:
    """What torch.jit.<tool> ends in; has_counterpart: on a MultiheadAttention."""
    instead = (
        f", or {tool} the model with torch.nn.MultiheadAttention, which has the same "
        "state_dict"
    )
    return RuntimeError(
        f"torch.jit.{tool} cannot record multihead's operators: use "
        f"torch.export.export or torch.compile{instead if has_counterpart else ''}"
    )


def _wrong_type(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refused: re.Match[str]
) -> TypeError:
    """The error for the argument that the dispatcher named."""
    names = [argument.name for argument in operator._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    kind, argument = refused.groups()
    function = operator._schema.name.partition("::")[2]
    return TypeError(
        f"{_FUNCTIONS.get(function, function)}: {argument} must be "
        f"{_TYPES.get(argument, _TYPES.get(kind, kind))}, got {shown(values[argument])}"
    )


def check_type(
    function: str, argument: str, value: object, types: Any, words: str
) -> None:
    """For arguments that go to no operator of ours: TypeError unless of `types`."""
    if not isinstance(value, types):
        raise TypeError(f"{function}: {argument} must be {words}, got {shown(value)}")


def check_int(function: str, argument: str, value: object) -> None:
    """An int, NumPy's or a symbolic one of torch.compile."""
    check_type(function, argument, value, (Integral, torch.SymInt), "an int")


def shown(value: object) -> str:
    """A value in an error: itself where that is short, else its type."""
    if isinstance(value, (str, int, float, complex, tuple, type(None))):
        text = repr(value)
        if len(text) < 40:
            return text
    kind = type(value)
    in_module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return in_module + kind.__name__


def as_tensor(function: str, offset: object, query: torch.Tensor) -> Any:
    """An int as a tensor, also one that changes between calls of compiled code.

    ValueError where it fits no int64; what the operator takes is within that.
    """
    if offset is not None and isinstance(offset, (Integral, torch.SymInt)):
        number = cast(int, offset)
        if not -(2**63) <= number < 2**63:
            raise ValueError(
                f"{function}: query_offset must be between -{2**62} and {2**62}, got "
                f"{shown(offset)}"
            )
        return torch.full((), number, device=getattr(query, "device", None))
    return offset
