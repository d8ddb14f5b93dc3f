# SPDX-License-Identifier: MIT
"""How `check` calls what takes its sequences in an unusual form."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead
from multihead.check.calls import forms
from multihead.check.subject import signature


def checked(target, **stated):
    return multihead.check(target, **stated)


class OfAnImage(nn.Module):
    """A block of a network for images: a norm over groups of channels, one head."""

    def __init__(self, in_channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, in_channels)
        self.q, self.k, self.v, self.proj = (
            nn.Conv2d(in_channels, in_channels, 1) for _ in range(4)
        )

    def forward(self, x):
        b, c, h, w = x.shape
        normed = self.norm(x)
        q, k, v = (p(normed).flatten(2) for p in (self.q, self.k, self.v))
        weights = (q.transpose(1, 2) @ k / math.sqrt(c)).softmax(-1)
        return x + self.proj(
            (weights @ v.transpose(1, 2)).transpose(1, 2).view(b, c, h, w)
        )


def test_a_norm_over_groups_of_channels():
    report = checked(OfAnImage)
    assert report.cause is None, str(report)


class WithOneNumber(nn.Module):
    """It holds a parameter of no axes, which is 0 at first."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.offset = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.attn(x, x, x)[0] + 0 * self.offset


class WithNoise(WithOneNumber):
    """What it would add of noise is nothing until it has learned otherwise."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.noise_strength = nn.Parameter(torch.zeros([1]))

    def forward(self, x):
        return super().forward(x) + self.noise_strength * torch.randn_like(x)


@pytest.mark.parametrize("target", [WithOneNumber, WithNoise])
def test_a_parameter_of_one_number(target):
    report = checked(target)
    assert report.cause is None, str(report)


class OfOne(nn.Module):
    """Attention by itself on one tensor (B, 3·H·D, L)."""

    def __init__(self, n_heads):
        super().__init__()
        self.n_heads = n_heads

    def parts(self, qkv):
        return qkv.unflatten(1, (self.n_heads, 3, -1)).unbind(2)

    def forward(self, qkv):
        batch, width, length = qkv.shape
        assert width % (3 * self.n_heads) == 0
        q, k, v = self.parts(qkv)
        weights = (q.transpose(2, 3) @ k * self.scale(q)).softmax(-1)
        return (v @ weights.transpose(2, 3)).reshape(batch, -1, length)

    def scale(self, q):
        return q.shape[2] ** -0.5


class OfOneInThree(OfOne):
    """The same, cut in three first."""

    def parts(self, qkv):
        return (p.unflatten(1, (self.n_heads, -1)) for p in qkv.chunk(3, 1))


class OfOneUnscaled(OfOne):
    def scale(self, q):
        return 1.0


def of_an_axis(qkv):
    """(B, L, 3, H, D)"""
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize("target", [OfOne, OfOneInThree, of_an_axis])
def test_queries_keys_and_values_in_one_tensor(target):
    report = checked(target)
    assert report.judgement == "right", str(report)
    assert any("qkv taken for" in said for said in report.understood)


def test_a_fault_of_what_takes_one_tensor_has_its_name():
    assert checked(OfOneUnscaled).cause == "scale_missing"


class OfATuple(nn.Module):
    """It takes keys and values together."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, query, memory):
        keys, values = memory
        return self.attn(query, keys, values)[0]


class OfAList(OfATuple):
    def forward(self, inputs):
        q, k, v = inputs[0], inputs[1], inputs[2]
        return self.attn(q, k, v)[0]


@pytest.mark.parametrize("target", [OfATuple, OfAList])
def test_sequences_in_a_tuple(target):
    report = checked(target)
    assert report.judgement == "right", str(report)
    assert any("called with tuples" in said for said in report.understood)


