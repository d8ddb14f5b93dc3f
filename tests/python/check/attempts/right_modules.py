# SPDX-License-Identifier: MIT
"""Right: modules with a layer for queries, keys, values and output."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SplitAndCombine(nn.Module):
    """mask: 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def scaled_dot_product_attention(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return torch.matmul(torch.softmax(scores, dim=-1), V)

    def split_heads(self, x):
        batch_size, seq_length, _ = x.size()
        return x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x):
        batch_size, _, seq_length, _ = x.size()
        return x.transpose(1, 2).contiguous().view(batch_size, seq_length, self.d_model)

    def forward(self, Q, K, V, mask=None):
        Q = self.split_heads(self.W_q(Q))
        K = self.split_heads(self.W_k(K))
        V = self.split_heads(self.W_v(V))
        out = self.scaled_dot_product_attention(Q, K, V, mask)
        return self.W_o(self.combine_heads(out))


class ClonedLinears(nn.Module):
    """Four clones in a list; heads first in the constructor; keeps its weights."""

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        layer = nn.Linear(d_model, d_model)
        self.linears = nn.ModuleList([copy.deepcopy(layer) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.attn = self.dropout(scores.softmax(dim=-1))
        x = self.attn @ value
        x = x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


class SelfAttentionWithDropout(nn.Module):
    """Causal by a buffer, with dropout on the weights; (x) only."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        future = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("mask", future)

    def forward(self, x):
        b, tokens, _ = x.shape
        shape = (b, tokens, self.num_heads, self.head_dim)
        keys = self.W_key(x).view(shape).transpose(1, 2)
        queries = self.W_query(x).view(shape).transpose(1, 2)
        values = self.W_value(x).view(shape).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:tokens, :tokens], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        context = (self.dropout(weights) @ values).transpose(1, 2)
        return self.out_proj(context.contiguous().view(b, tokens, self.d_out))


class Head(nn.Module):
    def __init__(self, d_model, d_head):
        super().__init__()
        self.query = nn.Linear(d_model, d_head, bias=False)
        self.key = nn.Linear(d_model, d_head, bias=False)
        self.value = nn.Linear(d_model, d_head, bias=False)

    def forward(self, x, mask=None):
        q, k, v = self.query(x), self.key(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        if mask is not None:
            wei = wei.masked_fill(mask == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ v


class ListOfHeads(nn.Module):
    """Small heads in a ModuleList; mask 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        d_head = d_model // num_heads
        self.heads = nn.ModuleList([Head(d_model, d_head) for _ in range(num_heads)])
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        return self.proj(torch.cat([h(x, mask) for h in self.heads], dim=-1))


class SequenceFirst(nn.Module):
    """(L, B, E), heads folded into the batch, scale on the queries."""

    def __init__(self, embed_dim, num_heads, bias=True):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(self, query, key, value, attn_mask=None):
        """attn_mask: bool, True = blocked."""
        tgt_len, bsz, _ = query.shape
        shape = (-1, bsz * self.num_heads, self.head_dim)
        q = (self.q_proj(query) * self.scaling).view(shape).transpose(0, 1)
        k = self.k_proj(key).view(shape).transpose(0, 1)
        v = self.v_proj(value).view(shape).transpose(0, 1)
        weights = torch.bmm(q, k.transpose(1, 2))
        if attn_mask is not None:
            weights = weights.masked_fill(attn_mask, float("-inf"))
        out = torch.bmm(F.softmax(weights, dim=-1), v).transpose(0, 1)
        return self.out_proj(out.reshape(tgt_len, bsz, self.embed_dim))


class Aufmerksamkeit(nn.Module):
    """Mehrköpfige Aufmerksamkeit; in `maske` heißt True: verdeckt."""

    def __init__(self, breite, koepfe):
        super().__init__()
        self.koepfe = koepfe
        self.kopfbreite = breite // koepfe
        self.w_q = nn.Linear(breite, breite)
        self.w_k = nn.Linear(breite, breite)
        self.w_v = nn.Linear(breite, breite)
        self.w_o = nn.Linear(breite, breite)

    def _koepfe(self, x):
        return x.unflatten(-1, (self.koepfe, self.kopfbreite)).transpose(1, 2)

    def forward(self, anfrage, schluessel, werte, maske=None):
        q = self._koepfe(self.w_q(anfrage))
        k = self._koepfe(self.w_k(schluessel))
        v = self._koepfe(self.w_v(werte))
        punkte = q @ k.mT / self.kopfbreite**0.5
        if maske is not None:
            punkte = punkte.masked_fill(maske.bool(), float("-inf"))
        gewichte = punkte.softmax(-1)
        return self.w_o((gewichte @ v).transpose(1, 2).flatten(2))


class AtencionMultiple(nn.Module):
    """Atención de varias cabezas; en `mascara` 1 = visible."""

    def __init__(self, dim_modelo, num_cabezas):
        super().__init__()
        self.num_cabezas = num_cabezas
        self.dim_cabeza = dim_modelo // num_cabezas
        self.consulta = nn.Linear(dim_modelo, dim_modelo)
        self.clave = nn.Linear(dim_modelo, dim_modelo)
        self.valor = nn.Linear(dim_modelo, dim_modelo)
        self.salida = nn.Linear(dim_modelo, dim_modelo)

    def forward(self, x, mascara=None):
        lote, largo, ancho = x.shape
        forma = (lote, largo, self.num_cabezas, self.dim_cabeza)
        q = self.consulta(x).view(forma).transpose(1, 2)
        k = self.clave(x).view(forma).transpose(1, 2)
        v = self.valor(x).view(forma).transpose(1, 2)
        puntajes = q @ k.transpose(-2, -1) / math.sqrt(self.dim_cabeza)
        if mascara is not None:
            puntajes = puntajes.masked_fill(mascara == 0, float("-inf"))
        pesos = torch.softmax(puntajes, dim=-1)
        return self.salida((pesos @ v).transpose(1, 2).reshape(lote, largo, ancho))


class Cross(nn.Module):
    """(x, context) with keys and values from one layer; mask True = attend."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).movedim(2, 1)
            for t in (self.to_q(x), k, v)
        )
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask.bool(), -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.movedim(1, 2).flatten(2))


class KeyBiasLeftOut(nn.Module):
    """Softmax does not see what all keys of a query share, so a key's bias may go."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q = self.q_proj(x).reshape(B, N, self.num_heads, -1).transpose(1, 2)
        k = F.linear(x, self.k_proj.weight)
        k = k.reshape(B, N, self.num_heads, -1).transpose(1, 2)
        v = self.v_proj(x).reshape(B, N, self.num_heads, -1).transpose(1, 2)
        a = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.out_proj((a @ v).transpose(1, 2).reshape(B, N, C))
