# SPDX-License-Identifier: MIT
"""Modules that a constructor is handed: attention of the file's own, and what stands in
for what nobody has."""

import ast
import contextlib
import functools
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from ..subject.signature import type_name
from ..subject.target import describe
from ..subject.texts import source_of
from ..subject.words import words
from .cases import Case, Sizes

if TYPE_CHECKING:
    from .construct import Construction

_ATTENTION = re.compile(r"att(entio)?n|sdpa|dot_?product|mha", re.IGNORECASE)
_BEHIND = re.compile(
    r"(^|_)(p?ffn?|feed|feedforward|mlp|position_?wise|dense|fc|fully)(_|$)",
    re.IGNORECASE,
)
_ASKED: list[type] = []
_DEFINED = re.compile(r"^class \w*(Att(entio)?n|MHA)\w*\(.*Module", re.M | re.I)
_OF_POSITIONS = re.compile(r"rope|rotary|pos|emb", re.IGNORECASE)
_PLAIN = re.compile(r"full|scaled|dot", re.IGNORECASE)

_RECURRENT = re.compile(r"\b(?:GRU|LSTM|RNN)(?:Cell)?\(")


class Same(nn.Identity):
    """A layer that returns what it is given first, however it is called."""

    def forward(self, *given: object, **named: object) -> object:
        return next(iter((*given, *named.values())), None)


class OfLayer:
    """Stands in for the layer that a function of attention reads its settings of, as
    Transformers' do: module.training, module.num_key_value_groups."""

    def __init__(self, case: Case):
        sizes = case.sizes
        self.training, self.is_causal = case.training, False
        self.num_key_value_groups = sizes.heads // (sizes.kv_heads or sizes.heads)
        self.num_heads, self.head_dim = sizes.heads, sizes.head_dim
        self.scaling = self.scale = sizes.head_dim**-0.5

    def __repr__(self) -> str:
        return "…"


class Behind(nn.Linear):
    """What stands behind attention in a block, of whatever sizes."""

    def __init__(self, width: int, *_: object, **__: object):
        super().__init__(width, width)


def projection(name: str, sizes: Sizes) -> nn.Linear | None:
    """The layer that an argument of this name projects by, if its name says which."""
    said = set(words(name))
    if not said & {"proj", "projection", "linear", "w"}:
        return None
    heads = sizes.heads * sizes.head_dim
    groups = (sizes.kv_heads or sizes.heads) * sizes.head_dim
    if said & {"q", "query"}:
        return nn.Linear(sizes.embed, heads)
    if said & {"k", "v", "key", "value"}:
        return nn.Linear(sizes.embed, groups)
    return nn.Linear(heads, sizes.embed) if said & {"o", "out", "output"} else None


def layers(of: "Construction") -> list[str]:
    """The required arguments that are layers, whatever their names count: what the class
    keeps and calls, `self.attention(x, x, x)`, or hands on to what does; what its
    constructor makes them of, `attention(d_model, h)`."""
    found = []
    for parameter in of.parameters:
        name, kind = parameter.name, parameter.annotation
        numbers = type_name(parameter) in ("int", "float", "bool", "str")
        known = of.roles[name] in ("dropout", "activation", "norm")
        if parameter.default is not parameter.empty or numbers or known:
            continue
        kept = _kept(of.subject.target.__init__).get(name)
        own = rf"\bself\.{kept}\s*" if kept else "(?!)"
        is_called = re.search(rf"{own}\(", of.subject.source)
        of_module = inspect.isclass(kind) and issubclass(kind, nn.Module)
        is_free = of.roles[name] in (None, "max_length")  # as a "block" is taken for
        named = _ATTENTION.search(name) or _BEHIND.search(name)
        meant = of_module or (is_free and named)
        is_handed_on = meant and re.search(
            rf"{own}[,)]", source_of(inspect.unwrap(of.subject.entry))
        )
        unknown = of.roles[name] is None and _makes(of, name)
        if is_called or is_handed_on or unknown:
            found.append(name)
    return found


def handed(of: "Construction", name: str, sizes: Sizes) -> object | None:
    """A layer for an argument of this name: for one of attention one of the file's own,
    None where there is none; what does nothing for another."""
    if not _ATTENTION.search(name):
        # A weight tells that something stands beside attention.
        layer = Behind if _BEHIND.search(name) else Same
        return layer if _makes(of, name) else layer(sizes.embed)
    for kind, construction in _attentions(of):
        has_heads = construction.takes("num_heads", "config")
        if has_heads and of.takes("num_heads") and not _makes(of, name):
            continue  # which has the heads, and hands them on
        if _makes(of, name):
            return kind
        return kind(**construction.arguments(sizes, optional=False))
    return None


