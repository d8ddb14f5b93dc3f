# SPDX-License-Identifier: MIT
"""A check from target to report: how the code is called, which runs, what they say."""

import functools
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from .calls import cases, forms, undefined
from .calls.models import has_head_behind
from .calls.one_by_one import is_stepwise, one_by_one
from .calls.unusual import FORMS_LEFT, beside_plain, in_said_forms, in_unusual_forms
from .capture import devices, weights
from .capture.runner import Run, Runner
from .options import Options
from .reading import (
    apart,
    at_last,
    core,
    effort,
    fewer_calls,
    flaws,
    guessing,
    observation,
    on_cache,
    paths,
    plans,
    pools,
    refused,
    wiring,
)
from .reading.effort import Effort
from .reading.first_call import FirstCall, is_over
from .reading.layouts import (
    core_layouts,
    heads_layouts,
    is_told_heads,
    layer_layouts,
    may_be_core,
    written_batch_first,
)
from .reading.observation import NO_WEIGHTS, Stated
from .reading.plans import Meaning
from .reading.suite import Cases, Progress
from .reading.ways import Reading, Way, likeliest
from .report import Finding, Report
from .sandbox.guard import Guard, Stop
from .subject import documented, promised, signature, stated, strays
from .subject.documented import Said
from .subject.roles import role_of_name, speaks
from .subject.target import Subject, load, scope

_UNEXPLAINED, _UNREADABLE = 2, 3  # instead of a number of faults
# A check sets what is one for the whole process: streams, seeds, types, signals.
_turn = threading.RLock()
_GUESSES = 3  # numbers of heads that are tried where nothing tells them
_READ = 2  # ways to call it that are judged where attention explains none
_ROLES_SECONDS = 3.0  # to find one with the sequences in another order
_FORMS_SECONDS = 4.0  # to find a call in all unusual forms, on a slow machine
_FORMS_TRIED, _FORMS_CALLS = 60, 250  # in each of them; in all, whatever they take


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
            found = unreachable.findings
            if options.call is None:  # else whose fault it is has been said
                found = guessing.of_no_code(found)
            return Report(str(target), None, found, allow=options.allowed)
        tell("first call")
        examination = Examination(subject, options, guard, tell)
        try:
            verdict = examination.verdict()
        except Stop as stop:
            verdict = None
            examination.findings = guessing.of_calls(stop.findings, examination.made_up)
        name = f"{subject.name} ({subject.where})" if subject.where else subject.name
        remarks = list(examination.runner.remarks.values())
        if verdict is None:  # what it leaves behind is beside the point
            remarks = list(map(guessing.by_the_way, remarks))
        findings = [*examination.findings, *remarks, *subject.findings]
        seconds = time.monotonic() - start
        understood = examination.understood
        return Report(name, verdict, findings, understood, seconds, options.allowed)


def _loaded(target: object, options: Options, guard: Guard) -> tuple[Subject, Options]:
    """What is to be called, and the options, with the inputs that a call brings."""
    if options.call is None:
        return undefined.define(load(target, guard), target), options
    written = stated.read(options.call, scope(target, guard), devices.OnCpu(guard))
    return written.subject, replace(options, inputs=written.inputs, call=None)


