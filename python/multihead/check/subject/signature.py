# SPDX-License-Identifier: MIT
"""What each parameter of a call takes, read from its name, else from its place."""

import ast
import dis
import functools
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from . import fused, items, layers, shapes, sliding
from . import roles as tables
from .masking import (
    causal_flag,
    of_biases,
    of_column_masks,
    of_masks_of_keys,
    of_masks_of_pairs,
    of_masks_of_rows,
    of_named_masks,
    of_numbers,
    of_overwritten_masks,
    of_raw_tokens,
    of_two_masks,
    says_causal,
)
from .pairs import roles_of_pairs, roles_of_sides
from .roles import SIZES, TENSORS, is_weight, normal
from .rooms import of_rooms
from .target import Subject, is_wrapped, text_of_file
from .texts import source_of
from .words import role_of_words, speaks_of_caches, tensor_of_words, words

_EMPTY = inspect.Parameter.empty
# Of a signature that does not say.
_UNKNOWN = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in "qkv"]
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# B, L, E = x.shape: what the code calls the axes of its input, in their order.
# b, n, d = x.shape; or b, n, d, heads = *x.shape, self.heads.
_UNPACKED = re.compile(
    r"^\s*\(?((?:\w+\s*,\s*)+\w+)\)?\s*=\s*(?:\w+\s*=\s*)?\*?(?P<of>\w+)\."
    r"(?:shape|size\(\s*\))(?P<more>(?:\s*,\s*[\w.]+)*)\s*(?:#.*)?$",
    re.MULTILINE,
)
# The names of axes, also in prose.
BATCH = re.compile(r"b|n|bs|bsz|nb|bb|_b|batch\w*|batch[ -]size|b_size|num_batch\w*")
LENGTH = re.compile(
    r"l|s|t|lq|lk|sq|tq|tk|nq|nk|l_[qkx]|seq\w*|\w*len|\w*_length|len\w*|time\w*|tokens|"
    r"(?:\w+[ -])?(?:len|length|seq|sequence)|(?:seq|sequence)[ -]\w+|n_tokens|num_tokens|queries|keys"
)


def are_batch_and_length(batch: str, length: str) -> bool:
    """Whether these are the names of those axes: n counts the tokens beside a b."""
    if not BATCH.fullmatch(batch):
        return False
    return bool(LENGTH.fullmatch(length)) or (batch[0] == "b" and length == "n")


