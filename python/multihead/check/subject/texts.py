# SPDX-License-Identifier: MIT
"""The text of code, kept: to find that of a class, Python parses the whole file."""

import inspect
import re
import weakref
from typing import Any

_Lines = tuple[list[str], int]
_known: weakref.WeakKeyDictionary[Any, _Lines] = weakref.WeakKeyDictionary()


def lines_of(code: Any) -> _Lines:
    """inspect.getsourcelines(code). Raises OSError and TypeError as that does."""
    code = getattr(code, "__func__", code)  # a method is another object each time
    try:
        if (known := _known.get(code)) is not None:
            return known
    except TypeError:  # it can be no key
        return inspect.getsourcelines(code)
    return _known.setdefault(code, inspect.getsourcelines(code))


def text_of(code: object) -> str:
    """inspect.getsource(code), likewise."""
    return "".join(lines_of(code)[0])


def source_of(code: object) -> str:
    """The text of code; "" where there is none."""
    try:
        return text_of(code)
    except (OSError, TypeError):
        return ""


def compared_with(name: str, text: str) -> list[str]:
    """The words that a text compares an argument with, `mode == "causal"`."""
    return re.findall(rf"\b{re.escape(name)}\s*==\s*[\"']([\w-]+)[\"']", text)
