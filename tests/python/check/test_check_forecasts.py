# SPDX-License-Identifier: MIT
"""Layers of models for time series, as those of Informer (Zhou et al. 2021): what has the
heads is handed what these do, and a layer is handed that."""

import inspect
import math

import torch
from torch import nn

import multihead


class Inner(nn.Module):
    """Of heads (B, L, H, D), causal where no mask is given, as Informer's."""

    def __init__(self, mask_flag=True, attention_dropout=0.1):
        super().__init__()
        self.mask_flag, self.dropout = mask_flag, nn.Dropout(attention_dropout)

    def root(self, width: int) -> float:
        return math.sqrt(width)

    def forward(self, queries, keys, values, attn_mask):
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        if self.mask_flag:
            length = queries.shape[1]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            mask = later if attn_mask is None else attn_mask
            scores = scores.masked_fill(mask, -torch.inf)
        weights = self.dropout((scores / self.root(queries.shape[-1])).softmax(-1))
        return torch.einsum("bhls,bshd->blhd", weights, values), weights


class AttentionLayer(nn.Module):
    """It has the heads, and is handed what these do."""

    def __init__(self, attention, d_model, n_heads):
        super().__init__()
        self.inner_attention, self.n_heads = attention, n_heads
        self.query_projection = nn.Linear(d_model, d_model)
        self.key_projection = nn.Linear(d_model, d_model)
        self.value_projection = nn.Linear(d_model, d_model)
        self.out_projection = nn.Linear(d_model, d_model)

    def forward(self, queries, keys, values, attn_mask=None):
        layers = self.query_projection, self.key_projection, self.value_projection
        heads = (
            layer(x).unflatten(-1, (self.n_heads, -1))
            for layer, x in zip(layers, (queries, keys, values))
        )
        out, weights = self.inner_attention(*heads, attn_mask)
        return self.out_projection(out.flatten(2)), weights


class OfForecasts(nn.Module):
    """A layer of a decoder without heads, whose context is called `cross`."""

    def __init__(self, self_attention, cross_attention, d_model, dropout=0.1):
        super().__init__()
        self.self_attention, self.cross_attention = self_attention, cross_attention
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cross, x_mask=None, cross_mask=None):
        x = self.norm1(x + self.dropout(self.self_attention(x, x, x, x_mask)[0]))
        read = self.cross_attention(x, cross, cross, cross_mask)[0]
        return self.norm2(x + self.dropout(read))


def test_a_layer_without_heads_is_handed_one_that_has_them(tmp_path):
    imports = "import math\nimport torch\nfrom torch import nn\n\n"
    classes = (AttentionLayer, OfForecasts)
    text = "\n\n".join(map(inspect.getsource, classes))
    file = tmp_path / "layers.py"
    inner = inspect.getsource(Inner).replace("class Inner", "class FullAttention")
    file.write_text(imports + inner + "\n\n" + text)
    report = multihead.check(f"{file}:OfForecasts")
    assert report.judgement == "right_if", str(report)
    assert "attention 2" in report.cases[-1]["name"]
    file.write_text(imports + inner.replace("math.sqrt(width)", "1.0") + "\n\n" + text)
    assert multihead.check(f"{file}:OfForecasts").cause == "scale_missing"
