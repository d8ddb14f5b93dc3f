# SPDX-License-Identifier: MIT
"""Attention as collections of published models have it: what it is built with, how it is
called, and what it returns."""

import math

import pytest
import torch
from heads import Heads
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn

import multihead

# --- What comes back -----------------------------------------------------------------


def heads_handed_on(q, k, v):
    """q, k, v: (B, H, L, D). Returns (B, L, H, D), which the caller merges."""
    weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
    return (weights @ v).transpose(1, 2)


def heads_handed_on_unscaled(q, k, v):
    """q, k, v: (B, H, L, D)."""
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


def repeated(heads, count):
    return heads.repeat_interleave(count, 1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling):
    """As Transformers calls attention: the layer first."""
    key = repeated(key, module.num_key_value_groups)
    value = repeated(value, module.num_key_value_groups)
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, :, : key.shape[-2]]
    weights = nn.functional.dropout(scores.softmax(-1), 0.0, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def test_heads_that_are_handed_on_to_be_merged():
    assert multihead.check(heads_handed_on).judgement == "right"
    assert multihead.check(heads_handed_on_unscaled).causes == ["scale_missing"]


def test_the_layer_whose_settings_a_function_reads():
    report = multihead.check(eager_attention_forward)
    assert conditions(report) == ["mask_additive"], str(report)


class ClassAttention(Heads):
    """Class attention (Touvron et al., 2021) that hands on what it does not ask for."""

    def scores(self, q, k):
        return (q * k).sum(-1) / math.sqrt(q.size(-1))

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = self.scores(q[:, :, :1], k).softmax(-1)
        first = self.merged(weights.unsqueeze(2) @ v)
        return torch.cat([first, x[:, 1:]], 1)


class ClassAttentionUnscaled(ClassAttention):
    def scores(self, q, k):
        return (q * k).sum(-1)


def test_the_rest_of_a_sequence_that_is_handed_on():
    report = multihead.check(ClassAttention)
    assert report.judgement == "right", str(report)
    assert "only the first position asks" in str(report)
    assert multihead.check(ClassAttentionUnscaled).causes == ["scale_missing"]


def neighbours(q, k, v):
    """q, k, v: (B, D, Y, X), whose channels go last."""
    batch, width, rows, columns = q.shape
    unfold = nn.Unfold(3, padding=1)
    q = q.reshape(batch, 1, width, 1, rows * columns).permute(0, 1, 4, 3, 2)
    k = unfold(k).reshape(batch, 1, width, 9, -1).permute(0, 1, 4, 2, 3)
    v = unfold(v).reshape(batch, 1, width, 9, -1).permute(0, 1, 4, 3, 2)
    weights = (q @ k / math.sqrt(width)).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(batch, rows, columns, width)


def test_four_axes_that_come_back_in_another_order_are_not_judged():
    assert multihead.check(neighbours).judgement == "not_judged"


class Forecast(nn.Module):
    """A whole model of a series, of which a head makes a number for each step."""

    is_batch_first = True

    def __init__(self, input_dim, d_model=32, nhead=4):
        super().__init__()
        self.embed = nn.Linear(input_dim, d_model)
        layer = nn.TransformerEncoderLayer
        self.layer = layer(d_model, nhead, 64, batch_first=self.is_batch_first)
        self.head = nn.Linear(d_model, 1)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)))


class Classes(Forecast):
    def forward(self, x):
        """x: (batch, length, input_dim)."""
        return self.head(self.layer(self.embed(x)).mean(1))


class ClassesOfItems(Classes):
    is_batch_first = False


@pytest.mark.parametrize("model", [Forecast, Classes])
def test_a_whole_model_whose_head_returns_numbers(model):
    report = multihead.check(model)
    assert report.judgement == "right_if", str(report)
    assert "a head behind its attention" in str(report)


class PooledAttention(Heads):
    """One vector for all that come in."""

    axis = -1

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(self.axis)
        return self.merged(weights @ v).mean(1)


