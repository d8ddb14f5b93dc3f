# SPDX-License-Identifier: MIT
"""Wrong: query heads that read another group's keys and values."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class _Grouped(nn.Module):
    """Layers of a grouped attention, as they stand in most decoders."""

    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.group_size = num_heads // num_kv_heads
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=False)

    def project(self, x):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        return q, k, v

    def finish(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        out = F.softmax(scores, dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Repeated(_Grouped):
    """repeat for repeat_interleave: 0101 instead of 0011."""

    def forward(self, x):
        q, k, v = self.project(x)
        k = k.repeat(1, self.group_size, 1, 1)
        v = v.repeat(1, self.group_size, 1, 1)
        return self.finish(q, k, v)


class ExpandedOnTheOtherSide(_Grouped):
    """The new axis stands before the heads instead of after them."""

    def forward(self, x):
        q, k, v = self.project(x)
        b, h, n, d = k.shape
        k = k[:, None].expand(b, self.group_size, h, n, d).reshape(b, -1, n, d)
        v = v[:, None].expand(b, self.group_size, h, n, d).reshape(b, -1, n, d)
        return self.finish(q, k, v)


class GroupAxisFirst(_Grouped):
    """einsum with the queries read as (group, kv head)."""

    def forward(self, x):
        q, k, v = self.project(x)
        q = q.unflatten(1, (self.group_size, self.num_kv_heads))
        s = torch.einsum("bghqd,bhkd->bghqk", q, k) * self.head_dim**-0.5
        o = torch.einsum("bghqk,bhkd->bqghd", s.softmax(-1), v)
        return self.o_proj(o.flatten(2))


def tiled_in_a_function(q, k, v, num_heads, num_kv_heads, d_model, mask=None):
    """mask: 0 = blocked."""
    d = d_model // num_heads
    wq = nn.Linear(d_model, d_model, bias=False)
    wk = nn.Linear(d_model, num_kv_heads * d, bias=False)
    wv = nn.Linear(d_model, num_kv_heads * d, bias=False)
    wo = nn.Linear(d_model, d_model, bias=False)
    Q = wq(q).unflatten(-1, (num_heads, d)).transpose(1, 2)
    K = wk(k).unflatten(-1, (num_kv_heads, d)).transpose(1, 2)
    V = wv(v).unflatten(-1, (num_kv_heads, d)).transpose(1, 2)
    K = torch.cat([K] * (num_heads // num_kv_heads), dim=1)
    V = torch.cat([V] * (num_heads // num_kv_heads), dim=1)
    scores = Q @ K.mT / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return wo((scores.softmax(-1) @ V).transpose(1, 2).flatten(2))


class FirstHeadForAll(_Grouped):
    """Broadcasting wants an axis of one, and gets the first head."""

    def forward(self, x):
        q, k, v = self.project(x)
        return self.finish(q, k[:, :1], v[:, :1])


class IndexClamped(_Grouped):
    """An index error was silenced with min()."""

    def forward(self, x):
        q, k, v = self.project(x)
        outs = []
        for h in range(self.num_heads):
            kv = min(h, self.num_kv_heads - 1)
            s = q[:, h] @ k[:, kv].transpose(-2, -1) / math.sqrt(self.head_dim)
            outs.append(torch.softmax(s, dim=-1) @ v[:, kv])
        return self.o_proj(torch.cat(outs, dim=-1))


class DividedByTheNumberOfGroups(_Grouped):
    """h // number of groups where h // size of a group is meant."""

    def forward(self, x):
        q, k, v = self.project(x)
        group = torch.arange(self.num_heads) // self.num_kv_heads
        return self.finish(q, k[:, group], v[:, group])


class ScaledByTheGroupCount(_Grouped):
    """k.size(1) was the number of heads when the line was copied."""

    def forward(self, x):
        q, k, v = self.project(x)
        scale = 1.0 / math.sqrt(k.size(1))
        k = k.repeat_interleave(self.group_size, dim=1)
        v = v.repeat_interleave(self.group_size, dim=1)
        attn = F.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)
        return self.o_proj((attn @ v).transpose(1, 2).flatten(2))
