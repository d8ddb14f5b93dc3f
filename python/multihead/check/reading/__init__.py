# SPDX-License-Identifier: MIT
"""A first call that it takes, the runs that follow, and how they are read."""
