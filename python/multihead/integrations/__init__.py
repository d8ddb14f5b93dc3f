# SPDX-License-Identifier: MIT
"""Other libraries on these kernels, a module for each. Nothing here is imported before
somebody asks for it, because each module imports the library that it serves."""
