# SPDX-License-Identifier: MIT
"""What the names and the sentences of code say about its mask: which value blocks, or
that it is added."""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from . import signature
from .roles import is_added as is_bias_name
from .roles import normal
from .signature import BATCH, LENGTH, Call, are_batch_and_length
from .target import Subject, text_of_file
from .texts import text_of
from .words import words

_QUOTED = 120  # characters of a sentence
_MADE_A_NUMBER = re.compile(
    r"\bma?sk\w*\s*\.\s*(float|double|half|int|long|to|type|type_as)\b"
)
# (batch, seq, hidden), [batch size, query len, hid dim], (B, T, C), B x L x E
_AXIS = r"[\w-]+(?: \w+)?(?: ?[+*] ?\d)?"
_BY = r"\s*[,*×]\s*|\s+x\s+"
_AXES = re.compile(
    rf"(?P<name>\w+)?[`*]*(?:\s*\([^()]*\))?\s*(?::|=|is|of shape|shape)?\s*"
    rf"[(\[](?P<axes>{_AXIS}(?:(?:{_BY}){_AXIS}){{2,3}})[)\]]"
)
# Those of a mask, of two or three; as types, ["batch", "seq"] or "b n".
_AXES_OF_MASK = re.compile(rf"[(\[]({_AXIS}(?:(?:{_BY}){_AXIS}){{1,2}})[)\]]")
_TWO_TYPED = r"\b{}\s*:[^=\n]*[\"'](\w+)(?:[\"']\s*,\s*[\"']|\s)(\w+)[\"']"
# What stands between a name and its shape: "mask (Tensor): of shape (B, L)".
_BEFORE_SHAPES = (
    r"\b(?:of|with|is|has|an?|the|its|bool|boolean|binary|float|int|long|optional|torch|"
    r"tensor|shape|size|dimensions?)\b"
)
# A shape that a mask has not, or not yet.
_OF_ANOTHER = re.compile(
    r"\b(?:not?|never)\b|n't\b|expand|broadcast|reshape|unsqueeze|applied"
)
_BLANK = re.compile(r"\n\s*\n")
_ENDS = re.compile(r"(?<=[.!?;])\s+|\n")
# "mask (Tensor): ", "mask : bool", "- mask: " in a list of arguments.
_ENTRY = re.compile(
    r"\s*[-*]?\s*[`*]*(?!True|False|\d)(\w+)[`*]*\s*(?:\((?:[^()]|\([^()]*\))*\)\s*)?:"
)
# A line that goes on in the next, which begins no entry.
_GOES_ON = re.compile(rf"(?<![.!?;:\n])[ \t]*\n(?!{_ENTRY.pattern})")
_INVERTS = re.compile(r"~|logical_not|\b1(\.0?)?\s*-\s*\w*mask|mask\w*\s*[=!]=")
_TRUE = r"(?:true|1s?|ones?|non-?zero)"
_FALSE = r"(?:false|0s?|zeros?)"
_VALUE = re.compile(
    rf"(?<![\w.-])(?<!axis )(?<!dim )(?:(?P<true>{_TRUE})|(?P<false>{_FALSE}))"
    r"(?!\.?\w)(?:'s)?"
)
# What joins a value and its meaning: "True (1) = ", "1 marks ", "0 -> ".
_IS = re.compile(
    r"(?:\s*(?:\(|/|or\b)\s*\w+\)?)?`*(?:\s*values?\b)?"
    r"(?:\s+in (?:it|(?:(?:the|this|its) )?[`\w]*mask`*))?\s*"
    r"(?:[=-]+>|=+|:|→|(?:means?|is|are|will|marks?|indicates?|stands for|for|to|iff?|"
    r"where(?:ver)?|at|on|when|lets|must|should|shall|may|can)\b)"
)
_ENTRIES = re.compile(r"\s+(?:entries|elements|values)\b")
_BLOCKS = (
    r"pad(?:s|ded|ding)?\b|mask(?:s|ed|ing)?\b|block|ignor|hid(?:e|es|ing)\b|"
    r"hidden(?! (?:state|size|dim))|forbid|exclud|prevent|stop|suppress|"
    r"drop(?:s|ped)?\b|-\s?inf|-\s?1e\d|-10[_,]?000"
)
_TOKENS = r"(?:(?<=for )|(?<=is )|(?<== )|(?<=: ))(?:tokens?|words?)\b(?! (?:to|that|which)\b)"
_SEES = (
    r"allow\w* to (?:be )?\w+|attend|keep|kept|visible|allow|seen?\b|sees\b|look|valid|"
    rf"real\b|participat|take part|includ|(?:may|can) influence\b|influenced|{_TOKENS}"
)
_MEANING = re.compile(
    r"(?<!\w)(?P<turned>un|non[- ]?|in|dis)?"
    rf"(?:(?P<sees>{_SEES})|(?P<blocks>{_BLOCKS}))"
)
# A mask that is turned round under its own name: `mask = ~mask`, `mask = mask == 0`.
_TURNED = (
    r"^\s*{0}\s*=\s*\(?(?:"
    r"(?:~|1(?:\.0?)?\s*-|(?:torch|np)\.logical_not\()\s*\(?{0}\b|"
    r"\(?{0}\b[^=\n]*(?:==\s*(?:0|False)\b|\.logical_not\(|\.eq\(0\)))"
)
# One that is used turned round: `scores.masked_fill(~mask, ...)`.
_USED_TURNED = (
    r"(?:~|logical_not\()\s*{0}\b|"
    r"(?<!\w){0}\b(?:\[[^\]\n]*\])?[^=\n,)]*(?:==\s*(?:0|False)\b|\.eq\(0\))"
)
# One that holds 0 where a key is hidden, as a number.
_COMPARED = r"(?<!\w){0}\b(?:\[[^\]\n]*\]|\.(?:un)?squeeze\([^)\n]*\))*\s*(?:==\s*0\b|\.eq\(0\))"
# Any mask, also at the beginning of a sentence.
_MASKS = ("mask", "masks", "Mask", "Masks")
_NOT = re.compile(r"\b(?:not?|never|cannot|without|neither|nor)\b|n't\b")
_NOT_A_VALUE = re.compile(
    r"(?:\bnot|\bwithout|n't|\bother than|\bexcept)(?: (?:be|equal to|an?|the|=))* $"
)
# One that leaves no doubt what it turns round: "must not be seen".
_NOT_THAT = re.compile(r"(?:\bnot|\bnever|\bcannot|n't)(?: (?:be|to|to be))? $")
# Sentences that turn round what they say, or speak of another mask than comes in.
_INTRICATE = re.compile(
    r"\b(?:unless|except|opposite|invert\w*|negat\w*|ke(?:eps?|pt)\b.*\bfrom)\b"
)
_ADDED = re.compile(
    r"\badditive\b|\badded to (?:the )?(?:\w+ )?(?:attention )?(?:scores|logits)"
    r"|\b0(?:\.0?)?\s*(?:and|or|,|/)\s*(?:float\()?['\"]?-\s?(?:inf|100\b|1e\d)"
)
# 0 where a key is seen and -inf, or -100, where it is not: numbers to be added.
_INFINITE = re.compile(
    r"(?:\band|\bor|[,(/])\s*(?:float\()?['\"]?-\s?(?:inf|100\b|1e\d)"
)
_END = re.compile(r"[,;.()\n]|\belse\b|\bbut\b")


