# SPDX-License-Identifier: MIT
"""Configurations: one that is made up, which answers usual names, and those that the
code defines itself."""

import ast
import contextlib
import copy
import dataclasses
import dis
import functools
import inspect
import linecache
import re
import sys
import textwrap
import types
import typing

import torch
from torch import nn

from ..subject.roles import CONSTRUCTOR, normal, part_of
from ..subject.target import Subject
from ..subject.texts import source_of
from ..subject.words import role_of_words, words
from .cases import Sizes

DROPOUT = 0.25
MANY = 64  # of what nobody knows: lengths that follow from it are long enough
_LONGEST = 300
_LINES = 4  # of a call that makes a layer
_LONG = 200  # characters of an argument that is shown
_KNOWN = {"dropout": DROPOUT, "bias": True, "batch_first": True}
_KNOWN |= {"epsilon": 1e-5, "index": 0, "device": torch.device("cpu")}
# What part of a head is turned by positions: all of it.
_PARTLY = {"percentage", "percent", "pct", "fraction", "partial"}
# How many blocks a model has, of which attention is a part of one.
_LAYERS = re.compile(r"(n|num|numhidden|numencoder|numdecoder)?(layers?|blocks?)|depth")
_COUNTS = {"n", "num", "number", "size", "len", "length", "max"}
# Parts of a configuration that are one themselves.
_PARTS = {"model", "transformer", "attention", "attn", "network", "net", "encoder"}
_PARTS |= {"decoder", "text", "vision", "vit", "params", "hparams", "config", "cfg"}
_NAMED = re.compile(
    r"config|settings|hyper_?param|hparams|(model|transformer)_?args", re.I
)


# By the names of settings: the texts that they are compared with, and others.
Choices = dict[str, str | float]


def choices_of(text: str) -> dict[str, str]:
    """The texts that code compares its settings with: the first one of each, or that of
    attention as usual."""
    found: dict[str, str] = {}
    for name, first, others in _COMPARED.findall(text):
        said = [first, *re.findall(r"[\"']([\w-]+)[\"']", others)]
        usual = [one for one in said if _USUAL.search(one)]
        known = found.get(name, "")
        if not known or (usual and not _USUAL.search(known)):
            found[name] = (usual or said)[0]
    return found


_COMPARED = re.compile(
    r"(\w+)[\"'\]]*\s*(?:[=!]=|(?:not\s+)?in)\s*[(\[{]?\s*[\"']([\w-]+)[\"']([^)\]}\n]*)"
)
_USUAL = re.compile(r"scaled|softmax|^(dot|full|normal|standard|vanilla|default)", re.I)


class Config(dict):
    """A configuration that answers every usual name, as an attribute or a key.

    Names that it does not know are absent: getattr(config, name, default) and
    config.get(name, default) give their defaults. What is read without one is None,
    or `count` where it counts something; `guessed` collects these.
    """

    def __init__(
        self, sizes: Sizes, choices: Choices | None = None, count: int | None = None
    ):
        super().__init__()
        known = {"sizes": sizes, "choices": choices or {}, "count": count}
        self.__dict__ |= {"guessed": [], **known}

    def __missing__(self, name):
        value = value_for(str(name), self.sizes)
        value = self.choices.get(str(name)) if value is None else value
        if value is None and str(name).lower() in _PARTS:
            value = self
        if value is None:
            self._guess(str(name))
            value = self.count if _COUNTS & set(words(str(name))) else None
        return value

    def _guess(self, name: str) -> None:
        if name not in self.guessed:
            self.guessed.append(name)

    def __contains__(self, name):
        return self.get(name) is not None

    def __getattr__(self, name):
        value, frame = self.get(name), sys._getframe(1)
        if value is None or type(value) in (int, float):
            if _reads_on(frame):
                return self  # a part, as config.position.max_len has it
        if value is None:
            if name.startswith("__") or not _reads_plainly(frame):
                raise AttributeError(name)
            if _calls(frame):
                return self.get  # as config.provide("heads") and config.getint("heads")
            self._guess(name)
            value = MANY if _is_size(frame, name) else None
        return value

    def get(self, name, default=None):
        known = list(self.guessed)
        try:
            value = self[name]
        except KeyError:
            value = None
        self.__dict__["guessed"] = known
        return default if value is None else value


