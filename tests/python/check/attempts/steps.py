# SPDX-License-Identifier: MIT
"""Steps of attention as a module, of which attempts change one, or beside which they
put something. Right as it is."""

import math

import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, self.d_k)).transpose(1, 2)

    def qkv(self, x):
        return (self.split(w(x)) for w in (self.W_q, self.W_k, self.W_v))

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(self.d_k)

    def join(self, x):
        return self.W_o(x.transpose(1, 2).flatten(2))

    def attend(self, query, key, value):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        v = self.split(self.W_v(value))
        return self.join(self.scores(q, k).softmax(-1) @ v)
