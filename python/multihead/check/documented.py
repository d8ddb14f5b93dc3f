# SPDX-License-Identifier: MIT
"""What the names and the sentences of code say about its mask."""

import inspect
import re
import types
from collections.abc import Iterator

import torch

from .roles import ADDITIVE, normal
from .signature import Call
from .target import Subject

_TRUE = r"(?:true|1s?|ones?|non-?zero)"
_FALSE = r"(?:false|0s?|zeros?)"
_IS = (
    r"(?:\s*(?:\(|/|or\b)\s*\w+\)?)?`*\s*(?:=+|:|means?|is|are|→|->|marks?|stands for|for|where(?:ver)?|at|if|when)"
    r"\s*"
)
_BLOCKS = r"(?:pad|mask|block|ignor|hid)"
_SEES = (
    r"(?:attend|keep|kept|visible|allowed|may (?:be )?(?:seen|attend)|seen|valid|real|"
    rf"(?:(?<=for )|(?<== )|(?<=: ))tokens?\b|not (?:an? )?{_BLOCKS}|non-?\s?pad)"
)
_NOT = (
    r"(?:block|masked|masks\b|mask out|hidden|hides|ignor|may not|disallow|forbid|pad|"
    rf"cannot|\w*n't\b|not\b(?! (?:an? )?{_BLOCKS}))"
)
_ADDITIVE = re.compile(
    r"additive|added to (the )?(attention )?(scores|logits)|"
    r"\b0(\.0)?\b[^.\n]{0,40}-\s?(inf|1e\d|10[_,]?000)|"
    r"-\s?inf\w*[^.\n]{1,40}\b(0|zeros?)\b",
    re.I,
)
_MADE_A_NUMBER = re.compile(
    r"\bma?sk\w*\s*\.\s*(float|double|half|int|long|to|type|type_as)\b"
)
# (batch, seq, hidden), [batch size, query len, hid dim], (B, T, C), B x L x E
_AXIS = r"[\w-]+(?: \w+)?"
_BY = r"\s*[,*×]\s*|\s+x\s+"
_AXES = re.compile(
    rf"(?P<name>\w+)?[`*]*(?:\s*\([^()]*\))?\s*(?::|=|is|of shape|shape)?\s*"
    rf"[(\[](?P<axes>{_AXIS}(?:{_BY}){_AXIS}(?:{_BY}){_AXIS})[)\]]"
)
_BATCH = re.compile(r"b|n|bs|bsz|nb|batch\w*|batch[ -]size|b_size|num_batches")
_LENGTH = re.compile(
    r"l|s|t|lq|lk|sq|tq|tk|nq|nk|seq\w*|\w*_len|\w*_length|len\w*|time\w*|tokens|"
    r"(?:\w+[ -])?(?:len|length|seq|sequence)|(?:seq|sequence)[ -]\w+|n_tokens|num_tokens"
)
_INVERTS = re.compile(r"~|logical_not|\b1(\.0?)?\s*-\s*\w*mask|mask\w*\s*[=!]=")


def meaning_of_mask(call: Call, subject: Subject) -> str | None:
    """What the docstrings and comments say about the mask: "blocked", "keep", or None
    where they say nothing, or both. Where the code itself is silent, its helpers
    speak."""
    if not call.takes("mask"):
        return None
    said = _meaning(_sentences(subject))
    return said or _meaning(_helpers_sentences(call, subject))


def meaning_of_padding(call: Call, subject: Subject) -> str | None:
    """The same of a parameter for padding: what the lines that name it say, else its
    name."""
    name = call.parameter("padding")
    if name is None:
        return None
    lines = "\n".join(_sentences(subject)).splitlines()
    said = _meaning([line for line in lines if name in line])
    if said or re.search("valid|attention", name.lower()):
        return said or "keep"
    return "blocked" if re.search("pad|kpm", name.lower()) else None


