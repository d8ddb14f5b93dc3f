# SPDX-License-Identifier: MIT
"""Models of transformers on these kernels: ``attn_implementation="multihead"``.

::

    import multihead.integrations.transformers as on_multihead

    on_multihead.register()
    model = AutoModel.from_pretrained(name, attn_implementation="multihead")
    model.set_attn_implementation("multihead")  # or a model that is there already
    model.generate(..., past_key_values=on_multihead.GrowableCache(model.config))
    model.generate_batch(...)  # continuous batching, from the pages where keys lie

``multihead.install()`` needs none of this, and takes what transformers calls "sdpa".
The name takes more: models that refuse "sdpa" (softcap, sinks), returned weights, and
rules (causal, window, padding) instead of masks of the size (Lq, Lk).

Raises ImportError where transformers is absent or older than 5.23.
"""

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..functional import scaled_dot_product_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers import __version__ as _version
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )
    from transformers.utils.import_utils import is_tracing
    from transformers.utils.output_capturing import _active_collector

    if tuple(map(int, _version.split(".")[:2])) < (5, 23):
        raise ImportError(f"this is transformers {_version}")
    from ._transformers_paged import admit, paged_attention
except ImportError as error:
    raise ImportError(
        "multihead.integrations.transformers needs transformers 5.23 or newer: "
        f"pip install 'transformers>=5.23' ({error})"
    ) from error

__all__ = ["GrowableCache", "register"]

_ops = torch.ops.multihead

# What some models pass on instead of a mask, and what this package does not know.
_UNKNOWN_RULES = ("block_indices", "block_table", "indices", "sinks")


def register(name: str = "multihead") -> None:
    """Makes this package's attention one of transformers' implementations.

    From here on ``attn_implementation=name`` chooses it, in from_pretrained, from_config
    and model.set_attn_implementation; models that do not ask for it stay as they are.
    Such a model also batches continuously, with generate_batch and what is behind it;
    transformers, which by itself refuses every registered name there, is told so in
    ContinuousBatchingManager.switch_to_cb_friendly_attn. Registering again changes
    nothing.

    Results equal "eager" within rounding, with these differences: a query that sees
    no key gives 0 (padding on the left has such rows, and nobody reads them), and
    dropout draws other numbers from the same generator. Weights are returned where
    the call asks for them (output_attentions=True).

    Attention with a rule that only flash or sparse kernels of transformers know (an
    indexer's choice of keys) raises ValueError. Models that do not use
    transformers' attention interface are not changed: multihead.stats() shows it.
    """
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
    admit(name)


# ---- Masks ------------------------------------------------------------------


