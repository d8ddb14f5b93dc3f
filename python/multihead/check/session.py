# SPDX-License-Identifier: MIT
"""A check from target to report: how the code is called, which runs, what they say."""

import threading
import time
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from .calls import cases
from .calls.construct import Construction
from .capture.runner import Run, Runner
from .options import Options
from .reading import first_call, observation
from .reading.first_call import FirstCall
from .reading.observation import Observation, Stated
from .reading.suite import Cases, Progress, not_finite
from .report import Finding, Report
from .sandbox.guard import Guard, Stop, is_of_arguments
from .subject import documented, signature, stated
from .subject.target import Subject, load, scope

_RIGHT = ("bits", "rounding")
_QUOTED = 120  # characters of a sentence
_OTHER = {"blocked": "keep", "keep": "blocked"}
_VERBS = {"blocked": "blocks", "keep": "keeps"}
_MEANS = {"blocked": "blocked", "keep": "may be seen"}
_POLARITIES = {
    "mask": (
        "The mask is read as True (or 1) = blocked.",
        'If True is meant to be seen, say mask="keep".',
    ),
    "padding": (
        "The padding mask is read as True (or 1) = padding.",
        'If True is meant to mark real tokens, say mask="keep".',
    ),
}
# A check sets what is one for the whole process: streams, seeds, types, signals.
_turn = threading.RLock()
_GUESSES = 3  # numbers of heads that are tried where nothing tells them
_QUICK = 2.0  # seconds of a verdict that is quick: only then others are tried


def examine(
    target: object, options: Options, progress: Progress | None = None
) -> Report:
    """Runs a check; see multihead.check. progress is told the name of each case.
    Checks in several threads take turns.

    Raises ValueError and FileNotFoundError where there is nothing to check.
    """
    with _turn, Guard(options.time_limit) as guard:
        start = time.monotonic()
        tell = progress or (lambda name: None)
        tell("loading")
        try:
            subject, options = _loaded(target, options, guard)
        except Stop as unreachable:
            return Report(str(target), None, unreachable.findings)
        tell("first call")
        examination = Examination(subject, options, guard, tell)
        try:
            verdict = examination.verdict()
        except Stop as stop:
            verdict = None
            examination.findings = stop.findings
        name = f"{subject.name} ({subject.where})" if subject.where else subject.name
        remarks = examination.runner.remarks.values()
        findings = [*examination.findings, *remarks, *subject.findings]
        seconds = time.monotonic() - start
        return Report(name, verdict, findings, examination.understood, seconds)


def _loaded(target: object, options: Options, guard: Guard) -> tuple[Subject, Options]:
    """What is to be called, and the options, with the inputs that a call brings."""
    if options.call is None:
        return load(target, guard), options
    written = stated.read(options.call, scope(target, guard), guard)
    return written.subject, replace(options, inputs=written.inputs, call=None)


