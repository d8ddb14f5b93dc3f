# SPDX-License-Identifier: MIT
"""Faults that show whatever attention is computed: a softmax along another axis, what
cancels, a matrix in the place of another, items that a whole model mixes."""

import math

import pytest
import torch
from heads import Heads
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn

import multihead


class Additive(nn.Module):
    """Additive attention (Bahdanau et al., 2014)."""

    axis = -1

    def __init__(self, dim):
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1)

    def forward(self, query, context):
        both = self.query(query).unsqueeze(2) + self.key(context).unsqueeze(1)
        scores = self.score(both.tanh()).squeeze(-1)
        return scores.softmax(self.axis) @ context


class AdditiveOverQueries(Additive):
    axis = 1


class AdditiveOverItems(Additive):
    axis = 0


class Pooled(Additive):
    """Weights that are factors of a sum, which has no product of matrices."""

    def forward(self, query, context):
        both = self.query(query).unsqueeze(2) + self.key(context).unsqueeze(1)
        weights = self.score(both.tanh()).softmax(2 if self.axis == -1 else 1)
        return (weights * context.unsqueeze(1)).sum(2)


class PooledOverQueries(Pooled):
    axis = 1


class Slots(Additive):
    """Slots compete for what is read."""

    axis = 1


@pytest.mark.parametrize(
    "kind, fault",
    [
        (AdditiveOverQueries, "softmax_over_queries"),
        (AdditiveOverItems, "softmax_over_batch"),
        (PooledOverQueries, "softmax_over_queries"),
    ],
)
def test_a_softmax_along_another_axis_than_is_summed_over(kind, fault):
    report = multihead.check(kind)
    assert report.cause == fault, str(report)


@pytest.mark.parametrize("kind", [Additive, Pooled])
def test_additive_attention_is_right_if_its_scores_are(kind):
    report = multihead.check(kind)
    assert report.judgement == "right_if", str(report)


def test_attention_of_another_kind_whose_weights_add_up_is_not_judged():
    assert multihead.check(Slots).judgement == "not_judged"


class SumsApart(Heads):
    """Letters of heads that are not exchanged yet."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = torch.einsum("nqhd,nkhd->nqhk", q, k) / math.sqrt(x.shape[-1])
        y = torch.einsum("nqhk,nvhd->nqhd", scores.softmax(-1), v)
        return self.o(y.reshape(x.shape))


def test_projections_whose_part_cancels():
    report = multihead.check(SumsApart)
    assert named(report) == ["projection_unused"], str(report)
    assert "cancels" in str(report)


class Block(nn.Module):
    """A layer of an encoder."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.count = num_heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 64), nn.Linear(64, dim)

    def three(self, x):
        return self.q(x), self.k(x), self.v(x)

    def out(self, x):
        return self.proj(x)

    def forward(self, x):
        cut = (t.unflatten(-1, (self.count, -1)) for t in self.three(self.norm(x)))
        q, k, v = (t.transpose(1, 2) for t in cut)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm2(x)).relu())


class ValuesOfKeys(Block):
    def three(self, x):
        return self.q(x), self.k(x), self.k(x)


class KeysOfQueries(Block):
    def three(self, x):
        return self.q(x), self.q(x), self.v(x)


class Shares(ValuesOfKeys):
    """Keys are values on purpose."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        del self.v


class WithoutOutput(Block):
    def out(self, x):
        return x


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (ValuesOfKeys, "key_weight_for_values"),
        (KeysOfQueries, "query_weight_for_keys"),
    ],
)
def test_a_matrix_of_a_block_in_the_place_of_another(kind, fault):
    report = multihead.check(kind)
    assert named(report) == [fault], str(report)


def test_keys_that_are_values_where_no_matrix_is_left():
    assert "key_weight_for_values" not in named(multihead.check(Shares))


def test_an_output_projection_of_a_block_that_is_never_used_is_a_condition():
    assert "idle_weights" in conditions(multihead.check(WithoutOutput))
    assert "idle_weights" not in conditions(multihead.check(Block))


class OfTokens(nn.Module):
    """A classifier of texts."""

    batch_first = False

    def __init__(self, vocab_size, embed_dim, num_heads, num_classes):
        super().__init__()
        self.table = nn.Embedding(vocab_size, embed_dim)
        layer = nn.TransformerEncoderLayer(
            embed_dim, num_heads, 64, batch_first=self.batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x):
        return self.head(self.encoder(self.table(x)).mean(1))


class OfTokensInItems(OfTokens):
    batch_first = True


class OfSteps(nn.Module):
    """A forecast."""

    batch_first = False

    def __init__(self, input_dim, d_model, n_heads):
        super().__init__()
        self.embed, self.head = nn.Linear(input_dim, d_model), nn.Linear(d_model, 1)
        self.attend = nn.MultiheadAttention(
            d_model, n_heads, batch_first=self.batch_first
        )

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.attend(x, x, x)[0][:, -1])


class OfStepsInItems(OfSteps):
    batch_first = True


@pytest.mark.parametrize("kind", [OfTokens, OfSteps])
def test_a_model_that_pools_and_mixes_items(kind):
    report = multihead.check(kind)
    assert named(report) == ["items_mixed"], str(report)


@pytest.mark.parametrize("kind", [OfTokensInItems, OfStepsInItems])
def test_a_model_that_pools_each_item_is_not_accused(kind):
    report = multihead.check(kind)
    assert report.judgement in ("not_judged", "right_if"), str(report)


class ViewedImage(nn.Module):
    """An image, whose features are cut by view: as they lie in memory, only one head
    fits."""

    def __init__(self, channels, num_heads=4):
        super().__init__()
        self.count = num_heads
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.o = nn.Conv2d(channels, channels, 1)

    def cut(self, x):
        return x.view(len(x), self.count, -1, x.shape[-1] // self.count)

    def forward(self, x):
        three = (f(x).flatten(2).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = map(self.cut, three)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class CutImage(ViewedImage):
    def cut(self, x):
        return x.unflatten(-1, (self.count, -1)).transpose(1, 2)


def test_one_head_does_not_hide_that_several_are_refused():
    report = multihead.check(ViewedImage)
    assert "raises" in named(report) and "unless it has one head" in str(report)
    assert multihead.check(CutImage).judgement == "right"
