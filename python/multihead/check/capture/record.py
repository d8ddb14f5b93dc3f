# SPDX-License-Identifier: MIT
"""Watches code while it runs: each operation below autograd.

Storages, not tensors, are followed: a view is a tensor of its own, but it shares
the storage of what it shows.
"""

import contextlib
import copy
import math
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..subject.holding import has_storage
from .core import Cores, of_first, scores_of_fused
from .places import place, storage
from .scored import Scored
from .triangles import blocks_nothing, is_triangle

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "matmul"}
_PRODUCTS |= {"linear", "_native_multi_head_attention", "dot", "einsum"}
_PRODUCTS |= {"convolution"}
# Of a softmax, by whatever name.
_EXPONENTIALS = {"_softmax", "_log_softmax", "_safe_softmax", "exp", "exp_", "exp2"}
_EXPONENTIALS |= {"logsumexp"}
_SUMS = {"add", "add_", "addmm", "addmv", "_native_multi_head_attention", "linear"}
_SUMS |= {"baddbmm", "convolution"}
_RANDOM = {"randn", "rand", "normal", "normal_", "uniform_", "rand_like", "randn_like"}
_RANDOM |= {"bernoulli", "bernoulli_", "trunc_normal_", "normal_functional"}
_COMPARE = {"lt", "le", "gt", "ge"}
_COPIES = {"clone", "_to_copy", "contiguous", "detach", "alias", "copy", "lift_fresh"}
_UNTRACED = {"detach", "alias", "empty", "zeros_like", "empty_like", "lift_fresh"}
MOST_TRACED, MOST_AT_END, LARGEST_TRACED = 96, 64, 1 << 19
_TRIANGLES = {"tril", "triu", "tril_", "triu_"}


@dataclass
class Origin:
    """Where the values of a storage come from: sequences and masks of the call, and
    weights, by their places; whether they were drawn; whether a triangle has a part in
    them; what they are a copy of; of what is computed without inputs, the storages
    that it is computed from."""

    inputs: frozenset[str] = frozenset()
    weights: tuple[tuple[int, int], ...] = ()
    drawn: bool = False
    triangle: bool = False
    copy_of: int | None = None
    made_of: frozenset[int] = frozenset()


_UNKNOWN = Origin()
_LARGEST_EPS = 1e-2


@dataclass
class Use:
    """A weight as a product first used it: the tensor, the input that it met
    (None if it met something computed), whether scores existed already, and the
    bias that was added. products: how many used it; is_output_too: one of the later
    ones met what came of other weights, after the scores."""

    weight: Tensor
    direct: str | None
    late: bool
    bias: Tensor | None = None
    products: int = 0
    is_output_too: bool = False


@dataclass
class Draw:
    """A draw of dropout: what was kept, and the probability of dropping if known."""

    keep: Tensor
    p: float | None


