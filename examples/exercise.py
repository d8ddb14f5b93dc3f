# SPDX-License-Identifier: MIT
"""Somebody's answer to a well-known exercise, with one slip.

Try it: multihead check examples/exercise.py
"""

import math

import torch
from torch import nn


def multi_head_attention(q, k, v, num_heads, d_model, mask=None):
    """q (N, Lq, d_model), k and v (N, Lk, d_model); mask: True = blocked."""
    W_q, W_k, W_v, W_o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
    d_head = d_model // num_heads

    def split_heads(x):
        return x.view(x.size(0), -1, num_heads, d_head).transpose(1, 2)

    Q, K, V = split_heads(W_q(q)), split_heads(W_k(k)), split_heads(W_v(v))
    scores = Q @ K.transpose(-2, -1) / math.sqrt(d_model)
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    attention = torch.softmax(scores, dim=-1)
    context = (attention @ V).transpose(1, 2).contiguous()
    return W_o(context.view(q.size(0), -1, d_model))
