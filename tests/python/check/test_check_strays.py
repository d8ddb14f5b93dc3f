# SPDX-License-Identifier: MIT
"""Code that reads a variable of its file in the place of an argument, and dropout whose
draws nobody sees."""

import numpy as np
import pytest
import torch
from test_check_models import Attention
from torch import nn

import multihead


def named(report) -> list[str]:
    return [finding.name for finding in report.findings if finding.kind == "failure"]


key_padding_mask = torch.tensor([[False, False, True], [False, True, True]])
scale = torch.tensor(2.0)


class OfTheNotebook(Attention):
    """The mask of the cell below, and not its own."""

    def forward(self, x, padding_mask):
        mask = key_padding_mask[:, None, None, :]
        return super().forward(x, mask=~mask)


class OfTheNotebookThatFits(Attention):
    def forward(self, x, padding_mask=None):
        hidden = key_padding_mask[0, 0]  # False for all
        return super().forward(x, mask=~hidden)


class ReadsItsOwn(Attention):
    """A variable of the file that is no argument of its own."""

    def forward(self, x, padding_mask=None):
        """padding_mask: True for padding."""
        mask = None if padding_mask is None else ~padding_mask[:, None, None, :]
        return super().forward(x / scale * scale, mask=mask)


class IgnoresItsOwn(Attention):
    """No variable of a like name stands for it."""

    def forward(self, x, padding_mask=None):
        return super().forward(x / scale * scale)


@pytest.mark.parametrize("kind", [OfTheNotebook, OfTheNotebookThatFits])
def test_a_variable_of_the_file_for_an_argument_is_named(kind):
    report = multihead.check(kind)
    assert report.judgement == "wrong"
    found = next(f for f in report.findings if f.name == "global_read")
    assert "`key_padding_mask`" in found.sentence
    assert "`padding_mask`" in found.sentence


class ForOldCallers(Attention):
    """It says that it is not for masks of its caller's."""

    def forward(self, x, padding_mask=None):
        """padding_mask: not used any more"""
        return super().forward(x, mask=~key_padding_mask[0, 0])


scale_table = torch.ones(1)


class OfNoTensor(Attention):
    """An argument that is no sequence and no mask."""

    def forward(self, x, scale=None):
        return super().forward(x * scale_table)


@pytest.mark.parametrize(
    "kind", [ReadsItsOwn, IgnoresItsOwn, ForOldCallers, OfNoTensor]
)
def test_other_variables_of_the_file_are_none_of_that(kind):
    assert "global_read" not in named(multihead.check(kind))


# ---- Dropout that is always on -------------------------------------------------------


class Drop:
    def __init__(self, rate: float):
        self.rate = rate

    def forward(self, x, training=True):
        if not training:
            return x
        return x * (np.random.rand(*x.shape) >= self.rate) / (1 - self.rate)


class InNumPy:
    """Single-head attention; nothing says to its dropout when it is evaluated."""

    def __init__(self, d_model: int, dropout: float = 0.1):
        make = np.random.default_rng(0).normal
        self.w_q, self.w_k, self.w_v, self.w_o = (
            make(size=(d_model, d_model)) for _ in range(4)
        )
        self.dropout = Drop(dropout)

    def noise(self, x):
        return self.dropout.forward(x)

    def scale(self, width):
        return np.sqrt(width)

    def forward(self, x):
        q, k, v = x @ self.w_q, x @ self.w_k, x @ self.w_v
        scores = q @ k.transpose(0, 2, 1) / self.scale(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        return self.noise(weights) @ v @ self.w_o


class AndNotScaled(InNumPy):
    def scale(self, width):
        return 1.0


class OtherNoise(InNumPy):
    """Random for another reason, too."""

    def noise(self, x):
        return self.dropout.forward(x) + np.random.rand(*x.shape) / 10


class Once(InNumPy):
    def noise(self, x):
        return self.dropout.forward(x, training=False)


def test_dropout_that_is_always_on_is_told_from_other_randomness():
    report = multihead.check(InNumPy)
    assert named(report) == ["dropout_left_on"] and report.judgement == "wrong"
    assert (report.verdict or {}).get("faults") == []
    assert named(multihead.check(OtherNoise)) == ["random"]
    assert named(multihead.check(Once)) == []


def test_what_else_is_wrong_is_named_beside_it():
    report = multihead.check(AndNotScaled)
    assert named(report) == ["dropout_left_on"]
    assert [f["name"] for f in report.verdict["faults"]] == ["scale_missing"]


def drops(x, training, rate):
    kept = np.random.rand(*x.shape) >= rate
    return x * kept / (1 - rate) if training else x


def attend(q, k, v, weigh):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weigh(weights / weights.sum(-1, keepdims=True)) @ v


def in_training(q, k, v, dropout_rate=0.1, training=True):
    return attend(q, k, v, lambda w: drops(w, training, dropout_rate))


def always(q, k, v, dropout_rate=0.1):
    return attend(q, k, v, lambda w: drops(w, True, dropout_rate))


def test_functions_in_numpy_that_drop():
    assert multihead.check(in_training).judgement == "right"
    assert named(multihead.check(always)) == ["dropout_left_on"]


def never_drops(q, k, v, dropout_p=0.0):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_a_rate_that_is_never_read():
    assert multihead.check(never_drops).causes == ["dropout_missing"]


# ---- Items of a batch ----------------------------------------------------------------


class Block(nn.Module):
    """Attention and a convolution in time, as in a conformer: (B, L, E)."""

    batch_first = True

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=self.batch_first)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.wide, self.narrow = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.narrow(self.wide(x).relu())
        x = x + self.attn(x, x, x)[0]
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2).relu()