@dataclass
class Reading:
    """What one way to call the code gave."""

    base: Run
    observations: list[Observation] = field(default_factory=list)
    verdict: dict | None = None
    findings: list[Finding] = field(default_factory=list)
    understood: list[str] = field(default_factory=list)
    # Kinds of calls by name.
    taken: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    @property
    def is_right(self) -> bool:
        return self.verdict is not None and self.verdict["verdict"] in _RIGHT

    @property
    def faults(self) -> list[str]:
        return [fault["name"] for fault in (self.verdict or {}).get("faults", [])]

    def beats(self, likelier: "Reading") -> bool:
        """Whether it is to be believed instead of a likelier one: it takes all calls
        that the other takes, and is right or takes more of them. A
        less likely reading that only finds another fault proves nothing."""
        if self.verdict is None or not likelier.taken <= self.taken:
            return False
        exculpates = self.is_right and not likelier.is_right
        return exculpates or bool(self.taken & likelier.refused)

    def names_more(self, other: "Reading") -> bool:
        """Whether it names faults where the other finds none that it knows, or more."""
        count = len(other.faults) or len(self.faults) + 1
        return 0 < len(self.faults) < count

    def explains_more(self, other: "Reading") -> bool:
        """Whether it comes to a verdict with fewer faults."""
        named = self.verdict is not None and self.verdict["verdict"] != "unknown"
        return named and len(self.faults) < len(other.faults)

    def assume(self, name: str, sentence: str, remedy: str = "") -> None:
        """Adds what the runs themselves assumed, which the engine cannot know."""
        said = {"name": name, "sentence": sentence, "remedy": remedy}
        self.verdict.setdefault("assumptions", []).append(said)

    def say_polarity(self) -> None:
        """Adds the polarity that was the engine's first choice, so it says nothing."""
        if self.verdict is None:
            return
        known = {a["name"] for a in self.verdict.get("assumptions", [])}
        for fact, (sentence, remedy) in _POLARITIES.items():
            tensor = "key_padding_mask" if fact == "padding" else fact
            open_to_both = any(
                tensor in o.tensors and not o.metadata.keys() & {fact, "mask"}
                for o in self.observations
            )
            if fact == "mask" and "mask_added" in self.faults:
                remedy = (
                    'If 0 and -inf are meant, which are added, say mask="additive".'
                )
            said = f"{fact}_keeps" in known or f"{fact}_ignored" in self.faults
            if open_to_both and not said:
                self.assume(f"{fact}_blocks", sentence, remedy)

    def say_text(self, believed: dict[str, documented.Said], against: set[str]) -> None:
        """Adds what the code's text was believed to say of its masks, and quotes it;
        `against`: the masks of which the numbers say the opposite."""
        if self.verdict is None:
            return
        for fact, said in believed.items():
            of_keys = "padding" not in believed  # a mask that is used as padding
            facts = ("mask", "padding") if fact == "mask" and of_keys else (fact,)
            read = {o.metadata.get(key) for o in self.observations for key in facts}
            quote = said.quote.replace("`", "'")
            quote = quote if len(quote) <= _QUOTED else quote[:_QUOTED] + "…"
            what = "The padding mask" if fact == "padding" else "The mask"
            meant = f"True (or 1) = {_MEANS[said.meaning]}"
            if fact in against:
                self.assume(
                    f"{fact}_against_text",
                    f'{what} is not read as its text may say: "{quote}".',
                    f'If {meant} is meant, say mask="{said.meaning}": then it is '
                    "inverted.",
                )
            elif said.meaning in read:
                self.assume(
                    f"{fact}_{_VERBS[said.meaning]}",
                    f'{what} is read as {meant}, as its text says: "{quote}".',
                    f'If that is not meant, say mask="{_OTHER[said.meaning]}".',
                )
                for fault in self.verdict.get("faults", []):
                    if fault["name"] in [f"{key}_inverted" for key in facts]:
                        fault["detail"] = f'Its text says: "{quote}".'

    def say_additive(self, why: str) -> None:
        """Adds that the mask is read as numbers to add, and why."""
        if self.verdict is not None:
            self.assume(
                "mask_additive",
                f"The mask is read as added to the scores, {why}.",
                'If it is True and False, say mask="blocked" or "keep": added, they '
                "block nothing.",
            )

    def say_output(self, kept: list[Run]) -> None:
        """Adds that nothing is projected out, where several heads are projected in."""
        if self.verdict is None or self.verdict["verdict"] == "unknown":
            return
        matched = self.verdict.get("weights", [])
        projected_out = any(m.startswith("output") for m in matched)
        one_head = self.observations[0].metadata["num_heads"] == "1"
        if kept[0].parameters.tensors and not one_head and not projected_out:
            self.assume(
                "no_output_projection",
                "There is no output projection; it is judged as attention without one.",
                "In multi-head attention one more matrix follows: `out = W_o(merged)`.",
            )

    def say_settings(self, construction: Construction | None) -> None:
        """Adds what nobody could know that the code reads of its configuration."""
        if self.verdict is None or construction is None or not construction.blind:
            return
        names = " and ".join(f"`{name}`" for name in construction.blind)
        self.assume(
            "settings",
            f"{names} of its configuration, of which nothing says what it is, is None.",
            "Check an instance that is made with yours, or say how by `call=`.",
        )


