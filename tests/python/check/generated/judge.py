# SPDX-License-Identifier: MIT
"""A program for a seed, its truth, and what `check` says of it."""

import contextlib
import pathlib
import random
import tempfile
import warnings
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from multihead.check import Options, examine

from .catalogue import FAULTS
from .faults import Fault
from .program import steps_of, text_of
from .spec import Spec, draw
from .truth import run

# Styles that are tried for faults that few have.
_STYLES, _STRIDE = 300, 1_000_003


@dataclass
class Program:
    """faults: those that were planted; none: it is right."""

    spec: Spec
    text: str
    faults: tuple[Fault, ...] = ()

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
    wrong one "named", "named in part" if only some of its faults are, "unnamed",
    "wrongly named", "called right" or "not judged"."""

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


def wrong_program(seed: int, *faults: Fault, together: int = 1) -> Program:
    """A right one with so many faults, each of which shows on the generator's own
    inputs. Faults take turns, so that those that few styles can have are not crowded
    out."""
    if not faults:
        others = random.Random(seed).sample(FAULTS, together - 1)
        faults = (FAULTS[seed % len(FAULTS)], *others)
    styles = (draw(seed + n * _STRIDE) for n in range(_STYLES))
    spec = next((s for s in styles if all(f.fits(s) for f in faults)), None)
    names = " + ".join(fault.name for fault in faults)
    if spec is None or len(set(faults)) < len(faults):
        raise NoProgram(f"no style has {names}")
    right, expected = _run(_with(spec, ()))
    if right.differs(expected, "out") or right.differs(expected, "weights"):
        raise NoProgram("the generator's own text is wrong")
    program = _with(spec, faults)
    program.spec.fault = names
    found, _ = _run(program)
    for fault in faults:
        rest = tuple(other for other in faults if other is not fault)
        without, expected = _run(_with(spec, rest))
        beside = without if rest else expected
        shows = [found.differs(beside, "out"), found.differs(beside, "weights")]
        if fault.seen in ("gradients", "training"):
            shows.append(found.differs(without, fault.seen))
        if not any(shows):
            raise NoProgram("the fault does not show")
    return program


def _with(spec: Spec, faults: tuple[Fault, ...]) -> Program:
    spec = replace(spec)
    steps = steps_of(spec)
    for fault in faults:
        fault.plant(steps)
    return Program(spec, text_of(steps), faults)


def _run(program: Program):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(program.spec, program.text)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as e:
        raise NoProgram(f"it does not run: {e}") from None


def judged(seed: int, faults: int) -> Judged:
    """Of a program with so many faults. Raises NoProgram."""
    program = wrong_program(seed, together=faults) if faults else right_program(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = pathlib.Path(folder, "program.py")
        path.write_text(program.text)
        report = examine(f"{path}:{program.name}", Options(time_limit=60.0))
    kind = kind_of(program, report)
    truth = program.spec.fault or "right"
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
    if not program.faults:
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
    others = (report.verdict or {}).get("alternatives", [])
    if any(_are(program.faults, names) for names in [causes, *others]):
        return "named"
    planted = {name for fault in program.faults for name in fault.names}
    is_part = len(program.faults) > 1 and set(causes) <= planted
    return "named in part" if is_part else "wrongly named"


def _are(faults: tuple[Fault, ...], names: list[str]) -> bool:
    """Each of the faults by one of its names, and nothing else."""
    return len(names) == len(faults) and any(
        all(name in fault.names for name, fault in zip(names, order))
        for order in permutations(faults)
    )


@contextlib.contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
