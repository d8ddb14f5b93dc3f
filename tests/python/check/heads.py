# SPDX-License-Identifier: MIT
"""A layer with the usual projections, for code that does something else with its heads."""

from torch import nn


class Heads(nn.Module):
    """Projections q, k, v and o, `dim` wide."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def cut(self, x):
        """(B, L, H·D) as (B, H, L, D)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def heads(self, query, key=None, value=None):
        """Queries, keys and values (B, H, L, D), of one input or of three."""
        key = query if key is None else key
        value = key if value is None else value
        return self.cut(self.q(query)), self.cut(self.k(key)), self.cut(self.v(value))

    def merged(self, heads):
        """(B, H, L, D), merged and projected: (B, L, H·D)."""
        return self.o(heads.transpose(1, 2).flatten(2))
