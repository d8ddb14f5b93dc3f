# SPDX-License-Identifier: MIT
"""Attention as modules: parameters, and one operator call in forward."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.activation import _is_make_fx_tracing
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from ._call import call, check_int, check_type, no_torchscript
from ._projections import is_gathered_on_call, is_plain, pooled_state, repeated_state
from ._subclasses import are_plain, forward_takes_subclasses, own_rules_of, refuse_fused
from .cache import Inputs, KVCache, Masks, attend
from .functional import current_backend

_ops = torch.ops.multihead


class _NestedOnKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's inference path of nested tensors on the CPU, on the kernels: PyTorch's
    module decides whether it serves a call."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        native = torch.ops.aten._native_multi_head_attention.default
        if func is native and args[0].is_cpu:
            func = _ops.nested_multi_head_attention.default
        return func(*args, **(kwargs or {}))


def _is_nested(query: Any, key: Any, value: Any) -> bool:
    """Whether one of them is. What is no tensor, the operator refuses by name."""
    try:
        return bool(query.is_nested or key.is_nested or value.is_nested)
    except AttributeError:
        return False


def _refuse_nested(query: Any, key: Any, value: Any) -> None:
    if _is_nested(query, key, value):
        named = {"query": query, "key": key, "value": value}
        name = next(name for name, x in named.items() if x.is_nested)
        raise TypeError(
            f"GroupedQueryAttention: {name} must be a dense tensor, got a nested one"
        )


def _own_rules(weight: Tensor | None, bias: Tensor | None) -> str | None:
    """What is special about the packed parameters; nearly always nothing."""
    if are_plain(weight, bias):
        return None
    return own_rules_of({"in_proj_weight": weight, "in_proj_bias": bias})


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention on multihead's kernels.

    Constructor, parameters, initialisation, state_dict, arguments, results and
    errors are those of torch.nn.MultiheadAttention. Differences:

    * ``is_causal=True`` without ``attn_mask`` means causal, on every path.
    * a query whose keys are all blocked gets zero weights, with and without
      ``need_weights`` (under ``backend("exact")`` PyTorch's NaN).
    * ``attn_mask`` and ``is_causal`` together both apply (under
      ``backend("exact")`` is_causal is PyTorch's hint).
    """

    @forward_takes_subclasses(current_backend)
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from query to key and value.

        Args:
            query: (Lq, B, E), with batch_first (B, Lq, E), or (Lq, E).
            key: (Lk, B, kdim), likewise.
            value: (Lk, B, vdim), likewise.
            key_padding_mask: (B, Lk) or (Lk,). bool: **True = blocked**;
                floating point: added to the scores.
            need_weights: also return the attention weights.
            attn_mask: (Lq, Lk) or (B·H, Lq, Lk), head index innermost. bool:
                **True = blocked**; floating point: added to the scores.
            average_attn_weights: average the weights over the heads.
            is_causal: query i sees keys j <= i, and what add_bias_kv and
                add_zero_attn append.
            cache: self-attention with what came before. The new tokens, query, key
                and value, go into the cache, and query i of row b sees all tokens
                that the row had and its new ones up to i; is_causal says nothing
                more. key_padding_mask (B, L), bool, may block the last of the new
                tokens: they are not kept, and what comes out for them means nothing.
                With key and value None, every query sees all that its row of the
                cache holds, and nothing is appended: cross-attention to what
                append_to_cache has put there.
                Without gradients, dropout, attn_mask, add_bias_kv and add_zero_attn.

        Returns:
            The output, shaped like query, and the weights after dropout,
            (B, Lq, Lk) or per head (B, H, Lq, Lk), None without need_weights.

        Raises:
            AssertionError, RuntimeError, ValueError: where
                torch.nn.MultiheadAttention raises them; and for what a cache cannot
                take, which leaves it as it was.
        """
        beside = (average_attn_weights, is_causal)
        masks = (key_padding_mask, need_weights, attn_mask, *beside)
        if cache is not None:
            return self._cached("forward", cache, (query, key, value), masks)
        backend, out_proj = current_backend(), self.out_proj
        given: Any = (query, key, value, *masks)
        weight, bias = self.in_proj_weight, self.in_proj_bias
        reason = _own_rules(weight, bias)
        if reason is not None or _is_nested(query, key, value):
            refuse_fused("MultiheadAttention", backend, reason or "a tensor is nested")
            if reason is not None or backend != "auto":
                return super().forward(*given)
            with _NestedOnKernels():  # type: ignore[no-untyped-call]
                return super().forward(*given)
        # PyTorch reads the weight of out_proj, whatever was put there.
        reads = is_plain(out_proj) or (
            backend == "exact" and not is_gathered_on_call(out_proj)
        )
        output = (out_proj.weight, out_proj.bias) if reads else (None, None)
        inputs = (query, key, value, self.embed_dim, self.num_heads)
        packed = (weight, bias, self.bias_k, self.bias_v, self.add_zero_attn)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        result: tuple[Tensor, Tensor | None] = call(
            _ops.multi_head_attention_forward.default,
            *inputs,
            *packed,
            self.dropout,
            *output,
            self.training,
            key_padding_mask,
            need_weights,
            attn_mask,
            not self._qkv_same_embed_dim,
            *separate,
            None,
            None,
            average_attn_weights,
            is_causal,
            batch_first=self.batch_first,
            fast_path=torch.backends.mha.get_fastpath_enabled()
            and not has_torch_function((query, key, value, weight, bias))
            and not _is_make_fx_tracing(),  # type: ignore[no-untyped-call]
            backend=backend,
        )
        return result if reads else (out_proj(result[0]), result[1])

    def append_to_cache(
        self,
        cache: KVCache,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> None:
        """Projects key and value and appends them to cache, for cross-attention::

            layer.append_to_cache(cache, memory, memory)  # an encoder's output, once
            out, _ = layer(query, None, None, cache=cache)  # each step

        Args:
            cache: of the layer's key heads.
            key: (Lk, B, kdim), with batch_first (B, Lk, kdim).
            value: (Lk, B, vdim), likewise.
            key_padding_mask: (B, Lk) bool, **True = blocked**: the last tokens of a
                row, which are not kept.

        Raises:
            TypeError, RuntimeError, ValueError: for what the cache cannot take, which
                leaves it as it was.
        """
        masks = (key_padding_mask, False, None, True, False)
        self._cached("append_to_cache", cache, (None, key, value), masks)

    def _cached(
        self, function: str, cache: KVCache, inputs: Inputs, masks: Masks
    ) -> tuple[Tensor, Tensor | None]:
        """forward with a cache, or append_to_cache."""
        out_proj, heads = self.out_proj, self.num_heads
        reads = is_plain(out_proj)
        out, weights = attend(
            function,
            cache,
            inputs,
            (self.embed_dim, heads, heads, self.head_dim),
            masks,
            in_proj_weight=self.in_proj_weight,
            in_proj_bias=self.in_proj_bias,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            out_proj_weight=out_proj.weight if reads else None,
            out_proj_bias=out_proj.bias if reads else None,
            bias_k=self.bias_k,
            add_zero_attn=self.add_zero_attn,
            dropout_p=self.dropout,
            training=self.training,
            batch_first=self.batch_first,
            backend=current_backend(),
        )
        return out if reads else out_proj(out), weights

    def __prepare_scriptable__(self) -> NoReturn:
        raise no_torchscript("script", True)

    def extra_repr(self) -> str:
        return _options(
            {"embed_dim": self.embed_dim, "num_heads": self.num_heads},
            dropout=(self.dropout, 0.0),
            bias=(self.in_proj_bias is not None, True),
            add_bias_kv=(self.bias_k is not None, False),
            add_zero_attn=(self.add_zero_attn, False),
            kdim=(self.kdim, self.embed_dim),
            vdim=(self.vdim, self.embed_dim),
            batch_first=(self.batch_first, False),
        )


def _options(sizes: dict[str, int], **options: tuple[object, object]) -> str:
    """A module's options as its constructor takes them, for its repr.

    options: (value, default); those that have their default are left out.
    """
    changed = {
        name: value for name, (value, usual) in options.items() if value != usual
    }
    return ", ".join(f"{name}={value}" for name, value in (sizes | changed).items())


def _same_options(module: Any) -> dict[str, Any]:
    """What both kinds of attention are constructed with, but for biases."""
    weight = module.out_proj.weight
    names = ("dropout", "kdim", "vdim", "batch_first")
    options = {name: getattr(module, name) for name in names}
    return options | dict(device=weight.device, dtype=weight.dtype)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads.

    Query head h reads key/value head h // (H // G); G = H is multi-head, G = 1
    multi-query attention. Masks, layouts, results and errors are those of
    :class:`MultiheadAttention`. Source: "GQA: Training Generalized Multi-Query
    Transformer Models from Multi-Head Checkpoints".

    Parameters: q_proj (H·D, embed_dim), k_proj (G·D, kdim), v_proj (G·D, vdim),
    out_proj (embed_dim, H·D), torch.nn.Linear each. They are drawn as a
    torch.nn.MultiheadAttention with separate weights draws them.

    Args:
        embed_dim: width E of query and output.
        num_heads: number H of query heads; must divide embed_dim unless head_dim
            is given.
        num_kv_heads: number G of key/value heads; must divide num_heads.
        dropout: probability of zeroing a weight, in training only.
        bias: whether the projections have biases.
        kdim, vdim: widths of key and value, default embed_dim.
        head_dim: width D of a head, default embed_dim // num_heads.
        batch_first: (B, L, E) instead of (L, B, E).

    Raises:
        ValueError, AssertionError: for sizes that do not fit together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = call(
            _ops.head_dim.default, embed_dim, num_heads, num_kv_heads, head_dim
        )
        check_int("GroupedQueryAttention", "kdim", self.kdim)
        check_int("GroupedQueryAttention", "vdim", self.vdim)
        self.dropout = dropout
        self.batch_first = batch_first

        if device is None:
            device = torch.get_default_device()

        def projection(inputs: int, outputs: int) -> nn.Linear:
            # Made without drawing: the values are drawn below, in MHA's order.
            linear: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
                nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype
            )
            return linear

        query_width = num_heads * self.head_dim
        kv_width = num_kv_heads * self.head_dim
        self.q_proj = projection(embed_dim, query_width)
        self.k_proj = projection(self.kdim, kv_width)
        self.v_proj = projection(self.vdim, kv_width)
        self.out_proj = projection(query_width, embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew: out_proj, then q, k and v; biases are 0."""
        self.out_proj.reset_parameters()
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                init.zeros_(linear.bias)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    @forward_takes_subclasses(current_backend)
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from query to key and value; see MultiheadAttention.forward.

        Masks: **True = blocked**; attn_mask (Lq, Lk) or (B·H, Lq, Lk),
        key_padding_mask (B, Lk). Weights have H heads. cache: a KVCache of G heads.
        """
        beside = (average_attn_weights, is_causal)
        masks = (key_padding_mask, need_weights, attn_mask, *beside)
        if cache is not None:
            return self._cached("forward", cache, (query, key, value), masks)
        _refuse_nested(query, key, value)
        q_proj, k_proj, v_proj = self.q_proj, self.k_proj, self.v_proj
        out_proj = self.out_proj
        options = (self.dropout, self.training, *masks)
        batch_first, backend = self.batch_first, current_backend()
        if not all(map(is_plain, (q_proj, k_proj, v_proj, out_proj))):
            projected = (q_proj(query), k_proj(key), v_proj(value), self.head_dim)
            operator = _ops.projected_attention_forward.default
            out, weights = call(
                operator, *projected, *options, batch_first=batch_first, backend=backend
            )
            return out_proj(out), weights
        inputs = (query, key, value, self.num_heads, self.num_kv_heads)
        to_query, to_key = (q_proj.weight, q_proj.bias), (k_proj.weight, k_proj.bias)
        to_value, to_out = (
            (v_proj.weight, v_proj.bias),
            (out_proj.weight, out_proj.bias),
        )
        linears = (*to_query, *to_key, *to_value, *to_out)
        operator = _ops.grouped_query_attention_forward.default
        result: tuple[Tensor, Tensor | None] = call(
            operator,
            *inputs,
            *linears,
            *options,
            batch_first=batch_first,
            backend=backend,
        )
        return result

    def append_to_cache(
        self,
        cache: KVCache,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> None:
        """Projects key and value and appends them to cache, for cross-attention; see
        MultiheadAttention.append_to_cache."""
        masks = (key_padding_mask, False, None, True, False)
        self._cached("append_to_cache", cache, (None, key, value), masks)

    def _cached(
        self, function: str, cache: KVCache, inputs: Inputs, masks: Masks
    ) -> tuple[Tensor, Tensor | None]:
        """forward with a cache, or append_to_cache."""
        q_proj, k_proj, v_proj = self.q_proj, self.k_proj, self.v_proj
        out_proj, weights = self.out_proj, {}
        plain = all(map(is_plain, (q_proj, k_proj, v_proj, out_proj)))
        if plain:
            weights = dict(
                q_proj_weight=q_proj.weight,
                q_proj_bias=q_proj.bias,
                k_proj_weight=k_proj.weight,
                k_proj_bias=k_proj.bias,
                v_proj_weight=v_proj.weight,
                v_proj_bias=v_proj.bias,
                out_proj_weight=out_proj.weight,
                out_proj_bias=out_proj.bias,
            )
        else:
            query, key, value = inputs
            inputs = (
                query if query is None else q_proj(query),
                key if key is None else k_proj(key),
                value if value is None else v_proj(value),
            )
        width = self.embed_dim if plain else self.num_heads * self.head_dim
        out, attention = attend(
            function,
            cache,
            inputs,
            (width, self.num_heads, self.num_kv_heads, self.head_dim),
            masks,
            dropout_p=self.dropout,
            training=self.training,
            batch_first=self.batch_first,
            backend=current_backend(),
            **weights,
        )
        return out if plain else out_proj(out), attention

    def __prepare_scriptable__(self) -> NoReturn:
        raise no_torchscript("script", False)

    def extra_repr(self) -> str:
        return _options(
            {
                "embed_dim": self.embed_dim,
                "num_heads": self.num_heads,
                "num_kv_heads": self.num_kv_heads,
            },
            dropout=(self.dropout, 0.0),
            bias=(self.out_proj.bias is not None, True),
            kdim=(self.kdim, self.embed_dim),
            vdim=(self.vdim, self.embed_dim),
            head_dim=(self.head_dim, self.embed_dim // self.num_heads),
            batch_first=(self.batch_first, False),
        )

    @classmethod
    def from_multihead(
        cls, mha: nn.MultiheadAttention, num_kv_heads: int
    ) -> "GroupedQueryAttention":
        """A copy of ``mha`` with its key/value heads averaged in groups.

        num_kv_heads = mha.num_heads gives the same function. Raises ValueError
        with add_bias_kv or add_zero_attn, which have no grouped counterpart, and
        TypeError where out_proj was replaced by more than a Linear.
        """
        theirs = nn.MultiheadAttention
        words = "a torch.nn.MultiheadAttention"
        check_type("from_multihead", "mha", mha, theirs, words)
        if mha.bias_k is not None or mha.add_zero_attn:
            raise ValueError(
                "from_multihead: mha must have neither add_bias_kv nor "
                "add_zero_attn, which grouped-query attention lacks"
            )
        state = pooled_state(mha, num_kv_heads)
        heads = (mha.num_heads, num_kv_heads)
        bias = mha.in_proj_bias is not None
        gqa = cls(mha.embed_dim, *heads, bias=bias, **_same_options(mha))
        gqa.load_state_dict(state)
        return gqa.train(mha.training)

    def to_multihead(self) -> MultiheadAttention:
        """A copy in which every query head has a key/value head of its own.

        The same function with more parameters. Raises ValueError unless
        head_dim * num_heads = embed_dim, and TypeError where a projection was
        replaced by more than a Linear.
        """
        if self.head_dim * self.num_heads != self.embed_dim:
            raise ValueError(
                "to_multihead: head_dim * num_heads must be embed_dim, got "
                f"{self.head_dim} * {self.num_heads} and {self.embed_dim}"
            )
        state = repeated_state(self, self.num_heads, self.num_kv_heads)
        sizes = (self.embed_dim, self.num_heads)
        bias = self.out_proj.bias is not None
        mha = MultiheadAttention(*sizes, bias=bias, **_same_options(self))
        mha.load_state_dict(state)
        return mha.train(self.training)
