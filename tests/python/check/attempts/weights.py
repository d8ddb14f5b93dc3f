# SPDX-License-Identifier: MIT
"""The weights of an attempt, under the names q, k, v and o, whatever it calls them.

Only for the proof that the table is right: it knows the names of this folder, and
shares nothing with the checker.
"""

import contextlib
import re

import torch
from torch import Tensor, nn

NAMES = {
    "q": "q wq w_q fc_q query queries w_query q_proj q_linear to_q consulta b_q",
    "k": "k wk w_k key keys w_key k_proj k_linear to_k clave b_k",
    "v": "v wv w_v value values w_value v_proj v_linear to_v valor b_v",
    "o": "o wo w_o out o_proj out_proj proj to_out dense fc_out c_proj linear_layer "
    "salida b_o",
    "qkv": "qkv c_attn in_proj to_qkv qkv_proj qkv_layer",
    "kv": "kv to_kv",
}
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}
LINEARS = {"linears.0": "q", "linears.1": "k", "linears.2": "v", "linears.3": "o"}


def named(module: nn.Module) -> dict[str, list[Tensor]]:
    """{"q.weight": [one matrix, or one per head], "o.bias": ...}, (out, in)."""
    linear = {f"{n}.weight" for n, m in module.named_modules() if hasattr(m, "bias")}
    found: dict[str, list[Tensor]] = {}
    for path, tensor in module.named_parameters():
        bare = path not in linear and not path.endswith("_weight")
        kind = "bias" if re.search(r"bias$|b_[QKVO]$", path) else "weight"
        name = re.sub(r"^attn\.|\.?(?<!b)_?(weight|bias)$", "", path)
        name = LINEARS.get(name, re.sub(r"heads\.\d+\.|\.\d+", "", name).lower())
        if bare and kind == "weight":
            tensor = tensor.transpose(-2, -1)
            if tensor.dim() == 3:  # (H, D, E), or (H, E, D) for the output
                whole = [*tensor] if name != "w_o" else [torch.cat([*tensor], dim=1)]
                found.setdefault(f"{ROLES[name]}.weight", []).extend(whole)
                continue
        elif kind == "bias" and tensor.dim() == 2:
            tensor = tensor.flatten()
        if name in ROLES:
            found.setdefault(f"{ROLES[name]}.{kind}", []).append(tensor)
    return found


@contextlib.contextmanager
def created():
    """The layers and matrices that code creates while this is active, in a list.

    A matrix is a parameter, or the result of torch.randn if there is no parameter.
    """
    layers, parameters, drawn = [], [], []
    init, new, randn = nn.Linear.__init__, nn.Parameter.__new__, torch.randn
    made: list[nn.Linear | Tensor] = []

    def record_layer(self, *args, **kwargs):
        init(self, *args, **{**kwargs, "dtype": torch.float64})
        layers.append(self)

    def record_parameter(cls, *args, **kwargs):
        parameters.append(new(cls, *args, **kwargs))
        return parameters[-1]

    def record_draw(*args, **kwargs):
        drawn.append(randn(*args, **{**kwargs, "dtype": torch.float64}))
        return drawn[-1]

    nn.Linear.__init__, nn.Parameter.__new__ = record_layer, record_parameter
    torch.randn = record_draw
    try:
        yield made
    finally:
        nn.Linear.__init__, nn.Parameter.__new__, torch.randn = init, new, randn
        made.extend(layers or parameters or drawn)


def in_order(made: list[nn.Linear | Tensor]) -> dict[str, list[Tensor]]:
    """What a function created, taken as q, k, v of each head, and at last o."""
    found: dict[str, list[Tensor]] = {}
    for i, layer in enumerate(made):
        role = "o" if i == len(made) - 1 else "qkv"[i % 3]
        if isinstance(layer, Tensor):
            found.setdefault(f"{role}.weight", []).append(layer.T)
            continue
        found.setdefault(f"{role}.weight", []).append(layer.weight)
        if layer.bias is not None:
            found.setdefault(f"{role}.bias", []).append(layer.bias)
    return found


def separate(found: dict[str, list[Tensor]], heads: int, by_head: bool) -> dict:
    """Fused matrices cut into q, k and v; per head side by side.

    by_head: the rows of a fused qkv are (H, 3, D) and not (3, H, D).
    """
    whole = {name: torch.cat(parts) for name, parts in found.items()}
    for kind in ("weight", "bias"):
        for fused in ("qkv", "kv"):
            if (matrix := whole.pop(f"{fused}.{kind}", None)) is None:
                continue
            n = len(fused)
            if by_head:
                parts = matrix.unflatten(0, (heads, n, -1)).unbind(1)
                parts = [part.flatten(0, 1) for part in parts]
            else:
                parts = matrix.chunk(n)
            whole.update({f"{r}.{kind}": p for r, p in zip(fused, parts)})
    return whole
