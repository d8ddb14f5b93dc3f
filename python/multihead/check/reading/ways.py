# SPDX-License-Identifier: MIT
"""Ways to call the code under test, and what each of them gave."""

import functools
import re
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..calls import cases, forms
from ..capture import by_hand
from ..capture.places import storage
from ..capture.runner import Run, Runner
from ..report import Finding
from ..sandbox.guard import stood_in
from ..subject.roles import speaks
from ..subject.signature import Call, text_of_entry
from ..subject.target import Subject
from . import (
    decoding,
    flaws,
    guessing,
    observation,
    one_head,
    reads,
    registered,
    residuals,
    scrambled,
    tables,
    turning,
    windowed,
    wiring,
)
from .observation import Observation
from .plans import Meaning

_RIGHT = ("bits", "rounding")

_UNTURNED = Finding(
    "limit",
    "A module that it is handed turns its heads by positions: a stand-in turned nothing, "
    "so that this is not judged.",
    kind="limit",
)


def _fails(case: dict) -> bool:
    """Whether it is the output of a case that is not explained."""
    return case["tensor"] == "out" and not (case["agrees"] or case["explained"])


@dataclass
class Way:
    """A way to call the code, which it takes: its first call."""

    runner: Runner
    base: Run
    form: forms.Form | None = None
    spent_on_heads: float = 0.0  # of the effort of one search
    pools: Finding | None = None  # that it returns a vector for each item

    @property
    def made_up(self) -> dict[str, str]:
        """What the call has that nobody understood."""
        kinds = guessing.kinds(self.call, self.runner.construction)
        return kinds | dict.fromkeys(self.form.guess if self.form else (), "form")

    @property
    def call(self) -> Call:
        return self.runner.call

    @property
    def findings(self) -> list[Finding]:
        """What calls like this one cannot judge, and flaws that they show at once."""
        return list(self._findings)

    @functools.cached_property
    def _findings(self) -> list[Finding]:
        built, found = self.runner.construction, wiring.of_context(self.call, self.base)
        if built is not None and built.takes("attention", "layer"):
            # Those that it is handed may be built to be causal, by us.
            found = [flaw for flaw in found if flaw is not wiring.MASK_OF_ANOTHER]
        if built is not None and built.is_unturned:
            found.append(_UNTURNED)
        found += registered.of_weights(self.runner, self.base)
        found += self.of_one_head
        if flaws.overwrites_mode(self.runner, self.base):
            found.append(flaws.MODE_OVERWRITTEN)
        if flaws.has_heads_alike(self.base):
            found.append(flaws.HEADS_ALIKE)
        if flaws.weighs_one(self.runner, self.base):
            found.append(flaws.SOFTMAX_OF_ONE)
        if reads.mixes_documents(self.runner, self.base):
            found.append(reads.DOCUMENTS_MIXED)
        elif reads.differs_alone(self.runner, self.base):
            found.append(reads.DOCUMENT_DIFFERS)
        if (unknown := flaws.of_residual(self.runner, self.base)) is not None:
            found.append(unknown)
        if isinstance(self.of_windows, Finding):
            found.append(self.of_windows)
        if (flaw := residuals.lost(self.runner, self.base)) is not None:
            found.append(flaw)
        if residuals.is_of_context(self.runner, self.base):
            found.append(residuals.OF_CONTEXT)
        if (flaw := windowed.of_shift(self.runner, self.base)) is not None:
            found.append(flaw)
        if (misread := tables.misread(self.runner, self.base)) is not None:
            found.append(misread)
        if reads.misreads_prefix(self.runner, self.base):
            found.append(reads.PREFIX_MISREAD)
        if self.of_backward is not None:
            found.append(self.of_backward)
        if self.shift == "all" or (
            self.shift and flaws.may_see_later_keys(self.runner, self.base)
        ):
            found.append(flaws.OF_ANOTHER_QUERY)
        return found

    @functools.cached_property
    def of_one_head(self) -> list[Finding]:
        return one_head.with_several_heads(self.runner, self.base)

    @functools.cached_property
    def of_backward(self) -> Finding | None:
        return by_hand.of_backward(self.runner, self.base)

    @functools.cached_property
    def shift(self) -> str | None:
        """At which keys a bias of positions follows the query beside its own, too."""
        return flaws.follow_another_query(self.runner, self.base)

    @functools.cached_property
    def sees_later_keys(self) -> bool:
        return decoding.sees_later_keys(self.runner, self.base)

    @functools.cached_property
    def later_tokens_seen(self) -> bool:
        """Whether these are what it is trained to predict."""
        return self.sees_later_keys and decoding.is_trained_to_say_the_next(
            self.runner, self.base
        )

    @functools.cached_property
    def of_windows(self) -> Finding | bool:
        """Whether the windows of an image are not what they are alone."""
        return windowed.of_windows(self.runner, self.base)

    @functools.cached_property
    def turning(self) -> str | Finding | None:
        """What is wrong about how queries and keys turn by their positions."""
        return turning.seen(self.runner, self.base)

    @property
    def built_otherwise(self) -> list["Way"]:
        """The same of layers whose constructors are told something else."""
        return [way for way in (self._turned, self._widened) if way is not None]

    @property
    def _turned(self) -> "Way | None":
        """Of one that is asked to turn by positions, which it does not do by default."""
        built = self.runner.construction
        if built is None or built.rotary_switch is None:
            return None
        run = self.runner.run(replace(self.base.case, built_turned=True))
        return None if run.refused else replace(self, base=run)

    @property
    def _widened(self) -> "Way | None":
        """Of one whose heads are wider than their part of the width, if it is told how
        wide they are."""
        built, sizes = self.runner.construction, self.base.case.sizes
        if built is None or self.form is not None or not built.is_told_head_width:
            return None
        wide = replace(sizes, head_width=2 * sizes.head_dim)
        run = self.runner.run(replace(self.base.case, sizes=wide))
        met = run.recorder.cores.found if run.recorder and not run.refused else []
        # What it is told may be the number of its scale alone.
        is_wide = {one.query.shape[-1] for one in met} == {wide.head_dim}
        return replace(self, base=run) if is_wide else None

    def kept_of(self, understood: list[str], usual: Call) -> list[str]:
        """What is said of the parameters of the usual call, without those of which its
        form says more."""
        form = self.form
        if form is None or form.guess:
            return [] if form else understood
        others = tuple(f"{n} taken" for n in usual.roles if n not in self.call.roles)
        return [one for one in understood if not one.startswith(others)]

    def said(self, subject: Subject, kept: list[Run]) -> list[str]:
        """What is said of how these runs called it."""
        called = f"{subject.name}({kept[0].arguments})"
        made = self.runner.constructed(kept[0].case)
        said = [call for call in (made, called) if call]
        said += [self.form.said] if self.form else []
        said += [f"with {n} = {v}" for n, v in self.runner.switched.items()]
        if (asks := kept[0].asks) is not None:
            which = "first" if asks == 0 else "last"
            one_vector = "one vector comes back for each item"
            said.append(one_vector if self.pools else f"only the {which} position asks")
        parameters = kept[0].parameters
        if parameters.tensors:
            names = list(parameters.tensors)
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            inside = subject.kind == "function" and not self.call.weights
            where = "made inside the function" if inside else "of its own"
            where = "passed as arguments" if self.call.weights else where
            said.append(f"weights {where}: {shown}")
        said += parameters.notes
        case = self.base.case
        if case.dtype is torch.float32:
            said.append("it does not run in float64, so in float32")
        if case.layout not in (cases.LAYER, cases.HEADS):
            said.append(f"tensors as {case.layout}")
        return said