@dataclass
class Call:
    """How the code under test is called.

    roles: of each parameter, in order; None where nothing is known and its default
    is left alone. style: "qkv", "x" or "x and context". weights: the parameters
    that take weights. bound: what functools.partial has fixed, by role. guesses:
    what was guessed, as phrases; guessed: the parameters. is_pytorchs_layer: it is that
    of PyTorch's function for a layer. fixed: what a user gives to parameters, by name,
    in all calls. says_causal: its name does; may_be_causal: it is built with a switch
    for that. is_packed: one tensor holds queries, keys and values, which are as many.
    called: the parameters that the code calls, as it does a layer of dropout.
    masks_rows: its mask of padding only zeroes rows of the output. unread: the
    parameters that the code does nothing with, masks aside. masks_left: masks that it
    overwrites before it reads them. exchanges: heads and positions, in what it returns.
    fused_parts: whose the parts of a fused matrix are, "kqv". left_none: what is None
    though it must be given, as the text allows. holds_tokens: its padding is 0 in these.
    """

    parameters: list[inspect.Parameter]
    roles: dict[str, str | None]
    style: str
    weights: list[str] = field(default_factory=list)
    bound: dict[str, object] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)
    guessed: set[str] = field(default_factory=set)
    is_pytorchs_layer: bool = False
    fixed: dict[str, object] = field(default_factory=dict)
    says_causal: bool = False
    may_be_causal: bool = False
    is_packed: bool = False
    called: frozenset[str] = frozenset()
    masks_rows: bool = False
    unread: frozenset[str] = frozenset()
    masks_left: set[str] = field(default_factory=set)
    exchanges: bool = False
    fused_parts: str | None = None
    left_none: set[str] = field(default_factory=set)
    holds_tokens: bool = False

    def parameter(self, role: str) -> str | None:
        """The name of the parameter with this role."""
        return next((n for n, r in self.roles.items() if r == role), None)

    def takes(self, role: str) -> bool:
        return role in self.roles.values()

    def insists_on(self, role: str) -> bool:
        """Whether it may not be left out."""
        name = self.parameter(role)
        return any(p.name == name and p.default is p.empty for p in self.parameters)

    def is_guessed(self, role: str) -> bool:
        """Whether it is a guess that the parameter of this role has it."""
        return self.parameter(role) in self.guessed

    def is_open(self, name: str) -> bool:
        """Whether another of the sequences may be meant: its role is a guess, or it is
        one of two whose names do not say who asks."""
        role = self.roles[name]
        of_two = {"x", "context"} <= set(self.roles.values()) - {"query", "key"}
        vague = of_two and role in ("x", "context") and normal(name) in tables.VAGUE
        return role in TENSORS and (name in self.guessed or vague)

    def guess(self, names: list[str], phrase: str) -> None:
        self.guesses.append(f"{', '.join(names)} taken for {phrase}")
        self.guessed.update(names)

    def settle_style(self) -> None:
        """Which sequences a call brings, as the roles say."""
        if self.takes("query") and (self.takes("key") or self.takes("value")):
            self.style = "qkv"
        else:
            self.style = "x and context" if self.takes("context") else "x"

    def settle(self, name: str, value: object) -> None:
        """Gives a parameter what it is always given, whatever was guessed of it."""
        self.fixed[name], self.roles[name] = value, "flag"
        self.guessed.discard(name)
        self.guesses = [g for g in self.guesses if not g.startswith(f"{name} taken")]

    def forget_guesses(self) -> None:
        self.roles |= dict.fromkeys(self.guessed)
        self.guesses.clear()
        self.guessed.clear()

    def read_by_place(self, names: list[str]) -> None:
        """Takes the first of these parameters for the sequences, in the usual order."""
        wanted = {1: ["x"], 2: ["x", "context"]}.get(len(names), TENSORS[:3])
        self.roles |= dict(zip(names, wanted))
        self.guess(names[: len(wanted)], f"{', '.join(wanted)}, by place")
        if len(names) == 1:  # what else could it be
            self.guessed.discard(names[0])

    def read_unknown_as_context(self) -> bool:
        """Takes what is required and guessed to be a mask, or None, for another
        sequence; whether there is such."""
        others = {"key", "value", "context"} & set(self.roles.values())
        unknown = [
            p.name
            for p in self.parameters
            if p.name in self.guessed
            and self.roles[p.name] in (None, "mask")
            and type_name(p) not in _PLAIN
        ]
        if others or not unknown:
            return False
        self.roles[unknown[0]] = "context"
        self.settle_style()
        return True

    @property
    def is_as_pytorchs(self) -> bool:
        """Whether it has the arguments of nn.MultiheadAttention by their names, of
        today: older ones had masks that are only added."""
        named = {"attn_mask", "key_padding_mask", "average_attn_weights"}
        return named <= self.roles.keys()


def read(subject: Subject) -> Call:
    """Reads the signature of the code under test.

    Raises ValueError where it takes no tensors.
    """
    partial = isinstance(subject.target, functools.partial)
    fixed = subject.target.keywords if partial else {}
    call = Call([p for p in _parameters(subject) if p.name not in fixed], {}, "x")
    for parameter in call.parameters:
        call.roles[parameter.name] = _role_of(parameter)
    call.roles |= sliding.sizes(call.parameters, subject.source)
    call.roles |= roles_of_sides(call.roles)
    if subject.kind == "function":
        call.roles |= layers.roles(call.parameters, subject.source)
    else:
        _settle_layers(call)
    of_biases(call)
    call.roles |= roles_of_pairs(call.parameters, call.roles)
    of_two_masks(call)
    of_named_masks(call)
    # A mask of positions masks what is added for them, not keys.
    for p in call.parameters:
        of_positions = {"pos", "position", "positions"} & set(words(p.name))
        if of_positions and p.default is None and call.roles[p.name] == "mask":
            call.roles[p.name] = None
    for parameter in call.parameters if call.takes("mask") else ():
        if parameter.default is False and MASKING.fullmatch(parameter.name):
            call.roles[parameter.name] = "masking"
    if not call.takes("mask"):
        roles = call.roles.items()
        call.roles.update({n: "mask" for n, r in roles if r == "context_mask"})
    call.bound = {tables.CALL.get(normal(n), n): value for n, value in fixed.items()}
    taken = call.roles.keys() | fixed.keys()
    call.is_pytorchs_layer = taken >= tables.PYTORCHS_LAYER
    if "in_proj_weight" in taken:  # it projects all three, as PyTorch's layer does
        known = tables.PYTORCHS_ROLES
        call.roles |= {n: known[n] for n in call.roles if n in known}
    if call.parameters and call.parameters[0] is _UNKNOWN[0]:
        call.guess([p.name for p in call.parameters], "query, key and value")
    of_raw_tokens(call, subject, text_of_entry(subject))
    of_numbers(call, text_of_entry(subject), subject.source, text_of_file(subject))
    of_rooms(call, text_of_entry(subject))
    shapes.of_documented(call, subject)
    _settle_tensors(call, subject)
    shapes.of_vague(call, subject)
    of_masks_of_keys(call, subject.source)
    of_masks_of_rows(call, text_of_entry(subject))
    of_column_masks(call, subject)
    of_masks_of_pairs(call, subject.source)
    of_overwritten_masks(call, text_of_entry(subject))
    call.weights = [n for n, r in call.roles.items() if r in ("weight", "weights")]
    call.unread = _unread(subject)
    items.settle(call, text_of_entry(subject))
    _guess_required(call, text_of_entry(subject))
    _note_causal(call, subject)
    text = text_of_entry(subject)
    call.called = frozenset(
        n for n in call.roles if re.search(rf"(?<![.\w]){re.escape(n)}\(", text)
    )
    call.settle_style()
    call.fused_parts = fused.parts(subject.source, call.weights)
    return call


