# SPDX-License-Identifier: MIT
"""Sequences of different lengths: as one ragged batch, one by one, padded, in pages."""

import dataclasses
import itertools
import random
from typing import Any

import torch
from torch import Tensor

import multihead


def starts(lengths) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@dataclasses.dataclass
class Batch:
    """N sequences one after the other, and the rules of their call."""

    queries: list[int]
    keys: list[int]
    tensors: tuple[Tensor, Tensor, Tensor]
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return starts(self.queries), starts(self.keys)

    def with_gradients(self) -> "Batch":
        tensors = tuple(x.clone().requires_grad_() for x in self.tensors)
        rules = {
            name: x.clone().requires_grad_() if floats(x) else x
            for name, x in self.rules.items()
        }
        return dataclasses.replace(self, tensors=tensors, rules=rules)

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.tensors, *(x for x in self.rules.values() if floats(x))]

    def split(self):
        """(query, key, value, rules) of each sequence; (1, heads, L, D)."""
        for n, (q, k, v) in enumerate(
            zip(
                self.tensors[0].split(self.queries),
                self.tensors[1].split(self.keys),
                self.tensors[2].split(self.keys),
                strict=True,
            )
        ):
            rules = {
                name: x[n : n + 1] if is_per_sequence(name, x) else x
                for name, x in self.rules.items()
            }
            yield *(x.transpose(0, 1)[None] for x in (q, k, v)), rules


def floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def is_per_sequence(name: str, x: Any) -> bool:
    return name == "key_lengths" or (name == "alibi_slopes" and x.dim() == 2)


def make(queries, keys, heads=(4, 2), widths=(16, 16), dtype=torch.float32, **rules):
    (H, G), (D, Dv) = heads, widths
    tensors = (
        torch.randn(sum(queries), H, D).to(dtype),
        torch.randn(sum(keys), G, D).to(dtype),
        torch.randn(sum(keys), G, Dv).to(dtype),
    )
    return Batch(list(queries), list(keys), tensors, rules)


def ragged(batch: Batch, **more):
    return multihead.varlen_attention(
        *batch.tensors, *batch.bounds, **batch.rules, **more, return_lse=True
    )


def one_by_one(batch: Batch):
    """The same by one call of scaled_dot_product_attention for each."""
    alignment = batch.rules.get("causal_alignment", "bottom_right")
    results = [
        multihead.scaled_dot_product_attention(
            *tensors,
            **(rules | {"causal_alignment": alignment}),
            enable_gqa=True,
            return_lse=True,
        )
        for *tensors, rules in batch.split()
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat([x[0] for x in outs], 1).transpose(0, 1), torch.cat(
        [x[0] for x in lses], 1
    )


def padded(batch: Batch):
    """The same in one padded call. Rules: top_left, since queries are padded too."""

    def pad(x, lengths):
        rows = x.split(lengths)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)

    lengths = batch.rules.get(
        "key_lengths", torch.tensor(batch.keys, dtype=torch.int64)
    )
    out, lse = multihead.scaled_dot_product_attention(
        pad(batch.tensors[0], batch.queries),
        *(pad(x, batch.keys) for x in batch.tensors[1:]),
        **(batch.rules | {"key_lengths": lengths}),
        enable_gqa=True,
        return_lse=True,
    )
    own = [(n, length) for n, length in enumerate(batch.queries)]
    return (
        torch.cat([out[n, :, :length] for n, length in own], 1).transpose(0, 1),
        torch.cat([lse[n, :, :length] for n, length in own], 1),
    )


def in_pages(batch: Batch, page: int, filler: float = float("nan")):
    """Keys and values in pages of any order, and the arguments that say so. What no
    sequence has is `filler`, and unused entries of the table name no page."""
    counts = [-(-length // page) for length in batch.keys]
    numbers = random.Random(page).sample(range(sum(counts) + 2), sum(counts))
    table = torch.full((len(counts), max(counts, default=0) + 1), -7, dtype=torch.int32)
    pools = [
        torch.full((sum(counts) + 2, page, *x.shape[1:]), filler, dtype=x.dtype)
        for x in batch.tensors[1:]
    ]
    at = 0
    for n, count in enumerate(counts):
        for i in range(count):
            table[n, i] = numbers[at]
            at += 1
            for pool, x in zip(pools, batch.tensors[1:], strict=True):
                rows = x.split(batch.keys)[n][i * page : (i + 1) * page]
                pool[table[n, i], : len(rows)] = rows
    lengths = batch.rules.get(
        "key_lengths", torch.tensor(batch.keys, dtype=torch.int64)
    )
    return pools, {"block_table": table, "key_lengths": lengths}


def paged(batch: Batch, page: int, **more):
    pools, places = in_pages(batch, page)
    return multihead.varlen_attention(
        batch.tensors[0],
        *pools,
        batch.bounds[0],
        **(batch.rules | places),
        **more,
        return_lse=True,
    )
