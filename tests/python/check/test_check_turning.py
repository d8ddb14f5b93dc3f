# SPDX-License-Identifier: MIT
"""Rotary positions in blocks whose heads alone are judged."""

import pytest
import torch
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn
from torch.nn import functional as F

import multihead


def rotated(x, axis: int, places=None):
    """`x` turned by its place along an axis, or by these places."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[axis]) if places is None else places
    angles = torch.outer(places.to(x), 100 ** (-torch.arange(half).to(x) / half))
    shape = [1] * x.dim()
    shape[axis], shape[-1] = angles.shape
    cos, sin = (
        f(angles).view(shape).repeat_interleave(2, -1) for f in (torch.cos, torch.sin)
    )
    even, odd = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack([-odd, even], -1).flatten(-2) * sin


class Block(nn.Module):
    """A layer of a language model, with rotary positions."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.heads = n_heads
        self.norm, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.o = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 64), nn.Linear(64, d_model)

    def turned(self, q, k):
        return rotated(q, -2), rotated(k, -2)

    def before(self, x):
        return self.norm(x)

    def forward(self, x):
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        q, k = self.turned(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByHead(Block):
    def turned(self, q, k):
        return rotated(q, 1), rotated(k, 1)


class Unturned(Block):
    def turned(self, q, k):
        return q, k


class OnlyQueries(Block):
    def turned(self, q, k):
        return rotated(q, -2), k


class ByView(Block):
    """Heads are viewed as if they were positions before they are turned."""

    def turned(self, q, k):
        return (
            rotated(t.transpose(1, 2).reshape(t.shape), -2)
            .reshape(t.transpose(1, 2).shape)
            .transpose(1, 2)
            for t in (q, k)
        )


class BesidePositions(Block):
    """Positions are added, too."""

    def before(self, x):
        place = torch.arange(x.shape[1]).to(x)[:, None]
        return self.norm(x) + torch.sin(place / torch.arange(1, x.shape[2] + 1).to(x))


class NormedBesidePositions(BesidePositions):
    """Positions are added, and a norm of heads hides that from their lengths."""

    def turned(self, q, k):
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


def test_positions_that_a_norm_hides_are_no_turns():
    assert named(multihead.check(NormedBesidePositions)) == []


@pytest.mark.parametrize("kind", [Block, BesidePositions])
def test_turns_by_positions_are_right(kind):
    assert conditions(multihead.check(kind(32, 4))) == ["layers_beside"]


class OtherAngles(Block):
    """Keys are turned by twice the angles of queries."""

    def turned(self, q, k):
        return rotated(q, -2), rotated(k, -2, 2 * torch.arange(k.shape[-2]))


class FirstApart(Block):
    """The token of a class has no position, as the others count from 0."""

    def turned(self, q, k):
        places = (torch.arange(q.shape[-2]) - 1).clamp(0)
        return rotated(q, -2, places), rotated(k, -2, places)


@pytest.mark.parametrize("kind", [OnlyQueries, OtherAngles])
def test_turns_of_queries_by_other_angles_than_keys_are_named(kind):
    report = multihead.check(kind)
    assert named(report) == ["rotary_misapplied"] and report.judgement == "wrong"


@pytest.mark.parametrize("kind", [ByView, FirstApart])
def test_turns_by_other_positions_are_a_condition(kind):
    assert conditions(multihead.check(kind)) == ["turned_elsewhere", "layers_beside"]


class ByOneAngle(Block):
    """The same everywhere, of all heads."""

    def turned(self, q, k):
        places = torch.full((q.shape[-2],), 2)
        return rotated(q, -2, places), rotated(k, -2, places)


class RotaryByOneAngle(ByOneAngle):
    """The same of code that calls what turns its heads rotary."""

    def turned(self, q, k):
        return self.rotary(q), self.rotary(k)

    def rotary(self, x):
        return rotated(x, -2, torch.full((x.shape[-2],), 2))


class RotaryByOneStep(Block):
    """One step of decoding: all that comes in stands at this place."""

    def forward(self, x, step: int = 3):
        self.place = step
        return super().forward(x)

    def turned(self, q, k):
        return self.rotary(q), self.rotary(k)

    def rotary(self, x):
        return rotated(x, -2, torch.full((x.shape[-2],), self.place))


def test_turns_alike_at_every_position_are_a_condition_and_by_heads_a_flaw():
    assert conditions(multihead.check(ByOneAngle)) == ["turned_alike", "layers_beside"]
    assert multihead.check(RotaryByOneAngle).cause == "turned_alike"
    assert multihead.check(RotaryByOneStep).judgement == "right_if"
    assert multihead.check(ByHead).cause == "turned_alike"
    assert conditions(multihead.check(Unturned)) == ["layers_beside"]


class OtherPairs(Block):
    """Angles for halves, turns of neighbours: lengths change."""

    def turned(self, q, k):
        return self.rope(q), self.rope(k)

    def rope(self, x):
        half = x.shape[-1] // 2
        places = torch.arange(x.shape[-2]).to(x)
        angles = torch.outer(places, 100 ** (-torch.arange(half).to(x) / half))
        angles = torch.cat([angles, angles], -1)
        even, odd = x[..., ::2], x[..., 1::2]
        other = torch.stack([-odd, even], -1).flatten(-2)
        return x * angles.cos() + other * angles.sin()


class XPos(Block):
    """Rotary positions that scale, too (Sun et al., 2022)."""

    def turned(self, q, k):
        places = torch.arange(q.shape[-2]).to(q).unsqueeze(-1)
        return rotated(q, -2) * 1.1**places, rotated(k, -2) / 1.1**places


def test_turns_that_change_lengths_are_none():
    assert named(multihead.check(OtherPairs)) == ["rotary_misapplied"]
    assert "rotary_misapplied" not in named(multihead.check(XPos))


# --- Heads in a loop, and a switch ---------------------------------------------------


def rotate_halves(x):
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


class OneHead(nn.Module):
    rotate = staticmethod(rotate_halves)

    def __init__(self, dim, head_dim, max_len, turns):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, head_dim) for _ in range(3))
        rates = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(max_len).float(), rates)
        angles = torch.cat((angles, angles), -1)
        self.turns = turns
        self.register_buffer("rope_cos", angles.cos())
        self.register_buffer("rope_sin", angles.sin())

    def turned(self, x):
        if not self.turns:
            return x
        cos, sin = self.rope_cos[: x.shape[1]], self.rope_sin[: x.shape[1]]
        return x * cos + self.rotate(x) * sin

    def forward(self, x):
        q, k = self.turned(self.q(x)), self.turned(self.k(x))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ self.v(x)


