# SPDX-License-Identifier: MIT
"""Projections that are one matrix, under one name or under several: right if that is
meant, which nothing tells from a layer that was not copied."""

import copy

import pytest
import torch.nn as nn
from attempts.steps import Attention

import multihead


class OneLayerFourTimes(Attention):
    """clones() of a well-known tutorial, without its deepcopy."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.linears = nn.ModuleList([self.W_q] * 4)
        del self.W_q, self.W_k, self.W_v, self.W_o

    def forward(self, query, key, value):
        inputs = zip(self.linears, (query, key, value))
        q, k, v = (self.split(layer(x)) for layer, x in inputs)
        context = self.scores(q, k).softmax(-1) @ v
        return self.linears[3](context.transpose(1, 2).flatten(2))


class CopiedNotDeeply(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_k, self.W_v = copy.copy(self.W_q), copy.copy(self.W_q)

    def forward(self, query, key, value):
        return self.attend(query, key, value)


class SharedByQueriesAndKeys(nn.Module):
    """As in Reformer."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads = num_heads
        self.qk, self.v = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        layers = self.qk, self.qk, self.v
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in layers)
        context = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        return self.out(context.transpose(1, 2).flatten(2))


class SharedByKeysAndValues(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_v = self.W_k

    def forward(self, query, context):
        return self.attend(query, context, context)


class OneProductForBoth(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.first, self.second = self.W_q, self.W_k
        del self.W_q, self.W_k, self.W_v

    def forward(self, query, context):
        q, kv = self.split(self.first(query)), self.split(self.second(context))
        return self.join(self.scores(q, kv).softmax(-1) @ kv)


class SharedAndUnscaled(SharedByKeysAndValues):
    def scores(self, q, k):
        return q @ k.mT


KINDS = {
    OneLayerFourTimes: "queries, keys and values",
    CopiedNotDeeply: "queries, keys and values",
    SharedByQueriesAndKeys: "queries and keys",
    SharedByKeysAndValues: "keys and values",
    OneProductForBoth: "keys and values",
}


@pytest.mark.parametrize("target", KINDS)
def test_one_matrix_for_several_projections_must_be_meant(target):
    report = multihead.check(target)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["shared_projections"]
    assert f"One matrix projects {KINDS[target]}." in " ".join(str(report).split())


def test_a_fault_beside_it_is_named():
    assert multihead.check(SharedAndUnscaled).cause == "scale_missing"
