# SPDX-License-Identifier: MIT
"""The core of attention in a run, whatever stands around it: queries, keys and values
as they meet, and what comes of them, told by the two products.

The first product of two computed tensors is that of the scores; whatever follows of
as many numbers is scores or weights; the product of those with a third tensor is the
context.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import axes
from .places import CUTS, SHOWS_ALL, Place, place, storage
from .sums import Sums

_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "addbmm")
_SUMMED = ("baddbmm", "addmm", "addbmm")
_SUMS = ("add", "add_")
_SOFTMAX = ("_softmax", "_safe_softmax", "exp")
_SCALES = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
# What shows the same numbers, in another order perhaps.
_SAME = SHOWS_ALL | CUTS | {"copy", "index", "as_strided", "repeat"}
_JOINS = {"cat", "stack"}
_LEAST = -1e4  # no weight is, and what blocks scores mostly
# What comes between a product and its softmax in attention without mask and bias.
_NO_BIAS = {*_SAME, *_SCALES, *_SOFTMAX, "amax", "max", "sub", "sub_"}
_ACTIVATIONS = {"relu", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu"}
_STEPS = {"floor", "ceil", "round", "trunc", "sign", "floor_divide"}
_SEQUENCES = frozenset(("query", "key", "value"))
# What makes queries and keys of inputs, whose scale is not theirs.
_LAYERS = {*_PRODUCTS, "convolution", "native_layer_norm", "embedding"}


@dataclass(frozen=True)
class Core:
    """Heads (N, L, D), N items and heads in one, not scaled, as they met; what they
    returned, (N, Lq, D); draws: how many of dropout came before that, first_draw:
    before queries met keys. own_scale: that of the scores is learned, or lost, or,
    where they are_cosines, that of cosines; queries are so that 1/√D would give the
    same. are_given: its scores are no plain products; queries and keys are made of
    them. is_elsewhere: its positions are not those of the inputs. is_shifted: numbers for each position were added on the way to them;
    is_turned: what they returned was multiplied by such. others: how many attentions of
    later layers there are. scores: what the softmax was given, (N, Lq, Lk), if it could
    be followed; is_biased: whether anything but a scale came between their product and
    it; product: that product, of which the bias is what is left; added: what it was
    added to that comes of nothing we know, as features of pairs. depth: how many
    attentions, one behind the other, its heads come of; sources: of which inputs
    queries, keys and values come; masked_by: which inputs have a part in the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor
    draws: int
    own_scale: bool = False
    are_cosines: bool = False
    is_shifted: bool = False
    is_turned: bool = False
    others: int = 0
    scores: Tensor | None = None
    is_biased: bool = False
    product: "_Product | None" = None
    added: Tensor | None = None
    depth: int = 0
    sources: tuple[frozenset[str], ...] = ()
    masked_by: frozenset[str] = frozenset()
    first_draw: int = 0
    are_given: bool = False
    is_elsewhere: bool = False

    @property
    def bias(self) -> Tensor | None:
        """What was added to the product in the scores, (N, Lq, Lk). It costs one more
        product."""
        if self.scores is None or self.product is None:
            return None
        return self.scores - self.product.scaled_scores()


@dataclass
class _Product:
    left: Tensor
    right: Tensor
    size: int
    # A learned number scales the scores.
    is_open: bool = False
    # What multiplied the scores up to the softmax, (N, 1, 1); None where nobody knows.
    factor: Tensor | float | None = 1.0
    is_biased: bool = False
    added: Tensor | None = None
    is_past: bool = False
    entered: Tensor | None = None  # the softmax
    first_draw: int = 0

    def shown(self) -> dict:
        """What a core keeps of the scores."""
        if self.entered is None or self.factor is None:
            return {}
        shape = (*self.left.shape[:-1], self.right.shape[-1])
        scores = self.entered.detach().reshape(shape)
        added = self.added if self.added is None else self.added.reshape(shape)
        shown = {"scores": scores, "is_biased": self.is_biased, "added": added}
        return shown | {"product": self}

    def scaled_scores(self) -> Tensor:
        return (self.left @ self.right).detach() * self.factor

    def scaled(self, name: str, args: tuple, scores: Tensor) -> "_Product":
        """The same, multiplied or divided by a number, or by one for each head."""
        if self.is_past or self.factor is None or len(args) < 2:
            return self
        by = args[1] if args[0] is scores else args[0]
        if isinstance(by, Tensor):
            by = by.detach()
            if by.numel() > 1 and by.shape[-2:] != (1, 1):
                return replace(self, factor=None)
            by = by.expand(*scores.shape[:-2], 1, 1).reshape(-1, 1, 1)
        return replace(self, factor=self.factor * by ** _SCALES[name])