# What says that no query may see a later key, and what says the reverse.
_CAUSAL = re.compile(
    r"(?:(?<![a-z])causal|Causal|auto-?regressive|look[-_ ]?ahead|left[- ]to[- ]right)|"
    r"(?:future|later) (?:tokens?|positions?|words?|keys?|(?:time[ -]?)?steps?)"
)
_NOT_CAUSAL = re.compile(r"\b(?:non|not|un|no|never)[-_ ]?(?:\w+ )?$", re.IGNORECASE)
_ARGUMENT = re.compile(r"\bis_causal\s*=\s*True")
_SWITCHED_OFF = re.compile(r"\w*(?:\s*:\s*\w+)?\s*=\s*(?:False|None|0)\b")


def quoted(text: str) -> str:
    """A sentence as a report shows it."""
    text = text.replace("`", "'")
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "…"


@dataclass(frozen=True)
class Said:
    """What the text of the code says of a mask.

    meaning: "blocked" or "keep". quote: the sentence; None where only the name of
    the parameter says it. is_plain: the code's own docstring or signature says it,
    and without a "not": what does otherwise is wrong.
    """

    meaning: str
    quote: str | None = None
    is_plain: bool = True


def causal(subject: Subject, of_context: bool = False) -> str | None:
    """Where the code says that it is causal, in a name, a comment or a docstring.
    of_context: its keys are those of another sequence, with which an argument of a call
    in it says nothing about what is meant."""
    for line in [subject.name, *subject.source.splitlines()]:
        found = _CAUSAL.search(line)
        if of_context and _ARGUMENT.search(line):
            continue
        if not found or _SWITCHED_OFF.match(line, found.end()):
            continue
        if not _NOT_CAUSAL.search(line[: found.start()]):
            return line.strip().strip('#*`". ')
    return None


