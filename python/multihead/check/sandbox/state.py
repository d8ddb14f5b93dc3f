# SPDX-License-Identifier: MIT
"""What a process shares: remembered, compared, put back."""

import contextlib
import inspect
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.backends import cuda, mha
from torch.nn import functional
from torch.nn.modules import module as nn_module


@dataclass(frozen=True)
class Setting:
    """One thing that the whole process shares: how to read it and write it back.

    name: as a report says it. imports: importing a package may change it rightly.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    imports: bool = False


def _attribute(name: str, owner: Any, attribute: str) -> Setting:
    return Setting(
        name, partial(getattr, owner, attribute), partial(setattr, owner, attribute)
    )


def _content(name: str, container: Any, imports: bool = False) -> Setting:
    """A container that others hold too: what is in it changes, not what it is."""

    def write(content: Any) -> None:
        container.clear()
        (container.update if isinstance(content, dict) else container.extend)(content)

    return Setting(name, container.copy, write, imports)


def _default_device() -> torch.device | None:
    try:
        device = torch.get_default_device()
    except (RuntimeError, AssertionError):  # of a kind that is not there
        return torch.device("meta")
    return None if device == torch.device("cpu") else device


def _folder() -> str | None:
    with contextlib.suppress(FileNotFoundError):  # somebody removed it
        return os.getcwd()


def _enter_folder(folder: str | None) -> None:
    with contextlib.suppress(OSError, TypeError):
        os.chdir(folder)


def _seeded() -> tuple[int, torch.Tensor]:
    return torch.initial_seed(), torch.get_rng_state()


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle_sigterm(handler: Any) -> None:
    if in_main_thread():
        signal.signal(signal.SIGTERM, handler)


_LAYERS = (nn.Linear, nn.Softmax, nn.Dropout, nn.MultiheadAttention)
# Code may replace them, so that everybody gets its own softmax.
_REPLACEABLE: tuple[tuple[Any, str, str], ...] = (
    (
        torch,
        "torch",
        "softmax log_softmax matmul bmm einsum exp sigmoid where dropout tril triu "
        "sqrt sum mean cat stack ones zeros randn rand",
    ),
    (
        torch.Tensor,
        "torch.Tensor",
        "softmax matmul __matmul__ masked_fill masked_fill_ view reshape",
    ),
    (
        functional,
        "torch.nn.functional",
        " ".join(name for name, f in vars(functional).items() if inspect.isroutine(f)),
    ),
    *((layer, f"torch.nn.{layer.__name__}", "forward") for layer in _LAYERS),
)
_HOOKS = [
    f"_global_{way}_{hooks}"
    for way in ("forward", "backward")
    for hooks in ("hooks", "pre_hooks")
]

_KERNELS = "the choice of attention kernels"
# What changes how fast things are computed, and nothing of what they are.
OF_SPEED = {_KERNELS}

# Dtype and device first: what is written after them may make tensors.
_SETTINGS = (
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("the default device", _default_device, torch.set_default_device),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    ),
    Setting(
        "deterministic algorithms",
        _deterministic,
        lambda old: torch.use_deterministic_algorithms(old[0], warn_only=old[1]),
    ),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    *(
        Setting("autocast", partial(read, "cpu"), partial(write, "cpu"))
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    Setting(
        "the precision of matrix products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *(
        Setting(
            _KERNELS,
            getattr(cuda, f"{kernel}_sdp_enabled"),
            getattr(cuda, f"enable_{kernel}_sdp"),
        )
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ),
    Setting(
        _KERNELS,
        mha.get_fastpath_enabled,
        mha.set_fastpath_enabled,
    ),
    *(_content("hooks of all modules", getattr(nn_module, hook)) for hook in _HOOKS),
    Setting("the working directory", _folder, _enter_folder),
    _content("sys.path", sys.path, imports=True),
    _content("the environment", os.environ, imports=True),
    _attribute("sys.excepthook", sys, "excepthook"),
    Setting("the trace function", sys.gettrace, sys.settrace),
    Setting("the limit of recursion", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting(
        "the handler of the signal SIGTERM",
        partial(signal.getsignal, signal.SIGTERM),
        _handle_sigterm,
    ),
    *(
        _attribute(f"{name}.{attribute}", owner, attribute)
        for owner, name, attributes in _REPLACEABLE
        for attribute in attributes.split()
    ),
)


class Snapshot:
    """All settings as they are now."""

    def __init__(self) -> None:
        self._values = [setting.read() for setting in _SETTINGS]
        self._seed, self._draws = _seeded()
        self._modules = len(sys.modules)

    def restore(self) -> list[str]:
        """Puts back what has changed; the names of what no import explains.

        Random streams go on, unless they were given another seed.
        """
        changed = []
        imported = len(sys.modules) != self._modules
        for setting, old in zip(_SETTINGS, self._values):
            if setting.read() != old:
                setting.write(old)
                if not (setting.imports and imported):
                    changed.append(setting.name)
        if torch.initial_seed() != self._seed:
            torch.default_generator.manual_seed(self._seed)
            torch.set_rng_state(self._draws)
            changed.append("the seed of PyTorch's random numbers")
        return list(dict.fromkeys(changed))


@contextlib.contextmanager
def random_streams_restored() -> Iterator[None]:
    """On leaving, the draws of torch, random and numpy go on from where they were."""
    seed, draws = _seeded()
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.default_generator.manual_seed(seed)
        torch.set_rng_state(draws)
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
