# SPDX-License-Identifier: MIT
"""What models of today do to scores and weights beside attention: soft caps, sinks,
biases that fall with the distance; the ReLU of a sum, and padding of pairs; and what goes
wrong beside that."""

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


class CappedOnceMasked(SoftlyCapped):
    cap = 5.0

    def forward(self, x, padding_mask):
        """padding_mask: (batch, length), True = token"""
        q, k, v = self.qkv(x)
        scores = Attention.scores(self, q, k)
        scores = scores.masked_fill(~padding_mask[:, None, None], -torch.inf)
        return self.join((5 * torch.tanh(scores / 5)).softmax(-1) @ v)


class CappedFarOff(SoftlyCapped):
    """By so much that some calls show nothing of it; blocked scores are -50."""

    def forward(self, x, padding_mask):
        """padding_mask: (batch, length), True = token"""
        q, k, v = self.qkv(x)
        scores = Attention.scores(self, q, k)
        scores = scores.masked_fill(~padding_mask[:, None, None], -torch.inf)
        return self.join((50 * torch.tanh(scores / 50)).softmax(-1) @ v)


class ScoresInFloat(SoftlyCapped):
    """Not capped: float32 in float64 comes as near to that as a cap of millions."""

    def scores(self, q, k):
        return Attention.scores(self, q, k).float().double()


class LearnedSinks(Attention):
    """As in gpt-oss."""

    kept = slice(None, -1)  # the sink stands last

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.sinks = nn.Parameter(torch.randn(num_heads))

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        sinks = self.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., self.kept]
        return self.join(weights @ v)


class SinksUnscaled(LearnedSinks):
    def scores(self, q, k):
        return q @ k.mT


class FirstKeyLeftOut(LearnedSinks):
    """The column of the sink is kept, and the first is left out."""

    kept = slice(1, None)


class SoftmaxPlusOne(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        most = scores.amax(-1, keepdim=True).clamp_min(0)
        exp = (scores - most).exp()
        return self.join(exp / (exp.sum(-1, keepdim=True) + (-most).exp()) @ v)


class Alibi(Attention):
    """Press et al. 2022: of all positions that may come, once."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        places = torch.arange(512)
        distance = (places[:, None] - places).abs()
        self.register_buffer("alibi", -self.slopes() * distance, persistent=False)

    def slopes(self):
        exponents = torch.arange(1, self.num_heads + 1) * (8 / self.num_heads)
        return (2.0**-exponents).view(-1, 1, 1)

    def bias(self, queries, keys):
        return self.alibi[:, :queries, :keys]

    def scores(self, q, k):
        return super().scores(q, k) + self.bias(q.size(-2), k.size(-2))

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class AlibiOfTheKeys(Alibi):
    """As in BLOOM: of the key's place alone; causal."""

    def bias(self, queries, keys):
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        bias = self.slopes() * torch.arange(keys).expand(queries, keys)
        return bias.masked_fill(later, -torch.inf)


class AlibiFused(AlibiOfTheKeys):
    def forward(self, x):
        q, k, v = self.qkv(x)
        bias = self.bias(x.size(1), x.size(1)).to(x.dtype)
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


class AlibiOfTokens(Alibi):
    """Causal; padding has no place."""

    def forward(self, x, padding_mask):
        """padding_mask: (batch, length), True = token"""
        q, k, v = self.qkv(x)
        places = (padding_mask.cumsum(-1) - 1) * padding_mask
        scores = Attention.scores(self, q, k)
        scores = scores + self.slopes() * places[:, None, None]
        seen = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        seen = seen & padding_mask[:, None, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        return self.join(scores.softmax(-1).nan_to_num() @ v)


class DistancePenalty(Attention):
    """By one number for all heads; nothing says that it is meant."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        place = torch.arange(x.size(1), dtype=x.dtype)
        scores = self.scores(q, k) - 0.1 * (place[:, None] - place).abs()
        return self.join(scores.softmax(-1) @ v)


class AlibiOfSomeHeads(Alibi):
    def slopes(self):
        half = torch.arange(self.num_heads).view(-1, 1, 1) < self.num_heads // 2
        return super().slopes() * half


class AlibiClipped(Alibi):
    """A relative position bias that is no line."""

    def bias(self, queries, keys):
        return super().bias(queries, keys).clamp(min=-0.5)


class CausalWithLengths(Attention):
    def forward(self, x, lengths):
        q, k, v = self.qkv(x)
        seen = torch.arange(x.size(1)) < lengths[:, None]
        seen = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril() & seen[:, None]
        scores = self.scores(q, k).masked_fill(~seen.unsqueeze(1), -torch.inf)
        return self.join(scores.softmax(-1) @ v)


class LaterKeysFavoured(Attention):
    """A line of the key's place, with nothing that blocks later ones."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        places = torch.arange(x.size(1), dtype=x.dtype)
        scores = self.scores(q, k) + 0.1 * (places - places[:, None])
        return self.join(scores.softmax(-1) @ v)


class AlibiRises(Alibi):
    def bias(self, queries, keys):
        return -super().bias(queries, keys)


class AlibiUnscaled(Alibi):
    def scores(self, q, k):
        return q @ k.mT + self.bias(q.size(-2), k.size(-2))


class AlibiUnsplit(Alibi):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)


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


class PaddedPairsInverted(Attention):
    def blocked(self, tokens):
        return tokens.unsqueeze(1) & tokens.unsqueeze(2)

    def forward(self, x, padding_mask):
        """padding_mask: (batch, length), True = token"""
        q, k, v = self.qkv(x)
        blocked = self.blocked(padding_mask).unsqueeze(1)
        scores = self.scores(q, k).masked_fill(blocked, -1e9)
        return self.join(scores.softmax(-1) @ v)


class PaddedToPadded(PaddedPairsInverted):
    def blocked(self, tokens):
        return ~(tokens.unsqueeze(1) | tokens.unsqueeze(2))


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
