# SPDX-License-Identifier: MIT
"""How `check` finds sizes, settings and meanings that only a call shows."""

import math
from dataclasses import dataclass

import pytest
import torch
from heads import Heads
from torch import nn

import multihead

WIDTH_OF_FILE, HEAD_SIZE, LENGTH_OF_FILE = 96, 24, 32


class HoldsALength(nn.Module):
    """One head, whose triangle is as long as a constant says, all of it."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(WIDTH_OF_FILE, HEAD_SIZE) for _ in range(3)
        )
        self.register_buffer("tril", torch.ones(LENGTH_OF_FILE, LENGTH_OF_FILE).tril())

    def scores(self, x):
        return self.query(x) @ self.key(x).mT / math.sqrt(HEAD_SIZE)

    def forward(self, x):
        scores = self.scores(x).masked_fill(self.tril == 0, -torch.inf)
        return scores.softmax(-1) @ self.value(x)


class HoldsALengthUnscaled(HoldsALength):
    def scores(self, x):
        return self.query(x) @ self.key(x).mT


def test_a_length_that_code_holds_is_that_of_its_calls():
    report = multihead.check(HoldsALength, allow="all")
    assert report, str(report)
    assert f"x (2, {LENGTH_OF_FILE}, " in report.understood[1]
    assert multihead.check(HoldsALengthUnscaled).cause == "scale_missing"


class Table(Heads):
    """A bias for each pair of patches of an image, and of a token before them."""

    def __init__(self, dim, nb_heads, nb_patches_height, nb_patches_width):
        super().__init__(dim, nb_heads)
        count = nb_patches_height * nb_patches_width + 1
        distances = (torch.arange(count)[:, None] - torch.arange(count)).abs()
        self.register_buffer("bias", -0.1 * distances.double(), persistent=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + self.bias
        return self.merged(scores.softmax(-1) @ v)


def test_sides_that_are_counted_in_patches():
    report = multihead.check(Table, allow="all")
    assert report, str(report)
    assert "nb_patches_height=2, nb_patches_width=5" in report.understood[0]


class Grouped(nn.Module):
    """Groups only with the width of a head, which may be left out without them."""

    def __init__(self, dim, n_head, n_kv_head=None, head_dim=None):
        super().__init__()
        if n_kv_head is not None:
            assert head_dim is not None
        self.n_head, self.head_dim = n_head, head_dim or dim // n_head
        self.groups = n_head // (n_kv_head or n_head)
        self.q = nn.Linear(dim, dim)
        self.k, self.v = (nn.Linear(dim, dim // self.groups) for _ in range(2))
        self.o = nn.Linear(dim, dim)

    def repeated(self, x):
        return x.repeat_interleave(self.groups, dim=1)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        k, v = self.repeated(k), self.repeated(v)
        weights = (q @ k.mT / math.sqrt(self.head_dim)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Tiled(Grouped):
    def repeated(self, x):
        return torch.cat([x] * self.groups, dim=1)


def test_groups_that_need_the_width_of_a_head():
    assert multihead.check(Grouped)
    assert multihead.check(Tiled).cause == "groups_tiled"


class OfADictionary(Heads):
    def __init__(self, config_dict):
        super().__init__(config_dict["hidden_size"], config_dict["n_heads"])
        self.dropout = nn.Dropout(config_dict["attention_dropout_rate"])

    divisor = property(lambda self: math.sqrt(self.q.out_features // self.num_heads))

    def forward(self, x, mask):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / self.divisor + mask).softmax(-1)
        return self.merged(self.dropout(weights) @ v)


class OfADictionaryByHeads(OfADictionary):
    divisor = property(lambda self: math.sqrt(self.num_heads))


def test_a_mask_that_every_call_has_may_be_added():
    report = multihead.check(OfADictionary, allow="all")
    assert report and "mask_additive" in [c["name"] for c in report.conditions]
    assert multihead.check(OfADictionaryByHeads).cause == "scale_by_heads"


class ScaledInFloat32(Heads):
    """A number of float32 leaves float32's digits, in which a pair of faults would
    take long to be told from one."""

    kept = staticmethod(lambda dim, heads: dim // heads)

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.scale = torch.FloatTensor([self.kept(dim, num_heads)]).sqrt()

    def forward(self, query, key, value, mask=None):
        q, k, v = self.heads(query, key, value)
        scores = q @ k.mT / self.scale
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.merged(scores.softmax(-1) @ v)


class ScaledByEmbedDim(ScaledInFloat32):
    kept = staticmethod(lambda dim, heads: dim)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(ScaledInFloat32, None), (ScaledByEmbedDim, "scale_by_embed_dim")],
)
def test_a_scale_that_is_kept_in_float32(kind, fault):
    report = multihead.check(kind, allow="all")
    assert report.cause == fault, str(report)
    assert report.verdict["effort"] < 0.1


def test_a_name_of_a_package_that_is_also_that_of_a_file_in_it(tmp_path):
    package = tmp_path / "tagger"
    for name, text in {
        "__init__": "",
        "utils/__init__": "from tagger.utils.scope import scope, where\n",
        "utils/scope": (
            "import contextlib\n"
            "@contextlib.contextmanager\n"
            "def scope(name):\n"
            "    yield name\n"
            "def where():\n"
            "    return ''\n"
        ),
        "attention": (
            "import tagger.utils as utils\n"
            "def attention(q, k, v):\n"
            "    utils.where()\n"
            "    with utils.scope('attention'):\n"
            "        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v\n"
        ),
    }.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report = multihead.check(f"{package / 'attention.py'}:attention")
    assert report, str(report)


class CausalUnlessMasked(Heads):
    """A mask (Lq, Lk) is all that there is to be blocked, where it is given."""

    def forward(self, x, attn_mask=None):
        q, k, v = self.heads(x)
        context = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=attn_mask is None
        )
        return self.merged(context)


class CausalUnlessPadded(Heads):
    """Causal self-attention. mask: (B, L), 1 = a real token, 0 = padding."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        wide = None if mask is None else mask[:, None, None, :].bool()
        context = nn.functional.scaled_dot_product_attention(
            q, k, v, wide, is_causal=wide is None
        )
        return self.merged(context)


