# SPDX-License-Identifier: MIT
"""Whole models of images, which cut them into patches: their attention is judged as that
of any layer, whatever they return."""

import math

import pytest
import torch
from heads import Heads
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn

import multihead


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.count, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def root(self, q):
        return math.sqrt(q.shape[-1])

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.count, -1)).transpose(1, 2) for t in parts)
        weights = (q @ k.mT / self.root(q)).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class ScaledByWidth(Layer):
    def root(self, q):
        return math.sqrt(q.shape[-1] * q.shape[1])


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2020) of patches that a layer cuts."""

    layer = Layer

    def __init__(
        self, image_size, dim, heads, patch_size=8, in_channels=3, num_classes=10
    ):
        super().__init__()
        count = (image_size // patch_size) ** 2 + 1
        self.patches = nn.Conv2d(in_channels, dim, patch_size, patch_size)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, count, dim))
        self.first, self.second = self.layer(dim, heads), self.layer(dim, heads)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, img):
        x = self.patches(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.second(self.first(x))[:, 0])


class OfPixels(ViT):
    """The same of patches that are cut by hand, of images of 3 channels."""

    def __init__(self, image_size, dim, heads, patch_size=8, num_classes=10):
        super().__init__(image_size, dim, heads, patch_size, 3, num_classes)
        self.side = patch_size
        self.patches = nn.Linear(3 * patch_size**2, dim)

    def forward(self, img):
        cut = img.unfold(2, self.side, self.side).unfold(3, self.side, self.side)
        x = self.patches(cut.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2))
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.second(self.first(x)).mean(1))


class BadlyScaled(ViT):
    layer = ScaledByWidth


class Batched(nn.TransformerEncoderLayer):
    """Of (L, B, E), and given (B, L, E)."""

    def __init__(self, dim, heads):
        super().__init__(dim, heads, 64)


class OverItems(ViT):
    layer = Batched


@pytest.mark.parametrize("kind", [ViT, OfPixels])
def test_a_vision_transformer_is_called_with_images(kind):
    report = multihead.check(kind)
    assert report.judgement == "right_if" and not named(report), str(report)
    assert "layers_beside" in conditions(report)
    assert "taken for an image" in str(report)


def test_a_fault_of_its_layers_is_named():
    report = multihead.check(BadlyScaled)
    assert report.causes == ["scale_by_embed_dim"], str(report)


def test_one_that_attends_over_items_is_wrong():
    assert multihead.check(OverItems).judgement == "wrong"


class ReadsConditions(nn.Module):
    """An image (B, C, H, W) reads conditions (B, S, D), as in a U-Net."""

    axis = -1

    def __init__(self, channels, cond_dim, proj_dim):
        super().__init__()
        self.q = nn.Linear(channels, proj_dim, bias=False)
        self.k = nn.Linear(cond_dim, proj_dim, bias=False)
        self.v = nn.Linear(cond_dim, proj_dim, bias=False)
        self.out = nn.Linear(proj_dim, channels, bias=False)

    def forward(self, x, context):
        q = self.q(x.moveaxis(-3, -1).flatten(-3, -2))
        scores = q @ self.k(context).mT / math.sqrt(q.shape[-1])
        y = self.out(scores.softmax(self.axis) @ self.v(context))
        return x + y.mT.unflatten(-1, x.shape[-2:])


class OverPixels(ReadsConditions):
    axis = -2


def test_an_image_that_reads_a_sequence():
    assert multihead.check(ReadsConditions).judgement in ("right", "right_if")
    assert multihead.check(OverPixels).causes == ["softmax_over_queries"]


class OfAColumn(nn.Module):
    """Attention along the first of four axes, (R, C, B, E), as of an alignment."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.count = num_heads
        self.q, self.k = (
            nn.Linear(embed_dim, embed_dim),
            nn.Linear(embed_dim, embed_dim),
        )
        self.v, self.o = (
            nn.Linear(embed_dim, embed_dim),
            nn.Linear(embed_dim, embed_dim),
        )

    def forward(self, x, self_attn_padding_mask=None):
        rows, cols, batch, dim = x.size()
        shape = rows, cols, batch, self.count, dim // self.count
        q, k, v = (f(x).view(shape) for f in (self.q, self.k, self.v))
        scores = torch.einsum("icnhd,jcnhd->hcnij", q, k) * shape[-1] ** -0.5
        if self_attn_padding_mask is not None:
            hidden = self_attn_padding_mask.permute(2, 0, 1)[None, :, :, None]
            scores = scores.masked_fill(hidden, -10000)
        out = torch.einsum("hcnij,jcnhd->icnhd", scores.softmax(-1), v)
        return self.o(out.reshape(rows, cols, batch, dim))


