# SPDX-License-Identifier: MIT
"""Attention as textbooks and exercises write it, to be read from top to bottom.

If this is the first attention that you read, begin with its plain form, which is shorter:
examples/learn/attention.py, explained in docs/learn.md.

Everything here is made of PyTorch operations. The first half are the steps, each a few
lines; the second half are the forms, which put the steps together. Where weights come
from and what is said about bad arguments is in _textbook_arguments.py. textbook.cpp is
the same text in C++.

Each form equals ``torch.nn.MultiheadAttention`` with the same weights *bit for bit*
on that module's ordinary path (weights returned, parameters and inputs agreeing in
``requires_grad``). Floating-point sums depend on their order, so this asks for the
same operations in the same order; where a step has to be done in one particular way
for that reason, it says so.

Letters: N batch, H heads, G key/value heads (groups), Lq queries, Lk keys, E = d_model
the embedding width, d = E / H the width of one head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _textbook_arguments as arguments
from ._textbook_arguments import AttentionWeights, Projection, Weights

__all__ = [
    "MultiHeadAttention",
    "MultiHeadSelfAttention",
    "grouped_query_attention",
    "multi_head_attention",
    "scaled_dot_product_attention",
]


# --- The steps -----------------------------------------------------------------------


def _project(x: Tensor, by: Projection | nn.Linear) -> Tensor:
    """x (N, L, E) → (N, L, out).

    The rows are multiplied in PyTorch's order, position before batch item: the order of
    rows decides how a product's sums are grouped, hence the last bit of the result.
    """
    return F.linear(x.transpose(0, 1), by.weight, by.bias).transpose(0, 1)


def _project_together(x: Tensor, *by: Projection | nn.Linear) -> tuple[Tensor, ...]:
    """x (N, L, E) through several maps: one (N, L, out) per map.

    Maps that read the same tensor are stacked and applied as one matrix product: the
    input is read once, and a large product runs nearer to the machine's peak than small
    ones. PyTorch does so too, and the shape of a product also decides its last bits.
    """
    weight = torch.cat([each.weight for each in by])
    biases = [each.bias for each in by if each.bias is not None]
    stacked = Projection(weight, torch.cat(biases) if biases else None)
    together = _project(x, stacked).transpose(0, 1)
    parts = torch.split(together, [each.weight.size(0) for each in by], dim=-1)
    return tuple(part.contiguous().transpose(0, 1) for part in parts)


def _project_inputs(
    q: Tensor, k: Tensor, v: Tensor, layer: AttentionWeights
) -> tuple[Tensor, ...]:
    """What each position looks for (query), what it offers to be found by (key), and
    what it hands over when it is found (value): three learned views of the input.

    Without them the scores of self-attention would be x·xᵀ: as much from i to j as from
    j to i, and each position mostly for itself.
    """
    if q is k and k is v:  # self-attention: one product
        return _project_together(q, layer.query, layer.key, layer.value)
    if k is v:  # cross-attention, as a decoder reads an encoder: two
        return _project(q, layer.query), *_project_together(k, layer.key, layer.value)
    return _project(q, layer.query), _project(k, layer.key), _project(v, layer.value)


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(N, L, H·d) → (N, H, L, d), without copying.

    Several heads, because one softmax gives one pattern per query: a weighted mean that
    must mix everything the query wants to know. H narrow heads attend to H places at
    once for the cost of one wide head. The split is a view followed by a transpose; a
    direct view as (N, H, L, d) would cut positions, not features, into heads.
    """
    positions_first = x.transpose(0, 1)
    width = x.size(-1) // num_heads
    heads = torch.unflatten(positions_first, -1, (num_heads, width))
    return heads.permute(1, 2, 0, 3)


def _combine_heads(x: Tensor) -> Tensor:
    """(N, H, L, d) → (N, L, H·d): the heads' results side by side, one row a position.

    In memory the position comes first, the order that the output projection reads.
    """
    batch, heads, length, width = x.shape
    rows = x.permute(2, 0, 1, 3).reshape(length * batch, heads * width)
    return rows.view(length, batch, heads * width).transpose(0, 1)


def _attention_scores(q: Tensor, k: Tensor, blocked: Tensor | None = None) -> Tensor:
    """How well each key fits each query: (…, Lq, d), (…, Lk, d) → (…, Lq, Lk).

    The dot products are divided by √d: for entries of variance 1 the product of two
    d-vectors has variance d, and a softmax over numbers that large is nearly one-hot,
    so that almost no gradient passes. The query is scaled rather than the scores: Lq·d
    multiplications instead of Lq·Lk, and the order in which PyTorch does it.

    Blocked keys are masked before the softmax, by a score of −inf, because e^−inf = 0
    and the others then share the whole weight. Zeroing weights after the softmax would
    leave rows that sum to less than 1, and let blocked keys change their denominator.
    """
    shape = (*q.shape[:-1], k.size(-2))
    q = _matrices(q) * math.sqrt(1.0 / q.size(-1))
    k = _matrices(k).transpose(-2, -1)
    if blocked is None:
        return torch.bmm(q, k).view(shape)
    mask = torch.zeros_like(blocked, dtype=q.dtype).masked_fill(blocked, -math.inf)
    # The sums of the product start at the mask (baddbmm), as in PyTorch: to add it
    # afterwards would be one more rounding.
    return torch.baddbmm(_matrices(mask.expand(shape)), q, k).view(shape)


