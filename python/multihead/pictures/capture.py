# SPDX-License-Identifier: MIT
"""One call of a module, and the attention that was seen in it."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import functional
from .._call import call
from .._library import pictures

_ops = torch.ops.multihead
_ATTENTION = _ops.fused_attention.default
_NAMES = [argument.name for argument in _ATTENTION._schema.arguments]
# Of attention's arguments, those of which weights do not depend.
_NOT_OF_WEIGHTS = ("value", "dropout_state")
# Parts of names of modules whose keys come from elsewhere than their queries.
_CROSS = ("cross", "encoder_attn", "encdec", "multihead_attn")


@dataclass(frozen=True)
class Facts:
    """What there is to say of pictures beside tensors."""

    tokens: list[str] | None
    query_tokens: list[str] | None
    without: list[str]
    scaled: bool
    item: int
    title: str = ""

    def titled(self, title: str) -> "Facts":
        return replace(self, title=title)

    def text(self, name: str, group: str) -> str:
        """As the operators take it, for the layer of that name."""
        facts = vars(self) | {"name": name, "group": group}
        facts = {key: value for key, value in facts.items() if value is not None}
        return json.dumps(facts, ensure_ascii=False).encode(errors="replace").decode()


@dataclass
class _Call:
    """One call of attention: where, and what it got."""

    path: str
    arguments: dict[str, Any]
    group: str = field(init=False)
    numbers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        parts = self.path.split(".")
        self.group = ".".join(part for part in parts if not part.isdigit())
        self.numbers = tuple(int(part) for part in parts if part.isdigit())

    @property
    def is_cross(self) -> bool:
        return any(part in self.path.lower() for part in _CROSS)


class _Redirect(TorchFunctionMode):
    """PyTorch's functions of attention become those of this package."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            func = functional.scaled_dot_product_attention
        elif func is F.multi_head_attention_forward:
            func = functional.multi_head_attention_forward
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what the kernels get."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.open: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            arguments = dict(zip(_NAMES, args, strict=False)) | kwargs
            for name in _NOT_OF_WEIGHTS:
                arguments.pop(name, None)
            self.calls.append(_Call(self.open[-1] if self.open else "", arguments))
        elif func.namespace == "multihead":
            # Tensors of inference mode bring operators here that are made of others.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def paths(self, module: nn.Module) -> Iterator[None]:
        """Within it, `open` names the modules that are running, the inmost last."""

        def enter(name: str) -> Any:
            return lambda *_: self.open.append(name)

        def leave(*_: Any) -> None:
            self.open.pop()

        with contextlib.ExitStack() as hooks:
            for name, part in module.named_modules():
                before = part.register_forward_pre_hook(enter(name))
                after = part.register_forward_hook(leave, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield


def captured(
    module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], facts: Facts
) -> dict[str, Any]:
    """Pictures of the attention that the module calls with these arguments, by name,
    those of a group beside each other. RuntimeError where none is seen."""
    watch = _Watch()
    with (
        torch.no_grad(),
        functional.backend("auto"),
        _in_evaluation(module),
        _on_kernels(module),
        watch.paths(module),
        watch,
        _Redirect(),
    ):
        module(*inputs, **keywords)
    if not watch.calls:
        raise RuntimeError(
            f"show: {type(module).__name__} must call attention that can be seen, on "
            "the CPU by scaled_dot_product_attention, multi_head_attention_forward or a "
            "layer of PyTorch or this package, got no such call"
        )
    return _drawn(watch.calls, facts)


@contextlib.contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    """Without dropout, and without the way of PyTorch on which no attention is seen."""
    training = [part for part in module.modules() if part.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for part in training:
            part.training = True


@contextlib.contextmanager
def _on_kernels(module: Any) -> Iterator[None]:
    """A model of transformers calls this package's attention."""
    if not hasattr(module, "set_attn_implementation"):
        yield
        return
    try:
        from ..integrations import transformers
    except ImportError:  # an older one: what calls PyTorch's function is seen
        yield
        return
    transformers.register()
    config = module.config
    parts = [name for name in config.sub_configs if getattr(config, name, None)]
    before = {name: getattr(config, name)._attn_implementation for name in parts}
    before[""] = config._attn_implementation
    module.set_attn_implementation("multihead")
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def _drawn(calls: list[_Call], facts: Facts) -> dict[str, Any]:
    groups: dict[str, list[_Call]] = {}
    for each in calls:
        groups.setdefault(each.group, []).append(each)
    operator = pictures().picture_of_heads.default
    named = _NamesOf(facts, calls)
    found: dict[str, Any] = {}
    for group, members in groups.items():
        words = group + (" (cross-attention)" if members[0].is_cross else "")
        for each, name in zip(members, _layer_names(members), strict=True):
            text = named.of(each).text(name, words if len(calls) > 1 else "")
            query, key, *_ = each.arguments.values()
            rules = dict(list(each.arguments.items())[2:])
            unique = name if len(groups) == 1 else f"{words} {name}".strip()
            while unique in found:
                unique += "'"
            found[unique] = call(operator, query, key, **rules, facts=text)
    return found


def _layer_names(members: list[_Call]) -> list[str]:
    """ "layer 3": by the numbers in their paths that differ, else by their order."""
    if len(members) == 1:
        return [f"layer {members[0].numbers[0]}" if members[0].numbers else ""]
    columns = list(zip(*(each.numbers for each in members), strict=False))
    vary = [column for column in columns if len(set(column)) > 1]
    rows = list(zip(*vary, strict=True))
    if len(set(rows)) < len(members):
        return [f"call {i}" for i in range(len(members))]
    return ["layer " + ".".join(map(str, row)) for row in rows]


class _NamesOf:
    """The tokens of each call: those whose number fits it."""

    def __init__(self, facts: Facts, calls: list[_Call]) -> None:
        """ValueError where tokens were given that fit no call."""
        self._facts = facts
        self._has_decoder = any(map(_decodes, calls))
        of_queries, of_keys = (
            {each.arguments[name].size(-2) for each in calls}
            for name in ("query", "key")
        )
        for name in ("tokens", "query_tokens"):
            tokens = getattr(facts, name)
            lengths = of_queries | of_keys if name == "tokens" else of_queries
            if tokens is not None and len(tokens) not in lengths:
                some = " or ".join(map(str, sorted(lengths)))
                raise ValueError(
                    f"show: {name} must have one entry for each of the {some} positions, "
                    f"got {len(tokens)} entries"
                )

    def of(self, each: _Call) -> Facts:
        given = self._facts
        queries, keys = (each.arguments[x].size(-2) for x in ("query", "key"))
        # Where nothing is named a decoder, one layer or more have queries and keys.
        decodes = given.query_tokens is not None and (
            _decodes(each) or not self._has_decoder
        )
        own = given.query_tokens if decodes or given.tokens is None else given.tokens
        crosses = each.is_cross or not self._has_decoder
        others = given.tokens if crosses or not decodes else given.query_tokens
        names_of_queries, names = _fitting(own, queries), _fitting(others, keys)
        if names is None and queries == keys and not each.is_cross:
            names = names_of_queries  # self-attention of another length than tokens
        return replace(given, tokens=names, query_tokens=names_of_queries)


def _decodes(each: _Call) -> bool:
    return "decoder" in each.path.split(".") or each.is_cross


def _fitting(tokens: list[str] | None, length: int) -> list[str] | None:
    return tokens if tokens is not None and len(tokens) == length else None
