# SPDX-License-Identifier: MIT
"""The fixture `assert_attention` for tests that run under pytest.

pytest imports this in every run of a project beside which the package is installed. It
lies outside the package because importing that imports torch, which takes seconds: only
a test that asks for the fixture does.
"""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_attention() -> Callable[..., Any]:
    """multihead.assert_attention: fails with a report that names the fault."""
    import multihead

    return multihead.assert_attention
