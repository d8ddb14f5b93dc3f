# SPDX-License-Identifier: MIT
"""Finds the libraries that were built and loads them, which registers operators; what
they warn of becomes a warning of Python's."""

import functools
import pathlib
import sys
import warnings
from typing import Any

import torch

_PACKAGES = tuple(str(pathlib.Path(file).parent) for file in (__file__, torch.__file__))


def load(name: str) -> None:
    """Loads a library into this process; doing so again changes nothing.

    Raises ImportError when the library has not been built, or was built against
    another PyTorch than the one that is running.
    """
    try:
        from . import _built
    except ImportError:
        raise ImportError(
            "multihead is not built: this is its source folder. Use ./run python, "
            "or install it with pip install --no-build-isolation ."
        ) from None
    _built.check_torch(torch.__version__)
    # Beside _built, not beside this file: an editable installation keeps the
    # sources where they are and what was built in site-packages.
    library = pathlib.Path(_built.__file__).with_name(name)
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


@functools.cache
def diagnosis() -> Any:
    """The operators, those of diagnosis among them: who never checks never loads it."""
    load("libmultihead_diagnosis.so")
    return torch.ops.multihead


@functools.cache
def pictures() -> Any:
    """The operators, those of pictures among them."""
    load("libmultihead_pictures.so")
    return torch.ops.multihead


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
