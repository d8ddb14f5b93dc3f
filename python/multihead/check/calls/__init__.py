# SPDX-License-Identifier: MIT
"""How it is called: sizes, arguments, cases and their variations."""
