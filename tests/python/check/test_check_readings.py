# SPDX-License-Identifier: MIT
"""Names and texts order the readings; the numbers decide which is believed."""

import math

import pytest
import torch
from torch import nn

import multihead
from multihead.check.reading import plans
from multihead.check.subject import signature
from multihead.check.subject.target import describe


class Projected(nn.Module):
    """Four projections and heads; what asks and what is asked, a subclass says."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.heads = num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_o = nn.Linear(embed_dim, embed_dim)

    def attend(self, asks, asked, scale=1.0):
        def split(x):
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.W_q(asks)), split(self.W_k(asked)), split(self.W_v(asked))
        scores = scale * q @ k.mT / math.sqrt(q.shape[-1])
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FirstAsks(Projected):
    def forward(self, x, y):
        return self.attend(x, y)


class SecondAsks(Projected):
    def forward(self, x, y):
        return self.attend(y, x)


class SecondAsksUnscaled(Projected):
    def forward(self, x, y):
        return self.attend(y, x, scale=math.sqrt(self.W_q.in_features // self.heads))


class ValuesFirst(Projected):
    """Its arguments have names that say nothing."""

    def forward(self, one, two, three):
        def split(x):
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.W_q(three)), split(self.W_k(two)), split(self.W_v(one))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("target", [FirstAsks, SecondAsks, ValuesFirst])
def test_either_input_may_ask(target):
    report = multihead.check(target)
    assert report.passed, str(report)


def test_a_fault_is_named_whichever_input_asks():
    assert multihead.check(SecondAsksUnscaled).cause == "scale_missing"


class SpeaksOfAStep(Projected):
    """Is batch first, but for a step inside."""

    def forward(self, x):
        x = x.transpose(0, 1)
        L, N, E = x.shape
        x = x.reshape(L * N, E).reshape(L, N, E).transpose(0, 1)
        return self.attend(x, x)


def test_an_order_that_is_written_of_a_step_is_not_that_of_the_inputs():
    report = multihead.check(SpeaksOfAStep)
    assert report.passed, str(report)


def roles_of(function):
    subject = describe(function)
    call = signature.read(subject)
    return [{**call.roles, **roles} for roles in plans.roles(call, subject)]


def test_names_that_say_who_asks_leave_no_other_reading():
    def attend(query, key, value, mask=None): ...

    def of_context(x, context): ...

    assert len(roles_of(attend)) == len(roles_of(of_context)) == 1


def test_roles_by_place_are_exchanged_in_every_way():
    def attend(one, two, three): ...

    assert len(roles_of(attend)) == math.factorial(3)
    assert roles_of(attend)[0] == {"one": "query", "two": "key", "three": "value"}


def test_numbers_decide_between_readings_by_the_faults_that_they_need():
    def verdict(*faults, judged="fault"):
        return f'{{"verdict": "{judged}", "faults": {list(faults)}}}'.replace("'", '"')

    better = torch.ops.multihead.is_better_reading
    right, unknown = verdict(judged="rounding"), verdict(judged="unknown")
    order = [right, verdict("a"), verdict("a", "b"), unknown]
    for i, later in enumerate(order):
        assert [better(later, earlier) for earlier in order] == [
            j > i for j in range(4)
        ]
    with pytest.raises(ValueError, match="is_better_reading: each must be a verdict"):
        better("{}", right)
