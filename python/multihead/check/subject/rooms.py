# SPDX-License-Identifier: MIT
"""Room that a caller makes for the keys and values of all tokens, and that code writes
into, cache[:, :, start:end] = k: (B, H, L, D), or (B, L, H, D)."""

import inspect
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .signature import Call

ROOMS = {1: "room (B, L, H, D)", 2: "room (B, H, L, D)"}  # by axes before the length
_WRITTEN = r"^\s*{0}\[(?P<before>\s*:[^,\]]*,(?:\s*:\s*,)?)[^,\]\n]*:[^\]\n]*\]\s*=[^=]"


def written(name: str, source: str) -> str | None:
    """Which of them has this name, if one has."""
    found = re.search(_WRITTEN.format(re.escape(name)), source, re.M)
    return ROOMS[found["before"].count(",")] if found else None


def of_rooms(call: "Call", source: str) -> None:
    """The roles of those that must be given. source: the text of what is called."""
    for parameter in call.parameters:
        if parameter.default is inspect.Parameter.empty:
            if call.roles[parameter.name] in (None, "past", "mask"):
                room = written(parameter.name, source)
                call.roles[parameter.name] = room or call.roles[parameter.name]
