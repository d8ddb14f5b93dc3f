# SPDX-License-Identifier: MIT
"""Heads that are cut from a fused projection in orders of their own, or otherwise than
usual, and then normed or turned by their positions."""

import torch
from attempts.rotary import Turned, turn
from attempts.steps import Attention
from torch import nn


class HeadByHead(Turned):
    """q, k and v of head 0, then those of head 1, as GPT-NeoX has them."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.W_q, self.W_k, self.W_v
        self.W_qkv = nn.Linear(d_model, 3 * d_model)
        self.norms = nn.ModuleList(map(self.make_norm, range(2)))

    def make_norm(self, _):
        return nn.Identity()

    def qkv(self, x):
        heads = self.W_qkv(x).unflatten(-1, (self.num_heads, 3 * self.d_k))
        q, k, v = heads.transpose(1, 2).chunk(3, dim=-1)
        return self.norms[0](q), self.norms[1](k), v


class HeadByHeadNormedAndTurned(HeadByHead):
    def make_norm(self, _):
        return nn.RMSNorm(self.d_k, eps=1e-6)


class HeadByHeadNormed(HeadByHeadNormedAndTurned):
    def places(self, q, k, v):
        return q, k, v


class HeadsLast(HeadByHeadNormed):
    """(3, d, H): the order of the columns is learned."""

    def qkv(self, x):
        whole = self.W_qkv(x).unflatten(-1, (3, self.d_k, self.num_heads))
        q, k, v = whole.permute(2, 0, 4, 1, 3)
        return self.norms[0](q), self.norms[1](k), v


class NormsNamedInShort(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.qn, self.kn = nn.LayerNorm(self.d_k), nn.LayerNorm(self.d_k)
        nn.init.normal_(self.qn.weight, 1, 0.3)
        nn.init.normal_(self.kn.bias, 0, 0.3)

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(self.qn(q), self.kn(k)).softmax(-1) @ v)


class NormsThatAreNumbered(NormsNamedInShort):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.n1, self.n2 = self.qn, self.kn
        del self.qn, self.kn

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(self.n1(q), self.n2(k)).softmax(-1) @ v)


class PairsLaidInHalves(Turned):
    """The first features of all pairs, then all second ones: of queries as of keys."""

    def turn(self, x):
        apart = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return turn(apart, *self.tables(x.size(-2), x.size(-1)))


class ViewedAndNormed(NormsNamedInShort):
    """A view of (B, L, H·d) as (B, H, L, d) before the norms."""

    def split(self, x):
        return x.reshape(x.size(0), self.num_heads, x.size(1), self.d_k)


class HeadByHeadUnscaled(HeadByHeadNormedAndTurned):
    def scores(self, q, k):
        return q @ k.mT


class HeadByHeadJoinedStraight(HeadByHead):
    def join(self, x):
        return self.W_o(x.reshape(x.size(0), x.size(2), -1))