def _matrices(x: Tensor) -> Tensor:
    """(…, rows, columns) → (batch, rows, columns)."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _attention_weights(q: Tensor, k: Tensor, blocked: Tensor | None = None) -> Tensor:
    """(…, Lq, d), (…, Lk, d) → (…, Lq, Lk): what share each key has in each query.

    The softmax makes the weights of a query positive with sum 1, so that its output,
    weights @ v, is a mean of values: it stays in their range however many there are. A
    query whose keys are all blocked divides 0 by 0: NaN, in PyTorch too.
    """
    return torch.softmax(_attention_scores(q, k, blocked), dim=-1)


def _attention_weights_or_zero(q: Tensor, k: Tensor, blocked: Tensor) -> Tensor:
    """The same, but a query whose keys are all blocked has weights 0.

    The keys of such a row are let through to the softmax and its weights are set to 0
    afterwards. To replace NaN weights would mend the output only: the gradient 0 that
    comes back, times NaN, is NaN.
    """
    sees_nothing = blocked.all(dim=-1, keepdim=True)
    weights = _attention_weights(q, k, blocked & ~sees_nothing)
    return weights.masked_fill(sees_nothing, 0.0)


# --- The forms -----------------------------------------------------------------------


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention itself: softmax(q·kᵀ / √d)·v, and the weights.

    Args:
        q: (…, Lq, d).
        k: (…, Lk, d), the leading dimensions those of q.
        v: (…, Lk, dv), likewise.
        mask: True or non-zero = *blocked*, any number type, broadcastable to
            (…, Lq, Lk). (torch.nn.functional.scaled_dot_product_attention has the
            opposite polarity.)

    Returns:
        output (…, Lq, dv) and weights (…, Lq, Lk). A row with every key blocked is NaN.

    Raises:
        ValueError: shapes that do not fit together.
    """
    arguments.check_attention_inputs("scaled_dot_product_attention", q, k, v, mask)
    weights = _attention_weights(q, k, None if mask is None else mask != 0)
    return weights @ v, weights


def multi_head_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    d_model: int,
    mask: Tensor | None = None,
    *,
    weights: Weights | None = None,
) -> Tensor:
    """Multi-head attention, as "Attention Is All You Need", section 3.2.2, defines it.

    Args:
        q: (N, Lq, E), E = d_model.
        k: (N, Lk, E).
        v: (N, Lk, E). Hand over one tensor as q, k and v for self-attention.
        num_heads: H, divides d_model.
        mask: True or non-zero = *blocked*, any number type, broadcastable to
            (N, H, Lq, Lk). A 3-D mask is (N, Lq, Lk), one per batch item, unless its
            first size is N·H: then it is PyTorch's (N·H, Lq, Lk), heads innermost.
        weights: an nn.MultiheadAttention, its state_dict, one with the names of
            multihead.GroupedQueryAttention, or the matrices of query, key, value and
            output, each (E, E). Biases are used where there are any. None: drawn
            without biases as nn.MultiheadAttention(d_model, num_heads, bias=False)
            draws them, so that the same torch.manual_seed gives the same layer.

    Returns:
        (N, Lq, E). A row with every key blocked is NaN, as in PyTorch.

    Raises:
        ValueError: an argument outside its domain; the message names it.
    """
    name = "multi_head_attention"
    arguments.check_heads(name, "d_model", d_model, "num_heads", num_heads)
    arguments.check_inputs(name, (q, k, v), d_model)
    if weights is None:
        layer = arguments.draw(d_model, (3 * d_model,), q)
    else:
        layer = arguments.read_weights(name, weights, (d_model, d_model))
    return _attention_layer(name, (q, k, v), layer, (num_heads, num_heads), mask)


def grouped_query_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_query_groups: int,
    d_model: int,
    mask: Tensor | None = None,
    *,
    num_heads: int | None = None,
    weights: Weights | None = None,
) -> Tensor:
    """Grouped-query attention (Ainslie et al., 2023): G key/value heads for H query
    heads, H / G queries' heads to a group.

    While a model generates text, it keeps the keys and values of all past positions and
    reads them again for each new one. Fewer key/value heads make that memory, and the
    time it takes to read it, H / G times smaller. G = H is multi-head attention.

    Args:
        q, k, v, d_model, mask: as in multi_head_attention; the mask is per query head.
        num_query_groups: G, divides num_heads.
        num_heads: H, divides d_model; default: as many as groups.
        weights: as in multi_head_attention, the key and value matrices (G·d, E).
            None: drawn without biases as multihead.GroupedQueryAttention draws them:
            the output matrix as nn.Linear does, then query, key and value, each by
            Xavier. (nn.MultiheadAttention draws the last three as one matrix, with a
            smaller bound: other numbers, also for G = H.)

    Returns:
        (N, Lq, E). A row with every key blocked is NaN, as in PyTorch.

    Raises:
        ValueError: an argument outside its domain; the message names it.
    """
    name = "grouped_query_attention"
    num_heads = num_query_groups if num_heads is None else num_heads
    arguments.check_heads(
        name, "num_heads", num_heads, "num_query_groups", num_query_groups
    )
    arguments.check_heads(name, "d_model", d_model, "num_heads", num_heads)
    arguments.check_inputs(name, (q, k, v), d_model)
    kv_width = d_model // num_heads * num_query_groups
    if weights is None:
        layer = arguments.draw(d_model, (d_model, kv_width, kv_width), q)
    else:
        layer = arguments.read_weights(name, weights, (d_model, kv_width))
    heads = (num_heads, num_query_groups)
    return _attention_layer(name, (q, k, v), layer, heads, mask)


