# SPDX-License-Identifier: MIT
"""Settings that are defaults, complex buffers, lengths and prefixes of items, caches in
the wrong order, and windows of images: shifted, masked, and put back."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


@dataclass
class Sizes:
    dim: int = 32
    heads: int = 4
    head_dim: int = 0

    def __post_init__(self):
        self.head_dim = self.dim // self.heads


DEFAULTS = [Sizes(), SimpleNamespace(dim=32, heads=4), {"dim": 32, "heads": 4}]


class FusedByHead(nn.Module):
    """Heads of 4: with 8, as a guess would have it, nothing explains it."""

    def __init__(self, sizes):
        super().__init__()
        sizes = sizes if isinstance(sizes, dict) else vars(sizes)
        self.heads, dim = sizes["heads"], sizes["dim"]
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (
            self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OfDataclass(FusedByHead):
    def __init__(self, sizes=DEFAULTS[0]):
        super().__init__(sizes)


class OfNamespace(FusedByHead):
    def __init__(self, args=DEFAULTS[1]):
        super().__init__(args)


class OfDictionary(FusedByHead):
    def __init__(self, cfg=DEFAULTS[2]):
        super().__init__(cfg)


@pytest.mark.parametrize("kind", [OfDataclass, OfNamespace, OfDictionary])
def test_defaults_that_are_settings_get_our_sizes(kind):
    report = multihead.check(kind)
    assert report.judgement == "right", str(report)
    assert re.search(r"heads'?(=|: )8", str(report))
    assert [DEFAULTS[1].heads, DEFAULTS[2]["heads"], Sizes().heads] == [4, 4, 4]


class Complex(Heads):
    """Llama's, with its turns in a complex buffer."""

    def __init__(self, dim, num_heads, max_seq_len=32):
        super().__init__(dim, num_heads)
        width = dim // num_heads
        rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(max_seq_len), rates)
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles))

    def turned(self, heads):
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.freqs[: heads.shape[2]]).flatten(3)

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged(F.scaled_dot_product_attention(*map(self.turned, (q, k)), v))


def test_complex_buffers_stay_complex():
    report = multihead.check(Complex)
    assert report.judgement == "right", str(report)


# ---- Numbers of tokens ---------------------------------------------------------------


class OfLengths(Heads):
    """mem_len counts the rows of mem that are none of padding."""

    def forward(self, x, mem, mem_len):
        q, k, v = self.heads(x, mem)
        seen = torch.arange(mem.shape[1]).view(1, -1) < mem_len.view(-1, 1)
        return self.attend(q, k, v, seen[:, None, None, :])

    def attend(self, q, k, v, seen):
        return self.merged(F.scaled_dot_product_attention(q, k, v, seen))


class OfLengthsUnused(OfLengths):
    def attend(self, q, k, v, seen):
        return self.merged(F.scaled_dot_product_attention(q, k, v))


def test_lengths_that_are_compared_with_places():
    report = multihead.check(OfLengths)
    assert report.judgement == "right", str(report)
    assert multihead.check(OfLengthsUnused).judgement == "wrong"


class OfPrefix(Heads):
    """Causal, but for a prefix of prefix_len (B,) tokens, which all see."""

    axis = 1

    def forward(self, x, prefix_len):
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        in_prefix = (place < prefix_len[:, None]).unsqueeze(self.axis)
        seen = (place[:, None] >= place) | in_prefix
        return self.merged(F.scaled_dot_product_attention(q, k, v, seen[:, None]))


class OfPrefixOnRows(OfPrefix):
    axis = 2


def test_prefixes_are_seen_whole_and_nothing_behind_them():
    report = multihead.check(OfPrefix)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(OfPrefixOnRows).cause == "prefix_misread"


