# SPDX-License-Identifier: MIT
"""Runs the code under test on one case and keeps what can be known of the run."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..calls import arguments, cases
from ..calls.arguments import Arguments, CallStyle
from ..calls.cases import Case
from ..calls.construct import Construction
from ..calls.sizes import attributes
from ..finding import Finding
from ..sandbox.guard import Guard
from ..subject.holding import held, of_closure
from ..subject.signature import Call
from ..subject.target import Subject
from . import outputs, weights
from .record import Frames, Recorder, fill_constant

_SEED = 20_173_706


@dataclass
class Run:
    """One run. findings is not empty if there is no output."""

    case: Case
    arguments: Arguments
    out: Tensor | None = None
    attention: Tensor | None = None
    recorder: Recorder | None = None
    parameters: weights.Weights = field(default_factory=weights.Weights)
    dout: Tensor | None = None
    gradients_off: bool = False
    leaves: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return self.out is None


class Stop(Exception):
    """Nothing more can be run: the time is over."""

    def __init__(self, findings: list[Finding]):
        super().__init__()
        self.findings = findings


class Runner:
    """Runs cases of one subject, read as one call. `remarks` collects what is worth
    saying once: prints, changed inputs, changed state."""

    def __init__(self, subject: Subject, call: Call, guard: Guard):
        self.subject, self.call, self.guard = subject, call, guard
        self.extra: object = None
        self.construction = Construction(subject) if subject.kind == "class" else None
        self.constructed = ""
        self.remarks: dict[str, Finding] = {}
        self._instances: dict[tuple, object] = {}

    def run(
        self,
        case: Case,
        call_style: CallStyle,
        seed: int = 0,
        given: Arguments | None = None,
        seconds: float | None = None,
    ) -> Run:
        """One run with all random generators seeded by `seed`, and with arguments
        that the case implies if none are given. Raises Stop when the time is
        over; not for one with so few `seconds` of its own."""
        with _settings(case, seed):
            made = given or arguments.make(self.call, case, call_style)
            run = Run(case, made)
            target, findings = self._target(case)
            if target is None:
                run.findings = findings
                return run
            kept = {n: t.clone() for n, t in {**made.tensors, **made.masks}.items()}
            if case.gradients:
                self._require_gradients(run)
            self._execute(target, run, call_style, seconds)
            self._compare_inputs(made, kept, run)
        return run

    def _execute(
        self, target: object, run: Run, call_style: CallStyle, seconds: float | None
    ) -> None:
        case, made = run.case, run.arguments
        recorder = Recorder({**made.tensors, **made.masks})
        frames = Frames()
        called = target if callable(target) else target.forward

        def watched():
            with recorder, frames:
                return called(*made.positional, **made.keywords)

        outcome = self.guard.attempt(watched, seconds)
        run.recorder = recorder
        run.gradients_off = any("grad" in f.sentence for f in outcome.findings)
        self._note(outcome.findings, outcome.printed)
        if outcome.error is not None:
            if outcome.findings[0].name == "hangs" and seconds is None:
                raise Stop(self._located(outcome.findings[:1], made))
            run.findings = self._located(outcome.findings[:1], made)
            return
        try:
            out, run.attention = outputs.split(
                outcome.value,
                case,
                made.tensors["query"],
                any_width=self.subject.kind == "instance",
            )
        except outputs.Unfit as unfit:
            run.findings = self._located([unfit.finding], made)
            return
        run.out = out
        run.counted = self._counted(target, frames, case)
        run.parameters = weights.collect(
            recorder, frames, self._roots(target), made.weights
        )
        if case.gradients and not call_style.numpy:
            self._differentiate(run)

    def _located(self, findings: list[Finding], made: Arguments) -> list[Finding]:
        call = f"called as {self.subject.name}({made})"
        return [replace(f, detail=f"{f.detail}\n{call}".strip()) for f in findings]

    def _note(self, findings: list[Finding], printed: str) -> None:
        for finding in findings:
            if finding.name == "changes_global_state":
                self.remarks[finding.name] = finding  # the last names all
        if printed.strip():
            first = printed.strip().splitlines()[0][:60]
            self.remarks.setdefault(
                "prints",
                Finding(
                    "prints",
                    f"It prints while it runs ({first!r}).",
                    "Remove the print before others use it.",
                    kind="remark",
                ),
            )

    def _compare_inputs(self, made: Arguments, kept: dict, run: Run) -> None:
        """Inputs that are not what they were."""
        given = {**made.tensors, **made.masks}
        changed = [
            role
            for role, before in kept.items()
            if not torch.equal(given[role].detach().nan_to_num(), before.nan_to_num())
        ]
        if changed:
            names = " and ".join(role.replace("_", " ") for role in changed)
            self.remarks.setdefault(
                "changes_inputs",
                Finding(
                    "changes_inputs",
                    f"It changes its caller's tensors in place: {names}.",
                    "Write `x = x * scale`, not `x *= scale`: operations that end in "
                    "an underscore, and augmented assignments, overwrite the tensor "
                    "that was passed.",
                ),
            )
            run.arguments.tensors |= {r: kept[r] for r in changed if r in made.tensors}
            run.arguments.masks |= {r: kept[r] for r in changed if r in made.masks}

    def _key(self, case: Case) -> tuple:
        of_class = self.subject.kind == "class"
        return (case.sizes if of_class else None, case.dtype)

    def _target(self, case: Case) -> tuple[object, list[Finding]]:
        """What is called: the function, or a module in the dtype and mode."""
        if self.subject.kind == "function":
            return self.subject.target, []
        key = self._key(case)
        if key not in self._instances:
            made, findings = self._instance(case)
            if made is None:
                return None, findings
            self._instances[key] = made
        target = self._instances[key]
        if isinstance(target, nn.Module):
            target.train(case.training)
        return target, []

    def _instance(self, case: Case) -> tuple[object, list[Finding]]:
        """A new instance, or a copy of the one that is checked, which stays as it
        is."""
        if self.construction is not None:
            made, call, findings = self.construction.build(case.sizes, self.guard)
            if made is None and findings[0].name == "hangs":
                raise Stop(findings)
            self._note(findings, "")
            self.constructed = self.constructed or call
            if made is None:
                return None, findings
        else:
            original = self.subject.target
            outcome = self.guard.call(copy.deepcopy, original, _detached(original))
            if outcome.error is not None:
                return None, outcome.findings
            made = outcome.value
        convert(made, case.dtype)
        for weight in held(made):
            fill_constant(weight)
        return made, []

    @staticmethod
    def _require_gradients(run: Run) -> None:
        """Makes leaves of the sequences; the code gets copies, which it may change."""
        made = run.arguments
        run.leaves = {r: t.requires_grad_() for r, t in made.tensors.items()}
        copies = {id(leaf): leaf.clone() for leaf in run.leaves.values()}
        made.tensors = {r: copies[id(leaf)] for r, leaf in run.leaves.items()}
        made.positional = [copies.get(id(v), v) for v in made.positional]
        made.keywords = {n: copies.get(id(v), v) for n, v in made.keywords.items()}

    def _differentiate(self, run: Run) -> None:
        """The gradients of sum(out · dout); zero where there is no path. What a query
        without keys gives is anybody's choice, so it has no part in dout."""
        generator = torch.Generator().manual_seed(77)
        drawn = torch.randn(run.out.shape, generator=generator, dtype=torch.float64)
        dout = drawn.to(run.out.dtype)
        if run.case.mask == "rows":
            blind = cases.may_be_blind(run.arguments.masks["mask"])
            dout.movedim(cases.query_axis(run.case), 0)[blind] = 0
        leaves = list(run.leaves.values())
        found = [None] * len(leaves)
        if run.out.requires_grad:
            outcome = self.guard.call(
                torch.autograd.grad, (run.out * dout).sum(), leaves, allow_unused=True
            )
            if outcome.error is not None:
                self._say_no_gradients(outcome.findings[0], run)
                return
            found = outcome.value
        run.dout = dout
        for (role, leaf), gradient in zip(run.leaves.items(), found):
            zero = torch.zeros_like(leaf, requires_grad=False)
            run.gradients[f"d{role}"] = zero if gradient is None else gradient.detach()

    def _say_no_gradients(self, finding: Finding, run: Run) -> None:
        sentence = f"Its gradients cannot be computed: {finding.sentence}"
        # Autograd raises it, in no line of the code itself.
        finding = replace(finding, sentence=sentence, detail="")
        located = self._located([finding], run.arguments)
        self.remarks.setdefault("gradients", located[0])

    def _roots(self, target: object) -> dict[str, object]:
        if self.subject.kind == "function":
            return {**of_closure(self.subject.target), **self._extra()}
        return {"self": target, **self._extra()}

    def _extra(self) -> dict[str, object]:
        if self.extra is None:
            return {}
        return self.extra if isinstance(self.extra, dict) else {"self": self.extra}

    def _counted(self, target: object, frames: Frames, case: Case) -> dict[str, int]:
        """Sizes by role that the code itself computed or keeps, or was built with."""
        counted = {}
        for _, variables in frames.found:
            counted |= attributes(_Variables(variables))
        if not callable(getattr(target, "__code__", None)):
            counted |= attributes(target)
        if self.construction is not None and self.construction.counts_heads:
            counted["num_heads"] = case.sizes.heads
        return counted