def _instruction(frame: types.FrameType) -> dis.Instruction:
    """What a frame is at."""
    found = dis.get_instructions(frame.f_code)
    return next(one for one in found if one.offset == frame.f_lasti)


def _reads_plainly(frame: types.FrameType) -> bool:
    """Whether an attribute is read as `config.name`, and not asked for by hasattr or
    getattr, whose answer may be that it is not there."""
    return _instruction(frame).opname in ("LOAD_ATTR", "LOAD_METHOD")


def _calls(frame: types.FrameType) -> bool:
    """Whether what is read is called as a method: `config.name(...)`."""
    at = _instruction(frame)
    return at.opname == "LOAD_METHOD" or "NULL|self" in at.argrepr


def _is_size(frame: types.FrameType, name: str) -> bool:
    """Whether a layer is made of it: `nn.Linear(width, config.name)`."""
    lines = linecache.getlines(frame.f_code.co_filename)[: frame.f_lineno]
    layer = rf"\b(?:Linear|Conv1d|Embedding|\w*Norm)\((?:[^()]|\([^()]*\))*\.{name}\b"
    return re.search(layer, "".join(lines[-_LINES:])) is not None


def unpacked(frame: types.FrameType) -> list[str]:
    """The names that a frame is about to give to the parts of something."""
    at = _instruction(frame)
    if at.opname != "UNPACK_SEQUENCE":
        return []
    behind = (i for i in dis.get_instructions(frame.f_code) if i.offset > at.offset)
    stored = [i.argval for i in behind if i.opname.startswith("STORE_")]
    return stored[: at.arg]


def _reads_on(frame: types.FrameType) -> bool:
    """Whether an attribute is read of what is read here: `config.name.other`."""
    is_next = False
    for instruction in dis.get_instructions(frame.f_code):
        if is_next and instruction.opname != "CACHE":
            return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        is_next = is_next or instruction.offset == frame.f_lasti
    return False


def role_of(name: str) -> str | None:
    """The role of a setting by its name."""
    return CONSTRUCTOR.get(normal(name)) or part_of(name) or role_of_words(name)


def value_for(name: str, sizes: Sizes) -> object:
    """What a setting of this name is; None where the name says nothing."""
    if normal(name) == "attentionmultiplier":  # Granite's scale of the scores
        return sizes.head_dim**-0.5
    if normal(name) == "querypreattnscalar":  # Gemma's, before its root divides
        return sizes.head_dim
    if normal(name) in ("srratio", "reductionratio"):  # of keys; 1 would reduce nothing
        return 2
    said = set(words(name))
    if said & {"rope", "rotary"} and said & _PARTLY:
        return 1.0
    if "theta" in said or ("base" in said and said & {"rope", "rotary"}):
        return 10000.0
    if "rank" in said and said & {"lora", "latent"}:  # DeepSeek's, which may be None
        return 2 * sizes.head_dim
    role = role_of(name)
    if role is None and _LAYERS.fullmatch(normal(name)):
        return 2
    return _KNOWN.get(role, sizes.value_of(role))


@functools.cache
def may_count_heads(text: str, configs: tuple[str, ...]) -> bool:
    """Whether code with these configurations may read a number of heads from one, or
    hands one on to others, which may."""
    own = "|".join(map(re.escape, configs))
    hands_on = re.search(rf"([(,=]|\*\*)\s*(self\.)?({own})\s*[,)]", text)
    names = dict.fromkeys(re.findall(r"(?:\.|\[[\"'])(\w+)", text))
    counts = (role_of(name) in ("num_heads", "num_kv_heads") for name in names)
    return bool(configs) and (not text or bool(hands_on) or any(counts))


@functools.cache
def reads(text: str, configs: tuple[str, ...], role: str) -> bool:
    """Whether code reads what has this role from one of these."""
    owner = "|".join(map(re.escape, configs))
    read = re.findall(rf"\b(?:{owner})(?:\.|\[[\"'])(\w+)", text) if configs else ()
    return any(role_of(name) == role for name in read)


def is_stride(name: str) -> bool:
    return not {"stride", "strides"}.isdisjoint(words(name))


