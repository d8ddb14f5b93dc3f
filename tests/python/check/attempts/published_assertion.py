# SPDX-License-Identifier: MIT
"""An exercise saved as a script: right, and stopped by its own comparison."""

import math

import torch
import torch.nn as nn

torch.manual_seed(42)
batch_size, seq_len, d_model, num_heads = 3, 4, 8, 2
q, k, v = (torch.rand(batch_size, seq_len, d_model) for _ in range(3))


def multi_head_attention(q, k, v, num_heads, d_model, mask=None):
    d_head = d_model // num_heads
    Q = nn.Linear(d_model, d_model, bias=False)(q)
    K = nn.Linear(d_model, d_model, bias=False)(k)
    V = nn.Linear(d_model, d_model, bias=False)(v)
    Q, K, V = (t.unflatten(-1, (num_heads, d_head)).transpose(1, 2) for t in (Q, K, V))
    scores = Q @ K.transpose(-2, -1) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    out = (torch.softmax(scores, dim=-1) @ V).transpose(1, 2).flatten(2)
    return nn.Linear(d_model, d_model, bias=False)(out)


output_custom = multi_head_attention(q, k, v, num_heads, d_model)
multihead_attn = nn.MultiheadAttention(d_model, num_heads, bias=False, batch_first=True)
output, _ = multihead_attn(q, k, v)
assert torch.allclose(output_custom, output, atol=1e-8, rtol=1e-5)
