# SPDX-License-Identifier: MIT
"""What the code holds before it runs: the tensors of a module, of an object, of a
closure, named as the code reaches them."""

import functools
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .roles import is_weight, speaks

_DEPTH = 3


@dataclass(frozen=True)
class Held:
    name: str
    tensor: Tensor
    layout: str | None = None
    of_layer: bool = False
    of_array: bool = False
    of_root: bool = False

    @property
    def last_name(self) -> str:
        return self.name.rsplit(".", 1)[-1]


def has_storage(tensor: Tensor) -> bool:
    """Not so the wrappers of torch.func, and sparse tensors."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not wrapped and tensor.layout is torch.strided


def held(target: object) -> list[Tensor]:
    """The weights of a module, or of an object that keeps arrays or tensors under
    names of weights. They share its memory."""
    if isinstance(target, nn.Module):
        return list(target.parameters())
    return [
        c.tensor
        for c in walk("self", target)
        if c.of_layer or is_weight(c.last_name) or speaks(c.last_name)
    ]


def walk(name: str, value: object, depth: int = 0) -> Iterator[Held]:
    """The tensors that `value` holds, named as the code would reach them."""
    prefix = f"{name}." if name and name != "self" else ""
    if isinstance(value, nn.Module):
        # In a list, a module may hold itself.
        if depth <= _DEPTH:
            yield from _of_module(prefix, value, depth)
    elif isinstance(value, Tensor):
        if value.is_floating_point() and 0 < value.dim() <= 4 and has_storage(value):
            yield Held(name, value)
    elif is_array(value):
        if value.dtype.kind == "f" and 0 < value.ndim <= 4:
            # In the same memory, if that can be.
            shared = value.flags.writeable and min(value.strides) >= 0
            tensor = torch.from_numpy(value if shared else value.copy())
            yield Held(name, tensor, of_array=True)
    elif is_array(data := getattr(value, "__dict__", {}).get("data")):
        yield from walk(name, data, depth)  # of a tensor of the code's own kind
    elif depth < _DEPTH:
        for key, item in _items(value):
            yield from walk(f"{prefix}{key}", item, depth + 1)


def is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "strides")


def _items(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return [(k, v) for k, v in value.items() if isinstance(k, (str, int))]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:128]))
    closed = inspect.isroutine(value) or isinstance(value, (type, types.ModuleType))
    if closed or type(value).__module__.startswith("torch"):
        return []
    return list(getattr(value, "__dict__", {}).items())


def _of_module(prefix: str, module: nn.Module, depth: int = 0) -> Iterator[Held]:
    wrapped = wrappers(module)
    for path, part in module.named_modules(remove_duplicate=False):
        if re.search(r"(^|\.)parametrizations(\.|$)", path):
            continue  # what a weight is computed from
        inner = f"{prefix}{path}." if path else prefix
        learned = f"{prefix}{wrapped[path]}." if path in wrapped else inner
        for name, tensor in _learned(part):
            yield Held(learned + name, tensor, _layout(part, name), of_layer=True)
        plain = {**dict(part.named_buffers(recurse=False)), **vars(part)}
        for name, value in plain.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                yield Held(inner + name, value)
            elif isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
                yield from walk(inner + name, value, depth + 1)


def wrappers(module: nn.Module) -> dict[str, str]:
    """The paths of layers that are all that another module holds, whose name says what
    they are and theirs does not: query.linear_layer is the query."""
    found = {}
    for path, part in module.named_modules():
        inner = dict(part.named_children())
        own = any(True for _ in part.parameters(recurse=False))
        if not path or own or len(inner) != 1 or isinstance(part, nn.Sequential):
            continue
        name, layer = next(iter(inner.items()))
        is_layer = isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        if is_layer and speaks(f"{path}.weight") and not speaks(f"{name}.weight"):
            found[f"{path}.{name}"] = path
    return found


def _learned(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of one layer; where one is computed from others, as under
    weight_norm, what comes of them and not those."""
    ways = getattr(part, "parametrizations", {})
    computed = {name: _computed(part, name) for name in ways}
    # The older way: a hook computes `weight` from `weight_g` and `weight_v`.
    hooks = [
        hook.name
        for hook in part._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils") and hasattr(hook, "name")
    ]
    computed |= {name: vars(part)[name] for name in hooks if name in vars(part)}
    yield from computed.items()
    for name, tensor in part.named_parameters(recurse=False):
        if not any(name.startswith(f"{hook}_") for hook in hooks):
            yield name, tensor


def _computed(part: nn.Module, name: str) -> Tensor:
    """As the last run had it: some take a step whenever they compute in training."""
    way = part.parametrizations[name]
    training = way.training
    way.eval()
    with torch.no_grad():
        tensor = getattr(part, name)
    way.train(training)
    return tensor


def _layout(layer: nn.Module, name: str) -> str | None:
    """What the type of a layer says about the orientation of its weight."""
    linear = (
        isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        and name == "weight"
    )
    packed = isinstance(layer, nn.MultiheadAttention) and name.endswith("weight")
    return "out_in" if linear or packed else None


def of_closure(entry: object) -> dict[str, object]:
    """What a function refers to from outside, and what functools.partial has fixed,
    without functions and modules of Python."""
    if isinstance(entry, functools.partial):
        fixed = {f"argument_{index}": value for index, value in enumerate(entry.args)}
        return {**of_closure(entry.func), **fixed, **entry.keywords}
    try:
        found = inspect.getclosurevars(inspect.unwrap(entry))
    except TypeError:
        return {}
    outside = {**found.globals, **found.nonlocals}
    return {n: v for n, v in outside.items() if not inspect.isroutine(v)}


def holds_rounded_numbers(target: object) -> bool:
    """Whether it keeps numbers of float32 that it does not learn, as a scale or angles,
    with so many digits that they were rounded."""
    parts = list(target.modules()) if isinstance(target, nn.Module) else [target]
    kept = [v for p in parts for v in getattr(p, "__dict__", {}).values()]
    kept += target.buffers() if isinstance(target, nn.Module) else []
    return any(
        isinstance(value, Tensor)
        and value.dtype is torch.float32
        and not torch.equal(value, value.bfloat16().float())
        for value in kept
    )
