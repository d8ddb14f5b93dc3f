# SPDX-License-Identifier: MIT
"""Runs the code under test on one case and keeps what can be known of the run."""

import contextlib
import copy
import functools
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..calls import arguments, cases
from ..calls.arguments import Arguments
from ..calls.cases import Case, attributes
from ..calls.construct import Construction
from ..calls.forms import merged_draw
from ..calls.one_by_one import is_stepwise
from ..calls.tokens import has_many, has_others
from ..report import Finding
from ..sandbox.guard import Guard, Stop
from ..subject import sliding
from ..subject.holding import has_storage, held, holds_rounded_numbers, of_closure
from ..subject.promised import adds_a_little, leaves_gradients
from ..subject.signature import Call
from ..subject.target import Subject, text_of_file
from . import cached, devices, weights, windows
from .dropouts import idle_dropouts, is_forgotten, is_of_weights
from .frames import Frames
from .modes import Modes
from .places import storage
from .record import (
    NothingHuge,
    Recorder,
    copied,
    fill_constant,
    fill_unset,
    leave_noise,
    open_gates,
    part_copies,
    unset_is_nan,
)
from .returned import (
    OF_ONE_SEQUENCE,
    Unfit,
    as_queries_came,
    has_weights,
    of_others,
    pooled,
    position_that_asks,
    split,
)
from .surroundings import settings
from .twins import called_twice


@dataclass
class Run:
    """One run. findings is not empty if there is no output."""

    case: Case
    arguments: Arguments
    out: Tensor | None = None
    pooled: Tensor | None = None  # in place of the output, a vector for each item
    attention: Tensor | None = None
    recorder: Recorder | None = None
    parameters: weights.Weights = field(default_factory=weights.Weights)
    dout: Tensor | None = None
    gradients_off: bool = False
    # The one position that asks, 0 or -1, as that of a class does.
    asks: int | None = None
    is_last: bool = False  # a query behind all keys, as the last token on a cache is
    # Of such a token: the output in one pass over all of them; its key stands first.
    in_one_pass: Tensor | None = None
    prepends: bool = False
    # The names of layers of dropout that were never called; of one for weights.
    idle: list[str] = field(default_factory=list)
    idle_dropout: str = ""
    forgotten: bool = False  # one of these the code never speaks of
    twice: Finding | None = None  # of a layer in the place of another
    leaves: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    idle_parts: list[str] = field(default_factory=list)  # of which a third is
    # Matrices whose gradient is 0 but for rounding.
    cancelled: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    turns: bool = False  # functions ran that turn by positions, as their names say
    window: int | None = None
    window_elsewhere: bool = False  # it may be that of a cache, or in given masks
    counted: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return self.out is None


