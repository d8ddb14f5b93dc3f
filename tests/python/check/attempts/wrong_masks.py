# SPDX-License-Identifier: MIT
"""Wrong: a mask that is lost, turned round, or used in the wrong place."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class _Separate(nn.Module):
    """Layers, split and join; subclasses spoil the mask."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def qkv(self, Q, K, V):
        return (
            self.split_heads(self.W_q(Q)),
            self.split_heads(self.W_k(K)),
            self.split_heads(self.W_v(V)),
        )

    def scores(self, q, k):
        return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)

    def join(self, heads):
        return self.W_o(heads.transpose(1, 2).contiguous().flatten(2))


class MaskNeverUsed(_Separate):
    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        return self.join(torch.softmax(self.scores(q, k), dim=-1) @ v)


class ResultThrownAway(_Separate):
    """masked_fill returns a new tensor; masked_fill_ does not."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            scores.masked_fill(mask == 0, float("-inf"))
        return self.join(torch.softmax(scores, dim=-1) @ v)


def masked_after_it_mattered(q, k, v, num_heads, d_model, mask=None):
    """The masked scores are computed and the others are used. mask: 0 = blocked."""
    d = d_model // num_heads
    layers = [nn.Linear(d_model, d_model, bias=False) for _ in range(4)]
    q, k, v = (
        layer(x).view(x.size(0), -1, num_heads, d).transpose(1, 2)
        for layer, x in zip(layers, (q, k, v))
    )
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d)
    attn = torch.softmax(scores, dim=-1)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return layers[3](torch.matmul(attn, v).transpose(1, 2).flatten(2))


class BlockedReadAsKept(_Separate):
    """attn_mask as in nn.MultiheadAttention, True = blocked; read the other way."""

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = self.qkv(query, key, value)
        scores = self.scores(q, k)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask == 0, float("-inf"))
        return self.join(torch.softmax(scores, dim=-1) @ v)


def blocked_handed_to_pytorch(q, k, v, num_heads, d_model, mask=None):
    """mask: True = blocked, but PyTorch's function wants True = attend."""
    proj = [nn.Linear(d_model, d_model, bias=False) for _ in range(4)]
    q, k, v = (
        p(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for p, x in zip(proj, (q, k, v))
    )
    if mask is not None:
        mask = mask.bool()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return proj[3](out.transpose(1, 2).flatten(2))


class KeptHandedToPyTorchsModule(nn.Module):
    """mask: 1 = attend, but nn.MultiheadAttention wants True = blocked."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

    def forward(self, x, mask=None):
        mask = None if mask is None else mask.bool()
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]


class MaskAdded(_Separate):
    """Zeros and ones are added to the scores."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores + mask
        return self.join(torch.softmax(scores, dim=-1) @ v)


class BoolMaskAdded(nn.Module):
    """baddbmm of a mask with True = blocked."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, attn_mask=None):
        B, L, E = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (
            t.view(B, L, self.num_heads, self.head_dim)
            .transpose(1, 2)
            .reshape(B * self.num_heads, L, self.head_dim)
            for t in (q, k, v)
        )
        q = q / math.sqrt(self.head_dim)
        if attn_mask is not None:
            scores = torch.baddbmm(attn_mask.to(q.dtype), q, k.transpose(1, 2))
        else:
            scores = torch.bmm(q, k.transpose(1, 2))
        out = torch.bmm(F.softmax(scores, dim=-1), v)
        out = out.view(B, self.num_heads, L, self.head_dim).transpose(1, 2)
        return self.out_proj(out.reshape(B, L, E))


class ScoresTimesMask(_Separate):
    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores * mask
        return self.join(torch.softmax(scores, dim=-1) @ v)


def core_times_mask(q, k, v, mask=None):
    """mask: 1 = attend."""
    logits = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits * mask.to(logits.dtype)
    return torch.einsum("bhij,bhjd->bhid", F.softmax(logits, dim=-1), v)


class WeightsTimesMask(_Separate):
    """Rows no longer sum to one."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        attn = torch.softmax(self.scores(q, k), dim=-1)
        if mask is not None:
            attn = attn * mask
        return self.join(attn @ v)


def weights_filled_with_zero(q, k, v, num_heads, d_model, mask=None):
    """mask: True = blocked."""
    head_dim = d_model // num_heads
    W_q, W_k, W_v, W_o = (nn.Linear(d_model, d_model) for _ in range(4))
    q = W_q(q).reshape(*q.shape[:2], num_heads, head_dim).transpose(1, 2)
    k = W_k(k).reshape(*k.shape[:2], num_heads, head_dim).transpose(1, 2)
    v = W_v(v).reshape(*v.shape[:2], num_heads, head_dim).transpose(1, 2)
    weights = F.softmax(q @ k.mT * head_dim**-0.5, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(mask.bool(), 0.0)
    return W_o((weights @ v).transpose(1, 2).flatten(2))


class TinyInsteadOfHuge(_Separate):
    """1e-9 for -1e9."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e-9)
        return self.join(torch.softmax(scores, dim=-1) @ v)


def minus_ten(query, key, value, mask=None):
    """mask: 0 = blocked; -10 is not far enough."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -10.0)
    return torch.softmax(scores, dim=-1) @ value


class MinusFive(_Separate):
    """(1 - mask) * -5 is added; mask 1 = attend."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores + (1.0 - mask.to(scores.dtype)) * -5.0
        return self.join(torch.softmax(scores, dim=-1) @ v)


class MaskTransposed(_Separate):
    """The scores are keys by queries when the mask comes."""

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x, x, x)
        scores = torch.einsum("bhkd,bhqd->bhkq", k, q) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        attn = scores.softmax(dim=-2)
        return self.join(torch.einsum("bhkq,bhkd->bhqd", attn, v))


class MaskTurnedToFit(_Separate):
    """A transpose was added until no error came."""

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x, x, x)
        scores = self.scores(q, k)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask.transpose(-1, -2), float("-inf"))
        return self.join(F.softmax(scores, dim=-1) @ v)


class BatchReadAsHeads(_Separate):
    """A mask (B, L, L) meets scores (B, H, L, L) without an axis for the heads."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.unsqueeze(0)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.join(torch.softmax(scores, dim=-1) @ v)


class HeadsOfTheMaskMixed(_Separate):
    """attn_mask (B H, L, L) is read heads first."""

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = self.qkv(query, key, value)
        scores = self.scores(q, k)
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                B = query.size(0)
                attn_mask = attn_mask.view(self.num_heads, B, *attn_mask.shape[1:])
                attn_mask = attn_mask.transpose(0, 1)
            scores = scores.masked_fill(attn_mask, float("-inf"))
        return self.join(torch.softmax(scores, dim=-1) @ v)


class MaskRepeatedLikeABatch(_Separate):
    """Heads are folded item by item, but the mask is repeated as a whole."""

    def forward(self, Q, K, V, mask=None):
        """mask: (B, Lq, Lk), 0 = blocked."""
        q, k, v = (t.flatten(0, 1) for t in self.qkv(Q, K, V))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.d_k)
        if mask is not None:
            if mask.dim() == 3:
                mask = mask.repeat(self.num_heads, 1, 1)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        heads = torch.bmm(torch.softmax(scores, dim=-1), v)
        return self.join(heads.unflatten(0, (-1, self.num_heads)))


class MaskOfTheFirstItem(_Separate):
    """mask[0] made the shapes fit."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            if mask.dim() > 2:
                mask = mask[0]
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.join(torch.softmax(scores, dim=-1) @ v)


class MaskOfTheFirstHead(_Separate):
    """One head's mask for all of them."""

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.qkv(Q, K, V)
        scores = self.scores(q, k)
        if mask is not None:
            if mask.dim() == 4:
                mask = mask[:, 0].unsqueeze(1)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.join(torch.softmax(scores, dim=-1) @ v)
