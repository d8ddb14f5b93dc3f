# SPDX-License-Identifier: MIT
"""The roles of masks, of which code may take several: those of keys, of queries, of a
context and of the sequence itself."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .roles import TENSORS, is_added, normal
from .rows import zeroes_output
from .target import Subject, text_of_file
from .words import OF_SOURCE, OF_TARGET, is_position_bias, mask_of_words, words

if TYPE_CHECKING:
    from .signature import Call


def of_two_masks(call: "Call") -> None:
    """Of two masks beside a context, as a decoder has them, that of the source is one
    of the context's keys, and the other one of the target itself."""
    known = {n: call.roles[n] or mask_of_words(n) for n in call.roles}
    masks = [n for n, role in known.items() if role in ("mask", "context_mask")]
    of_source = [n for n in masks if set(words(n)) & OF_SOURCE]
    of_target = [n for n in masks if set(words(n)) & OF_TARGET and n not in of_source]
    if len(of_source) == len(of_target) == 1 and of_source != of_target:
        call.roles |= {of_source[0]: "context_mask", of_target[0]: "mask"}


def of_named_masks(call: "Call") -> None:
    """What only the words of its name say to be a mask, if no other is one of that
    kind; with the name of a sequence of keys before it, it is one of those keys."""
    keys = {n for n, role in call.roles.items() if role in ("key", "value", "context")}
    for parameter in call.parameters:
        name, default = parameter.name, parameter.default
        if call.roles[name] is None and default in (None, inspect.Parameter.empty):
            of_keys = name.lower().removesuffix("mask").rstrip("_") in keys
            role = "padding" if of_keys else mask_of_words(name)
            call.roles[name] = None if role and call.takes(role) else role


# What makes (B, 1, 1, Lk) of a mask (B, Lk).
_WIDENED = (
    r"\b{0}\[:, None, None(, :)?\]|\b{0}\.unsqueeze\(1\)\.unsqueeze\([12]\)"
    r"|rearrange\({0}, *['\"]\w+ \w+ -> \w+ (1|\(\)) (1|\(\)) \w+['\"]"
)


def of_masks_of_keys(call: "Call", source: str) -> None:
    """A mask beside a bias that is added to the scores is one for the keys, and so is
    one that the code makes (B, 1, 1, Lk), beside one that it leaves as it is; and, of
    two that are named after the sequences, that of the context."""
    if named := _named_after_sequences(call):
        call.roles |= named
        return
    masks = [n for n, role in call.roles.items() if role == "mask"]
    others = [n for n in masks if is_added(n)] or [
        n for n in masks if not re.search(_WIDENED.format(n), source)
    ]
    if not others or len(others) == len(masks):
        return
    for name in masks:
        if name in others:
            continue
        if call.takes("padding"):
            call.roles[name] = None
        else:
            call.roles[name] = "padding"
            call.guess([name], "one of the keys, 1 = a token")


def _named_after_sequences(call: "Call") -> dict[str, str]:
    """The roles of image_mask and text_mask beside image and text."""
    asks = call.parameter("query") or call.parameter("x")
    context = call.parameter("context")
    masks = [name for name in call.roles if "mask" in words(name)]
    if any(set(words(name)) & (OF_SOURCE | OF_TARGET) for name in masks):
        return {}  # as nn.Transformer has them, (Lq, Lk)
    if not asks or not context or len(masks) != 2:
        return {}
    of_each = [
        [n for n in masks if set(words(n)) & set(words(name)) - {"x", "input"}]
        for name in (asks, context)
    ]
    if [len(found) for found in of_each] != [1, 1] or of_each[0] == of_each[1]:
        return {}
    return {of_each[0][0]: "query_mask", of_each[1][0]: "padding"}


# What compares tokens with the number of padding: by the name of that, or making a mask
# (B, 1, 1, Lk) of it.
_COMPARED = r"(?:\b{0}\s*(?:!=|==)\s*|\b{0}\.(?:eq|ne)\()"
_WITH_PADDING = _COMPARED + r"(?P<pad>[\w.]*pad\w*)"
_TOKENS_WIDENED = _COMPARED + (
    r"(?P<pad>[\w.]+)[^\n]*(?:(?:\.unsqueeze\([12]\)\s*){{2}}|\[:, None, None)"
)
_HANDED = r"\b(\w+)\(\s*{}\s*[,)]"  # to a function, before others
_DEFINED = r"def {}\(\s*(?:self,\s*)?(\w+)(.*?)(?=\n\s*def |\n\S|\Z)"


