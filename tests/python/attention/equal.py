# SPDX-License-Identifier: MIT
"""Equality of tensors, or of nests of them, that allows no difference at all."""

import functools

from torch.testing import assert_close

assert_equal = functools.partial(assert_close, rtol=0, atol=0, equal_nan=True)