class Recorder(TorchDispatchMode):
    """Records one run. `inputs`: the tensors of the call by role; `kept`: those that
    the code holds, which may be masks."""

    def __init__(self, inputs: dict[str, Tensor], kept: tuple[Tensor, ...] = ()):
        super().__init__()
        self.given = list(inputs.values())  # as they were handed over
        self.origins: dict[int, Origin] = {}
        self.direct: dict[int, str] = {}
        self.alive: list[Tensor] = []
        self.uses: dict[tuple[int, int], Use] = {}
        # The weight whose product a storage holds.
        self._made_by: dict[int, tuple[int, int]] = {}
        # Matrices that were repeated for each item, by the storage of that.
        self._repeated: dict[int, Tensor] = {}
        # Storages whose numbers, or what was made of them, met inputs in any operation.
        self.met: set[int] = set()
        self.biases: dict[int, Tensor] = {}
        self.parameters: dict[int, Tensor] = {}  # met ones, by storage
        self.cores, self.scored = Cores(), Scored()
        # The weights behind both sides of each product of computed tensors.
        self.pairs: list[tuple[tuple, tuple]] = []
        self.draws: list[Draw] = []
        self.trace: list[Tensor] = []
        # Of what is too much for the trace, the last.
        self.end: deque[Tensor] = deque(maxlen=MOST_AT_END)
        self.spread: float | None = None
        # Roles of the inputs that met a gain before any matrix, by the gain's storage.
        self.gained: dict[int, frozenset[str]] = {}
        # What norms without parameters of their own add to the variance.
        self.norm_eps: float | None = None
        # What is added to means of squares, by how many of these there are: the first.
        self.eps_of_means: dict[int, float] = {}
        self._means: set[int] = set()  # storages of means of each position
        self.fills_constants = False
        # Whether what is computed in float64 met a tensor of float32, as of a scale.
        self.rounds = False
        # Whether there was a softmax, and whether inputs met in a product before it.
        # chooses: the largest ones, of scores perhaps.
        self.has_softmax = self.has_scores = self.chooses = False
        # What was asked which of its numbers are 0: the last two sizes of each.
        self._asked: set[tuple[int, ...]] = set()
        # What the scores are of that meet a softmax: the last two sizes of each.
        self.softmaxes: set[tuple[int, ...]] = set()
        self.normalised: set[int] = set()  # lengths of the axes of softmaxes
        # Whether it is called once for each position. What these calls compute is
        # joined, to be traced as that of one call.
        self.is_stepwise = False
        # Whether a triangle of zeros was made, or is kept, as for a causal mask.
        self.has_triangle = False
        # Whether one that blocks nothing was added to scores.
        self.adds_triangle = False
        self._seen: set[int] = set()
        # By storage: what it was made for, and where the trace has it.
        self._wholes: dict[int, Tensor] = {}
        self._written: dict[int, int] = {}
        for tensor in filter(is_triangle, kept):
            self.alive.append(tensor)
            self.origins[storage(tensor)] = Origin(triangle=True)
            self.has_triangle = True
        for role, tensor in inputs.items():
            self.alive.append(tensor)
            self.origins[storage(tensor)] = Origin(inputs=frozenset([role]))
            self.direct.setdefault(storage(tensor), role)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else the first operation imports torch._dynamo, which takes two seconds.
        return False

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Nothing here but `function` is a call of the code's, and what is raised here
        # would look like an error of it. (Not `with`: this runs for every operation.)
        watcher = sys.getprofile()
        sys.setprofile(None)
        try:
            operands = [*_tensors(args), *_tensors(kwargs.values())]
            if not function._schema.is_mutable:
                self._fill_constants(operands)
        except Exception:
            pass
        finally:
            sys.setprofile(watcher)
        result = function(*args, **kwargs)
        sys.setprofile(None)
        try:
            results = list(_tensors([result]))
            self.alive += operands + results
            self._note(function, args, kwargs, operands, results)
        except Exception:
            pass
        finally:
            sys.setprofile(watcher)
        return result

    def _note(self, function, args, kwargs, operands, results) -> None:
        name = function.overloadpacket.__name__
        self._note_weights(name, operands, results)
        self._note_origins(name, operands, results)
        self._note_draws(name, args, operands, results)
        self.cores.note(name, args, kwargs, operands, results, self)
        if self.scored.note(function, args, kwargs, operands, results, self):
            self.cores.follow(results[0], operands)
        self._note_trace(name, results)
        self._note_scores(name, args, kwargs)
        self._note_kind(name, args, operands)
        self._note_triangle(name, operands)
        self._note_rounding(operands, results)
        if name == "native_layer_norm":
            self.norm_eps = float(args[4])
        self._note_eps(name, args, operands, results)
        self._note_gains(name, operands)

    def _note_eps(self, name: str, args: tuple, operands, results) -> None:
        """x.square().mean(-1, keepdim=True) + eps, of a norm that shows its steps."""
        if not results or results[0].shape[-1:] != (1,):
            return
        known = any(storage(t) in self._means for t in operands)
        if name in ("mean", "var", "std", "sum") or (known and name in ("sqrt", "div")):
            self._means.add(storage(results[0]))
        eps = args[1] if name in ("add", "add_") and known and len(args) > 1 else None
        if isinstance(eps, float) and 0 < eps <= _LARGEST_EPS:
            self.eps_of_means.setdefault(results[0].numel(), eps)

    def _note_gains(self, name: str, operands: list[Tensor]) -> None:
        gains = [
            t for t in operands if t.dim() == 1 and self.root(t) in self.parameters
        ]
        is_of_products = name in _PRODUCTS or name in _SUMS - {"add", "add_"}
        if not gains or is_of_products:
            return
        origins = map(self.origin, operands)
        roles = frozenset().union(*(o.inputs for o in origins if not o.weights))
        for gain in gains if roles else ():
            self.gained.setdefault(self.root(gain), roles)

    @property
    def asks_for_zeros(self) -> bool:
        """Whether scores were asked which of them are 0."""
        return not self._asked.isdisjoint(self.softmaxes)

    def origin(self, tensor: Tensor) -> Origin:
        return self.origins.get(storage(tensor), _UNKNOWN)

    def keep_first(self) -> None:
        """Of a whole model, in which later attention may be of another kind."""
        self.cores.found = of_first(self.cores.found)
        self.scored.keep_first()

    def is_learned(self, tensor: Tensor) -> bool:
        """Whether a parameter has a part in it, and no input."""
        origin = self.origin(tensor)
        behind = origin.made_of | {self.root(tensor)}
        return not origin.inputs and bool(behind & self.parameters.keys())

    def _fill_constants(self, operands: list[Tensor]) -> None:
        """Zero biases and unit gains of layers that the code makes for itself would
        hide what is done with them: those of a function are drawn before their first
        use. What a module makes in a call is made anew in the next one."""
        for tensor in operands:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                self.parameters[storage(tensor)] = tensor
                self.alive.append(tensor)
                if self.fills_constants:
                    fill_constant(tensor)

    def _note_weights(self, name: str, operands, results) -> None:
        if name == "repeat" and not self.origin(operands[0]).inputs:
            if results[0].shape[-2:] == operands[0].shape[-2:]:
                self._repeated[storage(results[0])] = operands[0]
        operands = [self._repeated.get(storage(t), t) for t in operands]
        data = [t for t in operands if self.origin(t).inputs]
        if name.startswith("_scaled_dot_product") and len(data) >= 3:
            query, key, value = (self.origin(t).weights for t in data[:3])
            self.pairs += [(query, key), (query + key, value)]
        if not data or name not in _PRODUCTS | _SUMS:
            return
        behind = self.origin(data[0]).weights
        weights = [t for t in operands[::-1] if self._may_be_weight(t)]
        # A bias belongs to the matrix of the same operation, wherever it stands.
        for tensor in sorted(weights, key=lambda t: t.dim() < 2):
            key = place(tensor)
            if name in _PRODUCTS and tensor.dim() >= 2:
                direct = self.direct.get(self.root(data[-1]))
                use = self.uses.setdefault(key, Use(tensor, direct, bool(self.pairs)))
                use.products += 1
                again = use.products > 1 and not self.is_stepwise
                if again and self.pairs and behind:
                    use.is_output_too = True
                behind = (key,)
                self._made_by |= {storage(result): key for result in results}
            elif name in _SUMS:
                self.biases.setdefault(storage(tensor), tensor)
                made = self._made_by.get(storage(data[0]))
                last = (made,) if name not in _PRODUCTS and made else behind
                if len(last) == 1 and self.uses[last[0]].bias is None:
                    self.uses[last[0]].bias = tensor
        if name in _PRODUCTS and len(data) >= 2:
            self.pairs.append(tuple(self.origin(t).weights for t in data[-2:]))

    def _may_be_weight(self, tensor: Tensor) -> bool:
        """Not computed from the inputs, and no constant that the code made."""
        if not tensor.is_floating_point() or tensor.dim() == 0:
            return False
        origin = self.origins.get(self.root(tensor))
        known = origin is None or origin.drawn or isinstance(tensor, nn.Parameter)
        known = known or self._is_normed(tensor)
        return known and not self.origin(tensor).inputs

    def _is_normed(self, tensor: Tensor) -> bool:
        """Whether it is a multiple of a parameter, as where a spectral norm divides it."""
        known = (self.parameters.get(key) for key in self.origin(tensor).made_of)
        for learned in known:
            if learned is not None and learned.numel() == tensor.numel():
                ratios = tensor.detach().flatten() / learned.detach().flatten()
                if bool((ratios - ratios[0]).abs().max() < 1e-4 * ratios[0].abs()):
                    return True
        return False

    def root(self, tensor: Tensor) -> int:
        """The storage whose values `tensor` shows, through copies."""
        key = storage(tensor)
        while (origin := self.origins.get(key)) and origin.copy_of is not None:
            key = origin.copy_of
        return key

    def _note_origins(self, name, operands, results) -> None:
        if name.endswith("_like") or name.startswith("new_"):
            operands = []  # only their shapes are used
        origins = [self.origin(t) for t in operands]
        inputs = frozenset().union(*(o.inputs for o in origins))
        weights: dict[tuple[int, int], None] = {}
        for tensor, origin in zip(operands, origins):
            if origin.inputs:
                weights.update(dict.fromkeys(origin.weights))
            elif place(tensor) in self.uses:
                weights[place(tensor)] = None
        drawn = name in _RANDOM or any(o.drawn for o in origins)
        made = name in _TRIANGLES and not inputs
        self.has_triangle = self.has_triangle or made
        triangle = made or any(o.triangle for o in origins)
        made_of = self._made_of(operands, origins)
        if inputs:
            self.met |= made_of
            made_of = frozenset()
        new = Origin(
            inputs, tuple(weights) if inputs else (), drawn, triangle, made_of=made_of
        )
        for result in results:
            key = storage(result)
            if any(storage(t) == key for t in operands):  # a view, or in place
                if key not in self.origins and not inputs and not drawn:
                    continue  # of something older than the run
                copy_of = self.origin(result).copy_of
            else:
                copy_of = storage(operands[0]) if name in _COPIES and operands else None
            self.origins[key] = replace(new, copy_of=copy_of)

    def _made_of(self, operands: list[Tensor], origins: list[Origin]) -> frozenset[int]:
        """The storages behind the operands that no input has a part in: weights, also
        by way of a lookup, a part or a sum."""
        found: set[int] = set()
        for tensor, origin in zip(operands, origins):
            if not origin.inputs and tensor.is_floating_point():
                found |= origin.made_of or {self.root(tensor)}
        return frozenset(found)

    def _note_draws(self, name, args, operands, results) -> None:
        if not results or results[0].dim() < 2:
            return
        if name == "native_dropout" and len(results) == 2:
            self.draws.append(Draw(results[1].bool().clone(), float(args[1])))
        elif name in ("bernoulli", "bernoulli_"):
            p = next((a for a in args[1:] if isinstance(a, float)), None)
            if name == "bernoulli_" and len(args) == 1:
                p = 0.5  # its default, which PyTorch leaves out
            self.draws.append(Draw(results[0] != 0, None if p is None else 1 - p))
        elif name in _COMPARE and self.origin(operands[0]).drawn:
            if not self.origin(operands[0]).inputs:
                self.draws.append(Draw(results[0].bool().clone(), None))

    def _note_scores(self, name, args, kwargs) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        fused, mask = None, kwargs.get("attn_mask")
        is_fused = name.startswith("_scaled_dot_product") and "backward" not in name
        if is_fused:
            fused = scores_of_fused(*args[:2], kwargs.get("scale"))
            # Their scale, and a bias of positions, show only here.
            if fused.numel() <= LARGEST_TRACED:
                self.trace += [fused] if mask is None else [fused, fused + mask]
        if self.spread is not None:
            return
        scores = fused
        if name in ("_softmax", "_log_softmax", "exp") and args[0].dim() >= 2:
            scores = args[0] if self.origin(args[0]).inputs else None
        if scores is not None:
            finite = scores[scores.isfinite() & (scores.abs() < 1e6)]
            self.spread = float(finite.std()) if finite.numel() > 1 else None

    def _note_triangle(self, name: str, operands: list[Tensor]) -> None:
        fused = name.startswith("_scaled_dot_product")
        added = operands[3:] if fused else operands if name in _SUMS else []
        data = any(len(self.origin(t).inputs) > 0 for t in operands)
        self.adds_triangle |= data and any(
            self.origin(t).triangle
            and not self.origin(t).inputs
            and t.is_floating_point()
            and blocks_nothing(t)
            for t in added
        )

    def _note_kind(self, name: str, args: tuple, operands: list[Tensor]) -> None:
        of_a_number = name == "pow" and not isinstance(args[0], Tensor)  # e ** x
        data = [t for t in operands if self.origin(t).inputs]
        fused = name.startswith("_scaled_dot_product")
        met = len(data) >= 2 and name in _PRODUCTS | {"mul", "mul_"}
        apart = name in _PRODUCTS or (met and data[0] is not data[1])  # no square
        self.has_scores |= fused or (met and apart and not self.has_softmax)
        is_softmax = bool(data) and (of_a_number or name in _EXPONENTIALS)
        if fused and len(data) >= 2:
            self.softmaxes.add((data[0].shape[-2], data[1].shape[-2]))
        elif is_softmax:
            self.softmaxes.add(tuple(data[0].shape[-2:]))
        if is_softmax and name in ("_softmax", "_safe_softmax"):
            self.normalised.add(data[0].shape[args[1]])
        self.has_softmax |= fused or is_softmax
        self.chooses |= name in ("topk", "kthvalue")
        if name == "eq" and len(args) > 1 and not self.has_softmax:
            of_query = [t for t in data if "query" in self.origin(t).inputs]
            is_zero = type(args[1]) in (int, float) and args[1] == 0
            self._asked |= {tuple(t.shape[-2:]) for t in of_query if is_zero}

    def _note_rounding(self, operands: list[Tensor], results: list[Tensor]) -> None:
        wide = any(r.dtype is torch.float64 and self.origin(r).inputs for r in results)
        self.rounds |= wide and any(t.dtype is torch.float32 for t in operands)

    def _note_trace(self, name, results) -> None:
        for result in results:
            whole = self._wholes.setdefault(storage(result), result)
            if (
                name not in _UNTRACED
                and (name == "cat" or not self.is_stepwise)
                and result.is_floating_point()
                and 2 <= result.dim()
                and result.numel() <= LARGEST_TRACED
                and self.origin(result).inputs
            ):
                room = len(self.trace) < MOST_TRACED
                (self.trace if room else self.end).append(result.detach().clone())
                if name == "copy_" and room and whole.numel() <= LARGEST_TRACED:
                    self._note_parts(whole, result)

    def _note_parts(self, whole: Tensor, part: Tensor) -> None:
        """What is written part by part, `out[..., 0::2] = ...`, as it is at last."""
        if part.numel() < whole.numel():
            place = self._written.setdefault(storage(whole), len(self.trace))
            self.trace[place : place + 1] = [whole.detach().clone()]


