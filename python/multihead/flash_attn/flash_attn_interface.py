# SPDX-License-Identifier: MIT
"""The functions of multihead.flash_attn, where FlashAttention has them as well."""

# Absolute: the module also runs under the name flash_attn.flash_attn_interface.
from multihead.flash_attn import *  # noqa: F403
from multihead.flash_attn import __all__ as __all__
