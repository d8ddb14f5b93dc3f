# SPDX-License-Identifier: MIT
"""A check from target to report: how it is called, which runs, what they say."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from . import cases, engine, plan, signature
from .arguments import Manner
from .cases import Case
from .finding import Finding
from .guard import Guard
from .ladder import Base, Ladder, core_layouts, layer_layouts, may_be_core
from .observation import Observation, Stated, observe, on_scores
from .options import Options
from .report import Report
from .runner import Run, Runner, Stop
from .target import Subject, Unreachable, load

Progress = Callable[[str], None]
_RIGHT = ("bits", "rounding")
_SPREAD = 1.5


def examine(
    target: object, options: Options, progress: Progress | None = None
) -> Report:
    """Runs a check; see multihead.check. progress is told the name of each case.

    Raises ValueError and FileNotFoundError where there is nothing to check.
    """
    start = time.monotonic()
    with Guard(options.time_limit) as guard:
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
        name = f"{subject.name}, {subject.where}" if subject.where else subject.name
        seconds = time.monotonic() - start
        findings = [*examination.all_findings(), *subject.findings]
        return Report(name, verdict, findings, examination.understood, seconds)


@dataclass
class Reading:
    """What one way to call the code gave."""

    base: Base
    observations: list[Observation] = field(default_factory=list)
    verdict: dict | None = None
    findings: list[Finding] = field(default_factory=list)
    understood: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.verdict is not None and self.verdict["verdict"] in _RIGHT

    @property
    def fault(self) -> str | None:
        faults = self.verdict["faults"] if self.verdict else []
        return faults[0]["name"] if len(faults) == 1 else None


class Examination:
    """The steps of a check. `findings` and `understood` grow on the way."""

    def __init__(
        self,
        subject: Subject,
        options: Options,
        guard: Guard,
        progress: Progress | None,
    ):
        self.subject, self.options = subject, options
        self.progress = progress or (lambda name: None)
        self.call = signature.read(subject)
        self.runner = Runner(subject, self.call, guard)
        self.runner.extra = options.weights
        self.ladder = Ladder(self.runner, options)
        self.stated = self._stated()
        self.findings: list[Finding] = []
        self.understood: list[str] = list(self.call.guesses)

    def all_findings(self) -> list[Finding]:
        return [*self.findings, *self.runner.remarks.values()]

    def _stated(self) -> Stated:
        """What the user, or the type of the code, says beyond doubt."""
        target = self.subject.target
        kind = target if self.subject.kind == "class" else type(target)
        mha_like = isinstance(kind, type) and issubclass(kind, nn.MultiheadAttention)
        mask = self.options.mask or ("blocked" if mha_like else None)
        if mask is None and self.ladder._manners()[0].additive:
            mask = "additive"
        return Stated(
            num_heads=self.options.num_heads,
            num_kv_heads=self.options.num_kv_heads,
            mask=mask,
            padding="blocked" if self.call.parameter("padding") else None,
            causal=self.options.causal,
        )

    def verdict(self) -> dict | None:
        """The engine's verdict on the best reading; None if nothing could be run."""
        reading = self._best_reading()
        if reading is None:
            self.findings += self.ladder.findings
            return None
        self.findings += reading.findings
        self.understood = [*reading.understood, *self.understood]
        return reading.verdict

    def _best_reading(self) -> Reading | None:
        """The first reading that is right; else the first that ran."""
        layouts = layer_layouts(self.subject, self.options)
        core = may_be_core(self.call, self.runner)
        base = self.ladder.find(layouts)
        if core and (base is None or not base.run.parameters.tensors):
            return self._best_core()
        if base is None:
            return None
        reading = self._read(base)
        exchanged = reading.fault == "batch_and_sequence_exchanged"
        if exchanged and cases.SEQUENCE_FIRST in layouts:
            other = self.ladder.find((cases.SEQUENCE_FIRST,))
            second = self._read(other) if other else reading
            if second.is_right:
                second.understood.append(
                    "read as (L, B, E); batch_first=True says otherwise"
                )
                return second
        return reading

    def _best_core(self) -> Reading | None:
        readings = []
        for layout in core_layouts(self.subject):
            base = self.ladder.find((layout,))
            if base is None:
                continue
            reading = self._read(base)
            if reading.is_right:
                return reading
            readings.append(reading)
        named = [r for r in readings if r.verdict and r.verdict["verdict"] == "fault"]
        return (named or readings or [None])[0]

    def _read(self, base: Base) -> Reading:
        """Runs all cases that follow from `base` and has them judged."""
        reading = Reading(base)
        runs = Cases(self.runner, base, self.options, self.progress)
        runs.run_all()
        reading.findings += runs.findings
        self._observe(reading, runs.kept)
        reading.understood = self._how_called(base, runs.kept)
        self.progress("verdict")
        reading.verdict = engine.explain(reading.observations)
        if not reading.is_right and reading.verdict["verdict"] == "unknown":
            reading.findings += _not_finite(runs.kept)
        return reading

    def _observe(self, reading: Reading, kept: list[Run]) -> None:
        for run in kept:
            seen = observe(run, self.call, self.stated)
            reading.observations.append(seen)

    def _how_called(self, base: Base, kept: list[Run]) -> list[str]:
        made = kept[0].arguments
        said = [f"{self.subject.name}({made})"]
        if self.runner.constructed:
            said.insert(0, self.runner.constructed)
        parameters = kept[0].parameters
        if parameters.tensors:
            names = list(parameters.tensors)
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            inside = self.subject.kind == "function" and not self.call.weights
            where = "made inside the function" if inside else "of its own"
            where = "passed as arguments" if self.call.weights else where
            said.append(f"weights {where}: {shown}")
        said += parameters.notes
        if base.case.dtype is torch.float32:
            said.append("it does not run in float64, so in float32")
        if base.case.layout not in (cases.LAYER, cases.HEADS):
            said.append(f"tensors as {base.case.layout}")
        return said


