# SPDX-License-Identifier: MIT
"""Attention of three tokens of width two, each step as a table: python by_hand.py

The numbers are small enough to be checked with a pocket calculator. The gradient is
computed by its formulas, and the program ends with an error if PyTorch's differs.
"""

import math

import torch
from attention import scaled_dot_product_attention

Q = [[1, 0], [0, 1], [1, 1]]
K = [[1, 1], [0, 2], [2, 0]]
V = [[3, 0], [0, 3], [6, 6]]


def table(title, rows, digits=4):
    """A title, and a line for each row of a matrix."""
    print(title)
    for row in rows.tolist():
        print("  " + "".join(f"{x + 0.0:{digits + 5}.{digits}f}" for x in row))


def forward(q, k, v):
    d = q.size(-1)
    products = q @ k.T
    table("Q Kᵀ: row i holds the products of query i with every key", products, 0)
    scores = products / math.sqrt(d)
    table("S = Q Kᵀ / √2: the scores", scores)
    shares = scores.exp()
    table("exp S", shares)
    sums = shares.sum(dim=-1, keepdim=True)
    table("the sum of each row", sums)
    weights = shares / sums
    table("W = softmax S: each row divided by its sum", weights)
    output = weights @ v
    table("O = W V: row i is the mean of the values, weighted by row i", output)
    return weights, output


def backward(q, k, v, weights):
    """The gradients of one number, the first of the output."""
    d_output = torch.zeros_like(q)
    d_output[0, 0] = 1
    table("dO: what is asked, how O[0, 0] changes", d_output, 0)
    d_v = weights.T @ d_output
    table("dV = Wᵀ dO: a value counts as much as its weight", d_v)
    d_weights = d_output @ v.T
    table("dW = dO Vᵀ", d_weights, 0)
    mean = (weights * d_weights).sum(dim=-1, keepdim=True)
    d_scores = weights * (d_weights - mean)
    table("dS = W ∘ (dW − the mean of dW's row, weighted by W)", d_scores)
    table("dQ = dS K / √2", d_scores @ k / math.sqrt(2))
    table("dK = dSᵀ Q / √2", d_scores.T @ q / math.sqrt(2))
    return d_scores @ k / math.sqrt(2), d_scores.T @ q / math.sqrt(2), d_v


def masked(q, k, v):
    """The same tokens, none of which may look ahead."""
    future = torch.ones(3, 3, dtype=torch.bool).triu(1)
    output, weights = scaled_dot_product_attention(q, k, v, future)
    table("W, causal: no query sees a later key, and each row still sums to 1", weights)
    table("O, causal", output)


def main():
    q, k, v = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, K, V)
    )
    print("== inputs")
    for name, x in (("Q", q), ("K", k), ("V", v)):
        table(name, x, 0)
    print("== forward")
    weights, output = forward(q, k, v)
    print("== backward")
    gradients = backward(q, k, v, weights)
    print("== masked")
    masked(q, k, v)

    by_function, _ = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(output, by_function)
    expected = torch.autograd.grad(by_function[0, 0], (q, k, v))
    torch.testing.assert_close(gradients, expected)


if __name__ == "__main__":
    main()
