# SPDX-License-Identifier: MIT
"""Constructs a class of modules from what the names of its arguments mean."""

import inspect
from dataclasses import replace

from ..finding import Finding
from ..sandbox.guard import Guard
from ..subject.roles import CONSTRUCTOR, normal, part_of
from ..subject.target import Subject
from .sizes import Sizes, of_globals

DROPOUT = 0.25
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Config(dict):
    """A configuration that answers every usual name, as an attribute or a key.

    Names that it does not know are absent: getattr(config, name, default) and
    config.get(name, default) give their defaults. `asked` collects the roles of
    the names that were read, `missing` the names that are absent.
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.__dict__["sizes"] = sizes
        self.__dict__["asked"] = set()
        self.__dict__["missing"] = []

    def __missing__(self, name):
        role = CONSTRUCTOR.get(normal(str(name))) or part_of(str(name))
        known = {"dropout": DROPOUT, "bias": True, "batch_first": True}
        known |= {"epsilon": 1e-5, "index": 0}
        value = known.get(role, self.sizes.value_of(role))
        if value is None:
            self.missing.append(str(name))
            raise KeyError(name)
        self.asked.add(role)
        return value

    def __contains__(self, name):
        return self.get(name) is not None

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name, default=None):
        try:
            return self[name]
        except KeyError:
            return default


class Construction:
    """How a class is constructed: which arguments are given what."""

    def __init__(self, subject: Subject):
        self.subject = subject
        parameters = inspect.signature(subject.target).parameters.values()
        self.parameters = [p for p in parameters if p.kind not in _VARIADIC]
        self.roles = {p.name: CONSTRUCTOR.get(normal(p.name)) for p in self.parameters}
        self._guess_unnamed()

    @property
    def guessed(self) -> list[str]:
        """The arguments whose value is a guess: configurations that are made up, and
        what is required under a name that says nothing."""
        return [
            p.name
            for p in self.parameters
            if self.roles[p.name] == "config"
            or (p.default is p.empty and CONSTRUCTOR.get(normal(p.name)) is None)
        ]

    def _guess_unnamed(self) -> None:
        """Gives required arguments of unknown names a size, in the usual order."""
        taken = set(self.roles.values())
        sizes = () if "config" in taken else ("embed_dim", "num_heads")
        free = [r for r in sizes if r not in taken]
        for parameter in self.parameters:
            required = parameter.default is parameter.empty
            if free and required and self.roles[parameter.name] is None:
                self.roles[parameter.name] = free.pop(0)

    @property
    def counts_heads(self) -> bool:
        return bool({"num_heads", "config", "num_kv_heads"} & set(self.roles.values()))

    @property
    def is_of_fixed_width(self) -> bool:
        widths = {"embed_dim", "config", "out_dim", "head_dim"}
        return not widths & set(self.roles.values())

    def fitting(self, sizes: Sizes, num_kv_heads: int | None) -> Sizes:
        """`sizes` as this class can have them: constants of its file win, a class
        that is given no number of heads has one, grouped heads are grouped."""
        roles = set(self.roles.values())
        fixed = of_globals(self.subject.target.__init__)
        if "embed_dim" not in roles and "config" not in roles:
            sizes = replace(sizes, embed=fixed.get("embed_dim", sizes.embed))
        if not self.counts_heads:
            sizes = replace(sizes, heads=fixed.get("num_heads", 1))
            if "out_dim" in roles and "num_heads" not in fixed:
                sizes = replace(sizes, out=sizes.embed * 5 // 6)
        if "num_kv_heads" in roles or "config" in roles:
            groups = num_kv_heads or 2
            if "num_kv_heads" in roles and sizes.heads % groups == 0:
                sizes = replace(sizes, kv_heads=groups)
        if sizes.heads == 1 and "head_dim" in roles:
            sizes = replace(sizes, out=max(sizes.embed // 6, 2))
        return sizes

    def arguments(self, sizes: Sizes, optional: bool = True) -> dict[str, object]:
        """The arguments by name; without those that have a default, if not
        `optional`."""
        given = {}
        for parameter in self.parameters:
            role = self.roles[parameter.name]
            has_default = parameter.default is not parameter.empty
            if has_default and (not optional or self._is_better_left(parameter, role)):
                continue
            value = self._value(role, sizes)
            if value is None and not has_default:
                value = _by_annotation(parameter)
            if value is not None or not has_default:
                given[parameter.name] = value
        return given

    def _is_better_left(self, parameter: inspect.Parameter, role: str | None) -> bool:
        derived = ("embed_dim", "out_dim", "head_dim")
        if role in derived and parameter.default is None:
            return True
        return role in (None, "is_causal", "device", "dtype", "config")

    def _value(self, role: str | None, sizes: Sizes) -> object:
        if role == "config":
            return Config(sizes)
        return {
            "dropout": DROPOUT,
            "bias": True,
            "batch_first": True,
            "is_causal": True,
        }.get(role, sizes.value_of(role))

    def build(self, sizes: Sizes, guard: Guard) -> tuple[object, str, list[Finding]]:
        """An instance, or None, the call that made it as text, and what was found."""
        findings = []
        for optional in (True, False):
            arguments = self.arguments(sizes, optional)
            keywords, positional = dict(arguments), []
            for parameter in self.parameters:
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    positional.append(keywords.pop(parameter.name))
            outcome = guard.call(self.subject.target, *positional, **keywords)
            call = f"{self.subject.name}({_shown(arguments)})"
            if outcome.error is None:
                return outcome.value, call, outcome.findings
            _refuse_if_missing(arguments, outcome.error, self.subject.name)
            findings = findings or [
                replace(f, detail=f"{f.detail}\nconstructed as {call}".strip())
                for f in outcome.findings
            ]
        return None, "", findings


def _refuse_if_missing(arguments: dict, error: BaseException, name: str) -> None:
    """A configuration that was made up and falls short is no fault of the code."""
    configs = [a for a in arguments.values() if isinstance(a, Config)]
    if isinstance(error, (AttributeError, KeyError)):
        for asked in (n for c in configs for n in c.missing):
            if error.args == (asked,):
                raise ValueError(
                    "check: target must be an instance where its configuration has "
                    f"more than usual names, got class {name}, which reads {asked!r}"
                )


def _by_annotation(parameter: inspect.Parameter) -> object:
    """A value for an argument of which nothing but its type is known."""
    name = getattr(parameter.annotation, "__name__", str(parameter.annotation))
    return {"bool": False, "float": 0.0, "int": 0}.get(name)


def _shown(arguments: dict[str, object]) -> str:
    return ", ".join(
        f"{name}=…" if isinstance(value, Config) else f"{name}={value!r}"
        for name, value in arguments.items()
    )
