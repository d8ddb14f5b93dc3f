# SPDX-License-Identifier: MIT
"""How it is called: cases, arguments, constructors."""
