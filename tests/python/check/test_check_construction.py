# SPDX-License-Identifier: MIT
"""How `check` constructs and calls what is named and configured in unusual ways."""

import argparse
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead
from multihead.check import __main__ as command
from multihead.check.subject import promised
from multihead.check.subject.target import Subject
from multihead.check.subject.words import role_of_words

WORDS = {
    "num_heads": "n_heads nhead attention_heads headCount decoder_attention_heads",
    "num_kv_heads": "n_kv_heads kv_head num_key_value_heads query_groups",
    "head_dim": "dim_per_head headDim d_head size_per_head head_features",
    "embed_dim": "n_embd d_embed dModel num_hiddens in_channels n_state text_dim units_n",
    "out_dim": "out_channels dim_output output_size",
    "max_length": "max_len n_ctx seq_len num_patches block_size n_positions",
    "qkv_dim": "dim_Q d_k key_dim total_value_depth dimv",
    "mlp_dim": "ff_dim dim_feedforward mlp_size",
    "dropout": "attn_pdrop dropout_rate",
    "mlp_ratio": "mlp_ratio ffn_expansion_factor",
    None: "n_layer vocab_size head_mask qkv_bias name depth x max_value",
}


@pytest.mark.parametrize("role", WORDS)
def test_the_words_of_a_name_say_what_it_counts(role):
    assert {name: role_of_words(name) for name in WORDS[role].split()} == (
        dict.fromkeys(WORDS[role].split(), role)
    )


class Base(nn.Module):
    """Multi-head attention in any sizes."""

    def build(self, width, heads, inner=None):
        inner = inner or width
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, inner) for _ in range(3))
        self.o = nn.Linear(inner, width)

    def forward(self, x, mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, mask)
        return self.o(out.transpose(1, 2).flatten(2))


class OfWords(Base):
    def __init__(self, decoder_heads, text_dim, layer_idx):
        super().__init__()
        assert layer_idx == 0
        self.build(text_dim, decoder_heads)


class OfWholeKeys(Base):
    def __init__(self, dim_in, dim_k, dim_v, num_heads=8):
        super().__init__()
        assert dim_k % num_heads == 0 and dim_v % num_heads == 0
        self.build(dim_in, num_heads, dim_k)


