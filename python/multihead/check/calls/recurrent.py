# SPDX-License-Identifier: MIT
"""A step of a recurrent decoder, as those of Bahdanau et al. (2015) and Luong et al.
(2015): it is handed its last state, what an encoder returned, (B, L, E) or (L, B, E), and
perhaps a token. The state asks: one query for each item.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..sandbox.unwatched import unrecorded
from ..subject.roles import TENSORS
from ..subject.signature import Call, are_batch_and_length
from ..subject.target import Subject
from ..subject.words import mask_of_words, words
from . import cases
from .forms import Form, called, formed
from .tokens import like

_STATE = {"hidden", "hid", "state", "h", "hn", "s"}
_STEP, _RESULT = {"rnn", "lstm", "gru", "decoder", "dec"}, {"output", "out"}
_CELL = {"cell", "c", "cn"}
_MEMORY = {"encoder", "enc", "encoded", "memory", "outputs", "output", "annotations"}
_MEMORY |= {"features", "feats", "keys", "values", "states", "context", "source", "src"}
_ENCODED = {"encoder", "enc", "encoded"}  # encoder_hidden_states is no state
_FEATURES = {"feature", "features", "feat", "feats", "proj", "projected"}
_STATES = ("of its layer", "(B, E)", "(1, B, E)", "(B, 1, E)", "(B, 2E)")
_TOKENS = ("(B,)", "(B, 1)", "(1, B)", "(B, E)", "(B, 1, E)", "(1, B, E)")
_BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class _Names:
    memory: str
    features: tuple[str, ...]  # of the memory, projected before
    state: str
    cells: tuple[str, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class _Shapes:
    """is_first: the memory is (L, B, E); wide: how often it has the width of the state, as
    one of both directions has; is_flat: features of it are (B·L, E); turns_masks: masks
    are (L, B), as the memory is."""

    is_first: bool
    wide: int
    state: str
    token: str
    is_flat: bool = False
    turns_masks: bool = False


def recurrent(subject: Subject, call: Call) -> Iterator[Form]:
    """The shapes are those of the first call that the code takes, which is tried where
    nothing is recorded."""
    names = _names(call)
    if names is None:
        return
    orders = _orders(subject, names.memory)
    flats = (False, True) if names.features else (False,)
    found: list[tuple[_Shapes, int]] = []  # and how many axes what it returns has

    def how(target: object, /, query: Tensor, key: Tensor, **given: object) -> object:
        def step(shapes: _Shapes) -> tuple[Tensor, int]:
            made = _given(shapes, names, target, query, key, given)
            returned = called(subject, target, made)
            return _of_query(returned, query, key)

        if query.shape[1] != 1 or key.shape[1] == 1:
            raise ValueError("it takes one query, and a memory of several")
        with unrecorded():
            if not found:
                shapes = _that_fit(step, orders, flats, key.shape[1])
                found.append((shapes, step(shapes)[1]))
                is_guess = shapes.is_first and len(orders) > 1
                form.fact = "order_guessed" if is_guess else ""
            shapes, axes = found[0]
            masked = any(isinstance(one, Tensor) for one in given.values())
            turns = masked and shapes.is_first and _is_taken(step, shapes)
        out, shown = step(replace(shapes, turns_masks=turns))
        if shown != axes:
            raise ValueError("what it returns is wider than for other calls")
        return out

    how.has_many = how.has_head = True  # type: ignore[attr-defined]
    taken = [names.memory, *names.features, names.state, *names.cells, *names.tokens]
    parameters = [inspect.Parameter(n, _BY_KEYWORD) for n in ("query", "key")]
    parameters += [
        p.replace(kind=_BY_KEYWORD) for p in call.parameters if p.name not in taken
    ]
    said = f"{names.state}, the last state of a decoder, is the query of {names.memory}"
    form = formed(subject, parameters, how, (cases.LAYER,), said)
    form.queries = 1
    yield form


def _names(call: Call) -> _Names | None:
    """The parameters of a step, by their words; None where it has no state or no
    memory."""
    free = [
        p.name
        for p in call.parameters
        if mask_of_words(p.name) is None
        and (
            p.name in call.guessed
            or call.roles[p.name] in (None, *TENSORS)
            or (set(words(p.name)) & _ENCODED and p.default is p.empty)
        )
        and p.name not in call.unread
        and p.default in (p.empty, None)
    ]
    said = {name: set(words(name)) for name in free}
    encoded = [n for n in free if said[n] & _ENCODED and said[n] & _MEMORY - _ENCODED]
    asks = [n for n in free if said[n] & _STATE]
    asks += [n for n in free if said[n] & _STEP and said[n] & _RESULT]  # rnn_output
    states = [n for n in asks if n not in encoded]
    memories = encoded + [n for n in free if said[n] & _MEMORY and n not in states]
    if not states or not memories:
        return None
    cells = [n for n in free if said[n] & _CELL and n not in (states[0], memories[0])]
    features = [n for n in memories[1:] if said[n] & _FEATURES and n not in cells]
    known = [states[0], memories[0], *features, *cells]
    required = {p.name for p in call.parameters if p.default is p.empty}
    tokens = [n for n in free if n in required and n not in known]
    return _Names(memories[0], tuple(features), states[0], tuple(cells), tuple(tokens))


def _orders(subject: Subject, memory: str) -> tuple[bool, ...]:
    """Whether it is (L, B, E): what its text says, `encoder_outputs: (seq, batch, dim)`,
    or both."""
    name = rf"\b{re.escape(memory)}\b[^\n\w]*(?:\w+[^\n\w]*){{0,3}}?"
    shape = rf"{name}[(\[]\s*([\w ]+?)\s*,\s*([\w ]+?)\s*,"
    for first, second in re.findall(shape, subject.source):
        for batch, length, is_first in ((first, second, False), (second, first, True)):
            if are_batch_and_length(batch.lower(), length.lower()):
                return (is_first,)
    return (False, True)


def _that_fit(
    step: Callable[[_Shapes], object],
    orders: tuple[bool, ...],
    flats: tuple[bool, ...],
    length: int,
) -> _Shapes:
    """The first shapes that it takes; of those of both orders, that in which a softmax
    goes along the memory, which is so long. Raises what it says of the first of all."""
    found: list[tuple[bool, _Shapes]] = []
    first: Exception | None = None
    for is_first in orders:
        axes = (1, 2), _STATES, _TOKENS, flats
        for wide, state, token, is_flat in itertools.product(*axes):
            shapes = _Shapes(is_first, wide, state, token, is_flat)
            try:
                with _Softmaxes() as seen:
                    step(shapes)
            except Exception as error:  # the code's own, of whatever kind
                first = first or error
                continue
            found.append((length not in seen.lengths, shapes))
            break
    if not found:
        assert first is not None
        raise first
    return min(found, key=lambda one: one[0])[1]


class _Softmaxes(TorchDispatchMode):
    """The lengths of the axes along which they go."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports torch._dynamo, which takes two seconds

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "_softmax":
            self.lengths.add(args[0].shape[args[1]])
        return function(*args, **(kwargs or {}))


