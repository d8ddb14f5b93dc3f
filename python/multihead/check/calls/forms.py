# SPDX-License-Identifier: MIT
"""Other forms in which code takes its sequences: several in one tensor, or in one
tuple, or with an axis more than a batch. Each is a way to call the same code with the
usual tensors, so that all the rest of a check knows nothing of it.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..subject import signature
from ..subject.documented import are_items
from ..subject.roles import TENSORS, normal, role_of_name
from ..subject.signature import Call
from ..subject.target import Subject
from ..subject.texts import text_of
from . import cases

_QKV = re.compile(r"qkv|kqv|query_key_value|q_k_v", re.IGNORECASE)
# As FlashAttention has them: cu_seqlens_q, max_seqlen_k.
_ENDS = re.compile(
    r"cu_?seq_?len\w*|cu_?lens?(_\w+)?|cum\w*_(seq_?)?len\w*", re.IGNORECASE
)
_LONGEST = re.compile(r"max_?seq_?len\w*", re.IGNORECASE)
# What code does, speaks of or complains of that has heads in an axis of their own.
_HEADS = re.compile(
    r"head|einsum|rearrange|permute|(transpose|swapaxes)\(-?\d, -?\d|expected 4, got 3"
)
_BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_CUT = 4  # heads, which divide the widths of all cases


@dataclass
class Form:
    """A form: the subject as it is called in it, the call, which layouts it can have
    (those of any layer if empty), and what is said of it. guess: the parameters whose
    form is a guess. batch: how many items it needs to show what it does, if it does;
    queries: how many it can have; shares_queries: all items have the same."""

    subject: Subject
    call: Call
    layouts: tuple[str, ...]
    said: str
    guess: tuple[str, ...] = ()
    batch: int | None = None
    queries: int | None = None
    shares_queries: bool = False
    kv_heads: int | None = None
    # Of an image that the code cuts, so that it decides how many positions there are.
    side: int | None = None
    parts: tuple[int, ...] = ()  # the sizes that a sequence of queries is of
    fact: str = ""  # what the engine is told of it
    chosen: tuple[str, ...] = ()  # arguments of which we chose one way that it has

    def keep(self, inputs: object) -> None:
        """Has all calls take what these inputs hold beside tensors, by name."""
        named = inputs.items() if isinstance(inputs, dict) else ()
        kept = {n: v for n, v in named if n in self.call.roles}
        plain = {n: v for n, v in kept.items() if not isinstance(v, (Tensor, tuple))}
        self.call.fixed |= {n: v for n, v in plain.items() if v is not None}


def in_parts(subject: Subject, call: Call) -> Iterator[Form]:
    """With parameters that the code unpacks at once, `keys, values = memory`, as
    tuples of what their parts are called."""
    parts = _unpacked(subject, call)
    if not parts:
        return

    def how(target: object, /, **given: object) -> object:
        for name, names in parts.items():
            given[name] = tuple(given.pop(part, None) for part in names)
        return called(subject, target, given)

    parameters = []
    for parameter in call.parameters:
        names = parts.get(parameter.name, [parameter.name])
        default = parameter.empty if parameter.name in parts else parameter.default
        parameters += [
            inspect.Parameter(name, _BY_KEYWORD, default=default) for name in names
        ]
    told = "; ".join(f"{name} = ({', '.join(p)})" for name, p in parts.items())
    yield formed(subject, parameters, how, (), f"called with tuples: {told}")


def packed(subject: Subject, call: Call) -> Iterator[Form]:
    """With queries, keys and values in one tensor: side by side, of all heads or of
    each, or along an axis of their own."""
    inputs = [n for n, role in call.roles.items() if role in (*TENSORS, "weight")]
    named = [n for n in inputs if _QKV.search(n) or _is_cut(n, subject.source)]
    if len(inputs) != 1 or not named:
        return
    name, others = named[0], [p for p in call.parameters if p.name != named[0]]
    ways: list[tuple[tuple[str, ...], Callable, str]] = []
    for layout, axis in ((cases.LAYER, -1), (cases.CHANNELS_FIRST, 1)):
        for join, order in ((_of_all_heads, "(3, H, D)"), (_of_each_head, "(H, 3, D)")):
            ways.append(((layout,), functools.partial(join, axis=axis), order))
    for layout, axis in ((cases.HEADS_LATER, 2), (cases.HEADS, 2), (cases.HEADS, 0)):
        ways.append(((layout,), functools.partial(_stacked, axis=axis), f"axis {axis}"))
    for layouts, join, order in ways:

        def how(target: object, /, join=join, **given: object) -> object:
            three = [given.pop(role) for role in TENSORS[:3]]
            given[name] = join(three, given.pop("num_heads"))
            return called(subject, target, given)

        wanted = [*TENSORS[:3], "num_heads"]
        parameters = [inspect.Parameter(n, _BY_KEYWORD) for n in wanted]
        parameters += [p.replace(kind=_BY_KEYWORD) for p in others]
        said = f"{name} taken for queries, keys and values in one, {order}"
        form = formed(subject, parameters, how, layouts, said, (name,))
        form.call.is_packed = True
        yield form


def _is_cut(name: str, source: str) -> bool:
    """Whether the code makes queries, keys and values of it by its shape alone, as
    `qkv = x.reshape(...)` does."""
    own, cuts = re.escape(name), "reshape|view|unflatten|chunk|permute"
    cut = rf"^\s*(?:{_QKV.pattern})\w*\s*=\s*"
    cut += rf"(?:rearrange\(\s*{own}\s*,|{own}\.(?:{cuts})\()"
    return re.search(cut, source, re.IGNORECASE | re.MULTILINE) is not None


def joined(subject: Subject, call: Call) -> Iterator[Form]:
    """With all sequences of a batch behind one another, (B·L, H, D), and where each of
    them ends."""
    inputs = [call.parameter(role) for role in TENSORS[:3]]
    ends = [n for n in call.roles if _ENDS.fullmatch(n)]
    if not ends or not all(inputs):
        return
    longest = [n for n in call.roles if _LONGEST.fullmatch(n)]

    def how(target: object, /, **given: object) -> object:
        batch, length = given[inputs[0]].shape[:2]  # type: ignore[attr-defined]
        keys = given[inputs[1]].shape[1]  # type: ignore[attr-defined]
        if keys != length and len(ends) == 1:
            raise ValueError("it takes one length for queries and keys")
        for name in (*ends, *longest):
            of_keys = normal(name)[-1] == "k" or normal(name).endswith("kv")
            one = keys if of_keys else length
            steps = torch.arange(batch + 1, dtype=torch.int32) * one
            given[name] = steps if name in ends else one
        joins = {n: given[n].flatten(0, 1) for n in inputs}  # type: ignore[attr-defined]
        returned = called(subject, target, {**given, **joins})
        several = isinstance(returned, (tuple, list))
        out = returned[0] if several else returned
        return out.unflatten(0, (batch, length))

    parameters = [
        p.replace(kind=_BY_KEYWORD)
        for p in call.parameters
        if p.name not in (*ends, *longest)
    ]
    said = "items behind one another, (B·L, H, D)"
    yield formed(subject, parameters, how, (cases.HEADS_LATER,), said)


def with_an_axis_more(subject: Subject, call: Call) -> Iterator[Form]:
    """With tensors of four axes, (B, P, L, E), whose tokens stand along any of the
    first three."""
    inputs = [n for n, role in call.roles.items() if role in TENSORS]
    # Which axis is attended along nothing says: what the numbers explain is believed.
    for place, shown in ((2, "(B, P, L, E)"), (1, "(B, L, P, E)"), (0, "(L, P, B, E)")):

        def how(target: object, /, place=place, **given: object) -> object:
            wide = {n: _split(t, place) if n in inputs else t for n, t in given.items()}
            returned = called(subject, target, wide)
            several = isinstance(returned, (tuple, list))
            parts = list(returned) if several else [returned]
            # Weights have another axis more, in an order that nothing says.
            parts = [_merged(p, place) for p in parts if getattr(p, "ndim", 0) <= 4]
            return tuple(parts) if several else parts[0]

        how.merge = functools.partial(_merged, place=place)  # type: ignore[attr-defined]
        how.splits_batch = True  # type: ignore[attr-defined]
        parameters = [p.replace(kind=_BY_KEYWORD) for p in call.parameters]
        said = f"tensors as {shown}, attended along L"
        form = formed(subject, parameters, how, (cases.LAYER,), said, tuple(inputs))
        form.batch = 4  # two by two, so that what passes between them shows
        yield form


def _of_one_query(returned: object, axis: int) -> object:
    """What is returned of queries (B, E), as of queries (B, 1, E), or (1, B, E) where
    axis is 0: weights (B, Lk) are (B, 1, Lk) in both."""
    if isinstance(returned, dict):
        return {name: _of_one_query(part, axis) for name, part in returned.items()}
    if isinstance(returned, (tuple, list)):
        first, *others = returned
        return (_of_one_query(first, axis), *(_of_one_query(one, 1) for one in others))
    is_flat = isinstance(returned, Tensor) and returned.dim() == 2
    return returned.unsqueeze(axis) if is_flat else returned


def with_one_query(
    subject: Subject, call: Call, is_core: bool = False
) -> Iterator[Form]:
    """With one query for each item, (B, E) or (B, 1, E), beside sequences (B, L, E), or
    beside (L, B, E) where it is handed its heads, and gives the query an axis."""
    asking = call.parameter("query") or call.parameter("x")
    widened = rf"\b{asking}(?:\.unsqueeze\(|\[[^\]\n]*None)"
    if asking is None or (is_core and not re.search(widened, subject.source)):
        return
    beside, known = "", replace(call, roles=dict(call.roles))
    if not any(map(call.takes, ("key", "context"))):
        if "context" in call.roles or not known.read_unknown_as_context():
            return
        beside = known.parameter("context") or ""

    # One vector for each item, too, where its docstring speaks of no sequence.
    of_keys = [n for n, role in known.roles.items() if role in TENSORS and n != asking]
    shared = of_keys if are_items(subject) else []

    def how(target: object, /, squeezes: bool, **given: object) -> object:
        if beside:
            given[beside] = given.pop("context")
        query = given[asking]
        axis = 0 if getattr(query, "shape", ())[:1] == (1,) else 1  # (1, B, D)
        if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[axis] != 1:
            raise ValueError("it takes one query")
        given[asking] = query.squeeze(axis) if squeezes else query
        for name in shared:
            sequence = given[name]
            assert isinstance(sequence, Tensor)
            given[name] = sequence[:, 0]
        return _of_one_query(called(subject, target, given), axis)

    parameters = [
        p.replace(kind=_BY_KEYWORD, name="context" if p.name == beside else p.name)
        for p in call.parameters
    ]
    for squeezes, shape in ((True, "(B, E)"), (False, "(B, 1, E)")):
        one = functools.partial(how, squeezes=squeezes)
        said = f"{asking} as one query for each item, {shape}"
        if shared:
            said += (
                f", beside {' and '.join(shared)} as one vector for each, as it says"
            )
        guess = () if shared else (asking,)
        layouts = (cases.SINGLE, cases.SINGLE_OF_STEPS) if is_core else (cases.LAYER,)
        form = formed(subject, parameters, one, layouts, said, guess)
        if shared:  # which of them asks makes no difference
            form.call.guessed -= {asking, *shared}
        form.queries = 1
        yield form


OF_POSITIONS = ("rotation", "positions", "position_ids")


def with_positions(subject: Subject, call: Call) -> Iterator[Form]:
    """With positions, or what turns by them, that may be left out as it says, and must
    not."""
    names = [
        p.name
        for p in call.parameters
        if p.default is None and role_of_name(p.name) in OF_POSITIONS
    ]
    if not names:
        return

    def how(target: object, /, **given: object) -> object:
        return called(subject, target, given)

    parameters = [
        p.replace(kind=_BY_KEYWORD, default=p.empty if p.name in names else p.default)
        for p in call.parameters
    ]
    said = f"{' and '.join(names)} given, without which it raises"
    yield formed(subject, parameters, how, (), said)


def with_transposed_keys(subject: Subject, call: Call) -> Iterator[Form]:
    """With keys of heads as they meet the queries, (B, H, D, L)."""
    name = call.parameter("key")
    if name is None or not call.takes("value"):
        return

    def how(target: object, /, **given: object) -> object:
        keys = given[name]
        if isinstance(keys, Tensor):
            given[name] = keys.transpose(-2, -1)
        return called(subject, target, given)

    parameters = [p.replace(kind=_BY_KEYWORD) for p in call.parameters]
    layouts = (cases.HEADS, cases.SINGLE)
    form = formed(subject, parameters, how, layouts, f"{name} transposed", (name,))
    form.fact = "keys_transposed"
    yield form


def with_shared_keys(subject: Subject, call: Call) -> Iterator[Form]:
    """With queries of heads, (B, H, L, D), and keys and values that all of them share,
    (B, L, D) (Shazeer, 2019)."""
    shared = [call.parameter("key"), call.parameter("value")]
    if not all(shared):
        return

    def how(target: object, /, **given: object) -> object:
        for name in shared:
            of_heads = given[name]
            if isinstance(of_heads, Tensor) and of_heads.dim() == 4:
                given[name] = of_heads.squeeze(1)
        return called(subject, target, given)

    parameters = [p.replace(kind=_BY_KEYWORD) for p in call.parameters]
    said = f"{' and '.join(shared)} taken for (B, L, D), which all heads share"
    form = formed(subject, parameters, how, (cases.HEADS,), said)
    form.kv_heads = 1
    yield form


def with_cut_heads(
    subject: Subject, call: Call, complaints: str = ""
) -> Iterator[Form]:
    """With heads (B, H, L, D), (B, L, H, D) or, as in Megatron-LM, (L, B, H, D), which
    it returns as (B, L, H·D) or (L, B, H·D); or those of one item, (H, L, D).
    complaints: what it says of other forms."""
    inputs = [call.parameter(role) for role in ("query", "key", "value")]
    said = f"{call.parameters} {subject.source} {complaints}".lower()
    if not all(inputs) or call.takes("num_heads") or not _HEADS.search(said):
        return

    def how(target: object, /, before_length: bool, **given: object) -> object:
        for name in inputs:
            value = given[name]
            if isinstance(value, Tensor) and value.dim() in (2, 3):
                heads = value.unflatten(-1, (_CUT, -1))
                given[name] = heads.transpose(-3, -2) if before_length else heads
        return called(subject, target, given)

    parameters = [p.replace(kind=_BY_KEYWORD) for p in call.parameters]
    orders = [
        (True, cases.LAYER, "(B, H, L, D)", "(B, L, H·D)"),
        (False, cases.LAYER, "(B, L, H, D)", "(B, L, H·D)"),
        (False, cases.SEQUENCE_FIRST, "(L, B, H, D)", "(L, B, H·D)"),
        (True, cases.UNBATCHED, "(H, L, D)", "(L, H·D)"),
    ]
    for before_length, layout, taken, returned in orders:
        one = functools.partial(how, before_length=before_length)
        said = f"{_CUT} heads taken as {taken} and returned as {returned}"
        form = formed(subject, parameters, one, (layout,), said)
        form.call.bound["num_heads"] = _CUT
        yield form


def formed(
    subject: Subject,
    parameters: list[inspect.Parameter],
    how: Callable,
    layouts: tuple[str, ...],
    said: str,
    guess: tuple[str, ...] = (),
) -> Form:
    """The form of a subject that is called as `how` does, with these parameters."""

    def entry(**given: object) -> None:
        """Only its signature counts."""

    unique = {parameter.name: parameter for parameter in parameters}
    required = [p for p in unique.values() if p.default is p.empty]
    optional = [p for p in unique.values() if p.default is not p.empty]
    entry.__wrapped__ = subject.entry  # type: ignore[attr-defined]
    entry.__signature__ = inspect.Signature([*required, *optional])  # type: ignore[attr-defined]
    same = replace(subject, entry=entry, how=how, findings=[])
    return Form(same, signature.read(same), layouts, said, guess)


def called(subject: Subject, target: object, given: dict[str, object]) -> object:
    """What the code returns for these arguments."""
    if subject.how is not None:
        return subject.how(target, **given)
    entry = target if callable(target) else target.forward  # type: ignore[attr-defined]
    kinds = inspect.signature(subject.entry).parameters
    by_place = [n for n in given if kinds[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    return entry(*(given.pop(n) for n in by_place), **given)


def _of_all_heads(three: list[Tensor], heads: int, axis: int) -> Tensor:
    return torch.cat(three, axis)


def _of_each_head(three: list[Tensor], heads: int, axis: int) -> Tensor:
    parts = [t.unflatten(axis, (heads, -1)) for t in three]
    place = axis if axis < 0 else axis + 1
    joined = torch.cat(parts, place)
    return joined.flatten(-2) if axis < 0 else joined.flatten(axis, axis + 1)


def _stacked(three: list[Tensor], heads: int, axis: int) -> Tensor:
    return torch.stack(three, axis)


def _split(value: object, place: int) -> object:
    """(B, L, E) with the batch in two axes, and L at `place`."""
    if not isinstance(value, Tensor) or value.dim() != 3:
        return value
    batch = len(value)
    parts = value.unflatten(0, (batch // 2, 2) if batch % 2 == 0 else (1, batch))
    return parts.movedim(2, place)


def _merged(value: object, place: int) -> object:
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    return value.movedim(place, 2).flatten(0, 1)


def splits_batch(subject: Subject) -> bool:
    """Whether items of our batch may be parts of one, as frames are."""
    return getattr(subject.how, "splits_batch", False)


def merged_draw(kept: Tensor, how: Callable | None, batch: int) -> Tensor:
    """What was drawn in such a form, as the tensors are that a check knows: weights,
    of an axis more, have the batch in their first two, or behind their heads."""
    merge = getattr(how, "merge", None)
    if merge is None or kept.dim() < 4 or kept.shape[0] == batch:
        return kept
    if kept.dim() == 5 and kept.shape[:2].numel() != batch == kept.shape[1:3].numel():
        kept = kept.movedim(0, 2)
    return merge(kept) if kept.dim() == 4 else kept.flatten(0, 1)


def _unpacked(subject: Subject, call: Call) -> dict[str, list[str]]:
    """The parameters that the code unpacks as they came, and the names of the parts."""
    roles = call.roles
    kinds = (*TENSORS, None, "mask", "embed_dim")  # a number is not unpacked
    wanted = {n for n, role in roles.items() if role in kinds}
    if len(roles) == 1:
        wanted = set(roles)
    tree = _tree(subject.entry)
    found = _cut_by_numbers(tree, wanted)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(
            node.targets[0], ast.Tuple
        ):
            continue
        names = [n.id for n in node.targets[0].elts if isinstance(n, ast.Name)]
        whole = len(names) == len(node.targets[0].elts) > 1
        value = node.value
        if isinstance(value, ast.Tuple):  # x[0], x[1]
            owners = {
                n.value.id
                for n in value.elts
                if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)
            }
            parts = all(isinstance(n, ast.Subscript) for n in value.elts)
            value = ast.Name(owners.pop()) if parts and len(owners) == 1 else value
        if whole and isinstance(value, ast.Name) and value.id in wanted:
            found.setdefault(value.id, names)
    taken = set(roles) - set(found)
    clash = [n for names in found.values() for n in names if n in taken]
    return {} if clash else found


def _cut_by_numbers(tree: ast.AST, wanted: set[str]) -> dict[str, list[str]]:
    """Those that are only read by number, `q = proj(x[0])`, and what the parts become,
    if these are names of sequences."""
    read = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in wanted]
    parts: dict[str, dict[int, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(
            node.targets[0], ast.Name
        ):
            continue
        for cut in filter(_is_part, ast.walk(node.value)):
            numbers = parts.setdefault(cut.value.id, {})  # type: ignore[attr-defined]
            numbers[cut.slice.value] = node.targets[0].id  # type: ignore[attr-defined]
    return {
        owner: [numbers[i] for i in sorted(numbers)]
        for owner, numbers in parts.items()
        if sorted(numbers) in ([0, 1], [0, 1, 2])
        and len(numbers) == read.count(owner)
        and all(role_of_name(n) in TENSORS for n in numbers.values())
    }


def _is_part(node: ast.AST) -> bool:
    is_cut = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    return is_cut and type(getattr(node.slice, "value", None)) is int  # type: ignore[attr-defined]


def _tree(entry: Callable) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(text_of(inspect.unwrap(entry))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return ast.Module([], [])