class OfLayers(Base):
    def __init__(self, dim, heads, dropout: nn.Module, act_layer, norm, device):
        super().__init__()
        self.build(dim, heads)
        self.inner = act_layer()
        self.drop, self.norm = dropout, norm.to(device)

    def forward(self, x):
        q, k, v = (
            layer(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = self.drop((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        return self.inner(self.o((weights @ v).transpose(1, 2).flatten(2)))


@dataclasses.dataclass
class ModelSettings:
    n_embd: int
    n_head: int
    way_of_the_dialect: str = "none"
    dropout: float = 0.0
    bias: bool = False


class OfItsSettings(Base):
    def __init__(self, config: ModelSettings):
        super().__init__()
        assert config.way_of_the_dialect == "none" and config.bias is False
        self.build(config.n_embd, config.n_head)


class OfAnyNames(Base):
    def __init__(self, args):
        super().__init__()
        assert not hasattr(args, "use_rope") and not args.get("use_alibi", False)
        self.build(args.model.width_of_embedding, args["attention_heads"])
        self.more = nn.Linear(2, 2) if args.flag_of_the_dialect else None


class Scores(nn.Module):
    """The step inside of a layer."""

    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature, self.drop = temperature, nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        scores = q @ k.mT / self.temperature
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.drop(scores.softmax(-1)) @ v


class DotProductAttentionInside(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, queries, keys, values):
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
        return self.drop(scores.softmax(-1)) @ values


class HandedItsAttention(Base):
    def __init__(self, attention, d_model, n_heads):
        super().__init__()
        self.build(d_model, n_heads)
        self.inner = attention

    def forward(self, x):
        qkv = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.o(self.inner(*qkv).transpose(1, 2).flatten(2))


class OfOneLength(Base):
    def __init__(self, dim, num_heads, num_patches):
        super().__init__()
        self.build(dim, num_heads)
        self.place = nn.Parameter(torch.zeros(1, num_patches, 1), requires_grad=False)

    def forward(self, x):
        assert x.shape[1] == self.place.shape[1]
        return super().forward(x)


class OfAWindow(Base):
    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.build(dim, num_heads)
        self.tokens = window_size[0] * window_size[1]

    def forward(self, x, mask=None):
        assert x.shape[1] == self.tokens
        return super().forward(x, mask)


class WithSides(Base):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.build(dim, num_heads)

    def forward(self, x, H, W):
        B, N, C = x.shape
        image = x.transpose(1, 2).reshape(B, C, H, W)
        return super().forward(image.flatten(2).transpose(1, 2))


class OfAnImage(nn.Module):
    """Rows and columns both matter."""

    def __init__(self, channels):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Conv2d(channels, channels, 1) for _ in range(4)
        )
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        b, c, h, w = x.shape
        assert h > 1 and w > 1 and h != w
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        out = v @ (q.mT @ k / c**0.5).softmax(-1).mT
        return self.gamma * self.o(out.view(b, c, h, w))


class OfANormedImage(OfAnImage):
    """A group's norm takes in all positions, which one token does not have."""

    def __init__(self, channels):
        super().__init__(channels)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x):
        return x + super().forward(self.norm(x))


class OfLazyLayers(Base):
    """Its widths are those of the first call."""

    def __init__(self, num_hiddens, num_heads):
        super().__init__()
        self.build(num_hiddens, num_heads)
        self.q, self.k, self.v, self.o = (nn.LazyLinear(num_hiddens) for _ in range(4))


class OfEmptyMemory(Base):
    def __init__(self, dim, heads):
        super().__init__()
        self.build(dim, heads)
        for layer in (self.q, self.k, self.v, self.o):
            layer.weight = nn.Parameter(torch.empty(dim, dim))
            layer.bias = nn.Parameter(torch.Tensor(dim))


class OneHeadOfRows(nn.Module):
    """Matrices under names that say nothing, applied to each token as a column."""

    def __init__(self, embed, dim_head):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.randn(dim_head, embed) / embed**0.5) for _ in range(3)
        )

    def forward(self, x):
        q, k, v = ((w @ x.unsqueeze(-1)).squeeze(-1) for w in (self.a, self.b, self.c))
        return F.scaled_dot_product_attention(q, k, v)


class OfAnotherSequence(Base):
    """What it asks for beside x has no telling name; nor have its matrices."""

    def __init__(self, dim, heads):
        super().__init__()
        self.build(dim, heads)
        self.nets = nn.ModuleList([self.q, self.k, self.v])
        del self.q, self.k, self.v

    def forward(self, x, z):
        inputs = zip(self.nets, (x, z, z))
        q, k, v = (
            net(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for net, t in inputs
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2))


class InsistsOnItsMask(Base):
    """(B, 1, L, L), of numbers."""

    def __init__(self, dim, heads):
        super().__init__()
        self.build(dim, heads)

    def forward(self, x, mask):
        assert mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] > 1
        return super().forward(x, mask.to(x).log())


MASKED = {InsistsOnItsMask: dict(mask="keep"), Scores: dict(mask="keep")}
PASSING = [OfWords, OfWholeKeys, OfLayers, OfItsSettings, OfAnyNames, Scores]
PASSING += [HandedItsAttention, OfOneLength, OfAWindow, WithSides, OfAnImage]
PASSING += [
    OfANormedImage,
    OfEmptyMemory,
    OfLazyLayers,
    InsistsOnItsMask,
    OneHeadOfRows,
    OfAnotherSequence,
]


@pytest.mark.parametrize("kind", PASSING, ids=lambda kind: kind.__name__)
def test_what_a_person_would_call_is_called(kind):
    report = multihead.check(kind, **MASKED.get(kind, {}))
    assert report.cause is None, str(report)