class OfSquares(nn.Module):
    """An image whose rows are as many as its columns, by convolutions with strides."""

    def __init__(self, inp, num_heads, h_strides, w_strides):
        super().__init__()
        self.count, self.strides = num_heads, (h_strides, w_strides)
        self.qkv, self.out = nn.Conv2d(inp, 3 * inp, 1), nn.Conv2d(inp, inp, 1)

    def forward(self, x):
        batch, channels, side, _ = x.size()
        if max(self.strides) > 1:
            x = nn.functional.avg_pool2d(x, self.strides)
        q, k, v = self.qkv(x).view(batch, 3, self.count, -1, side * side).unbind(1)
        scores = q.mT @ k / math.sqrt(self.scaled_by(q))
        y = (scores.softmax(-1) @ v.mT).mT.reshape(batch, channels, side, side)
        return self.out(y)

    def scaled_by(self, q):
        return q.shape[2]


class OfSquaresByPixels(OfSquares):
    def scaled_by(self, q):
        return q.shape[3]


def test_squares_whose_strides_are_told():
    assert multihead.check(OfSquares).judgement.startswith("right")
    report = multihead.check(OfSquaresByPixels)
    assert report.judgement == "wrong", str(report)
    given = {"x": torch.randn(2, 16, 5, 5)}
    report = multihead.check(OfSquares(16, 2, 1, 1), inputs=given)
    assert report.judgement.startswith("right"), str(report)


def test_four_axes_of_the_users_own_are_not_taken_for_an_image():
    """Nothing says that they are one; it would attend to other items of the batch."""
    given = {"x": torch.randn(4, 5, 3, 16)}
    report = multihead.check(OfAColumn(16, 2), inputs=given)
    assert report.judgement.startswith("right"), str(report)


class OfRegions(Heads):
    """Pixels attend to regions of an image, each cut by a convolution, as in Twins."""

    axis = -1

    def __init__(self, dim, num_heads, k=7):
        super().__init__(dim, num_heads)
        self.q, self.o = nn.Conv2d(dim, dim, 1, bias=False), nn.Conv2d(dim, dim, 1)
        self.kv = nn.Conv2d(dim, 2 * dim, k, stride=k, bias=False)
        del self.k, self.v

    def forward(self, x):
        flat = (t.flatten(2).mT for t in (self.q(x), *self.kv(x).chunk(2, 1)))
        q, k, v = map(self.cut, flat)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(self.axis)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.o(y.mT.unflatten(-1, x.shape[-2:]))


class OfRegionsOverPixels(OfRegions):
    axis = -2


def test_an_image_is_as_large_as_a_kernel_needs():
    report = multihead.check(OfRegions)
    assert report.judgement == "right_if", str(report)
    assert multihead.check(OfRegionsOverPixels).causes == ["softmax_over_queries"]


class BesideAConvolution(nn.Module):
    """Attention whose channels are put beside those of a convolution (Bello et al.,
    2019)."""

    def __init__(self, in_channels, out_channels, kernel_size, dk, dv, Nh):
        super().__init__()
        self.parts, self.count = (dk, dk, dv), Nh
        self.conv = nn.Conv2d(in_channels, out_channels - dv, kernel_size, padding=1)
        self.qkv = nn.Conv2d(in_channels, 2 * dk + dv, 1)
        self.out = nn.Conv2d(dv, dv, 1)

    def merged(self, heads, shape):
        return heads.mT.reshape(shape)

    def forward(self, x):
        cut = (
            t.unflatten(1, (self.count, -1)) for t in self.qkv(x).split(self.parts, 1)
        )
        q, k, v = (t.flatten(3).mT for t in cut)
        heads = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        shape = len(x), -1, *x.shape[2:]
        return torch.cat([self.conv(x), self.out(self.merged(heads, shape))], 1)


class BesideAConvolutionScrambled(BesideAConvolution):
    def merged(self, heads, shape):
        return heads.reshape(shape)


def test_a_kernel_that_keeps_the_size():
    report = multihead.check(BesideAConvolution)
    assert report.judgement == "right_if", str(report)
    report = multihead.check(BesideAConvolutionScrambled)
    assert report.causes == ["merge_not_transposed"], str(report)
