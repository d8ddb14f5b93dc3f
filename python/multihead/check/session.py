# SPDX-License-Identifier: MIT
"""A check step by step: how the code is called, which runs, what they say."""

import contextlib
import time
from dataclasses import replace

import torch
from torch import nn

from .calls import cases
from .capture.runner import Run, Runner
from .finding import Finding
from .options import Options
from .reading import engine
from .reading.first_call import (
    Base,
    FirstCall,
    core_layouts,
    heads_layouts,
    layer_layouts,
    may_be_core,
    written_batch_first,
)
from .reading.heads import guessed_heads, known_heads
from .reading.observation import Observation, Stated, observe
from .reading.reading import Reading
from .reading.suite import Cases, Progress, not_finite
from .sandbox.guard import Guard
from .sandbox.traceback_report import is_of_arguments
from .subject import documented, signature
from .subject.target import Subject

_GUESSES = 3  # numbers of heads that are tried where nothing tells them
_QUICK = 2.0  # seconds of a verdict, so that others are tried
_UNKNOWN = "unchecked"
_HOW_TO_CALL = (
    "State it: check a function that calls it with them filled in, "
    "`lambda q, k, v: attend(q, k, v, ...)`, or give a call of yours by `inputs=`."
)


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
        self.first_call = FirstCall(self.runner, options)
        self.layouts = layer_layouts(subject, options, self.call)
        self.order_is_written = (
            cases.LAYER in self.layouts and written_batch_first(subject) is False
        )
        self.believed: dict[str, documented.Said] = {}  # "mask", "padding"
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
        known = "blocked" if mha_like else self.call.known and self.call.known.mask
        mask = self.options.mask or known
        if mask is None and self.first_call.call_styles()[0].additive:
            mask = "additive"
        mask = mask or self._believe(
            "mask", documented.meaning_of_mask(self.call, self.subject)
        )
        if mask is None and self.call.is_as_pytorchs:
            mask = "blocked"
        return Stated(
            num_heads=self.options.num_heads,
            num_kv_heads=self.options.num_kv_heads,
            mask=mask,
            padding=self._stated_padding(),
            causal=self.options.causal,
        )

    def _stated_padding(self) -> str | None:
        """What is written about padding; what the user says of a mask goes for it,
        too, and before that where it is the only one."""
        if self.call.known:
            return self.call.known.mask
        written = documented.meaning_of_padding(self.call, self.subject)
        said = self.options.mask if self.options.mask != "additive" else None
        if said and not (written and self.call.takes("mask")):
            return said
        return self._believe("padding", written)

    def _believe(self, fact: str, said: documented.Said | None) -> str | None:
        """The meaning that the text gives a mask; a sentence is kept to be quoted."""
        if said is not None and said.quote:
            self.believed[fact] = said
        return said.meaning if said else None

    def _is_doubtful(self, fact: str) -> bool:
        return fact in self.believed and not self.believed[fact].is_plain

    def verdict(self) -> dict | None:
        """The engine's verdict on the best reading; None if nothing could be run."""
        reading = self._best_reading()
        if reading is None:
            self.findings += self._complaints()
            return None
        self.findings += reading.findings
        self.understood = [*reading.understood, *self.understood]
        return reading.verdict

    def _complaints(self) -> list[Finding]:
        """Why nothing ran. What a call that was put together by guesses raises is not
        the code's fault."""
        said = self.first_call.findings
        built = self.runner.construction
        guessed = [*self.call.guessed, *(built.guessed if built else ())]
        if not guessed or not is_of_arguments(said):
            return said
        names = " and ".join(f"`{name}`" for name in sorted(guessed))
        takes = "takes" if len(guessed) == 1 else "take"
        sentence = (
            f"What {names} {takes} is not known, and every call that was tried with a "
            f"guess raises. {said[0].sentence}"
        )
        return [Finding("not_called", sentence, _HOW_TO_CALL, said[0].detail, _UNKNOWN)]

    def _best_reading(self) -> Reading | None:
        """The first reading that is right; else the first that ran."""
        layouts = self.layouts
        core = may_be_core(self.call, self.runner)
        base = self.first_call.find(layouts)
        if core and (base is None or not base.run.parameters.tensors):
            return self._best_core(core_layouts(self.subject))
        if base is None:
            if len(signature.axes(self.subject)) == 4:
                self.first_call.findings = []  # of calls with too few axes
            return self._best_core(heads_layouts(self.call, self.runner))
        reading = self._read_either_mask(base)
        if not reading.is_right and reading.refused:
            reading = self._less_refused(reading, layouts)
        return reading if reading.is_right else self._other_order(reading)

    def _other_order(self, reading: Reading) -> Reading:
        """With batch and sequence in the other order, which may make it right. What
        is written of an order may be about a step inside."""
        exchanged = reading.faults == ["batch_and_sequence_exchanged"]
        order = (cases.LAYER, cases.SEQUENCE_FIRST)
        others = set(self.layouts) & set(order) - {reading.base.case.layout}
        if others and (exchanged or self.order_is_written):
            other = self.first_call.find(tuple(others))
            second = self._read_either_mask(other) if other else reading
            if second.is_right or (
                self.order_is_written and second.names_more(reading)
            ):
                return second
        return reading

    def _less_refused(self, reading: Reading, layouts: tuple[str, ...]) -> Reading:
        """The layout in which more of the calls run, where nothing states it."""
        batched = (cases.LAYER, cases.SEQUENCE_FIRST)
        for layout in set(layouts) & set(batched) - {reading.base.case.layout}:
            base = self.first_call.find((layout,))
            if base is None or base.case.relation != "cross":
                continue
            other = self._read_either_mask(base)
            if other.beats(reading):
                return other
        return reading

    def _best_core(self, layouts: tuple[str, ...]) -> Reading | None:
        """The likeliest reading as attention by itself that no other beats."""
        best = None
        for layout in layouts:
            base = self.first_call.find((layout,))
            if base is None:
                continue
            reading = self._read_either_mask(base)
            if best is None or reading.beats(best):
                best = reading
            if best.is_right and not best.refused:
                break
        return best

    def _read_either_mask(self, base: Base) -> Reading:
        """What adds a mask may be meant to: then it is read as 0 and -inf, if that
        leaves fewer faults."""
        reading = self._read(base)
        if base.call_style.additive and self.options.mask is None:
            named = reading.is_right or base.call_style.biased
            return reading if named else self._not_additive(base, reading)
        is_stated = self.stated.mask is not None and not self._is_doubtful("mask")
        if "mask_added" not in reading.faults or is_stated:
            return reading
        if not documented.may_be_additive(self.call, self.subject):
            return reading
        boolean, self.stated = self.stated, replace(self.stated, mask="additive")
        second = self._read(
            replace(base, call_style=replace(base.call_style, additive=True))
        )
        named = second.verdict is not None and second.verdict["verdict"] != "unknown"
        if not named or len(second.faults) >= len(reading.faults):
            self.stated = boolean
            return reading
        second.say_additive("which leaves fewer faults")
        return second

    def _not_additive(self, base: Base, reading: Reading) -> Reading:
        """The text speaks of an additive mask, and may mean one that the code makes."""
        documented_as, self.stated = self.stated, replace(self.stated, mask=None)
        second = self._read(
            replace(base, call_style=replace(base.call_style, additive=False))
        )
        if second.is_right:
            return second
        self.stated = documented_as
        return reading

    def _read(self, base: Base) -> Reading:
        """Runs all cases that follow from `base` and has them judged."""
        reading = Reading(base)
        runs = Cases(self.runner, base, self.progress)
        runs.run_all()
        if self.options.inputs is not None:
            runs.run_users(self.options.inputs)
        reading.findings += runs.findings
        reading.taken, reading.refused = runs.taken, runs.refused
        reading.observations = self._observations(runs.kept)
        reading.understood = self._how_called(base, runs.kept)
        if runs.hopeless:
            return reading
        self.progress("verdict")
        judged = runs.kept
        self._judge_heads(reading, runs.kept)
        if self._is_named_twice(reading):
            judged = [r for r in runs.kept if "mask" not in r.arguments.masks]
            reading.observations = self._observations(judged)
            self._judge(reading, judged)
        against = self._against_text(reading, judged)
        if reading.is_right:
            reading.findings += runs.overflows()
        reading.say_polarity()
        reading.say_text(self.believed, against)
        self._say_additive(reading)
        self._say_layout(reading)
        reading.say_output(runs.kept)
        if reading.verdict and reading.verdict["verdict"] == "unknown":
            reading.findings += not_finite(runs.kept)
            if not_finite(runs.kept[:1]):
                reading.verdict = None  # that is what is wrong, mask or no mask
        return reading

    def _against_text(self, reading: Reading, kept: list[Run]) -> set[str]:
        """Judges once more without what the text may only seem to say, if the code
        does the opposite; what was not believed then."""
        doubtful = {fact for fact in self.believed if self._is_doubtful(fact)}
        inverted = {"mask_inverted", "padding_inverted"} & set(reading.faults)
        if not doubtful or not inverted:
            return set()
        believing = self.stated
        self.stated = replace(self.stated, **dict.fromkeys(doubtful))
        second = Reading(reading.base, self._observations(kept))
        self._judge(second, kept)
        self.stated = believing
        named = second.verdict is not None and second.verdict["verdict"] != "unknown"
        if not named or len(second.faults) >= len(reading.faults):
            return set()
        reading.verdict, reading.observations = second.verdict, second.observations
        return doubtful

    def _say_additive(self, reading: Reading) -> None:
        """Adds that the mask is taken to be added, where the text says so."""
        said = documented.additive(self.call, self.subject)
        masked = any("mask" in o.tensors for o in reading.observations)
        if self.options.mask or not (
            said and masked and reading.base.call_style.additive
        ):
            return
        name = documented.is_bias(self.call)
        reading.say_additive(
            f"by its name, `{said}`" if name else f'as it says: "{said}"'
        )

    def _say_layout(self, reading: Reading) -> None:
        """Adds that the batch is taken to come second, if it may come first."""
        sequence_first = reading.base.case.layout == cases.SEQUENCE_FIRST
        if reading.verdict is None or cases.LAYER not in self.layouts:
            return
        if self.order_is_written and reading.base.case.layout == cases.LAYER:
            reading.assume(
                "batch_first",
                "Inputs are (B, L, E): the (L, B, E) in its text is taken for a step "
                "inside.",
                "If inputs are (L, B, E), say `batch_first=False`.",
            )
        elif sequence_first and not self.order_is_written:
            reading.assume(
                "sequence_first",
                "Inputs are (L, B, E), which nothing in the code states.",
                "If they are (B, L, E), this is batch and sequence exchanged: say "
                "`batch_first=True`.",
            )

    def _is_named_twice(self, reading: Reading) -> bool:
        """Whether one parameter has the same fault as a mask and as padding: then it
        is for padding, and masks of other shapes are taken by chance."""
        twice = {"mask_inverted", "padding_inverted"} == set(reading.faults)
        return twice and not self.call.takes("padding")

    def _judge_heads(self, reading: Reading, kept: list[Run]) -> None:
        """The verdict, where nothing tells the number of heads with the likeliest
        that explains what was seen."""
        start = time.process_time()
        self._judge(reading, kept)
        is_quick = time.process_time() < start + _QUICK
        known = known_heads(kept[0], self.call, self.options.num_heads)
        if known or reading.verdict is None or reading.is_right:
            return
        likely, said = guessed_heads(kept[0]), list(reading.findings)
        first = reading.verdict, reading.observations, self.stated
        heads = self.stated.num_heads or likely[0]
        for guess in likely[1:_GUESSES] if is_quick and not reading.faults else ():
            self.stated = replace(self.stated, num_heads=guess)
            reading.observations = self._observations(kept)
            self._judge(reading, kept)
            if reading.faults or reading.is_right:
                heads = guess
                break
            reading.verdict, reading.observations, self.stated = first
        reading.findings = said
        if not reading.is_right:
            counted = "one head" if heads == 1 else f"{heads} heads"
            reading.assume(
                "num_heads",
                f"It is taken to have {counted}, which nothing in the code states.",
                "If it has another number, say `num_heads=`.",
            )

    def _judge(self, reading: Reading, kept: list[Run]) -> None:
        """The verdict; where names of weights mislead, once more without them."""
        try:
            reading.verdict = engine.explain(reading.observations)
            return
        except ValueError as error:
            complaint = engine.complaint(error)
        if self.options.num_heads and complaint.detail.startswith("num_heads must"):
            raise ValueError(f"check: {complaint.detail}")
        if all(run.parameters.by_flow for run in kept):
            for run in kept:
                run.parameters = run.parameters.by_flow
            reading.observations = self._observations(kept)
            with contextlib.suppress(ValueError):
                reading.verdict = engine.explain(reading.observations)
                return
        if self.options.inputs is not None and complaint.name != "no_weights_found":
            raise ValueError(f"check: inputs: {complaint.detail}")
        reading.findings.append(complaint)

    def _observations(self, kept: list[Run]) -> list[Observation]:
        return [observe(run, self.call, self.stated) for run in kept]

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