def meaning_of_mask(call: Call, subject: Subject) -> Said | None:
    """What the docstrings and comments say about the mask; None where they say
    nothing, or both. Where the code itself is silent, its helpers speak."""
    name = call.parameter("mask")
    if name is None:
        return None
    others = [p.name for p in call.parameters if p.name != name and "mask" in p.name]
    names = (name,) if others else (name, *_MASKS)
    helpers = "\n\n".join(_helpers_docstrings(call, subject))
    own = _said(_sentences(subject, names))
    said = own or _said((sentence, False) for sentence in _about(helpers, names))
    is_turned = re.search(_TURNED.format(re.escape(name)), subject.source, re.M)
    hides = re.search(_HIDES_BY.format(re.escape(name)), subject.source)
    if not said and set(words(name)) & _EDGES and hides:
        return Said("keep")
    return said or (None if is_turned else _by_name(name))


_KEEPING = {"visible", "allowed", "valid", "keep"}
_EDGES = {"adj", "adjacency"}  # 1 where there is an edge
_HIDES_BY = (
    r"\b{0}\b[^\n]*(?:[=!]=|[<>])\s*0|"
    r"(?:masked_fill_?|where)\([^\n]*\b{0}\b|~\s*{0}\b"
)
_BLOCKING = {"forbidden", "blocked", "disallowed", "invalid"}


def _by_name(name: str) -> Said | None:
    """What the name of a mask says of True."""
    said = set(words(name))
    if (
        said & {"not", "non", "no", "un", "never"}
        or said & _KEEPING
        and said & _BLOCKING
    ):
        return None
    if said & _KEEPING:
        return Said("keep")
    return Said("blocked") if said & _BLOCKING else None


def meaning_of_padding(call: Call, subject: Subject) -> Said | None:
    """The same of a parameter for padding: by sentences that name it, else its name."""
    name = call.parameter("padding")
    if name is None:
        return None
    if call.holds_tokens:
        return Said("keep")
    said = _said(_sentences(subject, (name,)))
    if said or re.search("valid|attention", name.lower()):
        return said or Said("keep")
    if re.search(_TURNED.format(re.escape(name)), subject.source, re.M):
        return None  # so that it means the reverse of its name, in a line of its own
    return Said("blocked") if re.search("pad|kpm", name.lower()) else None


