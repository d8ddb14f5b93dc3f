# SPDX-License-Identifier: MIT
"""What install() means for graphs: each is one of a process with or without it."""

import contextlib
import sys
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops.utils import autograd_not_implemented_inner
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import config as _compiler
from torch.utils._config_module import _UNSET_SENTINEL as _UNSET

from ._built import VERSION

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

# Whether the library is installed. Compiled code guards on it under this name.
installed = False

# What was compiled before the first install(), without that guard. Kept for ever:
# another thread may be about to run it.
_unguarded: list[object] = []


# With these PyTorch traces; others may know its own operators alone. Those that know
# this library's are added.
known_tensors: tuple[type, ...] = (FakeTensor, FunctionalTensor)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a tensor that Python handles takes this library's operators."""
    kind = type(tensor)
    if kind.__module__ == "torch.distributed.tensor" and kind not in known_tensors:
        from . import distributed  # noqa: F401  (adds DTensor)
    return isinstance(tensor, known_tensors)


def _refusal(tensors: list[torch.Tensor]) -> str:
    """Why install() leaves a call with tensors that Python handles to PyTorch."""
    if torch.compiler.is_exporting():
        return "torch.export is at work"
    for tensor in tensors:
        if not is_known(tensor):
            return f"{type(tensor).__name__} may know PyTorch's operators alone"
    return ""


_library = torch.library.Library(  # type: ignore[no-untyped-call]
    "multihead", "FRAGMENT"
)
_library.impl(  # type: ignore[no-untyped-call]
    "refusal_in_python", _refusal, "CPU"
)


def change(to: bool) -> None:
    """Graphs are those of an installed library from here on, or no longer.

    Not while a graph is traced: hold compile_lock().
    """
    global installed
    if DispatchKey.AutogradCPU not in _ATTENTION.py_kernels:
        _ATTENTION.py_impl(DispatchKey.AutogradCPU)(attention)
        _forget_what_has_no_guard()
    # Python keeps for each key the kernel that it has once found, for tracing.
    _ATTENTION._dispatch_cache.clear()
    # On disk torch.compile finds a graph by the functions that it calls, whatever
    # their kernels. This tag is part of every key. Set as a user sets it, it would
    # hold for this thread alone.
    tag = _compiler._config["cache_key_tag"]  # type: ignore[attr-defined]
    tag.env_value_force = _UNSET
    if to:
        tag.env_value_force = f"{_compiler.cache_key_tag} multihead {VERSION}"
    installed = to


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """Held while torch.compile compiles, in any thread."""
    converter = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(converter, "compile_lock", contextlib.nullcontext())


def attention(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's function where Python dispatches, which is where graphs are traced."""
    if "torch._dynamo.symbolic_convert" in sys.modules:
        _guard()
    composite = DispatchKey.CompositeImplicitAutograd
    ours = installed or torch.ops.multihead.is_context_parallel.default()
    if formula := _ATTENTION.py_kernels.get(composite):
        # torch.export decomposes, and says by NotImplemented what it keeps. PyTorch
        # asks that below autograd, but not of operators with a kernel for autograd.
        out = formula(*args, **kwargs) if ours else NotImplemented
        if out is NotImplemented:
            out = autograd_not_implemented_inner(_ATTENTION, True, *args, **kwargs)
        return out
    key = DispatchKey.AutogradCPU if ours else composite
    return _ATTENTION._op_dk(key, *args, **kwargs)


def _guard() -> None:
    """The graph that torch.compile traces is for the present value of `installed`."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:  # another tracer than torch.compile
        return
    source = AttrSource(translator.import_source(__name__), "installed")
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def _forget_what_has_no_guard() -> None:
    converter = sys.modules.get("torch._dynamo.convert_frame")
    if converter is None:
        return
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for reference in converter.input_codes.seen:
        code = reference()
        for entry in _debug_get_cache_entry_list(code) if code else ():
            guards = entry.guard_manager
            if guards.extra_state is None:  # invalid already
                continue
            _unguarded.append((guards, entry.code))
            reason = "multihead.install() was called"
            guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper(reason))
