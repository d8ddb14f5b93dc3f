# SPDX-License-Identifier: MIT
"""What the code under test is: its file, signature, names and prose."""
