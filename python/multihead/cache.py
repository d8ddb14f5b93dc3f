# SPDX-License-Identifier: MIT
"""Keys and values of the tokens that a decoder has seen."""

import os
from typing import Any

import torch
from torch import Tensor

from ._call import call, check_type

_ops = torch.ops.multihead


def to_mxint8(x: Tensor) -> Tensor:
    """x (..., D) in one byte a number, as attention takes key and value.

    MXINT8 of the "OCP Microscaling Formats (MX) Specification" 1.0: each 32 numbers
    that follow one another share a scale, a power of two. Rounded to nearest even: no
    number is off by more than 2^-7 of the largest magnitude among its 32, or 2^-25 if
    that is more. Where one of the 32 is not finite, all become NaN.

    ``scaled_dot_product_attention`` and ``varlen_attention`` take such rows as key and
    value, beside a query of float32, bfloat16 or float16. The result has the bits of the
    same call on ``from_mxint8(key, query.dtype)`` and ``from_mxint8(value, query.dtype)``,
    where those are exact.

    Args:
        x: floating point, on the CPU, of at least one dimension.

    Returns:
        Rows of D + ceil(D / 32) bytes (int8), the numbers and then the scales.

    Raises:
        ValueError: x of another dtype, or without a dimension.
    """
    check_type("to_mxint8", "x", x, Tensor, "a tensor")
    rows: Tensor = call(_ops.to_mxint8.default, x)
    return rows


