# SPDX-License-Identifier: MIT
"""The one place where observations become a verdict."""

import json
from typing import Any

from .._operators import operators
from ..finding import Finding
from .observation import Observation

# What complaints about weights, and counts of heads, begin with.
_OF_WEIGHTS = ("weights", "num_heads", "num_kv_heads", "embed_dim")


def explain(observations: list[Observation]) -> dict[str, Any]:
    """The verdict on observations of one implementation, as the operator's JSON."""
    tensors = [o.tensors for o in observations]
    metadata = [o.metadata for o in observations]
    verdict: dict[str, Any] = json.loads(operators().explain(tensors, metadata))
    return verdict


def complaint(error: ValueError) -> Finding:
    """What the engine could not read, as a finding, with its reason as detail."""
    reason = str(error).removeprefix("explain: ")
    if reason.startswith(_OF_WEIGHTS):
        return Finding(
            "no_weights_found",
            "Its weights could not be matched with those of attention.",
            "Name them W_q, W_k, W_v and W_o, or like those of "
            "nn.MultiheadAttention; or state num_heads and num_kv_heads.",
            detail=reason,
        )
    return Finding(
        "not_comparable",
        "What it takes and returns cannot be compared with attention.",
        detail=reason,
    )
