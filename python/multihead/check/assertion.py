# SPDX-License-Identifier: MIT
"""A check as an assertion, for tests."""

from typing import Any

from .report import Report


def assert_attention(target: object, **options: Any) -> Report:
    """Asserts that somebody's attention is right.

        def test_attention():
            multihead.assert_attention(MyAttention(64, 4), mask="keep")

    Args:
        target: the code under test, as multihead.check takes it.
        **options: what the code does not say about itself, the arguments of
            multihead.check.

    Returns:
        The report of what passed.

    Raises:
        AssertionError: with the report as its text; also where the code could not be
            called, which is said there.
        ValueError: arguments that cannot be.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    from . import check

    report = check(target, **options)
    if not report.passed:
        raise AssertionError(f"\n{report}")
    return report
