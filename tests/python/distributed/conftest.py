# SPDX-License-Identifier: MIT
"""The processes of ranks.py end with the tests."""

import pytest
import ranks


@pytest.fixture(scope="session", autouse=True)
def processes():
    yield
    ranks.close()
