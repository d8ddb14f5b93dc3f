# SPDX-License-Identifier: MIT
"""Weights that PyTorch does not know of: layers in a plain list, tensors that are no
parameters. They compute as others do, and no optimiser is given them."""

from collections.abc import Iterator

import torch
from torch import nn

from ..capture.runner import Run, Runner
from ..report import Finding

_HOW = (
    "nn.ModuleList, or nn.ModuleDict, for layers; nn.Parameter for tensors that are "
    "learned, register_buffer for those that are not."
)


def of_weights(runner: Runner, base: Run) -> list[Finding]:
    """Layers that are used and are no part of their module, several of a kind: one
    alone may be hidden on purpose, as what is trained elsewhere. Tensors alone are
    only remarked, as those of exercises that train nothing."""
    target, _ = runner.target_of(base.case, may_hang=True)
    if base.recorder is None or not isinstance(target, nn.Module):
        return []
    known = {id(part) for part in target.modules()}
    met, root = base.recorder.met, base.recorder.root
    hidden = {
        name: part
        for name, part in _in_lists(target)
        if id(part) not in known and any(root(p) in met for p in part.parameters())
    }
    if len({id(part) for part in hidden.values()}) > 1:
        first = next(iter(hidden))
        sentence = (
            f"It keeps layers in a plain list, `{first}`, which PyTorch does not look "
            "into: their weights are no parameters, so that no optimiser is given "
            "them, and they are neither saved nor moved to another device."
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


def _in_lists(target: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in lists, tuples and dictionaries of Python, and of which attribute."""
    for path, part in target.named_modules():
        for name, value in vars(part).items():
            where = f"{path}.{name}" if path else name
            values = value.values() if isinstance(value, dict) else value
            if isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
                yield from (
                    (f"{where}[{place}]", one)
                    for place, one in enumerate(values)
                    if isinstance(one, nn.Module)
                )
