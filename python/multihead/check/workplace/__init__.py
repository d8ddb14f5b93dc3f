# SPDX-License-Identifier: MIT
"""A whole checkout: where attention is in it, and the smallest repairs."""