def test_code_that_is_causal_unless_a_mask_is_given():
    report = multihead.check(CausalUnlessMasked)
    assert "causal_unless_masked" in [c["name"] for c in report.conditions]
    assert multihead.check(CausalUnlessPadded).judgement == "wrong"


class AddsWhatItsEncoderMade(Heads):
    def forward(self, x, attention_mask):
        # attention_mask is (1.0 - attention_mask) * -10000.0, made in the encoder
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + attention_mask
        return self.merged(scores.softmax(-1) @ v)


class TakesTooLittle(Heads):
    """1e-12 of what is taken from 1 blocks nothing."""

    def forward(self, x, attention_mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores - 1e-12 * (1.0 - attention_mask[:, None, None].double())
        return self.merged(scores.softmax(-1) @ v)


def test_only_code_says_that_a_mask_is_taken_from_1():
    report = multihead.check(AddsWhatItsEncoderMade)
    assert [c["name"] for c in report.conditions] == ["mask_additive"], str(report)
    assert multihead.check(TakesTooLittle).judgement == "wrong"


class WithGains(Heads):
    """Learned factors of features before queries and keys meet."""

    axis = -1

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.sqk = nn.Parameter(torch.ones(dim // num_heads))

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = self.sqk * q, self.sqk * k
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(self.axis)
        return self.merged(weights @ v)


class WithGainsOverQueries(WithGains):
    axis = -2


def test_learned_gains_are_layers_of_which_nothing_is_known():
    report = multihead.check(WithGains)
    assert report.cause == "other_layers" and "`sqk`" in report.findings[0].sentence
    assert multihead.check(WithGainsOverQueries).cause == "softmax_over_queries"


class KeepsAnArgument(Heads):
    def __init__(self, dim, num_heads, scale):
        super().__init__(dim, num_heads)
        self.register_buffer("scale", scale)

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT * self.scale).softmax(-1) @ v)


class KeepsALayer(Heads):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.register_buffer("inner", nn.Identity())

    forward = KeepsAnArgument.forward


def test_a_buffer_of_an_argument_is_not_the_fault_of_the_code():
    assert multihead.check(KeepsAnArgument).judgement == "not_judged"
    assert multihead.check(KeepsALayer).cause == "raises"


def test_a_class_that_inherits_from_an_instance(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from torch import nn\nclass Attention(nn.Module()):\n    pass\n")
    report = multihead.check(f"{file}:Attention")
    assert report.cause == "raises" and report.judgement == "wrong", str(report)


class Named(Heads):
    def __init__(self, n_embd, n_head, condition_embd, vocab_size):
        super().__init__(n_embd, n_head)
        self.k = nn.Linear(condition_embd, n_embd)

    def forward(self, inputs_Q, inputs_K, inputs_V):
        q, k, v = self.heads(inputs_Q, inputs_K, inputs_V)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.merged(weights @ v)


def test_names_that_are_understood_by_their_words():
    report = multihead.check(Named)
    assert report, str(report)


class FoldsHeadsFirst(Heads):
    """Masks (B, 1, Lq, Lk), folded with heads before items, for heads that are not."""

    def forward(self, x, mask=None):
        q, k, v = (t.flatten(0, 1) for t in self.heads(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            mask = mask.expand(len(x), self.num_heads, -1, -1).transpose(0, 1)
            scores = scores.masked_fill(mask.flatten(0, 1) == 0, -1e9)
        context = scores.softmax(-1) @ v
        return self.merged(context.unflatten(0, (len(x), self.num_heads)))


def test_masks_that_are_folded_with_heads_first():
    assert multihead.check(FoldsHeadsFirst).cause == "mask_head_order"


class NormsOfAllHeads(nn.Module):
    """As OLMo has it: queries and keys pass norms before they are cut into heads. With
    one head of keys, theirs is as wide as a head."""

    def __init__(self, d_in, num_heads, num_kv_groups, head_dim):
        super().__init__()
        self.heads, self.groups = num_heads, num_kv_groups
        wide, narrow = num_heads * head_dim, num_kv_groups * head_dim
        self.q_proj, self.o_proj = nn.Linear(d_in, wide), nn.Linear(wide, d_in)
        self.k_proj, self.v_proj = nn.Linear(d_in, narrow), nn.Linear(d_in, narrow)
        self.q_norm, self.k_norm = nn.RMSNorm(wide), nn.RMSNorm(narrow)

    def forward(self, x):
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            t.unflatten(-1, (self.groups, -1)).transpose(1, 2)
            for t in (k, self.v_proj(x))
        )
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def test_norms_of_all_heads_beside_one_head_of_keys():
    report = multihead.check(NormsOfAllHeads)
    assert report.passed, str(report)
    assert "norm_of_heads" in [said["name"] for said in report.assumptions]


def turned(x, width: int, sign: float = 1.0):
    """The first features of (B, L, H, D) by their positions, half by half."""
    part, rest = x[..., :width], x[..., width:]
    steps = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None]
    angles = steps / 100 ** (torch.arange(0, width, 2).to(x) / width)
    cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), sign * angles.sin()))
    a, b = part[..., : width // 2], part[..., width // 2 :]
    return torch.cat([part * cos + torch.cat([-b, a], -1) * sin, rest], -1)


class TurnsAPart(nn.Module):
    """As GPT-NeoX has it: a quarter of each head is turned, which must be whole pairs."""

    def __init__(self, n_hidden, n_heads, rotary_pct=0.25):
        super().__init__()
        self.heads, self.width = n_heads, int(n_hidden // n_heads * rotary_pct)
        self.qkv, self.out = (
            nn.Linear(n_hidden, 3 * n_hidden),
            nn.Linear(n_hidden, n_hidden),
        )

    def turn(self, q, k, v):
        return turned(q, self.width), turned(k, self.width), v

    def back(self, context):
        return context

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = self.turn(q, k, v)
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5).softmax(
            -1
        )
        return self.out(
            self.back(torch.einsum("bhij,bjhd->bihd", weights, v)).flatten(2)
        )


class TurnsValuesAndBack(TurnsAPart):
    """Values by their distance from the query: turned, and turned back behind."""

    def turn(self, q, k, v):
        return *super().turn(q, k, v)[:2], turned(v, self.width)

    def back(self, context):
        return turned(context, self.width, -1.0)


def test_heads_are_wide_enough_for_the_part_that_is_turned():
    report = multihead.check(TurnsAPart)
    assert report.passed, str(report)


def test_a_context_that_is_turned_back_is_a_condition():
    report = multihead.check(TurnsValuesAndBack)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["layers_beside"]


class Switched(nn.Module):
    """Which switch is meant, nobody knows."""

    def __init__(self, d_model: int, num_heads: int, use_rope: bool):
        super().__init__()
        self.heads, self.use_rope = num_heads, use_rope
        self.qkv, self.out = (
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        if self.use_rope:
            q = turned(q, q.shape[-1])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_switch_that_must_be_given_is_a_condition():
    report = multihead.check(Switched)
    assert [c["name"] for c in report.conditions] == ["switched_off"]
    assert "`use_rope`" in report.assumptions[0]["sentence"]


def in_blocks(q, k, v, block_size=64):
    """Attention of heads (B, H, L, D), with a running softmax over blocks of keys."""
    length, width = q.shape[-2:]
    largest = torch.full_like(q[..., :1], -torch.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for start in range(0, length, block_size):
        keys = slice(start, min(start + block_size, length))
        scores = q @ k[..., keys, :].mT / math.sqrt(width)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, rest = (scores - new).exp(), (largest - new).exp()
        total = total * rest + weights.sum(-1, keepdim=True)
        out, largest = out * rest + weights @ v[..., keys, :], new
    return out / total


def test_blocks_of_keys_that_end_where_queries_do():
    report = multihead.check(in_blocks)
    assert report.cause is None, str(report)
    assert [c["name"] for c in report.conditions] == ["equal_lengths_only"]
    assert "a loop over keys ends where the queries do" in " ".join(str(report).split())
    assert multihead.check(in_blocks, allow="equal_lengths_only").passed


def without_rescaling(q, k, v, block_size=64):
    """The same, by weights that know nothing of the blocks before."""
    length, width = q.shape[-2:]
    total, out = torch.zeros_like(q[..., :1]), torch.zeros_like(q)
    for start in range(0, length, block_size):
        keys = slice(start, min(start + block_size, length))
        scores = q @ k[..., keys, :].mT / math.sqrt(width)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = total + weights.sum(-1, keepdim=True)
        out = out + weights @ v[..., keys, :]
    return out / total


def test_blocks_that_are_wrong_of_equal_lengths_too_are_not_excused():
    report = multihead.check(without_rescaling)
    assert not report.passed and report.conditions == [], str(report)


@dataclass
class OfOwnHeads:
    hidden_size: int = 64
    num_attention_heads: int = 4
    head_dim: int = 32  # which is not 64 / 4


class OfOwnWidth(nn.Module):
    """Heads of a width of their own, as in Qwen 3."""

    def __init__(self, config: OfOwnHeads):
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width)
        self.k_proj = nn.Linear(config.hidden_size, width)
        self.v_proj = nn.Linear(config.hidden_size, width)
        self.o_proj = nn.Linear(width, config.hidden_size)

    def divisor(self):
        return self.config.head_dim**0.5

    def forward(self, x):
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        shape = self.config.num_attention_heads, self.config.head_dim
        q, k, v = (t.unflatten(-1, shape).transpose(1, 2) for t in projected)
        weights = (q @ k.mT / self.divisor()).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class OfOwnWidthScaledAsAPart(OfOwnWidth):
    def divisor(self):
        return (self.config.hidden_size // self.config.num_attention_heads) ** 0.5


def test_heads_wider_than_their_part():
    assert multihead.check(OfOwnWidth).judgement == "right"
    report = multihead.check(OfOwnWidthScaledAsAPart)
    assert report.judgement == "wrong" and "scale" in report.cause, str(report)