class WithoutBatchFirst(Block):
    batch_first = False


class OfALayer(WithoutBatchFirst):
    """x: (B, L, E); no layer but attention mixes anything."""

    def forward(self, x):
        B, L, E = x.shape
        x = x + self.narrow(self.wide(x).relu())
        return x + self.attn(x, x, x)[0]


class OnPurpose(OfALayer):
    """BatchFormer: attention across the items of a batch. x: (B, L, E)"""


def test_attention_over_the_batch_where_items_are_said_to_come_first():
    report = multihead.check(OfALayer)
    assert named(report) == ["batch_and_sequence_exchanged"], str(report)
    assert multihead.check(OnPurpose).judgement != "wrong"


def test_attention_over_the_batch_is_seen_in_a_block_with_other_layers():
    report = multihead.check(WithoutBatchFirst)
    assert named(report) == ["items_mixed"] and report.judgement == "wrong"
    assert multihead.check(Block).judgement != "wrong"


# ---- Weights that are filled, keys without their history -----------------------------


class FillsWeights(Attention):
    """mask: True for what is seen."""

    def forward(self, x, mask=None):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, -torch.inf)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class FillsACopy(FillsWeights):
    """For a statistic; scores are masked as they should be."""

    def forward(self, x, mask=None):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        if mask is not None:
            self.most = weights.masked_fill(~mask, -torch.inf).amax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def test_a_copy_of_weights_that_is_filled():
    assert "mask_after_softmax" not in named(multihead.check(FillsACopy))


def test_weights_that_are_filled_with_infinities():
    report = multihead.check(FillsWeights)
    assert "mask_after_softmax" in named(report), str(report)


class FromACache(Attention):
    """Keys and values are read from buffers that hold no history."""

    def keep(self, x):
        return x.detach().clone()

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, self.keep(k), self.keep(v)))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Kept(FromACache):
    def keep(self, x):
        return x


def test_keys_and_values_without_their_history():
    assert multihead.check(FromACache).causes == ["gradient_detached"]
    assert multihead.check(Kept).judgement == "right"


class BlockOfACache(FromACache):
    """Beside other layers."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.wide, self.narrow = nn.Linear(dim, 64), nn.Linear(64, dim)

    def forward(self, x):
        x = x + super().forward(x)
        return x + self.narrow(self.wide(x).relu())


class KeepsForTheNext(Kept):
    """Projections for another layer, which it keeps."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.wide, self.narrow = nn.Linear(dim, 64), nn.Linear(64, dim)
        self.k_next, self.v_next = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + super().forward(x)
        x = x + self.narrow(self.wide(x).relu())
        self.shared = self.k_next(x), self.v_next(x)
        return x


class OfATeacher(Attention):
    """The context is not to learn of it."""

    def forward(self, x, context):
        context = context.detach()
        return super().forward(x, context)


def test_projections_without_gradient_beside_other_layers():
    assert named(multihead.check(BlockOfACache)) == ["weights_without_gradient"]
    assert named(multihead.check(KeepsForTheNext)) == []


def test_a_context_that_is_detached_on_purpose():
    assert multihead.check(OfATeacher).judgement == "right"
