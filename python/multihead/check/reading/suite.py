# SPDX-License-Identifier: MIT
"""All runs of one reading of the code, from a first call that it takes."""

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from ..calls import cases, variations
from ..calls.cases import Case
from ..calls.user_inputs import of_user
from ..capture.runner import Run, Runner, Stop
from ..finding import Finding
from .first_call import Base

Progress = Callable[[str], None]
_SPREAD = 1.5
_LONG_SECONDS = 1.0  # loops over each query and key would take minutes
_LARGE = 1000.0  # the spread of scores at which exp has long overflowed
_READS_RANK_3 = re.compile(
    r"(dim\(\)|ndim|len\(\w*mask\w*\.(shape|size\(\))\))\s*==\s*3"
)
# What is raised on purpose.
_REFUSALS = ("AssertionError", "NotImplementedError", "ValueError")
_MISTAKES = (
    "AttributeError",
    "KeyError",
    "NameError",
    "TypeError",
    "UnboundLocalError",
    "ZeroDivisionError",
)


def not_finite(kept: list[Run]) -> list[Finding]:
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
    what was refused; `taken` and `refused` are kinds of calls by name."""

    def __init__(self, runner: Runner, base: Base, progress: Progress):
        self.runner, self.progress = runner, progress
        self.call, self.call_style = runner.call, base.call_style
        self.base = replace(base.case, spread=_calibrated(base))
        self._taken = base.run
        self.kept: list[Run] = []
        self.findings: list[Finding] = []
        self.taken: set[str] = set()
        self.refused: set[str] = set()
        # Nothing that could be compared: noise, or no numbers at all.
        self.hopeless = False

    def run_all(self) -> None:
        """Runs everything; the first run in `kept` is the base."""
        first = self._first()
        noise = self._randomness(first)
        if not first.out.isfinite().any():
            noise += not_finite([first])
        self.findings += noise
        if noise:
            self.hopeless = True
            return
        if "changes_inputs" not in self.runner.remarks:
            for case in variations.relations(self.base, self.call):
                self._try(case)
        kinds = self._masks()
        if "changes_inputs" not in self.runner.remarks:
            for case in variations.masked_self(self.base, self.call, kinds):
                self._try(case)
        for case in variations.flags(self.base, self.call, kinds):
            self._try_flag(case)
        constructed = self.runner.construction is not None
        for case in variations.groups(self.base, self.call, constructed):
            if self._try(case):
                self.taken.add("groups")
        if self.call.takes("need_weights") or self.call.takes("average_weights"):
            self._try(variations.returning_weights(self.base))
        self._crowd(kinds)
        self._train()
        if case := variations.undisturbed(self.base, self.call):
            self._try(case)
        self._lengthen()
        self._round(kinds)
        if case := variations.blocked(self.base, kinds[0] if kinds else None):
            self._try(replace(case, mask_dtype=self.base.mask_dtype))
        other_keys = self.taken if self.base.relation == "cross" else self.refused
        other_keys.add("other keys")
        if self.base.relation == "equal":
            self._say_limit("It refuses keys that are longer than the queries.")
        if self.base.relation == "self" and self.call.style == "qkv":
            self._say_limit("It refuses queries, keys and values that differ.")

    def overflows(self) -> list[Finding]:
        """A remark on a softmax that large scores break, of which PyTorch's makes a
        choice of one key."""
        large = _LARGE / (self.base.spread**2 * (self._taken.recorder.spread or 1.0))
        spread = self.base.spread * max(large, 1.0) ** 0.5
        case = replace(self.base, name="large scores", spread=spread)
        try:
            run = self.runner.run(case, self.call_style)
        except Stop:
            return []  # the verdict stands without it
        if run.refused or run.out.isfinite().all():
            return []
        return [
            Finding(
                "softmax_overflows",
                f"Scores of about ±{_LARGE:.0f} make its output NaN or infinite: exp "
                "overflows from 709 on in float64, from 88 in float32.",
                "Subtract from each row of scores its maximum before `exp`; the "
                "softmax stays the same. `torch.softmax` does that.",
                kind="remark",
            )
        ]

    def _first(self) -> Run:
        """The base, with gradients if it takes them. What it takes only now and then
        is a failure."""
        with_gradients = replace(self.base, gradients=True)
        run = self._run(with_gradients)
        if not run.refused:
            return run
        again, plain = self._try(with_gradients), self._try(self.base)
        if again is None and plain is not None:
            return plain
        refusal = run.findings[0]
        sentence = f"It raises in some calls only: {refusal.sentence}"
        self.findings.append(replace(refusal, sentence=sentence))
        if again is None:
            self.kept.append(self._taken)
        return again or self._taken

    def run_users(self, inputs: object) -> None:
        """The user's own inputs; a refusal is a finding."""
        case, made = of_user(self.call, inputs, self.base)
        self.progress(case.name)
        run = self.runner.run(case, self.call_style, given=made)
        if run.refused:
            self.findings += run.findings
        else:
            self.kept.append(run)

    def _try(self, case: Case) -> Run | None:
        """Runs a case and keeps it; None if it is refused."""
        run = self._run(case)
        return None if run.refused else run

    def _run(self, case: Case) -> Run:
        """Runs a case and keeps it if it is not refused."""
        self.progress(case.name)
        run = self.runner.run(case, self.call_style)
        if not run.refused:
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
        for dtype in variations.MASK_DTYPES:
            taken = self._masks_of(variations.masked(self.base), dtype, refusals)
            if taken:
                self.base = replace(self.base, mask_dtype=dtype)
                self.taken |= {"mask", "square mask"}
                return taken
        self.refused.add("mask")
        first = refusals[0]
        square = variations.masked_square(self.base, self.call)
        if any(self._masks_of(square, d, refusals) for d in variations.MASK_DTYPES):
            self._say_limit(
                f"It refuses masks unless keys are as many as queries: {first.sentence}",
                first.detail,
            )
            self.taken.add("square mask")
            return []
        self.refused.add("square mask")
        sentence = f"No mask that was tried is taken: {first.sentence}"
        # A shape that nobody tried may be meant; a mistake in Python is one, unless
        # nobody said that this argument is a mask.
        mistake = first.sentence.startswith(_MISTAKES)
        guessed = self.call.is_guessed("mask")
        kind = "failure" if mistake and not guessed else "limit"
        self.findings.append(replace(first, sentence=sentence, kind=kind))
        return []

    def _masks_of(
        self, masked: list[Case], dtype: torch.dtype, refusals: list[Finding]
    ) -> list[str]:
        """Runs these masks; the kinds that are taken. Adds the others' refusals."""
        taken: list[str] = []
        for case in masked:
            if case.mask == "keys of each item" and "rows" in taken:
                continue  # of two axes, these were queries and keys
            case = replace(case, mask_dtype=dtype, gradients=case.mask == "rows")
            run = self._run(case)
            if run.refused:
                refusals += run.findings[:1]
            else:
                taken.append(case.mask)
        return taken

    def _try_flag(self, case: Case) -> None:
        dtypes = variations.MASK_DTYPES if case.mask or case.padding else (torch.bool,)
        refusals: list[Finding] = []
        for variant in variations.variants(case, self.call):
            for dtype in dtypes:
                run = self._run(replace(variant, mask_dtype=dtype))
                if not run.refused:
                    self.taken.add(case.name)
                    return
                refusals += run.findings[:1]
        self._say_refused(case, refusals[0])

    def _say_refused(self, case: Case, refusal: Finding) -> None:
        """An argument that is offered and that no call can use is a failure; not so
        two arguments together, nor what the code refuses in its own words."""
        meant = refusal.sentence.startswith(_REFUSALS)
        self.refused.add(case.name)
        alone = case.mask is None or case.padding is None
        meant = meant or (case.padding is not None and self.call.is_guessed("padding"))
        sentence = f"It refuses the call with {case.name}: {refusal.sentence}"
        kind = "failure" if alone and not meant else "limit"
        self.findings.append(replace(refusal, sentence=sentence, kind=kind))

    def _crowd(self, kinds: list[str]) -> None:
        """B = H = Lq: for masks of each item that are taken, or, where none was
        taken at other sizes, for those that only fit here."""
        if cases.unbatched(self.base) or self.base.layout in cases.CORE:
            return
        padded = any(run.case.padding == "mask" for run in self.kept)
        if self.call.takes("padding"):
            self._try(variations.crowded(self.base, None, "mask"))
        reads = _READS_RANK_3.search(self.runner.subject.source) is not None
        taken = "rows of each item" in kinds
        if self.call.takes("mask") and (taken or reads or not kinds):
            self._try(variations.crowded(self.base, "rows of each item", None))
        if self.call.takes("mask") and not kinds and not padded:
            self._try(variations.crowded(self.base, "keys of each item", None))

    def _train(self) -> None:
        """A run in training mode, if there is dropout to be seen or asked for."""
        asked = self.call.takes("dropout")
        built = self.runner.construction
        asked = asked or (built is not None and "dropout" in built.roles.values())
        if not asked and not self.runner.subject.is_module:
            return
        case = variations.training(self.base)
        run = self.runner.run(case, self.call_style)
        if run.refused or not (asked or run.recorder.draws):
            return
        if not run.recorder.draws:
            again = self.runner.run(case, self.call_style, seed=1)
            if again.refused or not torch.equal(again.out, run.out):
                return  # dropout whose draws cannot be seen, as in a fused kernel
        self.kept.append(run)

    def _lengthen(self) -> None:
        """A run at lengths at which tiles, windows and buffers end."""
        case = variations.long(self.base)
        self.progress(case.name)
        run = self.runner.run(case, self.call_style, seconds=_LONG_SECONDS)
        if not run.refused:
            self.kept.append(run)

    def _randomness(self, first: Run) -> list[Finding]:
        """Two runs that differ although nothing is dropped and no layer made anew."""
        made_inside = self.runner.subject.kind == "function" and not self.call.weights
        if first.recorder.draws or (made_inside and first.parameters.tensors):
            return []
        again = self.runner.run(first.case, self.call_style, seed=1)
        if again.refused or torch.equal(again.out.nan_to_num(), first.out.nan_to_num()):
            return []
        return [
            Finding(
                "random",
                "Two runs on the same inputs give different outputs, in evaluation "
                "mode.",
                "Something is drawn anew in each call: parameters belong into the "
                "constructor, dropout into training.",
            )
        ]

    def _round(self, kinds: list[str]) -> None:
        if self.base.dtype is torch.float32:
            for case in variations.others(self.base):
                self._try(case)
            return
        free = self.runner.subject.kind != "instance"
        for case in variations.rounding(self.base, self.call, free):
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
