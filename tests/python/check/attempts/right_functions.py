# SPDX-License-Identifier: MIT
"""Right: functions, from the exercise's own signature to attention by itself."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def exercise_keep(q, k, v, num_heads, d_model, mask=None):
    """mask: 1 = attend, 0 = do not."""
    batch = q.size(0)
    d_head = d_model // num_heads
    w_q = nn.Linear(d_model, d_model)
    w_k = nn.Linear(d_model, d_model)
    w_v = nn.Linear(d_model, d_model)
    w_o = nn.Linear(d_model, d_model)

    Q = w_q(q).view(batch, -1, num_heads, d_head).transpose(1, 2)
    K = w_k(k).view(batch, -1, num_heads, d_head).transpose(1, 2)
    V = w_v(v).view(batch, -1, num_heads, d_head).transpose(1, 2)

    scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    attn = torch.softmax(scores, dim=-1)
    out = torch.matmul(attn, V)
    out = out.transpose(1, 2).contiguous().view(batch, -1, d_model)
    return w_o(out)


def exercise_blocked(q, k, v, num_heads, d_model, mask=None):
    """mask: True = may not attend, as in nn.MultiheadAttention."""
    b, lq, _ = q.shape
    lk = k.shape[1]
    d_k = d_model // num_heads
    proj_q = nn.Linear(d_model, d_model, bias=False)
    proj_k = nn.Linear(d_model, d_model, bias=False)
    proj_v = nn.Linear(d_model, d_model, bias=False)
    proj_out = nn.Linear(d_model, d_model, bias=False)

    q = proj_q(q).reshape(b, lq, num_heads, d_k).permute(0, 2, 1, 3)
    k = proj_k(k).reshape(b, lk, num_heads, d_k).permute(0, 2, 1, 3)
    v = proj_v(v).reshape(b, lk, num_heads, d_k).permute(0, 2, 1, 3)
    logits = (q @ k.mT) * d_k**-0.5
    if mask is not None:
        logits = logits.masked_fill(mask.bool(), -torch.inf)
    y = logits.softmax(-1) @ v
    return proj_out(y.permute(0, 2, 1, 3).reshape(b, lq, d_model))


def exercise_bare_parameters(q, k, v, num_heads, d_model, mask=None):
    """The matrices are parameters, (in, out), without biases."""
    W_q = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
    W_k = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
    W_v = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
    W_o = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
    d_head = d_model // num_heads

    def split(x):
        return x.view(x.size(0), x.size(1), num_heads, d_head).transpose(1, 2)

    Q, K, V = split(q @ W_q), split(k @ W_k), split(v @ W_v)
    scores = Q @ K.transpose(2, 3) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    heads = F.softmax(scores, dim=-1) @ V
    return heads.transpose(1, 2).reshape(q.size(0), q.size(1), d_model) @ W_o


def exercise_random_matrices(q, k, v, num_heads, d_model, mask=None):
    """torch.randn in each call; mask is True where a key may be seen."""
    wq, wk, wv, wo = (torch.randn(d_model, d_model) for _ in range(4))
    B, L, E = q.shape
    S = k.shape[1]
    D = E // num_heads
    Q = (q @ wq.to(q)).view(B, L, num_heads, D).transpose(1, 2)
    K = (k @ wk.to(q)).view(B, S, num_heads, D).transpose(1, 2)
    V = (v @ wv.to(q)).view(B, S, num_heads, D).transpose(1, 2)
    S_ = torch.einsum("bhqd,bhkd->bhqk", Q, K) / D**0.5
    if mask is not None:
        S_ = torch.where(mask.bool(), S_, torch.finfo(S_.dtype).min)
    A = torch.softmax(S_, -1)
    O_ = torch.einsum("bhqk,bhkd->bqhd", A, V)
    return O_.reshape(B, L, E) @ wo.to(q)


def exercise_heads_in_a_loop(q, k, v, num_heads, d_model, mask=None):
    """One small Linear per head, results side by side."""
    d_head = d_model // num_heads
    heads = []
    for _ in range(num_heads):
        to_q = nn.Linear(d_model, d_head)
        to_k = nn.Linear(d_model, d_head)
        to_v = nn.Linear(d_model, d_head)
        score = to_q(q) @ to_k(k).transpose(1, 2) / math.sqrt(d_head)
        if mask is not None:
            score = score.masked_fill(mask == 0, float("-inf"))
        heads.append(torch.softmax(score, dim=2) @ to_v(v))
    out = nn.Linear(d_model, d_model)
    return out(torch.cat(heads, dim=-1))


def weights_as_arguments(x, W_q, W_k, W_v, W_o, num_heads):
    """Matrices (in, out), as the online judges hand them over."""
    B, L, E = x.shape
    d = E // num_heads
    q, k, v = (
        (x @ w).reshape(B, L, num_heads, d).transpose(1, 2) for w in (W_q, W_k, W_v)
    )
    a = torch.softmax(q @ k.transpose(-1, -2) / d**0.5, dim=-1)
    return (a @ v).transpose(1, 2).reshape(B, L, E) @ W_o


def _softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def numpy_multi_head_attention(Q, K, V, W_q, W_k, W_v, W_o, num_heads):
    """NumPy from end to end."""
    batch, seq_len, d_model = Q.shape
    d_k = d_model // num_heads

    def heads(x, w):
        return (x @ w).reshape(batch, -1, num_heads, d_k).transpose(0, 2, 1, 3)

    q, k, v = heads(Q, W_q), heads(K, W_k), heads(V, W_v)
    weights = _softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(d_k))
    context = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, seq_len, d_model)
    return context @ W_o


def numpy_attention(Q, K, V, mask=None):
    """Attention by itself in NumPy; mask 1 = attend."""
    scores = np.matmul(Q, np.swapaxes(K, -1, -2)) / np.sqrt(Q.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    weights = _softmax(scores)
    return weights @ V, weights


def scaled_dot_product(q, k, v, mask=None):
    """Returns values and attention; mask 0 = blocked."""
    d_k = q.size()[-1]
    attn_logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        attn_logits = attn_logits.masked_fill(mask == 0, -9e15)
    attention = F.softmax(attn_logits, dim=-1)
    return torch.matmul(attention, v), attention


def manual_softmax_attention(query, key, value, mask=None):
    """mask: bool, True = attend. The softmax is written out."""
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask.bool(), -torch.inf)
    top = logits.amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    e = torch.exp(logits - top)
    return e / e.sum(dim=-1, keepdim=True) @ value


def additive_mask_attention(Q, K, V, attn_mask=None):
    """attn_mask: float, 0 where a key is seen and -inf where it is not."""
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.size(-1))
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1) @ V


def causal_attention(q, k, v, is_causal=False):
    """Causal from the upper left corner."""
    scores = torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.einsum("...ij,...jd->...id", scores.softmax(-1), v)


def unbatched_loops(q, k, v):
    """(L, D): a row at a time, as one would with pencil and paper."""
    rows = []
    for query in q:
        scores = torch.stack([query @ key for key in k]) / math.sqrt(len(query))
        weights = torch.exp(scores - scores.max())
        weights = weights / weights.sum()
        rows.append(sum(w * value for w, value in zip(weights, v)))
    return torch.stack(rows)
