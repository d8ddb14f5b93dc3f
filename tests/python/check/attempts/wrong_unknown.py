# SPDX-License-Identifier: MIT
"""Wrong in ways that no catalogue lists: only the first stage can be told."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from attempts.steps import Attention


class CubedScores(Attention):
    def forward(self, x):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        attn = torch.softmax(self.scores(q, k) ** 3, dim=-1)
        return self.join(attn @ self.split(self.W_v(x)))


class KeysOfUnitLength(Attention):
    def forward(self, query, key, value):
        q = self.split(self.W_q(query))
        k = F.normalize(self.split(self.W_k(key)), dim=-1)
        attn = torch.softmax(self.scores(q, k), dim=-1)
        return self.join(attn @ self.split(self.W_v(value)))


class NoiseOnTheContext(Attention):
    """A regulariser that was never switched off, from a generator of its own."""

    def forward(self, x):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        context = torch.softmax(self.scores(q, k), dim=-1) @ self.split(self.W_v(x))
        draws = torch.Generator().manual_seed(1)
        noise = torch.randn(context.shape, generator=draws, dtype=context.dtype)
        return self.join(context + 0.1 * noise)


def last_key_dropped(q, k, v):
    """A range that ends one too early."""
    k, v = k[..., :-1, :], v[..., :-1, :]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.softmax(scores, dim=-1) @ v


class ValuesRectified(Attention):
    def forward(self, x):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        v = self.split(F.relu(self.W_v(x)))
        return self.join(torch.softmax(self.scores(q, k), dim=-1) @ v)
