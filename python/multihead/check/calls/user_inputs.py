# SPDX-License-Identifier: MIT
"""The inputs that somebody gives to a check, as one more case."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..subject.signature import Call
from . import cases
from .arguments import Arguments
from .cases import Case

_SEQUENCES = {"query": "query", "x": "query", "key": "key", "value": "value"}
_SEQUENCES |= {"context": "key"}
_MASKS = {"mask": "mask", "padding": "key_padding_mask"}


def of_user(call: Call, inputs: object, base: Case) -> tuple[Case, Arguments]:
    """The call with `inputs`, a tensor, a tuple or a dictionary by name, copied.

    Raises ValueError if they do not fit the signature.
    """
    named = _named(call, inputs)
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
        if parameter.default is parameter.empty and parameter.name not in named:
            raise ValueError(
                f"check: inputs must give a value to {parameter.name!r}, got none"
            )
    return case, made


def _named(call: Call, inputs: object) -> dict[str, object]:
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
    tensor = value if isinstance(value, Tensor) else _of_array(value)
    if role == "weight":
        made.weights[name] = value
    elif tensor is not None and role in _SEQUENCES:
        made.tensors[_SEQUENCES[role]] = tensor
    elif tensor is not None and role in _MASKS:
        made.masks[_MASKS[role]] = tensor


def _of_array(value: object) -> Tensor | None:
    array = type(value).__module__ == "numpy" and hasattr(value, "__array__")
    return torch.from_numpy(value) if array else None


def _case(call: Call, made: Arguments, named: dict, base: Case) -> Case:
    """What the shapes and numbers say about sizes, in the layout of the base, or in
    another of its kind that has as many axes."""
    query = made.tensors["query"]
    base = replace(base, layout=_layout(query, base))
    key = cases.as_sequence(made.tensors.get("key", query), base)
    query = cases.as_sequence(query, base)
    axis = cases.query_axis(base)
    batch = {cases.SEQUENCE_FIRST: 1}.get(base.layout, 0)
    wide = base.layout not in cases.CORE
    own = _heads_of(query, base)
    sizes = replace(
        base.sizes,
        batch=1 if cases.unbatched(base) else query.shape[batch],
        queries=query.shape[axis],
        keys=key.shape[axis],
        heads=named.get(call.parameter("num_heads") or "", base.sizes.heads)
        if wide
        else own,
        embed=query.shape[-1] * (1 if wide else own),
        kv_heads=named.get(call.parameter("num_kv_heads") or "", base.sizes.kv_heads),
    )
    flag = named.get(call.parameter("is_causal") or "", False)
    return Case(
        name="your inputs",
        sizes=sizes,
        layout=base.layout,
        relation="cross",
        is_causal=flag is True,
        dtype=query.dtype,
    )


def _layout(query: Tensor, base: Case) -> str:
    of_layers = (cases.LAYER, cases.SEQUENCE_FIRST, cases.UNBATCHED)
    kind = cases.CORE if base.layout in cases.CORE else of_layers
    fitting = [
        layout
        for layout in (base.layout, *kind)
        if len(layout.split(",")) == query.dim()
    ]
    if not fitting or not query.is_floating_point():
        raise ValueError(
            f"check: inputs must be floating-point tensors {' or '.join(kind)}, got "
            f"{str(query.dtype).removeprefix('torch.')} {tuple(query.shape)}"
        )
    return fitting[0]


def _heads_of(query: Tensor, base: Case) -> int:
    later = base.layout == cases.HEADS_LATER
    return query.shape[2 if later else 1] if query.dim() == 4 else 1
