# SPDX-License-Identifier: MIT
"""Attention as learners and engineers write it: right, wrong, and misbehaving.

Every object that `table.py` names is one attempt. They are kept as people write
them, with their names, habits and layouts; nothing in them knows of the checker.
"""
