# SPDX-License-Identifier: MIT
"""Norms of a program: of what, of which kind, with which eps, as people write them."""

import random
from dataclasses import dataclass

# Where: the input of queries; all inputs; queries and keys of each head, or before they
# are split; the context before the output matrix; the output; the output and its input.
PLACES = ("before", "before_all", "heads", "whole", "context", "out", "after")
FORMS = ("module", "module", "class", "function", "by_hand")
EPSILONS = {"layer": 1e-5, "rms": None}  # those of PyTorch; None: of the dtype


@dataclass(frozen=True)
class Norm:
    """kind: "layer" or "rms". form: a "module" of PyTorch or a "class" of the file's own,
    which have weights; a "function" of PyTorch, or "by_hand". eps: None is PyTorch's."""

    place: str
    kind: str
    form: str
    eps: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}_norm {self.place} {self.form} {self.eps or 'default'}"

    @property
    def names(self) -> tuple[str, ...]:
        """Of its layers, each for one tensor."""
        return {
            "before_all": ("norm", "norm_context"),
            "heads": ("q_norm", "k_norm"),
            "whole": ("q_norm", "k_norm"),
        }.get(self.place, ("norm",))

    def helper(self) -> str:
        """Text that the file has before its class."""
        if self.form != "class":
            return ""
        return (_OWN_LAYER if self.kind == "layer" else _OWN_RMS).format(eps=self.eps)

    def layer_lines(self, width: str) -> list[str]:
        if self.form not in ("module", "class"):
            return []
        name = {"layer": "LayerNorm", "rms": "RMSNorm"}[self.kind]
        own = f"nn.{name}" if self.form == "module" else f"Own{name}"
        eps = f", eps={self.eps}" if self.eps and self.form == "module" else ""
        return [f"self.{layer} = {own}({width}{eps})" for layer in self.names]

    def line(self, x: str, nth: int = 0) -> str:
        """What normalises a tensor, by the nth layer."""
        if self.form in ("module", "class"):
            return f"{x} = self.{self.names[min(nth, len(self.names) - 1)]}({x})"
        if self.form == "function":
            eps = f", eps={self.eps}" if self.eps else ""
            return f"{x} = F.{self.kind}_norm({x}, ({x}.shape[-1],){eps})"
        if self.kind == "rms":
            mean = f"{x}.pow(2).mean(-1, keepdim=True)"
            return f"{x} = {x} * torch.rsqrt({mean} + {self.eps})"
        mean = f"{x}.mean(-1, keepdim=True)"
        variance = f"{x}.var(-1, keepdim=True, unbiased=False)"
        return f"{x} = ({x} - {mean}) / torch.sqrt({variance} + {self.eps})"


_OWN_LAYER = """

class OwnLayerNorm(nn.Module):
    def __init__(self, size, eps={eps}):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return self.gain * (x - mean) / torch.sqrt(variance + self.eps) + self.bias
"""
_OWN_RMS = """

class OwnRMSNorm(nn.Module):
    def __init__(self, size, eps={eps}):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
"""


def draw_norm(seed: int, places: tuple[str, ...] = PLACES) -> Norm:
    r = random.Random(f"norm {seed}")
    kind, form = r.choice(("layer", "rms")), r.choice(FORMS)
    eps = r.choice((1e-5, 1e-6, 1e-8, 1e-12))
    if form in ("module", "function"):
        eps = r.choice((None, eps))
    return Norm(r.choice(places), kind, form, eps)