class OverAnAxis(nn.Module):
    """It attends along the second of four axes."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(embed_size, embed_size) for _ in range(4)
        )

    def forward(self, x):
        B, N, T, C = x.shape
        q, k, v = (
            p(x).view(B, N, T, self.heads, -1).permute(0, 2, 3, 1, 4)
            for p in (self.q, self.k, self.v)
        )
        out = (q @ k.transpose(-1, -2) / self.divisor(q)).softmax(-1) @ v
        return self.o(out.permute(0, 3, 1, 2, 4).reshape(B, N, T, C))

    def divisor(self, q):
        return math.sqrt(q.shape[-1])


class OverAnAxisWithWeights(OverAnAxis):
    def forward(self, x):
        return super().forward(x), torch.zeros(self.heads, 1, len(x), 5, 5)


class OverAnAxisUnscaled(OverAnAxis):
    def divisor(self, q):
        return 1.0


class TiedOverAnAxis(OverAnAxis):
    """All of the third axis attends alike: no attention for each."""

    def forward(self, x):
        return super().forward(x.mean(2, keepdim=True).expand_as(x).contiguous())


def test_what_passes_along_the_other_axis_is_seen():
    assert not checked(TiedOverAnAxis).passed


def test_tensors_of_four_axes():
    for target in (OverAnAxis, OverAnAxisWithWeights):
        report = checked(target)
        assert report.judgement == "right", str(report)
        assert "attended along L" in " ".join(report.understood)
    assert checked(OverAnAxisUnscaled).cause == "scale_missing"


class OverRows(OverAnAxis):
    """It attends along the first; weights that are dropped have their heads first."""

    def forward(self, x, padding_mask=None):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)) for p in (self.q, self.k, self.v)
        )
        scores = torch.einsum("icnhd,jcnhd->hcnij", q, k) / self.divisor(q)
        if padding_mask is not None:
            hidden = padding_mask.permute(2, 0, 1)[None, :, :, None]
            scores = scores.masked_fill(hidden, -1e4)
        weights = F.dropout(scores.softmax(-1), 0.2, self.training)
        return self.o(torch.einsum("hcnij,jcnhd->icnhd", weights, v).flatten(3))


def test_rows_of_four_axes_whose_heads_stand_first():
    report = checked(OverRows)
    assert report.judgement == "right", str(report)


class OfAClass(nn.Module):
    """The first token, that of a class, asks all of them."""

    scale, asks = True, slice(0, 1)

    def __init__(self, dim, num_heads):
        super().__init__()
        self.heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            p(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p, t in ((self.q, x[:, self.asks]), (self.k, x), (self.v, x))
        )
        factor = None if self.scale else 1.0
        out = F.scaled_dot_product_attention(q, k, v, scale=factor)
        return self.o(out.transpose(1, 2).flatten(2))


class OfAClassUnscaled(OfAClass):
    scale = False


class OfTheLast(OfAClass):
    asks = slice(-1, None)


class OfTheLastUnscaled(OfTheLast):
    scale = False


class CutBeforeHeads(OfAClass):
    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x)[:, -1:], self.k(x), self.v(x))
        )
        factor = None if self.scale else 1.0
        out = F.scaled_dot_product_attention(q, k, v, scale=factor)
        return self.o(out.transpose(1, 2).flatten(2))


class CutBeforeHeadsUnscaled(CutBeforeHeads):
    scale = False


@pytest.mark.parametrize(
    "position, right, wrong",
    [
        ("first", OfAClass, OfAClassUnscaled),
        ("last", OfTheLast, OfTheLastUnscaled),
        ("last", CutBeforeHeads, CutBeforeHeadsUnscaled),
    ],
)
def test_only_one_position_asks(position, right, wrong):
    report = checked(right)
    assert report.judgement == "right", str(report)
    assert f"only the {position} position asks" in report.understood
    assert checked(wrong).cause == "scale_missing"


class CutOfWhatItIsGiven(nn.Module):
    """One tensor (B, L, 3·E), projected elsewhere, under a name that says nothing."""

    def __init__(self, dim, num_heads=8):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5

    def forward(self, x):
        B, N, C = x.shape
        C = C // 3
        qkv = x.reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(B, N, C)


class CutAndUnscaled(CutOfWhatItIsGiven):
    def __init__(self, dim, num_heads=8):
        super().__init__(dim, num_heads)
        self.scale = 1.0


@pytest.mark.parametrize(
    "text",
    [
        "qkv = x, x, x",
        "out = self.inner(qkv=x, mask=m)",
        "qkv = x.matmul(w)",
        "qkv = self.qkv(x).reshape(B, N, 3, -1)",
    ],
)
def test_what_is_projected_or_handed_on_is_not_cut(text):
    assert not forms._is_cut("x", f"    {text}\n")
    assert forms._is_cut("x", "    qkv = rearrange(x, 'b n (k d) -> k b n d', k=3)\n")


@pytest.mark.parametrize(
    "text, is_left_to",
    [
        ("m = x if m is None else m", True),
        ("if m is None:\n    m = x\n", True),
        ("m = m if m is not None else x.new_ones(3)", False),
        ("m = m if m is not None else x[0]", False),
    ],
)
def test_what_is_the_first_sequence_where_it_is_left_out(text, is_left_to):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [inspect.Parameter(n, kind, default=None) for n in ("m", "residual")]
    text = f"{text}\n{text.replace('m', 'residual')}"
    assert signature._left_to("x", taken, text) == ["m"] * is_left_to


def test_one_tensor_that_is_cut_by_its_shape_alone():
    report = checked(CutOfWhatItIsGiven)
    assert report.passed, str(report)
    assert any("x taken for queries, keys" in said for said in report.understood)
    assert checked(CutAndUnscaled).cause == "scale_missing"


class Project(nn.Module):
    """A layer that is all that this module holds."""

    def __init__(self, width):
        super().__init__()
        self.linear_layer = nn.Linear(width, width)

    def forward(self, x):
        return self.linear_layer(x)


class OfWrappedLayers(OfAClass):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.q, self.k, self.v, self.o = (Project(dim) for _ in range(4))


class OfSharedLayers(OfAClass):
    """Queries and keys are one."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.k = self.q