def test_a_module_may_hold_itself_in_a_list():
    class Held(OfWords):
        def __init__(self, n_heads, text_dim, layer_idx):
            super().__init__(n_heads, text_dim, layer_idx)
            self.owner = [self]

    assert multihead.check(Held).cause is None


def test_lengths_beyond_tiles_are_run_for_self_attention_too():
    report = multihead.check(OfWords)
    shapes = [case["shape"] for case in report.cases if case["name"] == "130 queries"]
    assert shapes and shapes[0][1] == 130


def in_blocks(corrects):
    class InBlocks(nn.Module):
        """An online softmax over blocks of keys; its length has a name that elsewhere
        is the longest sequence."""

        def __init__(self, dim, heads=4, block_size=64):
            super().__init__()
            self.heads, self.block = heads, block_size
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x):
            batch, length, dim = x.shape
            q, k, v = (
                self.qkv(x)
                .view(batch, length, 3, self.heads, -1)
                .permute(2, 0, 3, 1, 4)
            )
            out, total = torch.zeros_like(q), q.new_zeros(*q.shape[:3], 1)
            largest = torch.full_like(total, -torch.inf)
            for start in range(0, length, self.block):
                keys = slice(start, start + self.block)
                scores = q @ k[:, :, keys].mT / math.sqrt(q.shape[-1])
                larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
                shrink, weights = (
                    torch.exp(largest - larger),
                    torch.exp(scores - larger),
                )
                total = total * shrink + weights.sum(-1, keepdim=True)
                out = out * (shrink if corrects else 1) + weights @ v[:, :, keys]
                largest = larger
            return self.out((out / total).transpose(1, 2).reshape(x.shape))

    return InBlocks


def test_a_long_sequence_has_several_blocks_of_an_online_softmax():
    assert multihead.check(in_blocks(corrects=True)).passed
    report = multihead.check(in_blocks(corrects=False))
    assert report.cause == "online_softmax_not_corrected"


@pytest.mark.parametrize(
    ("sentence", "says_so"),
    {
        "Queries are the last of the keys, as with a cache.": True,
        "The queries are the latest tokens.": True,
        "The query is the last argument.": False,
        "Queries are last in the batch dimension.": False,
        "Queries are not the last keys.": False,
    }.items(),
)
def test_only_positions_of_queries_are_the_last_of_the_keys(sentence, says_so):
    def attention(q, k, v):
        return q

    attention.__doc__ = sentence
    subject = Subject("function", attention, attention, "attention", source="-")
    assert promised.queries_are_last(subject) is says_so


CALLS = {
    "OfWords(H, E, 0)(x)": 3,
    "OfWords(4, text_dim=32, layer_idx=0).eval()(x, mask=mask)": 3,
    "OfWords(8, 48, 0).forward(x)": 3,
    "dict(out=OfWords(H, E, 0)(x))['out']": 3,
    "x = torch.randn(2, 9, 32); OfWords(4, 32, 0)(x)": 2,
    "OfWords(4, 32, 0)(torch.randn(2, 9, 32))": 2,
    "Scores(D ** 0.5)(q, k, v, mask)": 3,
    "Scores(6 ** 0.5)(*torch.randn(3, 2, 3, 5, 6))": 3,
    "twisted(k, [q, v], 1.0)": 3,
    "twisted(k, [q, v], q.new_ones(L, S))": 3,
}


def twisted(k, qv, factor):
    q, v = qv
    scores = q @ k.mT / q.shape[-1] ** 0.5 * factor
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("text", CALLS)
def test_a_call_that_somebody_writes(text):
    mask = "keep" if "mask" in text else None
    report = multihead.check(OfWords, call=text, mask=mask)
    assert report.cause is None, str(report)
    assert len({tuple(case["shape"]) for case in report.cases}) >= CALLS[text] - 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("x =", "must be Python"),
        ("1 + x", "must call something"),
        ("x = 3", "end with"),
    ],
)
def test_what_is_no_call_is_refused(text, said):
    with pytest.raises(ValueError, match=f"check: call .*{said}"):
        multihead.check(OfWords, call=text)


