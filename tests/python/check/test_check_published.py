# SPDX-License-Identifier: MIT
"""What published code does beside attention: tables of positions, masks that it passes
over, NaN under a mask, settings of the process, dropout of whole heads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


class _Projections(nn.Module):
    """Queries, keys and values (B, L, H, D) of x, and the output."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def heads(self, x):
        return [
            w(x).unflatten(-1, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv)
        ]

    def merged(self, q, k, v, mask=None):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))


def _turned(x):
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


class RotaryPairs(_Projections):
    """A table (L, D/2, 2) of a cosine and a sine for two features."""

    def forward(self, x, freqs_cis):
        q, k, v = self.heads(x)

        def rotated(t):
            pairs = t.reshape(*t.shape[:-1], -1, 2)
            table = freqs_cis.view(1, pairs.size(1), 1, pairs.size(3), 2)
            cos, sin = table.unbind(-1)
            one, other = pairs.unbind(-1)
            both = (one * cos - other * sin, other * cos + one * sin)
            return torch.stack(both, -1).flatten(3)

        return self.merged(rotated(q), rotated(k), v)


class RotaryStacked(_Projections):
    """Tables by their places, of whatever holds both."""

    def forward(self, x, encoding):
        q, k, v = self.heads(x)
        cos, sin = (encoding[i][:, None] for i in (0, 1))
        return self.merged(q * cos + _turned(q) * sin, k * cos + _turned(k) * sin, v)


class RotaryWithCache(_Projections):
    """Without start_pos there is no cache, and no buffer for one."""

    def forward(self, x, pos_embed, start_pos=None):
        q, k, v = self.heads(x)
        cos, sin = (table.unsqueeze(1) for table in pos_embed)
        q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
        if start_pos is not None:
            self.cache_k[:, start_pos : start_pos + len(x)] = k
        return self.merged(q, k, v)


@pytest.mark.parametrize("target", [RotaryPairs, RotaryStacked])
def test_tables_of_positions(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)


def test_tables_of_positions_beside_a_cache():
    report = multihead.check(RotaryWithCache)
    conditions = [condition["name"] for condition in report.conditions]
    assert conditions == ["one_token_on_cache"], str(report)