# A flag without which a mask that is given has no use.
MASKING = re.compile(
    r"(use|apply|with|has|enable|do)_?(attn_?|attention_?)?mask(ing)?|mask_?flag|masking"
)


def _note_causal(call: Call, subject: Subject) -> None:
    """What the name of the code says, and whether its constructor asks."""
    call.says_causal = says_causal(call, subject)
    if subject.kind == "function":
        return
    try:
        built = inspect.signature(subject.type).parameters
    except (TypeError, ValueError):
        return
    asks = (tables.CONSTRUCTOR.get(normal(name)) for name in built)
    off = {normal(p.name) for p in built.values() if p.default is False}
    flag = causal_flag(subject.source, built.values())
    call.may_be_causal = bool("is_causal" in asks or off & {"mask", "usemask"} or flag)


def _parameters(subject: Subject) -> list[inspect.Parameter]:
    """The parameters of a call; q, k and v where the signature does not say."""
    if isinstance(subject.entry, (torch.jit.ScriptFunction, torch.ScriptMethod)):
        arguments = [a for a in subject.entry.schema.arguments if a.name != "self"]
        return _named(
            (a.name, a.default_value if a.has_default_value() else _EMPTY)
            for a in arguments
        )
    try:
        found = list(inspect.signature(subject.entry).parameters.values())
    except ValueError:  # a function written in C
        return _documented(subject.entry) or _UNKNOWN
    named = [p for p in found if p.kind not in _VARIADIC]
    own = inspect.signature(subject.entry, follow_wrapped=False).parameters.values()
    if is_wrapped(subject.entry) and _takes_any(own):
        # Keywords may be something else for a wrapper, as for that of torch.vmap.
        named = [
            p if p.kind is p.KEYWORD_ONLY else p.replace(kind=p.POSITIONAL_ONLY)
            for p in named
        ]
    if subject.kind == "class" and subject.how is None:
        named = named[1:]
    return _UNKNOWN if not named and _takes_any(found) else named


def _named(defaults: Iterable[tuple[str, object]]) -> list[inspect.Parameter]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, kind, default=d) for name, d in defaults]


