# SPDX-License-Identifier: MIT
"""What models of these years have beside plain attention: slots of memory, documents
packed in one row, biases that are handed to each layer, norms of queries and keys, fused
matrices in an order of their own."""

import pytest
import torch
from attempts.steps import Attention
from torch import nn
from torch.nn import functional as F

import multihead


class Fused(nn.Module):
    """Heads from one matrix; what they see is left to others."""

    def __init__(self, d_model=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.mix = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def heads(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.num_heads, -1).transpose(1, 2)

    def attend(self, q, k, v, bias=0.0):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class KeysFirst(Fused):
    def forward(self, x):
        key, query, value = self.mix(x).chunk(3, dim=-1)
        return self.attend(self.heads(query), self.heads(key), self.heads(value))


class ValuesForKeys(Fused):
    def forward(self, x):
        query, key, value = self.mix(x).chunk(3, dim=-1)
        return self.attend(self.heads(query), self.heads(value), self.heads(key))


def test_parts_of_a_fused_matrix_in_the_order_of_their_names():
    assert multihead.check(KeysFirst).judgement == "right"
    assert multihead.check(ValuesForKeys).judgement == "wrong"


class WithMemory(Fused):
    """mask (B, L): True = real token. The slots of memory are always seen."""

    def __init__(self, d_model=32, num_heads=4, num_slots=3):
        super().__init__(d_model, num_heads)
        self.slots = num_slots
        width = d_model // num_heads
        self.mem_k = nn.Parameter(torch.randn(num_heads, num_slots, width))
        self.mem_v = nn.Parameter(torch.randn(num_heads, num_slots, width))

    def with_slots(self, memory, heads):
        return torch.cat((memory.expand(len(heads), -1, -1, -1), heads), dim=2)

    def forward(self, x, mask=None):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        k, v = self.with_slots(self.mem_k, k), self.with_slots(self.mem_v, v)
        if mask is not None:
            mask = F.pad(mask, (self.slots, 0), value=True)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class WithMemoryUnscaled(WithMemory):
    """mask (B, L): True = real token."""

    def forward(self, x, mask=None):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        k, v = self.with_slots(self.mem_k, k), self.with_slots(self.mem_v, v)
        scores = q @ k.mT
        if mask is not None:
            seen = F.pad(mask, (self.slots, 0), value=True)[:, None, None, :]
            scores = scores.masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_slots_of_memory_are_keys_that_every_mask_shows():
    report = multihead.check(WithMemory)
    assert [one["name"] for one in report.conditions] == ["layers_beside"], str(report)
    assert multihead.check(WithMemoryUnscaled).cause == "scale_missing"


class Packed(Fused):
    """doc_ids (B, L): which text of the row a token belongs to."""

    fill = float("-inf")

    def forward(self, x, doc_ids):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        other = doc_ids[:, :, None] != doc_ids[:, None, :]
        bias = torch.zeros_like(other, dtype=x.dtype).masked_fill(other, self.fill)
        return self.attend(q, k, v, bias[:, None])


class PackedAdded(Packed):
    fill = 1.0


def test_documents_of_one_row_do_not_see_each_other():
    assert multihead.check(Packed).judgement == "right"
    assert multihead.check(PackedAdded).cause == "documents_mixed"


class Bloom(Fused):
    """attention_mask (B, 1, L, L): True where attention is forbidden."""

    power = 0.5

    def forward(self, hidden_states, residual, alibi, attention_mask):
        q, k, v = map(self.heads, self.mix(hidden_states).chunk(3, dim=-1))
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        scores = alibi.baddbmm(q, k.mT, alpha=q.shape[-1] ** -self.power)
        scores = scores.view(*v.shape[:3], -1).masked_fill(attention_mask, -1e9)
        return residual + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class BloomUnscaled(Bloom):
    """attention_mask (B, 1, L, L): True where attention is forbidden."""

    power = 0.0


def test_what_is_added_and_must_be_given_is_given_as_zeros():
    report = multihead.check(Bloom)
    assert report.judgement == "right", str(report)
    assert "alibi given as zeros, (B * H, 1, L)" in str(report)
    assert multihead.check(BloomUnscaled).cause == "scale_missing"


class FarFirst(Fused):
    """Causal attention with ALiBi."""

    sign = 1.0

    def __init__(self, d_model=32, num_heads=4):
        super().__init__(d_model, num_heads)
        slopes = 2.0 ** -torch.arange(1, num_heads + 1)
        self.register_buffer("slopes", slopes.view(-1, 1, 1))

    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        places = torch.arange(x.shape[1])
        behind = places[:, None] - places[None, :]
        bias = self.sign * self.slopes * behind
        later = torch.where(behind < 0, float("-inf"), 0.0)
        return self.attend(q, k, v, bias + later)


class NearFirst(FarFirst):
    """Causal attention with ALiBi."""

    sign = -1.0


def test_alibi_that_rises():
    assert multihead.check(FarFirst).cause == "alibi_rises"
    assert multihead.check(NearFirst).judgement == "right"


class Cosines(Fused):
    axis = -1

    def __init__(self, d_model=32, num_heads=4):
        super().__init__(d_model, num_heads)
        self.gain = nn.Parameter(torch.full((num_heads, 1, 1), 10.0))

    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        q, k = F.normalize(q, dim=self.axis), F.normalize(k, dim=self.axis)
        weights = (q @ k.mT * self.gain).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class CosinesOverHeads(Cosines):
    axis = 1


def test_keys_that_are_normalised_over_heads():
    assert multihead.check(CosinesOverHeads).cause == "normalised_over_heads"
    assert multihead.check(Cosines).judgement != "wrong"


class WithNorms(Fused):
    def __init__(self, d_model=32, num_heads=4):
        super().__init__(d_model, num_heads)
        self.q_norm = nn.RMSNorm(d_model // num_heads)
        self.k_norm = nn.RMSNorm(d_model // num_heads)
        nn.init.uniform_(self.q_norm.weight, 0.5, 1.5)


class NormsHeads(WithNorms):
    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        return self.attend(self.q_norm(q), self.k_norm(k), v)


class NormsKeysAsQueries(WithNorms):
    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        return self.attend(self.q_norm(q), self.q_norm(k), v)


class SharesItsNorm(WithNorms):
    """The norm of queries is shared with keys."""

    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        return self.attend(self.q_norm(q), self.q_norm(k), v)


def test_a_layer_that_is_called_for_another():
    assert multihead.check(NormsHeads).judgement == "right"
    report = multihead.check(NormsKeysAsQueries)
    assert report.cause == "layer_used_twice"
    assert "`q_norm` is called twice, and `k_norm`" in report.findings[0].sentence
    assert multihead.check(SharesItsNorm).cause != "layer_used_twice"


def turned_in_place(x):
    width = x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


class WritesItsTurns(Fused):
    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        return self.attend(turned_in_place(q), turned_in_place(k), v)


def test_turns_that_are_written_part_by_part():
    assert multihead.check(WritesItsTurns).judgement == "right"


class Blocks(nn.Module):
    """Causal attention in blocks: a query sees its own up to itself, and all of the one
    before it."""

    def __init__(self, window_size, dropout=0.1):
        super().__init__()
        self.window_size = window_size
        self.dropout = nn.Dropout(dropout)

    def around(self, x, value=0.0):
        before = F.pad(x, (0, 0) * (x.dim() - 2) + (1, 0), value=value)[:, :-1]
        return torch.cat((before, x), dim=2)

    def forward(self, q, k, v):
        batch, length, width = q.shape
        size = self.window_size
        rest = -length % size
        q, k, v = (
            F.pad(x, (0, 0, 0, rest)).view(batch, -1, size, width) for x in (q, k, v)
        )
        place = torch.arange(length + rest).view(1, -1, size)
        seen = self.around(place, -1)[:, :, None, :]
        hidden = (seen > place[..., None]) | (seen < 0)
        scores = (q @ self.around(k).mT * width**-0.5).masked_fill(
            hidden, float("-inf")
        )
        context = self.dropout(scores.softmax(-1)) @ self.around(v)
        return context.view(batch, -1, width)[:, :length]


def test_dropout_of_blocks_is_not_judged():
    report = multihead.check(Blocks)
    assert report.judgement in ("right", "right_if"), str(report)
    assert any("What it drops" in remark["sentence"] for remark in report.remarks)


class OfHeadsThatDrop(Attention):
    """Heads of their own, of which each drops some of what it returns."""

    def __init__(self, embed_dim=48, num_heads=4):
        super().__init__(embed_dim, num_heads)
        width = embed_dim // num_heads
        self.queries = nn.ModuleList(
            nn.Linear(embed_dim, width) for _ in range(num_heads)
        )
        self.keys = nn.ModuleList(nn.Linear(embed_dim, width) for _ in range(num_heads))
        self.values = nn.Linear(embed_dim, width)
        self.mix = nn.Linear(width, embed_dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        heads = []
        for query, key in zip(self.queries, self.keys):
            q, k = query(x), key(x)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            heads.append(self.drop(weights @ self.values(x)))
        return self.mix(torch.stack(heads).mean(0))


def test_dropout_between_heads_is_none_of_weights():
    report = multihead.check(OfHeadsThatDrop)
    assert report.judgement != "wrong", str(report)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("valid: (B, L), of tokens.", "padding_inverted"),
        ("Nothing is said.", "padding_inverted"),
    ],
)
def test_a_mask_whose_name_says_what_is_seen(text, cause):
    class Layer(nn.Module):
        def __init__(self, d_model=32, n_heads=4):
            super().__init__()
            self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

        def forward(self, x, valid):
            return self.attn(x, x, x, key_padding_mask=valid)[0]

    Layer.__doc__ = text
    assert multihead.check(Layer).cause == cause


def from_the_end(q, k, v, causal=False):
    """With causal=True the last query is aligned with the last key."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def test_queries_that_end_where_keys_end_as_the_text_says():
    assert multihead.check(from_the_end).judgement == "right"


class Neo(nn.Module):
    """It does not scale its scores."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        shape = (self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = (
            w(x).unflatten(-1, shape).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_scores_that_are_not_scaled_as_the_text_says():
    assert multihead.check(Neo).judgement == "right_if"


def local_mask(length, window):
    """A query sees itself and the window - 1 keys before it."""
    places = torch.arange(length)
    behind = places[:, None] - places[None, :]
    return (behind >= 0) & (behind <= window)


class Local(Fused):
    """Causal attention to what is near."""

    def __init__(self, d_model=32, num_heads=4, sliding_window=3):
        super().__init__(d_model, num_heads)
        self.sliding_window = sliding_window

    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        mask = local_mask(x.shape[1], self.sliding_window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


def test_a_window_of_which_the_maker_of_masks_says_the_width():
    assert multihead.check(Local).cause == "window_off_by_one"


class OfIds(Fused):
    """Padding is where ids are pad_id."""

    def __init__(self, d_model, num_heads, pad_id=0):
        super().__init__(d_model, num_heads)
        self.pad_id = pad_id

    def forward(self, x, ids):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        blocked = (ids == self.pad_id)[:, None, None, :]
        scores.masked_fill(blocked, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_tokens_beside_a_sequence_whose_padding_is_known():
    assert multihead.check(OfIds).cause == "padding_ignored"


class OfSettings(Fused):
    def __init__(self, hp):
        super().__init__(hp["d_model"], hp["n_heads"])

    def forward(self, x):
        q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
        return self.attend(q, k, v)


class OfLengths(nn.Module):
    """Heads of qk_length and value_length features."""

    def __init__(self, num_heads, embedding_dim, qk_length, value_length):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(embedding_dim, num_heads * qk_length)
        self.W_k = nn.Linear(embedding_dim, num_heads * qk_length)
        self.W_v = nn.Linear(embedding_dim, num_heads * value_length)
        self.W_o = nn.Linear(num_heads * value_length, embedding_dim)

    def forward(self, x):
        heads = (
            w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for w in (self.W_q, self.W_k, self.W_v)
        )
        return self.W_o(
            F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        )


class TwoShifts(Fused):
    """What comes of it twice, each beside its weights."""

    def forward(self, x):
        outputs = []
        for _ in range(2):
            q, k, v = map(self.heads, self.mix(x).chunk(3, dim=-1))
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            context = (weights @ v).transpose(1, 2).flatten(2)
            outputs.append([weights, self.out(context)])
        return outputs


@pytest.mark.parametrize("target", [OfSettings, OfLengths, TwoShifts])
def test_sizes_and_results_of_unusual_kinds(target):
    assert multihead.check(target).judgement == "right"


class OneHead(nn.Module):
    """As many as block_size where it is masked."""

    power = 0.5

    def __init__(
        self, emb_size: int, head_size: int, encoder: bool, block_size: int = 32
    ):
        super().__init__()
        self.head_size, self.encoder = head_size, encoder
        self.k, self.q = nn.Linear(emb_size, head_size), nn.Linear(emb_size, head_size)
        self.v = nn.Linear(emb_size, head_size)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT
        if self.encoder:
            scores = scores.masked_fill(self.tril == 0, float("-inf"))
        return (scores / self.head_size**self.power).softmax(-1) @ self.v(x)


class OneHeadMultiplied(OneHead):
    power = -0.5


def test_a_flag_of_any_name_under_which_later_keys_are_hidden():
    report = multihead.check(OneHead)
    assert report.judgement == "right", str(report)
    assert "encoder=True in the constructor" in str(multihead.check(OneHeadMultiplied))
    assert multihead.check(OneHeadMultiplied).cause == "scale_multiplied"


_OF_PATCHES = """
import torch
from torch import nn

class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)

    def forward(self, x):
        return self.cut(x).flatten(2).transpose(1, 2)

class Model(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.patches, self.block = Patches(d_model), Block(d_model, num_heads)

    def forward(self, x):
        return self.block(self.patches(x)).mean(1)

class Block(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y)[0]
"""


def test_batch_first_as_the_rest_of_the_file_has_it(tmp_path):
    path = tmp_path / "vit.py"
    path.write_text(_OF_PATCHES)
    assert multihead.check(f"{path}:Block").judgement == "wrong"
    turned = "y = self.norm(x).transpose(0, 1)"
    text = _OF_PATCHES.replace("y = self.norm(x)", turned)
    path.write_text(text.replace("(y, y, y)[0]", "(y, y, y)[0].transpose(0, 1)"))
    assert multihead.check(f"{path}:Block").judgement == "right"


class TurnsAllThree(Fused):
    """Rotary positions of queries and keys."""

    def forward(self, x):
        heads = map(self.heads, self.mix(x).chunk(3, dim=-1))
        return self.attend(*map(turned_in_place, heads))


class TurnsAllThreeOnPurpose(TurnsAllThree):
    """Rotary positions."""


def test_values_that_are_turned_where_the_text_speaks_of_queries_and_keys():
    assert multihead.check(TurnsAllThree).cause == "values_turned_too"
    assert multihead.check(TurnsAllThreeOnPurpose).judgement == "right_if"


class PackedTo(Fused):
    """x (total, dim); cu_seqlens: where each text ends."""

    def forward(self, x, cu_seqlens):
        total, _ = x.shape
        q, k, v = (
            t.view(total, self.num_heads, -1).transpose(0, 1)
            for t in self.mix(x).chunk(3, dim=-1)
        )
        number = torch.bucketize(torch.arange(total), cu_seqlens[1:], right=True)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = self.hidden(scores, number)
        return self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    def hidden(self, scores, number):
        return scores.masked_fill(number[:, None] != number, float("-inf"))


class PackedToNoEnd(PackedTo):
    def hidden(self, scores, number):
        return scores


def test_texts_that_are_packed_end_where_they_are_said_to():
    assert multihead.check(PackedTo).judgement == "right"
    assert multihead.check(PackedToNoEnd).cause == "documents_mixed"
