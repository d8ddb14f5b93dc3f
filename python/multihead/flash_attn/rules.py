# SPDX-License-Identifier: MIT
"""FlashAttention's rules in multihead's words."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

NO_WINDOW = (-1, -1)


def rules_of(
    function: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The arguments of scaled_dot_product_attention and varlen_attention."""

    def error(text: str) -> ValueError:
        return ValueError(f"{function}: {text}")

    # torch.compile cannot trace math.isfinite of a number that varies.
    if not -math.inf < softcap < math.inf:
        raise error(f"softcap must be finite, got {softcap}")
    if softmax_scale is not None and not -math.inf < softmax_scale < math.inf:
        raise error(f"softmax_scale must be finite, got {softmax_scale}")
    sides = window_size if isinstance(window_size, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise error(f"window_size must be two integers, got {window_size}")
    return dict(
        scale=softmax_scale,
        is_causal=causal,
        window=tuple(max(side, -1) for side in sides),  # any negative one: no limit
        softcap=softcap if softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        causal_alignment="bottom_right",
    )
