# SPDX-License-Identifier: MIT
"""What new readings must not make of right code, nor excuse in wrong code: names that say
less than they seem to, numbers of documents that are none, slots that a mask hides,
layers that are left for old checkpoints."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import multihead


class Fused(nn.Module):
    def __init__(self, d_model=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.kqv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, q, k, v, bias=0.0):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfItsParts(Fused):
    """Called kqv, and taken apart in the usual order."""

    def forward(self, x):
        qkv = self.kqv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        return self.attend(q, k, v)


class OfItsOrder(Fused):
    def forward(self, x):
        kqv = self.kqv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        k, q, v = kqv
        return self.attend(q, k, v)


class OfGroups(nn.Module):
    """k, q and v of one matrix; keys are of two heads."""

    def __init__(self, d_model=48, num_heads=8, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.width = d_model // num_heads
        self.kv = self.width * num_kv_heads
        self.mix = nn.Linear(d_model, d_model + 2 * self.kv, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        k, q, v = self.mix(x).split([self.kv, x.shape[-1], self.kv], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in (q, k, v))
        shared = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("target", [OfItsParts, OfItsOrder, OfGroups])
def test_lines_and_not_names_say_whose_parts_are(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)


class ZeroIsPadding(Fused):
    """segment_ids (B, L): 0 is padding."""

    def forward(self, x, segment_ids):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        seen = segment_ids[:, :, None] == segment_ids[:, None, :]
        seen = seen & (segment_ids[:, None, :] > 0)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class BiasOfSpeakers(Fused):
    """A bias for pairs of tokens of one speaker."""

    def __init__(self, d_model=32, num_heads=4):
        super().__init__(d_model, num_heads)
        self.same = nn.Embedding(2, num_heads)

    def forward(self, x, speaker_ids):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        same = (speaker_ids[:, :, None] == speaker_ids[:, None, :]).long()
        return self.attend(q, k, v, self.same(same).permute(0, 3, 1, 2))


def test_numbers_of_documents_and_what_are_none():
    assert multihead.check(ZeroIsPadding).judgement == "right"
    assert multihead.check(BiasOfSpeakers).cause != "documents_mixed"


class PadOfTokens(Fused):
    def forward(self, x, pad=None):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if pad is not None:
            scores = scores.masked_fill(pad[:, None, None, :] == 0, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfIds(Fused):
    def __init__(self, d_model=48, num_heads=4, pad_id=0):
        super().__init__(d_model, num_heads)
        self.pad_id = pad_id

    def forward(self, x, ids):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = (ids == self.pad_id)[:, None, None, :]
        scores = scores.masked_fill(hidden, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_padding_that_may_be_tokens():
    assert multihead.check(PadOfTokens).judgement != "wrong"
    assert multihead.check(OfIds).judgement != "wrong"
    assert multihead.check(OfIds(48, 4, pad_id=1)).judgement != "wrong"


class HidesItsMemory(Fused):
    """mask (B, L): True = real token."""

    def __init__(self, d_model=32, num_heads=4, num_slots=3):
        super().__init__(d_model, num_heads)
        self.slots, width = num_slots, d_model // num_heads
        self.mem_k = nn.Parameter(torch.randn(num_heads, num_slots, width))
        self.mem_v = nn.Parameter(torch.randn(num_heads, num_slots, width))

    def forward(self, x, mask=None):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        memory = (m.expand(len(x), -1, -1, -1) for m in (self.mem_k, self.mem_v))
        k, v = (torch.cat(both, 2) for both in zip(memory, (k, v)))
        if mask is not None:
            mask = F.pad(mask, (self.slots, 0), value=False)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


def test_slots_that_a_mask_hides_are_not_right():
    assert multihead.check(HidesItsMemory).judgement not in ("right", "right_if")


class NormOfBoth(Fused):
    """One norm for both inputs; another is left for old checkpoints."""

    def __init__(self, d_model=32, num_heads=4):
        super().__init__(d_model, num_heads)
        self.norm, self.norm_out = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, context):
        x, context = self.norm(x), self.norm(context)
        q, _, _ = self.kqv(x).chunk(3, -1)
        _, k, v = self.kqv(context).chunk(3, -1)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


def test_a_layer_that_is_left_is_no_fault():
    assert multihead.check(NormOfBoth).cause != "layer_used_twice"


class CausalInTraining(Fused):
    def __init__(self, d_model=32, num_heads=4, resid_drop=0.1):
        super().__init__(d_model, num_heads)
        self.resid_drop = nn.Dropout(resid_drop)

    def forward(self, x):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.training)
        return self.resid_drop(self.out(out.transpose(1, 2).flatten(2)))


class RisesUnscaled(Fused):
    """Attention with ALiBi."""

    def forward(self, x):
        q, k, v = map(self.heads, self.kqv(x).chunk(3, -1))
        slopes = 2.0 ** -torch.arange(1, self.num_heads + 1)
        places = torch.arange(x.shape[1])
        bias = slopes[:, None, None] * (places[:, None] - places).abs()
        weights = (q @ k.mT + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_faults_that_others_do_not_excuse():
    assert multihead.check(CausalInTraining).judgement == "wrong"
    assert "alibi_rises" not in multihead.check(RisesUnscaled).causes


_TURNED_BEFORE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]

class Encoder(nn.Module):
    \"\"\"x: (batch, seq, dim)\"\"\"

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.block = Block(d_model, num_heads)

    def forward(self, x):
        return torch.transpose(self.block(torch.transpose(x, 0, 1)), 0, 1)
"""


def test_what_exchanges_batch_and_sequence_before(tmp_path):
    path = tmp_path / "encoder.py"
    path.write_text(_TURNED_BEFORE)
    assert multihead.check(f"{path}:Block").judgement == "right_if"