def fill_constant(tensor: Tensor) -> None:
    """Draws the values of a parameter that holds one value only, around 0 or 1; a
    single number only where it is 0, which would hide what it is multiplied with."""
    if nn.parameter.is_lazy(tensor) or not tensor.is_floating_point():
        return
    if getattr(tensor, "scales_noise", False):
        return
    with torch.no_grad():
        first = tensor.flatten()[:1]
        hides = tensor.numel() > 1 or bool((first == 0).all())
        if tensor.numel() > 0 and hides and bool((tensor == first).all()):
            tensor.copy_(first.reshape([]) + 0.3 * torch.randn_like(tensor))


def part_copies(target: object) -> None:
    """Gives matrices that begin as copies of each other, as deepcopy makes them, other
    numbers: what is equal hides which of them is used."""
    matrices = target.parameters() if isinstance(target, nn.Module) else ()
    known: dict[torch.Size, list[Tensor]] = {}
    for tensor in matrices:
        if nn.parameter.is_lazy(tensor) or tensor.dim() < 2 or tensor.is_meta:
            continue
        others = known.setdefault(tensor.shape, [])
        if any(torch.equal(tensor, other) for other in others):
            numbers = tensor.detach().flatten()
            order = torch.randperm(len(numbers))
            tensor.data.copy_(numbers[order].view(tensor.shape))
        others.append(tensor)


