# SPDX-License-Identifier: MIT
"""Code runs as it is written: compiled, it would not show its steps, and would take
seconds to compile."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch


def _as_written(model: Callable | None = None, **_: object) -> Callable:
    """In place of torch.compile, called or as a decorator with options."""
    return model if model is not None else lambda function: function


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """What torch.compile wraps, or has wrapped, and flex_attention, which compiles
    itself: in the steps that define it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", _as_written))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if flex := sys.modules.get("torch.nn.attention.flex_attention"):
            from torch._higher_order_ops.flex_attention import math_attention

            by_steps = {"flex_attention_hop": math_attention}
            by_steps["_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"] = True
            stack.enter_context(mock.patch.multiple(flex, **by_steps))
        yield
