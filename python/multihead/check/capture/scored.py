# SPDX-License-Identifier: MIT
"""The core of attention whose scores are no plain products of queries and keys: the
additive attention of Bahdanau et al. (2015), that of graphs (Veličković et al., 2018),
pooling by one learned vector; or products with more than a bias, as of relative positions
(Dai et al., 2019). Its scores are taken as its masks, or its softmax, find them: from
there on it does what any attention does.

As heads, they are queries whose keys are the unit vectors: S = (S √Lk) Iᵀ / √Lk.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import axes
from .core import Core, of_first
from .places import CUTS, SHOWS_ALL, Place, place, storage

_SOFTMAX = {"_softmax", "_safe_softmax", "exp"}
_PRODUCTS = {"mm", "bmm", "baddbmm", "addmm"}
_FILLS = {"masked_fill", "masked_fill_", "where"}
_COPIES = {"clone", "_to_copy", "contiguous", "detach", "alias", "copy"}
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "reshape"}
_View = tuple[Place, torch.Size, tuple[int, ...]]
_SEQUENCES = frozenset(("query", "key", "value"))
_LEAST = -1e30  # in the place of -inf, which times 0 is NaN


@dataclass(frozen=True)
class _Weights:
    """What is known of a tensor of masked scores or of weights: the scores, in its own
    shape, before they met a mask of the call, unless that filled them in place; whether
    it is past the softmax; how many draws of dropout there were before that; which masks
    have a part in it."""

    scores: Tensor
    is_past: bool
    first_draw: int
    masked_by: frozenset[str]
    of_products: bool


@dataclass
class Scored:
    """Finds them, operation by operation. of_products: those whose scores come of a
    product of two sequences."""

    found: list[Core] = field(default_factory=list)
    of_products: list[Core] = field(default_factory=list)
    # The weights that scores come of.
    made_by: set[Place] = field(default_factory=set)
    _known: dict[_View, _Weights] = field(default_factory=dict)
    # What weights were multiplied with, one by one: they, and what is known of them.
    _terms: dict[Place, tuple[_Weights, Tensor, Tensor]] = field(default_factory=dict)
    # Where two sequences were multiplied, one by one; storages of what comes of their
    # products.
    _multiplied: set[Place] = field(default_factory=set)
    _products: set[int] = field(default_factory=set)

    def note(
        self, function: Callable, args: tuple, kwargs: dict, operands, results, recorder
    ) -> bool:
        """One operation; whether it closes a core, whose context is its first result.
        operands: all tensors among its arguments; recorder: it knows of what tensors are
        made."""
        if not results or not operands:
            return False
        name = function.overloadpacket.__name__  # type: ignore[attr-defined]
        closed, of_products = self._closed(name, args, operands, results[0], recorder)
        if closed is not None:
            (self.of_products if of_products else self.found).append(closed)
            return True
        data = [t for t in operands if recorder.origin(t).inputs & _SEQUENCES]
        self._note_products(name, data, operands, results)
        if (known := self._of(name, data, operands, recorder)) is not None:
            self._follow(function, args, kwargs, known, results)
        return False

    def keep_first(self) -> None:
        self.found, self.of_products = of_first(self.found), of_first(self.of_products)

    def _note_products(self, name: str, data, operands, results) -> None:
        met = name in _PRODUCTS and len(data) > 1
        met |= name == "sum" and place(operands[0]) in self._multiplied
        if met or any(storage(t) in self._products for t in data):
            self._products |= {storage(result) for result in results}
        if name not in ("mul", "mul_") or len(data) != 2 or data[0] is data[1]:
            return
        self._multiplied.add(place(results[0]))
        for weights, value in (data, data[::-1]):
            known = self._known_of(weights)
            if known is not None and known.is_past:
                self._terms[place(results[0])] = known, weights, value

    def _known_of(self, tensor: Tensor) -> _Weights | None:
        return self._known.get(_view(tensor))

    def _of(self, name: str, data, operands, recorder) -> _Weights | None:
        """What is known of an operation's result, if that has the shape of its operand:
        it begins where a mask or a softmax meets what comes of sequences, and ends where
        masked scores become anything else."""
        inputs = [recorder.origin(t).inputs for t in operands]
        masks = frozenset().union(*inputs) - _SEQUENCES
        of_masks = any(one and not one & _SEQUENCES for one in inputs)
        is_masked = of_masks or name in _FILLS
        moved = name in SHOWS_ALL | CUTS | _COPIES
        for tensor in operands:
            known = self._known_of(tensor)
            if known and (known.is_past or is_masked or moved or name in _SOFTMAX):
                past = known.is_past or name in _SOFTMAX
                met = known.masked_by | masks
                return replace(known, is_past=past, masked_by=met)
        if len(data) != 1 or not (is_masked or name in _SOFTMAX):
            return None
        scores = data[0].detach().clone()
        if name == "add_" and of_masks:
            added = next(t for t in operands if t is not data[0]).detach()
            scores = torch.where(added.isfinite(), scores - added.to(scores.dtype), 0.0)
        self.made_by.update(recorder.origin(data[0]).weights)
        draws, of_products = len(recorder.draws), storage(data[0]) in self._products
        return _Weights(scores, name in _SOFTMAX, draws, masks, of_products)

    def _follow(self, function, args, kwargs, known: _Weights, results) -> None:
        name, scores = function.overloadpacket.__name__, known.scores
        if name in _VIEWS:
            shown = [scores.reshape(results[0].shape)]
        elif name in SHOWS_ALL | CUTS and name not in _COPIES:
            moved = function(scores, *args[1:], **kwargs)
            shown = list(moved) if isinstance(moved, (tuple, list)) else [moved]
        else:
            shown = [scores] * (results[0].shape == scores.shape)
        for result, one in zip(results, shown):
            if result.is_floating_point():
                self._known[_view(result)] = replace(known, scores=one)

    def _closed(
        self, name, args, operands, result, recorder
    ) -> tuple[Core | None, bool]:
        """The core whose context this is: weights times values, or their sum; and whether
        its scores are of products."""
        if name in _PRODUCTS and len(operands) >= 2:
            left, right = operands[-2:]
            for weights, value, turned in ((left, right, False), (right, left, True)):
                known = self._known_of(weights)
                of_data = recorder.origin(value).inputs & _SEQUENCES
                if known is None or not known.is_past or not of_data:
                    continue
                parts = [known.scores, value, result]
                parts = [t if t.dim() == 3 else t.unsqueeze(0) for t in parts]
                parts = [t.mT if turned else t for t in parts]
                return _core(known, *parts, recorder), known.of_products
        terms = self._terms.get(place(operands[0])) if name == "sum" else None
        axis = axes.summed_axis(args, operands[0].dim()) if terms else None
        if terms is None or axis is None:
            return None, False
        known, weights, value = terms
        shape = operands[0].shape
        scores = axes.whole(known.scores, shape, axis, like=weights)
        value = axes.whole(value, shape, axis)
        one = axes.of_product(shape, axis, scores, value)
        keeps = result.dim() == operands[0].dim()
        context = result if keeps else result.unsqueeze(axis)
        scores = one.folded(scores, one.first, [axis])
        value = one.folded(value, [axis], one.second)
        context = one.folded(context, one.first, one.second)
        return _core(known, scores, value, context, recorder), known.of_products


def _view(tensor: Tensor) -> _View:
    """What is shown: views of one place have other axes."""
    return place(tensor), tensor.shape, tensor.stride()


def _core(
    known: _Weights, scores: Tensor, value: Tensor, context: Tensor, recorder
) -> Core | None:
    keys = scores.shape[-1]
    if value.shape[:2] != (len(scores), keys):
        return None
    seen = scores.clamp(min=max(_LEAST, torch.finfo(scores.dtype).min / keys))
    units = torch.eye(keys, dtype=scores.dtype).expand(len(scores), keys, keys)
    heads = seen * keys**0.5, units, value.detach(), context.detach().clone()
    facts = dict(own_scale=True, are_given=True, scores=scores)
    facts |= {"masked_by": known.masked_by, "first_draw": known.first_draw}
    return Core(*heads, len(recorder.draws), **facts)
