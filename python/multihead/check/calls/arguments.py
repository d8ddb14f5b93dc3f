# SPDX-License-Identifier: MIT
"""The arguments of one call, from a case or as somebody gives them to a check."""

import contextlib
import copy
import inspect
import re
import sys
import sysconfig
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..subject.roles import CONSTRUCTOR, SIZES, is_weight, normal, speaks
from ..subject.rooms import ROOMS
from ..subject.signature import Call
from . import cases
from .cases import Case
from .construct import of_class
from .matrices import weight
from .settings import DROPOUT, Config, unpacked
from .stand_ins import OfLayer

_LEFT = object()  # the parameter's default stays
_SEQUENCES = {"query": "query", "x": "query", "key": "key", "value": "value"}
_SEQUENCES |= {"context": "key"}
_MASKS = {"mask": "mask", "padding": "key_padding_mask"}
_KNOWN = ("torch", "builtins", "typing", "numpy", "inspect")
_LIBRARIES = tuple({*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
_ANGLE = 0.7  # from one position to the next
# What a case's sizes say beside the usual sizes.
_COUNTED = (*SIZES, "qkv_dim", "temperature", "image", "rows", "columns")


@dataclass
class Arguments:
    """Positional and keyword arguments; the tensors of the sequences by role; the
    masks and the weights among them, as the code gets them."""

    positional: list[object] = field(default_factory=list)
    keywords: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, object] = field(default_factory=dict)
    # A user's own, whose mask is made for other calls.
    lacks_mask: bool = False

    def __str__(self) -> str:
        given = [_shown(value) for value in self.positional]
        given += [f"{name} {_shown(value)}" for name, value in self.keywords.items()]
        return ", ".join(given)


class Parameters(Config):
    """A dictionary that draws a weight for each name, and knows the usual sizes."""

    def __init__(self, case: Case):
        super().__init__(case.sizes)
        self.__dict__["case"] = case

    def __missing__(self, name):
        role = CONSTRUCTOR.get(normal(str(name)))
        if role in SIZES:
            return self.sizes.value_of(role)
        if not isinstance(name, str) or not (is_weight(name) or speaks(name)):
            raise KeyError(name)
        self[name] = _given(weight(name, self.case), self.case)
        return self[name]

    def __iter__(self) -> Iterator:
        """Weights, where code takes it apart by their names: wq, wk = weights."""
        names = unpacked(sys._getframe(1))
        if names and all(map(is_weight, names)):
            return iter([self[name] for name in names])
        return super().__iter__()


def make(call: Call, case: Case) -> Arguments:
    """The arguments of `case`. Sequences are new tensors, which the code may change."""
    made = Arguments(tensors=_sequences(call, case), masks=_masks(case))
    by_place = True
    for parameter in call.parameters:
        if parameter.name in call.fixed:
            value = copy.deepcopy(call.fixed[parameter.name])
            _note(made, call.roles[parameter.name], parameter.name, value)
        else:
            value = _value(call, parameter, case, made)
        if value is _LEFT and parameter.default is parameter.empty:
            value = _object_for(parameter)
        if value is _LEFT:
            by_place = False
        elif by_place and parameter.kind is parameter.POSITIONAL_ONLY:
            made.positional.append(_given(value, case))
        else:
            made.keywords[parameter.name] = _given(value, case)
    return made


def _object_for(parameter: inspect.Parameter) -> object:
    """For a required argument: an object of the first class of the code's own that its
    annotation names, and that needs nothing to be made, as `NoCache | Cache`; or None.
    """
    kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
    for kind in filter(_is_own, kinds):
        with contextlib.suppress(Exception):  # it needs something, or cannot be made
            return kind()
    return None


def _is_own(kind: object) -> bool:
    """Whether it is a class of no library."""
    if not inspect.isclass(kind) or kind.__module__.partition(".")[0] in _KNOWN:
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not path.startswith(_LIBRARIES)


def _sequences(call: Call, case: Case) -> dict[str, Tensor]:
    drawn = cases.sequences(case)
    if call.style == "qkv":
        by_context = {"key"} if call.takes("context") else set()
        roles = {role for role in drawn if call.takes(role)} | by_context
    else:
        alone = call.style == "x" or case.relation == "self"
        roles = {"query"} if alone else {"query", "key"}
    return {role: tensor for role, tensor in drawn.items() if role in roles}


def _masks(case: Case) -> dict[str, Tensor]:
    masks = {}
    own = replace(case, relation="self") if case.of_self else case
    mask = cases.mask(own)
    if mask is not None and case.style.additive:
        mask = cases.as_additive(mask, own)
    if mask is not None:
        role = "key_padding_mask" if case.mask == "keys of each item" else "mask"
        masks[role] = mask
    if case.padding:
        masks["key_padding_mask"] = cases.padding(case)
    return masks


def _value(
    call: Call, parameter: inspect.Parameter, case: Case, made: Arguments
) -> object:
    role = call.roles[parameter.name]
    if role in ("query", "x", "key", "value"):
        return made.tensors.get(_SEQUENCES[role], _LEFT)
    if role == "context":
        if "key" in made.tensors or parameter.default is parameter.empty:
            return made.tensors.get("key", made.tensors["query"])
        return _LEFT
    if role in _COUNTED:
        derived = role in ("head_dim", "out_dim", "max_length", "window", "resolution")
        derived = derived and parameter.default is not parameter.empty
        return _LEFT if derived else case.sizes.value_of(role)
    if role in ("mask", "context_mask"):
        # A mask of the context's keys has its own place, where there is one.
        of_context = call.takes("context_mask") and "key" in made.tensors
        of_context = of_context and not case.of_self
        if (role == "context_mask") is not of_context:
            return _LEFT
        masks = made.masks
        padded = masks.get("key_padding_mask") if not call.takes("padding") else None
        return masks.get("mask", _LEFT if padded is None or case.padding else padded)
    if role == "padding":
        return made.masks.get("key_padding_mask", _LEFT)
    if role in ("query_mask", "query_blocked"):
        # Every query counts; it is given where keys have a mask, too.
        if "key_padding_mask" not in made.masks and parameter.default is None:
            return _LEFT
        shape = (case.sizes.batch, case.sizes.queries)
        return torch.full(shape, role == "query_mask").to(case.mask_dtype)
    if role == "masking":
        return bool(made.masks)
    if role == "residual" and parameter.default is parameter.empty:
        return torch.zeros_like(made.tensors["query"])
    if role == "lengths":
        return cases.lengths(case) if case.padding == "lengths" else _LEFT
    if role in ("weight", "weights"):
        name = parameter.name
        value = weight(name, case) if role == "weight" else Parameters(case)
        made.weights[name] = value
        return value
    return _switch(role, parameter, case, parameter.name in call.called)


def _switch(role: str | None, parameter, case: Case, is_called: bool) -> object:
    """A flag, or the dropout of a call."""
    given = {
        "is_causal": case.is_causal,
        "training": case.training,
        "need_weights": True if case.returns_weights else _LEFT,
        "average_weights": False if case.returns_weights else _LEFT,
        "shares_heads": True if case.sizes.kv_heads else _LEFT,
        "flag": False,
        "zero": _first_place(parameter, case),
        "batch": case.sizes.batch,
        # Of nodes, (L,): one graph.
        "graphs": torch.zeros(case.sizes.queries, dtype=torch.int64),
        "query_length": case.sizes.queries,
        "key_length": case.keys,
        "device": torch.device("cpu"),
        "factor": case.sizes.head_dim**-0.5,
        "divisor": case.sizes.head_dim**0.5,
        "of_layer": OfLayer(case),
        "rotation": _rotation(parameter, case),
        "position_ids": _numbers(case),
    }
    if role in ROOMS.values():
        return room(role, case)
    if role == "positions" and parameter.default is parameter.empty:
        return cases.positions(case)
    if role == "documents" and parameter.default is parameter.empty:
        length = case.sizes.queries  # 0 may be padding
        shape = (length,) if cases.unbatched(case) else (case.sizes.batch, length)
        return torch.ones(shape, dtype=torch.int64)
    if role == "prefix" and parameter.default is parameter.empty:  # of no token
        return torch.zeros(case.sizes.batch, dtype=torch.int64)
    if role == "bounds" and parameter.default is parameter.empty:  # of one document
        return torch.tensor([0, case.sizes.queries], dtype=torch.int32)
    if role in ("dropout", "training") and case.own_dropout is not None:
        return _LEFT
    if role == "dropout":
        is_layer = isinstance(parameter.default, nn.Dropout) or _is_layer(parameter)
        if is_layer or (is_called and parameter.default is parameter.empty):
            return nn.Dropout(DROPOUT).train(case.training)
        if parameter.default is parameter.empty and not case.training:
            return 0.0
        if parameter.default is None or parameter.default is parameter.empty:
            layer = parameter.name == "dropout" and parameter.default is None
            dropout = nn.Dropout(DROPOUT) if layer else DROPOUT
            return dropout if case.training else _LEFT
        return DROPOUT if case.training else 0.0
    return given.get(role, _LEFT)


def room(role: str, case: Case) -> Tensor:
    """Zeros for the keys or the values of all tokens."""
    sizes = case.sizes
    heads, length = sizes.kv_heads or sizes.heads, sizes.queries
    behind = [length, heads] if role == ROOMS[1] else [heads, length]
    return torch.zeros([sizes.batch, *behind, sizes.head_dim], dtype=case.dtype)


def _first_place(parameter: inspect.Parameter, case: Case) -> object:
    """Of a first call: 0, or the positions (L,) of its tokens, cache_position."""
    is_tensor = normal(parameter.name) == "cacheposition"
    return torch.arange(case.sizes.queries) if is_tensor else 0


def _is_layer(parameter: inspect.Parameter) -> bool:
    """Whether it must be a layer, as it says."""
    said = str(parameter.annotation)
    required = parameter.default is parameter.empty
    return required and re.search(r"\b(Dropout|Module|Callable)\b", said) is not None


def _numbers(case: Case) -> Tensor:
    """The positions of the queries, for each item or (L,). NumPy does not show by what
    it turns heads: there all are the first, which turn nothing."""
    numbers = torch.arange(case.sizes.queries) * (not case.style.numpy)
    once = case.style.tables == cases.ONCE
    return numbers if once else numbers.repeat(case.sizes.batch, 1)


def _rotation(parameter: inspect.Parameter, case: Case) -> object:
    """Tables of rotary positions with one angle for all pairs of a position, which is
    so whatever pairs the code has; an object of the class that it asks for."""
    if case.style.tables in (cases.DISTANCES, cases.ONCE, cases.ALONE):
        return _LEFT
    name, kind = parameter.name, parameter.annotation
    if _is_own(kind):
        made = of_class(kind, case.sizes, of_one_head=True)
        if made is not None:
            return made
    half = case.sizes.head_dim // 2
    sizes = {"L": case.sizes.queries, "D": case.sizes.head_dim, "D/2": half}
    axes = case.style.tables.split()
    is_angles = axes[0] == "angles"
    axes = axes[1:] if is_angles else axes
    kinds = [axis for axis in axes if axis != "2"]
    turns = _ANGLE * torch.arange(case.sizes.queries, dtype=case.dtype)
    placed = turns.view([-1 if axis == "L" else 1 for axis in kinds])
    angles = placed.expand([sizes.get(axis, 1) for axis in kinds]).contiguous()
    if is_angles:
        return angles
    cos, sin = angles.cos(), angles.sin()
    if "2" in axes:
        return torch.stack((cos, sin), axes.index("2"))
    if "cis" in name or "complex" in name:
        return torch.complex(cos[..., :half], sin[..., :half])
    if "cos" in name and "sin" in name:
        return cos, sin
    return cos if "cos" in name else sin if "sin" in name else (cos, sin)


def of_user(call: Call, inputs: object, base: Case) -> tuple[Case, Arguments]:
    """The call with `inputs`, a tensor, a tuple or a dictionary by name, copied.

    Raises ValueError if they do not fit the signature.
    """
    named = by_name(call, inputs)
    made = Arguments()
    for parameter in call.parameters:
        if parameter.name not in named:
            continue
        value = copy.deepcopy(named[parameter.name])
        if parameter.kind is parameter.POSITIONAL_ONLY:
            made.positional.append(value)
        else:
            made.keywords[parameter.name] = value
        _note(made, call.roles[parameter.name], parameter.name, value)
    if "query" not in made.tensors:
        name = call.parameter("query") or call.parameter("x")
        given = type(named[name]).__name__ if name in named else "none"
        raise ValueError(f"check: inputs must give a tensor to {name!r}, got {given}")
    case = _case(call, made, named, base)
    for parameter in call.parameters:
        if parameter.default is not parameter.empty or parameter.name in named:
            continue
        if call.roles[parameter.name] in _MASKS:
            made.keywords[parameter.name] = None
            made.lacks_mask = True
        else:
            raise ValueError(
                f"check: inputs must give a value to {parameter.name!r}, got none"
            )
    return case, made


def settle(call: Call, inputs: object) -> dict[str, object]:
    """Reads from somebody's inputs, by the name of the parameter, which of them are the
    sequences, where names do not say; what is neither a sequence nor a mask is kept
    in all calls."""
    named = by_name(call, inputs)
    tensors = [n for n, value in named.items() if _is_sequence(value)]
    named_so = [n for n in tensors if n not in call.guessed]
    if tensors and not any(call.roles[n] in ("query", "x") for n in named_so):
        call.forget_guesses()
        call.read_by_place(tensors)
    for name, value in named.items():
        role = call.roles[name]
        if role is None and isinstance(value, Tensor) and not call.takes("mask"):
            call.roles[name] = "mask"
        elif role not in _SEQUENCES and role not in _MASKS:
            call.fixed[name] = value
    for parameter in call.parameters:
        left = parameter.default is not parameter.empty
        if left and parameter.name not in named:
            if call.roles[parameter.name] in _SEQUENCES:
                call.roles[parameter.name] = None
    call.settle_style()
    return named


def _is_sequence(value: object) -> bool:
    is_array = type(value).__module__ == "numpy" and hasattr(value, "ndim")
    if not isinstance(value, Tensor) and not is_array:
        return False
    floating = value.is_floating_point() if isinstance(value, Tensor) else True
    return floating and value.ndim >= 2


def by_name(call: Call, inputs: object) -> dict[str, object]:
    names = [parameter.name for parameter in call.parameters]
    if isinstance(inputs, dict):
        unknown = [name for name in inputs if name not in names]
        if unknown:
            raise ValueError(
                f"check: inputs must be among {', '.join(names)}, got {unknown[0]!r}"
            )
        return dict(inputs)
    values = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
    if len(values) > len(names):
        raise ValueError(
            f"check: inputs must be at most {len(names)} ({', '.join(names)}), "
            f"got {len(values)}"
        )
    return dict(zip(names, values))


def _note(made: Arguments, role: str | None, name: str, value: object) -> None:
    if role == "weight":
        made.weights[name] = value
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor) and role in _SEQUENCES:
        made.tensors[_SEQUENCES[role]] = value
    elif isinstance(value, Tensor) and role in _MASKS:
        made.masks[_MASKS[role]] = value


