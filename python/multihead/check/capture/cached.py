# SPDX-License-Identifier: MIT
"""Calls instead of one: all tokens but the last two, then one at a time, on the keys and
values that the calls before returned, or kept in the module."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..calls import arguments, cases
from ..calls.arguments import Arguments
from ..calls.cases import Case
from ..calls.construct import of_class
from ..subject.roles import TENSORS
from ..subject.rooms import ROOMS, written
from ..subject.signature import Call
from ..subject.target import Subject, text_of_file
from ..subject.words import speaks_of_caches

_OF_POSITION = re.compile(r"pos|offset|start|index|idx|step|past|cache")
_CACHE = re.compile(r"cache|past|memory|^(?:c_?[kv]|[kv]_?c|[kv]_?buf\w*)$")
_BEGINS = re.compile(r"(is_)?(pre_?fill|prefix|first(_step|_call)?|reset(_cache)?)")
# A caller that collects what calls return, and joins all of it: torch.cat(past, -2).
_JOINS = re.compile(r"cat(?:enate)?\(\s*(\w*(?:past|present|cache)\w*)\s*[,)]", re.I)
_TAKEN = r"^\s*(\w+)\s*,\s*\w+\s*=\s*{0}\s*(?:#.*)?$"
_NARROW = (torch.bfloat16, torch.float16, torch.int8)
_LAYOUTS = (cases.LAYER, cases.SEQUENCE_FIRST, cases.UNBATCHED)
# What also counts tokens, in a way that a part of them would change.
_COUNTS = ("lengths", "query_length", "key_length", "image", "rows", "columns")
_COUNTS += ("max_length", "sliding_window", "window", "resolution")


@dataclass
class Steps:
    """The arguments of one call with all tokens, `sequence`, and of those that come to
    the same. The name `past` takes what was returned; None where the module keeps it.
    count: the tokens of the first of `parts`, whose others have one each: two, as
    what keeps only the newest key shows no earlier. batch: 0 without one. is_told: it
    is told where a call begins."""

    whole: Arguments
    parts: list[Arguments]
    sequence: Tensor
    past: str | None
    count: int
    batch: int
    is_told: bool
    prepends: bool = field(default=False, init=False)  # the newest stands first
    # What all of `parts` share, where the code's own class of caches is meant.
    store: object | None = None
    # Whether callers put together what calls return, as their file does.
    is_joined: bool = False

    def state(self) -> list[Tensor]:
        """Copies of what `store` holds."""
        return [tensor.clone() for tensor in _tensors(self.store)]

    def handed_on(self, returned: object, count: int, before: object) -> object | None:
        """What the next call is given of what this one returns, for so many tokens: keys
        and values of all, or of the newest alone, beside what it was given `before`
        where callers join them. None where nothing looks like that."""
        past = self.kept(returned, count)
        if past is None and count > self.count:
            past = self.kept(returned, 1)
            if past is not None and self.is_joined:
                past = _joined(before, past)
        return past

    def kept(self, returned: object, count: int) -> object | None:
        """What a call returns for the next: keys and values of so many tokens, in a
        tuple or stacked; None where nothing looks like that."""
        parts = returned if isinstance(returned, (tuple, list)) else ()
        for value in parts:
            tensors = list(_tensors(value))
            stacked = isinstance(value, Tensor) and value.dim() >= 4 and len(value) == 2
            paired = isinstance(value, (tuple, list, dict)) and len(tensors) == 2
            if (stacked or paired) and all(self._counts(t, count) for t in tensors):
                return value
        return None

    def _counts(self, tensor: Tensor, count: int) -> bool:
        """Whether an axis has this size, beside that of the batch."""
        return list(tensor.shape).count(count) > (count == self.batch)

    def keeps(self, before: list[Tensor], after: list[Tensor], count: int) -> bool:
        """Whether a module has kept so many tokens, by what state_of() told before and
        after a call: in a place for more, if it is told where they go or counts them,
        or in tensors of that length."""
        changed = after
        if len(before) == len(after):
            changed = [y for x, y in zip(before, after) if not x.equal(y)]
        if not any(t.dim() for t in changed):
            return False
        if any(t.dtype in _NARROW for t in after):
            return False  # what is rounded is another
        is_told = self.is_told or any(t.dim() == 0 and t == count for t in changed)
        return is_told or sum(self._counts(t, count) for t in after) > 1

    def grows(self, past: object, returned: object, count: int) -> bool:
        """Whether what was kept of so many tokens holds one more after the next, in
        full precision: keys of a context stay as they are, and those in 16 bits are
        others. Notes whether the next stands before them."""
        stays = self.kept(returned, count) is not None
        kept = self.kept(returned, count + 1)
        pairs = list(zip(_tensors(past), _tensors(kept)))
        self.prepends = bool(pairs) and all(_is_end(old, new) for old, new in pairs)
        is_static = stays and kept is None
        return not is_static and all(t.dtype not in _NARROW for t in _tensors(past))


def _is_end(old: Tensor, new: Tensor) -> bool:
    """Whether these stand last in the others, along an axis that is longer by one, and
    not first."""
    longer = [
        i for i, n in enumerate(new.shape) if list(old.shape[i : i + 1]) == [n - 1]
    ]
    if old.dim() != new.dim() or len(longer) != 1:
        return False
    first, last = (new.narrow(longer[0], i, new.shape[longer[0]] - 1) for i in (0, 1))
    return torch.equal(last, old) and not torch.equal(first, old)


def steps(
    call: Call, case: Case, subject: Subject, together: bool = False
) -> Steps | None:
    """None where the code takes several things that a call before may have kept, or
    counts what it is given. together: the last two tokens in one call."""
    taken = [p for p in call.parameters if call.roles[p.name] == "past"]
    keeps = [p.name for p in taken if p.default is None]
    switches = [p.name for p in call.parameters if _is_switch(p, call)]
    if len(keeps) > 1 or any(map(call.takes, _COUNTS)) or case.layout not in _LAYOUTS:
        return None
    plain = replace(case, relation="self", mask=None, padding=None, gradients=False)
    whole = arguments.make(call, plain)
    length, axis = case.sizes.queries, cases.query_axis(case)

    def part(start: int, count: int) -> Arguments:
        given = dict(whole.keywords)
        for name, value in given.items():
            role = call.roles[name]
            if role in TENSORS and isinstance(value, Tensor):
                given[name] = value.narrow(axis, start, count)
            elif role == "rotation":
                given[name] = _rows(value, length, start, count)
            elif role == "position_ids" and isinstance(value, Tensor):
                given[name] = value.narrow(-1, start, count)
            elif role == "zero":
                given[name] = start
        given |= dict.fromkeys(switches, True)
        if start == 0:  # is_prefix: what is kept begins anew
            flags = [p for p in call.parameters if p.default is False]
            given |= {p.name: True for p in flags if _BEGINS.fullmatch(p.name)}
        return Arguments(keywords=given)

    count = max(length - 2, 1)
    later = [(count, 2)] if together else [(at, 1) for at in range(count, length)]
    parts = [part(0, count), *(part(*one) for one in later)]
    past = keeps[0] if keeps else None
    store: object = None
    if past is not None:
        store = _store(subject, case) or _room(past, subject, case)
        if store is None and re.search(rf"\b{past}\.update\(", subject.source):
            store = Joins(count)
    elif rooms := [n for n, role in call.roles.items() if role in ROOMS.values()]:
        past, store = rooms[0], [whole.keywords[name] for name in rooms]
    if store is not None and keeps:
        for one in parts:
            one.keywords[past] = store
    batch = 0 if case.layout == cases.UNBATCHED else case.sizes.batch
    is_told = call.takes("zero") or call.takes("position_ids")
    query = whole.tensors["query"]
    rest = text_of_file(subject).replace(subject.source, "")
    joined = _JOINS.findall(rest)
    is_joined = any(re.search(rf"\b{name}\.append\(", rest) for name in joined)
    return Steps(whole, parts, query, past, count, batch, is_told, store, is_joined)


class Joins:
    """A cache as Transformers' DynamicCache, of code that is handed one and has no class
    for it: update(keys, values) returns these behind those of the calls before."""

    def __init__(self, count: int) -> None:
        """count: of the tokens that the first call has."""
        self.count, self.axis = count, -2
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, *given: object, **named: object):
        """Beside the number of the layer, or of a position."""
        tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
        newest = [x for x in tensors if x.dim() >= 3][:2]
        if self.keys is None:
            self.axis = -2 if newest[0].shape[-2] == self.count else 1
        else:
            newest = _joined([self.keys, self.values], newest)
        self.keys, self.values = newest
        return self.keys, self.values

    def get_seq_length(self, *_: object) -> int:
        return 0 if self.keys is None else self.keys.shape[self.axis]


def _joined(before: object, newest: object) -> object:
    """Keys and values of tokens, with those of more behind them, in the same form."""
    if isinstance(newest, Tensor) and isinstance(before, Tensor):
        sizes = enumerate(zip(before.shape, newest.shape))
        return torch.cat(
            [before, newest], next((i for i, (a, b) in sizes if a != b), -2)
        )
    if isinstance(newest, dict) and isinstance(before, dict):
        return {name: _joined(before[name], value) for name, value in newest.items()}
    assert isinstance(newest, (tuple, list)) and isinstance(before, (tuple, list))
    return [_joined(x, y) for x, y in zip(before, newest)]


def _is_switch(parameter: inspect.Parameter, call: Call) -> bool:
    """Whether a flag, which is off elsewhere, turns on what is kept."""
    role = call.roles[parameter.name]
    is_off = parameter.default is False or role == "flag"
    return is_off and (role == "past" or speaks_of_caches(parameter.name))


def _store(subject: Subject, case: Case) -> object | None:
    """A cache of the class that the file has for it, and whose method the code calls."""
    names = getattr(inspect.unwrap(subject.entry), "__globals__", {})
    for name, kind in list(names.items()):
        if not inspect.isclass(kind) or issubclass(kind, nn.Module):
            continue
        if not _CACHE.search(name.lower()):
            continue
        methods = [n for n in vars(kind) if n[0] != "_"]
        if not any(f".{method}(" in subject.source for method in methods):
            continue
        made = of_class(kind, case.sizes)
        for at, value in vars(made).items() if hasattr(made, "__dict__") else ():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(made, at, value.to(case.dtype))
        return made
    return None


def _room(past: str, subject: Subject, case: Case) -> list[Tensor] | None:
    """Room for keys and values, where the code takes apart what it is given and writes
    into both: `k, v = past; k[:, :, start:end] = ...`."""
    taken = re.search(_TAKEN.format(re.escape(past)), subject.source, re.M)
    role = written(taken[1], subject.source) if taken else None
    return [arguments.room(role, case) for _ in range(2)] if role else None


def is_told_positions(call: Call, source: str) -> bool:
    """Whether nothing else than what a call is given may say where its tokens stand.
    source: the text of the code, which may have no use for an argument."""
    known = {p.name for p in call.parameters if _is_switch(p, call)}
    unknown = [n for n, role in call.roles.items() if role is None and n not in known]
    read = [n for n in unknown if len(re.findall(rf"\b{re.escape(n)}\b", source)) != 1]
    return not any(_OF_POSITION.search(name.lower()) for name in read)


def state_of(module: object) -> list[Tensor]:
    """Copies of what a module may keep from call to call, numbers too."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    found = [v for part in parts for v in _kept_in(part)]
    return [tensor.clone() for tensor in found]


