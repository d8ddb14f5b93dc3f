# SPDX-License-Identifier: MIT
"""What stands in for packages that are not there.

Most of what a file imports, its attention never calls: a logger, types for
annotations, a registry, a base class. All that goes on without the package. Only
who needs what a call of it would give, fails as the import would have.
"""

import contextlib
import dataclasses
import dis
import importlib
import re
import sys
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from . import absent_attention, absent_rotary

# As files that import all for others hand them on.
_PACKAGES = {name: name for name in ("torch", "math", "einops", "numpy", "copy")}
_PACKAGES |= {"nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy"}
_LAYERS = set(
    "Linear LayerNorm RMSNorm Dropout Embedding Conv1d Conv2d GELU ReLU SiLU Softmax "
    "Identity Sequential ModuleList ModuleDict Parameter".split()
)
_SETTINGS = re.compile(r"config|settings|basemodel$", re.I)
_ASKS = re.compile(r"(is|has)_\w+_(available|installed|enabled)")


class Absent:
    """A module, class or value of an absent package. reason: what its import raises."""

    # While a file is loaded, what a call gives is absent, too.
    _calls = False

    def __init__(self, reason: ImportError, name: str = "") -> None:
        self.__dict__ |= {"reason": reason, "name": name}

    def __call__(self, *args: object, **kwargs: object) -> object:
        if _ASKS.fullmatch(self.__dict__["name"]):
            return "torch" in self.__dict__["name"]
        if Absent._calls or _is_unused(sys._getframe(1)):
            return self
        raise missing(self)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python asks every value of a module for these
            raise AttributeError(name)
        return of(self.__dict__["reason"], name)

    def __setattr__(self, name: str, value: object) -> None:
        """Options of a package that is not there."""

    def __mro_entries__(self, bases: tuple) -> tuple[type, ...]:
        """What a class inherits in its place, once."""
        others = [base for base in bases if isinstance(base, type)]
        is_module = any(issubclass(base, nn.Module) for base in others)
        if is_module or self is not next(b for b in bases if isinstance(b, Absent)):
            return ()
        of_settings = _SETTINGS.search(self.__dict__["name"])
        return (Settings,) if of_settings else (ModuleOfAbsent,)

    def __getitem__(self, key: object) -> "Absent":
        return self  # as types have it: Float[Tensor, "b n d"]

    def __or__(self, other: object) -> "Absent":
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator:
        raise missing(self)

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __subclasscheck__(self, kind: type) -> bool:
        return False


@contextlib.contextmanager
def calls_go_on() -> Iterator[None]:
    """While a file is loaded: nobody knows yet what will be needed."""
    before, Absent._calls = Absent._calls, True
    try:
        yield
    finally:
        Absent._calls = before


def missing(absent: Absent) -> ImportError:
    """What an import of it raises."""
    reason = absent.__dict__["reason"]
    error = type(reason)(*reason.args, name=reason.name, path=reason.path)
    error.of_neighbour = getattr(reason, "of_neighbour", False)
    return error


def of(reason: ImportError, name: str) -> object:
    """What stands for `name` of an absent package: the same where torch has it, or
    where it is what everybody calls a package that is there."""
    if name in _PACKAGES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(_PACKAGES[name])
    if name in _KNOWN:
        return _KNOWN[name]
    package = (reason.name or "").partition(".")[0]
    if name == "Conv1D" and package in ("transformers", "pytorch_pretrained_bert"):
        return Conv1D
    if (package, name) == ("fairseq", "softmax"):
        return _softmax
    if name in _LAYERS:  # written again, as courses have it
        return getattr(nn, name)
    if name.endswith("_") and hasattr(nn.init, name):
        return getattr(nn.init, name)
    if name.lstrip("_") == "repeat_kv":
        return RepeatHeads()
    if absent_rotary.is_named(name):
        return absent_rotary.Maker(reason, name)
    return Absent(reason, name)


def _is_unused(frame: types.FrameType) -> bool:
    """Whether the caller throws away what its call returns, as that of a logger."""
    is_next = False
    for instruction in dis.get_instructions(frame.f_code):
        if is_next and instruction.opname != "CACHE":
            return instruction.opname == "POP_TOP"
        is_next = is_next or instruction.offset == frame.f_lasti
    return False


