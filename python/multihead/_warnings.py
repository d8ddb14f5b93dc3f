# SPDX-License-Identifier: MIT
"""Warnings of the library as Python's."""

import pathlib
import sys
import warnings

import torch

_PACKAGES = tuple(str(pathlib.Path(file).parent) for file in (__file__, torch.__file__))


def _warn(message: str) -> None:
    """A UserWarning at the line that called this package or PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


_library = torch.library.Library(  # type: ignore[no-untyped-call]
    "multihead", "FRAGMENT"
)
_library.impl("warn", _warn, "CPU")  # type: ignore[no-untyped-call]