def is_of_convolution(name: str, text: str) -> bool:
    """Whether it is how wide a convolution of the code is, or a stride: it may be 1, as
    of one that only projects."""
    of_layer = rf"(Conv\w*|Pool\w*|conv_?\dd?)\([^()]*\b{re.escape(name)}\b"
    is_handed_on = re.search(of_layer, text) is not None
    return is_stride(name) or ("kernel" in words(name) and is_handed_on)


def holds_sizes(value: object) -> bool:
    """Whether these are settings, sizes of attention among them."""
    if value is None or inspect.isclass(value) or isinstance(value, _NO_SETTINGS):
        return False
    roles = {role_of(n) for n, one in _named(value).items() if type(one) is int}
    return not roles.isdisjoint({"embed_dim", "num_heads"})


_NO_SETTINGS = (str, bool, int, float, list, tuple, torch.Tensor, nn.Module, Config)


def _named(settings: object) -> dict[str, object]:
    if isinstance(settings, dict):
        return {name: one for name, one in settings.items() if isinstance(name, str)}
    # Properties are not run.
    return {n: inspect.getattr_static(settings, n, None) for n in _fields(settings)}


def model_for(
    parameter: inspect.Parameter, role: str | None, target: type
) -> object | None:
    """What the code itself has for this configuration: the class of it, or settings
    that are its default."""
    if holds_sizes(parameter.default):
        return parameter.default
    names = vars(sys.modules.get(target.__module__, types)).copy()
    names |= getattr(target.__init__, "__globals__", {})
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = names.get(annotation.strip("'\"").rpartition(".")[2])
    for kind in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(kind) and _is_settings(kind, target):
            return kind
    if role != "config" or annotation not in (parameter.empty, None):
        return None
    named = [k for n, k in names.items() if inspect.isclass(k) and _NAMED.search(n)]
    own = [k for k in dict.fromkeys(named) if _is_settings(k, target)]
    return own[0] if len(own) == 1 else None


def _is_settings(kind: object, target: type) -> bool:
    """Whether a class holds settings: of the code's own, no module, with fields."""
    if not inspect.isclass(kind) or kind is target or issubclass(kind, nn.Module):
        return False
    package = str(kind.__module__).partition(".")[0]
    if package in ("builtins", "typing", "torch", "numpy"):
        return False
    own = [name for name in vars(kind) if not name.startswith("_")]
    plain = [name for name in own if not callable(vars(kind)[name])]
    takes = kind.__init__ is not object.__init__
    return bool(plain or takes or getattr(kind, "__annotations__", ()))


def settings_of(model: object, sizes: Sizes, choices: Choices | None = None) -> object:
    """Settings as the code's own, or of a class of its own: its defaults, but our sizes;
    where they refuse that, those of attention alone."""
    make = _made_of if inspect.isclass(model) else _made_like
    try:
        return make(model, sizes, choices)
    except Exception:
        return make(model, sizes, choices, only=_OF_ATTENTION)


_OF_ATTENTION = {"embed_dim", "num_heads", "num_kv_heads", "head_dim", "max_length"}


def _made_of(
    kind: type, sizes: Sizes, choices: Choices | None, only: set[str] | None = None
) -> object:
    """Settings of this class, which changes defaults only of these roles."""
    given = {}
    for parameter in _parameters(kind):
        is_required = parameter.default is parameter.empty
        if only and not is_required and role_of(parameter.name) not in only:
            continue
        value = _of_parameter(parameter, sizes)
        value = (choices or {}).get(parameter.name) if value in (None, "") else value
        if value is not None or parameter.default is parameter.empty:
            given[parameter.name] = value
    made = kind(**given)
    own = dataclasses.is_dataclass(kind) and {f.name for f in dataclasses.fields(kind)}
    for name in _fields(made):
        if (own and name not in own) or (only and role_of(name) not in only):
            continue  # it is computed from the others
        if name in given:
            continue
        old = getattr(made, name, None)
        is_part = dataclasses.is_dataclass(old) and not inspect.isclass(old)
        value = settings_of(old, sizes, choices) if is_part else value_for(name, sizes)
        if is_part or _may_replace(name, old, value):
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                object.__setattr__(made, name, value)
    return made


