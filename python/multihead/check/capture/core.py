# SPDX-License-Identifier: MIT
"""The core of attention in a run, whatever stands around it: queries, keys and values
as they meet, and what comes of them, told by the two products.

The first product of two computed tensors is that of the scores; whatever follows of
as many numbers is scores or weights; the product of those with a third tensor is the
context.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..subject.holding import has_storage

_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "addbmm")
_SCALES = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
# What shows the same numbers, in another order perhaps.
_SAME = {"view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "permute"}
_SAME |= {"transpose", "t", "unsqueeze", "squeeze", "clone", "_to_copy", "contiguous"}
_SAME |= {"detach", "alias", "copy", "slice", "select", "split", "unbind", "index"}
_SAME |= {"split_with_sizes", "chunk", "as_strided", "repeat", "cat", "stack"}


@dataclass(frozen=True)
class Core:
    """Heads (N, L, D), N items and heads in one, not scaled, as they met; what they
    returned, (N, Lq, D); draws: how many of dropout came before that."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor
    draws: int


@dataclass
class _Product:
    left: Tensor
    right: Tensor
    size: int


@dataclass
class Cores:
    """Finds them, operation by operation."""

    found: list[Core] = field(default_factory=list)
    # What storages were multiplied by, and those that a learned number has scaled.
    _factors: dict[int, float] = field(default_factory=dict)
    _learned: set[int] = field(default_factory=set)
    # The product of which a storage holds the scores or weights.
    _scores: dict[int, _Product] = field(default_factory=dict)

    def note(self, name: str, args: tuple, results: list[Tensor], recorder) -> None:
        """One operation. recorder: it knows of what tensors are made."""
        tensors = [a for a in args if isinstance(a, Tensor) and has_storage(a)]
        if not results or not tensors:
            return
        if name.startswith("_scaled_dot_product") and len(tensors) >= 3:
            heads = [_repeated(self._plain(t), tensors[0]) for t in tensors[:3]]
            if not any(self._is_learned(t) for t in tensors[:2]):
                self._add(
                    *map(_folded, (*heads, results[0])), draws=len(recorder.draws)
                )
            return
        self._note_factor(name, args, tensors, results[0], recorder)
        if name in _PRODUCTS and len(tensors) >= 2:
            self._note_product(*tensors[-2:], results[0], recorder)
            return
        for tensor in tensors:
            product = self._scores.get(_key(tensor))
            if product is None:
                continue
            for result in results:
                if result.numel() == product.size and result.is_floating_point():
                    self._scores[_key(result)] = product

    def _note_product(
        self, left: Tensor, right: Tensor, result: Tensor, recorder
    ) -> None:
        if not (recorder.origin(left).inputs and recorder.origin(right).inputs):
            return
        left, right, result = map(_batched, (left, right, result))
        for weights, value, turned in ((left, right, False), (right, left, True)):
            product = self._scores.get(_key(weights))
            if product is None or weights.numel() != product.size:
                continue
            if turned:
                value, result = value.mT, result.mT
            self._close(
                product, weights.mT if turned else weights, value, result, recorder
            )
            return
        self._scores[_key(result)] = _Product(left, right, result.numel())

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
        if self._is_learned(query) or self._is_learned(key):
            return
        query, key = self._plain(query), self._plain(key)
        self._add(query, key, value, result, draws=len(recorder.draws))

    def _add(self, query, key, value, context, draws: int) -> None:
        kept = [t.detach() for t in (query, key, value)]
        self.found.append(Core(*kept, context.detach().clone(), draws))

    def _note_factor(self, name, args, tensors, result, recorder) -> None:
        """Scaling before the product is part of the scores' scale."""
        data, factor, learned = tensors[0], 1.0, False
        by = args[1] if name in _SCALES and len(args) > 1 else None
        if isinstance(by, Tensor) and not recorder.origin(data).inputs:
            data, by = by, data
        if by is not None or name in _SAME:
            factor = self._factors.get(_key(data), 1.0)
            learned = self._is_learned(data)
        if isinstance(by, Tensor):
            known = by.dim() == 0 and not recorder.origin(by).inputs
            if known and not recorder.is_learned(by):
                by = float(by)
            else:
                factor = 1.0
                learned = learned or by.numel() < data.shape[-1]
        if isinstance(by, (int, float)):
            factor *= float(by) ** _SCALES[name] if by else 1.0
        self._factors[_key(result)] = factor
        (self._learned.add if learned else self._learned.discard)(_key(result))

    def _is_learned(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._learned

    def _plain(self, tensor: Tensor) -> Tensor:
        factor = self._factors.get(_key(tensor), 1.0)
        return tensor if factor in (0.0, 1.0) else tensor / factor


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _folded(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _repeated(heads: Tensor, like: Tensor) -> Tensor:
    """A key/value head for each query head that reads it, (B, H, L, D)."""
    shared = like.shape[1] // heads.shape[1] if like.dim() == 4 else 1
    return heads.repeat_interleave(shared, 1) if shared > 1 else heads


def joined(found: list[Core], batch: int, queries: int) -> Core | None:
    """The only core; or those of a loop over heads as one: its tensors as (B, H, L, D).
    None where there is none, or where it cannot be told which is meant."""
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
    looped = len(fitting) > 1
    if not alike or (looped and len(first.query) != batch):
        return None
    heads = [
        torch.stack(parts, 1) if looped else parts[0].unflatten(0, (batch, -1))
        for parts in zip(*map(_tensors, fitting))
    ]
    return Core(*heads, draws=fitting[-1].draws)


def _unfolded(core: Core, batch: int, queries: int) -> Core:
    """Queries of all heads, one after the other, that share keys and values."""
    count, length, _ = core.query.shape
    heads, rest = divmod(length, queries)
    if count != batch or heads < 2 or rest:
        return core
    query, context = (
        t.unflatten(1, (heads, queries)).flatten(0, 1)
        for t in (core.query, core.context)
    )
    key, value = (t.repeat_interleave(heads, 0) for t in (core.key, core.value))
    return Core(query, key, value, context, core.draws)


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
