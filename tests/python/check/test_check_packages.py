# SPDX-License-Identifier: MIT
"""Code as large published packages have it: settings of a class of their own, layers as
arguments, names beside what they mean, and files that only a package makes whole."""

import dataclasses
import sys
import textwrap

import pytest
import torch
from attempts.steps import Attention
from torch import nn

import multihead

PACKAGE = {
    "__init__": "__version__, WHOLE = '1.2', True\nfrom .parts import scores",
    "parts": """
        import published
        from . import __version__
        assert published.WHOLE and __version__ == "1.2"

        def scores(q, k):
            return q @ k.mT / q.shape[-1] ** 0.5
        """,
    "layers/__init__": "",
    "layers/attention": """
        from ..parts import scores
        from .. import __version__

        def attention(q, k, v):
            assert __version__ == "1.2"
            return scores(q, k).softmax(-1) @ v
        """,
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package that lies on Python's path."""
    for name, text in PACKAGE.items():
        path = tmp_path / "published" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "published"]:
        del sys.modules[name]


def test_a_file_of_an_installed_package_is_imported_by_its_name(package):
    (package / "published-1.2.dist-info").mkdir()
    report = multihead.check(package / "published/layers/attention.py")
    assert report.passed, str(report)
    assert "published.layers.attention" in sys.modules


def test_a_package_that_is_not_installed_knows_its_version(package):
    path = package / "published/layers/attention.py"

    (package / "published/parts.py").write_text(
        "def scores(q, k):\n    return q @ k.mT / q.shape[-1] ** 0.5\n"
    )
    report = multihead.check(path)
    assert report.passed, str(report)
    assert "published.layers.attention" not in sys.modules


def test_what_an_absent_package_would_have_had_is_not_the_codes_fault(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(
        "from absent_package import Base\n"
        "class Attention(Base.of(3)):\n"
        "    parts = absent_names\n"
    )
    report = multihead.check(f"{path}:Attention")
    assert report.unchecked, str(report)


@dataclasses.dataclass
class Settings:
    width: int = 96
    n_heads: int = 4
    attention_multiplier: float = 1.0
    places: list[int] | None = None
    sliding_window: int = 4096

    def __post_init__(self):
        assert self.places is None or len(self.places) == self.n_heads

    def __repr__(self):
        raise TypeError("it cannot be written")


class OfSettings(Attention):
    """Its scale is a setting; a window that wide is for others to keep to."""

    def __init__(self, d_model, n_heads, config: Settings | None = None):
        super().__init__(d_model, n_heads)
        self.factor = config.attention_multiplier
        self.sliding_window = config.sliding_window

    def scores(self, q, k):
        return q @ k.mT * self.factor

    def forward(self, x):
        return self.attend(x, x, x)


def test_settings_of_a_known_class_are_given_where_they_are_optional():
    report = multihead.check(OfSettings)
    assert report.passed, str(report)
    assert "config=Settings(…)" in str(report)


class OfLayers(nn.Module):
    """As torchtune's: the projections are made outside."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        embed_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module | None = None,
    ):
        super().__init__()
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.output_proj, self.pos_embeddings = output_proj, pos_embeddings

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.pos_embeddings is not None:
            q, k = self.pos_embeddings(q), self.pos_embeddings(k)
        k, v = (y.repeat_interleave(self.groups, 1) for y in (k, v))
        weights = (q @ k.mT / self.head_dim**0.5).softmax(-1)
        return self.output_proj((weights @ v).transpose(1, 2).flatten(2))


def test_layers_that_are_arguments_are_made():
    report = multihead.check(OfLayers)
    assert report.passed, str(report)


class OfSwitches(Attention):
    """As in timm and open_clip: none of them scales the scores."""

    def __init__(
        self, dim, num_heads, scale_norm=False, scaled_cosine=False, scale_heads=False
    ):
        super().__init__(dim, num_heads)
        assert not (scale_norm or scaled_cosine or scale_heads)

    def forward(self, x):
        return self.attend(x, x, x)


def test_flags_that_scale_something_else_are_left_alone():
    report = multihead.check(OfSwitches)
    assert report.passed, str(report)


class GainFromOne(Attention):
    """As Gemma's: the gain of the norms of queries and keys is 1 + weight."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.q_norm = nn.Parameter(torch.zeros(self.d_k))
        self.k_norm = nn.Parameter(torch.zeros(self.d_k))

    def normed(self, x, weight):
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x * (1.0 + weight.float())).to(self.W_q.weight.dtype)

    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = self.normed(q, self.q_norm), self.normed(k, self.k_norm)
        return self.join(self.scores(q, k).softmax(-1) @ v)


def test_a_gain_may_be_counted_from_one():
    report = multihead.check(GainFromOne)
    assert report.passed, str(report)


