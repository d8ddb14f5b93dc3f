# SPDX-License-Identifier: MIT
"""Wrong in three ways or four, as first drafts are."""

import math

import torch
from attempts.steps import Attention
from attempts.wrong_two import PairSwappedAndJoinedByView


class UnscaledOverQueriesJoinedByView(Attention):
    def forward(self, query, key, value):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        w = (q @ k.mT).softmax(dim=-2)
        return self.W_o((w @ self.split(self.W_v(value))).reshape(query.shape))


class ViewInWidthAndInverted(Attention):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)

    def forward(self, Q, K, V, mask=None):
        """mask: 0 = blocked."""
        q, k, v = (
            self.split(self.W_q(Q)),
            self.split(self.W_k(K)),
            self.split(self.W_v(V)),
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(Q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 1, -1e9)
        return self.join(scores.softmax(-1) @ v)


class NothingRight(PairSwappedAndJoinedByView):
    """Four of them: q, v, k from a layer called qkv; scores multiplied; the softmax over
    the heads; and heads joined by a view."""

    def weights(self, q, k):
        return (q @ k.transpose(-2, -1) * q.size(-1) ** 0.5).softmax(dim=1)


def core_with_three(q, k, v, mask=None):
    """mask: 0 = blocked."""
    scores = q @ k.transpose(-2, -1) / q.size(-1)
    weights = torch.softmax(scores, dim=-2)
    if mask is not None:
        weights.masked_fill(mask == 0, 0.0)
    return weights @ v