def likeliest(ways: list[tuple[int, Way]]) -> tuple[int, Way]:
    """The way with the fewest faults, which stand before each. Of those that nothing
    explains, the first, and then another form, which says more than another order."""
    first = ways[0]
    return min(ways, key=lambda one: (one[0], one is not first and not one[1].form))


# What is kept of a call for another.
_KEEPS = re.compile(r"^\s*self\.\w+(\s*,\s*self\.\w+)*\s*=[^=]", re.M)
# Biases, and what norms are made of.
_NORM = re.compile(r"norm|(?:^|[._])(?:ln|bn|gn)(?:\d|[._]|$)", re.I)
_OF_NORMS = re.compile(rf"{_NORM.pattern}|bias|(?:^|[._])b(?:\d|[._]|$)", re.I)


@dataclass
class Reading:
    """What a way to call the code gave, its masks read in one way."""

    way: Way
    meaning: Meaning
    observations: list[Observation] = field(default_factory=list)
    verdict: dict | None = None
    findings: list[Finding] = field(default_factory=list)
    understood: list[str] = field(default_factory=list)
    # Said instead of the verdict that a mask is ignored.
    mask_doubt: Finding | None = None
    # What the engine is told of where facts come from, with its words for them.
    facts: dict[str, str] = field(default_factory=dict)
    # Its runs, without those of masks that are taken by chance.
    kept: list[Run] = field(default_factory=list)
    # Whether several tokens at once, on a cache, give something else.
    takes_one_token: bool = False
    # Whether any mask only makes it causal, where its file makes no other.
    takes_causal_masks: bool = False
    # Whether of more keys than queries it leaves some out.
    leaves_keys: bool = False
    # Kinds of calls by name.
    taken: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    @property
    def told(self) -> list[str]:
        """Facts of how it was called."""
        form = self.way.form
        of_form = [form.fact] if form and form.fact else []
        shifted = self.way.shift and flaws.OF_ANOTHER_QUERY not in self.findings
        told = {"one_token_on_cache": self.takes_one_token}
        told |= {"masks_are_causal": self.takes_causal_masks}
        told |= {"bias_of_another_query": shifted}
        unseen = self.way.base.case.style.numpy and self.way.call.takes("position_ids")
        told |= {"positions_unseen": unseen, "one_window": self.way.of_windows is True}
        base = self.way.base
        told |= {"context_left": wiring.leaves_context(self.way.call, base)}
        told |= {"mask_left": bool(self.way.call.masks_left)}
        told |= {"mask_of_both": wiring.mask_of_both(self.way.call, self.kept)}
        told |= {w: self.way.turning == w for w in (turning.ALIKE, turning.ELSEWHERE)}
        told |= {"sees_later_keys": self.way.sees_later_keys}
        told |= {"positions_left_out": bool(stood_in)}
        return of_form + [fact for fact, holds in told.items() if holds]

    @property
    def is_right(self) -> bool:
        return self.verdict is not None and self.verdict["verdict"] in _RIGHT

    @property
    def faults(self) -> list[str]:
        return [fault["name"] for fault in (self.verdict or {}).get("faults", [])]

    @property
    def beside(self) -> list[str]:
        """Matrices, and norms over the batch, that the data met and attention has no use
        for, or all where none was understood; none where all is explained."""
        return [n for n, t in self._unread.items() if t.dim() >= 2 or self._is_norm(n)]

    @property
    def layers_beside(self) -> list[str]:
        """These, or the weights of norms of which the same holds, which may be one number:
        what these norm is not understood. None where the output is, and the weights that
        it returns are not."""
        first = next(iter((self.verdict or {}).get("cases", ())), None)
        unread = self._unread.items() if first and _fails(first) else ()
        few = {n: t.dim() for n, t in unread if t.dim() < 2}
        norms = [n for n, axes in few.items() if axes == 0 or _NORM.search(n)]
        return self.beside or norms

    @property
    def has_other_layers(self) -> bool:
        """Whether some of these are multiplied with data, so that no fault of attention
        explains the whole."""
        if self.verdict is None:
            return False
        run, unread = self.way.base, self._unread
        used = set() if run.recorder is None else {key for key, _ in run.recorder.uses}
        return any(run.recorder.root(unread[name]) in used for name in self.beside)

    @property
    def gains(self) -> list[str]:
        """Learned factors of features, of which the same holds."""
        unread = self._unread.items()
        single = [n for n, t in unread if t.dim() == 1 and not _OF_NORMS.search(n)]
        return [n for n in single if not self._is_norm(n)]

    def _is_norm(self, name: str) -> bool:
        return name in self.way.base.parameters.batch_norms

    @property
    def unused(self) -> Finding | None:
        """What is said of a projection that is computed, of which nothing is left."""
        first = self.kept[0] if self.kept else self.way.base
        if _KEEPS.search(text_of_entry(self.way.runner.subject)):
            return None  # for a later call, or another layer
        parts = [f"a third of `{name}`" for name in first.idle_parts]
        idle = [f"`{n}`" for n in first.without_gradient if speaks(n)] or parts
        return flaws.projection_unused(idle) if idle else None

    @property
    def around_heads(self) -> list[Finding]:
        """Flaws of code whose heads are right: projections that take part and get no
        gradient, and features that do not stay together."""
        first = self.kept[0] if self.kept else self.way.base
        used = first.recorder.origin(first.out).weights if first.recorder else ()
        reached = {key for key, _ in used}
        tensors = first.parameters.tensors
        idle = [
            f"`{n}`"
            for n in first.without_gradient
            if speaks(n) and n in tensors and storage(tensors[n]) in reached
        ]
        frozen = [flaws.weights_without_gradient(idle)] if idle else []
        if (cancels := flaws.query_cancels(first)) is not None:
            frozen.append(cancels)
        frozen += [turning.MISAPPLIED] * (self.way.turning is turning.MISAPPLIED)
        return frozen + self._scrambled

    @property
    def at_its_ends(self) -> list[Finding]:
        """Flaws of code whose heads are right, and which is nothing but attention:
        before its heads, or behind them."""
        unused = [self.unused] if self.unused else []
        return unused or self._scrambled

    @property
    def _scrambled(self) -> list[Finding]:
        """Whether a sequence in another order gives other numbers; not where each call
        does."""
        if any(finding.name == "random" for finding in self.findings):
            return []
        return scrambled.of_positions(self.way.runner, self.way.base)

    @property
    def _unread(self) -> dict[str, Tensor]:
        run = self.way.base
        parameters = run.parameters.tensors
        if self.verdict is None:
            said = any(f.name == observation.NO_WEIGHTS for f in self.findings)
            return parameters if said else {}
        if self.verdict["verdict"] != "unknown" or run.recorder is None:
            return {}
        seen = self.observations[0].tensors if self.observations else {}
        unused = set(self.verdict["unused"])
        read = {t.data_ptr() for n, t in seen.items() if n not in unused}
        return {
            name: tensor
            for name, tensor in parameters.items()
            if run.recorder.root(tensor) in run.recorder.met
            and (name not in seen or name in unused)
            and tensor.data_ptr() not in read
        }

    @property
    def blames_masks(self) -> bool:
        """Whether its masks may be what is wrong, so that other meanings are tried: that
        is where it seems to go wrong, or all calls have masks and none is explained."""
        verdict = self.verdict or {}
        is_unknown = verdict.get("verdict") == "unknown"
        if is_unknown and self.kept and all(run.arguments.masks for run in self.kept):
            return True
        stages = {fault["stage"] for fault in verdict.get("faults", [])}
        return "masked scores" in stages | {verdict.get("first_stage")}

    def in_other_forms(self, readings: list["Reading"]) -> list["Reading"]:
        """Those of these, where its own form explains nothing; beside a plain call, those
        in a form."""
        if self.is_right or self.faults:
            return []
        others = [reading for reading in readings if reading.way is not self.way]
        return others if self.way.form else [r for r in others if r.way.form]

    def beats(self, likelier: "Reading") -> bool:
        """Whether it is to be believed instead of a likelier one: it takes all calls
        that the other takes and more, or explains them better."""
        if self.verdict is None or not likelier.taken <= self.taken:
            return False
        if likelier.verdict is None:
            return self.is_right
        is_explained = self.is_right or bool(self.faults)
        takes_more = self.taken & likelier.refused and (
            is_explained or not likelier.faults
        )
        return bool(takes_more) or observation.is_better(self.verdict, likelier.verdict)
