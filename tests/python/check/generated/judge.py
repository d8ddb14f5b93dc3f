# SPDX-License-Identifier: MIT
"""A program for a seed, its truth, and what `check` says of it."""

import contextlib
import pathlib
import tempfile
import warnings
from dataclasses import dataclass, replace

import torch

from multihead.check import Options, examine

from .catalogue import FAULTS
from .faults import Fault
from .program import steps_of, text_of
from .spec import Spec, draw
from .truth import run

# Styles that are tried for a fault that few have.
_STYLES, _STRIDE = 300, 1_000_003


@dataclass
class Program:
    spec: Spec
    text: str
    fault: Fault | None = None

    @property
    def name(self) -> str:
        """Of what is to be checked."""
        if self.spec.form == "module":
            return self.spec.class_name
        core = "scaled_dot_product_attention"
        return core if self.spec.is_core else "multi_head_attention"


@dataclass
class Judged:
    """kind: of a right program "passed", "right if", "not judged" or "accused"; of a
    wrong one "named", "unnamed", "wrongly named", "called right" or "not judged"."""

    seed: int
    kind: str
    truth: str
    said: str
    style: str


class NoProgram(Exception):
    """This seed gives none: the generator wrote what does not run, or a fault that
    does not show."""


def right_program(seed: int) -> Program:
    spec = draw(seed)
    program = Program(spec, text_of(steps_of(spec)))
    found, expected = _run(program)
    if found.differs(expected, "out") or found.differs(expected, "weights"):
        raise NoProgram("the generator's own text is wrong")
    return program


def wrong_program(seed: int, fault: Fault | None = None) -> Program:
    """A right one with one fault that shows on the generator's own inputs. Faults take
    turns, so that those that few styles can have are not crowded out."""
    fault = fault or FAULTS[seed % len(FAULTS)]
    styles = (draw(seed + n * _STRIDE) for n in range(_STYLES))
    spec = next((s for s in styles if fault.fits(s)), None)
    if spec is None:
        raise NoProgram(f"no style has {fault.name}")
    twin = Program(replace(spec), text_of(steps_of(spec)))
    right, expected = _run(twin)
    if right.differs(expected, "out") or right.differs(expected, "weights"):
        raise NoProgram("the generator's own text is wrong")
    steps = steps_of(spec)
    fault.plant(steps)
    spec.fault = fault.name
    program = Program(spec, text_of(steps), fault)
    found, expected = _run(program)
    shows = [found.differs(expected, "out"), found.differs(expected, "weights")]
    if fault.seen in ("gradients", "training"):
        shows.append(found.differs(right, fault.seen))
    if not any(shows):
        raise NoProgram("the fault does not show")
    return program


def _run(program: Program):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(program.spec, program.text)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as e:
        raise NoProgram(f"it does not run: {e}") from None


def judged(seed: int, is_right: bool) -> Judged:
    """Raises NoProgram."""
    program = (right_program if is_right else wrong_program)(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = pathlib.Path(folder, "program.py")
        path.write_text(program.text)
        report = examine(f"{path}:{program.name}", Options(time_limit=60.0))
    kind = kind_of(program, report)
    truth = "right" if is_right else program.spec.fault or ""
    said = _said(report)
    return Judged(seed, kind, truth, said, str(program.spec))


def _said(report) -> str:
    conditions = getattr(report, "conditions", None) or []
    named = report.cause or ("right if" if conditions else "right")
    first = report.findings[0].sentence if report.findings else ""
    return f"{named}: {first[:160]}" if first else named


def kind_of(program: Program, report) -> str:
    conditions = getattr(report, "conditions", None) or []
    causes = report.causes
    is_right = (report.verdict or {}).get("verdict") in ("bits", "rounding")
    if program.fault is None:
        if report.passed and not conditions:
            return "passed"
        if is_right and not report.findings:
            return "right if"
        return "not judged" if report.unchecked else "accused"
    if report.unchecked:
        return "not judged"
    if is_right and not report.findings:
        return "called right"
    if set(causes) & {"unknown", "raises", "not_finite"} or not report.cause:
        return "unnamed"
    names = set(program.fault.names)
    others = (report.verdict or {}).get("alternatives", [])
    if report.cause in names or any(set(o) <= names for o in others if o):
        return "named"
    return "wrongly named"


@contextlib.contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
