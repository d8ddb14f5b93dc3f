# SPDX-License-Identifier: MIT
"""Wrong: dropout at the wrong time, in the wrong place, by the wrong factor."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class _Attention(nn.Module):
    """Subclasses turn scores into an output (B, H, L, D)."""

    def __init__(self, embed_dim, num_heads, dropout=0.25):
        super().__init__()
        self.num_heads = num_heads
        self.p = dropout
        self.dropout = nn.Dropout(dropout)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = self.attend(q @ k.mT / math.sqrt(q.size(-1)), v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class OnInEvaluation(_Attention):
    """F.dropout does not know of eval()."""

    def attend(self, scores, v):
        return F.dropout(F.softmax(scores, dim=-1), p=self.p) @ v


class OnInPyTorchsFunction(_Attention):
    """dropout_p is obeyed in evaluation as well."""

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class BeforeSoftmax(_Attention):
    def attend(self, scores, v):
        return F.softmax(self.dropout(scores), dim=-1) @ v


class NotRescaled(_Attention):
    def attend(self, scores, v):
        weights = F.softmax(scores, dim=-1)
        if self.training:
            weights = weights * (torch.rand_like(weights) >= self.p)
        return weights @ v


class OnTheContext(_Attention):
    def attend(self, scores, v):
        return self.dropout(F.softmax(scores, dim=-1) @ v)


class OnTheMergedHeads(nn.Module):
    """Dropped before the output projection, and no weights."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, L, E = x.shape
        shape = (B, L, self.num_heads, E // self.num_heads)
        q, k, v = (
            layer(x).view(shape).transpose(1, 2)
            for layer in (self.q_linear, self.k_linear, self.v_linear)
        )
        merged = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(self.dropout(merged.reshape(B, L, E)))


class NeverCalled(_Attention):
    def attend(self, scores, v):
        return F.softmax(scores, dim=-1) @ v


class KeepsWhatItShouldDrop(_Attention):
    def attend(self, scores, v):
        weights = F.softmax(scores, dim=-1)
        if self.training:
            keep = torch.rand_like(weights) < self.p
            weights = weights * keep / (1 - self.p)
        return weights @ v