class OnCache(Heads):
    """Causal self-attention with a cache of keys and values."""

    def joined(self, past, new):
        return torch.cat((past, new), dim=-2)

    def forward(self, x, past=None):
        q, k, v = self.heads(x)
        if past is not None:
            k, v = (self.joined(old, new) for old, new in zip(past, (k, v)))
        ahead = k.shape[-2] - q.shape[-2]
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(ahead)
        out = F.scaled_dot_product_attention(q, k, v, seen)
        return self.merged(out), (k, v)


class NewBeforeOld(OnCache):
    def joined(self, past, new):
        return torch.cat((new, past), dim=-2)


def test_new_keys_stand_behind_old_ones():
    assert multihead.check(OnCache).judgement == "right"
    report = multihead.check(NewBeforeOld)
    assert report.cause == "cache_differs"
    assert "before those of calls before" in str(report)


# ---- What texts say ------------------------------------------------------------------


class PyTorchsLayer(nn.Module):
    """x: (batch, num_patches + 1, dim)"""

    batch_first = False

    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(
            dim, num_heads, batch_first=type(self).batch_first
        )
        self.mlp = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.LayerNorm(dim)
        )

    def forward(self, x):
        y = self.norm(x)
        return self.mlp(x + self.attn(y, y, y)[0])


class PyTorchsLayerInOrder(PyTorchsLayer):
    """x: (batch, variates, d_model)"""

    batch_first = True


def test_axes_whose_middle_is_any_count():
    assert multihead.check(PyTorchsLayer).cause == "batch_and_sequence_exchanged"
    assert multihead.check(PyTorchsLayerInOrder).judgement == "right_if"


class OnesForWords(Heads):
    def forward(self, query, key, value, mask=None):
        # query = [batch size, query len, hid dim]
        # mask = [batch size, 1, 1, key len], 1 for words, 0 for <pad>
        q, k, v = self.heads(query, key, value)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 1, -1e10)
        return self.merged(scores.softmax(-1) @ v)


def test_comments_that_open_a_function_are_of_its_arguments():
    assert multihead.check(OnesForWords).cause == "mask_inverted"


class RotaryOfHeads(Complex):
    """Rotary positions, of heads that are not moved yet."""

    def turned(self, heads):
        return super().turned(heads.transpose(1, 2)).transpose(1, 2)


def test_rotary_positions_that_count_heads():
    assert multihead.check(RotaryOfHeads).cause == "turned_alike"


# ---- Windows of images ---------------------------------------------------------------


