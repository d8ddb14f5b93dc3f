# SPDX-License-Identifier: MIT
"""The attention of one layer of a real model, as a dump for `multihead show`.

    python examples/bert_attention.py TEXT DUMP.safetensors [--layer N]

The model is all-MiniLM-L6-v2 (its weights: requirements/model.txt). The dump holds the
input of the layer, its parameters under the names of nn.MultiheadAttention, and the
tokens. bert_attention.cpp makes the same of any BERT in C++.
"""

import argparse
import json

import torch
from safetensors.torch import save_file
from sentence_embeddings import HEADS, LAYERS, Model, get_model_path, trace
from tokenizers import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text")
    parser.add_argument("dump")
    parser.add_argument("--layer", type=int, default=0, choices=range(LAYERS))
    options = parser.parse_args()

    path = get_model_path()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    weights = Model(path / "model.safetensors").weights
    name = f"encoder.layer.{options.layer}.attention"
    with torch.no_grad():
        traced = trace(path / "model.safetensors", [options.text])
    dump = {"x": traced[f"hidden.{options.layer}"]}
    for kind in ("weight", "bias"):
        roles = [f"{name}.self.{role}.{kind}" for role in ("query", "key", "value")]
        dump[f"in_proj_{kind}"] = torch.cat([weights[role] for role in roles])
        dump[f"out_proj.{kind}"] = weights[f"{name}.output.dense.{kind}"]
    facts = {
        "title": f"layer {options.layer}: {options.text}",
        "num_heads": str(HEADS),
        "tokens": json.dumps(tokenizer.encode(options.text).tokens),
    }
    save_file(dump, options.dump, facts)


if __name__ == "__main__":
    main()
