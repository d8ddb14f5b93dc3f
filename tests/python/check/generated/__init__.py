# SPDX-License-Identifier: MIT
"""Programs with attention in them, written by chance: right ones in many styles, and
the same with a single fault. Their truth is known, because their output is compared
with plain loops before anybody judges them.

    ./run python tests/python/check/generated --right 2000 --wrong 5000
"""
