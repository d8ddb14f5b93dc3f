# SPDX-License-Identifier: MIT
"""Letters of einsum that stand in the wrong place, a division that rounds down, and
mistakes that show in some calls only."""

import math

import torch
from attempts.steps import Attention


class LettersOfItsOwn(Attention):
    scores_by = "bhqd,bhkd->bhqk"
    values_by = "bhqk,bhkd->bhqd"

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = torch.einsum(self.scores_by, q, k) / math.sqrt(self.d_k)
        return self.join(torch.einsum(self.values_by, scores.softmax(-1), v))


class ScoresOfSums(LettersOfItsOwn):
    scores_by = "bhqd,bhke->bhqk"


class ValuesOfSums(LettersOfItsOwn):
    """The letter of the keys is another in the values."""

    values_by = "bhqk,bhvd->bhqd"


class OneLetterForBothLengths(LettersOfItsOwn):
    values_by = "bhss,bhsd->bhsd"


class SummedOverTheQueries(LettersOfItsOwn):
    """The result has the letter of the keys."""

    values_by = "bhqk,bhkd->bhkd"


class WeightsSummedApart(LettersOfItsOwn):
    """The weights have no letter of the values."""

    values_by = "bhij,bhvd->bhvd"


class ValuesOfTheQueries(LettersOfItsOwn):
    values_by = "bhqk,bhqd->bhqd"


class DividedOnceMasked(Attention):
    """Causal; by a number that is that of the keys in some calls."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        scores = (q @ k.mT).masked_fill_(later, -math.inf) / self.d_k**0 / 5
        return self.join(scores.softmax(-1) @ v)


class PaddedQueries(LettersOfItsOwn):
    """Causal; what pads stands behind all that sees it, in most calls."""

    def forward(self, x, padding_mask):
        """padding_mask: (batch, length), True = token"""
        q, k, v = self.qkv(x)
        seen = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        seen = padding_mask[:, None, :, None] & seen
        scores = self.scores(q, k).masked_fill(~seen, -math.inf)
        return self.join(scores.softmax(-1).nan_to_num() @ v)


class DetachedWhereMasked(Attention):
    def forward(self, x, mask=None):
        """mask: (B, Lq, Lk), True = may attend"""
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.data.masked_fill(~mask.unsqueeze(1), -math.inf)
        return self.join(scores.softmax(-1) @ v)


class ScoresRoundedDown(Attention):
    def scores(self, q, k):
        return q @ k.mT // math.sqrt(self.d_k)

    def forward(self, query, key, value):
        return self.attend(query, key, value)
