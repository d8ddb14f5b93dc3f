# SPDX-License-Identifier: MIT
"""Constructs a class of modules from what the names of its arguments mean."""

import contextlib
import enum
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ..report import Finding
from ..sandbox.guard import Guard
from ..subject import items, signature, sliding
from ..subject.absent_rotary import ROTARY, Unturned
from ..subject.roles import normal
from ..subject.target import Subject, text_of_file
from ..subject.words import is_position_bias, words
from . import matrices, settled, stand_ins, switches
from .asked import (
    SHARES,
    SWITCHES,
    WIDTHS,
    demanded,
    flags_off,
    is_own_module,
    may_be_size,
    parameters_of,
    role_of,
    size_of,
    source_of,
)
from .cases import Case, Sizes, constants_of, of_globals
from .constructor import Constructor
from .settings import (
    DROPOUT,
    MANY,
    Choices,
    Config,
    choices_of,
    is_never_read,
    is_of_convolution,
    is_only_kept,
    is_stride,
    may_count_heads,
    model_for,
    reads,
    settings_of,
    shown,
)
from .stand_ins import projection

_TYPES = {"bool": False, "float": 0.0, "int": 2}
_SMALL = {"epsilon": 1e-5, "slope": 0.2}
_SCALES = ("scale", "scaling")
# What follows a Parameter's own name in the text of a class where it divides.
_DIVIDES = r"/\s*(self\.)?{0}\b"
# What is dropped as a whole, where a rate is not of single numbers.
_DROPS_WHOLES = {"head", "heads", "path", "layer", "layers", "token", "tokens"}
# Switches that are on where they are asked for.
GIVEN = ("bias", "batch_first", "is_causal", "windowed", *SWITCHES)
_OF_ATTENTION_ITSELF = {
    "rope",
    "rotary",
    "alibi",
    "relative",
    "causal",
    "mask",
    "masked",
}
_OF_ATTENTION_ITSELF |= {"window", "cache", "cached", "flash", "sink", "softcap", "kv"}
_WIDEST = 1024  # of what a file has as a constant
_LINEAR = {"fc", "linear", "lin"}
_LEFT = (None, "is_causal", "device", "dtype", "config", "activation", "norm")
_LEFT += ("index", "epsilon", "layers", "temperature", "mlp_dim", "mlp_ratio")
_LEFT += ("attention", "slope")


