# SPDX-License-Identifier: MIT
"""How calls are read where little is said: sizes that only their use tells, names of
weights that one run knows and another does not, weights that are dropped before they are
turned, gradients that nobody asks for."""

import numpy as np
import torch
from torch import nn

import multihead


class KeysFirst(nn.Module):
    """q: (B, E, Lq), k and v: (B, E, Lk); is_pad: (B, Lk), 1 where the key is padding."""

    axis = 2

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.fq, self.fk = nn.Conv1d(hidden, hidden, 1), nn.Conv1d(hidden, hidden, 1)
        self.fv, self.fo = nn.Conv1d(hidden, hidden, 1), nn.Conv1d(hidden, hidden, 1)

    def forward(self, q, k, v, is_pad=None):
        B, C, Tq = q.shape
        q, k, v = (
            f(x).unflatten(1, (self.heads, -1))
            for f, x in ((self.fq, q), (self.fk, k), (self.fv, v))
        )
        scores = k.mT @ q / (C // self.heads) ** 0.5  # B, H, Tk, Tq
        if is_pad is not None:
            scores = scores - 1e4 * is_pad.float()[:, None, :, None]
        return self.fo((v @ scores.softmax(self.axis)).reshape(B, C, Tq))


class KeysFirstOverQueries(KeysFirst):
    """q: (B, E, Lq), k and v: (B, E, Lk); is_pad: (B, Lk), 1 where the key is padding."""

    axis = 3


def test_names_that_one_run_tells_hold_for_all():
    report = multihead.check(KeysFirst)
    assert report.judgement == "right", str(report)
    assert multihead.check(KeysFirstOverQueries).cause == "softmax_over_queries"


class TurnedAfterDropout(nn.Module):
    def __init__(self, dim, num_heads, attn_drop=0.1, proj_drop=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (k @ q.mT / q.shape[-1] ** 0.5).softmax(-2)
        attn = self.attn_drop(attn)
        return self.proj_drop(self.proj((attn.mT @ v).transpose(1, 2).reshape(B, N, C)))


def test_weights_that_are_dropped_before_they_are_turned():
    report = multihead.check(TurnedAfterDropout)
    assert report.judgement == "right", str(report)


@torch.no_grad()
def reference_of_a_kernel(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def in_numpy(q, k, v):
    q, k, v = q.detach().numpy(), k.detach().numpy(), v.detach().numpy()
    scores = torch.from_numpy(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
    return scores.softmax(-1) @ torch.from_numpy(v)


def without_a_graph(q, k, v):
    return ((q @ k.mT).detach() / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_functions_that_nobody_trains_leave_gradients():
    assert multihead.check(reference_of_a_kernel).judgement == "right"
    assert multihead.check(in_numpy).judgement == "right"
    assert multihead.check(without_a_graph).cause == "gradient_detached"


class ScaledBefore(nn.Module):
    """Latents read media; their queries come of scaled ones."""

    def __init__(self, dim, num_latents=3, heads=2):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.wq, self.wkv = (nn.Linear(dim, n * dim, bias=False) for n in (1, 2))
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, media):
        latents = self.latents.expand(len(media), -1, -1)
        width = latents.shape[-1] // self.heads
        q = self.wq(latents / width**0.5)
        k, v = self.wkv(self.norm(media)).chunk(2, -1)
        q, k, v = (torch.stack(t.split(width, -1)) for t in (q, k, v))
        return self.wo(torch.cat(list((q @ k.mT).softmax(-1) @ v), -1))


def test_what_is_scaled_before_it_is_projected_is_not_called_unscaled():
    assert multihead.check(ScaledBefore).cause != "scale_missing"


class Head(nn.Module):
    def __init__(self, d, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, width, bias=False) for _ in range(3))

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return (q @ k.mT / k.size(-1) ** 0.5).softmax(-1) @ self.v(x)


class OfHeads(nn.Module):
    """The number of heads is what the width is divided by."""

    axis = -1

    def __init__(self, d, n):
        super().__init__()
        self.heads = nn.ModuleList([Head(d, d // n) for _ in range(n)])
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        joined = torch.stack([head(x) for head in self.heads], dim=1)
        return self.proj(self.merged(joined).reshape(x.shape))

    def merged(self, heads):
        return heads.transpose(1, 2)


class OfHeadsNotMerged(OfHeads):
    def merged(self, heads):
        return heads


class Reshaped(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.wq, self.wk, self.wv = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, decoder_states, encoder_states):
        q, k = self.wq(decoder_states), self.wk(encoder_states)
        k = k.view(len(k), self.hidden, -1)
        weights = torch.softmax(q @ k / self.hidden**0.5, dim=2)
        return weights @ self.wv(encoder_states)


def test_sizes_are_no_guess_where_their_use_tells_what_they_are():
    assert multihead.check(OfHeads).judgement == "right"
    assert multihead.check(OfHeadsNotMerged).cause == "merge_not_transposed"
    assert multihead.check(Reshaped).cause == "keys_reshaped"


class PadsQueries(nn.Module):
    """pad: (B, L) bool, True = padding."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.w = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, x, pad):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.w[:3]
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(pad[:, None, :, None], -1e9)
        return self.w[3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_that_is_called_pad():
    assert multihead.check(PadsQueries).cause == "padding_on_queries"


class AsksByState(nn.Module):
    """state: (B, E), encoder: (B, L, E), lengths: (B,)."""

    def forward(self, state, encoder, lengths):
        scores = torch.einsum("be,bse->bs", state, encoder)
        hidden = torch.arange(encoder.shape[1]) > lengths[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bs,bse->be", weights, encoder)


def test_keys_behind_lengths_of_one_query():
    causes = multihead.check(AsksByState).causes
    assert causes == ["scale_missing", "padding_off_by_one"], causes


def of_matrices(query_matrix, key_matrix, value_matrix):
    """In NumPy, of one head: 2D arrays."""
    scores = query_matrix @ key_matrix.T
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    return weights / np.sqrt(key_matrix.shape[-1]) @ value_matrix


def test_matrices_that_are_sequences():
    assert multihead.check(of_matrices).cause == "scale_after_softmax"


class AddsInfinity(nn.Module):
    """Causal if it is asked for."""

    def __init__(self, d_model=48, n_heads=8, apply_mask=False):
        super().__init__()
        self.n_heads, self.apply_mask = n_heads, apply_mask
        self.qkv, self.out = (
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
        )

    def forward(self, x):
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.apply_mask:
            mask = torch.tril(torch.ones(x.shape[1], x.shape[1]))
            mask = mask.masked_fill(mask == 0, float("inf")).masked_fill(mask == 1, 0)
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_flag_that_makes_all_of_it_nan():
    assert multihead.check(AddsInfinity).cause == "mask_sentinel_leaks"


class CallsItsRate(nn.Module):
    """Keeps a number, and calls it as the layer that it meant to make."""

    def __init__(self, dim, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        weights = self.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class CallsWhatItIsHanded(CallsItsRate):
    def __init__(self, dim, num_heads, dropout=None):
        super().__init__(dim, num_heads, dropout)


def test_a_number_that_is_called():
    report = multihead.check(CallsItsRate)
    assert report.cause == "raises" and report.judgement == "wrong", str(report)
    assert multihead.check(CallsWhatItIsHanded).judgement != "wrong"


class InsistsOnAngles(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, freqs=None):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        cos, sin = freqs.cos(), freqs.sin()  # (L, d)
        q, k = (
            t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin
            for t in (q, k)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_positions_that_may_be_left_out_as_it_says_and_must_not():
    report = multihead.check(InsistsOnAngles)
    assert report.judgement.startswith("right"), str(report)
    assert "freqs given, without which it raises" in " ".join(str(report).split())


class ReturnsEdges(nn.Module):
    """Nodes and edges, of which each has matrices."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.out_value = nn.Linear(num_heads, dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        nodes = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return nodes, self.out_value(scores.permute(0, 2, 3, 1))


def test_a_matrix_of_what_comes_back_beside_the_output_is_used():
    assert multihead.check(ReturnsEdges).judgement != "wrong"
