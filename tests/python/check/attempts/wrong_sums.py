# SPDX-License-Identifier: MIT
"""Letters of einsum that stand in the wrong place, and a division that rounds down."""

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


class ScoresRoundedDown(Attention):
    def scores(self, q, k):
        return q @ k.mT // math.sqrt(self.d_k)

    def forward(self, query, key, value):
        return self.attend(query, key, value)
