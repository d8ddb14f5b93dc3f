# SPDX-License-Identifier: MIT
"""A small decoder that generates tokens: grouped heads, one cache for each layer.

    python examples/generate.py MODEL.safetensors [--tokens N] [--seed S]

Draws a model with random weights, writes it, generates greedily and by sampling, and
times the same layers on PyTorch's attention. generate.cpp reads the file and prints the
same tokens.
"""

import argparse
import itertools
import time
from collections.abc import Iterator

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import multihead

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, POSITIONS = 256, 128, 8, 2, 2, 1024
PROMPT = list(b"The cat sat on the mat because ")
TEMPERATURE = 0.8


class TorchAttention(multihead.GroupedQueryAttention):
    """The same on PyTorch: its cache grows by torch.cat, as there is no other."""

    def forward(self, query, key, value, cache, need_weights=False):
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

        new = [heads(self.k_proj(key)), heads(self.v_proj(value))]
        if cache:
            new = [torch.cat(pair, 2) for pair in zip(cache, new, strict=True)]
        is_first = not cache
        cache[:] = new
        q = heads(self.q_proj(query))
        out = F.scaled_dot_product_attention(
            q, *new, is_causal=is_first, enable_gqa=True
        )
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(WIDTH))
        self.mlp_norm = nn.Parameter(torch.ones(WIDTH))
        self.attention = attention(WIDTH, HEADS, KV_HEADS, bias=False, batch_first=True)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cache) -> Tensor:
        y = torch.rms_norm(x, (WIDTH,), self.attention_norm, 1e-6)
        x = x + self.attention(y, y, y, need_weights=False, cache=cache)[0]
        y = torch.rms_norm(x, (WIDTH,), self.mlp_norm, 1e-6)
        return x + self.down(F.silu(self.up(y)))


class Decoder(nn.Module):
    def __init__(self, attention: type[nn.Module] = multihead.GroupedQueryAttention):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.positions = nn.Parameter(torch.randn(POSITIONS, WIDTH))
        self.layers = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.output = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: Tensor, start: int, caches: list) -> Tensor:
        """(B, L) tokens from position start on → (B, vocabulary), logits of the next."""
        x = F.embedding(tokens, self.embedding)
        x = x + self.positions[start : start + tokens.shape[1]]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        x = torch.rms_norm(x[:, -1], (WIDTH,), self.norm, 1e-6)
        return F.linear(x, self.output)


def uniform_numbers(seed: int) -> Iterator[float]:
    """SplitMix64, the upper 53 bits as a number in [0, 1): any language has it in five
    lines. Source: "Fast Splittable Pseudorandom Number Generators"."""
    word = 2**64 - 1
    for state in itertools.count(seed + 0x9E3779B97F4A7C15, 0x9E3779B97F4A7C15):
        z = state & word
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        yield ((z ^ (z >> 31)) >> 11) * 2.0**-53


def sampled(logits: Tensor, number: float) -> int:
    """The token at which the cumulated probabilities, in float64, pass the number."""
    probabilities = (logits.double() / TEMPERATURE).softmax(-1)
    passed = int((probabilities.cumsum(-1) <= number).sum())
    return min(passed, VOCABULARY - 1)


@torch.no_grad()
def generate(model: Decoder, caches: list, count: int, numbers=None) -> list[int]:
    """`count` tokens after the prompt; without numbers each is the likeliest."""
    tokens, new = [], PROMPT
    position = 0
    for _ in range(count):
        logits = model(torch.tensor([new]), position, caches)[0]
        position += len(new)
        token = (
            int(logits.argmax()) if numbers is None else sampled(logits, next(numbers))
        )
        tokens.append(token)
        new = [token]
    return tokens


def caches_of_multihead() -> list[multihead.KVCache]:
    return [multihead.KVCache(1, KV_HEADS, WIDTH // HEADS) for _ in range(LAYERS)]


def tokens_per_second(model: Decoder, caches: list, count: int) -> float:
    begin = time.perf_counter()
    generate(model, caches, count)
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Decoder().eval()
    save_file(model.state_dict(), options.model)
    greedy = generate(model, caches_of_multihead(), options.tokens)
    print("greedy:", *greedy)
    numbers = uniform_numbers(options.seed)
    print("sampled:", *generate(model, caches_of_multihead(), options.tokens, numbers))

    theirs = Decoder(TorchAttention).eval()
    theirs.load_state_dict(model.state_dict())
    for name, decoder, caches in (
        ("multihead", model, caches_of_multihead()),
        ("PyTorch", theirs, [[] for _ in range(LAYERS)]),
    ):
        speed = tokens_per_second(decoder, caches, options.tokens)
        print(f"{name}: {speed:.0f} tokens per second")


if __name__ == "__main__":
    main()