def written_masks(call: Call, subject: Subject) -> set[str]:
    """The masks for each item whose shape a text or a type gives: "keys of each item",
    (B, Lk), "rows of each item", (B, Lq, Lk). That of a context is of its keys, where
    it is read as of two axes."""
    name = call.parameter("context_mask") or call.parameter("mask")
    if name is None:
        return set()
    if name == call.parameter("context_mask"):
        of_keys = rf"\b{re.escape(name)}\[\s*:\s*,(?:\s*None\s*,)+\s*:\s*\]"
        return {"keys of each item"} if re.search(of_keys, subject.source) else set()
    typed = re.search(_TWO_TYPED.format(re.escape(name)), subject.source)
    shapes = [f"{name} ({typed[1]}, {typed[2]})"] if typed else []
    shapes += [sentence for sentence, _ in _sentences(subject, (name,))]
    named = rf"(?<!\w){re.escape(name.lower())}(?!\w)[`*]*(?:\s*\([^()]*\))?"
    of_mask = re.compile(rf"{named}\W*(?:{_BEFORE_SHAPES}\W+)*$")
    found = set()
    for text in map(str.lower, shapes):
        for written in _AXES_OF_MASK.finditer(text):
            first, *lengths = re.split(_BY, written[1])
            if not all(map(LENGTH.fullmatch, lengths)):
                continue
            if LENGTH.fullmatch(first) and len(lengths) == 1:
                return set()  # (L, L): what else is said may be of another
            is_meant = of_mask.search(text, 0, written.start())
            if BATCH.fullmatch(first) and is_meant and not _OF_ANOTHER.search(text):
                found.add(("keys" if len(lengths) == 1 else "rows") + " of each item")
    return found


def is_padding_of_keys(call: Call) -> bool:
    """Whether a padding mask is of keys, (B, Lk), as its name says."""
    return "key_pad" in (call.parameter("padding") or "").lower()


def is_pytorchs_padding(call: Call) -> bool:
    """Whether it has the very name of PyTorch's, where True is padding."""
    name = (call.parameter("padding") or "").lower()
    return re.fullmatch(r"(\w+_)?key_padding_mask", name) is not None


def may_be_of_tokens(call: Call, subject: Subject) -> bool:
    """Whether only the name of a padding mask says that True is padding, and leaves it
    open: a pad_mask often holds True for tokens, and what is called padding does not.
    One with the name of PyTorch's is open where a mask beside it is turned round, too,
    or where it is compared with 0, as a number; so is one that is called pad."""
    named = call.parameter("padding") or ""
    if named.lower() in ("pad", "is_pad"):
        own, text = re.escape(named), subject.source
        shown = (_COMPARED.format(own), _USED_TURNED.format(own))
        return any(re.search(one, text) for one in shown)
    if is_pytorchs_padding(call):
        text, name = subject.source, re.escape(named)
        shown = re.findall(rf"^\s*(\w+)\s*=\s*{name}\b(?=[.\[])", text, re.M)
        compares = any(re.search(_COMPARED.format(n), text) for n in (name, *shown))
        if compares and not call.takes("mask"):
            return True
        both = [re.escape(name) for name in (named, call.parameter("mask")) if name]
        found = [re.search(_USED_TURNED.format(n), subject.source) for n in both]
        return len(both) == 2 and all(found)
    return "mask" in named.lower() and "pad" in named.lower()


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


# A caller in the file may hand over what it exchanges first: (L, B, E).
_EXCHANGES = re.compile(
    r"(?:transpose|swapaxes|swapdims)\(\s*(?:\w+\s*,\s*)?(?:dim0\s*=\s*)?[01]\s*,\s*"
    r"(?:dim1\s*=\s*)?[01]\b|permute\(\s*(?:\w+\s*,\s*)?[(\[]?\s*[12]\s*,|"
    r"move(?:dim|axis)\(|->\s*(?![(\s]*b)[a-z(]"
)
# The pixels of an image become a sequence behind the items.
_OF_PIXELS = re.compile(
    r"flatten\(2\)[^=]{0,9}(?:\w+\s*=\s*\w+)?\s*\.(?:transpose\(\s*1\s*,\s*2|permute\(\s*0\s*,\s*2)"
)