def test_a_call_that_raises_is_not_judged():
    report = multihead.check(OfWords, call="OfWords(1)(x)")
    assert report.unchecked and "TypeError" in report.findings[0].sentence


def test_inputs_say_how_to_call_what_nobody_understands():
    def odd(first, second, how, third):
        assert how == ("a", 3)
        scores = first @ second.mT / first.shape[-1] ** 0.5
        return scores.softmax(-1) @ third

    q, k, v = torch.randn(2, 4, 6), torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    report = multihead.check(odd, inputs=dict(first=q, second=k, how=("a", 3), third=v))
    assert report.cause is None, str(report)
    assert [2, 1, 4, 6] in [case["shape"] for case in report.cases]


def test_inputs_of_one_shape_are_judged_in_several_draws():
    def of_one_shape(q, k, v):
        assert q.shape == (2, 4, 6) and k.shape == (2, 5, 6)
        return twisted(k, (q, v), 1.0)

    shapes = (2, 4, 6), (2, 5, 6), (2, 5, 6)
    report = multihead.check(of_one_shape, inputs=[torch.randn(s) for s in shapes])
    assert report.cause is None and len(report.cases) >= 2, str(report)


def test_the_answers_of_an_argument_parser():
    parsed = argparse.Namespace(n_embd=48, n_head=8)
    model = OfItsSettings(ModelSettings(**vars(parsed)))
    assert multihead.check(model).cause is None


class OfTwoLetters(nn.Module):
    """d beside h: the whole width, and a number of heads."""

    def __init__(self, d=64, h=4):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def merged(self, x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.out(self.merged(weights @ v))


class OfTwoLettersViewed(OfTwoLetters):
    def merged(self, x):
        return x.reshape(x.size(0), x.size(2), -1)


def test_a_width_of_one_letter_beside_heads():
    """With one head a merge without transpose would be right."""
    assert multihead.check(OfTwoLetters).passed
    assert multihead.check(OfTwoLettersViewed).cause == "merge_not_transposed"


def test_a_fault_of_its_own_is_no_verdict(monkeypatch, capsys):
    def fails(*arguments):
        raise RecursionError("too deep")

    monkeypatch.setattr(command, "report_for", fails)
    monkeypatch.setattr("sys.argv", ["check", "attention.py"])
    assert command.main() == 2
    assert "check itself failed: nothing is said of the code" in capsys.readouterr().err


class NeverAModule(nn.Module):
    """Its constructor does not call that of nn.Module."""

    def __init__(self, dim):
        self.dim = dim

    def forward(self, q, k, v):
        return (q @ k.mT / self.dim**0.5).softmax(-1) @ v


def test_a_constructor_without_that_of_modules_raises():
    report = multihead.check(NeverAModule)
    assert report.cause == "raises" and not report.unchecked, str(report)
    assert "super().__init__()" in str(report)


class KeepsWhatItNeedsNot(nn.Module):
    """`n_items` is told by nothing, and nothing comes of it."""

    def __init__(self, n_items, d=48, ffn_hidden_dim=50):
        super().__init__()
        self.n_items = n_items
        self.d = d
        self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))

    def forward(self, queries, keys):
        scores = self.query(queries) @ self.key(keys).mT
        return scores.softmax(-1) @ self.value(keys)


class DividesByWhatItNeeds(KeepsWhatItNeedsNot):
    def __init__(self, n_items, d=48, ffn_hidden_dim=50):
        nn.Module.__init__(self)
        self.n_items = n_items
        self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))

    def forward(self, queries, keys):
        scores = self.query(queries) @ self.key(keys).mT / self.n_items
        return scores.softmax(-1) @ self.value(keys)


def test_a_guess_of_which_nothing_comes_leaves_no_doubt():
    assert multihead.check(KeepsWhatItNeedsNot).cause == "scale_missing"
    assert multihead.check(DividesByWhatItNeeds).cause == "argument_guessed"