class OneHeadOfPairs(OneHead):
    rotate = staticmethod(rotate_pairs)


class HeadByHead(nn.Module):
    head = OneHead

    def __init__(self, dim, num_heads, max_len=16, use_rope=True):
        super().__init__()
        parts = [
            self.head(dim, dim // num_heads, max_len, use_rope)
            for _ in range(num_heads)
        ]
        self.parts, self.out = nn.ModuleList(parts), nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(torch.cat([part(x) for part in self.parts], -1))


class HeadByHeadOfPairs(HeadByHead):
    head = OneHeadOfPairs


class TurnsIfAsked(HeadByHead):
    def __init__(self, dim, num_heads, max_len=16, use_rope=False):
        super().__init__(dim, num_heads, max_len, use_rope)


class TurnsPairsIfAsked(TurnsIfAsked):
    head = OneHeadOfPairs


def test_heads_that_are_turned_one_by_one():
    report = multihead.check(HeadByHead)
    assert report.judgement == "right", str(report)
    assert "rotary positions" in str(report)
    assert multihead.check(HeadByHeadOfPairs).causes == ["rotary_misapplied"]


def test_positions_that_turn_only_where_they_are_asked_for():
    assert multihead.check(TurnsIfAsked).judgement == "right"
    report = multihead.check(TurnsPairsIfAsked)
    assert report.causes == ["rotary_misapplied"] and "use_rope=True" in str(report)


class RotaryWhereGiven(Block):
    """Turns by what it may be given, and is right without."""

    def forward(self, x, freqs=None):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        if freqs is not None:
            q, k = rotated(q, -2, freqs), rotated(k, -2, freqs)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(out.transpose(1, 2).flatten(2))


def test_positions_that_are_left_out_turn_nothing_alike():
    report = multihead.check(RotaryWhereGiven)
    assert report.judgement.startswith("right"), str(report)