class Runner:
    """Runs cases of one subject, read as one call. `remarks` collects what is worth
    saying once: prints, changed inputs, changed state."""

    def __init__(self, subject: Subject, call: Call, guard: Guard, weights: object):
        self.subject, self.call, self.guard = subject, call, guard
        self.told: dict[str, str] = {}
        # What the user names, where it cannot be seen.
        self.weights = weights if isinstance(weights, dict) else {"self": weights}
        self.construction = Construction(subject) if subject.kind == "class" else None
        self.remarks: dict[str, Finding] = {}
        # Instances by what they are for, why there is none, and the calls that made them.
        self._instances: dict[tuple, object] = {}
        self._refused: dict[tuple, list[Finding]] = {}
        self._modes: dict[tuple, Modes] = {}
        self._rounding: set[tuple] = set()  # instances with numbers of float32
        self._constructed: dict[tuple, str] = {}
        self.takes_pools = False  # one vector for each item
        self._asks_for_gpu = devices.asks_for_gpu(subject)
        self.switched: dict[str, object] = {}  # attributes of instances, set otherwise

    def calling(self, call: Call, subject: Subject | None = None) -> "Runner":
        """One for another reading of the signature, with the same instances. subject:
        the same code as it is called in another form."""
        other = copy.copy(self)
        other.call, other.subject, other.told = call, subject or self.subject, {}
        return other

    def switching(self, name: str, value: object) -> "Runner":
        """One whose instances have another value under this name."""
        other = copy.copy(self)
        other._instances, other._refused, other._modes = {}, {}, {}
        other.switched = {name: value}
        return other

    def run(
        self,
        case: Case,
        seed: int = 0,
        given: Arguments | None = None,
        seconds: float | None = None,
    ) -> Run:
        """One run with all random generators seeded by `seed`, and with arguments
        that the case implies if none are given. Raises Stop when the time is
        over; not for one with so few `seconds` of its own."""
        if is_stepwise(self.subject):  # which nobody trains
            case = replace(case, gradients=False, training=False)
        has_none = leaves_gradients(self.subject, self.call)
        if has_none or self.subject.own_backward is not None:
            case = replace(case, gradients=False)
        with (
            settings(case, seed, self.subject.source),
            self.guard.each_at_most(seconds),
        ):
            made = given or arguments.make(self.call, case)
            run = Run(case, made)
            target, findings = self.target_of(case, may_hang=seconds is not None)
            if target is None:
                run.findings = findings
                return run
            if cached.may_keep(target):
                target = copied(target)  # each call is the first
            kept = {n: t.clone() for n, t in {**made.tensors, **made.masks}.items()}
            if case.gradients:
                self._require_gradients(run)
            self._execute(target, run, may_hang=seconds is not None)
            self._compare_inputs(made, kept, run)
        return run

    def build_otherwise(self) -> bool:
        """Has instances made in another way from now on; whether there is one left."""
        if self.construction is None or not self.construction.turn():
            return False
        self._instances.clear()
        self._refused.clear()
        return True

    def callable_of(self, target: object) -> Callable:
        if self.subject.how is not None:
            return functools.partial(self.subject.how, target)
        return target if callable(target) else target.forward  # type: ignore[attr-defined]

    def run_on_cache(self, base: Run, together: bool = False) -> Run | None:
        """The last token by itself, or the last two `together`, on what the code
        returned of those before; None where it takes or returns nothing of the kind, or
        refuses its own."""
        built, tokens = self.construction, 2 if together else 1
        case = replace(base.case, built_cached=bool(built and built.cache_switch))
        both = cached.steps(self.call, case, self.subject, together)
        if both is None or case.sizes.queries <= tokens:
            return None
        with settings(case, 0), self.guard.each_at_most(None):
            target = self.target_of(case, may_hang=True)[0]
            if both.past is None and not cached.may_keep(target):
                return None
            target = copied(target)
            called = self.callable_of(target)
            apart = self.callable_of(copied(target))  # it may keep what it is given
            whole = self.guard.call(apart, **both.whole.keywords)
            known, past = cached.state_of(target), None
            last = self.guard.call(called, **both.parts[0].keywords)
            if whole.error is not None or last.error is not None:
                return None
            for count, part in enumerate(both.parts[1:], both.count):
                given = dict(part.keywords)
                if both.store is not None:
                    if not both.state():
                        return None
                elif both.past is None:
                    kept = cached.state_of(target)
                    if not both.keeps(known, kept, count):
                        return None
                    known = kept
                else:
                    past = both.handed_on(last.value, count, past)
                    if past is None:
                        return None
                    given[both.past] = past
                last = self.guard.call(called, **given)
                if last.error is not None:
                    if not together:
                        self._remark_on_cache(last.findings[0])
                    return None
                if both.past is None or both.store is not None or together:
                    continue
                if not both.grows(given[both.past], last.value, count):
                    return None
        length = case.sizes.queries
        axis, start = cases.query_axis(case), length - tokens
        sizes = replace(case.sizes, queries=tokens, keys=length)
        name = "the last token, on a cache"
        case = replace(case, name=name, sizes=sizes, relation="cross", gradients=False)
        tensors = dict.fromkeys(("key", "value"), both.sequence)
        tensors["query"] = query = both.sequence.narrow(axis, start, tokens)
        run = Run(case, Arguments(tensors=tensors), parameters=base.parameters)
        run.recorder, run.counted, run.is_last = Recorder({}), base.counted, True
        run.window, run.prepends = base.window, both.prepends
        try:
            run.out, _ = split(last.value, case, query, any_width=False)
            passed, _ = split(whole.value, base.case, both.sequence, any_width=False)
            run.in_one_pass = passed.narrow(axis, start, tokens).reshape(run.out.shape)
        except Unfit:
            return None
        return run

    def _remark_on_cache(self, finding: Finding) -> None:
        said = f"A token on its cache was not judged: {finding.sentence}"
        self.remarks["cache"] = Finding(
            "limit", said, detail=finding.detail, kind="limit"
        )

    def _execute(self, target: object, run: Run, may_hang: bool) -> None:
        case, made = run.case, run.arguments
        recorder, frames = self._recorder(case, made, target), Frames()
        called, old = self.callable_of(target), weights.arrays_of(target)

        def watched():
            on_cpu = devices.cpu_instead(self._asks_for_gpu)
            with on_cpu, _step_by_step(), recorder, frames:
                return called(*made.positional, **made.keywords)

        outcome = self.guard.attempt(watched)
        for draw in recorder.draws:
            draw.keep = merged_draw(draw.keep, self.subject.how, case.sizes.batch)
        run.recorder = self._of_first(recorder)
        run.gradients_off = any("grad" in f.sentence for f in outcome.findings)
        self._note(outcome.findings, outcome.printed)
        if outcome.error is not None:
            if outcome.findings[0].name == "hangs" and not may_hang:
                raise Stop(self._located(outcome.findings[:1], made))
            run.findings = self._located(outcome.findings[:1], made)
            return
        query = made.tensors["query"]
        any_width = self.subject.kind == "instance"
        returned = as_queries_came(outcome.value, query, case, self.call)
        try:
            out, run.attention = split(returned, case, query, any_width)
        except Unfit as unfit:
            one = self._of_one_position(returned, case, query, recorder)
            if one is None:
                found = unfit.finding
                if self.call.style == "x" and case.layout in OF_ONE_SEQUENCE:
                    found = unfit.of_one_sequence(case)
                run.pooled = pooled(found, outcome.value)
                run.findings = self._located([found], made)
                return
            (out, run.attention), run.asks = one
        run.out = out
        zeros = run.attention is not None and not run.attention.any()
        if zeros and not has_weights(recorder.trace, run.attention):
            run.attention = None
            self._remark("returns_zeros", *_ZEROS, kind="remark")
        run.counted = self._counted(target, frames, case)
        run.tables, run.turns = weights.rotary_tables(frames), frames.turn
        run.idle = idle_dropouts(target, frames, self.subject.source)
        run.twice = called_twice(target, frames, self.subject.source)
        run.forgotten = any(is_forgotten(target, path) for path in run.idle)
        run.idle_dropout = next(filter(is_of_weights, run.idle), "")
        run.window = windows.size(self, target, frames, case)
        held = self.call.takes("mask") and not sliding.is_read(self.subject.source)
        run.window_elsewhere = held or self.call.takes("past")
        run.parameters = weights.collect(
            recorder, frames, self._roots(target), made.weights, old, self.told
        )
        if case.gradients and not case.style.numpy and run.asks is None:
            others = of_others(outcome.value, run.out, recorder)
            learned = weights.named(target, recorder).items()
            own = {n: w for n, w in learned if storage(w) not in others}
            self._differentiate(run, own)

    def _recorder(self, case: Case, made: Arguments, target: object) -> Recorder:
        recorder = Recorder({**made.tensors, **made.masks}, _kept(target))
        wide = case.dtype is torch.float64
        adds = case.style.numpy and adds_a_little(self.subject)
        recorder.rounds = wide and (adds or self._key(case) in self._rounding)
        recorder.fills_constants = self.subject.kind == "function"
        recorder.is_stepwise = is_stepwise(self.subject)
        return recorder

    def _of_one_position(
        self, returned: object, case: Case, query: Tensor, recorder: Recorder
    ) -> tuple[tuple[Tensor, Tensor | None], int] | None:
        """The same of code that is given one sequence and answers one position of it,
        and which. Where it pools, what asks is its own."""
        layouts = (cases.LAYER, cases.SEQUENCE_FIRST)
        layouts += cases.IMAGES if self.takes_pools else ()
        is_plain = self.call.style == "x" and case.layout in layouts
        if not is_plain or case.sizes.queries == 1:
            return None
        query, axis = cases.as_sequence(query, case), cases.query_axis(case)
        layout = cases.LAYER if case.layout in cases.IMAGES else case.layout
        sizes = replace(case.sizes, queries=1, keys=case.keys)
        one = replace(case, layout=layout, sizes=sizes)
        if self.takes_pools and isinstance(returned, Tensor) and returned.dim() == 2:
            returned = returned.unsqueeze(axis)
        try:
            position = position_that_asks(recorder, query, axis)
            asking = query.narrow(axis, position, 1)
            return split(returned, one, asking, False), position
        except Unfit:
            return None

    def _of_first(self, recorder: Recorder) -> Recorder:
        """Of a whole model the first attention alone is judged; of several sequences,
        another one may be causal."""
        if has_many(self.subject):
            recorder.keep_first()
            recorder.has_triangle &= not has_others(self.subject)
        return recorder

    def _located(self, findings: list[Finding], made: Arguments) -> list[Finding]:
        call = f"called as {self.subject.name}({made})"
        return [replace(f, detail=f"{f.detail}\n{call}".strip()) for f in findings]

    def _note(self, findings: list[Finding], printed: str) -> None:
        for finding in findings:
            if finding.name == "changes_global_state":
                self.remarks[finding.name] = finding  # the last names all
        if printed.strip():
            first = printed.strip().splitlines()[0][:60]
            self._remark(
                "prints",
                f"It prints while it runs ({first!r}).",
                "Remove the print before others use it.",
                kind="remark",
            )

    def _remark(self, name: str, *words: str, kind: str = "failure") -> None:
        self.remarks.setdefault(name, Finding(name, *words, kind=kind))

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
            self._remark(
                "changes_inputs",
                f"It changes its caller's tensors in place: {names}.",
                "Write `x = x * scale`, not `x *= scale`: operations that end in "
                "an underscore, and augmented assignments, overwrite the tensor "
                "that was passed.",
            )
            run.arguments.tensors |= {r: kept[r] for r in changed if r in made.tensors}
            run.arguments.masks |= {r: kept[r] for r in changed if r in made.masks}

    def target_of(self, case: Case, may_hang: bool) -> tuple[object, list[Finding]]:
        """What is called: the function, or a module in the dtype and mode. may_hang:
        that it takes too long to be made only ends this run."""
        if self.subject.kind == "function":
            return self.subject.target, []
        key = self._key(case)
        if key not in self._instances:
            if key in self._refused:
                return None, self._refused[key]
            made, findings = self._instance(case, may_hang)
            if made is None:
                return None, self._refused.setdefault(key, findings)
            self._instances[key] = made
            self._modes[key] = Modes(made, text_of_file(self.subject))
        target = self._instances[key]
        if isinstance(target, nn.Module):
            target.train(case.training)
        self._modes[key].set(case.training)
        return target, []

    def _key(self, case: Case) -> tuple:
        sizes = case.sizes if self.subject.kind == "class" else None
        return sizes, case.dtype, *case.built

    @property
    def has_no_matrices(self) -> bool:
        """Whether what was made holds none, so that nothing is projected."""
        held_by_all = [w for made in self._instances.values() for w in held(made)]
        return bool(self._instances) and all(w.dim() < 2 for w in held_by_all)

    def may_be_huge(self, case: Case) -> bool:
        """Whether it has far more weights in this width than as it was made widest."""
        made = {s.embed: one for (s, *_), one in self._instances.items() if s}
        wider = case.sizes.embed / max(made, default=case.sizes.embed)
        if wider <= 1:
            return False
        return sum(t.numel() for t in held(made[max(made)])) * wider**2 > _HUGE

    def constructed(self, case: Case) -> str:
        """The call that made the instance of a case, as text; "" where none did."""
        return self._constructed.get(self._key(case), "")

    def _instance(self, case: Case, may_hang: bool) -> tuple[object, list[Finding]]:
        """A new instance, or a copy of the one that is checked."""
        if self.construction is not None:
            on_cpu = devices.cpu_instead(self._asks_for_gpu)
            with unset_is_nan(), NothingHuge(), on_cpu:
                made, call, findings = self.construction.build(case, self.guard)
            if made is None and findings[0].name == "hangs" and not may_hang:
                raise Stop(findings)
            self._note(findings, "")
            self._constructed[self._key(case)] = call
            if made is None:
                return None, findings
            if unset := fill_unset(made):
                self.remarks["unset"] = _of_unset(unset)
            part_copies(made)
        else:
            original = self.subject.target
            outcome = self.guard.call(copy.deepcopy, original, _detached(original))
            if outcome.error is not None:
                return None, outcome.findings
            made = outcome.value
        if holds_rounded_numbers(made):
            self._rounding.add(self._key(case))
        devices.convert(made, case.dtype)
        leave_noise(made)
        for weight in held(made):
            fill_constant(weight)
        open_gates(made)
        for name, value in self.switched.items():
            setattr(made, name, value)
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

    def _differentiate(self, run: Run, learned: dict[str, Tensor]) -> None:
        """The gradients of sum(out · dout); zero where there is no path, and which of
        the `learned` weights get none. What a query without keys gives is anybody's
        choice, so it has no part in dout."""
        generator = torch.Generator().manual_seed(77)
        drawn = torch.randn(run.out.shape, generator=generator, dtype=torch.float64)
        dout = drawn.to(run.out.dtype)
        mask = run.arguments.masks.get("mask")
        rows = run.case.sizes.queries
        # What a user gives beside it may have another shape.
        if run.case.mask in cases.OF_ROWS and mask is not None and mask.ndim >= 2:
            blind = cases.may_be_blind(mask) if mask.shape[-2] == rows else []
            dout.movedim(cases.query_axis(run.case), 0)[blind] = 0
        leaves = list(run.leaves.values())
        found = [None] * len(leaves)
        if run.out.requires_grad:
            every = [*leaves, *learned.values()]
            outcome = self.guard.call(
                torch.autograd.grad, (run.out * dout).sum(), every, allow_unused=True
            )
            if outcome.error is not None:
                finding = outcome.findings[0]
                sentence = f"Its gradients cannot be computed: {finding.sentence}"
                # Autograd raises it, in no line of the code itself.
                kind = "limit" if _NO_FAULT.search(sentence) else finding.kind
                finding = replace(finding, sentence=sentence, detail="", kind=kind)
                located = self._located([finding], run.arguments)
                self.remarks.setdefault("gradients", located[0])
                return
            found = outcome.value
            of_weights = dict(zip(learned, found[len(leaves) :]))
            run.without_gradient = [n for n, g in of_weights.items() if g is None]
            if run.recorder is None or not run.recorder.cores.has_steps:
                run.idle_parts = weights.with_idle_third(of_weights)
                run.cancelled = weights.that_cancel(of_weights, learned)
        run.dout = dout
        for (role, leaf), gradient in zip(run.leaves.items(), found):
            zero = torch.zeros_like(leaf, requires_grad=False)
            run.gradients[f"d{role}"] = zero if gradient is None else gradient.detach()

    def _roots(self, target: object) -> dict[str, object]:
        of_function = self.subject.kind == "function"
        own = of_closure(self.subject.target) if of_function else {"self": target}
        return own | self.weights

    def _counted(self, target: object, frames: Frames, case: Case) -> dict[str, int]:
        """Sizes by role that the code itself computed or keeps, or was built with."""
        counted = {}
        for variables in frames.found:
            # One letter may count anything, h the heads of a loop among it.
            letters = "GE" if "W" in variables else "HGE"  # a height beside a width
            named = {n: v for n, v in variables.items() if len(n) > 1 or n in letters}
            counted |= attributes(types.SimpleNamespace(**named))
        if not callable(getattr(target, "__code__", None)):
            counted |= attributes(target)
        if self.construction and self.construction.counts_heads:
            counted["num_heads"] = case.sizes.heads
        return counted