def of_raw_tokens(call: "Call", subject: Subject, entry: str) -> None:
    """What the code requires beside its sequence, and compares with the number of
    padding, itself or in a function of its file, holds the tokens of the keys; what may
    be a sequence does if nothing else is done with it. entry: the text of what is
    called."""
    if call.takes("padding"):
        return
    source, whole = subject.source, text_of_file(subject)
    for parameter in call.parameters[1:]:  # the first is the sequence
        name = parameter.name
        if parameter.default is not parameter.empty:
            continue
        is_used_once = len(re.findall(rf"\b{re.escape(name)}\b", entry)) == 2
        free = (None, "x", "context") if is_used_once else (None,)
        if call.roles[name] not in free:
            continue
        texts = [(name, source)]
        for helper in set(re.findall(_HANDED.format(re.escape(name)), source)):
            texts += re.findall(_DEFINED.format(helper), whole, re.S)
        found = (
            re.search(pattern.format(own), text)
            for own, text in texts
            for pattern in (_WITH_PADDING, _TOKENS_WIDENED)
        )
        if compared := next(filter(None, found), None):
            call.roles[name], call.holds_tokens = "padding", True
            pad = compared["pad"]
            said = f"{name} taken for tokens, of which 0 is padding"
            numbers = {n for n in call.roles if n == pad or "pad" in words(n)} - {name}
            call.roles |= dict.fromkeys(numbers, "zero")
            if numbers or _is_zero(pad, subject) or _is_zero_by_default(pad, texts):
                call.guesses.append(said)
            else:
                call.guess([name], "tokens, of which 0 is padding")
            return


def _is_zero_by_default(pad: str, texts: list[tuple[str, str]]) -> bool:
    """Whether the number of padding is a parameter of a function, and 0 if left out."""
    return any(re.match(rf"[^)]*\b{pad}\s*(?::\s*int\s*)?=\s*0\b", t) for _, t in texts)


# What is done with a mask, and not with an index of biases.
_HIDING = r"(?:masked_fill_?\(|where\(|mask\w*\s*=|[&|])[^\n]*\b{0}\b|\b{0}\s*[&|]"
_BOUNDS = re.compile(r"cu_?(?:seq_?)?len(?:gth)?s?|cu_?seq_?lens?", re.I)


# Positions that are compared with it, item by item: `places < lengths[:, None]`.
_BY_ITEM = (
    r"^[^\n]*?(?:\barange\(|\b{1}\b)[^\n]*?(?:<|>=)\s*{0}\s*"
    r"(?:\[\s*(?::|\.\.\.)|\.(?:view|unsqueeze|reshape)\()"
)
_PLACES = re.compile(r"^\s*(\w+)\s*=[^\n]*\barange\(", re.M)
_NO_LENGTHS = {"pad", "padding", "left", "start", "offset", "span", "radius", "tgt"}
_NO_LENGTHS |= {
    "cache",
    "past",
    "prev",
    "previous",
    "index",
    "target",
    "q",
    "query",
    "queries",
    "threshold",
    "last",
}
_OF_PREFIX = {"prefix", "src"}
_OF_TEXT = {"prefix", "prompt", "context", "question"}  # of tokens that are some of all
_DOCUMENTS = {"doc", "docs", "document", "documents", "segment", "segments", "seg"}
# As functions of flex_attention have them, for one query and one key.
_SAME_DOCUMENT = re.compile(r"\b(\w+)\[[^\]\n]+\]\s*==\s*\1\[")
_IN_PREFIX = re.compile(r"\b(?:k\w*|j)\s*<\s*\w*prefix\w*\[")
_OPENS = re.compile(r"\|(?!\|)|logical_or|maximum\(")


