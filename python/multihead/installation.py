# SPDX-License-Identifier: MIT
"""This library under PyTorch's own names, and the count of who calls it."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from . import _tracing

_ops = torch.ops.multihead
_changing = threading.Lock()
# A child that is forked while another thread installs must find it unlocked.
os.register_at_fork(
    before=_changing.acquire,
    after_in_parent=_changing.release,
    after_in_child=_changing.release,
)


def install(*, linear: bool = False, varlen: bool = False) -> None:
    """From here on PyTorch's attention runs on the fused kernels, in every thread.

    That is torch.nn.functional.scaled_dot_product_attention and what calls it
    (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, models of
    transformers, timm and diffusers, TorchScript, C++), and the inference path
    of torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer, on the
    CPU, forward and backward.

    Results equal PyTorch's within rounding; dropout draws other numbers from the
    same generator; a row that sees no key gives 0. What the kernels do not take
    (float8, broadcasting, torch.func, ...) PyTorch computes as before: stats()
    says how often, and why. torch.nn.attention.sdpa_kernel without
    FLASH_ATTENTION means PyTorch's own implementation. torch.export writes
    PyTorch's operators.

    torch.compile keeps a graph for each of the two states, in memory and on disk. What
    it compiled before the first install() is compiled again. Installing twice is
    installing once.

    Args:
        linear: float32 matrix products too (torch.mm and addmm, of which linear and
            its gradients consist), by the oneDNN inside PyTorch instead of MKL, which
            is slow on processors of other makers than Intel. On AMD's with AVX-512
            alone; elsewhere it changes nothing, and ``multihead info`` says so. Holds
            until uninstall(), whatever later install() calls say.
        varlen: torch.nn.attention.varlen on the CPU too, which PyTorch has for GPUs
            alone: see multihead.integrations.varlen. Holds until uninstall() as well.
    """
    _change(functools.partial(_ops.install.default, linear, varlen))


def uninstall() -> None:
    """Takes install() back. Open ``with installed():`` blocks keep it until they end."""
    _change(_ops.uninstall.default)


@contextlib.contextmanager
def installed(*, linear: bool = False, varlen: bool = False) -> Iterator[None]:
    """install() for a ``with`` block, in every thread; blocks may be nested."""
    _change(functools.partial(_ops.enter_installed.default, linear, varlen))
    try:
        yield
    finally:
        _change(functools.partial(_ops.leave_installed.default, linear, varlen))


def is_installed() -> bool:
    """Whether PyTorch's attention runs on the fused kernels now."""
    return bool(_ops.is_installed.default())


def _change(operator: Callable[[], None]) -> None:
    # torch.compile has that module, too, and no processes that would need a second here.
    if "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized():
        from . import distributed  # noqa: F401  (registers the operators for DTensors)
    with _changing, _tracing.compile_lock():
        operator()
        if is_installed() != _tracing.installed:
            _tracing.change(is_installed())


class CallCount(NamedTuple):
    """Calls of attention that came from one source and went one way."""

    source: str
    way: str
    reason: str
    calls: int


class Stats(tuple[CallCount, ...]):
    """What stats() returns: CallCounts, printed as a table."""

    __slots__ = ()

    def calls(self, way: str | None = None, source: str | None = None) -> int:
        """How many calls went this way (all: None) from this source (any: None)."""
        return sum(
            count.calls
            for count in self
            if way in (None, count.way) and source in (None, count.source)
        )

    def __str__(self) -> str:
        if not self:
            return "no calls of attention"
        rows = [CallCount._fields, *(tuple(map(str, count)) for count in self)]
        source, way, reason, calls = (
            max(map(len, column)) for column in zip(*rows, strict=True)
        )
        return "\n".join(
            f"{row[3]:>{calls}}  {row[0]:{source}}  {row[1]:{way}}  {row[2]}".rstrip()
            for row in rows
        )

    __repr__ = __str__


def stats() -> Stats:
    """Which way the calls of this process went, since it began or reset_stats().

    Returns CallCounts with
        source: "installed", PyTorch's functions taken over by install(); "function",
        this package's functions; "module", its modules; "operator", graphs of
        torch.compile and torch.export, or torch.ops.multihead; "linear", matrix
        products while install(linear=True) holds.
        way: as route() names it, of products "onednn" or "blas"; reason: why not
        "fused" or "onednn".

    A fused call is counted when its kernel runs, another one when its way is
    chosen. Backward passes go the way of their forward and are not counted.
    """
    columns = _ops.stats.default()
    return Stats(CallCount(*row) for row in zip(*columns, strict=True))


def reset_stats() -> None:
    """Begins to count anew."""
    _ops.reset_stats.default()
