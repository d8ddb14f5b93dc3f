# SPDX-License-Identifier: MIT
"""Foreign code contained: its time, its state, its errors."""