def of_numbers(call: "Call", source: str, whole: str, file: str) -> None:
    """What is compared with positions, or by positions: documents, and lengths, one for
    each item, of tokens that are no padding, or of a prefix that all see where later
    keys are hidden. source: the text of what is called; whole: that of all its code;
    file: that of its file, which may have functions for flex_attention."""
    of_documents(call, source, whole, file)
    of_places(call, source)
    if _IN_PREFIX.search(file):
        named = (n for n, r in call.roles.items() if r is None)
        found = (n for n in named if _OF_PREFIX & set(words(n)))
        call.roles |= dict.fromkeys(found, "prefix")
    is_causal = re.search(r"causal|tril|triu|\[:, None\]\s*>=", source)
    may_open = is_causal and _OPENS.search(source) and not call.takes("context")
    places = "|".join(_PLACES.findall(source)) or "arange"
    for name, role in call.roles.items():
        said = set(words(name))
        if role not in (None, "max_length") or said & _NO_LENGTHS:
            continue
        by_item = _BY_ITEM.format(re.escape(name), f"(?:{places})")
        if re.search(by_item, source, re.M):
            if may_open and _OF_PREFIX & said:
                call.roles[name] = "prefix"
            elif not _OF_TEXT & said:
                call.roles[name] = "lengths"


def of_places(call: "Call", source: str) -> None:
    """Required numbers of positions, by which heads are turned or tables are read:
    rotate(q, positions), table[positions]; or embeddings of them, the r of
    Transformer-XL, whose scores are shifted."""
    for p in call.parameters:
        if call.roles[p.name] is not None or p.default is not p.empty:
            continue
        read = rf"(?i:rope|rota|apply_rot)[^\n]*\b{p.name}\b|\w\[{p.name}\]"
        is_place = set(words(p.name)) <= {"pos", "position", "positions"}
        if is_place and re.search(read, source):
            call.roles[p.name] = "position_ids"
        elif p.name == "r" and re.search(r"rel_?shift|\br_net\b", source):
            call.roles[p.name] = "positions"


def of_documents(call: "Call", source: str, whole: str, file: str) -> None:
    """Numbers that are compared with each other, query by key: those of the documents
    in one sequence, which do not see each other; or where each of them ends,
    cu_seqlens (n + 1,), beside tokens (L, E)."""
    for place, parameter in enumerate(call.parameters):
        is_bound = _BOUNDS.fullmatch(parameter.name) and parameter.default is None
        name = re.escape(parameter.name)
        asked = rf"\b{name}\s+is\s+(?:not\s+)?None|\b(?:if|not|and|or)\s+{name}\b"
        if is_bound and not re.search(asked, whole):
            call.parameters[place] = parameter.replace(default=parameter.empty)
    wide = r"\b{0}\s*(?:\[[^\]\n]*None[^\]\n]*\]|\.unsqueeze\(-?\d\))"
    for parameter in call.parameters:
        if _BOUNDS.fullmatch(parameter.name) and not call.takes("value"):
            call.roles[parameter.name] = "bounds"
        if call.roles[parameter.name] is not None:
            continue
        own = wide.format(re.escape(parameter.name))
        compared = rf"^\s*(\w+)\s*=[^\n]*{own}(?:\s*[!=]=\s*{own}|\.(?:eq|ne)\({own})"
        found = re.search(compared, source, re.M)
        hides = found and re.search(_HIDING.format(re.escape(found[1])), source)
        # A method that makes the mask may return it.
        named = set(words(parameter.name)) & _DOCUMENTS
        made = re.search(compared, whole, re.M) if named else None
        given = made and re.search(rf"return [^\n]*\b{made[1]}\b", whole)
        if hides or given or (named and _SAME_DOCUMENT.search(file)):
            call.roles[parameter.name] = "documents"


def _is_zero(pad: str, subject: Subject) -> bool:
    """Whether the number of padding is 0, also by default, `self.pad_id`."""
    if pad == "0" or subject.kind == "function":
        return pad == "0"
    name = pad.removeprefix("self.")
    if subject.kind == "instance":
        return (
            type(number := getattr(subject.target, name, None)) is int and number == 0
        )
    try:
        given = inspect.signature(subject.type).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return given is not None and type(given.default) is int and given.default == 0


def of_masks_of_rows(call: "Call", text: str) -> None:
    """A mask of padding that only zeroes rows of what is returned is one of queries, as
    SASRec has it; none whose name says that it is of keys."""
    for name in [n for n, role in call.roles.items() if role == "padding"]:
        if set(words(name)) & {"key", "keys", "kv"}:
            continue
        reverse = zeroes_output(text, name)
        if reverse is not None:
            call.roles[name] = "query_blocked" if reverse else "query_mask"
            call.masks_rows = True


