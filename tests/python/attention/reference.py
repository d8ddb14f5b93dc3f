# SPDX-License-Identifier: MIT
"""Attention in float64 loops: the one reference of the Python tests.

Shares nothing with the library. Returns, beside each result, the same formula
on absolute values (the condition scale), by which errors are judged.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rules:
    """The arguments of scaled_dot_product_attention, as float64 arrays."""

    scale: float
    keep: np.ndarray | None = None  # (B, H, Lq, Lk), True = may attend
    bias: np.ndarray | None = None  # (B, H, Lq, Lk)
    is_causal: bool = False
    bottom_right: bool = False
    offsets: np.ndarray | None = None  # (B,), instead of an alignment
    window: tuple[int, int] = (-1, -1)
    key_lengths: np.ndarray | None = None  # (B,)
    key_mask: np.ndarray | None = None  # (B, Lk), True = may attend
    softcap: float | None = None
    slopes: np.ndarray | None = None  # (B, H)
    sinks: np.ndarray | None = None  # (H,)


@dataclasses.dataclass
class Result:
    """Results and their condition scales; `largest` is Λ, the largest |score|."""

    out: np.ndarray
    out_scale: np.ndarray
    weights: np.ndarray
    logsumexp: np.ndarray
    largest: float


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, rules: Rules) -> Result:
    """q (B, H, Lq, D), k (B, G, Lk, D), v (B, G, Lk, Dv), float64."""
    (B, H, Lq, _), (_, G, Lk, _) = q.shape, k.shape
    result = Result(
        out=np.zeros((B, H, Lq, v.shape[-1])),
        out_scale=np.zeros((B, H, Lq, v.shape[-1])),
        weights=np.zeros((B, H, Lq, Lk)),
        logsumexp=np.full((B, H, Lq), -np.inf),
        largest=0.0,
    )
    for b in range(B):
        n = Lk if rules.key_lengths is None else int(rules.key_lengths[b])
        offset = n - Lq if rules.bottom_right else 0
        if rules.offsets is not None:
            offset = int(rules.offsets[b])
        for h in range(H):
            for i in range(Lq):
                keys = [j for j in range(n) if _visible(rules, b, h, i, j, offset)]
                _row(
                    result,
                    (b, h, i),
                    q,
                    k[b, h // (H // G)],
                    v[b, h // (H // G)],
                    keys,
                    rules,
                    offset,
                )
    return result


def _visible(rules: Rules, b: int, h: int, i: int, j: int, offset: int) -> bool:
    left, right = rules.window
    return (
        (not rules.is_causal or j <= i + offset)
        and (left < 0 or j >= i + offset - left)
        and (right < 0 or j <= i + offset + right)
        and (rules.key_mask is None or bool(rules.key_mask[b, j]))
        and (rules.keep is None or bool(rules.keep[b, h, i, j]))
        and (rules.bias is None or rules.bias[b, h, i, j] != -np.inf)
    )


def _row(result, row, q, k, v, keys, rules, offset) -> None:
    b, h, i = row
    scores = []
    sink = -math.inf if rules.sinks is None else float(rules.sinks[h])
    for j in keys:
        s = rules.scale * float(q[row] @ k[j])
        size = abs(rules.scale) * float(np.abs(q[row]) @ np.abs(k[j]))
        if rules.softcap is not None:
            s = rules.softcap * math.tanh(s / rules.softcap)
        if rules.bias is not None:
            s += rules.bias[b, h, i, j]
            size += abs(rules.bias[b, h, i, j])
        if rules.slopes is not None:
            distance = rules.slopes[b, h] * abs(i + offset - j)
            s -= distance
            size += abs(distance)
        result.largest = max(result.largest, size)
        scores.append(s)
    top = max([*scores, sink], default=-math.inf)
    if top == -math.inf:
        return
    if sink > -math.inf:
        result.largest = max(result.largest, abs(sink))
    total = sum(math.exp(s - top) for s in [*scores, sink])
    result.logsumexp[row] = top + math.log(total)
    for j, s in zip(keys, scores, strict=True):
        weight = math.exp(s - top) / total
        result.weights[row][j] = weight
        result.out[row] += weight * v[j]
        result.out_scale[row] += weight * np.abs(v[j])
