# SPDX-License-Identifier: MIT
"""Calls as a user writes them, for type checkers: test_typing.py runs them over it.

It runs too, so that nothing is promised about calls that do not work.
"""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import multihead
from multihead import textbook


def function(q: Tensor, mask: Tensor, with_lse: bool) -> None:
    attention = multihead.scaled_dot_product_attention
    assert_type(attention(q, q, q), Tensor)
    assert_type(attention(q, q, q, mask, 0.1, True, 0.5, False), Tensor)
    assert_type(attention(q, q, q, return_lse=False).sum(), Tensor)
    out, logsumexp = attention(q, q, q, window=(2, 0), return_lse=True)
    assert_type(out, Tensor)
    assert_type(logsumexp, Tensor)
    either = attention(q, q, q, return_lse=with_lse)
    assert isinstance(either, tuple) == with_lse
    rules = attention(
        q,
        q,
        q,
        is_causal=True,
        causal_alignment="bottom_right",
        window=[2, 0],
        key_lengths=torch.tensor([3]),
        softcap=30.0,
        alibi_slopes=torch.rand(2),
        sinks=torch.rand(2),
    )
    assert_type(rules, Tensor)
    summary = multihead.attention_summary(q, q, k=2, window=(2, 0), query_offset=1)
    assert_type(summary.keys, Tensor)


def modules(x: Tensor) -> None:
    mha = multihead.MultiheadAttention(8, 2, batch_first=True)
    out, weights = mha(x, x, x, is_causal=True)
    assert_type(mha.forward(x, x, x), tuple[Tensor, Tensor | None])
    reference: nn.MultiheadAttention = mha
    gqa = multihead.GroupedQueryAttention.from_multihead(reference, 1)
    assert_type(gqa.forward(x, x, x), tuple[Tensor, Tensor | None])
    assert_type(gqa.to_multihead(), multihead.MultiheadAttention)
    with multihead.backend("exact"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        print(out.shape, weights.shape, model(x).shape)


def forms(x: Tensor) -> None:
    mha = nn.MultiheadAttention(8, 2)
    assert_type(textbook.multi_head_attention(x, x, x, 2, 8, weights=mha), Tensor)
    assert_type(textbook.grouped_query_attention(x, x, x, 2, 8), Tensor)
    out, weights = textbook.scaled_dot_product_attention(x, x, x)
    assert_type(weights, Tensor)
    print(textbook.MultiHeadAttention(8, 2)(x, x, x).shape, out.shape)


def report() -> None:
    def mine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / q.size(-1) ** 0.5, -1) @ v

    found = multihead.check(mine)
    assert_type(found.passed, bool)
    assert_type(found.cause, str | None)


def main() -> None:
    q = torch.rand(1, 2, 3, 4)
    function(q, torch.ones(3, 3, dtype=torch.bool), True)
    modules(torch.rand(1, 3, 8))
    forms(torch.rand(1, 3, 8))
    report()
    print(multihead.__version__)


if __name__ == "__main__":
    main()
