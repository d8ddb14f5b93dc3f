# SPDX-License-Identifier: MIT
"""Wrong: the wrong sequence projected, a projection or a bias left out or too many."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class _Layers(nn.Module):
    """What these attempts have in common; mask 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return torch.matmul(F.softmax(scores, dim=-1), v)

    def concat(self, x):
        return x.transpose(1, 2).contiguous().view(x.size(0), -1, self.d_model)


class KeysFromTheQuery(_Layers):
    """Self-attention where attention to another sequence was asked for."""

    def forward(self, query, key, value):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(query))
        v = self.split(self.v_linear(query))
        return self.out(self.concat(self.attend(q, k, v, None)))


class NothingFromTheContext(_Layers):
    """The same with dropout, whose draws are as many as the queries."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__(d_model, num_heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value):
        layers = (self.q_linear, self.k_linear, self.v_linear)
        q, k, v = (self.split(layer(query)) for layer in layers)
        weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        return self.out(self.concat(self.dropout(weights) @ v))


class OnlyKeysFromTheQuery(_Layers):
    def forward(self, q, k, v):
        v = self.split(self.v_linear(v))
        k = self.split(self.k_linear(q))
        q = self.split(self.q_linear(q))
        return self.out(self.concat(self.attend(q, k, v, None)))


class ValuesFromTheKey(_Layers):
    def forward(self, query, key, value, mask=None):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(key))
        v = self.split(self.v_linear(key))
        return self.out(self.concat(self.attend(q, k, v, mask)))


class WeightsTimesKeys(_Layers):
    def forward(self, query, key, value, mask=None):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(key))
        v = self.split(self.v_linear(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attn = F.softmax(scores, dim=-1)
        return self.out(self.concat(torch.matmul(attn, k)))


class QueriesAgainstValues(_Layers):
    def forward(self, query, key, value, mask=None):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(key))
        v = self.split(self.v_linear(value))
        return self.out(self.concat(self.attend(q, v, v, mask)))


class ValuesAgainstKeys(_Layers):
    def forward(self, query, key, value, mask=None):
        k, v = self.split(self.k_linear(key)), self.split(self.v_linear(value))
        return self.out(self.concat(self.attend(v, k, v, mask)))


class ValuesAgainstKeysForKeys(_Layers):
    """Its helper is handed the three in another order."""

    def forward(self, query, key, value):
        q, k = self.split(self.q_linear(query)), self.split(self.k_linear(key))
        return self.out(
            self.concat(self.in_order(self.split(self.v_linear(value)), q, k))
        )

    def in_order(self, value, query, key):
        return self.attend(value, key, key, None)


class QueriesAgainstQueries(_Layers):
    def forward(self, x):
        q = self.split(self.q_linear(x))
        v = self.split(self.v_linear(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, q) / math.sqrt(self.d_k)
        return self.out(self.concat(scores.softmax(-1) @ v))


class ProjectionsNeverCalled(_Layers):
    def forward(self, Q, K, V, mask=None):
        x = self.attend(self.split(Q), self.split(K), self.split(V), mask)
        return self.out(self.concat(x))


class ValuesNeverProjected(_Layers):
    def forward(self, Q, K, V, mask=None):
        q, k = self.split(self.q_linear(Q)), self.split(self.k_linear(K))
        return self.out(self.concat(self.attend(q, k, self.split(V), mask)))


class OutputNeverCalled(_Layers):
    def forward(self, query, key, value, mask=None):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(key))
        v = self.split(self.v_linear(value))
        return self.concat(self.attend(q, k, v, mask))


class OutputCalledTwice(_Layers):
    def concat(self, x):
        return self.out(super().concat(x))

    def forward(self, query, key, value, mask=None):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(key))
        v = self.split(self.v_linear(value))
        return self.out(self.concat(self.attend(q, k, v, mask)))


class OutputHeadByHead(_Layers):
    """Each head gets its own square of the output matrix."""

    def forward(self, x):
        q, k, v = self.q_linear(x), self.k_linear(x), self.v_linear(x)
        heads = []
        for h in range(self.num_heads):
            part = slice(h * self.d_k, (h + 1) * self.d_k)
            s = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(self.d_k)
            head = torch.softmax(s, dim=-1) @ v[..., part]
            heads.append(
                F.linear(head, self.out.weight[part, part], self.out.bias[part])
            )
        return torch.cat(heads, dim=-1)


class OutputByTheDiagonal(_Layers):
    """One letter for the rows and the columns of the output matrix."""

    def forward(self, x):
        layers = (self.q_linear, self.k_linear, self.v_linear)
        q, k, v = (self.split(layer(x)) for layer in layers)
        merged = self.concat(self.attend(q, k, v, None))
        return torch.einsum("bld,dd->bld", merged, self.out.weight) + self.out.bias


class NoBiasAnywhere(_Layers):
    """The matrices are taken out of the layers, their biases stay behind."""

    def forward(self, x):
        q = self.split(x @ self.q_linear.weight.t())
        k = self.split(x @ self.k_linear.weight.t())
        v = self.split(x @ self.v_linear.weight.t())
        return self.concat(self.attend(q, k, v, None)) @ self.out.weight.t()


class NoBiasAtTheInput(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim) / 8)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = F.linear(x, self.in_proj_weight).chunk(3, dim=-1)
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class NoBiasAtTheOutput(_Layers):
    def forward(self, query, key, value, mask=None):
        q = self.split(self.q_linear(query))
        k = self.split(self.k_linear(key))
        v = self.split(self.v_linear(value))
        return F.linear(self.concat(self.attend(q, k, v, mask)), self.out.weight)


class NoBiasOfTheQuery(_Layers):
    def forward(self, x):
        q = self.split(torch.matmul(x, self.q_linear.weight.T))
        k, v = self.split(self.k_linear(x)), self.split(self.v_linear(x))
        return self.out(self.concat(self.attend(q, k, v, None)))


class NoBiasOfTheValue(_Layers):
    def forward(self, x, mask=None):
        q, k = self.split(self.q_linear(x)), self.split(self.k_linear(x))
        v = self.split(torch.einsum("ble,oe->blo", x, self.v_linear.weight))
        return self.out(self.concat(self.attend(q, k, v, mask)))