class ModuleOfAbsent(nn.Module):
    """A base class of an absent package, most of which are modules, called or not."""

    def __new__(cls, *args: object, **kwargs: object) -> "ModuleOfAbsent":
        made = super().__new__(cls)
        nn.Module.__init__(made)  # base classes of other kinds are not always called
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        if len(args) == 1 and not kwargs:
            self.config = args[0]

    def save_hyperparameters(self, *names: object, **_: object) -> None:
        given = dict(sys._getframe(1).f_locals)
        self.hparams = types.SimpleNamespace(
            **{n: v for n, v in given.items() if n not in ("self", "__class__")}
        )

    def post_init(self) -> None:
        """Where others load or initialise."""

    init_weights = post_init


class Settings:
    """A base class of settings: attributes, with defaults, by keywords."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        names = [
            n for k in type(self).__mro__ for n in vars(k).get("__annotations__", {})
        ]
        vars(self).update(zip(names, args))
        vars(self).update(kwargs)


class DropPath(nn.Module):
    """Leaves out a branch, for whole items, in training."""

    def __init__(self, drop_prob: float = 0.0, *_: object, **__: object) -> None:
        super().__init__()
        self.drop_prob = drop_prob or 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_prob == 0.0:
            return x
        kept = x.new_empty((len(x),) + (1,) * (x.dim() - 1))
        return x * kept.bernoulli_(1 - self.drop_prob) / (1 - self.drop_prob)


def _of_length(length: int) -> Callable:
    def several(value: object) -> tuple:
        is_several = isinstance(value, (tuple, list))
        return tuple(value) if is_several else (value,) * length

    return several


def _linear(rows: int, columns: int, bias: bool = True, **_: object) -> nn.Linear:
    """Of a layer in slices, all of which are here."""
    return nn.Linear(rows, columns, bias)


def _dropout(p: float, *_: object, **__: object) -> nn.Dropout:
    """One that also has the name of where it is."""
    return nn.Dropout(p)


def _softmax(x: torch.Tensor, dim: int, **_: object) -> torch.Tensor:
    return x.softmax(dim)


class Conv1D(nn.Module):
    """The layer of GPT-2, whose matrix is (in, out), as (nf, nx) or, in older code, as
    (nf, rf, nx)."""

    def __init__(self, nf: int, *others: int, nx: int = 0, rf: int = 1) -> None:
        super().__init__()
        self.nf, nx = nf, nx or others[-1]
        self.weight = nn.Parameter(0.1 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class RepeatHeads:
    """repeat_kv of Llama and of all that came of it: each head of keys n times, in
    (B, H, L, D) or in (B, L, H, D), of which the first call tells by its sizes."""

    axis: int | None = None

    def __call__(self, *given: object, **named: object) -> torch.Tensor:
        values = (*given, *named.values())
        x = next(v for v in values if isinstance(v, torch.Tensor))
        count = next(v for v in values if isinstance(v, int))
        if self.axis is None:
            self.axis = 1 if x.shape[1] < x.shape[2] else 2
        return x.repeat_interleave(count, dim=self.axis)


def _einsum(*given: object) -> torch.Tensor:
    """torch.einsum whose axes have names of any length: "batch head, head d -> d"."""
    equation = next(value for value in given if isinstance(value, str))
    letters: dict[str, str] = {}

    def short(term: str) -> str:
        names = term.split() if " " in term.strip() else list(term.strip())
        dots = term.strip() == "..."
        names = ["..."] if dots else names
        free = (chr(ord("a") + n) for n in range(26))
        return "".join(
            name if name == "..." else letters.setdefault(name, _next(letters, free))
            for name in names
        )

    sides = [",".join(map(short, side.split(","))) for side in equation.split("->")]
    tensors = [value for value in given if value is not equation]
    return torch.einsum("->".join(sides), *tensors)


def _next(taken: dict[str, str], free: Iterator[str]) -> str:
    return next(letter for letter in free if letter not in taken.values())


_KNOWN: dict[str, object] = {
    "einsum": _einsum,
    "DropPath": DropPath,
    "StochasticDepth": DropPath,
    "FusedLayerNorm": nn.LayerNorm,
    "FairseqDropout": _dropout,
    "quant_noise": lambda module, *_, **__: module,  # of what is compressed, if asked
    "lecun_normal_": nn.init.trunc_normal_,
    "dataclass": dataclasses.dataclass,
    "ColumnParallelLinear": _linear,
    "RowParallelLinear": _linear,
    "get_model_parallel_world_size": lambda: 1,
    "get_tensor_model_parallel_world_size": lambda: 1,
    "get_model_parallel_rank": lambda: 0,
    "use_fused_attn": lambda *_: False,
    **dict.fromkeys(("device", "DEVICE"), torch.device("cpu")),
    "to_ntuple": _of_length,
    **absent_attention.FUNCTIONS,
    **{f"to_{length}tuple": _of_length(length) for length in (1, 2, 3, 4)},
}