class Examination:
    """The steps of a check. `findings` and `understood` grow on the way."""

    def __init__(
        self, subject: Subject, options: Options, guard: Guard, progress: Progress
    ):
        self.subject, self.options, self.progress = subject, options, progress
        self.call = signature.read(subject)
        self.runner = Runner(subject, self.call, guard, options.weights or {})
        self.first_call = FirstCall(self.runner, options)
        self.layouts = first_call.layer_layouts(subject, options, self.call)
        self.order_is_written = (
            cases.LAYER in self.layouts
            and first_call.written_batch_first(subject) is False
        )
        self.believed: dict[str, documented.Said] = {}  # "mask", "padding"
        self.stated = self._stated()
        self.findings: list[Finding] = []
        self.understood: list[str] = list(self.call.guesses)

    def _stated(self) -> Stated:
        """What the user, or the type of the code, says beyond doubt."""
        mha_like = issubclass(self.subject.type, nn.MultiheadAttention)
        known = mha_like or self.call.is_pytorchs_layer
        mask = self.options.mask or ("blocked" if known else None)
        if mask is None and self.first_call.styles()[0].additive:
            mask = "additive"
        written = documented.meaning_of_mask(self.call, self.subject)
        mask = mask or self._believe("mask", written)
        if mask is None and self.call.is_as_pytorchs:
            mask = "blocked"
        heads = self.options.num_heads, self.options.num_kv_heads
        return Stated(*heads, mask, self._stated_padding(), self.options.causal)

    def _stated_padding(self) -> str | None:
        """What is written about padding; what the user says of a mask goes for it,
        too, and before that where it is the only one."""
        if self.call.is_pytorchs_layer:
            return "blocked"
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
        """Why nothing ran. What a call by guesses raises is not the code's fault."""
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
        remedy = (
            "State it: check a function that calls it with them filled in, "
            "`lambda q, k, v: attend(q, k, v, ...)`, or give a call of yours by "
            "`inputs=`."
        )
        return [
            Finding("not_called", sentence, remedy, said[0].detail, kind="unchecked")
        ]

    def _best_reading(self) -> Reading | None:
        """The first reading that is right; else the first that ran."""
        core = first_call.may_be_core(self.call, self.runner)
        base = self.first_call.find(self.layouts)
        if core and (base is None or not base.parameters.tensors):
            return self._best_core(first_call.core_layouts(self.subject))
        if base is None:
            others = first_call.heads_layouts(self.call, self.runner)
            if others and len(signature.axes(self.subject)) == 4:
                self.first_call.findings = []  # of calls with too few axes
            return self._best_core(others)
        reading = self._read_either_mask(base)
        if not reading.is_right and reading.refused:
            reading = self._less_refused(reading)
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
            named = self.order_is_written and second.names_more(reading)
            return second if second.is_right or named else reading
        return reading

    def _less_refused(self, reading: Reading) -> Reading:
        """The layout in which more of the calls run, where nothing states it."""
        batched = (cases.LAYER, cases.SEQUENCE_FIRST)
        for layout in set(self.layouts) & set(batched) - {reading.base.case.layout}:
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

    def _read_either_mask(self, base: Run) -> Reading:
        """Also with a mask of 0 and -inf if it is added: what leaves fewer faults."""
        reading = self._read(base)
        if base.case.style.additive and self.options.mask is None:
            named = reading.is_right or base.case.style.biased
            return reading if named else self._not_additive(base, reading)
        is_stated = self.stated.mask is not None and not self._is_doubtful("mask")
        if "mask_added" not in reading.faults or is_stated:
            return reading
        if not documented.may_be_additive(self.call, self.subject):
            return reading
        boolean, self.stated = self.stated, replace(self.stated, mask="additive")
        second = self._read(_adding(base, True))
        if not second.explains_more(reading):
            self.stated = boolean
            return reading
        second.say_additive("which leaves fewer faults")
        return second

    def _not_additive(self, base: Run, reading: Reading) -> Reading:
        """The text speaks of an additive mask, and may mean one that the code makes."""
        documented_as, self.stated = self.stated, replace(self.stated, mask=None)
        second = self._read(_adding(base, False))
        if second.is_right:
            return second
        self.stated = documented_as
        return reading

    def _read(self, base: Run) -> Reading:
        """Runs all cases that follow from `base` and has them judged."""
        reading = Reading(base)
        runs = Cases(self.runner, base, self.progress)
        runs.run_all()
        if self.options.inputs is not None:
            runs.run_users(self.options.inputs)
        reading.findings += runs.findings
        reading.taken, reading.refused = runs.taken, runs.refused
        reading.understood = self._how_called(base, runs.kept)
        if runs.hopeless:
            return reading
        self.progress("verdict")
        judged = runs.kept
        self._judge_heads(reading, runs.kept)
        inverted = set(reading.faults) == {"mask_inverted", "padding_inverted"}
        if inverted and not self.call.takes("padding"):
            # One parameter, for padding: masks of other shapes are taken by chance.
            judged = [r for r in runs.kept if "mask" not in r.arguments.masks]
            self._judge(reading, judged)
        against = self._against_text(reading, judged)
        if reading.is_right:
            reading.findings += runs.overflows()
        reading.say_polarity()
        reading.say_text(self.believed, against)
        self._say_additive(reading)
        self._say_layout(reading)
        reading.say_output(runs.kept)
        reading.say_settings(self.runner.construction)
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
        second = Reading(reading.base)
        self._judge(second, kept)
        self.stated = believing
        if not second.explains_more(reading):
            return set()
        reading.verdict, reading.observations = second.verdict, second.observations
        return doubtful

    def _say_additive(self, reading: Reading) -> None:
        """Adds that the mask is taken to be added, where the text says so."""
        said = documented.additive(self.call, self.subject)
        masked = any("mask" in o.tensors for o in reading.observations)
        added = reading.base.case.style.additive and not self.options.mask
        if said and masked and added:
            by_name = documented.is_bias(self.call)
            why = f"by its name, `{said}`" if by_name else f'as it says: "{said}"'
            reading.say_additive(why)

    def _say_layout(self, reading: Reading) -> None:
        """Adds that the batch is taken to come second, if it may come first."""
        if reading.verdict is None or cases.LAYER not in self.layouts:
            return
        layout = reading.base.case.layout
        if self.order_is_written and layout == cases.LAYER:
            reading.assume(
                "batch_first",
                "Inputs are (B, L, E): the (L, B, E) in its text is taken for a step "
                "inside.",
                "If inputs are (L, B, E), say `batch_first=False`.",
            )
        elif layout == cases.SEQUENCE_FIRST and not self.order_is_written:
            reading.assume(
                "sequence_first",
                "Inputs are (L, B, E), which nothing in the code states.",
                "If they are (B, L, E), this is batch and sequence exchanged: say "
                "`batch_first=True`.",
            )

    def _judge_heads(self, reading: Reading, kept: list[Run]) -> None:
        """The verdict; the likeliest number of heads where nothing tells it."""
        start = time.process_time()
        self._judge(reading, kept)
        is_quick = time.process_time() < start + _QUICK
        known = observation.known_heads(kept[0], self.call, self.options.num_heads)
        if known or reading.verdict is None or reading.is_right:
            return
        likely, said = observation.guessed_heads(kept[0]), list(reading.findings)
        first = reading.verdict, reading.observations, self.stated
        heads = self.stated.num_heads or likely[0]
        for guess in likely[1:_GUESSES] if is_quick and not reading.faults else ():
            self.stated = replace(self.stated, num_heads=guess)
            self._judge(reading, kept)
            if reading.faults or reading.is_right:
                heads = guess
                break
            reading.verdict, reading.observations, self.stated = first
        reading.findings = said
        if reading.is_right:
            return
        counted = "one head" if heads == 1 else f"{heads} heads"
        reading.assume(
            "num_heads",
            f"It is taken to have {counted}, which nothing in the code states.",
            "If it has another number, say `num_heads=`.",
        )

    def _judge(self, reading: Reading, kept: list[Run]) -> None:
        """The verdict; where names of weights mislead, once more without them."""
        complaint = self._explain(reading, kept)
        if complaint is None:
            return
        if self.options.num_heads and complaint.detail.startswith("num_heads must"):
            raise ValueError(f"check: {complaint.detail}")
        if all(run.parameters.by_flow for run in kept):
            for run in kept:
                run.parameters = run.parameters.by_flow
            if self._explain(reading, kept) is None:
                return
        if self.options.inputs is not None and complaint.name != "no_weights_found":
            raise ValueError(f"check: inputs: {complaint.detail}")
        reading.findings.append(complaint)

    def _explain(self, reading: Reading, kept: list[Run]) -> Finding | None:
        """Has the engine judge the runs; what it complains of where it cannot."""
        seen = [observation.observe(run, self.call, self.stated) for run in kept]
        reading.observations = seen
        try:
            reading.verdict = observation.explain(seen)
        except ValueError as error:
            return observation.complaint(error)
        return None

    def _how_called(self, base: Run, kept: list[Run]) -> list[str]:
        called = f"{self.subject.name}({kept[0].arguments})"
        said = [call for call in (self.runner.constructed, called) if call]
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


def _adding(base: Run, additive: bool) -> Run:
    style = replace(base.case.style, additive=additive)
    return replace(base, case=replace(base.case, style=style))
