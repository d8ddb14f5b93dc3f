# SPDX-License-Identifier: MIT
"""Whole models of images, which cut them into patches: their attention is judged as that
of any layer, whatever they return."""

import math

import pytest
import torch
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
