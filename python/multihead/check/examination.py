# SPDX-License-Identifier: MIT
"""A check from target to report."""

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

from .capture.runner import Stop
from .options import Options
from .reading.suite import Progress
from .report import Report
from .sandbox.guard import Guard
from .session import Examination
from .subject.target import Unreachable, load

# A check sets what is one for the whole process: streams, seeds, types, signals.
_turn = threading.RLock()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors of a check are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def examine(
    target: object, options: Options, progress: Progress | None = None
) -> Report:
    """Runs a check; see multihead.check. progress is told the name of each case.
    Checks in several threads take turns.

    Raises ValueError and FileNotFoundError where there is nothing to check.
    """
    with _turn:
        return _examine(target, options, progress)


def _examine(target: object, options: Options, progress: Progress | None) -> Report:
    start = time.monotonic()
    with _one_thread(), Guard(options.time_limit) as guard:
        try:
            subject = load(target, guard)
        except Unreachable as unreachable:
            return Report(str(target), None, unreachable.findings, [])
        examination = Examination(subject, options, guard, progress)
        try:
            verdict = examination.verdict()
        except Stop as stop:
            verdict = None
            examination.findings = stop.findings
        name = f"{subject.name} ({subject.where})" if subject.where else subject.name
        seconds = time.monotonic() - start
        findings = [*examination.all_findings(), *subject.findings]
        return Report(name, verdict, findings, examination.understood, seconds)
