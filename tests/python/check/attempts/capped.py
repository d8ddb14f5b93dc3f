# SPDX-License-Identifier: MIT
"""What models of today do to scores and weights beside attention: soft caps, sinks; the
ReLU of a sum, and padding of pairs; and what goes wrong beside that."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from attempts.steps import Attention


class SoftlyCapped(Attention):
    """As in Gemma 2."""

    cap = 50.0

    def scores(self, q, k):
        return self.cap * torch.tanh(super().scores(q, k) / self.cap)

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class CappedTightly(SoftlyCapped):
    cap = 3.0


class CappedUnscaled(SoftlyCapped):
    def scores(self, q, k):
        return 5 * torch.tanh(q @ k.mT / 5)


class CappedUnsplit(SoftlyCapped):
    cap = 5.0

    def split(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)


class ScoresInFloat(SoftlyCapped):
    """Not capped: float32 in float64 comes as near to that as a cap of millions."""

    def scores(self, q, k):
        return Attention.scores(self, q, k).float().double()


class LearnedSinks(Attention):
    """As in gpt-oss."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.sinks = nn.Parameter(torch.randn(num_heads))

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        sinks = self.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return self.join(weights @ v)


class SinksUnscaled(LearnedSinks):
    def scores(self, q, k):
        return q @ k.mT


class SoftmaxPlusOne(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        most = scores.amax(-1, keepdim=True).clamp_min(0)
        exp = (scores - most).exp()
        return self.join(exp / (exp.sum(-1, keepdim=True) + (-most).exp()) @ v)


class ReluOfTheSum(Attention):
    """As in AutoInt."""

    def forward(self, x):
        return F.relu(x + self.attend(x, x, x))


class ReluOfTheSumUnsplit(ReluOfTheSum):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)


class PaddedPairs(Attention):
    """What is padded sees nothing, and gets 0."""

    def forward(self, x, padding_mask):
        q, k, v = self.qkv(x)
        pairs = padding_mask.unsqueeze(1) & padding_mask.unsqueeze(2)
        scores = self.scores(q, k).masked_fill(~pairs.unsqueeze(1), -torch.inf)
        return self.join(scores.softmax(-1).nan_to_num() @ v)


class StackedWeights(Attention):
    """The weights of a loop over heads, (H, B, Lq, Lk)."""

    def forward(self, x, return_attention=False):
        q, k, v = self.qkv(x)
        weights = self.scores(q, k).softmax(-1)
        stacked = torch.stack(weights.unbind(1))
        return (
            (self.join(weights @ v), stacked)
            if return_attention
            else self.join(weights @ v)
        )