def of_biases(call: "Call") -> None:
    """A bias without a mask beside it is one; beside weights it would be one of them.
    Where both must be given, the mask beside it is one of keys."""
    others = [n for n in call.roles if is_position_bias(n) or "alibi" in words(n)]
    for name in [n for n, role in call.roles.items() if role == "residual"]:
        if others or not any(call.takes(role) for role in TENSORS):
            # It is the sequence itself, or one of several that are given as zeros.
            call.roles[name] = None
        else:
            call.guesses.append(f"{name} given as zeros: its sum is not judged")
    bias = next((p for p in call.parameters if normal(p.name) == "bias"), None)
    name = call.parameter("mask")
    if name and bias and bias.default is bias.empty and not call.takes("padding"):
        call.roles |= {bias.name: "mask", name: "padding"}
    if call.takes("mask") or call.takes("weight"):
        return
    defaults = {p.name: p.default for p in call.parameters}
    if defaults.get("bias", 0) is None:
        call.roles["bias"] = "mask"
    required = [p.name for p in call.parameters if p.default is inspect.Parameter.empty]
    biases = [n for n in required if call.roles[n] is None]
    biases = [n for n in biases if is_position_bias(n) or normal(n) == "bias"]
    # T5 hands its own to its layers, AlphaFold that of its padding.
    call.roles |= dict.fromkeys(biases[:1], "mask")


def of_column_masks(call: "Call", subject: Subject) -> None:
    """A mask of which a column alone is read is one of keys, (B, Lk, 1), and so is one
    that gets an axis of queries between its others, (B, 1, Lk)."""
    name = call.parameter("mask")
    if name is None or call.takes("padding"):
        return
    is_row = re.search(rf"\b{re.escape(name)}\[:, :, None, :\]", subject.source)
    is_row = (
        is_row and "einsum" not in subject.source
    )  # of (B, L, H, L), a mask of pairs
    if is_row or reads_column(call, subject):
        call.roles[name] = "padding"


def reads_column(call: "Call", subject: Subject) -> bool:
    """Whether of a mask the first number of the last axis alone is read, by the code or
    by a class of its file that it builds."""
    name = call.parameter("padding") or call.parameter("mask") or ""
    source = subject.source
    classes = re.split(r"^(?=class )", text_of_file(subject), flags=re.M)
    named = ((re.match(r"class (\w+)", text), text) for text in classes)
    built = [t for n, t in named if n and re.search(rf"\b{n[1]}\(", source)]
    # Of two axes, mask[:, 0], the last is none of a column's.
    reads = rf"\b{re.escape(name)}\[(?:(?:[^,\]\n]+,){{2,}}|\s*\.\.\.\s*,)(?<!\b0,)\s*0\s*\]"
    return any(re.search(reads, text) for text in (source, *built))


def of_masks_of_pairs(call: "Call", source: str) -> None:
    """A mask of padding that gets an axis of heads, and no other, is one of queries and
    keys, (B, Lq, Lk): pad_mask.unsqueeze(1).repeat(1, heads, 1, 1)."""
    name = call.parameter("padding")
    if name is None or call.takes("mask"):
        return
    four = r"\(" + r",".join([r"[^,()]+"] * 4) + r"\)"
    if re.search(
        rf"\b{re.escape(name)}\.unsqueeze\(1\)\.(repeat|expand){four}", source
    ):
        call.roles[name] = "mask"


def of_overwritten_masks(call: "Call", text: str) -> None:
    """A mask that may be left out, and that the code overwrites before it reads it, as
    by a causal one, is none of the call's. text: that of what is called."""
    masks = [
        p.name
        for p in call.parameters
        if p.default is None and call.roles[p.name] in ("mask", "padding")
    ]
    for name in masks:
        if _is_overwritten(name, text):
            call.roles[name] = None
            call.masks_left.add(name)


def _is_overwritten(name: str, text: str) -> bool:
    """Whether the first statement that has this name gives it a value in which it has no
    part."""
    try:
        entry = ast.parse(textwrap.dedent(text)).body[0]
    except (SyntaxError, IndexError):
        return False
    for statement in getattr(entry, "body", ()):
        named = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id == name
        ]
        if named:
            is_set = isinstance(statement, ast.Assign) and len(named) == 1
            return is_set and any(named[0] is target for target in statement.targets)
    return False


