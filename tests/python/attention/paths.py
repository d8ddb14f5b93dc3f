# SPDX-License-Identifier: MIT
"""Which path a call took: the fused operators that it reached."""

from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode

_FUSED = {
    "multihead::fused_attention": "attention",
    "multihead::fused_attention_backward": "backward",
    "multihead::fused_varlen_attention": "varlen",
    "multihead::fused_varlen_attention_backward": "varlen backward",
    "multihead::attention_weights": "weights",
    "multihead::fused_attention_summary": "summary",
}


class _Recorder(TorchDispatchMode):
    """Notes the fused operators, in order. Composites are looked into: in
    inference mode they reach a mode whole."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() in _FUSED:
            self.reached.append(_FUSED[func.name()])
        with self:
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def fused_calls(function: Callable, *args, **kwargs) -> list[str]:
    """The operators of a call, in order: "attention", "backward", "varlen",
    "varlen backward", "weights", "summary".

    Empty: the formula in ATen operations ran.
    """
    with _Recorder() as recorder:
        function(*args, **kwargs)
    return recorder.reached