def _is_taken(step: Callable[[_Shapes], object], shapes: _Shapes) -> bool:
    """Whether it takes masks in the order of its memory."""
    try:
        step(replace(shapes, turns_masks=True))
    except Exception:
        return False
    return True


def _given(
    shapes: _Shapes,
    names: _Names,
    target: object,
    query: Tensor,
    key: Tensor,
    given: dict[str, object],
) -> dict[str, object]:
    memory = torch.cat((key, key.flip(1))[: shapes.wide], -1)
    made = dict(given)
    if shapes.is_first:
        memory = memory.transpose(0, 1)
    for name, value in given.items() if shapes.turns_masks else ():
        if isinstance(value, Tensor) and value.shape == key.shape[:2]:
            made[name] = value.mT
    state, cell = _state(shapes.state, target, query[:, 0], bool(names.cells))
    made |= {names.memory: memory, names.state: state}
    made |= dict.fromkeys(names.cells, cell)
    features = memory.flatten(0, 1) if shapes.is_flat else memory
    made |= dict.fromkeys(names.features, features)
    tokens = _token(shapes.token, query[:, 0])
    return made | dict.fromkeys(names.tokens, tokens)


def _state(
    shape: str, target: object, query: Tensor, has_cell: bool
) -> tuple[object, Tensor]:
    """The state (B, E), or as the recurrent layer of the code has it, and that of its
    cell; both in one where the code has no argument for that."""
    parts = target.modules() if isinstance(target, nn.Module) else ()
    layers = (nn.RNNBase, nn.RNNCellBase)
    layer = next((part for part in parts if isinstance(part, layers)), None)
    width = layer.hidden_size if layer is not None else query.shape[-1]
    repeats = -(-width // query.shape[-1])
    state = torch.cat([query] * repeats, -1)[:, :width]
    if shape == "of its layer":
        if layer is None:
            raise ValueError("it has no recurrent layer")
        if isinstance(layer, nn.RNNBase):
            depth = layer.num_layers * (1 + layer.bidirectional)
            state = torch.stack([state.roll(one, -1) for one in range(depth)])
        cell = state.flip(-1)
        is_pair = isinstance(layer, (nn.LSTM, nn.LSTMCell)) and not has_cell
        return ((state, cell) if is_pair else state), cell
    if shape == "(B, 2E)":
        return torch.cat((state, state.roll(1, -1)), -1), state
    axes = {"(B, E)": None, "(1, B, E)": 0, "(B, 1, E)": 1}
    axis = axes[shape]
    state = state if axis is None else state.unsqueeze(axis)
    return state, state.flip(-1)


def _token(shape: str, query: Tensor) -> Tensor:
    """Tokens, of which nothing is known, or vectors of their embedding."""
    if "E" not in shape:
        numbers = torch.arange(1, len(query) + 1)
        axes = {"(B,)": (-1,), "(B, 1)": (-1, 1), "(1, B)": (1, -1)}
        return numbers.view(axes[shape])
    embedded = torch.arange(query.numel(), dtype=query.dtype).sin().view(query.shape)
    if shape == "(B, E)":
        return embedded
    return embedded.unsqueeze(0 if shape == "(1, B, E)" else 1)


def _of_query(returned: object, query: Tensor, key: Tensor) -> tuple[Tensor, int]:
    """What is returned of an item, as of its query; of weights alone, what they make of
    the memory. And how many axes it has."""
    parts = returned if isinstance(returned, (tuple, list)) else [returned]
    found = [p for p in parts if isinstance(p, Tensor) and p.is_floating_point()]
    if not found:
        raise ValueError("it returns no numbers")
    batch, length = key.shape[:2]
    known = [size for size in (batch, length) if size > 1]
    shapes = [[size for size in one.shape if size > 1] for one in found]
    others = [
        one for one, shown in zip(found, shapes) if sorted(shown) != sorted(known)
    ]
    if not others:
        is_turned = shapes[0] != known
        weights = found[0].reshape((length, batch) if is_turned else (batch, length))
        weights = weights.mT if is_turned else weights
        return torch.bmm(weights.unsqueeze(1), key), found[0].dim()
    first = others[0]
    axes = first.dim()
    if first.dim() == 3 and first.shape[:2] == (1, batch):
        first = first.transpose(0, 1)
    out = like(first, query)
    if not isinstance(out, Tensor) or out.shape != query.shape:
        raise ValueError("it returns nothing that is of its items")
    return out, axes
