# SPDX-License-Identifier: MIT
"""Code that predicts what comes next: whether it sees that, and what its masks reach."""

import math

import pytest
import torch
from heads import Heads
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn

import multihead


class Layer(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.attend = nn.MultiheadAttention(width, count, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def mask(self, length):
        return None

    def forward(self, x):
        mask = self.mask(x.shape[1])
        return self.norm(x + self.attend(x, x, x, attn_mask=mask)[0])


class Masked(Layer):
    def mask(self, length):
        return torch.ones(length, length, dtype=torch.bool).triu(1)


class MiniGPT(nn.Module):
    layer = Layer

    def __init__(self, vocab_size, n_embd, n_head):
        super().__init__()
        self.table = nn.Embedding(vocab_size, n_embd)
        self.first = self.layer(n_embd, n_head)
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        return self.head(self.first(self.table(idx)))


class CausalGPT(MiniGPT):
    layer = Masked


class Melodies(MiniGPT):
    """Notes, of which each is as a word."""


class CausalMelodies(CausalGPT):
    pass


def test_a_model_named_gpt_whose_tokens_see_later_ones():
    report = multihead.check(MiniGPT)
    assert report.causes == ["causal_without_effect"], str(report)
    assert multihead.check(CausalGPT).judgement == "right_if"


def test_a_model_that_returns_words_and_sees_later_ones_is_told_as_a_condition():
    assert "sees_later_keys" in conditions(multihead.check(Melodies))
    assert "sees_later_keys" not in conditions(multihead.check(CausalMelodies))


class Decoder(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.own = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.across = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def attended(self, x, context, mask, other):
        x = self.norm(x + self.own(x, x, x, attn_mask=mask)[0])
        return self.norm2(x + self.across(x, context, context, attn_mask=other)[0])


class HidesTheContext(Decoder):
    def forward(self, x, encoder_output):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attended(x, encoder_output, mask, mask)


class HoldsItsMask(Decoder):
    """Its mask is as long as it was made."""

    def __init__(self, d_model, n_heads, length=64):
        super().__init__(d_model, n_heads)
        self.mask = torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward(self, x, encoder_output):
        return self.attended(x, encoder_output, self.mask, self.mask)


class HidesItsOwn(Decoder):
    def forward(self, x, encoder_output):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attended(x, encoder_output, mask, None)


class TargetsMaskForBoth(Decoder):
    def forward(self, x, encoder_output, tgt_mask=None):
        return self.attended(x, encoder_output, tgt_mask, tgt_mask)


class OneMaskForBoth(Decoder):
    def forward(self, x, encoder_output, mask=None):
        return self.attended(x, encoder_output, mask, mask)


class MaskForItsOwn(Decoder):
    def forward(self, x, encoder_output, mask=None):
        return self.attended(x, encoder_output, mask, None)


@pytest.mark.parametrize("kind", [HidesTheContext, HoldsItsMask, TargetsMaskForBoth])
def test_a_mask_of_later_keys_that_hides_those_of_the_context(kind):
    report = multihead.check(kind)
    assert "mask_of_another" in named(report), str(report)


@pytest.mark.parametrize("kind", [HidesItsOwn, MaskForItsOwn])
def test_a_mask_of_its_own_sequence_alone(kind):
    report = multihead.check(kind)
    assert report.judgement == "right_if" and not named(report), str(report)
    assert "mask_of_both" not in conditions(report)


def test_one_mask_for_both_attentions_is_a_condition():
    assert "mask_of_both" in conditions(multihead.check(OneMaskForBoth))


class Overwrites(Heads):
    """Causal self-attention."""

    def own(self, mask, length):
        return torch.ones(length, length, dtype=torch.bool).tril()

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class Ignores(Overwrites):
    def forward(self, x, mask=None):
        return super().forward(x)


def test_a_mask_that_is_overwritten_is_a_condition_and_one_that_is_ignored_a_fault():
    report = multihead.check(Overwrites)
    assert conditions(report) == ["mask_left"], str(report)
    assert "mask_ignored" in multihead.check(Ignores).causes


class CountsTokens(Heads):
    def forward(self, x, key_padding_mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if key_padding_mask is not None:
            mask = key_padding_mask.view(len(x), 1, 1, -1)
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class TurnsPadding(Heads):
    def forward(self, x, key_padding_mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if key_padding_mask is not None:
            mask = key_padding_mask.view(len(x), 1, 1, -1)
            scores = scores.masked_fill(mask.logical_not(), -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


def test_padding_that_is_compared_with_0_may_be_of_tokens():
    assert conditions(multihead.check(CountsTokens)) == ["padding_keeps"]
    assert multihead.check(TurnsPadding).causes == ["padding_inverted"]


class OptionalBool(Heads):
    def forward(self, x, mask: bool = None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class Flagged(Heads):
    """As in the Informer: a mask counts where a flag says so."""

    def __init__(self, dim, num_heads, mask_flag=False):
        super().__init__(dim, num_heads)
        self.mask_flag = mask_flag

    def forward(self, x, attn_mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.mask_flag and attn_mask is not None:
            scores = scores.masked_fill(attn_mask == 0, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


@pytest.mark.parametrize("kind", [OptionalBool, Flagged])
def test_a_mask_that_a_type_or_a_flag_could_hide(kind):
    assert conditions(multihead.check(kind)) == ["mask_keeps"]


def earlier(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


class Handed(Heads):
    """It is handed the function of its file that makes its mask."""

    def __init__(self, dim, num_heads, causal: bool, earlier):
        super().__init__(dim, num_heads)
        self.causal, self.earlier = causal, earlier

    def cut(self, x):
        return x.view(len(x), self.num_heads, x.shape[1], -1)

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores.masked_fill(self.earlier(x.shape[1]) == 0, -torch.inf)
        return self.o((scores.softmax(-1) @ v).reshape(x.shape))


class CountsItems(Heads):
    """It is told how many items there are."""

    def forward(self, x, size):
        q, k, v = self.heads(x)
        y = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(size, x.shape[1], -1))


class OfNodes(Heads):
    """Nodes (N, E); batch: (N,), the graph of each."""

    def forward(self, x, batch):
        q, k, v = self.heads(x.unsqueeze(0))
        other = batch.unsqueeze(0) != batch.unsqueeze(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(other, -torch.inf)
        return self.merged(scores.softmax(-1) @ v).squeeze(0)


def test_a_function_of_its_file_a_count_of_items_and_graphs_of_nodes():
    report = multihead.check(Handed)
    assert "heads_not_transposed" in report.causes, str(report)
    assert multihead.check(CountsItems).judgement == "right"
    assert multihead.check(OfNodes).judgement == "right"


class Described:
    """Attention that has a method, and cannot be called."""

    def __init__(self, dim):
        self.q, self.k, self.v = (torch.randn(dim, dim) for _ in range(3))

    def get_attention(self, x):
        q, k, v = x @ self.q.to(x), x @ self.k.to(x), x @ self.v.to(x)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class ByKeywords(Heads):
    def __init__(self, **kwargs):
        super().__init__(kwargs["dim"], kwargs["num_heads"])

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)


class OfWidth(nn.Module):
    """As many heads as a width of one allows."""

    def __init__(self, d_model, head_dim):
        super().__init__()
        self.qkv, self.o = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.head_dim = head_dim

    def forward(self, x):
        three = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in three)
        y = (q @ k.mT / math.sqrt(self.head_dim)).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Described, ByKeywords, OfWidth])
def test_classes_that_are_built_or_called_otherwise(kind):
    report = multihead.check(kind)
    assert report.judgement in ("right", "right_if") and not report.causes, str(report)
