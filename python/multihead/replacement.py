# SPDX-License-Identifier: MIT
"""The attention of a model that exists, replaced by this package's, and back."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from ._call import check_type
from .modules import MultiheadAttention

# Where a replaced module keeps its class, and an encoder layer what switches its
# inference path on.
_ORIGINAL, _KEPT = "_multihead_original", "_multihead_activation_relu_or_gelu"
_PARAMETRIZED = "is parametrized: replace it first, parametrize it then"
# By fully_shard or parallelize_module, which add to a module's class for good.
_WRAPPED = "has become {} since: restore it before it is wrapped"


class Replacement(NamedTuple):
    """What became of one module."""

    name: str
    kind: str
    replaced: bool
    reason: str


class Replacements(tuple[Replacement, ...]):
    """What replace_attention() and restore_attention() return, printed as a table."""

    __slots__ = ()

    @property
    def replaced(self) -> tuple[str, ...]:
        """The names of the modules that are others now."""
        return tuple(each.name for each in self if each.replaced)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the modules that stay as they are; each has its reason."""
        return tuple(each.name for each in self if not each.replaced)

    def __str__(self) -> str:
        if not self:
            return "no torch.nn.MultiheadAttention"
        names = [each.name or "the model itself" for each in self]
        width = max(map(len, names))
        kind = max(len(each.kind) for each in self)
        return "\n".join(
            f"{'replaced' if each.replaced else 'kept':8}  {name:{width}}  "
            f"{each.kind:{kind}}  {each.reason}".rstrip()
            for name, each in zip(names, self, strict=True)
        )

    __repr__ = __str__


def replace_attention(model: nn.Module) -> Replacements:
    """Turns every torch.nn.MultiheadAttention of model into this package's, in place.

    The modules stay the same objects and get another class: parameters, state_dict,
    hooks, names, training flag, device and dtype are untouched; optimizers and other
    references go on to hold. model may be such a module itself. Results are those of
    multihead.MultiheadAttention: PyTorch's within rounding, 0 where a row sees no
    key, causal where is_causal comes without a mask. Weights that a call returns come
    from the kernels too, in training as well, which install() cannot reach.

    torch.nn.TransformerEncoderLayer has an inference path that passes its attention
    by. It is switched off in layers whose attention is this package's. Nested tensors,
    which torch.nn.TransformerEncoder makes of padded batches, are attended to sequence
    by sequence.

    Not replaced are modules whose class or instance has a forward of its own,
    torch.ao's quantizable ones among them, parametrized and scripted ones. Calling it
    again changes nothing. Call it before or after fully_shard; before it and before
    parallelize_module, if restore_attention() is to follow: what was wrapped since is
    not restored. A replaced model is pickled with this package's class, so
    restore it before it is saved as a whole; its state_dict needs nothing.

    Args:
        model: any module.

    Returns:
        Replacements: for each attention its name in model, its class, whether it was
        replaced, and why not. Print it.

    Raises:
        TypeError: where model is no torch.nn.Module.
    """
    check_type("replace_attention", "model", model, nn.Module, "a torch.nn.Module")
    return Replacements(_replace(model))


def restore_attention(model: nn.Module) -> Replacements:
    """Takes replace_attention() back: the same classes and attributes as before.

    Also in a copy of the model, in a part of it, and in what contains it.

    Returns:
        Replacements: what was restored counts as replaced.

    Raises:
        TypeError: where model is no torch.nn.Module.
    """
    check_type("restore_attention", "model", model, nn.Module, "a torch.nn.Module")
    return Replacements(_restore(model))


def _replace(model: nn.Module) -> Iterator[Replacement]:
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) and not _is_scripted(module):
            continue
        kind, reason = type(module), _refusal(module)
        if not reason:
            setattr(module, _ORIGINAL, kind)
            module.__class__ = _ours(kind)  # type: ignore[arg-type]
        yield Replacement(name, kind.__name__, not reason, reason)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and _KEPT not in vars(layer):
            if isinstance(layer.self_attn, MultiheadAttention):
                setattr(layer, _KEPT, layer.activation_relu_or_gelu)
                layer.activation_relu_or_gelu = 0


def _restore(model: nn.Module) -> Iterator[Replacement]:
    for name, module in model.named_modules():
        if _ORIGINAL not in vars(module):
            continue
        kind, reason = type(module), ""
        if parametrize.is_parametrized(module):
            reason = _PARAMETRIZED
        elif kind is not _ours(vars(module)[_ORIGINAL]):
            reason = _WRAPPED.format(kind.__name__)
        if not reason:
            module.__class__ = vars(module).pop(_ORIGINAL)
        yield Replacement(name, kind.__name__, not reason, reason)
    for layer in model.modules():
        if _KEPT in vars(layer) and _ORIGINAL not in vars(layer.self_attn):
            layer.activation_relu_or_gelu = vars(layer).pop(_KEPT)


def _is_scripted(module: nn.Module) -> bool:
    name = getattr(module, "original_name", "")
    return isinstance(module, torch.jit.ScriptModule) and name == "MultiheadAttention"


def _refusal(module: nn.Module) -> str:
    """Why another class would change what the module does; empty: it would not."""
    if isinstance(module, MultiheadAttention):
        return "is this package's already"
    if _is_scripted(module):
        return "is TorchScript, which install() reaches"
    if parametrize.is_parametrized(module):
        return _PARAMETRIZED
    for method in ("forward", "merge_masks"):
        if method in vars(module):
            return f"has a {method} of its own"
        owner = next(c for c in type(module).__mro__ if method in vars(c))
        if owner is not nn.MultiheadAttention:
            return f"{owner.__module__}.{owner.__qualname__} has its own {method}"
    return ""


@functools.cache
def _ours(kind: type[nn.Module]) -> type[nn.Module]:
    """MultiheadAttention, with what a subclass of PyTorch's adds to it."""
    if kind is nn.MultiheadAttention:
        return MultiheadAttention
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce,
    }
    return type(kind.__name__, (kind, MultiheadAttention), members)


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles: a class of _ours cannot be imported, its kind can."""
    ours: Any = type(module)
    kind = ours.__bases__[0]
    make, arguments, *rest = kind.__reduce_ex__(module, protocol)
    call = (kind if each is ours else each for each in (make, *arguments))
    return _make_ours, (kind, *call), *rest


def _make_ours(kind: Any, make: Any, *arguments: Any) -> Any:
    module = make(*arguments)
    module.__class__ = _ours(kind)
    return module