def leave_noise(target: object) -> None:
    """Marks the parameters that say how much noise is added, none at first, which
    stays so."""
    named = target.named_parameters() if isinstance(target, nn.Module) else ()
    for name, tensor in named:
        if "noise" in name.lower() and not tensor.detach().any():
            tensor.scales_noise = True  # type: ignore[attr-defined]


def keep_marks(module: nn.Module, copied: nn.Module) -> None:
    """Gives the parameters of a copy the marks of leave_noise(), which it lacks."""
    for tensor, other in zip(module.parameters(), copied.parameters()):
        if getattr(tensor, "scales_noise", False):
            other.scales_noise = True  # type: ignore[attr-defined]


def copied(target: object) -> object:
    """A copy with the marks of its parameters; itself where it cannot be copied."""
    try:
        copied = copy.deepcopy(target)
    except Exception:
        return target
    if isinstance(target, nn.Module):
        keep_marks(target, copied)
    return copied


_GATES = re.compile(r"gamma|gate|alpha|lambda|scale|beta|weight|temperature")


def open_gates(target: object) -> None:
    """One number by which a branch is multiplied, and which starts at 0, hides all
    that is behind it: it is made 1."""
    if not isinstance(target, nn.Module):
        return
    for name, tensor in target.named_parameters():
        is_lazy = nn.parameter.is_lazy(tensor)
        closed = not is_lazy and tensor.numel() == 1 and not tensor.detach().any()
        if closed and _GATES.search(name.rpartition(".")[2].lower()):
            with torch.no_grad():
                tensor.fill_(1.0)