def may_keep(module: object) -> bool:
    """Whether a module has a place for what it keeps from call to call: by its name,
    or an empty one. PyTorch's own modules keep nothing."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    parts = [part for part in parts if not type(part).__module__.startswith("torch.")]
    return any(
        _CACHE.search(name.lower()) or (name[0] != "_" and _is_empty(value))
        for part in parts
        for name, value in (*vars(part).items(), *part._buffers.items())
    )


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def _kept_in(part: nn.Module) -> Iterator[Tensor]:
    for name, value in (*vars(part).items(), *part.named_buffers(recurse=False)):
        if name[0] != "_" or _CACHE.search(name.lower()):
            yield from [torch.tensor(value)] if type(value) is int else _tensors(value)


def _tensors(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Those in it, also in objects of the code's own, which may hold one another."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 0:
        if isinstance(value, (tuple, list)):
            parts = list(value)
        elif isinstance(value, dict):
            parts = list(value.values())
        else:
            is_other = isinstance(value, (nn.Module, type))
            parts = [] if is_other else list(getattr(value, "__dict__", {}).values())
        for part in parts:
            yield from _tensors(part, depth - 1)


def _rows(tables: object, length: int, start: int, count: int) -> object:
    """The rows of tables of positions that belong to some tokens."""
    if isinstance(tables, tuple):
        return tuple(_rows(table, length, start, count) for table in tables)
    sizes = list(tables.shape) if isinstance(tables, Tensor) else []
    known = length in sizes
    return tables.narrow(sizes.index(length), start, count) if known else tables