def from_mxint8(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of such rows, (..., D).

    Exact in float32 and bfloat16, and in float16 below 65536, beyond which it overflows.

    Args:
        rows: as to_mxint8 returns them.
        dtype: floating point.

    Raises:
        ValueError: rows or dtype that are something else.
    """
    check_type("from_mxint8", "rows", rows, Tensor, "a tensor")
    x: Tensor = call(_ops.from_mxint8.default, rows, dtype)
    return x


class KVCache:
    """Keys (B, G, capacity, D), values (B, G, capacity, Dv), and a length for each row.

    ``GroupedQueryAttention`` and ``MultiheadAttention`` take one as ``cache=``. By hand::

        cache.append(key, value)  # (B, G, L, D): L new tokens of each row
        out = multihead.scaled_dot_product_attention(
            query, cache.key(), cache.value(), key_lengths=cache.lengths(),
            is_causal=True, causal_alignment="bottom_right", enable_gqa=True)

    The result of a token has the same bits whether it came alone, in a chunk of any
    size, or with all others, and whatever else is in the batch. Rows lie one after
    the other, so that attention reads them in place. Without ``max_length`` a full
    cache grows to twice its capacity, which copies it.

    Compiled code cannot grow a cache: give ``max_length``, or ``reserve`` before. It
    looks at all of the room, of which it reads each row's length, so no length is
    compiled in. ``torch.compile`` sees the three tensors; nothing breaks its graph.

    ``dtype=torch.bfloat16`` under a float32 model halves the memory, ``torch.int8``
    takes 33 bytes for 32 numbers (``to_mxint8``, which states the error); attention
    reads both as they are. Any other dtype than the model's is converted for each call.

    Args:
        batch_size: rows B.
        num_kv_heads: key and value heads G.
        head_dim: width D of a key.
        value_dim: width Dv of a value, default head_dim.
        capacity: tokens that fit before the cache grows.
        max_length: room for so many tokens is made at once, and more is an error.
        dtype: float32, float64, bfloat16, float16 or int8, default
            torch.get_default_dtype().
        device: default the CPU.

    Raises:
        ValueError: for sizes or dtypes outside of their domain; by every method
            where lengths or indices are. The cache is then as it was.
        RuntimeError: where tensors do not fit the cache, likewise.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        capacity: int = 0,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = (batch_size, num_kv_heads, head_dim, value_dim, capacity, max_length)
        if isinstance(device, str):
            device = torch.device(device)
        self.max_length = max_length
        self._keys: Tensor
        self._values: Tensor
        self._lengths: Tensor
        self._keys, self._values, self._lengths = call(
            _ops.kv_cache_make.default, *sizes, dtype, device
        )

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None = None) -> None:
        """Writes key (B, G, L, D) and value (B, G, L, Dv) behind what each row has.

        Args:
            key: converted to the cache's dtype.
            value: likewise.
            counts: (B,) integers from 0 to L: of row b the first counts[b] tokens are
                written, as of chunks that are padded on the right.
        """
        new = (key, value, counts)
        if torch.compiler.is_compiling():
            call(_ops.kv_cache_append.default, *self._state, *new)
            return
        self._keys, self._values = call(
            _ops.kv_cache_extend.default, *self._state, *new, self.max_length
        )

    def key(self) -> Tensor:
        """(B, G, length, D), a view up to the longest length; of shorter rows the rest
        means nothing. Rows of ``to_mxint8`` where dtype is int8. Compiled code sees all
        of the room."""
        return self._seen(self._keys)

    def value(self) -> Tensor:
        """(B, G, length, Dv), likewise."""
        return self._seen(self._values)

    def lengths(self) -> Tensor:
        """(B,) int64: the tokens of each row. append and truncate count on in this very
        tensor; clone it to keep what it says now."""
        return self._lengths

    def reserve(self, capacity: int) -> None:
        """Makes room for so many tokens in each row."""
        self._keys, self._values = call(
            _ops.kv_cache_reserve.default, *self._state, capacity, self.max_length
        )

    def truncate(self, lengths: Tensor | list[int] | int) -> None:
        """Of row b the first lengths[b] tokens stay; an int is that of every row.

        For speculative decoding, which takes tokens back.
        """
        kept = torch.as_tensor(lengths, device=self._lengths.device)
        if kept.dim() == 0:
            kept = kept.expand(self._lengths.shape)
        call(_ops.kv_cache_truncate.default, *self._state, kept)

    def reorder(self, indices: Tensor | list[int]) -> None:
        """Row i becomes what row indices[i] was, for beams; there may be more rows then,
        or fewer."""
        rows = torch.as_tensor(indices, device=self._lengths.device)
        self._keys, self._values, self._lengths = call(
            _ops.kv_cache_reorder.default, *self._state, rows
        )

    def reset(self) -> None:
        """Every row is empty, and the room stays."""
        self._lengths.zero_()

    def clone(self) -> "KVCache":
        """A copy that shares nothing."""
        state = call(_ops.kv_cache_clone.default, *self._state)
        return self._of(state, self.max_length)

    # Two caches that shared lengths would count each other's tokens.
    __copy__ = clone

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes "key", "value", "lengths" and max_length as safetensors."""
        call(_ops.kv_cache_save.default, *self._state, self.max_length, os.fspath(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "KVCache":
        """Reads what save has written, onto the CPU. Raises RuntimeError or ValueError
        where the file holds no cache."""
        *state, max_length = call(_ops.kv_cache_load.default, os.fspath(path))
        return cls._of(state, max_length)

    @property
    def capacity(self) -> int:
        """Tokens that fit before the cache grows."""
        return self._keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room included."""
        return self._keys.nbytes + self._values.nbytes

    def __len__(self) -> int:
        """The longest length."""
        return int(self._lengths.max())

    def __bool__(self) -> bool:
        """True, of an empty cache too: ``cache or other`` means "if there is one"."""
        return True

    def __repr__(self) -> str:
        text: str = call(_ops.kv_cache_text.default, *self._state, self.max_length)
        return text

    @property
    def _state(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._keys, self._values, self._lengths

    @classmethod
    def _of(cls, state: Any, max_length: int | None) -> "KVCache":
        cache = cls.__new__(cls)
        cache._keys, cache._values, cache._lengths = state
        cache.max_length = max_length
        return cache

    def _seen(self, room: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return room
        return room[:, :, : len(self)]


# query, key and value.
Inputs = tuple[Tensor | None, Tensor | None, Tensor | None]
# Of forward: key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal.
Masks = tuple[Tensor | None, bool, Tensor | None, bool, bool]


def attend(
    function: str,
    cache: KVCache,
    inputs: Inputs,
    sizes: tuple[int, int, int, int],
    masks: Masks,
    *,
    batch_first: bool,
    **layer: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer's forward with a cache, without key and value where nothing is appended;
    or its append_to_cache, without query. sizes and layer: embed_dim, num_heads,
    num_kv_heads and head_dim, and what the operator takes."""
    check_type(function, "cache", cache, KVCache, "a multihead.KVCache or None")
    names = ("query", "key", "value")
    required = names[:1] if function == "forward" else names[1:]
    for name, x in zip(names, inputs, strict=True):
        if name in required:
            check_type(function, name, x, Tensor, "a tensor")
    key, end, counts = inputs[1], None, None
    key_padding_mask, need_weights, attn_mask, average, is_causal = masks
    if key_padding_mask is not None:
        counts = call(
            _ops.kv_cache_counts.default, key_padding_mask, key, batch_first, function
        )
    eager = not torch.compiler.is_compiling()
    if eager and (key is None or isinstance(key, Tensor) and key.dim() == 3):
        length = 0 if key is None else key.shape[1 if batch_first else 0]
        cache._keys, cache._values, end = call(
            _ops.kv_cache_room.default, *cache._state, length, counts, cache.max_length
        )
    operator = _ops.cached_attention_forward.default
    result: tuple[Tensor, Tensor | None] = call(
        operator,
        *inputs,
        *cache._state,
        counts,
        end,
        *sizes,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average,
        is_causal=is_causal,
        batch_first=batch_first,
        **layer,
    )
    return result
