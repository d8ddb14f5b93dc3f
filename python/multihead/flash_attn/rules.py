# SPDX-License-Identifier: MIT
"""FlashAttention's rules in multihead's words, and multihead's errors in FlashAttention's."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._call import check_type

NO_WINDOW = (-1, -1)
Function = TypeVar("Function", bound=Callable[..., Any])

# "function: " and, where they follow, the shapes of the tensors as they were handed on.
_OURS = re.compile(
    r"(?:scaled_dot_product_attention|varlen_attention|flash_attn_func|"
    r"flash_attn_varlen_func): (.+?)(?: \(\w+\.shape=.*\))?"
)
_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "scale": "softmax_scale",
    "is_causal": "causal",
    "window": "window_size",
}


def in_their_words(**names: str) -> Callable[[Function], Function]:
    """Decorates a function that calls ours: errors name it, and its own arguments.

    names: how arguments of ours are called there, beside those of all functions.
    """
    theirs = _NAMES | names

    def decorate(function: Function) -> Function:
        def renamed(error: Exception) -> Exception:
            ours = _OURS.fullmatch(str(error))
            if not ours:
                return error
            text = re.sub(r"\w+", lambda word: theirs.get(word[0], word[0]), ours[1])
            return type(error)(f"{function.__name__}: {text}")

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                raise renamed(error) from None

        return wrapper  # type: ignore[return-value]

    return decorate


def check_tensors(function: str, rank: int | None = None, **tensors: Any) -> None:
    """TypeError for what is no tensor, ValueError for one of another rank."""
    for name, x in tensors.items():
        check_type(function, name, x, Tensor, "a tensor")
        if rank not in (None, x.dim()):
            raise ValueError(
                f"{function}: {name} must have {rank} dimensions, got {x.dim()}"
            )


def unpacked(function: str, name: str, x: Tensor, dim: int, count: int) -> Any:
    """The tensors of ``x`` along dimension ``dim``, of which there must be ``count``."""
    check_tensors(function, None, **{name: x})
    if x.dim() != dim + 3 or x.shape[dim] != count:
        raise ValueError(
            f"{function}: {name} must have {dim + 3} dimensions, and {count} in "
            f"dimension {dim}, got the shape {tuple(x.shape)}"
        )
    return x.unbind(dim)


def rules_of(
    function: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The arguments of scaled_dot_product_attention and varlen_attention."""

    def error(text: str) -> ValueError:
        return ValueError(f"{function}: {text}")

    numbers = (Real, torch.SymFloat, torch.SymInt)
    check_type(function, "softcap", softcap, numbers, "a number")
    if softmax_scale is not None:
        check_type(
            function, "softmax_scale", softmax_scale, numbers, "a number or None"
        )
    # torch.compile cannot trace math.isfinite of a number that varies.
    if not -math.inf < softcap < math.inf:
        raise error(f"softcap must be finite, got {softcap}")
    if softmax_scale is not None and not -math.inf < softmax_scale < math.inf:
        raise error(f"softmax_scale must be finite, got {softmax_scale}")
    sides = window_size if isinstance(window_size, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise error(f"window_size must be two integers, got {window_size}")
    return dict(
        scale=softmax_scale,
        is_causal=causal,
        window=tuple(max(side, -1) for side in sides),  # any negative one: no limit
        softcap=softcap if softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        causal_alignment="bottom_right",
    )