class RuleMask(Tensor):
    """A bool mask (B, 1, Lq, Lk), True = may attend, that is known by its rules.

    Nothing of its size exists before an operation of PyTorch meets it. From then on it
    is an ordinary mask, which that operation may have changed, so models that change
    their masks go on as they do. Adding it to scores is a RuntimeError: "eager" attention
    does that, with masks of another kind.
    """

    rules: dict[str, Any] | None
    _form: Callable[[], Tensor]
    _formed: Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device | str,
        rules: dict[str, Any] | None,
        form: Callable[[], Tensor],
    ) -> "RuleMask":
        """rules: arguments of scaled_dot_product_attention, None: no such rules are
        known; form: makes the mask."""
        mask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device(device)
        )
        mask.rules, mask._form, mask._formed = rules, form, None
        return mask

    def formed(self) -> Tensor:
        """The ordinary mask; there are no rules any more."""
        self.rules = None
        if self._formed is None:
            self._formed = self._form()
        return self._formed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation on the ordinary mask."""
        if func.overloadpacket in _ADDITIONS and any(
            isinstance(x, Tensor) and x.is_floating_point() for x in args
        ):
            raise RuntimeError(  # of a TypeError Python would make another one
                "multihead.integrations.transformers: a part of this model has attention "
                "of its own, which adds masks to scores and takes none of bools: choose "
                'attn_implementation="eager"'
            )

        def ordinary(x: Any) -> Any:
            return x.formed() if isinstance(x, RuleMask) else x

        args, kwargs = tree_map(ordinary, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask({tuple(self.shape)}, {self.rules})"


_ADDITIONS = (torch.ops.aten.add, torch.ops.aten.add_)

# Functions that transformers makes are recognised by their code.
_BOTH_OF = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_TO_THE_LEFT = masking_utils.sliding_window_overlay(1).__code__
_AROUND = masking_utils.sliding_window_bidirectional_overlay(1).__code__


def _variables(function: Any, code: CodeType) -> dict[str, Any]:
    """What a function with this code has enclosed; of any other function, nothing."""
    if getattr(function, "__code__", None) is not code:
        return {}
    cells = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(code.co_freevars, cells, strict=True))


def _limits(mask_function: Any) -> tuple[int, int] | None:
    """How many keys a query sees to the left and right of its own; -1: all.

    None: it is not known that the function means nothing else.
    """
    causal = masking_utils.causal_mask_function
    both = masking_utils.bidirectional_mask_function
    if mask_function is causal:
        return -1, 0
    if mask_function is both:
        return -1, -1
    parts = _variables(mask_function, _BOTH_OF).get("mask_functions", ())
    if len(parts) != 2:
        return None
    window = _variables(parts[0], _TO_THE_LEFT).get("sliding_window")
    if window is not None and parts[1] is causal:
        return window - 1, 0
    window = _variables(parts[0], _AROUND).get("sliding_window")
    if window is not None and parts[1] is both:
        return window, window
    return None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """What _attention gets as its mask: transformers' interface of mask functions.

    attention_mask is bool (B, tokens seen), True = may be attended to. Where nothing
    is blocked, None; else a RuleMask, with rules where mask_function is causal,
    bidirectional or a window of these; while a graph is traced, what "sdpa" gets.
    """
    arguments = others | dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )
    if is_tracing(attention_mask) or is_tracing(q_offset):
        arguments["allow_is_causal_skip"] = allow_is_causal_skip
        arguments["allow_is_bidirectional_skip"] = allow_is_bidirectional_skip
        mask: Tensor | None = masking_utils.sdpa_mask(q_offset=q_offset, **arguments)
        return mask

    q_offset = int(q_offset)  # the cache goes on counting in its tensor
    rules, limits = None, _limits(mask_function)
    if limits is not None:
        keep = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if keep is not None:
            keep = keep[:, kv_offset : kv_offset + kv_length].bool()
        rules = _rules(limits, q_length, kv_length, q_offset - kv_offset, keep)
        skip = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)
        if skip and not rules.keys() & _BLOCKING:
            return None
    form = partial(masking_utils.sdpa_mask, q_offset=q_offset, **arguments)
    return RuleMask((batch_size, 1, q_length, kv_length), device, rules, form)


_BLOCKING = {"is_causal", "window", "key_mask"}


def _rules(
    limits: tuple[int, int],
    q_length: int,
    kv_length: int,
    offset: int,
    key_mask: Tensor | None,
) -> dict[str, Any]:
    """The limits and key_mask (B, Lk), where query i stands at key i + offset, as
    scaled_dot_product_attention takes them. What blocks no key is left out."""
    left, right = limits
    if left >= offset + q_length - 1:
        left = -1
    if offset + right >= kv_length - 1:
        right = -1
    seen = kv_length if right < 0 else min(kv_length, offset + q_length + right)
    rules: dict[str, Any] = {}
    if key_mask is not None and not key_mask[:, :seen].all():
        rules["key_mask"] = key_mask
    if right == 0:
        rules["is_causal"] = True
    if left >= 0 or right > 0:
        rules["window"] = (left, right)
    if offset != 0 and offset == kv_length - q_length:
        rules["causal_alignment"] = "bottom_right"
    elif offset != 0:
        rules["query_offset"] = torch.tensor(offset)
    return rules


# ---- Attention --------------------------------------------------------------


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' interface of attention functions.

    query (B, H, Lq, D), key and value (B, G, Lk, D); attention_mask (B, 1, Lq, Lk),
    bool, True = may attend, or floating point, added to the scores; position_bias
    (B, H, Lq, Lk), added to them too; s_aux (H,): one more logit in the softmax's
    denominator. Without attention_mask is_causal decides, else module.is_causal.
    A window is in the mask, as for "eager". With a paged cache, which is continuous
    batching, causal and window are the cache's. Other arguments ask for nothing.

    Returns the output (B, Lq, H, D), contiguous, and the weights (B, H, Lq, Lk),
    None unless asked for. Raises ValueError where a rule is not known.
    """
    for name in _UNKNOWN_RULES:
        if others.get(name) is not None:
            raise ValueError(
                f"multihead.integrations.transformers: {name} must be None, got "
                f"{type(others[name]).__name__}: {type(module).__name__} passes on a rule "
                'that is not known here: choose attn_implementation="sdpa" or "eager"'
            )
    rules: dict[str, Any] = {
        "dropout_p": dropout if module.training else 0.0,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    cache = others.get("cache")
    if cache is not None:
        layer: Any = module.layer_idx
        return paged_attention(cache, layer, query, key, value, others, **rules), None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask, places = _mask_and_rules(query, key, attention_mask, is_causal, position_bias)
    rules |= places | {"enable_gqa": True}
    if not _wants_weights(others):
        out = scaled_dot_product_attention(query, key, value, mask, **rules)
        return out.transpose(1, 2).contiguous(), None
    # Both operators drop by the same numbers.
    state = torch.randint(2**63 - 1, (2,)) if rules["dropout_p"] > 0.0 else None
    rules |= {"attn_mask": mask, "dropout_state": state}
    out, logsumexp = _ops.fused_attention(query, key, value, **rules)
    weights = _ops.attention_weights(query, key, logsumexp, False, **rules)
    return out.transpose(1, 2).contiguous(), weights


def _mask_and_rules(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    position_bias: Tensor | None,
) -> tuple[Tensor | None, dict[str, Any]]:
    """attn_mask and the rules beside it, as scaled_dot_product_attention takes them."""
    lengths = query.shape[2], key.shape[2]
    if attention_mask is None:
        return position_bias, {"is_causal": bool(is_causal and lengths[0] > 1)}
    if isinstance(attention_mask, RuleMask):
        rules = attention_mask.rules
        if rules is not None and attention_mask.shape[2:] == lengths:
            return position_bias, dict(rules)
        attention_mask = attention_mask.formed()
    if position_bias is None:
        return attention_mask, {}
    if attention_mask.dtype == torch.bool:
        return position_bias.masked_fill(~attention_mask, -torch.inf), {}
    return position_bias + attention_mask, {}


def _wants_weights(others: dict[str, Any]) -> bool:
    """Whether the call asks for weights: some models say so, of all the collector
    knows, which torch.compile sees only where it has set it."""
    if others.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():
        return False
    collected = _active_collector.get() or ()
    return any(name.endswith("attentions") for name in collected)


# ---- Caches -----------------------------------------------------------------


_empty = torch.ops.multihead.kv_cache_empty.default
# Bytes of keys that are moved at once: what a core's caches hold.
_PART = 2**21


class _Room:
    """Mixed into a layer: its keys and values are views of tensors with room for more.

    Where such a view came from elsewhere since (rows selected or repeated), or there
    is no more room, the next update makes twice as much. Beams move inside of it.
    """

    keys: Tensor
    values: Tensor
    _rooms: dict[str, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self._rooms = {}

    def _append(self, name: str, new: Tensor) -> Tensor:
        """self.keys or self.values with the new ones behind, (B, G, L + new, D)."""
        old: Tensor = getattr(self, name)
        if torch.is_grad_enabled():  # what backward may need must not change
            return torch.cat([old, new], dim=2)
        length, more = old.shape[2], new.shape[2]
        room = self._rooms.get(name)
        start = _place(old, room)
        if room is None or start is None or start + length + more > room.shape[2]:
            capacity = max(length + more, 2 * length)
            size = (*new.shape[:2], capacity, new.shape[3])
            room = _empty(size, new.dtype, new.device)
            room[:, :, :length] = old
            self._rooms[name], start = room, 0
        end = start + length
        room[:, :, end : end + more] = new
        return room[:, :, start : end + more]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        places = [_place(getattr(self, x), room) for x, room in self._rooms.items()]
        inside = len(places) == 2 and None not in places
        if (
            torch.is_grad_enabled()
            or not inside
            or beam_idx.shape != self.keys.shape[:1]
        ):
            super().reorder_cache(beam_idx)  # type: ignore[misc]
            return
        beam_idx = beam_idx.to(self.keys.device)
        moved = [i for i, source in enumerate(beam_idx.tolist()) if i != source]
        for x in (self.keys, self.values):
            for part in torch.split(x, max(1, _PART // x[:, :, :1].nbytes), dim=2):
                rows = part.index_select(0, beam_idx[moved])
                for i, row in zip(moved, rows, strict=True):
                    part[i].copy_(row)


def _place(view: Tensor | None, room: Tensor | None) -> int | None:
    """At which key of room the view begins; None: it is no view of it, or PyTorch
    forbids to write there."""
    if (
        view is None
        or room is None
        or (room.is_inference() and not torch.is_inference_mode_enabled())
        or view.untyped_storage().data_ptr() != room.untyped_storage().data_ptr()
        or view.shape[:2] != room.shape[:2]
        or view.stride() != room.stride()
    ):
        return None
    return (view.storage_offset() - room.storage_offset()) // room.stride(2)


class GrowableLayer(_Room, DynamicLayer):
    """DynamicLayer that writes new keys behind the old ones instead of copying all."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, (B, G, L, D): views that later updates leave alone."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", key_states)
        self.values = self._append("values", value_states)
        return self.keys, self.values


class GrowableSlidingLayer(_Room, DynamicSlidingWindowLayer):
    """DynamicSlidingWindowLayer likewise: it copies once in a window's length."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that the new queries can see: views, as above."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        more = key_states.shape[2]
        self.cumulative_length += more
        keys = self._append("keys", key_states)
        values = self._append("values", value_states)
        kept = keys.shape[2] if self.record_past else self.sliding_window - 1
        self.keys, self.values = _last(keys, kept), _last(values, kept)
        seen = self.sliding_window - 1 + more
        return _last(keys, seen), _last(values, seen)


def _last(x: Tensor, count: int) -> Tensor:
    return x[:, :, max(x.shape[2] - count, 0) :]


def _growable(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return GrowableLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowableSlidingLayer(layer.sliding_window)
    return layer


class GrowableCache(DynamicCache):
    """DynamicCache for generate that does not copy what it holds at every step.

    ``model.generate(..., past_key_values=GrowableCache(model.config))``: the same
    tokens. DynamicCache concatenates all keys and values for each new token; here a
    layer has room for twice as many when it is full, and gives views. Memory: up to
    twice DynamicCache's. Outside of torch.no_grad it concatenates. An encoder-decoder
    takes ``EncoderDecoderCache(GrowableCache(config), DynamicCache(config=config))``.

    Args:
        config: of the model; says which layers slide. None: none does. Layers of
            other kinds (linear attention, indexers) are DynamicCache's own.
    """

    def __init__(self, config: Any = None) -> None:
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=GrowableLayer)
            return
        super().__init__(config=config)
        self.layers: list[Any] = list(map(_growable, self.layers))
