# SPDX-License-Identifier: MIT
"""Whether what a softmax made is summed with along the axis on which it adds up to 1,
in attention of any kind: scores of a product, of a sum through tanh, of a graph's edges.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .places import CUTS, SHOWS_ALL, Place, place

_SOFTMAX = ("_softmax", "_safe_softmax")
_MASKS = ("mul", "mul_", "masked_fill", "masked_fill_", "where")
_NOTHING, _ROUNDING = 1e-9, 1e-7
_OF_MASKS = frozenset(("mask", "key_padding_mask"))


@dataclass
class Sums:
    """Follows weights, operation by operation, from their softmax to the sum that they
    are the factors of. are_one: of each such sum, whether they add up to 1 in it."""

    are_one: list[bool] = field(default_factory=list)
    is_cut: bool = False  # parts of weights are used for themselves
    # Of each softmax of what inputs have a part in, whether it weighs all alike.
    are_alike: list[bool] = field(default_factory=list)
    # Of those that a mask of the call has met behind the softmax.
    masked_are_one: list[bool] = field(default_factory=list)
    is_averaged: bool = False  # values times weights are averaged, not summed
    _masked: set[Place] = field(default_factory=set)
    # Weights, and how many there are: a part of them begins at the same place.
    _weights: dict[Place, int] = field(default_factory=dict)
    # What weights were multiplied with, one by one, and these weights.
    _terms: dict[Place, Tensor] = field(default_factory=dict)

    @property
    def are_astray(self) -> bool:
        """Whether there are such sums, and in none of them the factors add up to 1;
        weights that are cut may add up to 1 together."""
        return bool(self.are_one) and not any(self.are_one) and not self.is_cut

    def note(self, name: str, args: tuple, operands, results, recorder) -> None:
        """One operation. operands: all tensors among its arguments; recorder: it knows
        what is computed of inputs. Learned numbers mix heads, and are not weighed."""
        first = operands[0]
        if name in _SOFTMAX:
            self._weights[place(results[0])] = results[0].numel()
            if recorder.origin(first).inputs and first.shape[args[1]] > 1:
                self.are_alike.append(_are_alike(first, results[0], args[1]))
        elif name in _MASKS and self._meet_masks(operands, recorder):
            self._masked.add(place(results[0]))
        elif name in SHOWS_ALL and self._are_weights(first):
            self._weights[place(results[0])] = results[0].numel()
        elif name in CUTS and self._are_weights(first):
            self.is_cut |= any(one.numel() < first.numel() for one in results)
        elif name in ("mm", "bmm", "baddbmm", "addmm"):
            left, right = operands[-2:]
            self._note_product(left, right, -1, recorder)
            self._note_product(right, left, -2, recorder)
        elif name == "mul" and len(operands) == 2:
            known = [t for t in operands if self._are_weights(t)]
            both = all(recorder.origin(t).inputs for t in operands)
            if len(known) == 1 and both:
                self._terms[place(results[0])] = known[0].expand(results[0].shape)
        elif name in ("sum", "mean"):
            terms = self._terms.get(place(first))
            if terms is None or terms.shape != first.shape:
                return
            if len(args) > 1 and args[1] and name == "sum":
                self._note_sum(terms, args[1])
            elif len(args) > 1 and args[1]:
                self.is_averaged |= _add_up(terms, args[1])

    def _note_product(self, one: Tensor, other: Tensor, axis: int, recorder) -> None:
        """axis: the one that is summed over."""
        if not recorder.origin(other).inputs or self._are_weights(other):
            return
        if place(one) in self._masked:
            self.masked_are_one.append(_add_up(one, axis, or_nothing=True))
        if self._are_weights(one):
            self._note_sum(one, axis)

    def _are_weights(self, tensor: Tensor) -> bool:
        return self._weights.get(place(tensor), tensor.numel() + 1) <= tensor.numel()

    def _meet_masks(self, operands: list[Tensor], recorder) -> bool:
        """Whether weights meet what comes of masks of the call alone."""
        rest = [t for t in operands if not self._are_weights(t)]
        origins = [recorder.origin(t).inputs for t in rest]
        is_mask = any(origins) and all(inputs <= _OF_MASKS for inputs in origins)
        return len(rest) < len(operands) and is_mask

    def _note_sum(self, weights: Tensor, axes) -> None:
        axes = [axes] if isinstance(axes, int) else list(axes)
        if math.prod(weights.shape[axis] for axis in axes) > 1:  # else it is no sum
            self.are_one.append(_add_up(weights, axes))


def _are_alike(scores: Tensor, weights: Tensor, axis: int) -> bool:
    """Whether all that is weighed has the same weight, or none, though scores of others
    differ."""
    scores, weights = scores.detach(), weights.detach()
    largest = weights.amax(axis, keepdim=True)
    if not bool(((largest - weights < _ROUNDING) | ~(weights > _NOTHING)).all()):
        return False
    seen = weights > _NOTHING
    if bool((seen.sum(axis) < 2).all()):
        return False
    return bool(scores[seen].max() - scores[seen].min() > _ROUNDING)


def _add_up(weights: Tensor, axes, or_nothing: bool = False) -> bool:
    """Whether they are 1 together; or_nothing: or 0, as in rows of padding."""
    total = weights.detach().sum(axes)
    if or_nothing:
        total = torch.where(total == 0, 1.0, total)
    return torch.allclose(total, torch.ones_like(total), atol=1e-3)
