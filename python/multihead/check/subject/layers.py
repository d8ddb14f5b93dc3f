# SPDX-License-Identifier: MIT
"""The layer that a function of attention is handed for its settings, as Transformers'
are: eager_attention_forward(module, query, key, value, ...)."""

import inspect
import re

from .roles import normal

_NAMES = ("module", "layer", "selfattn", "attn", "self")


def roles(parameters: list[inspect.Parameter], text: str) -> dict[str, str]:
    """The role of such a layer, if it comes first and settings of it are read."""
    name = parameters[0].name if parameters else ""
    read = rf"\b{name}\.(training|num_key_value_groups|is_causal|scaling)\b"
    is_one = normal(name) in _NAMES and re.search(read, text) is not None
    return {name: "of_layer"} if is_one else {}