class Examination:
    """The steps of a check. `findings` and `understood` grow on the way."""

    def __init__(
        self, subject: Subject, options: Options, guard: Guard, progress: Progress
    ):
        self.subject, self.options, self.progress = subject, options, progress
        self.call = documented.read_call(subject)
        subject.findings += strays.of_file(subject, self.call)
        self.runner = Runner(subject, self.call, guard, options.weights or {})
        self.first_call = FirstCall(self.runner, options)
        self.layouts = layer_layouts(subject, options, self.call)
        is_written = written_batch_first(subject) is False
        self.order_is_written = is_written and cases.LAYER in self.layouts
        self.believed: dict[str, Said] = {}  # "mask", "padding"
        self.stated = self._stated()
        self.findings: list[Finding] = []
        self.understood = list(self.call.guesses)
        self._effort = Effort()
        self._readings: list[Reading] = []  # all that were judged
        self._counted: dict[tuple, int] = {}  # with how many faults a run is explained

    @property
    def made_up(self) -> dict[str, str]:
        """What a call has that nobody understood; a run may add to it."""
        return guessing.kinds(self.call, self.runner.construction)

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
        """What is written about padding; what is said of its only mask goes first."""
        if self.call.is_pytorchs_layer:
            return "blocked"
        written = documented.meaning_of_padding(self.call, self.subject)
        said = self.options.mask if self.options.mask != "additive" else None
        if said and not (written and self.call.takes("mask")):
            return said
        return self._believe("padding", written)

    def _believe(self, fact: str, said: Said | None) -> str | None:
        """The meaning that the text gives a mask; a sentence is kept to be quoted."""
        if said is not None and said.quote:
            self.believed[fact] = said
        return said.meaning if said else None

    def verdict(self) -> dict | None:
        """That on the best reading; None if nothing ran, or a guess may be what is wrong."""
        reading = self._best_reading()
        if reading is None:
            self.findings += refused.complaints(
                self.first_call,
                self.layouts,
                lambda way: self._fewest_faults(way) < _UNEXPLAINED,
            )
            return None
        self._judge_parts(reading)
        ways = reading.way.built_otherwise if reading.is_right else []
        others = (self._better(None, w) for w in ways if self._fewest_faults(w, 0))
        for other in itertools.chain(reading.in_other_forms(self._readings), others):
            self._judge_parts(other)
            if other.faults or (other.is_right and not reading.is_right):
                reading = other
                break
        if reading.is_right:
            reading = paths.settle(reading, self._better, self._judge_parts)
        way = reading.way
        same = (one for one in self._readings if one.way is way)
        others = itertools.chain(same, self._unread(reading))
        said = at_last.settle(reading, others, self._promises)
        self.findings += guessing.of_calls(reading.findings, way.made_up)
        self.understood = reading.understood + way.kept_of(self.understood, self.call)
        if said:
            self.findings = said
            return None
        return reading.verdict

    def _judge_parts(self, reading: Reading) -> None:
        """Where nothing explains all of it: the verdict on a part of the calls, if
        these are wrong; or on what its heads do, if that is, or if what stands beside
        it may be why the rest is not explained."""
        if reading.is_right or reading.faults or not reading.kept:
            return
        if reading.verdict is not None and not reading.beside:
            apart.explained(reading, self._judge)
            if reading.faults:
                return
        # Masks may have another meaning, which only the heads show.
        same = (r for r in self._readings if r.way is reading.way)
        others = [r for r in same if r is not reading]
        reading.findings = wiring.settled(reading.findings)
        if (verdict := core.judge([reading, *others], self._promises)) is None:
            return
        if any(fault["stage"] == "masked scores" for fault in verdict["faults"]):
            verdict = self._with_added_masks(reading, verdict)
        ends = [] if reading.beside else reading.at_its_ends
        seen = reading.way.runner.subject, reading.kept[0].out
        part = reading.layers_beside or has_head_behind(*seen)
        if part or verdict["faults"] or core.answers(reading) or ends:
            reading.verdict = verdict
            answered = {NO_WEIGHTS} | core.answered(reading.kept)
            reading.findings = [f for f in reading.findings if f.name not in answered]
            if not verdict["faults"]:
                on_cache.compare(reading)
                reading.findings += ends or reading.around_heads
        else:
            reading.findings.append(core.HEADS_RIGHT)

    def _meanings(self, way: Way) -> list[Meaning]:
        stated = self.options, self.believed, self.stated
        return list(plans.meanings(way.call, self.subject, *stated))

    def _with_added_masks(self, reading: Reading, verdict: dict) -> dict:
        """The better verdict on heads, whose masks may be meant to be added."""
        for added in self._unread(reading):
            later = core.judge([added], self._promises)
            if later is not None and observation.is_better(later, verdict):
                reading.meaning, reading.kept = added.meaning, added.kept
                return later
        return verdict

    def _unread(self, reading: Reading) -> Iterator[Reading]:
        """The same calls with masks of other meanings, mostly such as are added."""
        way = reading.way
        read = {r.meaning.additive for r in self._readings if r.way is way}
        for meaning in (m for m in self._meanings(way) if m.additive not in read):
            kept = self._run_all(way, meaning.additive).kept
            if any(run.arguments.masks for run in kept):
                other = replace(reading, meaning=meaning, kept=kept)
                other.facts = self._facts(other, kept)
                yield other

    def _best_reading(self) -> Reading | None:
        """The first reading that is right, of a way whose first call is attention; else
        the best of those that are nearest to it."""
        others: list[tuple[int, Way]] = []
        best = None
        for way in self._ways():
            faults = self._fewest_faults(way, most=0)
            if faults == 0:
                best = self._better(best, way)
                if best.is_right and not best.refused:
                    return best
            others.append((faults, way))
        return best or self._best_of(others or pools.ways(self.first_call))

    def _best_of(self, ways: list[tuple[int, Way]]) -> Reading | None:
        """The best reading of ways that have one fault or more: 1 may become more."""
        best, is_only = None, len(ways) == 1
        for _ in range(min(_READ, len(ways))):
            # What one call needs, all need: others could not explain them better.
            known = len(best.faults) if best and not best.refused else 0
            if known == 1:
                break
            for place, (faults, way) in enumerate(() if is_only else ways):
                ways[place] = self._fewest_faults(way) if faults == 1 else faults, way
                if ways[place][0] == 1:  # it is read next
                    break
            faults, way = likeliest(ways)
            if 0 < known <= faults:
                break
            ways = [one for one in ways if one[1] is not way]
            best = self._better(best, way)
            if best.is_right and not best.refused:
                break
        return best

    def _better(self, best: Reading | None, way: Way) -> Reading:
        """`best`, or the reading of `way` that beats it."""
        runs: dict[bool, Cases] = {}  # by whether masks are added
        meanings = self._meanings(way)
        if wiring.attentions(way.base):  # whether masks are added, its heads tell
            meanings = [m for m in meanings if not (m.additive and m.why)] or meanings
        # A little may tell which of several things masks mean, or that there are other
        # layers; else what is right would wait for all faults of something else.
        is_guess = way.form is not None and bool(way.form.guess)
        whole = effort.OF_FORM if is_guess else effort.OF_ONE
        for most in (effort.LITTLE, whole):
            found, read, spent = best, len(self._readings), self._effort.spent
            for meaning in meanings:
                if meaning.additive not in runs:
                    runs[meaning.additive] = self._run_all(way, meaning.additive)
                with self._effort.at_most(most):
                    reading = self._read(way, meaning, runs[meaning.additive])
                self._readings.append(reading)
                if found is None or reading.beats(found):
                    found = reading
                if found.is_right or not (found.blames_masks or found.beside):
                    break
            is_known = len(meanings) > 1 or found is not best
            is_other = found is not best and found.has_other_layers
            if is_known and (found.is_right or found.faults) or is_other:
                break
            if most != whole:
                with self._effort.at_most(effort.LITTLE):
                    is_partly = apart.is_explained(found, self._judge)
                self._effort.allowed = effort.OF_PART if is_partly else effort.OF_ALL
                del self._readings[read:]
                self._effort.spent = spent
        return found

    def _ways(self) -> Iterator[Way]:
        """The ways to call it that it takes, likeliest first: in an unusual form where
        its text or a name says so, or where it takes no other."""
        subject, call, found = self.subject, self.call, False
        for way in self._in_forms(in_said_forms(subject, call)):
            found = True
            yield way
        if found:
            return
        for way in self._plain_ways():
            found = found or not cases.unbatched(way.base.case)
            yield way
            if not found and call.style == "x" and cases.IMAGE not in self.layouts:
                # What takes images may take a sequence of no items by chance.
                base = self.first_call.find((cases.IMAGE,))
                yield from [Way(self.runner, base)] if base else []
        refusals = [f.sentence for f in self.first_call.findings]
        beside = beside_plain if found else one_by_one
        for way in self._in_forms(beside(subject, call)):
            found = True
            yield way
        if not found:
            is_core = may_be_core(call, self.runner)
            others = in_unusual_forms(subject, call, refusals, is_core)
            yield from self._in_forms(others)

    def _in_forms(self, tried: Iterable[forms.Form]) -> Iterator[Way]:
        """Those in such a form; of a user's inputs they keep what is no sequence."""
        options, found = replace(self.options, inputs=None), False
        seconds, calls = _FORMS_SECONDS, _FORMS_CALLS
        for form in tried:
            if is_over(seconds, calls):
                if not found:
                    self.findings.append(FORMS_LEFT)
                return
            form.keep(self.options.inputs)
            runner = self.runner.calling(form.call, form.subject)
            finder = FirstCall(runner, options, seconds)
            named = "batch", "queries", "shares_queries", "kv_heads"
            known = {name: v for name in named if (v := getattr(form, name))}
            known |= {"columns": form.side, "window": "side"} if form.side else {}
            finder.sizes = [replace(s, **known) for s in finder.sizes]
            finder.extends, finder.most, finder.least = False, _FORMS_TRIED, calls
            base = finder.find(form.layouts or self.layouts)
            base = finder.find_at_its_length(base) if form.side else base
            seconds, calls = seconds - finder.spent, finder.least
            self.first_call.ended = self.first_call.ended or finder.ended
            if base is not None and (not form.shares_queries or guessing.asks(base)):
                found = True
                yield Way(runner, base, form)

    def _plain_ways(self) -> Iterator[Way]:
        """Those with the tensors that are usual for its layouts."""
        seconds = _ROLES_SECONDS
        for roles in plans.roles(self.call, self.subject):
            call, runner, finder = self.call, self.runner, self.first_call
            if roles and seconds <= 0:
                return
            if roles:
                named = {n for n, r in roles.items() if role_of_name(n) == r}
                guessed = call.guessed - named
                call = replace(call, roles={**call.roles, **roles}, guessed=guessed)
                runner = runner.calling(call)
                finder = FirstCall(runner, self.options, seconds)
            layouts = self.layouts
            base = finder.find(layouts)
            if base is not None and guessing.ignores_context(base, runner):
                call = guessing.without_context(call)
                self.understood += call.guesses[-1:]
                runner = runner.calling(call)
                finder = FirstCall(runner, self.options)
                base = finder.find(layouts)
            if may_be_core(call, runner):
                if base is None or not base.parameters.tensors:
                    layouts = core_layouts(self.subject, self.options)
                    base = finder.find(layouts)
            elif base is None or is_told_heads(call, base):
                if base is not None:  # it may cut them itself
                    yield Way(runner, base)
                is_told = base is not None or runner.has_no_matrices
                layouts = heads_layouts(call, runner, is_told)
                if layouts and len(signature.axes(self.subject)) == 4:
                    finder.findings = []  # of calls with too few axes
                base = finder.find(layouts) if layouts else None
            while base is not None:
                yield Way(runner, base)
                layouts = cases.others(base.case, layouts)
                base = finder.find_like(base, layouts) if layouts else None
            seconds -= finder.spent if roles else 0.0

    def _fewest_faults(self, way: Way, most: int = 1) -> int:
        """With how many attention explains its first call, in little time."""
        known = observation.known_heads(way.base, way.call, self.options.num_heads)
        guesses = [known] if known else observation.guessed_heads(way.base)[:_GUESSES]
        flow, fewest = way.base.parameters.by_flow, _UNREADABLE
        unnamed = replace(way.base, parameters=flow) if flow is not None else None
        for base, heads in itertools.product((way.base, unnamed), guesses):
            if base is None or (base is unnamed and fewest < _UNREADABLE):
                break  # names of weights are understood
            stated = replace(self.stated, num_heads=heads)
            seen = observation.observe(base, way.call, stated)
            seen.metadata["search_effort"] = repr(1 / len(guesses))
            fewest = min(fewest, observation.fewest_faults(seen, most))
            if fewest == 0:
                break
        return fewest

    def _run_all(self, way: Way, additive: bool) -> Cases:
        """All runs that follow from its first call."""
        style = replace(way.base.case.style, additive=additive)
        base = replace(way.base, case=replace(way.base.case, style=style))
        runs = Cases(way.runner, base, self.progress)
        runs.run_all()
        if self.options.inputs is not None and way.form is None:
            runs.run_users(self.options.inputs)
        self.progress("verdict")
        return runs

    def _read(self, way: Way, meaning: Meaning, runs: Cases) -> Reading:
        """Has all runs judged that follow from a first call."""
        reading = Reading(way, meaning, mask_doubt=runs.masks_passed_over())
        of_masks = wiring.of_masks(way.call, runs.kept)
        reading.findings += runs.findings + way.findings + of_masks
        filled = flaws.filling_weights(runs.kept)
        reading.findings += [flaws.MASK_AFTER_SOFTMAX] * bool(filled)
        judged = [run for run in runs.kept if run not in filled]
        reading.kept = [run for run in judged if run not in runs.by_chance]
        reading.taken, reading.refused = set(runs.taken), set(runs.refused)
        reading.understood = way.said(self.subject, runs.kept)
        if runs.hopeless or not judged:
            return reading
        self._judge_heads(reading, judged)
        fewer_calls.judge(reading, judged, self._judge)
        if is_stepwise(way.runner.subject):
            on_cache.judge_steps(reading)
        elif reading.is_right:
            on_cache.judge(reading, self._judge)
        if reading.is_right:
            reading.findings += runs.overflows()
        apart.judge(reading, runs, self._judge)
        return reading

    def _facts(self, reading: Reading, kept: list[Run]) -> dict[str, str]:
        """Where facts come from: texts that are believed, and what is guessed. The
        engine has the words for them, and knows which decide."""
        way, call, case = reading.way, reading.way.call, reading.way.base.case
        construction, facts = reading.way.runner.construction, {}
        for fact, said in self.believed.items():
            facts[f"{fact}_says"] = said.meaning
            facts[f"{fact}_text"] = documented.quoted(said.quote)
        if reading.meaning.additive and not self.options.mask:
            said = documented.additive(call, self.subject)
            key = "additive_name" if documented.is_bias(call) else "additive_text"
            is_said = said and not reading.meaning.why
            facts |= {key: said} if is_said else {"additive_guessed": "true"}
        facts |= dict.fromkeys(reading.told, "true")
        facts |= {"padding_of_rows": "true"} if call.masks_rows else {}
        if said := documented.causal(self.subject, call.insists_on("context")):
            facts["causal_text"] = documented.quoted(said)
        layout, of_steps = case.layout, (cases.SEQUENCE_FIRST, *cases.OF_STEPS)
        if cases.LAYER in self.layouts:
            inside = self.order_is_written and layout == cases.LAYER and not way.form
            guessed = not self.order_is_written and layout in of_steps
            facts |= {"order_inside": "true"} if inside else {}
            facts |= {"order_guessed": "true"} if guessed else {}
        if not observation.known_heads(kept[0], call, self.options.num_heads):
            facts["num_heads_guessed"] = "true"
        if scaled := observation.asked_to_scale(call, construction):
            facts["asked_to_scale"] = scaled
        facts |= construction.facts if construction is not None else {}
        if made_up := reading.way.made_up:
            facts["made_up"] = ",".join(sorted(set(made_up.values())))
        if case.relation == "equal" and not (call.is_packed or call.takes("documents")):
            facts["takes_only"] = "equal_lengths"
        if reading.leaves_keys:
            facts["takes_only"] = "as_many_keys"
        if case.relation == "self" and call.style == "qkv":
            facts["takes_only"] = "one_sequence"
        return facts

    def _judge_heads(self, reading: Reading, kept: list[Run]) -> None:
        """The verdict; the likeliest number of heads where nothing tells it."""
        spent, call = self._effort.spent, reading.way.call
        stated = reading.meaning.stated
        known = observation.known_heads(kept[0], call, self.options.num_heads)
        if not known and observation.has_one_head(kept):
            stated = replace(stated, num_heads=1)
            reading.meaning = replace(reading.meaning, stated=stated)
        self._judge(reading, kept)
        is_quick = self._effort.was_quick(spent)
        if known or reading.verdict is None or reading.is_right:
            return
        likely, said = observation.guessed_heads(kept[0]), list(reading.findings)
        first = reading.verdict, reading.observations, reading.meaning
        for guess in likely[1:_GUESSES] if is_quick and not reading.faults else ():
            guessed = replace(stated, num_heads=guess)
            reading.meaning = replace(first[2], stated=guessed)
            self._judge(reading, kept)
            if reading.faults or reading.is_right:
                break
            reading.verdict, reading.observations, reading.meaning = first
        reading.findings = said

    def _judge(self, reading: Reading, kept: list[Run]) -> None:
        """The verdict; where names of weights mislead, once more without them."""
        if self._judge_by_flow(reading, kept):
            return
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
        if self.options.inputs is not None and complaint.name != NO_WEIGHTS:
            raise ValueError(f"check: inputs: {complaint.detail}")
        reading.findings.append(complaint)

    def _judge_by_flow(self, reading: Reading, kept: list[Run]) -> bool:
        """The same with weights named by the way of the data, if only that explains the
        first run, and the rest: a name such as `ff` says nothing of the output. Those
        whose names speak keep them, unless all is right without."""
        named = [run.parameters for run in kept]
        silent = not all(map(speaks, named[0].tensors))
        if not silent or not all(parameters.by_flow for parameters in named):
            return False
        if self._faults_of(reading, kept[0]) != _UNEXPLAINED:
            return False
        for partly in (True,) if weights.disagree(named[0]) else (True, False):
            for run, parameters in zip(kept, named):
                run.parameters = weights.by_flow(parameters, partly)
            if self._faults_of(reading, kept[0]) <= int(partly):
                if self._explain(reading, kept) is None and (
                    reading.is_right or (partly and reading.faults)
                ):
                    return True
        for run, parameters in zip(kept, named):
            run.parameters = parameters
        reading.verdict = None
        return False

    def _faults_of(self, reading: Reading, run: Run) -> int:
        """The same of a run by the names that its weights have; what its masks mean
        says nothing where it has none."""
        way, stated = reading.way, reading.meaning.stated
        if not run.arguments.masks:
            stated = replace(stated, mask=None, padding=None)
        key = id(way), stated, run.case.name, *run.parameters.tensors
        if key not in self._counted:
            seen = observation.observe(run, way.call, stated)
            self._counted[key] = observation.fewest_faults(seen)
        return self._counted[key]

    def _explain(self, reading: Reading, kept: list[Run]) -> Finding | None:
        """Has the engine judge the runs; what it complains of where it cannot."""
        call, stated = reading.way.call, reading.meaning.stated
        seen = observation.observe_all(kept, call, stated)
        reading.facts = self._facts(reading, kept)
        seen[0].metadata |= reading.facts
        for one in seen:
            one.metadata |= self._promises
        is_last = any(len(one.faults) in (1, 2) for one in self._readings)
        seen[0].metadata["search_effort"] = repr(self._effort.left(is_last))
        reading.observations = seen
        try:
            reading.verdict = observation.explain(seen)
        except ValueError as error:
            return observation.complaint(error)
        self._effort.spent += reading.verdict["effort"]
        return None

    @functools.cached_property
    def _promises(self) -> dict[str, str]:
        """What the code says that it does, where attention leaves a choice."""
        return promised.promises(self.subject, self.call)