@dataclass
class Cores:
    """Finds them, operation by operation."""

    found: list[Core] = field(default_factory=list)
    # What tensors were multiplied by, and those whose scale nobody can tell: a learned
    # number has scaled them, or something was done to them after they were scaled.
    _factors: dict[Place, float] = field(default_factory=dict)
    _open: set[Place] = field(default_factory=set)
    # The product of which a tensor holds the scores or weights.
    _scores: dict[Place, _Product] = field(default_factory=dict)
    # Storages of which a part was scaled in place.
    _mixed: set[int] = field(default_factory=set)
    # What was multiplied, one by one.
    _multiplied: dict[Place, tuple[Tensor, ...]] = field(default_factory=dict)
    # Storages of what comes of the contexts, and of how many, one behind the other.
    _behind: dict[int, int] = field(default_factory=dict)
    # Storages of what has numbers for each position in it.
    _shifted: set[int] = field(default_factory=set)
    # Whether what comes of the contexts was multiplied by such numbers.
    is_turned: bool = False
    # Whether what comes of the contexts went through an activation, or met what was
    # projected, as the queries that a set transformer adds.
    has_layers: bool = False
    # Whether anything was rounded to steps, whose gradient is 0 and tells nothing.
    has_steps: bool = False
    # Whether weights, behind their softmax, were filled as scores are.
    fills_weights: bool = False
    # What they add up to where they are summed with.
    sums: Sums = field(default_factory=Sums)

    @property
    def contexts(self) -> list[Tensor]:
        """What the heads return."""
        return [one.context for one in self.found]

    def note(
        self, name: str, args: tuple, kwargs: dict, operands, results, recorder
    ) -> None:
        """One operation. operands: all tensors among its arguments; recorder: it knows
        of what tensors are made."""
        if not results or not operands:
            return
        self.sums.note(name, args, operands, results, recorder)
        self._note_shift(name, operands, results, recorder)
        self.has_steps |= name.rstrip("_") in _STEPS and operands[0].is_floating_point()
        if depth := self._depth(operands):
            self._behind |= {storage(result): depth for result in results}
            self.is_turned |= name == "mul" and _meets_positions(operands, recorder)
            self.has_layers |= name.rstrip("_") in _ACTIVATIONS or (
                name in ("add", "add_") and self._meets_projected(operands, recorder)
            )
        if name.startswith("_scaled_dot_product") and len(operands) >= 3:
            self._note_fused(operands[:3], results[0], kwargs.get("scale"), recorder)
            return
        self._note_scale(name, args, operands, results, recorder)
        if name in _PRODUCTS and len(operands) >= 2:
            self._note_product(*operands[-2:], results[0], recorder)
            if name in _SUMMED and (product := self._scores.get(place(results[0]))):
                self._scores[place(results[0])] = replace(product, is_biased=True)
            return
        if name == "mul" and len(operands) == 2:
            self._note_diagonal(operands, results[0], recorder)
            if all(recorder.origin(t).inputs & _SEQUENCES for t in operands):
                self._multiplied[place(results[0])] = (*operands,)
        if name == "sum" and place(operands[0]) in self._multiplied:
            self._note_sum(args, operands[0], results[0])
        for tensor in operands:
            product = self._scores.get(place(tensor))
            if product is None:
                continue
            # Each tensor has its own: the scores may also be used elsewhere.
            if name not in _NO_BIAS and not product.is_past:
                rest = [t for t in operands if t is not tensor] * (name in _SUMS)
                of_none = (t for t in rest if not recorder.origin(t).inputs)
                whole = (t.detach() for t in of_none if t.numel() == product.size)
                added = next(whole, product.added)
                product = replace(product, is_biased=True, added=added)
            self.fills_weights |= product.is_past and _fills_least(name, args)
            if name in _SOFTMAX:
                entered = tensor if product.entered is None else product.entered
                product = replace(product, is_past=True, entered=entered)
            if name in _SCALES:
                product = product.scaled(name, args, tensor)
                is_open = product.is_open or any(map(recorder.is_learned, operands))
                product = replace(product, is_open=is_open)
            for result in results:
                if result.numel() == product.size and result.is_floating_point():
                    self._scores[place(result)] = product

    def _note_shift(self, name: str, operands, results, recorder) -> None:
        """Whether numbers for each position, which no input has a part in, are added."""
        shifts = any(storage(t) in self._shifted for t in operands)
        if shifts or name in _SUMS and _meets_positions(operands, recorder):
            self._shifted |= {storage(result) for result in results}

    def _note_fused(
        self, three: list[Tensor], result: Tensor, scale: float | None, recorder
    ) -> None:
        query, key = three[:2]
        own = self._is_scaled_otherwise(query, key)
        root = query.shape[-1] ** 0.5
        plain = [t if own else self._plain(t) for t in three]
        heads = [_folded(_repeated(t, query)) for t in plain]
        if own and scale is not None:
            heads[0] = heads[0] * scale * root
        facts = own, _are_unit(self._plain(query), key), self._is_shifted(query, key)
        self._add(*heads, result, recorder, three, *facts)

    def _depth(self, tensors) -> int:
        return max((self._behind.get(storage(t), 0) for t in tensors), default=0)

    def _is_shifted(self, query: Tensor, key: Tensor) -> bool:
        return storage(query) in self._shifted or storage(key) in self._shifted

    def _note_product(
        self, left: Tensor, right: Tensor, result: Tensor, recorder
    ) -> None:
        if not (recorder.origin(left).inputs and recorder.origin(right).inputs):
            return
        left, right, result = map(_batched, (left, right, result))
        for weights, value, turned in ((left, right, False), (right, left, True)):
            product = self._scores.get(place(weights))
            if product is None or weights.numel() != product.size:
                continue
            if turned:
                value, result = value.mT, result.mT
            self._close(
                product, weights.mT if turned else weights, value, result, recorder
            )
            return
        product = _Product(left, right, result.numel(), first_draw=len(recorder.draws))
        self._scores[place(result)] = product

    def _note_sum(self, args: tuple, products: Tensor, result: Tensor) -> None:
        """Scores that are written out, (q * k).sum(-1)."""
        shape, axis = products.shape, axes.summed_axis(args, products.dim())
        left, right = self._multiplied[place(products)]
        known = any(place(t) in self._scores for t in (left, right))
        if axis is None or left is right or known:
            return
        left, right = (axes.whole(t, shape, axis) for t in (left, right))
        if left.shape[axis] != right.shape[axis]:
            return
        one = axes.of_product(shape, axis, left, right)
        heads = (
            one.folded(left, one.first, [axis]),
            one.folded(right, [axis], one.second),
        )
        self._scores[place(result)] = _Product(*heads, result.numel())

    def _note_diagonal(self, operands, result: Tensor, recorder) -> None:
        """The weight of each query's own key times its own value, as an einsum has it
        whose term has a letter twice. Its axes are told apart by their strides."""
        for own, value in (operands, operands[::-1]):
            product, depth = self._scores.get(place(own)), own.dim()
            if product is None or not product.is_past or depth != value.dim():
                continue
            length = product.left.shape[1]
            if own.numel() * length != product.size or value.shape != result.shape:
                continue
            steps = own.stride()
            rows = [a for a in range(depth) if steps[a] == length + 1]
            features = [a for a in range(depth) if own.shape[a] == 1 < value.shape[a]]
            if len(rows) != 1 or len(features) != 1:
                continue
            rest = [a for a in range(depth) if a not in (*rows, *features)]
            order = [*sorted(rest, key=lambda a: -steps[a]), *rows, *features]
            heads, context = (_folded(t.permute(order)) for t in (value, result))
            self._close(product, heads, heads, context, recorder)
            self._behind[storage(result)] = self.found[-1].depth + 1
            return

    def _close(
        self,
        product: _Product,
        weights: Tensor,
        value: Tensor,
        result: Tensor,
        recorder,
    ) -> None:
        query, key = product.left, product.right.mT
        if query.shape[1] != weights.shape[1]:  # the keys were multiplied with queries
            query, key = key, query
            product = replace(product, entered=None)
        heads = query, key, value
        own = product.is_open or self._is_scaled_otherwise(query, key)
        facts = own, _are_unit(self._plain(query), key), self._is_shifted(query, key)
        if not own:
            query, key = self._plain(query), self._plain(key)
        elif product.factor is None:
            return
        else:
            query = query * product.factor * query.shape[-1] ** 0.5
        self._add(query, key, value, result, recorder, heads, *facts)
        scores = product.entered if product.entered is not None else weights
        masked_by = recorder.origin(scores).inputs
        shown = product.shown() | {"masked_by": masked_by}
        shown |= {"first_draw": product.first_draw}
        self.found[-1] = replace(self.found[-1], **shown)

    def _add(self, query, key, value, context, recorder, heads, *facts: bool) -> None:
        """heads: the same three as the code has them, which the recorder knows."""
        kept = [t.detach() for t in (query, key, value)]
        depth = self._depth(heads)
        sources = tuple(recorder.origin(t).inputs & _SEQUENCES for t in heads)
        self._behind[storage(context)] = depth + 1
        context = _folded(context.detach()).clone()
        one = Core(*kept, context, len(recorder.draws), *facts)
        self.found.append(replace(one, depth=depth, sources=sources))

    def follow(self, context: Tensor, operands) -> None:
        """Follows what comes of a context that something else has found."""
        self._behind[storage(context)] = self._depth(operands) + 1

    @property
    def are_several(self) -> bool:
        """Whether they are those of several attentions, as of a block."""
        return len(attentions(self.found)) > 1

    def _meets_projected(self, operands: list[Tensor], recorder) -> bool:
        """Whether one of these comes of an input by a matrix, and of no context."""
        others = [t for t in operands if storage(t) not in self._behind]
        return any(
            recorder.origin(t).inputs and recorder.origin(t).weights for t in others
        )

    def reaches(self, out: Tensor) -> bool:
        """Whether what the heads returned has a part in it."""
        return storage(out) in self._behind

    def _note_scale(self, name, args, operands, results, recorder) -> None:
        """Scaling before the product is part of the scores' scale."""
        data = next((t for t in operands if recorder.origin(t).inputs), operands[0])
        scales = {
            (self._factors.get(place(t), 1.0), self._is_open(t)) for t in operands
        }
        factor, is_open = self._factors.get(place(data), 1.0), self._is_open(data)
        if name in _SCALES and len(args) > 1:
            by = args[1] if args[0] is data else args[0]
            number = self._number(by, recorder)
            if number is not None:
                factor *= number ** _SCALES[name]
            else:
                few = by.numel() < data.shape[-1] or bool(recorder.origin(by).inputs)
                factor, is_open = 1.0, is_open or few or factor != 1.0
            if name.endswith("_") and data.nbytes < data.untyped_storage().nbytes():
                self._mixed.add(storage(data))
        elif name in _LAYERS:
            factor, is_open = 1.0, False
        elif name not in _SAME and len(scales) > 1 or name not in _SAME | _JOINS:
            factor, is_open = 1.0, scales != {(1.0, False)}
        for result in results:
            self._factors[place(result)] = factor
            (self._open.add if is_open else self._open.discard)(place(result))

    @staticmethod
    def _number(by: object, recorder) -> float | None:
        """What it is multiplied by, if that is one number, and no learned one."""
        if isinstance(by, Tensor):
            known = by.dim() == 0 and not recorder.origin(by).inputs
            return float(by) or None if known and not recorder.is_learned(by) else None
        return float(by) or None if isinstance(by, (int, float)) else None

    def _is_open(self, tensor: Tensor) -> bool:
        return place(tensor) in self._open or storage(tensor) in self._mixed

    def _is_scaled_otherwise(self, query: Tensor, key: Tensor) -> bool:
        """Whether it is not for the scores to scale them: their scale is learned or
        lost, or both are of length 1, so that they meet in a cosine."""
        if self._is_open(query) or self._is_open(key):
            return True
        return _are_unit(self._plain(query), key)

    def _plain(self, tensor: Tensor) -> Tensor:
        factor = self._factors.get(place(tensor), 1.0)
        return tensor if factor in (0.0, 1.0) else tensor / factor