@contextlib.contextmanager
def unset_is_nan() -> Iterator[None]:
    """Memory that nobody has written to, as torch.empty gives it, holds NaN."""
    old = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(old, warn_only=warns)


class NothingHuge(TorchFunctionMode):
    """While a class is constructed with sizes that were made up: what asks for a tensor
    of more numbers than memory may hold is told so, instead of waiting for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _MAKERS:
            size = args[0] if args and isinstance(args[0], (tuple, list)) else args
            numbers = [n for n in size if isinstance(n, int)]
            if math.prod(numbers) > _MOST_NUMBERS:
                raise MemoryError(f"a tensor of {tuple(numbers)} numbers is too large")
        return function(*args, **(kwargs or {}))


_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
_MOST_NUMBERS = 1 << 28


def fill_unset(target: object) -> list[str]:
    """Draws what a module's constructor has left unset (see unset_is_nan). Returns the
    names of parameters that were."""
    parts = dict(target.named_modules() if isinstance(target, nn.Module) else ())
    found = []
    for path, part in (parts or {"": target}).items():
        learned = getattr(part, "_parameters", {})
        own = {**learned, **getattr(part, "_buffers", {}), **vars(part)}
        for name, tensor in own.items():
            if isinstance(tensor, Tensor) and not nn.parameter.is_lazy(tensor):
                if _draw_unset(tensor) and name in learned:
                    found.append(f"{path}.{name}" if path else name)
    return found


def _draw_unset(tensor: Tensor) -> bool:
    """Whether something was unset."""
    if not tensor.is_floating_point() or not has_storage(tensor):
        return False
    unset = tensor.detach().isnan()
    if not unset.any():
        return False
    with torch.no_grad():
        drawn = torch.randn_like(tensor) / max(tensor.shape[-1:] or (1,)) ** 0.5
        tensor.copy_(torch.where(unset, drawn, tensor))
    return True


def _tensors(values):
    for value in values:
        if isinstance(value, Tensor):
            if has_storage(value):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