class Windows(nn.Module):
    """Windows of (B, H, W, C), shifted with a mask, as in Swin."""

    def __init__(self, dim, num_heads, window_size=4, shift_size=0):
        super().__init__()
        self.num_heads, self.w, self.shift = num_heads, window_size, shift_size
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def cut(self, x):
        B, H, W, C = x.shape
        x = x.view(B, H // self.w, self.w, W // self.w, self.w, C)
        return x.transpose(2, 3).reshape(-1, self.w**2, C)

    def put_back(self, x, B, H, W):
        x = x.view(B, H // self.w, W // self.w, self.w, self.w, -1)
        return x.transpose(2, 3).reshape(B, H, W, -1)

    def mask(self, H, W):
        regions, count = torch.zeros(1, H, W, 1), 0
        w, s = self.w, self.shift
        parts = (slice(0, -w), slice(-w, -s), slice(-s, None))
        for rows in parts:
            for columns in parts:
                regions[:, rows, columns] = count
                count += 1
        number = self.cut(regions)
        return number != number.mT

    def rolled(self, x, by):
        return x.roll((by, by), (1, 2))

    def forward(self, x):
        B, H, W, C = x.shape
        if self.shift:
            x = self.rolled(x, -self.shift)
        q, k, v = self.qkv(self.cut(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
        if self.shift:
            blocked = self.mask(H, W).repeat(B, 1, 1)
            scores = scores.masked_fill(blocked[:, None], -100.0)
        out = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)
        out = self.put_back(self.proj(out), B, H, W)
        return self.rolled(out, self.shift) if self.shift else out


class WithoutMask(Windows):
    """Tokens of other regions must not meet behind the shift; see Swin's masks."""

    def mask(self, H, W):
        return torch.zeros(H * W // self.w**2, self.w**2, self.w**2, dtype=torch.bool)


class OverPanoramas(WithoutMask):
    """Of panoramas, which go on behind their last column: no mask, unlike Swin."""


class InColumns(Windows):
    def put_back(self, x, B, H, W):
        x = x.view(B, W // self.w, H // self.w, self.w, self.w, -1)
        return x.permute(0, 2, 3, 1, 4, 5).reshape(B, H, W, -1)


class ByView(Windows):
    def put_back(self, x, B, H, W):
        return x.reshape(B, H, W, -1)


class RolledAgain(Windows):
    def rolled(self, x, by):
        return super().rolled(x, -abs(by))


class RequiredShift(Windows):
    """(B, H, W, C), whose windows are cut by a number of another name."""

    def __init__(self, dim, num_heads, w, shift):
        super().__init__(dim, num_heads, w, shift)

    def cut(self, x):
        B, H, W, C = x.shape
        s = self.w
        x = x.view(B, H // s, s, W // s, s, C)
        return x.transpose(2, 3).reshape(-1, s * s, C)


def test_shifted_windows_are_masked():
    assert multihead.check(Windows).judgement == "right", str(multihead.check(Windows))
    assert multihead.check(WithoutMask).cause == "wraps_around"
    assert multihead.check(OverPanoramas).judgement == "right"
    assert multihead.check(RolledAgain).cause == "shift_not_undone"
    assert multihead.check(RequiredShift).judgement == "right"


@pytest.mark.parametrize("kind", [InColumns, ByView])
def test_windows_are_put_back_where_they_were(kind):
    assert multihead.check(kind).cause == "windows_misplaced"


class OfWindow(nn.Module):
    """Relative positions of a window: mask is (windows, N, N) of 0 / -100, or None."""

    def __init__(self, dim, window, heads):
        super().__init__()
        self.heads = heads
        self.table = nn.Parameter(0.1 * torch.randn((2 * window - 1) ** 2, heads))
        place = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = place[:, None] - place + window - 1
        self.register_buffer("index", apart @ torch.tensor([2 * window - 1, 1]))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.table[self.index].permute(2, 0, 1)
        if mask is not None:
            count = mask.shape[0]
            scores = scores.view(B // count, count, self.heads, N, N) + mask[:, None]
            scores = scores.view(-1, self.heads, N, N)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


def test_tables_of_two_axes_tell_a_window_and_its_mask_is_added():
    report = multihead.check(OfWindow)
    assert report.judgement == "right", str(report)


class InBuffers(Complex):
    """Causal: start_pos tokens were seen before."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        for name in ("ck", "cv"):
            buffer = torch.zeros(3, num_heads, 32, dim // num_heads)
            self.register_buffer(name, buffer, persistent=False)

    def places(self, start, count):
        return torch.arange(start, start + count)

    def turned_at(self, heads, places):
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.freqs[places]).flatten(3)

    @torch.no_grad()
    def forward(self, x, start_pos=0):
        q, k, v = self.heads(x)
        count, end = len(x), start_pos + x.shape[1]
        places = self.places(start_pos, x.shape[1])
        self.ck[:count, :, start_pos:end] = self.turned_at(k, places)
        self.cv[:count, :, start_pos:end] = v
        seen = torch.ones(x.shape[1], end, dtype=torch.bool).tril(start_pos)
        kept = self.ck[:count, :, :end], self.cv[:count, :, :end]
        q = self.turned_at(q, places)
        return self.merged(F.scaled_dot_product_attention(q, *kept, seen))


class InBuffersFromZero(InBuffers):
    """Causal: start_pos tokens were seen before."""

    def places(self, start, count):
        return torch.arange(count)


def test_caches_of_code_that_nobody_trains():
    report = multihead.check(InBuffers)
    assert report.judgement == "right", str(report)
    assert multihead.check(InBuffersFromZero).cause == "cache_differs"