def _meets_positions(operands: list[Tensor], recorder) -> bool:
    """Whether data meets numbers of no input that differ from row to row: a bias or a
    gain of features has one row alone."""
    data = [t for t in operands if recorder.origin(t).inputs]
    rest = [t for t in operands if not recorder.origin(t).inputs]
    if len(data) != 1 or len(rest) != 1:
        return False
    table = rest[0]
    return table.dim() >= 2 and table.shape[-1] == data[0].shape[-1] < table.numel()


def _are_unit(*heads: Tensor) -> bool:
    """Whether all are of length 1, so that they meet in a cosine."""
    lengths = (t.detach().norm(dim=-1) for t in heads)
    return all(bool((norm - 1).abs().max() < 1e-4) for norm in lengths)


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _folded(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _repeated(heads: Tensor, like: Tensor) -> Tensor:
    """A key/value head for each query head that reads it, (B, H, L, D)."""
    shared = like.shape[1] // heads.shape[1] if like.dim() == 4 else 1
    return heads.repeat_interleave(shared, 1) if shared > 1 else heads


def _fills_least(name: str, args: tuple) -> bool:
    """Whether part of a tensor becomes what is meant for scores: -inf, -1e9; also by a
    mask that is added."""
    filled = args[1:3] if name.startswith(("masked_fill", "where")) else ()
    of_one = [v for v in filled if not isinstance(v, Tensor) or v.numel() == 1]
    added = [v for v in args[:2] if name in _SUMS and isinstance(v, Tensor)]
    of_one += [v.detach().min() for v in added if v.numel()]
    return any(float(value) <= _LEAST for value in of_one)


def of_first(found: list[Core]) -> list[Core]:
    """The first alone, which knows how many there are."""
    return [replace(one, others=len(found) - 1) for one in found[:1]]


def attentions(found: list[Core]) -> list[list[Core]]:
    """The cores of each attention of a block, one behind the other or of other inputs;
    those of a loop over heads are one attention's."""
    several: list[list[Core]] = []
    for core in found:
        kind = core.depth, core.sources
        if several and kind == (several[-1][-1].depth, several[-1][-1].sources):
            several[-1].append(core)
        else:
            several.append([core])
    return several


def joined(found: list[Core], batch: int, queries: int) -> Core | None:
    """The only core, or the first of several layers; or those of a loop over heads as
    one: its tensors as (B, H, L, D). None where there is none, or where it cannot be
    told which is meant."""
    found = [_unfolded(core, batch, queries) for core in found]
    fitting = [core for core in found if _fits(core, batch, queries)]
    if not fitting or len(fitting) != len(found):
        return None
    first = fitting[0]
    alike = all(
        a.shape == b.shape
        for core in fitting
        for a, b in zip(_tensors(core), _tensors(first))
    )
    if not alike:
        return None
    others = 0
    if len(first.query) != batch:
        others, fitting = len(fitting) - 1, fitting[:1]
    looped = len(fitting) > 1
    heads = [
        torch.stack(parts, 1) if looped else parts[0].unflatten(0, (batch, -1))
        for parts in zip(*map(_tensors, fitting))
    ]
    facts = ("own_scale", "are_cosines", "is_shifted", "is_biased", "are_given")
    known = {fact: any(getattr(core, fact) for core in fitting) for fact in facts}
    known["first_draw"] = fitting[0].first_draw
    known["masked_by"] = frozenset().union(*(core.masked_by for core in fitting))
    others += fitting[0].others
    for name in ("scores", "added"):
        shown = [t for core in fitting if (t := getattr(core, name)) is not None]
        if len(shown) == len(fitting):
            known[name] = (
                torch.stack(shown, 1) if looped else shown[0].unflatten(0, (batch, -1))
            )
    drops = any(core.draws != core.first_draw for core in fitting)  # and not between
    draws = fitting[-1].draws if drops else fitting[0].first_draw
    return Core(*heads, draws, **known, others=others)


def elsewhere(found: list[Core]) -> Core | None:
    """The same of heads whose items and positions are not those of the inputs, as channels
    or the frames of each pixel: of as many items, each of which is a head."""
    if not found:
        return None
    count, length, _ = found[0].query.shape
    one = joined(found, count, length)
    return one and replace(one, is_elsewhere=True)


def _unfolded(core: Core, batch: int, queries: int) -> Core:
    """Queries of all heads, one after the other, that share keys and values."""
    count, length, _ = core.query.shape
    heads, rest = divmod(length, queries)
    if count != batch or heads < 2 or rest or core.context.shape[1] != length:
        return core
    query, context = (
        t.unflatten(1, (heads, queries)).flatten(0, 1)
        for t in (core.query, core.context)
    )
    key, value = (t.repeat_interleave(heads, 0) for t in (core.key, core.value))
    heads = dict(query=query, key=key, value=value, context=context)
    return replace(core, **heads, scores=None, product=None, added=None)


def _fits(core: Core, batch: int, queries: int) -> bool:
    count, length, width = core.query.shape
    return (
        count % batch == 0
        and length == queries
        and core.key.shape == (count, core.key.shape[1], width)
        and core.value.shape[:2] == core.key.shape[:2]
        and core.context.shape == (count, queries, core.value.shape[-1])
    )


def _tensors(core: Core) -> tuple[Tensor, ...]:
    return core.query, core.key, core.value, core.context


def scores_of_fused(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """What PyTorch's fused attention computes inside, before any mask."""
    shared = query.shape[1] // key.shape[1]  # queries to a head of keys
    products = query.detach() @ key.detach().repeat_interleave(shared, dim=1).mT
    return products * (query.shape[-1] ** -0.5 if scale is None else scale)