def batch_first_in_file(subject: Subject) -> bool | None:
    """What those say of sequences, (batch, length, ...), that make the code under test a
    part of theirs, and their other parts, where nothing in the file exchanges the two;
    None where these say nothing, or both."""
    text = text_of_file(subject)
    if _EXCHANGES.search(text):
        return None
    classes = re.split(r"^(?=class )", text, flags=re.M)
    named = {m[1]: one for one in classes if (m := re.match(r"class (\w+)", one))}

    def makes(text: str, name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\(", text) is not None

    owners = [
        t for n, t in named.items() if n != subject.name and makes(t, subject.name)
    ]
    parts = [t for n, t in named.items() if any(makes(owner, n) for owner in owners)]
    text = "".join((*owners, *parts))
    shapes = (re.split(_BY, m["axes"].lower()) for m in _AXES.finditer(text))
    said = {_is_batch_first([a.strip() for a in axes]) for axes in shapes} - {None}
    said |= {True} if _OF_PIXELS.search(text) else set()
    return said.pop() if len(said) == 1 else None


# Of two axes, of which the first counts items: "inputs of shape (batch_size, 512)".
_OF_ITEMS = re.compile(
    r"\bshapes?\b\W*(?:of\s*)?[(\[]\s*(?:b|bs|bsz|batch(?:[_ ]?size)?)\s*,\s*[\w.]+\s*[)\]]",
    re.I,
)


def are_items(subject: Subject) -> bool:
    """Whether what comes in is one vector for each item, as its docstrings say, which
    speak of no sequence."""
    said = list(docstrings(subject))
    of_items = any(_OF_ITEMS.search(sentence) for sentence in said)
    return of_items and not any(_AXES.search(sentence) for sentence in said)


def _of_shapes(subject: Subject) -> Iterator[tuple[str, bool]]:
    """The docstrings and comments, and whether they go with the signature. One that
    follows a statement is about its result."""
    for sentence in docstrings(subject):
        yield sentence, True
    for line in subject.source.splitlines():
        code, _, comment = line.partition("#")
        code = code.strip()
        of_signature = code.startswith("def ") or code.endswith((",", "("))
        if of_signature or not code:
            yield comment, of_signature


_ITEMS = re.compile(r"b|bs|bsz|batch(?:[_ -]?size)?")
_FEATURES = re.compile(
    r"[cdeh]|[cdeh]_in|(?:\w+_)?(?:dim|dims|size|width|channels?|features?|planes)|"
    r"(?:d|n)_(?:model|embd?|hidden|feat\w*|channels?)|(?:embed|emb|hidden|model|feature|"
    r"channel)\w*(?:[ -]\w+)?"
)


def _is_batch_first(axes: list[str]) -> bool | None:
    for index in (0, 1):
        batch, length = axes[index], axes[1 - index]
        if are_batch_and_length(batch, length):
            return index == 0
    # Whatever is counted between the items and their features: (batch, nodes, dim).
    is_counted = len(axes) == 3 and not _FEATURES.fullmatch(axes[1])
    if is_counted and _ITEMS.fullmatch(axes[0]) and _FEATURES.fullmatch(axes[2]):
        return None if BATCH.fullmatch(axes[1]) else True
    return None


def _said(sentences: Iterable[tuple[str, bool]]) -> Said | None:
    """What sentences say that agree; each comes with whether it may be plain."""
    found: list[Said] = []
    for sentence, may_be_plain in sentences:
        meaning, is_plain = polarity(sentence)
        if meaning:
            quote = " ".join(sentence.split()).strip("#*`. ")
            found.append(Said(meaning, quote, is_plain and may_be_plain))
    if len({said.meaning for said in found}) != 1:
        return None
    return max(found, key=lambda said: said.is_plain)


def _sentences(subject: Subject, names: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """The sentences of docstrings and comments that name a mask, and those of its
    entry among the arguments; and whether they are about what comes in, as all are
    but comments behind a statement."""
    for text in docstrings(subject):
        yield from ((sentence, True) for sentence in _about(text, names))
    for text, of_signature in _comments(subject.source, names):
        yield from ((sentence, of_signature) for sentence in _about(text, names))


def _about(text: str, names: tuple[str, ...]) -> Iterator[str]:
    """The sentences of a text that name one of `names`, and those that follow
    "name:" up to a blank line or the next "other:"."""
    named = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)")
    for paragraph in _BLANK.split(text):
        in_entry = False
        for sentence in _ENDS.split(one_line(paragraph)):
            if entry := _ENTRY.match(sentence):
                in_entry = named.fullmatch(entry[1]) is not None
            if in_entry or named.search(sentence):
                yield sentence


def _comments(source: str, names: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """The comments, those below each other as one, and whether they go with the
    signature, as the first below it do: one in a parameter's line is about that."""
    block: list[str] = []
    in_signature = is_first = False
    for line in [*source.splitlines(), ""]:
        code, mark, comment = (part.strip() for part in line.partition("#"))
        in_signature = in_signature or code.startswith(("def ", "async def "))
        if mark and not code:
            block.append(comment)
            continue
        if block:
            yield "\n".join(block), is_first
            block = []
        of_mask = [name for name in names if re.search(rf"\b{name}\b", code)]
        if mark and in_signature and of_mask:
            yield f"{of_mask[0]}: {comment}", True
        elif mark:
            yield comment, False
        is_first = in_signature and code.endswith(":")
        in_signature = in_signature and not is_first


def docstrings(subject: Subject) -> list[str]:
    """Of what is called, and of its class."""
    if not subject.source:
        return []
    own = type(subject.target) if subject.kind == "instance" else subject.target
    owners = (subject.entry, own)
    return [inspect.getdoc(o) or "" for o in owners if getattr(o, "__doc__", None)]


def _helpers_docstrings(call: Call, subject: Subject) -> Iterator[str]:
    """The docstrings of methods and functions that the code names and that are handed
    the mask under its own name; none if the code may invert it on the way."""
    entry = inspect.unwrap(subject.entry)
    entry = getattr(entry, "__func__", entry)
    if not isinstance(entry, types.FunctionType):
        return
    if _INVERTS.search(text_of(entry) if subject.source else ""):
        return
    for name in entry.__code__.co_names:
        for found in (getattr(subject.type, name, None), entry.__globals__.get(name)):
            if not isinstance(found, types.FunctionType):
                continue
            taken = found.__code__.co_varnames[: found.__code__.co_argcount]
            of_torch = (found.__module__ or "").startswith(torch.__name__)
            if call.parameter("mask") in taken and not of_torch:
                yield inspect.getdoc(found) or ""


def is_bias(call: Call) -> bool:
    """Whether the mask goes by a name under which any number is added."""
    return is_bias_name(call.parameter("mask") or "")


def read_call(subject: Subject) -> Call:
    """The signature, and what a text says of a mask that is named for padding: one of 0
    and -inf is a mask to be added."""
    call = signature.read(subject)
    name = call.parameter("padding")
    if name is not None and not call.takes("mask"):
        said = [s.lower() for s, _ in _sentences(subject, (name,))]
        if any(is_added(s) or _INFINITE.search(s) for s in said):
            call.roles[name] = "mask"
    return call


def additive(call: Call, subject: Subject) -> str | None:
    """Where the code says that its mask is added to the scores: the parameter's name,
    or the sentence; None if it does not, or takes bools, too."""
    name = call.parameter("mask")
    if name is None or is_bias(call):
        return name
    if _is_yes_or_no(name, subject):
        return None
    named = (sentence for sentence, _ in _sentences(subject, (name, *_MASKS)))
    return next((" ".join(s.split()) for s in named if is_added(s)), None)


def may_be_additive(call: Call, subject: Subject) -> bool:
    """Whether a mask that is added may be meant to. attention_mask and attn_bias are
    often made of 0 and -inf. What is called no more than mask is yes or no in the
    form that exercises ask for, and where it is made a number first; so is what is
    taken from 1, and what the code asks whether it is a bool."""
    name = call.parameter("mask")
    if name is None or _is_yes_or_no(name, subject):
        return False
    if normal(name) not in ("mask", "msk", "m"):
        return True
    exercise = call.takes("num_heads") and call.takes("embed_dim")
    return not exercise and not _MADE_A_NUMBER.search(subject.source)


def _is_yes_or_no(name: str, subject: Subject) -> bool:
    """Whether what is called takes the mask from 1, as of ones and zeros, or has a way
    for bool masks other than to refuse them."""
    try:
        text = textwrap.dedent(text_of(inspect.unwrap(subject.entry)))
        code = ast.unparse(ast.parse(text))  # without comments
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    mask = re.escape(name)
    is_bool = rf"\b{mask}\.dtype (==|is) torch\.bool\b(?!:\s*raise)"
    return re.search(rf"\b1(\.0)? - {mask}\b|{is_bool}", code) is not None


def polarity(sentence: str) -> tuple[str | None, bool]:
    """What True or 1 means in a mask, "blocked" or "keep", as a sentence says it;
    None if it says nothing, or both. And whether it says so without a "not"."""
    text = sentence.lower().replace("’", "'").replace("−", "-")
    if any(said.search(text) for said in (_INTRICATE, _ADDED, _INFINITE)):
        return None, False
    found, plain = set(), True
    for is_true, start, end in _clauses(text):
        meanings, turned = _meanings(text, start, end)
        found |= {"blocked" if blocks is is_true else "keep" for blocks in meanings}
        plain = plain and not turned
    return (found.pop() if len(found) == 1 else None), plain


def one_line(text: str) -> str:
    """A text whose sentences are each on one line, where they go on."""
    return _GOES_ON.sub(" ", text)


def is_added(sentence: str) -> bool:
    """Whether a sentence says that a mask is added to the scores."""
    text = sentence.lower()
    return _ADDED.search(text) is not None and not _NOT.search(text)


def _clauses(text: str) -> Iterator[tuple[bool, int, int]]:
    """Each value that is given a meaning, and from where to where the words go that
    give it: to the end of the clause, or to the next value."""
    start = 0
    for value in _VALUE.finditer(text):
        if value.start() < start:  # the 1 of "True (1) = "
            continue
        if _NOT_A_VALUE.search(text[start : value.start()]):
            continue  # of "what is not True", nobody says what True is
        joined = _IS.match(text, value.end())
        noun = _ENTRIES.match(text, value.end())
        start = (joined or noun or value).end()
        end = min(
            found.start() if found else len(text)
            for found in (_END.search(text, start), _VALUE.search(text, start))
        )
        meaning = _MEANING.match(text, start + 1, end)
        beside = meaning and meaning[0] != "mask"  # in "0/1 mask" a noun
        if joined or beside:
            yield value["true"] is not None, start, end


def _meanings(text: str, start: int, end: int) -> tuple[set[bool], bool]:
    """Whether each of the words there blocks, turned round by a "not" before it; and
    whether there was a "not"."""
    meanings, turned = set(), False
    for word in _MEANING.finditer(text, start, end):
        nots = len(_NOT.findall(text, start, word.start())) + bool(word["turned"])
        blocks = (word["blocks"] is not None) is (nots == 0)
        meanings |= {blocks} if nots < 2 else {True, False}
        clear = nots == 1 and _NOT_THAT.search(text[start : word.start()])
        turned = turned or (nots > 0 and not (clear and word["sees"]))
        start = word.end()
    return meanings, turned