def _not_finite(kept: list[Run]) -> list[Finding]:
    for run in kept:
        if run.case.mask != "blocked row" and not run.out.isfinite().all():
            share = float((~run.out.isfinite()).double().mean())
            return [
                Finding(
                    "not_finite",
                    f"{share:.0%} of the output is NaN or infinite in the case "
                    f"{run.case.name!r}, in which every query sees a key.",
                    "Print each intermediate tensor's `isfinite().all()`: the first "
                    "that is false is where to look.",
                )
            ]
    return []


class Cases:
    """The runs that follow from a first call. `kept` have an output; `findings` say
    what was refused."""

    def __init__(
        self, runner: Runner, base: Base, options: Options, progress: Progress
    ):
        self.runner, self.options, self.progress = runner, options, progress
        self.call, self.manner = runner.call, base.manner
        self.base = replace(base.case, spread=_calibrated(base))
        self.kept: list[Run] = []
        self.findings: list[Finding] = []

    def run_all(self) -> None:
        """Runs everything; the first run in `kept` is the base."""
        first = self._try(replace(self.base, gradients=True))
        if first is None:
            self._try(self.base)
        self._randomness()
        for case in plan.relations(self.base, self.call):
            self._try(case)
        kinds = self._masks()
        for case in plan.flags(self.base, self.call):
            self._try_flag(case)
        constructed = self.runner.construction is not None
        for case in plan.groups(self.base, self.call, constructed):
            self._try(case)
        if self.call.takes("need_weights") or self.call.takes("average_weights"):
            self._try(plan.returning_weights(self.base))
        self._crowd(kinds)
        self._train()
        self._round(kinds)
        if case := plan.blocked(self.base, kinds[0] if kinds else None):
            self._try(replace(case, mask_dtype=self.base.mask_dtype))
        if self.base.relation == "equal":
            self._say_limit("keys and queries must be equally long")

    def _try(self, case: Case, manner: Manner | None = None) -> Run | None:
        """Runs a case and keeps it; None if it is refused."""
        self.progress(case.name)
        run = self.runner.run(case, manner or self.manner)
        if run.refused:
            return None
        self.kept.append(run)
        return run

    def _say_limit(self, sentence: str, detail: str = "") -> None:
        self.findings.append(Finding("limit", sentence, detail=detail, kind="limit"))

    def _masks(self) -> list[str]:
        """Runs the masks; the kinds that are taken. The dtype of masks is settled
        on the way: bool if it is taken in any shape."""
        if not self.call.takes("mask"):
            return []
        refusals: list[Finding] = []
        for dtype in plan.MASK_DTYPES:
            taken = []
            for case in plan.masked(self.base):
                case = replace(case, mask_dtype=dtype, gradients=case.mask == "rows")
                self.progress(case.name)
                run = self.runner.run(case, self.manner)
                if run.refused:
                    refusals += run.findings[:1]
                else:
                    taken.append(case.mask)
                    self.kept.append(run)
            if taken:
                self.base = replace(self.base, mask_dtype=dtype)
                return taken
        first = refusals[0]
        self.findings.append(
            replace(first, sentence=f"No mask that was tried is taken: {first.sentence}")
        )
        return []

    def _try_flag(self, case: Case) -> None:
        for dtype in plan.MASK_DTYPES if case.mask or case.padding else (torch.bool,):
            if self._try(replace(case, mask_dtype=dtype)) is not None:
                return
        self._say_limit(f"{case.name} is refused")

    def _crowd(self, kinds: list[str]) -> None:
        """B = H = Lq: for masks of each item that are taken, or, where none was
        taken at other sizes, for those that only fit here."""
        if cases.unbatched(self.base) or self.base.layout in cases.CORE:
            return
        padded = any(run.case.padding == "mask" for run in self.kept)
        if self.call.takes("padding"):
            self._try(plan.crowded(self.base, None, "mask"))
        elif "rows of each item" in kinds or (self.call.takes("mask") and not kinds):
            self._try(plan.crowded(self.base, "rows of each item", None))
        if self.call.takes("mask") and not kinds and not padded:
            self._try(plan.crowded(self.base, "keys of each item", None))

    def _train(self) -> None:
        """A run in training mode, if there is dropout to be seen or asked for."""
        asked = self.call.takes("dropout")
        built = self.runner.construction
        asked = asked or (built is not None and "dropout" in built.roles.values())
        if not asked and not self.runner.subject.is_module:
            return
        case = plan.training(self.base)
        run = self.runner.run(case, self.manner)
        if not run.refused and 0 < len(on_scores(run)) < len(run.recorder.draws):
            run = self.runner.without_other_dropout(case, self.manner)
            if len(on_scores(run)) < len(run.recorder.draws):
                return  # two draws, of which one observation can tell one
        if not run.refused and (asked or run.recorder.draws):
            self.kept.append(run)

    def _randomness(self) -> None:
        """Two runs of a module that differ, although nothing is dropped."""
        if not self.kept or self.runner.subject.kind == "function":
            return
        first = self.kept[0]
        if first.recorder.draws:
            return
        again = self.runner.run(first.case, self.manner, seed=1)
        if again.refused or torch.equal(again.out.nan_to_num(), first.out.nan_to_num()):
            return
        self.findings.append(
            Finding(
                "random",
                "Two runs on the same inputs give different outputs, in evaluation "
                "mode.",
                "Something is drawn anew in each call: parameters belong into the "
                "constructor, dropout into training.",
            )
        )

    def _round(self, kinds: list[str]) -> None:
        if self.base.dtype is torch.float32:
            return
        free = self.runner.subject.kind != "instance"
        for case in plan.rounding(self.base, self.call, free):
            self._try(case)
        if "rows" in kinds:
            masked = replace(self.base, name="mask (Lq, Lk), float32", mask="rows")
            self._try(replace(masked, dtype=torch.float32, draw=25))


def _calibrated(base: Base) -> float:
    """A factor for the inputs at which the softmax is neither flat nor saturated."""
    spread = base.run.recorder.spread
    if not spread or not spread > 0:
        return 1.0
    return min(max((_SPREAD / spread) ** 0.5, 0.02), 20.0)
