# SPDX-License-Identifier: MIT
"""Finds a first call that the code takes: from the most telling inputs down to what
it insists on, one departure after the other."""

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ..calls import cases
from ..calls.arguments import by_name, of_user, settle
from ..calls.cases import TABLES, Case, Sizes, Style, grouped, input_width
from ..calls.settings import choices_of
from ..capture.returned import RETURNS_SCORES
from ..capture.runner import Run, Runner
from ..options import Options
from ..report import Finding
from ..sandbox.guard import Guard
from ..subject.documented import additive, is_bias
from ..subject.holding import of_closure
from ..subject.roles import TENSORS
from ..subject.signature import type_name
from ..subject.target import Subject, text_of_file
from . import again, guessing
from .refusals import Refusals, compared, length_of_mask, likelier_first, of_depth

_MOST_TRIED, _LEAST_TRIED = 400, 30
_SECONDS, _MORE_SECONDS = 3.0, 1.0
_LONG_OVER = 4.0  # seconds behind its time at which a search ends in any case
_LEAST_SECONDS = 1.0  # of a call but the first, which has all the time there is
# The longest length that is tried because code holds it, and how many of them. Below
# _SHORTEST, what is as long as there are heads, or as a head is wide, is none.
_SHORTEST, _LONGEST, _MOST_LENGTHS = 16, 300, 2
_WIDEST = 32  # of the sides of windows
# One head of keys and values for all queries (Shazeer, 2019).
_OF_ONE_KEY_HEAD = re.compile(
    r"multi[-_ ]?query|\bmqa\b|one head of keys|(?:single|one) (?:key|kv)", re.I
)
# An axis that is cut in as many parts as there are heads.
_CUT_BY_HEADS = re.compile(r"(view|reshape)\([^)]*//\s*[\w.]*head", re.I)
# Images whose rows are as many as their columns: view(B, C, side, side).
_OF_SQUARES = re.compile(r"(?:view|reshape)\([^)]*\b([a-z]\w*),\s*\1\s*\)")
_WIDTH_OF_LAYER = re.compile(r"Linear\(\s*(?:in_features\s*=\s*)?(\d{2,4})\s*,")
# Tokens of a cube, whose side the code takes the root for.
_OF_CUBES = re.compile(r"\*\*\s*\(?\s*1(\.0)?\s*/\s*3|cbrt|cube_?root")
_MOST_ALIKE = 60  # calls in a row that are refused for what others were: all will be
# An image that a convolution with stride finds too small.
_KERNEL = re.compile(r"Kernel size: \((\d+) x \d+\)\. Kernel size can't be greater")
_ENDED = ("pools", "wrong_shape")
_POOLED = 6  # calls that come to their end and pool what they are given: all will
_OF_TYPES = re.compile(r"same dtype|expected scalar type")
_TORCH = re.compile(r"\btorch\.|\bF\.|\bnn\.|Tensor\b|\.masked_fill")
_NUMPY = re.compile(r"\bnp\.\w|\bnumpy\.\w|\bNDArray\b")


def is_over(seconds: float, calls: int = 0) -> bool:
    """Whether a search ends that has so many seconds left, and so many calls that it
    may try in any case: what is found must not depend on a machine that stalls."""
    return seconds < (-_LONG_OVER if calls > 0 else 0)


class _Watch:
    """Seconds since it was made, in which the code under test ran, or slept, or in
    which this process computed: others on a busy machine do not count."""

    def __init__(self, guard: Guard):
        self._guard, self._used, self._start = guard, guard.used, time.process_time()

    def passed(self) -> float:
        computed = time.process_time() - self._start
        return max(computed, self._guard.used - self._used)