def _kept(target: object) -> tuple[Tensor, ...]:
    """Tensors that a module keeps beside its parameters: masks, perhaps."""
    if not isinstance(target, nn.Module):
        return ()
    plain = [vars(part).values() for part in target.modules()]
    kept = [*target.buffers(), *(v for values in plain for v in values)]
    return tuple(t for t in kept if isinstance(t, Tensor) and has_storage(t))


_ZEROS = (
    "It returns zeros in the place of weights.",
    "Return the weights, or None.",
)
_HUGE = 2e8  # numbers, which take seconds to be drawn
# Of keys that are kept from call to call, as for decoding; and of checkpoints, for
# which only backward() is made.
_NO_FAULT = re.compile("backward through the graph a second time|use_reentrant=True")


def _of_unset(names: list[str]) -> Finding:
    named = " and ".join(f"`{name}`" for name in names)
    return Finding(
        "parameters_unset",
        f"Its constructor gives {named} no value: torch.empty holds what was in "
        "memory, which may be NaN. Checked with random numbers.",
        "Initialise it, as by nn.init.xavier_uniform_.",
        kind="remark",
    )


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


@contextlib.contextmanager
def _step_by_step() -> Iterator[None]:
    """Without the short way of PyTorch's own layer, which hides what its heads do."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
