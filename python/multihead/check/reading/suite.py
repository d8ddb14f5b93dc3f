# SPDX-License-Identifier: MIT
"""All runs that follow from a first call: masks, flags, modes, sizes."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..calls import cases
from ..calls.arguments import of_user
from ..calls.cases import Case, Sizes, grouped
from ..calls.forms import splits_batch
from ..calls.one_by_one import is_stepwise
from ..capture.dropouts import ALWAYS_DROPS, never_drops
from ..capture.runner import Run, Runner
from ..report import Finding
from ..sandbox.guard import Stop
from ..subject.documented import is_padding_of_keys, written_masks
from ..subject.masking import reads_column
from ..subject.promised import leaves_dropout
from ..subject.roles import role_of_name
from ..subject.target import text_of_file
from . import draws, finite, flaws, refused

Progress = Callable[[str], None]
_SPREAD = 1.5
_LONG_SECONDS = 1.0  # loops over each query and key would take minutes
_LARGE = 1000.0  # the spread of scores at which exp has long overflowed
_BATCHED = ("rows of the batch", "rows of each item", "keys", "keys of each item")
_OF_KEYS = {"wide mask", "row mask"}  # padding with the axes that the scores have
_PER_HEAD = ("heads", "heads in the batch")
# Those with an axis more than queries and keys.
WIDE_MASKS = ("rows of the batch", "rows of each item", "keys", *_PER_HEAD)
_MASK_DTYPES = (torch.bool, torch.int64, torch.float32)
_READS_RANK = r"(dim\(\)|ndim|len\(\w*mask\w*\.(shape|size\(\))\))\s*==\s*{}"
_READS_RANK_3 = re.compile(_READS_RANK.format(3))
_READS_RANK_ANY = re.compile(_READS_RANK.format(r"\d"))
# What is raised on purpose.
_REFUSALS = ("AssertionError", "NotImplementedError", "ValueError")
# The name of calls with as many items as heads and queries.
EQUAL_SIZES = "B = H = Lq"
_MISTAKES = ("AttributeError", "KeyError", "NameError", "TypeError")
_OF_TRUTH = "Boolean value of Tensor"  # `if mask:`
_MISTAKES += ("UnboundLocalError", "ZeroDivisionError")
# PyTorch's layers say it: the flag only tells what the mask is.
_HINT = "is_causal hint"


def _mask_name(kind: str) -> str:
    names = {"causal": "causal mask", "blocked row": "a row that sees nothing"}
    return names.get(kind, f"mask {cases.MASKS[kind]}")


class Cases:
    """The runs that follow from a first call. `kept` have an output; `findings` say
    what was refused; `taken` and `refused` are kinds of calls by name."""

    def __init__(self, runner: Runner, base: Run, progress: Progress):
        self.runner, self.call, self.progress = runner, runner.call, progress
        seen, factor = base.recorder.spread or 0.0, 1.0
        if seen > 0:  # the softmax shall be neither flat nor saturated
            factor = min(max((_SPREAD / seen) ** 0.5, 0.02), 20.0)
        self.base = replace(base.case, spread=factor)
        self._taken = base
        self.kept: list[Run] = []
        self.findings: list[Finding] = []
        self.taken: set[str] = set()
        self.refused: set[str] = set()
        # Why masks were refused of a shape that others were not.
        self.refused_masks: list[Finding] = []
        # Runs whose mask only fits by chance.
        self.by_chance: list[Run] = []
        # Nothing that could be compared: noise.
        self.hopeless = False

    def run_all(self) -> None:
        """Runs everything; the first run in `kept` is the base."""
        first = self._first()
        noise = draws.differing(self.runner, first)
        if noise and (whole := self._without_dropout()):
            # All else is judged without what it drops.
            noise, self.kept = [], [whole]
            self.findings.append(ALWAYS_DROPS)
        self.findings += noise
        if noise:
            self.hopeless = True
            return
        base, call = self.base, self.call
        self._leave_mask()
        if "changes_inputs" not in self.runner.remarks:
            self._relate()
        kinds = self._masks()
        if "changes_inputs" not in self.runner.remarks:
            self._mask_self(kinds)
        self._switch_causal()
        for case in self._flags(kinds):
            self._try_flag(case)
        self._pad_between()
        for case in self._groups():
            if not self._run(case).refused:
                self.taken.add("groups")
        self._regroup()
        if call.takes("need_weights") or call.takes("average_weights"):
            self._run_with("weights per head", returns_weights=True, draw=21)
        self._crowd(kinds)
        self._train()
        self._leave_dropout()
        # Longer than tiles of kernels, and than windows or buffers made by mistake.
        sizes = replace(base.sizes, batch=1, queries=130, keys=257)
        if is_stepwise(self.runner.subject):
            sizes = replace(sizes, queries=20, keys=20)
        sizes = cases.in_one_window(sizes, base.sizes)
        name = f"{sizes.queries} queries"
        long = replace(self.base, name=name, sizes=sizes, draw=30)
        self._run(long, seconds=_LONG_SECONDS)
        self._round(kinds)
        if kinds[:1] == ["rows"] and base.sizes.queries > 1:
            row = "blocked row"
            self._run_with(_mask_name(row), mask=row, draw=22)
        if base.relation == "cross":
            self.taken.add("other keys")
        elif call.style != "x":  # else there is no argument for them
            self.refused.add("other keys")

    def _leave_mask(self) -> None:
        """Where it needs a mask that may be left out, as it says."""
        optional = self.call.takes("mask") and not self.call.insists_on("mask")
        if not optional or self.base.mask is None:
            return
        run = self.runner.run(replace(self.base, mask=None))
        first = run.findings[0] if run.refused else None
        # Not what it says itself.
        if first is not None and not re.search("`(raise|assert) ", first.detail):
            self.runner.remarks["mask_left_out"] = Finding(
                "mask_left_out",
                f"Its mask may be left out, and then it raises: {first.sentence}.",
                "Block scores only where there is a mask: `if mask is not None:`.",
                first.detail,
                kind="remark",
            )

    def masks_passed_over(self) -> Finding | None:
        """Where the code asks how many axes a mask has, and refuses masks of the
        numbers that it knows: that it passes over the others says nothing."""
        asks = _READS_RANK_ANY.search(self.runner.subject.source)
        if not self.refused_masks or asks is None:
            return None
        first = self.refused_masks[0]
        sentence = (
            "It asks how many axes its mask has, and passes over masks that it does "
            f"not know. Which shape it means is not known; of others it says: "
            f"{first.sentence}"
        )
        remedy = "Give a call of yours with a mask, by `inputs=` or `call=`."
        kind = "unchecked"
        return Finding("argument_guessed", sentence, remedy, first.detail, kind)

    def overflows(self) -> list[Finding]:
        """A remark on a softmax that large scores break; PyTorch's chooses one key."""
        large = _LARGE / (self.base.spread**2 * (self._taken.recorder.spread or 1.0))
        spread = self.base.spread * max(large, 1.0) ** 0.5
        case = replace(self.base, name="large scores", spread=spread)
        try:
            run = self.runner.run(case)
        except Stop:
            return []  # the verdict stands without it
        if run.refused or run.out.isfinite().all():
            return []
        finding = Finding(
            "softmax_overflows",
            f"Scores of about ±{_LARGE:.0f} make its output NaN or infinite: exp "
            "overflows from 709 on in float64, from 88 in float32.",
            "Subtract from each row of scores its maximum before `exp`; the "
            "softmax stays the same. `torch.softmax` does that.",
            kind="remark",
        )
        return [finding]

    def run_users(self, inputs: object) -> None:
        """The user's own inputs; a refusal is a finding."""
        case, made = of_user(self.call, inputs, self.base)
        findings = self._run(case, given=made).findings
        self.findings += [] if made.lacks_mask else findings

    def _run(self, case: Case, **how: Any) -> Run:
        """Runs a case and keeps it if it is not refused."""
        self.progress(case.name)
        run = self.runner.run(case, **how)
        if "given" not in how:
            run = finite.of_either_width(self.runner, run)
        if self._taken.attention is None and not case.returns_weights:
            # Where lengths and widths are equal, keys look like weights.
            run.attention = None
        # What asks whether its inputs are equal does something else then.
        asks = "torch.equal(" in self.runner.subject.source
        is_other = asks and case.relation == "self" != self.base.relation
        if not run.refused and not is_other:
            self.kept.append(run)
        return run

    def _run_with(self, name: str, **changes: Any) -> Run:
        """Runs the base with some changes."""
        return self._run(replace(self.base, name=name, **changes))

    def _first(self) -> Run:
        """The base, with gradients if it takes them; a failure if only now and then."""
        with_gradients = replace(self.base, gradients=True)
        run = self._run(with_gradients)
        if not run.refused:
            return run
        again, plain = self._run(with_gradients), self._run(self.base)
        if again.refused and not plain.refused:
            return plain
        refusal = run.findings[0]
        sentence = f"It raises in some calls only: {refusal.sentence}"
        self.findings.append(replace(refusal, sentence=sentence))
        if again.refused:
            self.kept.append(self._taken)
        return self._taken if again.refused else again

    def _without_dropout(self) -> Run | None:
        """The first run of an instance that is given no dropout, if that is why two
        runs differ: draws of NumPy are not seen."""
        built, case = self.runner.construction, replace(self.base, built_whole=True)
        if built is None or not built.takes("dropout"):
            return None
        run = self.runner.run(case)
        if run.refused or draws.differing(self.runner, run):
            return None
        self.base = case
        return run

    def _say_limit(self, sentence: str, detail: str = "") -> None:
        self.findings.append(Finding("limit", sentence, detail=detail, kind="limit"))

    def _relate(self) -> None:
        """The other ways to relate keys to queries."""
        style, relation = self.call.style, self.base.relation
        if style != "x" and relation != "self":
            self._run_with("self-attention", relation="self", draw=11)
        if style == "x and context" and relation == "self":
            self._run_with("other keys", relation="cross", draw=12)

    def _masks(self) -> list[str]:
        """Runs the masks; the kinds that are taken. The dtype of masks is settled
        on the way: bool if it is taken in any shape."""
        if not self.call.takes("mask"):
            return []
        refusals: list[Finding] = []
        masked = self._masked()
        for dtype in _MASK_DTYPES:
            taken = self._masks_of(masked, dtype, refusals)
            if taken:
                self.refused_masks = refusals
                self.base = replace(self.base, mask_dtype=dtype)
                self.taken |= {"mask", "square mask"}
                return taken
        self.refused.add("mask")
        first = refusals[0]
        # The same with as many keys as queries, where there were more.
        more_keys = self.base.relation == "cross" and self.call.style != "x"
        square = [
            replace(case, name=f"{case.name}, Lq = Lk", relation="equal")
            for case in (masked if more_keys else [])
        ]
        if any(self._masks_of(square, d, refusals) for d in _MASK_DTYPES):
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
        mistake = first.sentence.startswith(_MISTAKES) and not self._asks(first)
        mistake = mistake or _OF_TRUTH in first.sentence
        guessed = self.call.is_guessed("mask")
        kind = "failure" if mistake and not guessed else "limit"
        self.findings.append(replace(first, sentence=sentence, kind=kind))
        return []

    def _asks(self, refusal: Finding) -> bool:
        """Whether it wants a mask that is an object of its own, with tensors in it; a
        method that tensors lack is a mistake."""
        said = re.search(r"'Tensor' object has no attribute '(\w+)'", refusal.sentence)
        if said is None or difflib.get_close_matches(
            said[1], dir(torch.Tensor), 1, 0.8
        ):
            return False  # as of a misspelt method
        subject = self.runner.subject
        source = f"{subject.source}\n{text_of_file(subject)}"  # parts may ask, too
        asked = rf"\b({self.call.parameter('mask')}|\w*mask)\.{said[1]}\b(?!\s*\()"
        return re.search(asked, source) is not None

    def _masked(self) -> list[Case]:
        """The base with each mask that its layout can have."""
        kinds = ["rows", "causal"]
        if not cases.unbatched(self.base):
            kinds += _BATCHED
        if self.base.layout in (cases.LAYER, cases.SEQUENCE_FIRST, cases.HEADS):
            kinds += _PER_HEAD
        if self.base.layout == cases.SEQUENCE_FIRST:
            kinds.append("items last")
        return [
            replace(self.base, name=_mask_name(kind), mask=kind, draw=index + 1)
            for index, kind in enumerate(kinds)
        ]

    def _masks_of(
        self, masked: list[Case], dtype: torch.dtype, refusals: list[Finding]
    ) -> list[str]:
        """Runs these masks; the kinds that are taken. Adds the others' refusals."""
        taken: list[str] = []
        for case in masked:
            if case.mask == "keys of each item" and "rows" in taken:
                continue  # of two axes, these were queries and keys
            if case.mask == "keys of each item" and self._assigns_by_mask():
                continue  # which reads it as (B, Lq)
            if case.mask == "items last" and "rows of each item" in taken:
                continue  # of three, the first was the items
            is_first = case.mask in cases.OF_ROWS and not set(taken) & {*cases.OF_ROWS}
            case = replace(case, mask_dtype=dtype, gradients=is_first)
            run = self._run(case)
            if run.refused:
                refusals += run.findings[:1]
            else:
                taken.append(case.mask)
        return taken

    def _assigns_by_mask(self) -> bool:
        """Whether it sets scores by their index, scores[mask == 0] = -1e9, whose first
        axes are those of the mask."""
        name = re.escape(self.call.parameter("mask") or "")
        text = self.runner.subject.source
        return re.search(rf"\[\s*~?\(?\s*{name}\b[^\]\n]*\]\s*=[^=]", text) is not None

    def _mask_self(self, kinds: list[str]) -> None:
        """Self-attention with a mask and with padding: a mistake may show only where
        queries are as many as keys, and other keys may have masks of their own."""
        if self.base.relation == "self" or self.call.style == "x":
            return
        if kinds:
            name = f"self-attention, {_mask_name(kinds[0])}"
            self._run_with(name, relation="self", mask=kinds[0], draw=26)
        if self.call.takes("padding") and not cases.unbatched(self.base):
            name = "self-attention, padding"
            self._run_with(name, relation="self", padding="mask", draw=29)
        both = self.call.takes("mask") and self.call.takes("context_mask")
        if both and self._taken.recorder.cores.are_several:
            known = [r.case.mask_dtype for r in self.kept if r.case.mask]
            masked = [c for c in self._masked() if c.mask != "keys of each item"]
            named = {c.mask: f"{c.name} of its own" for c in masked}
            own = [replace(c, name=named[c.mask], of_self=True) for c in masked]
            # Where it reaches another attention, it fits keys as many as queries.
            square = [replace(c, relation="equal") for c in own]
            tries = itertools.product(known[:1] or _MASK_DTYPES, (own, square))
            any(self._masks_of(masked, dtype, []) for dtype, masked in tries)

    def _flags(self, kinds: list[str]) -> Iterator[Case]:
        """is_causal, padding and lengths, where the code takes them; padding also with
        a mask, if one of these kinds is taken."""
        base, takes = self.base, self.call.takes
        if takes("is_causal"):
            # As in nn.MultiheadAttention, where the flag only says what the mask is.
            hint = all(map(takes, ("mask", "padding", "need_weights")))
            mask = "later keys" if hint else None
            causal = replace(base, name="is_causal", is_causal=True, mask=mask, draw=13)
            of_self = base.relation == "cross" and not hint
            # With a cache, queries that are fewer than keys are the last ones.
            if not (of_self and takes("past")):
                yield causal
            if of_self:
                name = "is_causal, self-attention"
                yield replace(causal, name=name, relation="self", draw=14)
        if cases.unbatched(base):
            return
        if takes("padding"):
            padded = replace(base, name="padding", padding="mask", draw=15)
            yield padded
            if kinds:
                yield replace(padded, name="padding and mask", mask=kinds[0], draw=16)
        if takes("lengths"):
            yield replace(base, name="lengths", padding="lengths", draw=17)

    def _try_flag(self, case: Case) -> None:
        dtypes = _MASK_DTYPES if case.mask or case.padding else (torch.bool,)
        refusals: list[Finding] = []
        for variant in self._variants(case):
            for dtype in dtypes:
                run = self._run(replace(variant, mask_dtype=dtype))
                if not run.refused:
                    self.taken.add(case.name)
                    if case.is_causal and self._is_mask_a_flag(run):
                        self.taken |= {"mask", "square mask"}
                    return
                refusals += run.findings[:1]
        if case.mask is None and _HINT in refusals[0].sentence:
            self._try_flag(replace(case, mask="later keys"))
        else:
            self._say_refused(case, refusals[0])

    def _switch_causal(self) -> None:
        """The same class, constructed to be causal; for whole sequences where it must."""
        built = self.runner.construction
        if built is None or built.causal_switch is None:
            return
        name = f"{built.causal_switch}=True in the constructor"
        case = replace(
            self.base, name=name, built_causal=True, relation="self", draw=33
        )
        exact = replace(case, sizes=replace(case.sizes, is_exact=True))
        run = self.runner.run(case)
        if run.refused and not (whole := self.runner.run(exact)).refused:
            case, run = exact, whole
        another = flaws.is_another_switch(self.runner, run, self.call.takes("mask"))
        if self.runner.constructed(case) and not another:
            self._try_flag(case)

    def _pad_between(self) -> None:
        """Padding before tokens, for code that makes a causal mask: behind them, no
        earlier query sees it anyhow."""
        masked = cases.PADDINGS  # lengths have nothing in between
        alone = (r for r in self.kept if r.case.padding in masked and not r.case.mask)
        padded = next(alone, None)
        if padded is not None and padded.recorder.has_triangle:
            case = replace(padded.case, name="padding in between", draw=31)
            self._run(replace(case, pads_between=True))

    def _is_mask_a_flag(self, run: Run) -> bool:
        """Whether a parameter whose name is that of a mask does something as a flag."""
        flag = self.call.parameter("is_causal") or ""
        if role_of_name(flag) != "mask":
            return False
        plain = self.runner.run(replace(run.case, is_causal=False))
        return plain.refused or not torch.allclose(plain.out, run.out)

    def _variants(self, case: Case) -> Iterator[Case]:
        """The case, then with as many keys as queries, for code that mistakes the one
        for the other or relies on it; then with padding as the scores have it."""
        yield case
        if case.relation == "cross" and self.call.style != "x":
            yield replace(case, name=f"{case.name}, Lq = Lk", relation="equal")
            yield replace(case, name=f"{case.name}, self-attention", relation="self")
        if case.padding == "mask":
            is_column = reads_column(self.call, self.runner.subject)
            for kind in cases.other_paddings(case, is_column):
                shape = f"padding {cases.PADDINGS[kind]}"
                name = case.name.replace("padding", shape)
                yield replace(case, name=name, padding=kind)

    def _say_refused(self, case: Case, refusal: Finding) -> None:
        """An argument that is offered and that no call can use is a failure; not so
        two arguments together, nor what the code refuses in its own words."""
        self.refused.add(case.name)
        guessed = case.padding is not None and self.call.is_guessed("padding")
        # Masks of images, and of items within items, may have more axes.
        deep = case.layout in cases.IMAGES or splits_batch(self.runner.subject)
        meant = refusal.sentence.startswith(_REFUSALS) or guessed or deep
        sentence = f"It refuses the call with {case.name}: {refusal.sentence}"
        kind = "limit" if meant or (case.mask and case.padding) else "failure"
        self.findings.append(replace(refusal, sentence=sentence, kind=kind))

    def _groups(self) -> Iterator[Case]:
        """Another number of key and value heads, where it can be chosen; heads of keys
        and values that queries share, for attention by itself."""
        base, sizes = self.base, self.base.sizes
        chosen = self.call.takes("num_kv_heads") or self.runner.construction is not None
        divides = sizes.heads > 4 and sizes.heads % 4 == 0
        if chosen and divides and sizes.kv_heads not in (None, 4):
            yield replace(base, name="4 groups", sizes=grouped(sizes, 4), draw=18)
        if base.layout in cases.WITH_HEADS and sizes.heads % 2 == 0:
            yield replace(base, name="2 groups", sizes=grouped(sizes, 2), draw=18)

    def _regroup(self) -> None:
        """Eight heads in two groups, as wide as these, where as many groups as heads in
        each, or a single one, may hide that the code exchanges the two."""
        sizes, built = self.base.sizes, self.runner.construction
        groups, by_itself = sizes.kv_heads or 0, self.base.layout in cases.WITH_HEADS
        if groups not in (1, sizes.heads / max(groups, 1)) or built is None:
            return
        if by_itself or not built.takes("embed_dim", "config"):
            return
        if re.search(r"config\.\w*(group|rep)", self.runner.subject.source):
            return  # a number of its own, which ours need not fit
        wide = replace(sizes, heads=8, kv_heads=2, embed=8 * sizes.head_dim)
        run = self._run_with("8 heads, 2 groups", sizes=wide, draw=31)
        if run.refused and refused.OF_SHAPES.match(run.findings[0].sentence):
            few = "it has as many groups as heads in each, or one"
            self.findings.append(refused.unless(few, run.findings[0]))

    def _crowd(self, kinds: list[str]) -> None:
        """As many items as heads and as queries, where a mask spread over the wrong
        axis still fits: for masks of each item that are taken; for those that only fit
        here, where none was taken at other sizes, or a text says that they should be."""
        if cases.unbatched(self.base) or self.base.layout in cases.CORE:
            return

        def crowd(what: str, **masks: str) -> Run:
            count = self.base.sizes.heads if self.base.sizes.heads > 1 else 4
            equal = dict(batch=count, queries=count, keys=count + 3)
            sizes = replace(self.base.sizes, **equal)
            name = f"{EQUAL_SIZES}, {what}"
            return self._run_with(name, sizes=sizes, draw=23, **masks)

        taken_as = {run.case.padding for run in self.kept}
        padded = "mask" in taken_as
        if self.call.takes("padding"):
            # In another shape than the one that is taken, it fits here by chance;
            # PyTorch's name promises PyTorch's shape.
            other = "mask" if padded else next(iter(taken_as & _OF_KEYS), "mask")
            promised = other != "mask" and is_padding_of_keys(self.call)
            run = crowd("padding", padding="mask" if promised else other)
            self.by_chance = [run] if promised else []
        reads = _READS_RANK_3.search(self.runner.subject.source) is not None
        rows, keys = "rows of each item", "keys of each item"
        said = written_masks(self.call, self.runner.subject)
        taken = rows in kinds
        if self.call.takes("mask") and (taken or reads or not kinds or rows in said):
            crowd(_mask_name(rows), mask=rows)
        said -= set(kinds)
        if self.call.takes("mask") and (keys in said or not kinds) and not padded:
            crowd(_mask_name(keys), mask=keys)

    def _train(self) -> None:
        """A run in training mode, if there is dropout to be seen or asked for."""
        asked = self.call.takes("dropout")
        built = self.runner.construction
        asked = asked or (built is not None and built.gives_dropout)
        asked = asked and not leaves_dropout(self.runner.subject)
        if is_stepwise(self.runner.subject) or self.base.built_whole:
            return
        if not asked and not issubclass(self.runner.subject.type, nn.Module):
            return
        case = replace(self.base, name="training", training=True, draw=20)
        run = self.runner.run(case)
        if run.refused:
            return
        asked = asked or run.forgotten
        if not run.recorder.draws:
            if not (asked or run.idle):
                return
            again = self.runner.run(case, seed=1)
            if again.refused or not torch.equal(again.out, run.out):
                return  # dropout whose draws cannot be seen, as in a fused kernel
        if asked or run.recorder.draws:
            self.kept.append(run)
        else:
            self.runner.remarks["dropout"] = never_drops(run.idle[0])

    def _leave_dropout(self) -> None:
        """A run with the dropout that a call has by itself, where that is not 0."""
        defaults = {self.call.roles[p.name]: p.default for p in self.call.parameters}
        dropout = defaults.get("dropout")
        if type(dropout) is float and 0 < dropout < 1:
            training = defaults.get("training") is True
            if self.base.style.numpy and self._is_unseen(dropout, training):
                return
            name = f"dropout {dropout:g} by default"
            self._run_with(name, own_dropout=dropout, training=training, draw=24)

    def _is_unseen(self, dropout: float, training: bool) -> bool:
        """Whether NumPy drops with numbers of its own, which nothing shows; without
        being told to, that is a flaw."""
        case = replace(self.base, own_dropout=dropout, training=training)
        first, other = (self.runner.run(case, seed=seed) for seed in (0, 1))
        if first.refused or other.refused or torch.equal(first.out, other.out):
            return False
        self.findings += [] if training else [ALWAYS_DROPS]
        return True

    def _round(self, kinds: list[str]) -> None:
        """float32, and the sizes of exercises if they are free to choose, some of which
        are equal; where it is all there is, other numbers and sizes."""
        sizes = self.base.sizes
        if self.base.dtype is torch.float32:
            taken = {sizes.batch, sizes.queries, sizes.heads, sizes.head_dim}
            batch, queries = [n for n in (2, 4, 6, 9, 10, 11) if n not in taken][:2]
            longer = replace(sizes, batch=batch, queries=queries, keys=queries + 2)
            self._run_with("other sizes", sizes=longer, draw=27)
            self._run_with("other numbers", draw=28)
            return
        self._run_with("float32", dtype=torch.float32)
        free = self.runner.subject.kind != "instance" and not sizes.head_width
        if free and self.base.layout == cases.LAYER and sizes.embed == 48:
            heads, kv_heads = min(sizes.heads, 2), 1 if sizes.kv_heads else None
            narrow = 2 if (sizes.out or sizes.embed) < sizes.embed // 2 else None
            small = Sizes(3, 4, 4, embed=8, heads=heads, kv_heads=kv_heads, out=narrow)
            small = cases.in_one_window(small, sizes)
            name = "exercise, float32"
            self._run_with(name, dtype=torch.float32, sizes=small, draw=19)
        if "rows" in kinds:
            name = "mask (Lq, Lk), float32"
            self._run_with(name, dtype=torch.float32, mask="rows", draw=25)