class FirstCall:
    """The choices along each axis, best first. seconds: what a search may take; spent:
    what searches took."""

    def __init__(self, runner: Runner, options: Options, seconds: float = _SECONDS):
        self.runner, self.options = runner, options
        self.subject, self.call = runner.subject, runner.call
        if self.subject.kind == "function" and not self.call.takes("num_heads"):
            # What a function reads of its file is as good as an argument.
            self.call.bound = {**_heads_of_file(self.subject), **self.call.bound}
        texts = choices_of(self.subject.source)
        for parameter in self.call.parameters:  # mode: str, which is asked for "train"
            name = parameter.name
            if (
                name in self.call.guessed & texts.keys()
                and type_name(parameter) == "str"
            ):
                self.call.settle(name, texts[name])
        self.given = options.inputs
        named = {} if self.given is None else settle(self.call, self.given)
        self._query = named.get(
            self.call.parameter("query") or self.call.parameter("x")
        )
        self._own_width = self._width_of_class()
        self.sizes = self._sizes()
        self.findings: list[Finding] = []
        # That it is attention of another kind, whose output has another shape.
        self.outside: Finding | None = None
        # What came to its end and returned no output of attention, and what ran it.
        self.ended: tuple[Runner, Run] | None = None
        self._seconds, self.spent = seconds, 0.0
        self._tried_images = self._tried_lengths = False
        # Whether other roles and lengths have time of their own; how many calls a
        # search may try, and how many all may in any case.
        self.extends, self.most, self.least = True, _MOST_TRIED, _LEAST_TRIED

    def find(self, layouts: tuple[str, ...]) -> Run | None:
        """The first call that returns an output; None leaves the complaint that says
        most in `findings`, which keeps that of the likeliest layouts."""
        run, complaints = self._search(layouts)
        if run is not None:
            self._tried_images = True
            return run
        told = dict(self.call.roles)
        if self.given is None and self.call.read_unknown_as_context():
            self._extend()
            run, _ = self._search(layouts)
            if run is not None:
                return run
            self.call.roles = told
            self.call.settle_style()
        run = self._of_length_inside(layouts, complaints)
        while run is None and self._lacks_attribute(complaints):
            if not self.runner.build_otherwise():
                break
            self._extend()
            run, complaints = self._search(layouts)
        if run is not None:
            return run
        for layout in self._for_given(layouts) if self.given is not None else ():
            run = self._as_given(layout)
            if run.refused:
                complaints = [(True, f) for f in run.findings[:1]]
            elif layout in layouts or self._takes_like(run):
                return run
            else:
                complaints = [(True, guessing.OF_UNKNOWN_AXES)]
        self.findings = self.findings or _most_telling(complaints)
        return None

    def _lacks_attribute(self, complaints: list[tuple[bool, Finding]]) -> bool:
        """Whether it misses what its constructor may make of other arguments."""
        own = (
            rf"AttributeError: '{re.escape(self.subject.type.__name__)}' object has no"
        )
        return any(re.match(own, finding.sentence) for _, finding in complaints)

    def _extend(self) -> None:
        if self.extends:
            self._seconds = max(self._seconds, _MORE_SECONDS)

    def _of_length_inside(
        self, layouts: tuple[str, ...], complaints: list[tuple[bool, Finding]]
    ) -> Run | None:
        """A call of the length that the code holds fast, as a buffer or a table of its
        own does: complaints tell it beside that of the tensors."""
        if self.given is not None or self._tried_lengths:
            return None
        self._tried_lengths = True
        if any(finding.name == "pools" for _, finding in complaints):
            return None  # as many as it pools to would fit by chance
        pairs = [p for _, f in complaints for p in compared(f.sentence)]
        numbers = Counter(n for pair in pairs for n in pair)
        first = self.sizes[0]
        known = {
            n for s in self.sizes for n in (s.batch, s.queries, s.keys, s.embed, 1)
        }
        # Of heads, code may speak that mistakes their axis for another.
        known |= {n for n in (first.heads, first.head_dim) if n < _SHORTEST}
        known |= {a * b for a in known for b in (*known, first.heads, first.head_dim)}
        lengths = [n for n, _ in numbers.most_common() if n not in known]
        masked = (length_of_mask(f.sentence) for _, f in complaints)
        lengths = [*dict.fromkeys(n for n in masked if n), *lengths]
        # A length may be as a head is wide, where it is compared with a length.
        ours = {first.queries, first.keys}
        beside = {a for pair in pairs for a, b in (pair, pair[::-1]) if b in ours}
        lengths = lengths or [first.head_dim] * (first.head_dim in beside - ours)
        built = self.runner.construction
        # Of a window, whose side it is, tables have its fourth power.
        longest = _WIDEST if built and built.takes("window") else _LONGEST
        for length in [n for n in lengths if 0 < n <= longest][:_MOST_LENGTHS]:
            exact = dict(queries=length, keys=length, is_exact=True)
            if run := self._with_sizes(replace(first, batch=2, **exact), layouts):
                return run
        kernels = {int(n) for _, f in complaints for n in _KERNEL.findall(f.sentence)}
        for side in kernels if len(kernels) == 1 else ():
            sizes = cases.as_image(
                replace(first, batch=2), rows=2 * side, columns=3 * side
            )
            return self._with_sizes(sizes, layouts)
        return None

    def _with_sizes(self, sizes: Sizes, layouts: tuple[str, ...]) -> Run | None:
        tried, self.sizes = self.sizes, [sizes]
        self._extend()
        run, _ = self._search(layouts)
        self.sizes = tried
        return run

    def find_at_its_length(self, found: Run | None) -> Run | None:
        """The same call with as many positions as its attention has."""
        heads = found.recorder.cores.found if found and found.recorder else []
        length = heads[0].query.shape[1] if heads else None
        if not heads or length == found.case.sizes.batch:
            return found  # it attends to other items
        exact = dict(queries=length, keys=length, is_exact=True, is_whole=True)
        self.sizes = [replace(found.case.sizes, **exact)]
        return self.find((found.case.layout,))

    def find_like(self, found: Run, layouts: tuple[str, ...]) -> Run | None:
        """A call in one of these layouts that is else like one that it takes."""
        if self.given is not None:
            return self.find(layouts)
        run, complaints = self._search(layouts, found.case)
        if run is None:
            self.findings = self.findings or _most_telling(complaints)
        return run

    def _search(
        self, layouts: tuple[str, ...], like: Case | None = None
    ) -> tuple[Run | None, list[tuple[bool, Finding]]]:
        watch = _Watch(self.runner.guard)
        try:
            return self._first_of(layouts, like, watch)
        finally:
            self._seconds -= watch.passed()
            self.spent += watch.passed()

    def _first_of(
        self, layouts: tuple[str, ...], like: Case | None, watch: "_Watch"
    ) -> tuple[Run | None, list[tuple[bool, Finding]]]:
        """The first call that returns an output, if one does, and what others said."""
        complaints: list[tuple[bool, Finding]] = []
        first: tuple | None = None
        half = self.options.time_limit / 2
        if self.given is not None and self.call.guessed:
            layouts = self._as_deep_as_given(layouts)
        before = 0.0
        refusals = Refusals()
        for case in likelier_first(self._choices(layouts, like), refusals):
            if self.runner.may_be_huge(case):
                continue
            left = max(self._seconds - before, _LEAST_SECONDS)
            is_first = first is None and not self._tried_lengths
            limit = None if is_first else left
            run = self.runner.run(case, seconds=limit)
            self.least -= 1
            if not run.refused:
                if RETURNS_SCORES.search(self.subject.source):
                    run.attention = None
                return run, complaints
            kind = (case.layout, case.mask, case.dtype, case.style)
            first = first or kind
            # What has no batch may fit by chance where other calls raise.
            by_chance = cases.unbatched(case) and bool(complaints)
            said = [f for f in run.findings[:1] if f.name == "raises" or not by_chance]
            complaints += [(kind == first, f) for f in said]
            self.outside = self.outside or _of_its_kind(run)
            if run.findings[0].name in _ENDED:
                self.ended = self.ended or (self.runner, run)
            refusals.note(case, run.findings[0])
            endless = any("RecursionError" in f.sentence for f in run.findings)
            pools = sum(f.name == "pools" for _, f in complaints) >= _POOLED
            # Half of the time is for the runs that follow. The next is seldom quicker
            # than this one.
            now = watch.passed()
            late = is_over(self._seconds - now - (now - before), self.least)
            over = refusals.has_none_left(layouts) or self.runner.guard.remaining < half
            same = refusals.nothing_new >= min(_MOST_ALIKE, self.most // 4)
            if endless or pools or late or over or same:
                break
            before = now
        return None, complaints

    def _as_deep_as_given(self, layouts: tuple[str, ...]) -> tuple[str, ...]:
        """Those with as many axes as the user's query, where names do not say how."""
        axes = getattr(self._query, "ndim", None)
        return tuple(x for x in layouts if len(x.split(",")) == axes)

    def _for_given(self, layouts: tuple[str, ...]) -> tuple[str, ...]:
        """The layouts that the user's query may have; of an image where it has four
        axes, and nothing says what they are."""
        fitting = self._as_deep_as_given(layouts)
        deep = getattr(self._query, "ndim", None) == 4
        if not fitting and deep and not self._tried_images:
            self._tried_images = True  # once, or others would never come to an end
            return (cases.IMAGE, cases.IMAGE_LAST)
        return fitting or (() if deep else layouts[:1])

    def _takes_like(self, given: Run) -> bool:
        """Whether it takes more items, and larger images, in the layout of a run, which
        was a guess, and its first item does not depend on its last."""
        rows, columns = given.case.sizes.image
        sizes = replace(given.case.sizes, batch=given.case.sizes.batch + 1)
        sizes = cases.as_image(sizes, rows=rows + 1, columns=columns + 1)
        like = replace(given.case, name="no mask", sizes=sizes)
        runs = again.twice(self.runner, like, again.draw_item)
        return runs is not None and bool((runs[0].out[0] == runs[1].out[0]).all())

    def _as_given(self, layout: str) -> Run:
        """The call with the user's own inputs. All that is no sequence stays as it is
        in the calls that follow."""
        style, sizes = self.styles()[0], self.sizes[0]
        base = Case("your inputs", sizes, layout, style=style)
        case, made = of_user(self.call, self.given, base)
        run = self.runner.run(case, given=made)
        if not run.refused:
            named = by_name(self.call, self.given)
            roles = self.call.roles
            self.call.fixed |= {
                n: v for n, v in named.items() if roles[n] not in TENSORS
            }
        return run

    def _choices(
        self, layouts: tuple[str, ...], like: Case | None = None
    ) -> Iterator[Case]:
        """Combinations with the fewest departures from the first of each axis; only in
        sizes, layout and relation from one that they are to be like."""
        relations = ("self",) if self.call.style == "x" else ("cross", "equal", "self")
        dtypes = (torch.float64, torch.float32)
        how = [dtypes, self._masks(), self._paddings(), self.styles()]
        if like is not None:
            mask = like.mask, like.mask_dtype
            how = [[like.dtype], [mask], [like.padding], [like.style]]
        lists = [*how, self.sizes, layouts, relations]
        numbered = itertools.product(*(range(len(choices)) for choices in lists))
        ordered = sorted(numbered, key=lambda n: (sum(map(bool, n)), n))
        for indices in ordered[: self.most]:
            chosen = [choices[i] for choices, i in zip(lists, indices)]
            dtype, (mask, kind), padding, style, sizes, layout, relation = chosen
            if layout in cases.IMAGES and sizes.columns == 1:
                sizes = cases.as_image(sizes)
            if layout in cases.WITH_HEADS and sizes.heads == 1:
                # The tensors bring them: one alone would hide what several show.
                heads = self.options.num_heads or Sizes().heads
                sizes = replace(sizes, heads=heads if sizes.embed % heads == 0 else 1)
            name = "no mask" if mask is None else "mask"
            given = dict(mask_dtype=kind, padding=padding, dtype=dtype, style=style)
            yield Case(name, sizes, layout, relation, mask, **given)

    def _masks(self) -> list[tuple[str | None, torch.dtype]]:
        """Kinds of masks and their dtypes: those that may be left out are, or are that
        of a whole call; what is insisted on may have any shape."""
        if not self.call.takes("mask"):
            return [(None, torch.bool)]
        kinds = [None, "rows", *(k for k in cases.MASKS if k != "blocked row")]
        first = [(kind, torch.bool) for kind in dict.fromkeys(kinds)]
        if not self.call.insists_on("mask"):
            return first
        others = [(k, t) for t in (torch.int64, torch.float32) for k, _ in first if k]
        return [*first, *others]

    def _paddings(self) -> list[str | None]:
        """What is left out where it can be."""
        paddings: list[str | None] = [None]
        if self.call.insists_on("padding"):
            paddings += cases.PADDINGS
        return paddings + (["lengths"] if self.call.insists_on("lengths") else [])

    def styles(self) -> list[Style]:
        added = self.options.mask == "additive" or (
            self.options.mask is None and additive(self.call, self.subject) is not None
        )
        first = Style(
            numpy=_speaks_numpy(self.subject),
            out_in=self.call.is_pytorchs_layer or self._turns_weights(),
            additive=added,
            biased=added and is_bias(self.call),
        )
        styles = [first]
        if self.call.weights and not self.call.is_pytorchs_layer:
            otherwise = replace(first, out_in=not first.out_in)
            styles += [replace(first, layers=True), otherwise]
            styles += [replace(first, by_heads=True, out_in=x) for x in (False, True)]
            if any("qkv" in name.lower() for name in self.call.weights):
                styles += [replace(first, apart=True), replace(otherwise, apart=True)]
        if self.call.takes("rotation"):
            styles += [replace(first, tables=kind) for kind in TABLES[1:]]
        if self.call.takes("position_ids"):
            styles.append(replace(first, tables=cases.ONCE))
        if self.call.takes("positions"):
            kinds = (cases.DISTANCES, cases.ONCE, cases.ALONE)
            styles += [replace(first, tables=kind) for kind in kinds]
        if first.numpy or not self.subject.source or _NUMPY.search(_text(self.subject)):
            styles.append(replace(first, numpy=not first.numpy))
        return styles

    def _turns_weights(self) -> bool:
        """Whether several of the weights that it is given are transposed, `x @ w_k.T`."""
        turned = re.findall(r"@\s*(\w+)\.(?:T|mT|t\(\))", self.subject.source)
        return len(set(turned) & set(self.call.weights)) > 1

    def _sizes(self) -> list[Sizes]:
        """The sizes as this subject can have them."""
        options = self.options
        found = [self._fit(sizes) for sizes in cases.SIZES_IN_TURN]
        if options.embed_dim:
            found = [replace(s, embed=options.embed_dim) for s in found]
        if self._query is not None and getattr(self._query, "ndim", 0) in (2, 3):
            found = [replace(s, embed=self._query.shape[-1]) for s in found]
        if options.num_heads:
            found = [self._with_heads(s, options.num_heads) for s in found]
        if options.num_kv_heads:
            found = [replace(s, kv_heads=options.num_kv_heads) for s in found]
        fitting = [s for s in found if s.embed % s.heads == 0]
        whole = list(dict.fromkeys(map(cases.apart, fitting or found)))
        several = [*self._variants(whole[0]), *whole[1:]]
        built = self.runner.construction
        counted = built is not None and built.default_of("num_heads")
        # Some run with one head only, which hides what others would show.
        single = [replace(whole[0], heads=1)] if counted else []
        return list(dict.fromkeys([*several, *single]))

    def _variants(self, sizes: Sizes) -> list[Sizes]:
        """`sizes`, then with other answers to what names leave open: whether a length
        is that of the inputs, how an image is cut, how wide keys are."""
        built = self.runner.construction

        def takes(*roles: str) -> bool:
            asked = any(self.call.takes(role) for role in roles)
            return asked or (built is not None and built.takes(*roles, "config"))

        found = [sizes]
        exact = replace(sizes, keys=sizes.queries, is_exact=True)
        if takes("max_length"):
            # What a call is told is mostly the length that it has.
            place = 0 if self.call.takes("max_length") else 1
            found.insert(place, exact)
        # What it reads of its file, as for a mask that it makes.
        read = cases.of_globals(self.subject.entry)
        if 1 < read.get("batch", 0) <= _LONGEST:
            found.insert(0, replace(sizes, batch=read["batch"]))
        fixed = read.get("max_length", 0)
        if 1 < fixed <= _LONGEST:
            found.insert(1, replace(exact, queries=fixed, keys=fixed))
        if takes("window", "resolution", "image", "rows"):
            shapes = ("pair", "side", "length", "square", "in a pair")
            images = [cases.as_image(sizes, shape) for shape in shapes]
            found = [*images, sizes] if self.call.takes("rows") else [*found, *images]
            whole = images[0]  # and with the token of a class before it
            longer = dict(queries=whole.queries + 1, keys=whole.keys + 1, before=1)
            found.append(replace(whole, **longer))
        elif _OF_SQUARES.search(self.subject.source):
            found.append(cases.as_image(sizes, "square"))
        if _OF_CUBES.search(self.subject.source):
            found.append(replace(exact, queries=64, keys=64))
        if _CUT_BY_HEADS.search(self.subject.source):
            heads = 2 * sizes.heads
            found.append(replace(exact, queries=heads, keys=heads))
        if takes("qkv_dim"):
            found.append(replace(sizes, wide_keys=True, out=None))
        # A width that is written down beside one that is told, as that of a decoder.
        written = set(_WIDTH_OF_LAYER.findall(self.subject.source))
        if len(written) == 1 and takes("embed_dim"):
            found.insert(1, replace(sizes, embed=int(written.pop()), out=None))
        if sizes.out and (takes("out_dim") or (sizes.heads == 1 and takes("head_dim"))):
            found.append(replace(sizes, out=None))  # as a residual connection needs
        heads = built.default_of("num_heads") if built is not None else None
        if heads and heads != sizes.heads and sizes.embed % heads == 0:
            found.append(replace(sizes, heads=heads))
        if built is not None and built.has_layer_by_default:
            embed = built.default_of("embed_dim") or sizes.embed
            if embed % sizes.heads == 0:  # for which that layer is made
                found.append(replace(sizes, embed=embed))
        return list(dict.fromkeys(found))

    def _width_of_class(self) -> int | None:
        """The width that a class has which is not told it; None if it is."""
        built = self.runner.construction
        if built is None or built.takes("embed_dim", "out_dim"):
            return None
        widths = set()
        for sizes in (Sizes(), Sizes(embed=64))[: 2 if built.parameters else 1]:
            made, _, _ = built.build(Case("", sizes), self.runner.guard)
            widths.add(input_width(made) if isinstance(made, nn.Module) else None)
        return widths.pop() if len(widths) == 1 else None

    def _with_heads(self, sizes: Sizes, heads: int) -> Sizes:
        """`sizes` with so many heads; if they do not divide the width, in a width
        near to it, unless that is given."""
        free = self.subject.kind != "instance" and not self.options.embed_dim
        width = heads * max(sizes.embed // heads, 2) if free else sizes.embed
        sizes = replace(sizes, heads=heads, embed=width)
        return grouped(sizes, sizes.kv_heads) if sizes.kv_heads else sizes

    def _fit(self, sizes: Sizes) -> Sizes:
        if self.subject.kind == "instance":
            return cases.of_instance(self.subject.target, sizes)
        if self.runner.construction is not None:
            fitting = self.runner.construction.fitting(sizes, self.options.num_kv_heads)
            return replace(fitting, embed=self._own_width or fitting.embed)
        takes, bound = self.call.takes, self.call.bound
        fixed = {**cases.of_globals(self.subject.target), **bound}
        embed = fixed.get("embed_dim") or _width_outside(self.subject)
        if not takes("embed_dim") and type(embed) is int:
            sizes = replace(sizes, embed=embed)
        if not takes("num_heads") and type(fixed.get("num_heads")) is int:
            sizes = replace(sizes, heads=fixed["num_heads"])
        if takes("num_kv_heads") or bound.get("num_kv_heads"):
            sizes = grouped(sizes, bound.get("num_kv_heads") or 2)
        elif self.call.weights and _OF_ONE_KEY_HEAD.search(self.subject.source):
            sizes = grouped(sizes, 1)  # as its matrices have to be
        return sizes


def _of_its_kind(run: Run) -> Finding | None:
    """What is said of attention of another kind, whose output has another shape."""
    seen = run.recorder
    if seen is None or run.case.style.numpy:
        return None
    of_shape = any(f.name == "wrong_shape" for f in run.findings)
    return guessing.outside(seen) if of_shape else None


def _heads_of_file(subject: Subject) -> dict[str, int]:
    fixed = cases.of_globals(subject.target)
    return {role: size for role, size in fixed.items() if role == "num_heads"}


def _width_outside(subject: Subject) -> int | None:
    """The width of layers, or square matrices, that a function finds outside."""
    for value in of_closure(subject.target).values():
        values = list(value.values()) if isinstance(value, dict) else value
        for part in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(part, nn.Module) and (width := input_width(part)):
                return width
            square = isinstance(part, torch.Tensor) and part.dim() >= 2
            if square and part.shape[-1] == part.shape[-2]:
                return int(part.shape[-1])
    return None


def _most_telling(complaints: list[tuple[bool, Finding]]) -> list[Finding]:
    """The complaint that is made most often of the likeliest kind of call, of
    different sizes; what ran to its end says more than what raised."""
    # Of types, code complains that computes in float32 whatever it is given; a call
    # that took too long for a search would mostly come to an end.
    plain = [
        one
        for one in complaints
        if one[1].name != "hangs" and not _OF_TYPES.search(one[1].sentence)
    ]
    complaints = plain or complaints
    # Sizes with which it is not even made say nothing of those with which it is.
    called = [one for one in complaints if "constructed as" not in one[1].detail]
    complaints = called or complaints
    # Nor do tensors of too many axes or of too few.
    fitting = [one for one in complaints if not of_depth(one[1].sentence)]
    complaints = fitting or complaints
    if not complaints:
        return []
    likely = [finding for is_likely, finding in complaints if is_likely]
    said = [f for _, f in complaints if f.name != "raises"] or likely
    said = said or [finding for _, finding in complaints]
    places = [(f.name, f.detail.partition("\n")[0]) for f in said]
    common = Counter(places).most_common(1)[0][0]
    return [said[places.index(common)]]


def _text(subject: Subject) -> str:
    """Its own, or that of its file where it hands on all there is to compute."""
    own = subject.source
    return own if _NUMPY.search(own) or _TORCH.search(own) else text_of_file(subject)


def _speaks_numpy(subject: Subject) -> bool:
    """Whether the code's text computes with NumPy and not with PyTorch."""
    text = _text(subject)
    annotated = re.search(r"np\.ndarray|NDArray", text) is not None
    torch_too = _TORCH.search(text)
    return annotated or (_NUMPY.search(text) is not None and torch_too is None)