def _attention_layer(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    layer: AttentionWeights,
    heads: tuple[int, int],
    mask: Tensor | None,
) -> Tensor:
    """Project, split, attend per head, combine, project. heads = (H, G)."""
    num_heads, num_groups = heads
    q, k, v = _project_inputs(*inputs, layer)
    q = _split_heads(q, num_heads)
    k = _expand_groups(_split_heads(k, num_groups), num_heads // num_groups)
    v = _expand_groups(_split_heads(v, num_groups), num_heads // num_groups)
    blocked = None if mask is None else arguments.mask_per_head(name, mask, q, k) != 0
    found = _attention_weights(q, k, blocked) @ v
    # The heads know nothing of each other; the last map mixes what they found.
    return _project(_combine_heads(found), layer.output)


def _expand_groups(x: Tensor, heads_per_group: int) -> Tensor:
    """(N, G, L, d) → (N, H, L, d): every query head gets a copy of its group's head.

    repeat_interleave, not repeat: neighbouring query heads share a key/value head
    (0 0 1 1), the order in which GQA checkpoints keep them; repeat would give 0 1 0 1.
    """
    return x if heads_per_group == 1 else x.repeat_interleave(heads_per_group, dim=1)


class MultiHeadAttention(nn.Module):
    """Multi-head attention as a module: four linear layers with biases.

    Args:
        d_model: E, the embedding width.
        num_heads: H, divides d_model.

    Raises:
        ValueError: an argument outside its domain; the message names it.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        name = "MultiHeadAttention"
        arguments.check_heads(name, "d_model", d_model, "num_heads", num_heads)
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        """(N, L, E) → (N, H, L, d_k), a view."""
        return _split_heads(x, self.num_heads)

    def combine_heads(self, x: Tensor) -> Tensor:
        """(N, H, L, d_k) → (N, L, E)."""
        return _combine_heads(x)

    def forward(
        self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attends from Q to K and V.

        Args:
            Q: (N, Lq, E).
            K: (N, Lk, E).
            V: (N, Lk, E).
            mask: 0 or False = *blocked*, any number type, broadcastable to
                (N, H, Lq, Lk); 3-D masks as in multi_head_attention.

        Returns:
            (N, Lq, E). A row with every key blocked has zero weights, so gives W_o.bias.

        Raises:
            ValueError: shapes that do not fit; the message names the argument.
        """
        name = "MultiHeadAttention"
        arguments.check_inputs(name, (Q, K, V), self.d_model, ("Q", "K", "V"))
        layer = AttentionWeights(self.W_q, self.W_k, self.W_v, self.W_o)
        q, k, v = map(self.split_heads, _project_inputs(Q, K, V, layer))
        if mask is None:
            weights = _attention_weights(q, k)
        else:
            blocked = arguments.mask_per_head(name, mask, q, k) == 0
            weights = _attention_weights_or_zero(q, k, blocked)
        return _project(self.combine_heads(weights @ v), layer.output)


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention: a sequence attends to itself; biases, dropout.

    Args:
        dim: the embedding width.
        num_heads: H, divides dim.
        dropout: the share of weights that are set to 0 in training.

    Raises:
        ValueError: an argument outside its domain; the message names it.
    """

    def __init__(self, dim: int, num_heads: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        name = "MultiHeadSelfAttention"
        arguments.check_heads(name, "dim", dim, "num_heads", num_heads)
        arguments.check_share(name, "dropout", dropout)
        self.dim = dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, L, dim) → (N, L, dim). ValueError: a shape that does not fit."""
        name = "MultiHeadSelfAttention"
        arguments.check_inputs(name, (x, x, x), self.dim, ("x", "x", "x"))
        layer = AttentionWeights(self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        projected = _project_inputs(x, x, x, layer)
        q, k, v = (_split_heads(part, self.num_heads) for part in projected)
        # Dropout after the softmax, on the weights: connections disappear, the others
        # grow by 1 / (1 − p), and the mean output stays the same. Dropped before the
        # softmax, a score would be 0, which is a connection like any other.
        weights = F.dropout(_attention_weights(q, k), self.dropout, self.training)
        return _project(_combine_heads(weights @ v), layer.output)
