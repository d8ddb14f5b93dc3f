# SPDX-License-Identifier: MIT
"""Constructs a class of modules from what the names of its arguments mean."""

import inspect
from dataclasses import replace

from ..report import Finding
from ..sandbox.guard import Guard
from ..subject.roles import CONSTRUCTOR, normal, part_of
from ..subject.signature import type_name
from ..subject.target import Subject
from .cases import Sizes, of_globals

DROPOUT = 0.25
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Config(dict):
    """A configuration that answers every usual name, as an attribute or a key.

    Names that it does not know are absent: getattr(config, name, default) and
    config.get(name, default) give their defaults. `missing` collects them.
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.__dict__ |= {"sizes": sizes, "missing": []}

    def __missing__(self, name):
        role = CONSTRUCTOR.get(normal(str(name))) or part_of(str(name))
        known = {"dropout": DROPOUT, "bias": True, "batch_first": True}
        known |= {"epsilon": 1e-5, "index": 0}
        value = known.get(role, self.sizes.value_of(role))
        if value is None:
            self.missing.append(str(name))
            raise KeyError(name)
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
        # Required arguments of unknown names are sizes, in the usual order.
        sizes = () if self.takes("config") else ("embed_dim", "num_heads")
        free = [role for role in sizes if not self.takes(role)]
        unnamed = [p.name for p in self.parameters if p.default is p.empty]
        unnamed = [name for name in unnamed if self.roles[name] is None]
        self.roles |= dict(zip(unnamed, free))

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

    def takes(self, *roles: str) -> bool:
        return not set(roles).isdisjoint(self.roles.values())

    @property
    def counts_heads(self) -> bool:
        return self.takes("num_heads", "config", "num_kv_heads")

    def fitting(self, sizes: Sizes, num_kv_heads: int | None) -> Sizes:
        """`sizes` as this class can have them: constants of its file win, a class
        that is given no number of heads has one, grouped heads are grouped."""
        fixed = of_globals(self.subject.target.__init__)
        if not self.takes("embed_dim", "config"):
            sizes = replace(sizes, embed=fixed.get("embed_dim", sizes.embed))
        if not self.counts_heads:
            sizes = replace(sizes, heads=fixed.get("num_heads", 1))
            if self.takes("out_dim") and "num_heads" not in fixed:
                sizes = replace(sizes, out=sizes.embed * 5 // 6)
        groups = num_kv_heads or 2
        if self.takes("num_kv_heads") and sizes.heads % groups == 0:
            sizes = replace(sizes, kv_heads=groups)
        if sizes.heads == 1 and self.takes("head_dim"):
            sizes = replace(sizes, out=max(sizes.embed // 6, 2))
        return sizes

    def arguments(self, sizes: Sizes, optional: bool = True) -> dict[str, object]:
        """The arguments by name; if not `optional`, only the required ones."""
        known = {"dropout": DROPOUT, "config": Config(sizes)}
        known |= dict.fromkeys(("bias", "batch_first", "is_causal"), True)
        left = (None, "is_causal", "device", "dtype", "config")
        given = {}
        for parameter in self.parameters:
            role = self.roles[parameter.name]
            value = known.get(role, sizes.value_of(role))
            if parameter.default is parameter.empty:
                of_type = {"bool": False, "float": 0.0, "int": 0}.get(
                    type_name(parameter)
                )
                given[parameter.name] = of_type if value is None else value
            elif optional and value is not None and role not in left:
                derived = role in ("embed_dim", "out_dim", "head_dim")
                if not derived or parameter.default is not None:
                    given[parameter.name] = value
        return given

    def build(self, sizes: Sizes, guard: Guard) -> tuple[object, str, list[Finding]]:
        """An instance, or None, the call that made it as text, and what was found."""
        findings = []
        for optional in (True, False):
            arguments = self.arguments(sizes, optional)
            keywords = dict(arguments)
            by_place = [p.name for p in self.parameters if p.kind is p.POSITIONAL_ONLY]
            positional = [keywords.pop(name) for name in by_place]
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
    missing = [(asked,) for config in configs for asked in config.missing]
    if isinstance(error, (AttributeError, KeyError)) and error.args in missing:
        raise ValueError(
            "check: target must be an instance where its configuration has "
            f"more than usual names, got class {name}, which reads {error.args[0]!r}"
        )


def _shown(arguments: dict[str, object]) -> str:
    return ", ".join(
        f"{name}=…" if isinstance(value, Config) else f"{name}={value!r}"
        for name, value in arguments.items()
    )