def _case(call: Call, made: Arguments, named: dict, base: Case) -> Case:
    """What the shapes and numbers say about sizes, in the layout of the base, or in
    another of its kind that has as many axes."""
    query = made.tensors["query"]
    base = replace(base, layout=_layout(query, base))
    key = cases.as_sequence(made.tensors.get("key", query), base)
    query = cases.as_sequence(query, base)
    axis, later = cases.query_axis(base), base.layout in cases.HEADS_BEHIND
    unbatched, second = cases.unbatched(base), base.layout == cases.SEQUENCE_FIRST
    heads = named.get(call.parameter("num_heads"), base.sizes.heads)
    embed = query.shape[-1]
    if base.layout in cases.CORE:
        heads = query.shape[2 if later else 1] if query.dim() == 4 else 1
        embed *= heads
    sizes = replace(
        base.sizes,
        batch=1 if unbatched else query.shape[1 if second else 0],
        queries=query.shape[axis],
        keys=key.shape[axis],
        heads=heads,
        embed=embed,
        kv_heads=named.get(call.parameter("num_kv_heads"), base.sizes.kv_heads),
    )
    if base.layout in cases.IMAGES:
        rows, columns = cases.sides(made.tensors["query"], base.layout)
        window = "square" if rows == columns else "length"
        sizes = replace(sizes, columns=columns, window=window, is_exact=True)
    causal = named.get(call.parameter("is_causal")) is True
    name = "your inputs"
    given = dict(is_causal=causal, dtype=query.dtype, style=base.style)
    return Case(name, sizes, base.layout, **given)