class WritesALog(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        with open("no/such/folder/attention.log", "w") as log:
            log.write("made\n")

    def forward(self, x):
        return self.attend(x, x, x)


def test_a_log_in_a_folder_that_is_not_there_is_lost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = multihead.check(WritesALog)
    assert report.passed, str(report)
    assert list(tmp_path.iterdir()) == []


class ReadsWhatIsNotThere(WritesALog):
    def __init__(self, d_model, num_heads):
        Attention.__init__(self, d_model, num_heads)
        with open("no/such/folder/weights.txt") as weights:
            self.text = weights.read()


def test_what_is_read_has_to_be_there():
    report = multihead.check(ReadsWhatIsNotThere)
    assert not report.passed and "FileNotFoundError" in str(report)


class Scrambled(Attention):
    """Features of queries and keys in an order that nothing explains; a mask that is
    added."""

    def forward(self, x, attention_mask=None):
        order = torch.randperm(
            self.W_q.out_features, generator=torch.Generator().manual_seed(3)
        )
        q, k, v = (self.split(w(x)[..., order]) for w in (self.W_q, self.W_k, self.W_v))
        scores = self.scores(q, k)
        if attention_mask is not None:
            scores = scores + attention_mask
        return self.join(scores.softmax(-1) @ v)


def test_masks_of_heads_alone_may_be_added():
    report = multihead.check(Scrambled)
    assert "mask_added" not in report.causes, str(report)


class HandsAllOn(Attention):
    """What it does not name goes to the class that it inherits."""

    def __init__(self, *args, factor=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class DemandsAFlag(HandsAllOn):
    def __init__(self, d_model, num_heads, is_ours=False):
        super().__init__(d_model, num_heads)
        self.is_ours = is_ours
        assert self.is_ours, "of theirs there is none"


class OfKeysWidth(nn.Module):
    """key_dim is the width of what is read, beside query_dim, as style tokens have it
    (Wang et al., 2018)."""

    def __init__(self, query_dim, key_dim, num_units, num_heads):
        super().__init__()
        self.heads = num_heads
        self.query = nn.Linear(in_features=query_dim, out_features=num_units)
        self.key = nn.Linear(in_features=key_dim, out_features=num_units)
        self.value = nn.Linear(in_features=key_dim, out_features=num_units)

    def forward(self, query, key):
        parts = self.query(query), self.key(key), self.value(key)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class DividesByItsScale(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, q, k, v):
        return (q / self.scale @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    "target", [HandsAllOn, DemandsAFlag, OfKeysWidth, DividesByItsScale]
)
def test_what_a_constructor_asks_for(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)


def test_layers_of_fairseq_go_on_without_it(tmp_path):
    path = tmp_path / "of_fairseq.py"
    path.write_text(
        textwrap.dedent(
            """
            from fairseq import utils
            from fairseq.modules.fairseq_dropout import FairseqDropout
            from fairseq.modules.quant_noise import quant_noise
            from torch import nn

            class MultiheadAttention(nn.Module):
                def __init__(self, embed_dim, num_heads, dropout=0.0):
                    super().__init__()
                    self.heads = num_heads
                    self.dropout = FairseqDropout(dropout, module_name="attention")
                    self.qkv = quant_noise(nn.Linear(embed_dim, 3 * embed_dim), 0, 8)
                    self.out = quant_noise(nn.Linear(embed_dim, embed_dim), 0, 8)

                def forward(self, x):
                    parts = self.qkv(x).chunk(3, -1)
                    q, k, v = (
                        t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts
                    )
                    scores = q @ k.mT / q.shape[-1] ** 0.5
                    weights = utils.softmax(scores, dim=-1, onnx_trace=False)
                    out = self.dropout(weights) @ v
                    return self.out(out.transpose(1, 2).flatten(2))
            """
        )
    )
    report = multihead.check(f"{path}:MultiheadAttention")
    assert report.judgement == "right", str(report)


class OfItsDropout(nn.Module):
    """As in packages that make layers of settings: a rate of ours is none."""

    def __init__(self, embed_dims, num_heads, drop=None, batch_first=False):
        super().__init__()
        self.batch_first = batch_first
        self.attn = nn.MultiheadAttention(embed_dims, num_heads)
        self.drop = nn.Identity() if drop is None else nn.Dropout(drop["rate"])

    def forward(self, query, key, value):
        """query: (B, L, E) if batch_first, else (L, B, E)."""
        if self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        out = self.drop(self.attn(query, key, value, need_weights=False)[0])
        return out.transpose(0, 1) if self.batch_first else out


def test_a_layout_is_asked_for_whatever_else_may_be_left_out():
    report = multihead.check(OfItsDropout)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "batch_first=True" in str(report)