class PooledOverHeads(PooledAttention):
    axis = 1


def test_attention_that_pools_what_it_reads():
    report = multihead.check(PooledAttention)
    assert report.judgement == "right_if", str(report)
    assert multihead.check(PooledOverHeads).causes == ["softmax_over_heads"]


def test_a_whole_model_with_a_head_that_attends_to_other_items():
    assert named(multihead.check(ClassesOfItems)) == ["items_mixed"]


# --- How it is built -----------------------------------------------------------------


class Counted(Heads):
    """heads_dim counts the heads."""

    def __init__(self, dim, heads_dim):
        part = dim // heads_dim
        super().__init__(dim, heads_dim)
        self.shape = (heads_dim, part)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, *self.shape) for w in self.three())
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.merged((q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v)

    def three(self):
        return self.q, self.k, self.v


class CountedByEachCall(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def scale(self, width):
        return math.sqrt(width)

    def forward(self, x, num_heads):
        cut = (t.unflatten(-1, (num_heads, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in cut)
        weights = (q @ k.mT / self.scale(q.size(-1))).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class CountedByEachCallUnscaled(CountedByEachCall):
    def scale(self, width):
        return 1.0


def test_heads_that_are_counted_under_the_name_of_a_width():
    report = multihead.check(Counted)
    assert report.judgement == "right" and "heads_dim=8" in str(report), str(report)


def test_heads_that_each_call_counts():
    report = multihead.check(CountedByEachCall)
    assert report.judgement == "right" and "num_heads 8" in str(report), str(report)
    report = multihead.check(CountedByEachCallUnscaled)
    assert report.causes == ["scale_missing"], str(report)


class Plain(Heads):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v)


class OfGroups(Plain):
    """A group has two sides, as its constructor reads it."""

    def __init__(self, dim, num_heads, group_size):
        super().__init__(dim, num_heads)
        self.length = group_size[0] * group_size[1]

    def forward(self, x):
        assert x.shape[1] == self.length
        return super().forward(x)


class Activated(Plain):
    def __init__(self, dim, num_heads, activation=None):
        super().__init__(dim, num_heads)
        self.before = activation()

    def merged(self, heads):
        return self.o(self.before(heads.transpose(1, 2).flatten(2)))


class Normed(Plain):
    def __init__(self, dim, num_heads, scale_norm=True, norm_layer=None):
        super().__init__(dim, num_heads)
        if scale_norm:
            assert norm_layer is not None, "norm_layer must be provided"
        self.norm = norm_layer(dim)

    def merged(self, heads):
        return self.o(self.norm(heads.transpose(1, 2).flatten(2)))


class OfKind(Plain):
    """A kind that is not there ends the program."""

    def __init__(self, dim, num_heads, kind):
        super().__init__(dim, num_heads)
        if kind == 7:
            self.kind = kind
        else:
            exit(0)


class Numbered(Plain):
    def __init__(self, dim, num_heads, idx):
        super().__init__(dim, num_heads)
        self.steps = (1, 2, 4)[idx]


class RateForNothing(Plain):
    def __init__(self, dim, num_heads, attn_drop=0.0):
        super().__init__(dim, num_heads)


@pytest.mark.parametrize(
    "module", [OfGroups, Activated, Normed, Numbered, RateForNothing]
)
def test_what_a_constructor_asks_for(module):
    report = multihead.check(module)
    assert report.judgement == "right", str(report)


def test_a_program_that_ends_because_of_a_guess_is_not_judged():
    assert multihead.check(OfKind).judgement == "not_judged"


class SelfAttentionGPT2(Plain):
    """It is causal where it is told to be."""

    def __init__(self, dim, num_heads, mask=False):
        super().__init__(dim, num_heads)
        self.mask = mask

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if self.mask:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.merged(scores.softmax(-1) @ v)


def test_a_switch_called_mask_makes_it_causal():
    assert multihead.check(SelfAttentionGPT2).judgement == "right"


class OfTwoParts(nn.Module):
    @property
    def scale(self):
        return 1.0

    def __init__(self):
        super(Plain, self).__init__()


def test_super_of_another_class():
    assert named(multihead.check(OfTwoParts)) == ["raises"]


class EveryNth(nn.Module):
    """Head h takes every n-th feature of a fused projection, which learns that order."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def of_head(self, t, h):
        return t[..., h :: self.num_heads]

    def forward(self, x):
        three, heads = self.qkv(x).chunk(3, -1), []
        for h in range(self.num_heads):
            q, k, v = (self.of_head(t, h) for t in three)
            heads.append((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)
        return self.out(torch.cat(heads, -1))


class EveryNthAtOnce(EveryNth):
    def forward(self, x):
        cut = (t.unflatten(-1, (-1, self.num_heads)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.permute(0, 3, 1, 2) for t in cut)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("module", [EveryNth, EveryNthAtOnce])
def test_an_order_of_features_that_a_fused_matrix_has_learned(module):
    report = multihead.check(module)
    assert report.judgement == "right", str(report)
    assert "another order of features" in " ".join(str(report).split())


# --- How it is called ----------------------------------------------------------------


def scaled(q, k, v, scale_factor=1):
    return (q @ k.mT * scale_factor).softmax(-1) @ v


def test_a_factor_that_each_call_gives():
    assert "scale_argument" in conditions(multihead.check(scaled))


class OfPatches(Plain):
    """Items of items, as MobileViT has its patches."""

    def cut(self, x):
        batch, patches, length, _ = x.shape
        return x.view(batch, patches, length, self.num_heads, -1).transpose(2, 3)

    def merged(self, heads):
        return self.o(heads.transpose(2, 3).flatten(3))


class OfPatchesUnscaled(OfPatches):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT).softmax(-1) @ v)


def test_an_axis_more_than_the_batch():
    report = multihead.check(OfPatches)
    assert report.judgement == "right" and "(B, P, L, E)" in str(report), str(report)
    assert multihead.check(OfPatchesUnscaled).causes == ["scale_missing"]


class OfAnImage(Plain):
    def forward(self, x, size):
        batch, length, width = x.shape
        pixels = x.mT.reshape(batch, width, *size)
        return super().forward(pixels.flatten(2).mT)


def test_both_sides_of_an_image_in_one_argument():
    report = multihead.check(OfAnImage)
    assert report.judgement == "right", str(report)


class PaddedPairs(Plain):
    """pad_mask says of each query which keys it may not see."""

    def forward(self, x, pad_mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if pad_mask is not None:
            pad_mask = pad_mask.unsqueeze(1).repeat(1, self.num_heads, 1, 1)
            scores = scores.masked_fill(pad_mask, -math.inf)
        return self.merged(scores.softmax(-1) @ v)


def test_a_mask_of_padding_that_is_one_of_pairs():
    assert conditions(multihead.check(PaddedPairs)) == ["mask_blocks"]


class NormedWhereEqual(Heads):
    """Keys are normed already, unless they are the queries."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, query, context):
        is_own = torch.equal(query, context)
        q, k, v = self.heads(
            self.norm(query), self.norm(context) if is_own else context
        )
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return query + self.merged(weights @ v)


def test_what_asks_whether_its_inputs_are_equal():
    report = multihead.check(NormedWhereEqual)
    assert report.judgement == "right", str(report)


class Scaled(nn.Module):
    """Keys come transposed; the scale is a parameter, which is not learned."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        scale = torch.tensor((d_model // n_heads) ** -0.5)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, q, k, v):
        return (torch.matmul(q, k) * self.scale).softmax(-1) @ v


def test_a_scale_that_is_a_parameter_beside_heads():
    assert conditions(multihead.check(Scaled)) == ["keys_come_transposed"]


class Stops(Plain):
    def forward(self, x):
        breakpoint()
        import pdb

        pdb.set_trace()
        return super().forward(x)


def test_where_its_author_stopped_to_look():
    assert multihead.check(Stops).judgement == "right"


class OfKinds(Heads):
    """Its scores are of one of two kinds."""

    def __init__(self, dim, num_heads, score_function="dot_product"):
        super().__init__(dim, num_heads)
        self.score_function = score_function

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT
        if self.score_function == "dot_product":
            return self.merged(scores.softmax(-1) @ v)
        return self.merged((scores / math.sqrt(q.size(-1))).softmax(-1) @ v)


def test_scores_that_are_unscaled_by_default_beside_others():
    assert conditions(multihead.check(OfKinds)) == ["dot_product_attention"]


class AddsNothing(Plain):
    """Positions that each call would have to bring."""

    def forward(self, x, table=torch.zeros(1, 0, 1)):  # noqa: B008
        return super().forward(x + table)


def test_a_table_of_no_positions():
    report = multihead.check(AddsNothing)
    assert report.judgement == "not_judged"
    assert "must match the size of tensor b (0)" in " ".join(str(report).split())


# --- Attention of another kind -------------------------------------------------------


class ProbSparse(Heads):
    """The queries that matter most attend, the others get the mean."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        top = scores.amax(-1).topk(2, -1).indices
        mean = v.mean(2, keepdim=True).expand_as(v).clone()
        rows = top.unsqueeze(-1).expand(*top.shape, scores.size(-1))
        read = scores.gather(2, rows).softmax(-1) @ v
        out = mean.scatter(2, top.unsqueeze(-1).expand_as(read), read)
        return self.merged(out)


class NormsValues(Plain):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.v_norm = nn.RMSNorm(dim // num_heads, elementwise_affine=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        v = self.v_norm(v)
        return self.merged((q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v)


@pytest.mark.parametrize("module", [ProbSparse, NormsValues])
def test_attention_of_another_kind_is_not_judged(module):
    report = multihead.check(module)
    assert report.judgement == "not_judged", str(report)


# --- Flaws ---------------------------------------------------------------------------


class Alike(Heads):
    """Each query meets its own key in the place of the others'."""

    def forward(self, x, adj):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        keys = k.unsqueeze(2)
        if self.reads_others:
            keys = k.unsqueeze(1)
        scores = (q.unsqueeze(2) * keys).sum(-1) / math.sqrt(q.size(-1))
        scores = scores.expand(-1, -1, x.size(1), -1)
        hidden = (adj == 0).unsqueeze(-1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(2)
        root = self.root(x) if hasattr(self, "root") else 0
        return root + self.o((weights.unsqueeze(-1) * v.unsqueeze(1)).sum(2).flatten(2))

    reads_others = False

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.root = nn.Linear(dim, dim)


class ReadsOthers(Alike):
    reads_others = True


def test_weights_that_are_alike_whatever_is_asked():
    assert named(multihead.check(Alike)) == ["weights_alike"]
    assert "weights_alike" not in named(multihead.check(ReadsOthers))


class HeadsOfEach(Heads):
    """Heads of one position attend to each other, of queries and keys alike."""

    def forward(self, query, key, value):
        q, k, v = (t.transpose(1, 2) for t in self.heads(query, value, key))
        weights = (q @ k.mT / math.sqrt(q.size(1))).softmax(-1)
        return self.o((weights @ v).flatten(2))


def test_positions_are_apart_beside_keys_that_are_as_many():
    assert named(multihead.check(HeadsOfEach)) == ["positions_apart"]


class Sharpens(Plain):
    """Each call changes what the next one reads."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.shares = nn.Parameter(torch.tensor([0.2, 0.8]))

    def forward(self, x):
        self.shares = nn.Parameter(self.shares.softmax(0))
        return self.shares[0] * super().forward(x)


def test_a_call_that_changes_what_the_next_one_reads():
    report = multihead.check(Sharpens)
    assert named(report) == ["random"]
    assert "a call changes what the next one reads" in " ".join(str(report).split())