def batch_first(subject: Subject) -> bool | None:
    """What the written shapes of inputs say: that of a parameter before others; None
    where nothing is written, or both."""
    code = getattr(inspect.unwrap(subject.entry), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    of_inputs, of_others = set(), set()
    for sentence, of_signature in _of_shapes(subject):
        for written in _AXES.finditer(sentence):
            axes = [a.strip().lower() for a in re.split(_BY, written["axes"])]
            if re.search("mask|pad", written["name"] or ""):
                continue
            if written["name"] in names:
                of_inputs.add(_is_batch_first(axes))
            elif of_signature:
                of_others.add(_is_batch_first(axes))
    said = (of_inputs - {None}) or (of_others - {None})
    return said.pop() if len(said) == 1 else None


def _of_shapes(subject: Subject) -> Iterator[tuple[str, bool]]:
    """The docstrings and comments, and whether they go with the signature. One that
    follows a statement is about its result."""
    for sentence in _docstrings(subject):
        yield sentence, True
    for line in subject.source.splitlines():
        code, _, comment = line.partition("#")
        code = code.strip()
        of_signature = code.startswith("def ") or code.endswith((",", "("))
        if of_signature or not code:
            yield comment, of_signature


def _is_batch_first(axes: list[str]) -> bool | None:
    for index in (0, 1):
        batch, length = axes[index], axes[1 - index]
        if _BATCH.fullmatch(batch) and _LENGTH.fullmatch(length):
            return index == 0
    return None


def _meaning(sentences: list[str]) -> str | None:
    text = ". ".join(dict.fromkeys(sentences)).lower()
    blocked = _says(text, _TRUE, _NOT, _SEES) or _says(text, _FALSE, _SEES, _NOT)
    keep = _says(text, _FALSE, _NOT, _SEES) or _says(text, _TRUE, _SEES, _NOT)
    if blocked == keep:
        return None
    return "blocked" if blocked else "keep"


def _says(text: str, value: str, meaning: str, opposite: str) -> bool:
    between = rf"(?:(?!{opposite})\w+\s+){{0,4}}?"
    return re.search(rf"\b{value}{_IS}{between}{meaning}", text) is not None


def _sentences(subject: Subject) -> list[str]:
    """The docstrings and comments of the code."""
    return [*_docstrings(subject), *re.findall(r"#(.*)", subject.source)]


def _docstrings(subject: Subject) -> list[str]:
    if not subject.source:
        return []
    own = type(subject.target) if subject.kind == "instance" else subject.target
    owners = (subject.entry, own)
    return [inspect.getdoc(o) or "" for o in owners if getattr(o, "__doc__", None)]


def _helpers_sentences(call: Call, subject: Subject) -> list[str]:
    """The docstrings of methods and functions that are handed the mask under its own
    name; none if the code may invert it on the way."""
    entry = inspect.unwrap(subject.entry)
    entry = getattr(entry, "__func__", entry)
    if not isinstance(entry, types.FunctionType):
        return []
    if _INVERTS.search(inspect.getsource(entry) if subject.source else ""):
        return []
    name = call.parameter("mask")
    return [
        inspect.getdoc(helper) or ""
        for helper in _helpers(entry, subject)
        if name in helper.__code__.co_varnames[: helper.__code__.co_argcount]
    ]


def _helpers(entry: types.FunctionType, subject: Subject) -> Iterator:
    """The functions that `entry` names: of its module, and of its class."""
    kind = subject.target if subject.kind == "class" else type(subject.target)
    owner = kind if subject.kind != "function" else None
    for name in entry.__code__.co_names:
        for found in (getattr(owner, name, None), entry.__globals__.get(name)):
            if isinstance(found, types.FunctionType):
                if not (found.__module__ or "").startswith(torch.__name__):
                    yield found


def is_bias(call: Call) -> bool:
    """Whether the mask goes by a name under which any number is added."""
    return normal(call.parameter("mask") or "") in ADDITIVE


def is_additive(call: Call, subject: Subject) -> bool:
    """Whether the code says that its mask is added to the scores: by the name of
    the parameter, or in the sentences of its text that speak of the mask."""
    if is_bias(call):
        return True
    name = call.parameter("mask")
    if name is None:
        return False
    text = "\n".join(_sentences(subject))
    lines = [line for line in text.splitlines() if "mask" in line.lower()]
    return any(_ADDITIVE.search(line) for line in lines)


def may_be_additive(call: Call, subject: Subject) -> bool:
    """Whether a mask that is added may be meant to. attention_mask and attn_bias are
    often made of 0 and -inf. What is called no more than mask is yes or no in the
    form that exercises ask for, and where it is made a number first."""
    name = call.parameter("mask")
    if name is None:
        return False
    if normal(name) not in ("mask", "msk", "m"):
        return True
    exercise = call.takes("num_heads") and call.takes("embed_dim")
    return not exercise and not _MADE_A_NUMBER.search(subject.source)
