# SPDX-License-Identifier: MIT
"""A CPU for code that asks for a GPU where there is none, and all numbers of a module on
it, in one type."""

import contextlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..sandbox.guard import Guard, Outcome, is_library
from ..subject.target import Subject


class _StaysOnCpu(TorchFunctionMode):
    """What asks for a GPU, by a method, a name or a device, stays on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.cuda:
            return args[0]
        args = tuple(_CPU if _is_cuda(value) else value for value in args)
        named = (kwargs or {}).items()
        return function(*args, **{n: _CPU if _is_cuda(v) else v for n, v in named})


_CPU = torch.device("cpu")


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def asks_for_gpu(subject: Subject) -> bool:
    """Whether the code, or a helper in its file, speaks of a GPU, and there is none."""
    text = subject.source
    module = sys.modules.get(getattr(subject.target, "__module__", None) or "")
    if "cuda" not in text and not is_library(getattr(module, "__file__", None) or ""):
        with contextlib.suppress(OSError, TypeError):
            text = inspect.getsource(module)
    constants = vars(module).values() if module else ()
    asks = "cuda" in text or any(map(_is_cuda, constants))
    return asks and not torch.cuda.is_available()


def cpu_instead(asks: bool) -> contextlib.AbstractContextManager:
    """What code that asks for a GPU runs in."""
    return _StaysOnCpu() if asks else contextlib.nullcontext()


@dataclass
class OnCpu:
    """A guard in which what asks for a GPU stays on the CPU, where there is none."""

    guard: Guard

    def attempt(self, code: Callable) -> Outcome:
        def on_cpu() -> object:
            with cpu_instead(not torch.cuda.is_available()):
                return code()

        return self.guard.attempt(on_cpu)


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype) if t.is_floating_point() else t


def convert(
    target: object, dtype: torch.dtype, seen: frozenset[int] = frozenset()
) -> None:
    """Puts all floating tensors of a module, or of any other object, on the CPU in
    `dtype`, also those that are neither parameters nor buffers. `seen`: modules that
    hold this one in a list, which may be held by it in one."""
    parts = [target]
    if isinstance(target, nn.Module):
        # Not by .to(dtype), which takes the imaginary part of complex buffers away.
        parts = list(target.to("cpu")._apply(_cast_to(dtype)).modules())
    seen |= {id(part) for part in parts}
    for part in parts:
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(part, name, value.to("cpu", dtype))
            elif isinstance(value, (list, tuple, dict)):  # which hide their layers
                kept = value.values() if isinstance(value, dict) else value
                for layer in kept:
                    if isinstance(layer, nn.Module) and id(layer) not in seen:
                        convert(layer, dtype, seen)
