# SPDX-License-Identifier: MIT
"""Whole models, which take the numbers of tokens, (B, L): what they look up for these
are our sequences, and nothing for all else, as for positions. What their first
attention does can then be judged as that of any layer.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..subject.roles import TENSORS
from ..subject.signature import Call
from ..subject.target import Subject, text_of_file
from ..subject.words import mask_of_words, words
from . import cases
from .forms import Form, called, formed

# What a lookup says of a sequence, and what takes one.
_OF_NUMBERS = re.compile(
    r"'indices'|embedding|\bLong\b|LongTensor|one_hot|IntTensor|must be integ", re.I
)
# What compares tokens with that of padding, `src != self.pad_idx` or `src != 0`, or hands
# them on to what does, `make_mask(src, self.pad_idx)`; and what hands on tokens alone.
_PAD = r"((?:self\.)?\w*pad\w*)"
_COMPARED = (
    rf"\b(\w+)(?:\.data)?\s*(?:!=|==|\.eq\(|\.ne\()\s*\(?{_PAD}\b(?!\s*\()",
    rf"mask\w*\(\s*(\w+)\s*,\s*{_PAD}\s*[,)]",
    r"\b(\w+)(?:\.data)?\s*(?:!=|==|>|\.eq\(|\.ne\(|\.gt\()\s*(0)\b",
)
_HANDED = r"mask\w*\(\s*{0}\b"
_LOOKS_UP = re.compile(r"\bEmbedding\(")
_NAMES = {"src", "trg", "tgt", "source", "target", "targets", "ids", "tokens", "seq"}
_NAMES |= {"dec", "enc", "input", "inputs", "encoder", "decoder", "sequence"}
_ENCODED = {"enc", "encoder", "encoded", "memory", "context", "features"}
_BY_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# Numbers of tokens: none is usual for padding, and there are few of them.
_FIRST, _COUNT = 5, 50


def of_tokens(subject: Subject, call: Call, complaints: str = "") -> Iterator[Form]:
    """One of the parameters as our sequence, each in turn, beside others of its kind as
    tokens of nothing. complaints: what it says of other forms."""
    inputs = _inputs(call)
    looks_up = _OF_NUMBERS.search(complaints) or _LOOKS_UP.search(text_of_file(subject))
    if subject.kind == "function" or not inputs or not looks_up:
        return
    # What is encoded already, as a decoder reads it, is no tokens.
    encoded = [
        n for n in inputs if call.roles[n] == "context" and _ENCODED & set(words(n))
    ]
    inputs = [n for n in inputs if n not in encoded]
    pads = {} if _takes_padding(call) else _padding_of(subject, inputs)
    left = [n for n, role in call.roles.items() if role in TENSORS]
    left += [*inputs, *encoded, "x", "lengths"]
    others = [p for p in call.parameters if p.name not in left]
    parameters = [inspect.Parameter("x", _BY_KEYWORD)]
    parameters += [p.replace(kind=_BY_KEYWORD) for p in others]
    optional = inspect.Parameter("lengths", _BY_KEYWORD, default=None)
    required = optional.replace(default=optional.empty)

    def how(
        target: object, /, name: str, always: bool, x: Tensor, **given: object
    ) -> object:
        lengths = given.pop("lengths", None)
        pad = _number(pads[name], target) if name in pads else None
        if lengths is None and always:
            raise ValueError("it takes tokens some of which are padding")
        if lengths is not None and pad is None:
            raise ValueError("the number of padding is not known")
        numbers = {n: _numbers(x, place, pad) for place, n in enumerate(inputs)}
        numbers |= {n: x.roll(1, 0) for n in encoded}
        if isinstance(lengths, Tensor):
            is_first = len(lengths) == len(x)
            behind = torch.arange(x.shape[int(is_first)]) >= lengths.view(-1, 1)
            behind = behind if is_first else behind.mT
            numbers[name][behind] = pad  # type: ignore[assignment]
        with _embedded(numbers[name], x):
            returned = called(subject, target, {**given, **numbers})
        return like(returned, x)

    for name in inputs:
        # What hides all but padding shows nothing where there is none.
        ways = [[optional], [required]] if name in pads else [[]]
        for more in ways:
            one = functools.partial(how, name=name, always=more == [required])
            one.has_many = True  # type: ignore[attr-defined]
            one.has_others = len(inputs) + len(encoded) > 1  # type: ignore[attr-defined]
            said = f"{name} taken for tokens, which are embedded as ours"
            of_which = f", of which {pads[name]} is padding" if name in pads else ""
            said += of_which or "; none of them is padding"
            layouts = (cases.LAYER, cases.SEQUENCE_FIRST)
            yield formed(subject, [*parameters, *more], one, layouts, said)


def _takes_padding(call: Call) -> bool:
    return call.takes("padding") or call.takes("lengths")


def _inputs(call: Call) -> list[str]:
    """What it requires that is a sequence, or has a name of one; else its first."""
    required = [
        p.name
        for p in call.parameters
        if p.default is p.empty
        and (
            call.roles[p.name] in TENSORS
            or (call.roles[p.name] in (None, "mask") and set(words(p.name)) & _NAMES)
        )
        and mask_of_words(p.name) is None
    ]
    sequences = (n for n, role in call.roles.items() if role in TENSORS)
    return required or list(sequences)[:1]


def _padding_of(subject: Subject, inputs: list[str]) -> dict[str, str]:
    """What tokens of these inputs are compared with to find padding, as the text has it;
    in its file where it hands them to a function that makes masks."""
    own = subject.source
    handed = [n for n in inputs if re.search(_HANDED.format(re.escape(n)), own)]
    found = [pair for one in _COMPARED for pair in re.findall(one, own, re.I)]
    known = {name: pad for name, pad in reversed(found) if name in inputs}
    if any(_zeroes_rows(own, name) for name in known):
        return {}  # which padded keys are seen by, as in SASRec
    if not known and handed:
        text = text_of_file(subject)
        found = [pair for one in _COMPARED for pair in re.findall(one, text, re.I)]
        known = dict.fromkeys(handed[: len(found)][:1], found[0][1] if found else "")
    return known


def _zeroes_rows(text: str, tokens: str) -> bool:
    """Whether what is made of a comparison of tokens only multiplies rows."""
    made = re.search(rf"^\s*(\w+)\s*=\s*[^=\n]*\b{tokens}\b[^=\n]*[!=]=", text, re.M)
    if made is None:
        return False
    name = re.escape(made[1])
    uses = len(re.findall(rf"(?<![.\w]){name}\b(?!\s*=[^=])", text))
    rows = rf"\*=?\s*\(?~?\s*{name}\.unsqueeze\(-1\)|\*=?\s*~?{name}\[[^\]\n]*None\]"
    return uses > 0 and uses == len(re.findall(rows, text))


def _number(padding: str, target: object) -> int | None:
    """The number of padding: an attribute of the model, a constant of its file, or as it
    is written."""
    if padding.isdigit():
        return int(padding)
    name = padding.rpartition(".")[2]
    known = getattr(type(target).__init__, "__globals__", {})
    value = getattr(target, name, known.get(name))
    return value if type(value) is int else None


def has_many(subject: Subject) -> bool:
    """Whether it is called in that form, and may have attention in many layers."""
    return getattr(subject.how, "has_many", False)


def has_others(subject: Subject) -> bool:
    """Whether it takes tokens of several sequences, as translation does."""
    return getattr(subject.how, "has_others", False)


def _numbers(sequence: Tensor, place: int, padding: int | None) -> Tensor:
    """Tokens (B, L) that are no positions, and none of which is padding."""
    shape = sequence.shape[:2]
    steps = torch.arange(shape.numel()) * 7 + 3 * place
    numbers = (_FIRST + steps % _COUNT).view(shape)
    is_padding = numbers == (-1 if padding is None else padding)
    return numbers.masked_fill(is_padding, _FIRST + _COUNT)


@contextlib.contextmanager
def _embedded(tokens: Tensor, sequence: Tensor) -> Iterator[None]:
    """All tables give this sequence, in their width, for these tokens, else zeros, which
    come of it for other tokens, so that their attention is seen."""

    def look_up(weight: Tensor, numbers: Tensor, *_: object, **__: object) -> Tensor:
        if numbers.shape == tokens.shape:
            width = weight.shape[-1]
            times = -(-width // sequence.shape[-1])
            # What the code does to it in place is done to its own.
            found = torch.cat([sequence] * times, -1)[..., :width].clone()
            return found if numbers.equal(tokens) else found * 0.0
        return weight.new_zeros(*numbers.shape, weight.shape[-1])

    known = torch.embedding  # which all others call
    torch.embedding = look_up
    try:
        yield
    finally:
        torch.embedding = known


def is_of_items(out: Tensor) -> bool:
    """Whether it is what like() makes of something that is said of items."""
    if out.dim() != 3 or out.numel() == len(out):
        return False
    return torch.equal(out, out[:, :1, :1].expand_as(out))


def like(returned: object, whole: Tensor) -> object:
    """What was returned first, in the shape of a sequence, of which only matters what has
    a part in it: logits are cut or filled up with zeros to be as wide, and what is said
    of an item, as its class, is said of all its tokens."""
    parts = returned.values() if isinstance(returned, dict) else returned
    parts = list(parts) if isinstance(returned, (dict, tuple, list)) else [returned]
    plain = [p for p in parts if isinstance(p, Tensor) and p.is_floating_point()]
    if not plain:
        return returned
    out = plain[0]
    if out.dim() == 2 and len(out) == whole.shape[:2].numel():
        out = out.view(*whole.shape[:2], -1)  # logits, as a loss takes them
    if out.dim() != 3 or out.shape[:2] != whole.shape[:2]:
        if len(out) != len(whole):
            return returned
        of_item = out.reshape(len(out), -1).sum(1)
        return of_item.view(-1, 1, 1).expand(whole.shape).clone()
    width = whole.shape[-1]
    return nn.functional.pad(out, (0, width - out.shape[-1]))