def _layout(query: Tensor, base: Case) -> str:
    of_layers = (cases.LAYER, cases.SEQUENCE_FIRST, cases.UNBATCHED)
    kind = cases.CORE if base.layout in cases.CORE else of_layers
    axes = query.dim()
    images = cases.IMAGES if kind is of_layers else ()
    known = (base.layout, *kind, *images)
    fitting = [x for x in known if len(x.split(",")) == axes]
    if not fitting or not query.is_floating_point():
        raise ValueError(
            f"check: inputs must be floating-point tensors {' or '.join(kind)}, got "
            f"{str(query.dtype).removeprefix('torch.')} {tuple(query.shape)}"
        )
    return fitting[0]


def _given(value: object, case: Case) -> object:
    """`value` as the code takes it."""
    if case.style.numpy and isinstance(value, Tensor):
        return value.detach().numpy()
    if case.style.numpy and type(value) is dict:
        return {name: _given(one, case) for name, one in value.items()}
    return value


def _shown(value: object) -> str:
    if type(value) is dict:
        return f"{{{', '.join(f'{n} {_shown(one)}' for n, one in value.items())}}}"
    if isinstance(value, Parameters):
        return "{" + ", ".join(value) + "}"
    if type(value) in (tuple, list):
        inside = ", ".join(map(_shown, value))
        return f"({inside})" if type(value) is tuple else f"[{inside}]"
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__ if isinstance(value, nn.Module) else repr(value)
    kind = str(value.dtype).removeprefix("torch.")
    kind = "" if "float" in kind else f" {kind}"
    return f"{tuple(shape)}{kind}"