def unknown(of: "Construction") -> list[str]:
    """The layers of which nothing says what they do."""
    found = [name for name, role in of.roles.items() if role == "layer"]
    known = (_ATTENTION, _BEHIND, _OF_POSITIONS)  # the last are of the code's own class
    return [name for name in found if not any(k.search(name) for k in known)]


def have_heads(of: "Construction") -> bool:
    """Whether a layer that it is handed has the heads."""
    of_attention = (n for n, role in of.roles.items() if role in ("layer", "attention"))
    named = any(map(_ATTENTION.search, of_attention))
    if of.takes("num_heads") or not named or of.subject.target in _ASKED:
        return False
    _ASKED.append(of.subject.target)  # two classes may be handed each other
    try:
        return any(one.takes("num_heads") for _, one in _attentions(of))
    finally:
        _ASKED.pop()


def _attentions(of: "Construction") -> Iterator[tuple[type, "Construction"]]:
    """The attention classes of the file, plain ones first, that take queries, keys and
    values and no attention themselves. A layer without heads is handed one that has
    them, if need be one that is handed attention, too."""
    without, nested = [], []
    inside = _classes(of.subject.target)
    # A recurrent decoder hands its state, and what is encoded.
    is_recurrent = _RECURRENT.search(_text(of)) is not None
    for kind in sorted(inside, key=lambda k: not _PLAIN.search(k.__name__)):
        one = kind, type(of)(describe(kind))
        count = len(inspect.signature(kind.forward).parameters)
        if count <= (2 if is_recurrent else 3):
            continue
        if one[1].takes("attention", "layer"):
            nested += [one] * one[1].takes("num_heads")
        elif of.takes("num_heads") or one[1].takes("num_heads", "config"):
            yield one
        else:
            without.append(one)
    yield from () if of.takes("num_heads") else nested
    yield from without


@functools.cache
def _classes(target: type) -> tuple[type, ...]:
    """The attention classes that the file of a class knows, or else those of the files
    in its folder."""
    known = getattr(target.__init__, "__globals__", {})
    found = [k for k in known.values() if _is_attention(k) and k is not target]
    file, package = known.get("__file__"), known.get("__package__")
    for path in sorted(pathlib.Path(file).parent.glob("*.py")) if file else ():
        if found or not _DEFINED.search(path.read_text("utf-8", "replace")):
            continue
        name = f"{package}.{path.stem}" if package else path.stem
        with contextlib.suppress(Exception):  # its neighbours are run carefully
            module = importlib.import_module(name)
            found = [k for k in vars(module).values() if _is_attention(k)]
    return tuple(found)


def _is_attention(kind: object) -> bool:
    is_module = inspect.isclass(kind) and issubclass(kind, nn.Module)
    return is_module and _ATTENTION.search(kind.__name__) is not None


@functools.cache
def _kept(constructor: object) -> dict[str, str]:
    """The attributes in which arguments are kept as they are, or as copies; a size would
    be computed with."""
    try:
        tree = ast.parse(textwrap.dedent(source_of(inspect.unwrap(constructor))))
    except SyntaxError:
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            each = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                each = list(zip(target.elts, node.value.elts))
            found |= {
                name: one.attr
                for one, value in each
                if isinstance(one, ast.Attribute) and (name := _copied(value))
            }
    return found


def _copied(value: ast.expr) -> str:
    """The name of which this is the value or a copy: x, copy.deepcopy(x), clones(x, 2)
    or x.to(device)."""
    if isinstance(value, ast.Name):
        return value.id
    if not isinstance(value, ast.Call):
        return ""
    made = ast.unparse(value.func)
    if re.search(r"(copy|clone)\w*$", made) and value.args:
        return _copied(value.args[0])
    is_moved = isinstance(value.func, ast.Attribute) and value.func.attr == "to"
    return _copied(value.func.value) if is_moved else ""


def _makes(of: "Construction", name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\(", _text(of)) is not None


def _text(of: "Construction") -> str:
    return source_of(inspect.unwrap(of.subject.target.__init__))
