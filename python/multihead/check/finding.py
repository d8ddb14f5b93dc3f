# SPDX-License-Identifier: MIT
"""What is found about code as a program, before any rule of attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One finding about the code under test.

    name: stable, for programs ("raises", "changes_inputs", ...).
    sentence: what was found. remedy: what repairs it. detail: the evidence, such
    as the call and the line of the code under test that raised.
    kind: "failure" (the check does not pass), "limit" (some calls are refused,
    which may be by design), "remark", or "unchecked" (nothing could be told, which is
    not the code's fault).
    """

    name: str
    sentence: str
    remedy: str = ""
    detail: str = ""
    kind: str = "failure"