class ByRank(_Projections):
    """Masks (Lk, B) and (Lq, Lk, B), as the text does not say; others it passes over."""

    def forward(self, x, attn_mask=None):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if attn_mask is not None:
            if attn_mask.dim() == 2:
                hidden = attn_mask.T[:, None, None, :]
                scores = scores.masked_fill(hidden, -torch.inf)
            elif attn_mask.dim() == 3:
                hidden = attn_mask.permute(2, 0, 1)[:, None]
                scores = scores.masked_fill(hidden, -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class AnyRankIgnored(_Projections):
    """The same, but what is made of a mask is thrown away."""

    def forward(self, x, attn_mask=None):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if attn_mask is not None and attn_mask.dim() == 2:
            scores.masked_fill(attn_mask, -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_masks_that_are_passed_over_are_not_ignored():
    report = multihead.check(ByRank)
    assert report.judgement == "not_judged", str(report)
    assert "how many axes its mask has" in str(report)


def test_a_mask_that_is_taken_and_ignored_still_is():
    assert multihead.check(AnyRankIgnored).cause == "mask_ignored"


class NaNUnderAMask(_Projections):
    """0 times infinity is no number."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        added = None if mask is None else (1.0 - mask.to(x.dtype)) * -torch.inf
        return self.merged(q, k, v, added)


def test_nan_under_a_mask_leaves_the_rest_to_be_judged():
    report = multihead.check(NaNUnderAMask)
    assert report.judgement == "wrong"
    assert report.cause == "not_finite", str(report)
    assert all(case["agrees"] for case in report.cases)


class NaNBesideAFault(NaNUnderAMask):
    def heads(self, x):
        q, k, v = super().heads(x)
        return [q * q.size(-1) ** 0.5, k, v]


def test_nan_beside_a_fault():
    report = multihead.check(NaNBesideAFault)
    assert report.causes == ["scale_missing", "not_finite"], str(report)


class OtherKernels(nn.Module):
    """Changes a setting, and cannot be called with what can be guessed."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, n_heads, batch_first=True)

    def forward(self, x, plan):
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        return self.attention(x, x, x)[0][plan.order]


def test_settings_of_the_process_are_no_verdict_on_what_could_not_be_called():
    report = multihead.check(OtherKernels)
    assert report.judgement == "not_judged", str(report)
    assert any(r["name"] == "changes_global_state" for r in report.remarks)


class DropsHeads(_Projections):
    """Names of sizes, whole heads dropped, and a local number of NumPy's."""

    def __init__(self, qdim, adim, odim, n_heads, dropout, dropout_head=0.0):
        super().__init__(adim, n_heads)
        assert qdim == adim == odim
        self.dropout, self.dropout_head = nn.Dropout(dropout), dropout_head

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        limits = np.finfo(np.float64)
        scores = (q @ k.mT / q.size(-1) ** 0.5).clamp(min=float(limits.min))
        weights = self.dropout(scores.softmax(-1))
        if self.dropout_head > 0 and self.training:
            kept = torch.rand(self.n_heads) > self.dropout_head
            weights = weights * kept[:, None, None]
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


def test_dropout_of_whole_heads_is_left_off():
    report = multihead.check(DropsHeads)
    assert report.judgement == "right", str(report)


class SetBlock(nn.Module):
    """A block of the Set Transformer, over Q and K of its own widths."""

    def __init__(self, dim_Q, dim_K, dim_V, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.fc_q, self.fc_k = nn.Linear(dim_Q, dim_V), nn.Linear(dim_K, dim_V)
        self.fc_v, self.fc_o = nn.Linear(dim_K, dim_V), nn.Linear(dim_V, dim_V)

    def root(self, width):
        return (width // self.num_heads) ** 0.5

    def forward(self, Q, K):
        width = self.fc_q.out_features
        Q, K, V = self.fc_q(Q), self.fc_k(K), self.fc_v(K)
        part = width // self.num_heads
        Q, K, V = (torch.cat(x.split(part, 2), 0) for x in (Q, K, V))
        A = torch.softmax(Q @ K.mT / self.root(width), 2)
        out = torch.cat((Q + A @ V).split(len(Q) // self.num_heads, 0), 2)
        return out + F.relu(self.fc_o(out))


class SetBlockOfTheWholeRoot(SetBlock):
    def root(self, width):
        return width**0.5


def test_a_block_of_the_set_transformer():
    report = multihead.check(SetBlock)
    assert report.judgement == "right", str(report)
    assert any(a["name"] == "set_attention_block" for a in report.assumptions)
    assert multihead.check(SetBlockOfTheWholeRoot).cause == "scale_by_embed_dim"


class ValuesAdded(_Projections):
    """The projected values take the place of a residual connection."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged(q, k, v) + v.flatten(2)


class ValuesAddedWithoutScale(ValuesAdded):
    def heads(self, x):
        q, k, v = super().heads(x)
        return [q * q.size(-1) ** 0.5, k, v]


def test_projected_values_as_a_residual_connection():
    report = multihead.check(ValuesAdded)
    assert report.judgement == "right", str(report)
    assert any(a["name"] == "values_added" for a in report.assumptions)
    assert multihead.check(ValuesAddedWithoutScale).cause == "scale_missing"


class OutputDropped(_Projections):
    """Weights have a layer of dropout, too, which a line called that is gone."""

    def __init__(self, dim, n_heads, dropout):
        super().__init__(dim, n_heads)
        self.attn_drop, self.proj_drop = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        weights = self.dropped((q @ k.mT / q.size(-1) ** 0.5).softmax(-1))
        return self.proj_drop(self.wo((weights @ v).transpose(1, 2).flatten(2)))

    def dropped(self, weights):
        return weights


class BothDropped(OutputDropped):
    def dropped(self, weights):
        return self.attn_drop(weights)


def test_a_layer_of_dropout_that_is_never_called():
    assert multihead.check(BothDropped).judgement == "right"
    report = multihead.check(OutputDropped)
    assert report.cause == "dropout_missing", str(report)


class HeadsInterleaved(_Projections):
    """Cut feature by feature, merged head by head, and causal without being asked."""

    def heads(self, x):
        return [
            w(x).unflatten(-1, (-1, self.n_heads)).mT
            for w in (self.wq, self.wk, self.wv)
        ]

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        scores = q @ k.mT / q.size(-1) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


def test_heads_cut_in_one_order_and_merged_in_another_under_a_triangle():
    assert multihead.check(HeadsInterleaved).cause == "heads_interleaved"


class WindowOfSteps(_Projections):
    """A window is for steps of decoding, of which there are none here."""

    def forward(self, x, sliding_window=0, step=0):
        if step:
            x = x[:, -sliding_window:]
        q, k, v = self.heads(x)
        return self.merged(q, k, v)


class WindowForgotten(_Projections):
    def forward(self, x, sliding_window=0):
        return self.merged(*self.heads(x))


def test_a_window_of_steps_is_not_ignored():
    report = multihead.check(WindowOfSteps)
    assert report.judgement == "right", str(report)
    assert multihead.check(WindowForgotten).cause == "window_ignored"


class KeysBefore(_Projections):
    """Keys are set by a call of its own, before."""

    def init_keys(self, x):
        self.proj_key = self.wk(x)

    def forward(self, x):
        q, _, v = self.heads(x)
        k = self.proj_key.unflatten(-1, (self.n_heads, -1))
        return self.merged(q, k, v)


def test_what_another_method_sets_is_no_missing_attribute():
    report = multihead.check(KeysBefore)
    assert report.judgement == "not_judged", str(report)


class MasksOfTwoAxes(_Projections):
    """attn_mask: (S, T), 0 where a key does not count; others lose their axes."""

    def forward(self, x, attn_mask=None):
        n, length, width = x.shape
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if attn_mask is not None:
            hidden = ~attn_mask.bool()[None, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.wo(out.contiguous().view(n, length, width))


def test_masks_of_more_axes_than_are_meant():
    report = multihead.check(MasksOfTwoAxes)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "(B, 1, Lq, Lk)" in str(report.remarks)


class KeepsKeys(_Projections):
    """Keys are kept for later calls, with the graph that made them."""

    def __init__(self, dim, n_heads):
        super().__init__(dim, n_heads)
        self.cache = torch.zeros(32, 160, dim)

    def forward(self, x):
        q, _, v = self.heads(x)
        self.cache[: len(x), : x.size(1)] = self.wk(x)
        k = self.cache[: len(x), : x.size(1)].unflatten(-1, (self.n_heads, -1))
        return self.merged(q, k, v)


def test_graphs_that_are_kept_are_no_error():
    report = multihead.check(KeepsKeys)
    assert report.judgement == "right", str(report)


class MaskObject(_Projections):
    """The mask is an object that holds one."""

    def forward(self, x, attn_mask=None):
        q, k, v = self.heads(x)
        mask = None if attn_mask is None else attn_mask.mask
        return self.merged(q, k, v, mask)


class MisspeltMask(_Projections):
    def forward(self, x, attn_mask=None):
        q, k, v = self.heads(x)
        mask = None if attn_mask is None else attn_mask.logical_nott()
        return self.merged(q, k, v, mask)


def test_a_mask_that_is_an_object():
    report = multihead.check(MaskObject)
    assert report.judgement == "right", str(report)
    assert multihead.check(MisspeltMask).cause == "raises"


class TimeWeights(_Projections):
    """Weights are multiplied by learned numbers of positions."""

    def __init__(self, dim, n_heads, block_size):
        super().__init__(dim, n_heads)
        self.time_weighting = nn.Parameter(torch.ones(n_heads, block_size, block_size))

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        weights = weights * self.time_weighting[:, : x.size(1), : x.size(1)]
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class ScoresOfPlaces(_Projections):
    """Queries also meet a table of places, looked up, whose scores are in the sum."""

    def __init__(self, dim, n_heads, max_len):
        super().__init__(dim, n_heads)
        self.places = nn.Embedding(max_len, dim // n_heads)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        table = self.places(torch.arange(x.size(1)))
        scores = q @ k.mT + torch.einsum("bhld,sd->bhls", q, table)
        weights = (scores / q.size(-1) ** 0.5).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


def test_learned_tables_that_no_matrix_product_has_are_other_layers():
    report = multihead.check(TimeWeights)
    assert report.cause == "other_layers", str(report)
    report = multihead.check(ScoresOfPlaces)
    assert [c["name"] for c in report.conditions] == ["layers_beside"], str(report)
    assert "places.weight" in str(report)


class OnACache(_Projections):
    """Keys and values of earlier tokens are handed from call to call."""

    def forward(self, x, layer_past=None, use_cache=False):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        if layer_past is not None:
            k, v = self.joined(layer_past[0], k), self.joined(layer_past[1], v)
        present = (k, v) if use_cache else None
        ahead = k.size(2) - q.size(2)
        scores = q @ k.mT / q.size(-1) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + ahead)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2)), present

    def joined(self, past, new):
        return torch.cat((past, new), 2)


class OnACacheOfStacks(OnACache):
    """Of all layers, keys and values are one tensor."""

    def forward(self, x, past=None):
        out, present = super().forward(x, past, use_cache=True)
        return out, torch.stack(present)


class OnACacheTheWrongWay(OnACache):
    """What was kept of a head goes to the next one."""

    def joined(self, past, new):
        return torch.cat((past.roll(1, 1), new), 2)


@pytest.mark.parametrize("target", [OnACache, OnACacheOfStacks])
def test_the_way_of_a_cache_is_judged_with_the_rest(target):
    report = multihead.check(target)
    assert report.cause is None, str(report)
    (case,) = [c for c in report.cases if c["name"] == "the last token, on a cache"]
    assert case["agrees"]


def test_a_cache_that_exchanges_heads():
    report = multihead.check(OnACacheTheWrongWay)
    assert report.cause == "cache_differs", str(report)


class TurnedBeforeHeads(nn.Module):
    """Matrices (in, out); queries and keys turned by positions before heads are cut, by
    angles that a buffer keeps in float32."""

    pair = staticmethod(lambda a, b: torch.stack([a, b], -1).flatten(-2))

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (
            nn.Parameter(torch.randn(dim, dim) * 0.2) for _ in range(4)
        )
        speeds = 10000 ** (-torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("speeds", speeds.float())

    def turned(self, x):
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.speeds
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return self.pair(a * cos - b * sin, a * sin + b * cos)

    def forward(self, x):
        q, k, v = self.turned(x @ self.q), self.turned(x @ self.k), x @ self.v
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ self.o


class TurnedBeforeHeadsOfHalves(TurnedBeforeHeads):
    """Pairs lie in two heads: their products no longer depend on distances."""

    pair = staticmethod(lambda a, b: torch.cat([a, b], -1))


def test_positions_that_turn_features_before_heads_are_cut():
    report = multihead.check(TurnedBeforeHeads)
    assert report, str(report)
    assumed = [a["name"] for a in report.assumptions]
    assert assumed == ["weights_in_out", "rotary_positions"]
    assert multihead.check(TurnedBeforeHeadsOfHalves).judgement == "wrong"
