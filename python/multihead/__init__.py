# SPDX-License-Identifier: MIT
"""Attention for PyTorch, exact and fast.

The rules of attention live in the C++ library; this package loads it and gives
its operators names, docstrings and modules.
"""

from . import _library

_library.load("libmultihead.so")

from . import _quantizable, textbook  # noqa: E402, F401
from ._built import VERSION as __version__  # noqa: E402
from .cache import KVCache, from_mxint8, to_mxint8  # noqa: E402
from .check import Report, assert_attention, check  # noqa: E402
from .functional import (  # noqa: E402
    AttentionSummary,
    Route,
    attention_summary,
    backend,
    multi_head_attention_forward,
    route,
    scaled_dot_product_attention,
    varlen_attention,
)
from .installation import (  # noqa: E402
    CallCount,
    Stats,
    install,
    installed,
    is_installed,
    reset_stats,
    stats,
    uninstall,
)
from .modules import GroupedQueryAttention, MultiheadAttention  # noqa: E402
from .pictures import Pictures, show  # noqa: E402
from .replacement import (  # noqa: E402
    Replacement,
    Replacements,
    replace_attention,
    restore_attention,
)

__all__ = [
    "AttentionSummary",
    "CallCount",
    "GroupedQueryAttention",
    "KVCache",
    "MultiheadAttention",
    "Pictures",
    "Replacement",
    "Replacements",
    "Report",
    "Route",
    "Stats",
    "__version__",
    "assert_attention",
    "attention_summary",
    "backend",
    "check",
    "from_mxint8",
    "install",
    "installed",
    "is_installed",
    "multi_head_attention_forward",
    "replace_attention",
    "reset_stats",
    "restore_attention",
    "route",
    "scaled_dot_product_attention",
    "show",
    "stats",
    "textbook",
    "to_mxint8",
    "uninstall",
    "varlen_attention",
]
