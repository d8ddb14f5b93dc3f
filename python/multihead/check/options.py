# SPDX-License-Identifier: MIT
"""What the user of a check may state, judged."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .._library import diagnosis

POLARITIES = ("blocked", "keep", "additive")


@dataclass(frozen=True)
class Options:
    """The arguments of `check` beside its target; None: to be found out."""

    num_heads: int | None = None
    embed_dim: int | None = None
    num_kv_heads: int | None = None
    mask: str | None = None
    batch_first: bool | None = None
    causal: bool | None = None
    weights: object = None
    inputs: object = None
    call: str | None = None
    time_limit: float = 20.0
    allow: str | Sequence[str] = ()

    @property
    def allowed(self) -> list[str]:
        """The names of conditions that hold, or "all"."""
        names = self.allow.split(",") if isinstance(self.allow, str) else self.allow
        return [name.strip() for name in names if name.strip()]

    def __post_init__(self) -> None:
        if self.mask not in (None, *POLARITIES):
            raise ValueError(
                "check: mask must be 'blocked', 'keep' or 'additive', "
                f"got {self.mask!r}"
            )
        for name in ("num_heads", "embed_dim", "num_kv_heads"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"check: {name} must be at least 1, got {size!r}")
        for name in ("batch_first", "causal"):
            flag = getattr(self, name)
            if not isinstance(flag, (bool, type(None))):
                raise ValueError(
                    f"check: {name} must be True, False or None, got {flag!r}"
                )
        for whole, part in (("num_heads", "num_kv_heads"), ("embed_dim", "num_heads")):
            sizes = getattr(self, whole), getattr(self, part)
            if all(sizes) and sizes[0] % sizes[1]:
                raise ValueError(
                    f"check: {whole} must be divisible by {part}, got {sizes[0]} and "
                    f"{sizes[1]}"
                )
        if not isinstance(self.call, (str, type(None))):
            raise ValueError(
                f"check: call must be text, got {type(self.call).__name__}"
            )
        if self.call is not None and self.inputs is not None:
            raise ValueError("check: call must not be given beside inputs, got both")
        seconds = self.time_limit
        if type(seconds) not in (int, float) or not seconds > 0:
            raise ValueError(f"check: time_limit must be positive, got {seconds!r}")
        names = self.allow
        if not isinstance(names, str) and not (
            isinstance(names, Sequence) and all(isinstance(n, str) for n in names)
        ):
            raise ValueError(f"check: allow must be names or 'all', got {names!r}")
        known, _ = diagnosis().conditions()
        unknown = [name for name in self.allowed if name not in ("all", *known)]
        if unknown:
            raise ValueError(
                f"check: allow must be 'all' or among {', '.join(known)}, got "
                f"{unknown[0]!r}"
            )
        if not isinstance(self.weights, (nn.Module, dict, type(None))):
            raise ValueError(
                "check: weights must be a module or a dictionary of tensors by name, "
                f"got {type(self.weights).__name__}"
            )
