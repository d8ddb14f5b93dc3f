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
    own = type(subject.target) if subject.kind == "instance" else subject.target
    owners = (subject.entry, own)
    documentation = [
        inspect.getdoc(o) or "" for o in owners if getattr(o, "__doc__", None)
    ]
    comments = re.findall(r"#(.*)", subject.source)
    return [*(documentation if subject.source else []), *comments]


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


def is_additive(call: Call, subject: Subject) -> bool:
    """Whether the code says that its mask is added to the scores: by the name of
    the parameter, or in the sentences of its text that speak of the mask."""
    name = call.parameter("mask")
    if name is None:
        return False
    if normal(name) in ADDITIVE:
        return True
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