class Construction:
    """How a class is constructed: which arguments are given what."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.make = subject.factory or subject.target
        self.parameters = parameters_of(self.make)
        self.roles = {p.name: role_of(p) for p in self.parameters}
        self.roles |= dict.fromkeys(matrices.constructors(self._required()), "weight")
        self.roles = Constructor(subject, self.parameters, self.roles).roles()
        self.roles |= settled.notation(self)
        self.roles |= sliding.sizes(self.parameters, subject.source)
        by_layer = any("layer" in p.name for p in self.parameters)
        if self.takes("sliding_window") and not by_layer:
            self.roles |= sliding.flags(self.parameters)
        self.roles |= items.heads(self.roles, subject.source)
        self.roles |= dict.fromkeys(stand_ins.layers(self), "layer")
        # Required arguments of unknown names are sizes, in the usual order.
        sizes = () if self.takes("config") else ("embed_dim", "num_heads")
        free = [role for role in sizes if not self.takes(role)]
        # The d of (d, n) is the width, beside which n counts the heads.
        if [n for n, role in self.roles.items() if role == "head_dim"] == ["d"]:
            free = [role for role in free if role != "embed_dim"]
        unnamed = [p for p in self.parameters if p.default is p.empty]
        self.unnamed = [p.name for p in unnamed if self.roles[p.name] is None]
        texts = choices_of(source_of(subject.target))
        texts = {*texts, *(n for n in self.unnamed if normal(n) in _SCALES)}
        counted = [p.name for p in unnamed if may_be_size(p) and p.name not in texts]
        self.by_place = [n for n in self.unnamed if n in counted][: len(free)]
        self.roles |= dict(zip(self.by_place, free))
        self._in_its_settings, self._gives_all = True, False
        self._switched: str | None = None
        self._demanded: set[str] = set()  # flags that are off, and must be on
        self._rate = DROPOUT
        self._choices: Choices = {}
        self.gives_dropout = False  # to the last that was made
        self.is_sparing = False  # with what may be left out
        self.is_unturned = False  # it was handed positions that turn nothing
        # What made-up configurations were asked for and did not know.
        self.blind: dict[str, None] = {}
        settled.settle(self)
        self._settings = {
            p.name: model_for(p, self.roles[p.name], subject.target)
            for p in self.parameters
        }

    def _required(self) -> list[str]:
        return [p.name for p in self.parameters if p.default is p.empty]

    @property
    def guessed(self) -> list[str]:
        """The arguments whose value is a guess: configurations that are made up, and
        what is required under a name that says nothing."""
        configs = (name for name, role in self.roles.items() if role == "config")
        made_up = [name for name in configs if self._settings[name] is None]
        # Positions that turn nothing are no guess: what they do is known.
        turning = [n for n in self.unnamed if set(words(n)) & ROTARY]
        known = [*(turning if self.is_unturned else ()), self.causal_switch]
        known.append(self.shift_switch)
        known += [name for name in self.unnamed if is_only_kept(self.subject, name)]
        known += filter(is_stride, self.unnamed)  # 1, which leaves all positions
        known += [n for n in self.unnamed if settled.is_grounded(self, n)]
        # It is given a text that the code compares it with, which is no guess.
        known += choices_of(source_of(self.subject.target))
        made_up += stand_ins.unknown(self)
        made_up += [name for name in self.unnamed if name not in known]
        return [name for name in made_up if self._function(name) is None]

    def _function(self, name: str) -> Callable | None:
        """That of its file which has the name of an argument."""
        names = getattr(self.subject.target.__init__, "__globals__", {})
        return names[name] if inspect.isfunction(names.get(name)) else None

    @property
    def facts(self) -> dict[str, str]:
        """What decides a verdict of the values that it gives: settings that are made up,
        and switches of attention that must be given, and are off."""
        off = [
            p.name
            for p in self.parameters
            if p.default is p.empty
            and signature.type_name(p) == "bool"
            and self.roles[p.name] not in GIVEN
            and set(words(p.name)) & _OF_ATTENTION_ITSELF
        ]
        names = {"settings": self.blind, "switched_off": off}
        written = {k: " and ".join(f"`{n}`" for n in v) for k, v in names.items()}
        return {kind: said for kind, said in written.items() if said}

    def takes(self, *roles: str) -> bool:
        return not set(roles).isdisjoint(self.roles.values())

    def default_of(self, role: str) -> int | None:
        """The number that a size of this role is by default, if it is one."""
        defaults = [p.default for p in self.parameters if self.roles[p.name] == role]
        return next((d for d in defaults if type(d) is int and d > 0), None)

    @functools.cached_property
    def causal_switch(self) -> str | None:
        return switches.causal(self.subject, self.parameters)

    @property
    def rotary_switch(self) -> str | None:
        return switches.rotary(self.parameters)

    @property
    def shift_switch(self) -> str | None:
        return switches.shift(self.parameters)

    @property
    def cache_switch(self) -> str | None:
        return switches.cache(self.parameters)

    def _switch_of(self, case: Case) -> str | None:
        """The one that a case is built with."""
        if case.built_turned:
            return self.rotary_switch
        if case.built_shifted:
            return self.shift_switch
        if case.built_cached:
            return self.cache_switch
        return self.causal_switch if case.built_causal else None

    @property
    def has_layer_by_default(self) -> bool:
        """Whether an argument that may be left out is a layer, of sizes of its own."""
        return any(isinstance(p.default, nn.Module) for p in self.parameters)

    @property
    def counts_heads(self) -> bool:
        counted = self.takes("num_heads", "num_kv_heads") or self._divides_by_heads()
        counted = counted or stand_ins.have_heads(self)
        counted = counted or self._is_told_by_calls
        return counted or may_count_heads(self.subject.source, self._configs())

    @property
    def is_told_head_width(self) -> bool:
        """Whether it is told how wide a head is, beside the width of all, as many
        configurations have it."""
        text, configs = source_of(self.subject.target.__init__), self._configs()
        told = (
            self.takes(role) or reads(text, configs, role)
            for role in ("head_dim", "embed_dim")
        )
        return all(told)

    @functools.cached_property
    def _is_told_by_calls(self) -> bool:
        """Whether each call says how many heads there are."""
        with contextlib.suppress(ValueError):  # it takes no tensors, as a cache
            return "num_heads" in signature.read(self.subject).roles.values()
        return False

    def _divides_by_heads(self) -> bool:
        """Whether it makes heads of the width of one: `n_heads = dim // head_dim`."""
        narrow = [re.escape(n) for n, role in self.roles.items() if role == "head_dim"]
        if len(narrow) != 1 or not self.takes("embed_dim"):
            return False
        width = rf"(?:self\.)?{narrow[0]}\b"
        cut = rf"(?:view|reshape|unflatten)\([^\n]*-1\s*,\s*{width}\s*\)"
        one = rf"Linear\([^\n]*,\s*{width}\s*[,)]"  # it is all that comes out
        text = self.subject.source
        if re.search(cut, text) and not re.search(one, text):
            return True  # (B, L, -1, D)
        divided = rf"(\w+)\s*=\s*[\w.]+\s*//\s*(?:self\.)?{narrow[0]}\b"
        made = re.findall(divided, source_of(self.subject.target.__init__))
        return any(size_of(name) == "num_heads" for name in made)

    def _configs(self) -> tuple[str, ...]:
        return tuple(name for name, role in self.roles.items() if role == "config")

    @property
    def _turned_part(self) -> float | None:
        """How much of a head is turned by its position, by default: a fraction, 0.25."""
        of_turns = [p for p in self.parameters if set(words(p.name)) & ROTARY]
        parts = [p.default for p in of_turns if type(p.default) is float]
        return next((part for part in parts if 0 < part < 1), None)

    def fitting(self, sizes: Sizes, num_kv_heads: int | None) -> Sizes:
        """`sizes` as this class can have them: constants of its file win, a class
        that is given no number of heads has one, grouped heads are grouped."""
        fixed = of_globals(self.subject.target.__init__) | constants_of(
            self.subject.target
        )
        if not self.takes("embed_dim", "config"):
            sizes = replace(sizes, embed=fixed.get("embed_dim", sizes.embed))
            heads = fixed.get("num_heads", sizes.heads)  # as its file makes it
            sizes = replace(
                sizes, heads=heads if sizes.embed % heads == 0 else sizes.heads
            )
        elif (read := of_globals(self.subject.entry).get("embed_dim", 0)) and (
            read % sizes.heads == 0 and read <= _WIDEST
        ):
            sizes = replace(sizes, embed=read)
        if not self.counts_heads:
            sizes = replace(sizes, heads=fixed.get("num_heads", 1))
            if self.takes("out_dim") and "num_heads" not in fixed:
                sizes = replace(sizes, out=sizes.embed * 5 // 6)
            elif sizes.heads == 1 and "head_dim" in fixed:
                sizes = replace(sizes, out=fixed["head_dim"])
        if part := self._turned_part:  # whole pairs of features
            step = next((n for n in range(2, 65, 2) if n * part % 2 == 0), 2)
            width = -(-sizes.head_dim // step) * step
            sizes = replace(sizes, embed=width * sizes.heads)
        groups = num_kv_heads or (2 if sizes.heads > 2 else 1)  # fewer than heads
        text = source_of(self.subject.target.__init__)
        groups_read = reads(text, self._configs(), "num_kv_heads")
        is_grouped = self.takes("num_kv_heads") or groups_read
        if is_grouped and sizes.heads % groups == 0:
            sizes = replace(sizes, kv_heads=groups)
        has_width = self.takes("embed_dim", "config") or "embed_dim" in fixed
        if sizes.heads == 1 and has_width and self.takes("head_dim", "qkv_dim"):
            sizes = replace(sizes, out=max(sizes.embed // 6, 2))
        return sizes

    def arguments(self, sizes: Sizes, optional: bool = True) -> dict[str, object]:
        """The arguments by name; if not `optional`, only the required ones, the switch
        that is on, and the layout that layer_layouts() counts on."""
        given: dict[str, object] = dict.fromkeys(self._demanded, True)
        if self._switched:
            given[self._switched] = self._switched_on(self._switched, sizes)
        for parameter in self.parameters:
            name, role = parameter.name, self.roles[parameter.name]
            value = self._of_video(name, self._value(parameter, role, sizes))
            if name in given:
                continue
            if parameter.default is parameter.empty:
                value = self._function(name) or value
            if parameter.default is parameter.empty:
                made = self._made_up(parameter, sizes) if value is None else value
                given[name] = made
            elif role == "batch_first":
                given[name] = value
            elif optional and not self._is_left(parameter, value):
                derived = role in (*WIDTHS, "window", "resolution")
                if self._switched and self._switched == self.shift_switch:
                    is_side = type(parameter.default) is int and isinstance(
                        value, tuple
                    )
                    derived, value = False, value[0] if is_side else value
                if derived and self._gives_all and _is_shape(parameter.default):
                    continue  # where ours is refused: it may have to be odd
                if not derived or parameter.default is not None or self._gives_all:
                    given[name] = _like(parameter.default, value)
        return given

    def _of_video(self, name: str, value: object) -> object:
        """A pair of sides, which are three where the code reads a third: of one frame."""
        third = rf"\b{re.escape(name)}\[2\]"
        is_pair = isinstance(value, tuple) and len(value) == 2
        is_read = is_pair and re.search(third, source_of(self.subject.target))
        return (1, *value) if is_read and isinstance(value, tuple) else value

    def _switched_on(self, name: str, sizes: Sizes) -> object:
        """True, or half a window."""
        parameter = next(p for p in self.parameters if p.name == name)
        is_flag = signature.type_name(parameter) == "bool"
        if name != self.shift_switch or is_flag or type(parameter.default) is bool:
            return True
        return sizes.columns // sizes.cut // 2

    def _drops(self, name: str) -> bool:
        """Whether it is a rate of dropout, and not one of 0 that nothing reads."""
        is_off = any(p.name == name and p.default == 0 for p in self.parameters)
        unread = is_off and is_never_read(self.subject.target, name)
        return self.roles[name] == "dropout" and not unread

    def _is_left(self, parameter: inspect.Parameter, value: object) -> bool:
        """Whether an optional argument keeps its default, for lack of a value of its
        type, or as no relative positions are counted. Settings of a known class are read
        later, if not by the constructor."""
        name, wants_layer = parameter.name, "Module" in str(parameter.annotation)
        is_known = self.roles[name] == "config" and self._settings[name] is not None
        is_other = value is None or (wants_layer and isinstance(value, (int, float)))
        is_made = self.roles[name] in ("activation", "norm") and inspect.isclass(value)
        is_other |= "relative" in words(name) and parameter.default == 0
        return is_other or (self.roles[name] in _LEFT and not is_known and not is_made)

    def _value(self, parameter, role: str | None, sizes: Sizes) -> object:
        if role == "config":
            model = self._settings[parameter.name]
            if model is not None and self._in_its_settings:
                return settings_of(model, sizes, self._choices)
            scale = self._scale(sizes, "scale")
            count = MANY if self._gives_all else None
            return Config(sizes, {"scale": scale, **self._choices}, count)
        if role == "dropout":
            if set(words(parameter.name)) & _DROPS_WHOLES and parameter.default == 0:
                return None  # off unless asked for, and no dropout of weights
            layer = signature.type_name(parameter) in ("Module", "Dropout")
            return nn.Dropout(self._rate) if layer else self._rate
        if role in ("activation", "norm") and parameter.default is None:
            return self._layer_by_default(parameter.name, role)
        if role in GIVEN:
            return True
        if role == "masking":
            asked = inspect.signature(self.subject.entry).parameters
            return True if any("mask" in name for name in asked) else None
        return sizes.value_of(role)

    def _layer_by_default(self, name: str, role: str) -> type | None:
        """A class that may be left out, and that is made, or insisted on, all the same."""
        needs = rf"\b{name}\(\)|\bassert {name} is not None"
        if not re.search(needs, source_of(self.subject.target.__init__)):
            return None
        return nn.Identity if role == "activation" else nn.LayerNorm

    def _made_up(self, parameter, sizes: Sizes) -> object:
        """For what is required and has no size."""
        role, name, kind = (
            self.roles[parameter.name],
            parameter.name,
            signature.type_name(parameter),
        )
        if role == "index" or name == self.shift_switch:
            return 0
        if role == "weight":
            own = self.subject.source or text_of_file(self.subject)
            return matrices.built(name, sizes, own)
        if is_position_bias(name) and re.search(rf"\bif {name}\b", self.subject.source):
            return True  # a flag by what is done with it
        if role in _SMALL:
            return _SMALL[role]
        if role == "device":
            return torch.device("cpu")
        if role == "dtype":
            return torch.get_default_dtype()
        if role in ("activation", "norm"):
            is_class = re.search("layer|class|cls|_fn", name) or "type" in kind.lower()
            return nn.Identity if is_class else nn.Identity()
        if normal(name) in _SCALES and kind != "bool":
            return self._scale(sizes, name)
        if kind in ("Module", "Linear") and (layer := projection(name, sizes)):
            return layer
        if set(words(name)) & _LINEAR and kind not in _TYPES:
            return nn.Linear(sizes.embed, sizes.embed)
        said = set(words(name))
        is_rotary = said & ROTARY and said <= ROTARY | _ENCODES and kind not in _TYPES
        if is_own_module(parameter.annotation):
            made = of_class(parameter.annotation, sizes, of_one_head=is_rotary)
            if made is not None:
                return made
        if is_rotary:
            self.is_unturned = True
            return Unturned()
        if role == "layer":
            return stand_ins.handed(self, name, sizes)
        if role == "attention" or kind in ("Module", "Callable"):
            layer = stand_ins.handed(self, name, sizes)
            return stand_ins.Same() if layer is None else layer
        if name in self._choices:
            return self._choices[name]
        if (member := self._member(name)) is not None:
            return member
        if (several := self._unpacked(name, sizes)) is not None:
            return several
        if said & {"base", "theta"}:
            return 10000.0  # of rotary positions
        if kind in _TYPES:
            return _TYPES[kind]
        if set(words(name)) & SHARES:
            return 0.1
        return self._count(name, role, sizes)

    def _count(self, name: str, role: str | None, sizes: Sizes) -> object:
        """For what counts something, or is one of the texts that it is compared with."""
        text = self.subject.source
        in_range = rf"\brange\(\s*(self\.)?{re.escape(name)}\s*\)"
        is_counted = role == "layers" or re.search(in_range, text) is not None
        if not is_counted and re.search(rf"\b{name}\b[^()\n]*padding\s*=\s*1\b", text):
            return 3  # a kernel that keeps the size
        if is_counted or is_of_convolution(name, text):
            return 1  # several would be several attentions
        said = set(words(name))
        if {"n", "num"} & said and {"queries", "keys"} & said:
            return sizes.queries if "queries" in said else sizes.keys
        counts = {"n", "num", "size", "depth", "ratio", "top", "topk"} & said
        if counts or self._gives_all:
            return 2
        return choices_of(text).get(name)

    def _member(self, name: str) -> enum.Enum | None:
        """The first member of an enumeration that the code compares this one with."""
        known = getattr(self.subject.target.__init__, "__globals__", {})
        compared = rf"\b{re.escape(name)}\s*(?:==|is|in)\s*[(\[]?(\w+)[.\[][\"']?(\w+)"
        for kind, member in re.findall(compared, text_of_file(self.subject)):
            members = getattr(known.get(kind), "__members__", {})
            if member in members:
                return members[member]
        return None

    def _unpacked(self, name: str, sizes: Sizes) -> tuple | None:
        """Several sizes in one, where the constructor names each: `length, dim = shape`."""
        text = source_of(self.subject.target.__init__)
        found = re.search(
            rf"^\s*([\w.]+(?:\s*,\s*[\w.]+)+)\s*=\s*{name}\s*$", text, re.M
        )
        parts = re.split(r"\s*,\s*", found[1]) if found else []
        named = [size_of(part.rpartition(".")[2]) for part in parts]
        values = [sizes.value_of(role) for role in named]
        return tuple(values) if values and None not in values else None

    def _scale(self, sizes: Sizes, name: str) -> float:
        """The number by which scores are multiplied, or divided, as the text says of
        this class or, where that is not it, of its file."""
        file = text_of_file(self.subject)
        divides, root = _DIVIDES.format(re.escape(name)), sizes.head_dim**0.5
        found = re.search(divides, f"{self.subject.source}\n{file}")
        return root if found else 1 / root

    def _ways(self, sizes: Sizes) -> list[tuple[bool, bool, bool]]:
        """Whether arguments are given that may be left out; whether settings are of the
        code's own kind, which may be another's; whether also what may be None, or is
        unknown, has a size."""
        own = any(kind is not None for kind in self._settings.values())
        settings = (True, False) if own else (True,)
        ways = [
            (optional, kind, False) for optional in (True, False) for kind in settings
        ]
        if self.is_sparing:
            ways.sort(key=lambda way: way[0])
            return ways
        # Groups may need the width of a head, too.
        place = 1 if sizes.kv_heads and self.takes("head_dim") else len(ways)
        ways.insert(place, (True, own, True))
        return ways

    def turn(self) -> bool:
        """Makes instances in another way from now on, if there is one: of what it
        requires alone, then with a flag on that is off, as of self-attention."""
        flags = sorted(flags_off(self.parameters, self.subject.source) - self._demanded)
        self._demanded |= set(flags[:1]) if self.is_sparing else set()
        is_other, self.is_sparing = not self.is_sparing or bool(flags), True
        return is_other

    def build(self, case: Case, guard: Guard) -> tuple[object, str, list[Finding]]:
        """An instance for a case, or None, the call that made it as text, and what was
        found."""
        self._switched = self._switch_of(case)
        self._rate = 0.0 if case.built_whole else DROPOUT
        findings: list[Finding] = []
        for is_refused in (False, True):
            # Reading the source of a class parses all of its file.
            choices = choices_of(source_of(self.subject.target)) if is_refused else {}
            self._demanded |= demanded(self.parameters, findings)
            if is_refused and not choices and not self._demanded:
                break
            self._choices = choices
            for way in self._ways(case.sizes):
                made, call, found = self._build_in(way, case.sizes, guard)
                if made is not None:
                    return made, call, found
                findings = findings or found
        return None, "", findings

    def _build_in(
        self, way: tuple[bool, bool, bool], sizes: Sizes, guard: Guard
    ) -> tuple[object, str, list[Finding]]:
        """The same in one of its ways."""
        optional, self._in_its_settings, self._gives_all = way
        made = guard.call(self.arguments, sizes, optional)  # may run the code
        if made.error is not None:
            return None, "", made.findings
        arguments = made.value
        keywords = dict(arguments)
        by_place = [p.name for p in self.parameters if p.kind is p.POSITIONAL_ONLY]
        positional = [keywords.pop(name) for name in by_place]
        outcome = guard.call(self.make, *positional, **keywords)
        call = f"{self.subject.name}({shown(arguments)})"
        for value in arguments.values():
            if isinstance(value, Config):
                self.blind |= dict.fromkeys(value.guessed)
        if outcome.error is None and _is_whole(outcome.value):
            self.gives_dropout = any(map(self._drops, arguments))
            return outcome.value, call, outcome.findings
        if outcome.error is None:
            name = type(outcome.value).__name__
            sentence = (
                f"AttributeError: '{name}' object has no attribute '_modules': its "
                "constructor does not call that of nn.Module."
            )
            remedy = "Write super().__init__() first in the constructor."
            return None, "", [Finding("raises", sentence, remedy)]
        found = [
            replace(f, detail=f"{f.detail}\nconstructed as {call}".strip())
            for f in outcome.findings
        ]
        return None, "", found


def _is_whole(made: object) -> bool:
    return not isinstance(made, nn.Module) or "_modules" in vars(made)


def of_class(kind: type, sizes: Sizes, of_one_head: bool = False) -> object | None:
    """An object of a class of the code's own, for the features of one head or of all;
    None where it needs what nobody knows."""
    if of_one_head:
        sizes = replace(sizes, embed=sizes.head_dim, heads=1, out=None)
    with contextlib.suppress(Exception):
        made = Construction(Subject("class", kind, kind.__init__, kind.__name__))
        return made.make(**made.arguments(sizes, optional=False))
    return None


_ENCODES = {"emb", "embed", "embedding", "embeddings", "pos", "position", "positional"}
_ENCODES |= {"positions", "enc", "encoding", "encoder", "module", "layer", "fn"}


def _is_shape(default: object) -> bool:
    return isinstance(default, (tuple, list))


def _like(default: object, value: object) -> object:
    """A length for what has one, for each side for what has several."""
    if _is_shape(default) and not isinstance(value, tuple):
        return type(default)([value] * len(default))
    return value
