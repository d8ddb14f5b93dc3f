# SPDX-License-Identifier: MIT
"""Weights that PyTorch does not know of: layers in a plain list, tensors that are no
parameters. They compute as others do, and no optimiser is given them."""

from collections.abc import Iterator

import torch
from torch import nn

from ..capture.runner import Run, Runner
from ..report import Finding

_DEPTH = 3
_HOW = (
    "nn.ModuleList, or nn.ModuleDict, for layers, nn.ParameterList for parameters; "
    "nn.Parameter for tensors that are learned, register_buffer for others."
)


def of_weights(runner: Runner, base: Run) -> list[Finding]:
    """Layers and parameters that are used and are none of their module's, several of a
    kind: one layer alone may be hidden on purpose, as what is trained elsewhere. Tensors
    alone are only remarked, as those of exercises that train nothing."""
    target, _ = runner.target_of(base.case, may_hang=True)
    if base.recorder is None or not isinstance(target, nn.Module):
        return []
    met, root = base.recorder.met, base.recorder.root
    known = {id(p) for p in target.parameters()}
    hidden = {
        id(part): name
        for name, part in _in_lists(target)
        for own in [list(part.parameters()) if isinstance(part, nn.Module) else [part]]
        if own and not any(id(p) in known for p in own)
        if any(root(p) in met for p in own)
    }
    if len(hidden) > 1:
        first = next(iter(hidden.values()))
        sentence = (
            f"It keeps weights where PyTorch does not look for them, as in `{first}`: "
            "they are no parameters of it, so that no optimiser is given them, and they "
            "are neither saved nor moved to another device."
        )
        return [Finding("unregistered", sentence, _HOW)]
    registered = {root(t) for t in (*target.parameters(), *target.buffers())}
    plain = [
        name
        for name, tensor in base.parameters.tensors.items()
        if tensor.dim() >= 2 and root(tensor) in met and root(tensor) not in registered
    ]
    own = [name for name in plain if isinstance(vars(target).get(name), torch.Tensor)]
    if not own:
        return []
    sentence = (
        f"Its weights {', '.join(f'`{n}`' for n in own)} are no parameters: no "
        "optimiser is given them."
    )
    return [Finding("unregistered", sentence, _HOW, kind="remark")]


def _in_lists(target: nn.Module) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Modules and parameters in lists, tuples and dictionaries of Python, and where."""
    for path, part in target.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                yield from _inside(f"{path}.{name}" if path else name, value)


def _inside(where: str, value: object, depth: int = 0) -> Iterator:
    if depth and isinstance(value, (nn.Module, nn.Parameter)):
        yield where, value
    elif isinstance(value, (list, tuple, dict)) and depth < _DEPTH:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in items:
            yield from _inside(f"{where}[{key!r}]", one, depth + 1)