class _Variables:
    """The variables of a function as attributes."""

    def __init__(self, variables: dict[str, object]):
        # One letter may count anything, h the heads of a loop among it.
        named = {n: v for n, v in variables.items() if len(n) > 1 or n in "HGE"}
        self.__dict__.update(named)


def _detached(module: object) -> dict[int, object]:
    """A memo for copy.deepcopy, which refuses tensors with a history, such as the
    weights that a module keeps of its last call."""
    parts = module.modules() if isinstance(module, nn.Module) else [module]
    values = [value for part in parts for value in vars(part).values()]
    return {
        id(value): value.detach().clone()
        for value in values
        if isinstance(value, Tensor) and not value.is_leaf
    }


def convert(target: object, dtype: torch.dtype) -> None:
    """Puts all floating tensors of a module, or of any other object, on the CPU in
    `dtype`, also those that are neither parameters nor buffers."""
    parts = [target]
    if isinstance(target, nn.Module):
        parts = list(target.to("cpu", dtype).modules())
    for part in parts:
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(part, name, value.to("cpu", dtype))


@contextmanager
def _settings(case: Case, seed: int) -> Iterator[None]:
    """Default dtype, gradients and seeds of a run."""
    default, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(case.dtype)
    torch.set_grad_enabled(case.gradients)
    # Not 0 or 42, which the code itself may set, which is to be noticed.
    torch.manual_seed(_SEED + seed)
    random.seed(_SEED + seed)
    _seed_numpy(_SEED + seed)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        torch.set_grad_enabled(gradients)


def _seed_numpy(seed: int) -> None:
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)