def _made_like(
    settings: object,
    sizes: Sizes,
    choices: Choices | None,
    only: set[str] | None = None,
) -> object:
    """A copy of these, of our sizes."""
    ours = {}
    for name, old in _named(settings).items():
        value = (choices or {}).get(name, value_for(name, sizes))
        if (not only or role_of(name) in only) and _may_replace(name, old, value):
            ours[name] = value
    if dataclasses.is_dataclass(settings):
        own = {field.name for field in dataclasses.fields(settings) if field.init}
        with contextlib.suppress(TypeError, ValueError):
            return dataclasses.replace(
                settings, **{name: ours[name] for name in own & ours.keys()}
            )
    made = copy.deepcopy(settings)
    if isinstance(made, dict):
        return made | ours
    for name, value in ours.items():
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            object.__setattr__(made, name, value)
    return made


def _parameters(kind: type) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in found if p.kind in named]


def _of_parameter(parameter: inspect.Parameter, sizes: Sizes) -> object:
    value, default = value_for(parameter.name, sizes), parameter.default
    if re.search(r"\b(list|tuple|dict|sequence)\b", str(parameter.annotation), re.I):
        value = None
    if default is not parameter.empty:
        if isinstance(default, dataclasses.Field) or repr(default) == "<factory>":
            return None
        return value if _may_replace(parameter.name, default, value) else None
    if value is not None:
        return value
    annotation = parameter.annotation
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        return settings_of(annotation, sizes)
    kind = getattr(annotation, "__name__", str(annotation))
    return {"int": 2, "float": 0.0, "bool": False, "str": ""}.get(kind)


def _fields(made: object) -> list[str]:
    names = [n for k in type(made).__mro__ for n in getattr(k, "__annotations__", {})]
    names += [n for k in type(made).__mro__[:-1] for n in vars(k)]
    names += vars(made) if hasattr(made, "__dict__") else []
    return [n for n in dict.fromkeys(names) if not n.startswith("_")]


def _may_replace(name: str, old: object, value: object) -> bool:
    """Whether a default is a size, or a rate, that may be another: no string, no flag
    that switches something on, no part that is a setting itself. Where a window is
    wider than all sequences here, it may be for masks of the caller's to keep to it."""
    if type(old) is bool or type(value) is bool or value is None:
        return False
    if CONSTRUCTOR.get(normal(name)) == "sliding_window":
        return isinstance(old, int) and not _is_wide(old)
    return isinstance(old, (int, float, type(None))) and type(old) in (
        type(value),
        type(None),
        float,
    )


def _is_wide(window: object) -> bool:
    return isinstance(window, int) and window > _LONGEST


def is_only_kept(subject: Subject, name: str) -> bool:
    """Whether the class does nothing with it but `self.name = name`, if that."""
    target = subject.target
    is_whole = inspect.isclass(target) and target.__bases__ == (nn.Module,)
    return is_whole and _is_never_read([subject.source], name)


def is_never_read(kind: type, name: str) -> bool:
    """The same of a class and of those that it inherits from, but PyTorch's."""
    foreign = ("torch", "builtins")
    own = [k for k in kind.__mro__ if not k.__module__.startswith(foreign)]
    return _is_never_read([source_of(one) for one in own], name)


def _is_never_read(sources: list[str], name: str) -> bool:
    read = kept = 0
    for source in sources:
        try:
            tree = ast.parse(textwrap.dedent(source))
        except SyntaxError:
            return False
        for node in ast.walk(tree):
            own = getattr(node, "id", None) or getattr(node, "attr", None)
            if own == name and isinstance(node.ctx, ast.Load):
                read += 1 if isinstance(node, ast.Name) else 2
        keeps = rf"^\s*self\.{re.escape(name)} = {re.escape(name)}$"
        kept += len(re.findall(keeps, source, re.MULTILINE))
    return read == kept <= 1


def shown(arguments: dict[str, object]) -> str:
    """Arguments as they are written in a call."""
    return ", ".join(f"{name}={_written(value)}" for name, value in arguments.items())


def _written(value: object) -> str:
    if isinstance(value, Config):
        return "…"
    if isinstance(value, type) or inspect.isfunction(value):
        return value.__name__
    try:
        text = repr(value)
    except Exception:  # settings that write themselves, and cannot
        text = ""
    is_long = not text or "\n" in text or len(text) > _LONG
    return f"{type(value).__name__}(…)" if is_long else text
