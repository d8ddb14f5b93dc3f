# SPDX-License-Identifier: MIT
"""What the arguments of a constructor ask for, by their names and defaults."""

import inspect
import re

from torch import nn

from ..report import Finding
from ..subject.roles import CONSTRUCTOR, SIZES, normal, part_of
from ..subject.signature import COUNTED, MASKING, type_name
from ..subject.texts import source_of
from ..subject.words import OF_VOCABULARIES, role_of_words, words

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ONE_OF_THREE = {"q": "qkv_dim", "k": "qkv_dim", "v": "qkv_dim"}
WIDTHS = ("embed_dim", "out_dim", "head_dim", "qkv_dim")
# What is between 0 and 1, and no size: the decay of averages, as of batch norms.
SHARES = {"decay", "momentum", "slope"}
# Flags that are off by default, and what they switch, by words of their names.
SWITCHES = {"scaling_switch": {"scale", "scaled", "scaling"}}
SWITCHES |= {"dropout_switch": {"drop", "dropout"}}
_OF_SCORES = set("use do is with apply enable by attn attention".split())
_OF_SCORES |= set("score scores dot product logits qk query sqrt dk dim head".split())
_SETTINGS = ("config", "cfg", "conf", "args", "hparams", "opts", "settings")
_LEARNED = {"labels", "seeds", "latents", "queries"}
# A constructor that hands on what it does not name, as it came.
_HANDS_ON = re.compile(r"__init__\(\s*(?:self,\s*)?(?:\*\w+,\s*)?\*\*\w+,?\s*\)")
_OF_SELF = {"self_attention", "self_attn", "is_self_attention"}
_MAKERS = {"cls", "class", "fn", "func", "factory"}
_LAYERS = {"layer", "layers", "blocks"}
_PADS, _NUMBERS = {"pad", "padding"}, {"idx", "index", "id", "token", "tok", "ix"}


def parameters_of(make: object) -> list[inspect.Parameter]:
    """Those of a constructor; where it takes any and hands them on, also of the class
    that it hands them to."""
    found: list[inspect.Parameter] = []
    classes = make.__mro__[1:] if inspect.isclass(make) else ()
    handed_on = [k.__init__ for k in classes if "__init__" in vars(k)]
    for constructor in (make, *handed_on):
        if constructor in (nn.Module.__init__, object.__init__):
            break
        parameters = list(inspect.signature(constructor).parameters.values())
        parameters = parameters[0 if constructor is make else 1 :]
        named = [p for p in parameters if p.kind not in _VARIADIC]
        named = named or _read_by_name(constructor, parameters)
        known = {p.name for p in found}
        found += [_by_keyword(p, found) for p in named if p.name not in known]
        if not parameters or (found and not _hands_all_on(constructor)):
            break
    return found


def _by_keyword(
    parameter: inspect.Parameter, before: list[inspect.Parameter]
) -> inspect.Parameter:
    return parameter.replace(kind=parameter.KEYWORD_ONLY) if before else parameter


def _hands_all_on(constructor: object) -> bool:
    """Whether what it does not name goes on as it came: `super().__init__(**kwargs)`."""
    return bool(_HANDS_ON.search(source_of(constructor)))


def _read_by_name(
    make: object, parameters: list[inspect.Parameter]
) -> list[inspect.Parameter]:
    """What a constructor reads of keywords of any names: `kwargs["config"]`."""
    of_any = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    constructor = make.__init__ if inspect.isclass(make) else make
    if not of_any:
        return []
    text, name = source_of(constructor), re.escape(of_any[0])
    read = re.findall(rf"\b{name}\[[\"'](\w+)[\"']\]", text)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(n, kind) for n in dict.fromkeys(read) if n.isidentifier()]


def role_of(parameter: inspect.Parameter) -> str | None:
    """By the name, unless its default is of another kind."""
    name, default = parameter.name, parameter.default
    if default is parameter.empty and _counts_queries(name):
        return "learned"
    role = CONSTRUCTOR.get(normal(name))
    if default is parameter.empty:  # k=4 counts what else there is
        role = role or _ONE_OF_THREE.get(name.lower())
    role = role or role_of_words(name)
    if role == "max_length" and default is None and not set(words(name)) & COUNTED:
        role = None  # pos_emb, a layer
    if role is None and _last_word(name) in _SETTINGS:
        role = "config"
    makes = "Callable" in str(parameter.annotation) or _last_word(name) in _MAKERS
    if (isinstance(default, str) and role != "dtype") or (makes and role in SIZES):
        return None
    if default is False and MASKING.fullmatch(name):
        return "masking"  # without it, a mask that is given has no use
    if default is False and (switch := _switch_of(name)):
        return switch
    if type(default) is bool and role in (*SIZES, "dropout", "qkv_dim", "mlp_dim"):
        return None
    # A width of 0 is that of what is not there unless it is asked for; row_dim=0 and
    # col_dim=1 are axes.
    if role in WIDTHS and type(default) is int and abs(default) <= 1:
        return None
    if role is None and part_of(name) in ("index", "epsilon"):
        return part_of(name)
    said = set(words(name))
    if role is None and said & _PADS and said & _NUMBERS:
        return "index"
    if role is None and default is parameter.empty and said & OF_VOCABULARIES:
        return "vocabulary"
    if role is None and default is parameter.empty and normal(name) == "depth":
        return "layers"
    counted = said - _LAYERS <= {"num", "n", "kv", "q"}
    return "layers" if role is None and said & _LAYERS and counted else role


def _counts_queries(name: str) -> bool:
    """Whether it is the number of queries that a module learns."""
    said = set(words(name))
    return bool(said & _LEARNED and said & {"num", "n", "number"}) and len(said) == 2


def _last_word(name: str) -> str:
    """The last of its words but "dict": `config` of model_config_dict."""
    said = [word for word in words(name) if word not in ("dict", "dictionary")]
    return said[-1] if said else ""


def _switch_of(name: str) -> str | None:
    """What is off unless it is asked for, as by a flag `use_dropout`."""
    said = set(words(name))
    kind = next((kind for kind, own in SWITCHES.items() if said & own), None)
    # scale_heads or scaled_cosine is something else.
    is_other = kind == "scaling_switch" and said - SWITCHES[kind] - _OF_SCORES
    return None if is_other else kind


def may_be_size(parameter: inspect.Parameter) -> bool:
    kind, said = type_name(parameter), set(words(parameter.name))
    is_other = part_of(parameter.name) or said & (SHARES | OF_VOCABULARIES)
    return kind in ("int", "_empty") and not is_other


def demanded(parameters: list[inspect.Parameter], findings: list[Finding]) -> set[str]:
    """Flags that an assertion of the constructor demands, and that are off unless they
    are given; no self-attention, whose keys ours would show not to be read."""
    off = {p.name for p in parameters if p.default is False} - _OF_SELF
    named = (re.search(r"`assert (?:self\.)?(\w+)[`,]", f.detail) for f in findings)
    return off & {found[1] for found in named if found}


def flags_off(parameters: list[inspect.Parameter], text: str) -> set[str]:
    """Those that are off unless they are given, and decide what the code does."""
    off = {p.name for p in parameters if p.default is False}
    return {n for n in off if re.search(rf"\bif (?:not )?self\.{n}\b", text)}


def size_of(name: str) -> str | None:
    return CONSTRUCTOR.get(normal(name)) or role_of_words(name)


def is_own_module(kind: object) -> bool:
    """Whether it is a class of modules that is none of PyTorch's."""
    is_module = inspect.isclass(kind) and issubclass(kind, nn.Module)
    return is_module and not kind.__module__.startswith("torch.")