class OfHeadsWithOneMatrix(nn.Module):
    """Each head makes its queries, keys and values with one matrix."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.width = dim // num_heads
        self.heads = nn.ParameterList(
            torch.randn(dim, 3 * self.width) for _ in range(num_heads)
        )
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        found = []
        for weight in self.heads:
            q, k, v = (x @ weight).split(self.width, dim=-1)
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.width)
            found.append(scores.softmax(-1) @ v)
        return self.out(torch.cat(found, -1))


class Affine(nn.Module):
    """A layer of its own, whose type says nothing."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias


class OfOwnLayers(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.heads = num_heads
        self.qkv = Affine(hidden_size, 3 * hidden_size)
        self.ff = Affine(hidden_size, hidden_size)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.ff(out.transpose(1, 2).flatten(2))


class OfSlices(nn.Module):
    """Each head has small matrices of its own, for its slice of the input."""

    def __init__(self, d, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d // n_heads
        self.q_mappings, self.k_mappings, self.v_mappings = (
            nn.ModuleList(nn.Linear(self.d_head, self.d_head) for _ in range(n_heads))
            for _ in range(3)
        )

    def forward(self, sequences):
        heads = []
        for head in range(self.n_heads):
            part = sequences[..., head * self.d_head : (head + 1) * self.d_head]
            q, k = self.q_mappings[head](part), self.k_mappings[head](part)
            weights = (q @ k.mT / self.d_head**0.5).softmax(-1)
            heads.append(weights @ self.v_mappings[head](part))
        return torch.cat(heads, -1)


def test_each_head_projects_its_slice_of_the_input():
    report = checked(OfSlices)
    assert report.cause is None, str(report)
    assert report.judgement in ("right", "right_if"), str(report)


@pytest.mark.parametrize(
    "target", [OfOwnLayers, OfWrappedLayers, OfSharedLayers, OfHeadsWithOneMatrix]
)
def test_weights_that_are_kept_in_other_ways(target):
    report = checked(target, allow="shared_projections")
    assert report.passed, str(report)
    assert bool(report.conditions) is (target is OfSharedLayers)


class BehindAClassToken(nn.MultiheadAttention):
    """It is told the height and width of the image that follows a token."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads, batch_first=True)

    def forward(self, x, h, w):
        first, image = torch.split(x, [1, h * w], 1)
        image = image.unflatten(1, (h, w)).flatten(1, 2)
        x = torch.cat([first, image], 1)
        return super().forward(x, x, x)[0]


class OfSides(nn.Module):
    """It is built for images of one height and width."""

    def __init__(self, d_model, h, H=7, W=7):
        super().__init__()
        self.H, self.W = H, W
        self.attn = nn.MultiheadAttention(d_model, h, batch_first=True)

    def forward(self, queries):
        x = queries.unflatten(1, (self.H, self.W)).flatten(1, 2)
        return self.attn(x, x, x)[0]


@pytest.mark.parametrize("target", [BehindAClassToken, OfSides])
def test_an_image_whose_sides_are_told(target):
    report = checked(target)
    assert report.cause is None, str(report)


class OfALayer(nn.Module):
    """It is built for several layers; one of them is attention as others are."""

    def __init__(self, embed_size, num_heads, num_layers, layer_norm_eps):
        super().__init__()
        assert layer_norm_eps < 1e-3
        self.norm = nn.LayerNorm(embed_size, layer_norm_eps)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(embed_size, num_heads, batch_first=True)
            for _ in range(num_layers)
        )

    def forward(self, x):
        return sum(layer(x, x, x)[0] for layer in self.layers)


class OfFeatures(nn.Module):
    """Its inputs are called by what they show."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, text_features, image_features):
        return self.attn(text_features, image_features, image_features)[0]


@pytest.mark.parametrize("target", [OfALayer, OfFeatures])
def test_names_that_say_enough(target):
    report = checked(target)
    assert report.cause is None, str(report)


class Miscalled(nn.Module):
    """It calls its own method with too much."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.q = nn.Linear(dim, dim)

    def split(self, x):
        return x

    def forward(self, x):
        return self.split(self.q(x), len(x))


class OfTheWrongType(Miscalled):
    def forward(self, x):
        return self.q(x).transpose((-2, -1))


@pytest.mark.parametrize("target", [Miscalled, OfTheWrongType])
def test_what_no_arguments_bring_about_is_the_codes_fault(target):
    report = checked(target)
    assert (report.exit_status, report.cause) == (1, "raises"), str(report)


CALLS = {
    "OfATuple(48, 8)(torch.randn(2, 6, 48), (torch.randn(2, 9, 48),) * 2)": OfATuple,
    "OfOne(4)(torch.randn(2, 96, 10))": OfOne,
    "OfAnImage(16)(torch.randn(2, 16, 4, 5))": OfAnImage,
    "OfFeatures(E, H)(query, values)": OfFeatures,
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_as_people_write_them(call):
    report = checked(CALLS[call], call=call)
    assert report.cause is None, str(report)


class WithAMask(OfAClass):
    """mask: True = blocked"""

    def forward(self, x, mask):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        keep = None if mask is None else ~mask
        out = F.scaled_dot_product_attention(q, k, v, keep)
        return self.o(out.transpose(1, 2).flatten(2))


def test_a_mask_beside_tensors_of_the_call():
    call = "WithAMask(16, 4)(torch.randn(2, 7, 16), mask)"
    report = checked(WithAMask, call=call)
    assert report.cause is None, str(report)
    assert any("mask" in case["name"] for case in report.cases)


class NeverSet(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(self.dim, dim)

    def forward(self, x):
        return self.q(x)


def test_an_attribute_that_is_never_set_is_no_fault_of_the_call():
    report = checked(NeverSet, call="NeverSet(16)(x)")
    assert (report.exit_status, report.cause) == (1, "raises"), str(report)
    report = checked(NeverSet, call="NeverSet(16, 3)(x)")
    assert report.exit_status == 2, str(report)


def test_a_folder_is_for_the_command(tmp_path):
    with pytest.raises(ValueError, match="got the folder .* `multihead check FOLDER`"):
        checked(tmp_path)