def _takes_any(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _documented(entry: object) -> list[inspect.Parameter]:
    """The parameters that a docstring begins with; none if they are not Python's."""
    found = re.match(r"\w+\(([^()]*)\)\s*->", inspect.getdoc(entry) or "")
    try:
        arguments = ast.parse(f"def f({found[1]}): ..." if found else "").body[0].args
        defaults = [ast.literal_eval(default) for default in arguments.defaults]
    except (SyntaxError, ValueError, IndexError):
        return []
    required = len(arguments.args) - len(defaults)
    names = (argument.arg for argument in arguments.args)
    return _named(zip(names, [_EMPTY] * required + defaults))


def _role_of(parameter: inspect.Parameter) -> str | None:
    """The role of its name, unless its default is of another kind, which is kept."""
    name, default = parameter.name, parameter.default
    role = tables.CALL.get(normal(name))
    if role in SIZES and "Tensor" in str(parameter.annotation):
        role = None  # in_features: Float[Tensor, "..."] is no number of features
    if name.lower() == "embedding":
        role = "x"  # its width is a setting of the constructor
    if role is None and is_weight(name):  # W_q, but also w, b and out_proj
        role = "weight"  # yet q, k and v are never weights
    plural = parameter.annotation is _EMPTY and _FEATURES.search(name)
    if role is None and type_name(parameter) in ("int", "_empty") and not plural:
        role = _number_of_words(parameter)
    is_required = default is parameter.empty
    if role is None and is_required and type_name(parameter) not in _PLAIN:
        projects = normal(name) in ("proj", "projection", "dense")
        role = "weight" if projects else tensor_of_words(name)
    if role is None and default is None and type_name(parameter) not in _PLAIN:
        beside = tensor_of_words(name)
        role = beside if beside in ("key", "value") else None
    if role is None and is_required and _OF_ROTATION.search(name.lower()):
        return "rotation"
    if default is parameter.empty:
        divides = role is None and normal(name) in ("temperature", "temp", "tau")
        return "divisor" if divides else role
    # A flag has a value: `mask: bool = None` is a mask of bools.
    if role == "mask" and type_name(parameter) == "bool" and default is not None:
        return "is_causal"
    if role == "mask" and _OF_TEXT.search(str(parameter.annotation)):
        return "nothing"  # the name of a mask that it makes
    if type(default) is bool and (role == "mask" or _LOOKS_AHEAD.search(name.lower())):
        return "is_causal"
    if role == "zero" and type(default) is int and default != 0:
        return None  # it counts something else
    if role in ("zero", "position_ids") and default is None:
        return None  # without it, nothing is kept of calls before, or it counts itself
    if role == "sliding_window" and "tuple" in str(parameter.annotation).lower():
        return None  # of both sides
    if name.startswith("_") or not isinstance(default, _KINDS.get(role, object)):
        return None
    return role


def _number_of_words(parameter: inspect.Parameter) -> str | None:
    """The lengths of keys, or the size, that the words of a name say. A sequence is no
    length of one."""
    name, said = parameter.name, words(parameter.name)
    if said[-1:] in (["lengths"], ["lens"]) and not set(said) & {"q", "query"}:
        return "lengths"
    role = role_of_words(name)
    if role == "max_length" and not set(said) & COUNTED:
        return None
    return role if role in (*SIZES, "qkv_dim") else None


# Tables of rotary positions: rope_cache, m_theta_complex.
_OF_ROTATION = re.compile(r"rope|rotary|freqs|theta|_cis\b|complex")
# A switch for a mask, by its name: look_ahead_mask, mask_future.
_LOOKS_AHEAD = re.compile(
    r"look_?ahead|(mask|block|hide)_?future|future_?mask|no_?peek"
)
_OF_TEXT = re.compile(r"\bstr\b|\bLiteral\b")
_OF_FEATURES = ("features", "embedding", "feats", "feat")
COUNTED = {"len", "length", "max", "maxlen", "seqlen", "size", "num", "n", "window"}
# image_features are the features themselves, and no number of them, in a call.
_FEATURES = re.compile(r"(?<!\bn)(?<!\bnum)(?<!\bin)(?<!\bout)_(features|feats)$")
_PLAIN = ("int", "bool", "float", "str")
_NUMBER = (int, float, type(None))
_KINDS = {
    **dict.fromkeys((*SIZES, "is_causal", "training", "zero"), (int, type(None))),
    **dict.fromkeys(("rotation", "image", "device", "batch"), ()),
    **dict.fromkeys(("need_weights", "average_weights"), (int, type(None))),
    "scale": _NUMBER,
    "padding": type(None),
    "dropout": (*_NUMBER, nn.Dropout),
}


def _settle_tensors(call: Call, subject: Subject) -> None:
    """Decides which parameters take the sequences where names do not say."""
    roles, parameters = call.roles, call.parameters
    if not parameters:
        raise ValueError(
            f"check: target must take tensors, got {subject.name} without parameters"
        )
    first = parameters[0].name
    if roles[first] in SIZES and not (set(roles.values()) & set(TENSORS)):
        roles[first] = "x"
    inputs = [p.name for p in parameters if roles[p.name] == "x"]
    if len(inputs) > 1 and not {"query", "key", "context"} & set(roles.values()):
        roles |= {inputs[1]: "context", **dict.fromkeys(inputs[2:])}
    if not {"key", "value", "context"} & set(roles.values()):
        for name in _left_to(first, parameters, subject.source)[:1]:
            roles[name] = "context"
    # A memory that may be left out beside a context is something else.
    others = [p for p in parameters if roles[p.name] == "context"][1:]
    roles |= {p.name: None for p in others if p.default is None}
    found = set(roles.values()) & set(TENSORS)
    if not found:
        last = {n: words(n)[0] for n, role in roles.items() if role == "weight"}
        if sorted(last.values()) == ["key", "query", "value"]:
            roles |= last  # query_matrix, key_matrix, value_matrix
            return
    if found and subject.kind != "function":
        _settle_letters(call)
        # A layer has its weights; what it may be given beside is something else.
        optional = [p.name for p in parameters if p.default is not p.empty]
        roles |= {n: None for n in optional if roles[n] == "weight"}
        found = set(roles.values()) & set(TENSORS)
    if not found:
        free = [p for p in parameters if p.default is p.empty]
        free = [p for p in free if type_name(p) not in ("int", "bool", "float", "str")]
        names = [p.name for p in free if roles[p.name] in (None, "weight")][:3]
        call.read_by_place(names)
    elif "query" in found and "x" in found and "context" not in found:
        rename = "context" if "key" not in found else None
        roles.update({n: rename for n, role in roles.items() if role == "x"})
    keys = [p for p in parameters if roles[p.name] == "key" and p.default is _EMPTY]
    if keys and "query" not in found and roles[first] == "x":
        roles[first] = "query"
    if not set(roles.values()) & {"query", "x"}:
        # forward(hidden, key, value): what comes first asks.
        roles[first] = "query" if "key" in roles.values() else "x"


def _settle_layers(call: Call) -> None:
    """A layer was told its sizes when it was made: features are the sequence, and a
    size that may be left out is."""
    for parameter in call.parameters:
        name, role = parameter.name, call.roles[parameter.name]
        if role not in SIZES or type_name(parameter) == "int":
            continue
        if parameter.default is _EMPTY and normal(name) in _OF_FEATURES:
            call.roles[name] = "x"
        elif parameter.default is _EMPTY and set(words(name)) & {*_OF_FEATURES}:
            call.roles[name] = None  # depth_feats, which may be another sequence
        elif parameter.default is None and normal(name) not in tables.CALL:
            call.roles[name] = None


def _left_to(first: str, parameters: list[inspect.Parameter], source: str) -> list[str]:
    """Those that are the first where they are left out, `m = x if m is None else m`."""
    beside = {"residual", "identity", "shortcut", "skip"}
    optional = [p.name for p in parameters if p.default is None]
    optional = [name for name in optional if not beside & set(words(name))]
    own = re.escape(first)
    forms = (
        r"\b{0} = {0} if {0} is not None else {1}(?![\w.\[(])",
        r"\b{0} = {1} if {0} is None else {0}\b",
        r"\bif {0} is None:\s+{0} = {1}\s",
        r"\b{0} = default\({0}, {1}\)",
    )
    said = {n: [f.format(re.escape(n), own) for f in forms] for n in optional}
    return [n for n, forms in said.items() if re.search("|".join(forms), source)]


def _settle_letters(call: Call) -> None:
    """One letter beside the sequence of a layer, which was told its sizes when it was
    made, is no size: h is what others call the context; nor is M a second mask."""
    masks = [name for name, role in call.roles.items() if role == "mask"]
    known = (*SIZES, "mask") if masks[1:] else SIZES
    letters = [
        p.name
        for p in call.parameters
        if len(p.name) == 1 and call.roles[p.name] in known and type_name(p) != "int"
    ]
    free = not {"key", "value", "context"} & set(call.roles.values())
    for name in letters:
        call.roles[name] = "context" if free and name == letters[0] else None


def type_name(parameter: inspect.Parameter) -> str:
    """The name of the type that a parameter is annotated with."""
    return getattr(parameter.annotation, "__name__", str(parameter.annotation))


def _guess_required(call: Call, text: str) -> None:
    """Required arguments of unknown names: numbers are sizes, the rest a mask, unless
    the text asks for it by `is not None`, and does nothing with it that masks are for."""
    asked = set(re.findall(r"(?<![\w.])(\w+) is not None\b", text))
    may_be_none = {n for n in asked if not re.search(_READ_AS_MASK.format(n), text)}
    sizes = [r for r in ("num_heads", "embed_dim") if not call.takes(r)]
    for parameter in call.parameters:
        name = parameter.name
        if call.roles[name] or parameter.default is not parameter.empty:
            continue
        if name in call.unread or name in may_be_none:
            why = "never read" if name in call.unread else "which its text allows"
            call.guesses.append(f"{name} is None, {why}")
            call.left_none |= {name} & may_be_none
            continue
        if type_name(parameter) == "bool":
            call.roles[name] = "flag"
            if speaks_of_caches(name):
                continue  # off says that there is none
        elif type_name(parameter) == "int" and sizes:
            call.roles[name] = sizes.pop(0)
        elif not call.takes("mask"):
            call.roles[name] = "mask"
        role = call.roles[name]
        guess = f"the {role.replace('_', ' ')}" if role else "one that may be None"
        call.guess([name], guess)


# What masks are for: scores.masked_fill(m, ...), m == 0, scores * m, scores + m, ~m.
_READ_AS_MASK = (
    r"(?:masked_fill\w*|where)\([^\n]*\b{0}\b|\b{0}\b[^\n=]*==\s*(?:0|False)|"
    r"[*+&|]=?\s*~?{0}\b|~{0}\b|\b{0}\b\s*[*&|]"
)
# What may be a mask that is forgotten.
_OF_MASKS = {"mask", "masks", "pad", "padding", "keep", "valid", "causal", "bias"}


def _unread(subject: Subject) -> frozenset[str]:
    """The arguments of a function that it never reads."""
    code = getattr(inspect.unwrap(subject.entry), "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        return frozenset()
    read = set(code.co_cellvars)
    for one in dis.get_instructions(code):
        if "LOAD" in one.opname:  # of two at once, in later versions of Python
            read |= set(one.argval if isinstance(one.argval, tuple) else [one.argval])
    unread = set(code.co_varnames[: code.co_argcount]) - read
    return frozenset(n for n in unread if not set(words(n)) & _OF_MASKS)


def axes(subject: Subject) -> list[str]:
    """The names that the code gives to an input's axes, where it unpacks a shape: what
    is called itself before its helpers."""
    found = _UNPACKED.search(text_of_entry(subject)) or _UNPACKED.search(subject.source)
    if found is None:
        return []
    names = [name.strip() for name in found[1].split(",")]
    return names[: len(names) - found["more"].count(",")]


def text_of_entry(subject: Subject) -> str:
    """The text of what is called."""
    return source_of(inspect.unwrap(subject.entry))


def unpacks_input(subject: Subject, call: Call) -> bool:
    """Whether the first shape that is unpacked is that of a parameter as it came."""
    found = _UNPACKED.search(subject.source)
    name = found["of"] if found else None
    if name not in call.roles:
        return False
    body = subject.source[: found.start()]
    return re.search(rf"^\s*(?:\w+\s*,\s*)*{name}\b[\w\s,]*=[^=]", body, re.M) is None


# batch_size = x.shape[0], or several: length, batch = x.size(0), x.size(1).
_SIZE = r"\w+\.(?:shape\[\s*\d\s*\]|size\(\s*(?:dim\s*=\s*)?\d\s*\))"
_SIZES = re.compile(rf"^[ \t]*(\w+(?:, ?\w+)*) *= *({_SIZE}(?:, ?{_SIZE})*)", re.M)


def _counts_items(subject: Subject) -> bool | None:
    """Whether the items that it counts are the first axis of a parameter, or the
    second; None where it does not count them."""
    code = getattr(inspect.unwrap(subject.entry), "__code__", None)
    given = code.co_varnames[: code.co_argcount] if code else ()
    said = set()
    for found in _SIZES.finditer(text_of_entry(subject)):
        names, sizes = (re.split(", ?", part) for part in found.groups())
        for name, size in zip(names, sizes):
            owner, axis = size.partition(".")[0], re.findall(r"\d", size)[-1]
            if _ITEMS.fullmatch(name.lower()) and owner in given and axis in "01":
                said.add(axis == "0")
    return said.pop() if len(said) == 1 else None


_ITEMS = re.compile(r"b|bs|bsz|batch\w*|b_size")


def states_batch_first(subject: Subject) -> bool | None:
    """What the names of the axes say; None where they say nothing."""
    names = [name.lower() for name in axes(subject)]
    is_entry = _UNPACKED.search(text_of_entry(subject)) is not None
    counted = None if is_entry else _counts_items(subject)
    if len(names) < 3 or counted is not None:
        return _counts_items(subject) if counted is None else counted
    if BATCH.fullmatch(names[0]) and names[:2] != ["n", "b"]:
        return True
    return False if are_batch_and_length(names[1], names[0]) else None
