# SPDX-License-Identifier: MIT
"""One run, and what was seen in it: operations, weights, outputs."""