# Names that promise it.
_CAUSAL = re.compile(
    r"(?<!non)(?<!non_)(?<!not_)(?:causal|auto_?regressi)|masked_?(self|multi|attention|mha|head)|"
    r"^(?!.*(?:bert|vision|image|cross|encod|prompt))\w*gpt_?[\dx]*_?"
    r"(?:lm|small|language_?model|model|decoder|block|layer|(?:self_?)?attention)?$"
)
# What is masked may be padding, as a name, an argument or the text says.
_OF_PADDING = re.compile(
    r"(?:pad(?:ding|ded)?|len(?:gth)?s?|key|token)_?masked|\bnot causal|\b(?:non|un)-?causal|"
    r"\bbi-?directional",
    re.I,
)


def says_causal(call: "Call", subject: Subject) -> bool:
    """Whether the name of a class or a function promises that no query sees a later
    key, and no mask that it is given may see to that."""
    owner = subject.target if subject.kind == "function" else subject.type
    name = getattr(owner, "__name__", "")
    if not _CAUSAL.search(name.lower()):
        return False
    if call.takes("mask"):
        return _hides_keys_alone(call, name, subject.source)
    if "masked" not in name.lower() or "causal" in name.lower():
        return True
    of_padding = call.takes("lengths") or call.takes("padding")
    return not of_padding and not _OF_PADDING.search(f"{name} {owner.__doc__ or ''}")


# What may be joined with a mask before it is given.
_OF_LATER = re.compile(
    r"causal|look[-_ ]?ahead|subsequent|future|autoregress|tri[lu]", re.I
)
_CLASS = re.compile(r"^[ \t]*class \w+[^\n]*|super\([^)]*\)", re.M)
_OF_EFFECTS = re.compile(r"cross|inference|effect|treatment", re.I)


def _hides_keys_alone(call: "Call", name: str, text: str) -> bool:
    """Whether code of one sequence that is called causal speaks of its mask as one of
    padding, with a row for all queries, and nowhere of later keys."""
    is_causal = "causal" in name.lower() and not _OF_EFFECTS.search(name)
    of_one = not (call.takes("key") or call.takes("context"))
    speaks = _OF_LATER.search(_CLASS.sub("", text)) is not None
    return is_causal and of_one and not speaks and _is_of_keys(call, text)


_AXES = r"\b{}(?:\.shape|\.size\(\))?[^\n\w]*(?:(?:of )?shape\W*)?[\[(]([^\])\n]*)[\])]"
_OF_ALL_QUERIES = re.compile(r"\s*\w+\s*,\s*1\s*,\s*1\s*,\s*\w+\s*")


def _is_of_keys(call: "Call", text: str) -> bool:
    """Whether a text gives its mask one row for all queries: "mask: (B, 1, 1, L)"."""
    name = re.escape(call.parameter("mask") or "")
    axes = [a for a in re.findall(_AXES.format(name), text) if a.count(",") > 1]
    return bool(axes) and all(map(_OF_ALL_QUERIES.fullmatch, axes))


def causal_flag(text: str, parameters: Iterable[inspect.Parameter]) -> str | None:
    """A flag of any name, off or to be given, under which later keys are hidden."""
    hidden = r"if self\.{}:\s*\n[^\n]*\.masked_fill\w*\([^\n]*\b(?:tri[lu]|causal)"
    for p in parameters:
        is_given = p.default is p.empty and p.annotation in (bool, "bool")
        is_flag = p.default is False or is_given
        if is_flag and re.search(hidden.format(re.escape(p.name)), text):
            return p.name
    return None


_TRIANGLE = re.compile(r"\b(\w*mask\w*)\s*=[^=\n][^\n]*\btri[lu]_?\(", re.I)


def makes_causal_masks(call: "Call", subject: Subject) -> bool:
    """Whether its file makes causal masks, as Whisper's decoder does, outside of the
    code that takes one, which has no word of padding."""
    name = call.parameter("mask")
    around = text_of_file(subject).replace(subject.source, "")
    is_made = _TRIANGLE.search(around) is not None
    return is_made and name is not None and "pad" not in f"{name} {subject.source}"
