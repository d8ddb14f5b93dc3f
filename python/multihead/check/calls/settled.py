# SPDX-License-Identifier: MIT
"""What the arguments of a constructor are, beyond their names: what stands beside them,
and what its text does with them, settle it."""

import re
from typing import TYPE_CHECKING

from ..subject.roles import normal
from ..subject.texts import source_of
from ..subject.words import role_of_words, words
from .asked import size_of

if TYPE_CHECKING:
    from .construct import Construction

_STEP = re.compile(r"range\([^,\n]*,[^,\n]*,\s*(?:\w+\.)*(\w+)")
# A name among the arguments of a call, of which one may be a call itself.
AMONG = r"\((?:[^()]|\([^()]*\))*?(?:\([^()]*)?\b{0}\b"
_OF_ATTENTION = {"attn", "attention", "att"}


def settle(built: "Construction") -> None:
    _widths(built)
    _heads(built)
    _blocks(built)
    _norms(built)
    _sides(built)


def notation(built: "Construction") -> dict[str, str]:
    """The roles of H and A, as the paper of BERT (Devlin et al., 2019) has them: the
    width, and how many heads there are."""
    text = source_of(built.subject.target.__init__)
    for width, heads in re.findall(r"(?<!\.)\b(H)\s*(?://|%|/)\s*(A)\b", text):
        if (built.roles.get(width), built.roles.get(heads, "")) == ("num_heads", None):
            return {width: "embed_dim", heads: "num_heads"}
    return {}


def _widths(built: "Construction") -> None:
    """The widths of queries, keys and values are those of the inputs where there
    is one of each, or no other width. Beside the model's, d_feature is that of a
    head, and so is, where no heads are counted, attention_dim and what matrices end in
    and none begins with."""
    kinds = {
        kind: name
        for name in built.roles
        for kind in ("query", "key", "value")
        if {kind, kind[0]} & set(words(name)) and role_of_words(name) == "qkv_dim"
    }
    no_other = not built.takes("embed_dim", "config", "head_dim")
    narrow = [n for n in built.roles if normal(n) == "dfeature"]
    wide = [n for n, role in built.roles.items() if role == "embed_dim"]
    wide += kinds.values() if len(kinds) == 3 else []
    narrow += [n for n in wide if _is_times_heads(built, n)]
    if not built.counts_heads:
        narrow += [n for n in wide if set(words(n)) & _OF_ATTENTION or _ends(built, n)]
    if set(wide) - set(narrow) and len(wide) > 1:
        built.roles |= dict.fromkeys(narrow, "head_dim")
    for name in wide if len(wide) > 1 else ():
        in_window = built.takes("window") and normal(name) == "inputsize"
        if in_window or _is_side(built, name):
            built.roles[name] = "resolution"
    if len(kinds) == 3 or ("query" in kinds and no_other):
        built.roles |= dict.fromkeys(kinds.values(), "embed_dim")
    if any("query" in words(name) for name in wide):  # key_dim beside query_dim
        of_keys = [n for n, role in built.roles.items() if role == "head_dim"]
        of_keys = [n for n in of_keys if _is_of_inputs(built, n)]
        built.roles |= dict.fromkeys(of_keys, "embed_dim")


def is_grounded(built: "Construction", name: str) -> bool:
    """Whether a size whose role only its place tells is used as one of that role: a
    width that matrices read, or a number of heads that divides a width. Height and width
    of an image come together."""
    role, text = built.roles[name], source_of(built.subject.target.__init__)
    if role in ("rows", "columns"):
        return built.takes("rows") and built.takes("columns")
    if name not in built.by_place:
        return False
    if role == "embed_dim":
        made = "Linear|Conv[12]d|empty|randn?|zeros|Tensor"
        return _is_of_inputs(built, name, made)
    if role == "head_dim" and _ends(built, name):
        return True
    wide = [n for n, r in built.roles.items() if r in ("embed_dim", "head_dim")]
    divides = rf"\b(?:{'|'.join(map(re.escape, wide))})\s*(?://?|%)\s*(?:self\.)?"
    return bool(wide) and re.search(rf"{divides}{re.escape(name)}\b", text) is not None


def _is_of_inputs(built: "Construction", name: str, made: str = "Linear") -> bool:
    """Whether a matrix reads that many features: `nn.Linear(key_dim, units)`. made: what
    makes one."""
    own = rf"(?:in_\w+\s*=\s*)?(?:self\.)?{re.escape(name)}\s*,"
    reads = rf"(?:{made})\(\s*{own}"
    return re.search(reads, source_of(built.subject.target.__init__)) is not None


def _ends(built: "Construction", name: str) -> bool:
    """Whether matrices make that many features of one head, and none reads them."""
    text = source_of(built.subject.target.__init__)
    own = rf"(?:out_\w+\s*=\s*)?(?:self\.)?{re.escape(name)}\b"
    made = re.search(rf"Linear\(\s*(?:in_\w+\s*=\s*)?[\w.]+\s*,\s*{own}", text)
    return bool(made) and not _is_of_inputs(built, name) and "heads" not in text


def _is_side(built: "Construction", name: str) -> bool:
    """Whether it is multiplied by itself, as the side of an image: `size * size`."""
    own = rf"(?:self\.)?{re.escape(name)}"
    made = rf"(?<![\w.]){own}\s*(?:\*\*\s*2\b|\*\s*{own}\b)"
    text = built.subject.source or source_of(built.subject.target)
    return re.search(made, text) is not None


def _is_times_heads(built: "Construction", name: str) -> bool:
    """Whether that many features are made for each head: `c_hidden * no_heads`."""
    text = source_of(built.subject.target.__init__)
    heads = [n for n, role in built.roles.items() if role == "num_heads"]
    count = rf"(?:self\.)?(?:{'|'.join(map(re.escape, heads))})"
    width = rf"(?:self\.)?{re.escape(name)}"
    made = rf"(?<![\w.])(?:{width} \* {count}|{count} \* {width})\b"
    # Heads as wide as the model, which are joined to one of its width.
    joined = rf"Linear\(\s*{made}\s*,\s*{width}\s*[,)]"
    return bool(heads) and bool(re.search(made, text)) and not re.search(joined, text)


def _heads(built: "Construction") -> None:
    """One letter beside a width of heads, or as the only width beside a number of
    heads, is the whole width; what the width is divided by to get that of a head
    counts the heads, whatever its name, and to get how many heads there are, is the
    width of one."""
    for name in built.by_place:
        counts = size_of(_quotient(built, name)) == "num_heads"
        if (counts or _ends(built, name)) and built.roles[name] == "num_heads":
            built.roles[name] = "head_dim"
    narrow = [n for n, role in built.roles.items() if role == "head_dim"]
    letters = [n for n in narrow if len(n) == 1]
    beside = len(narrow) > 1 or built.takes("num_heads")
    if len(letters) == 1 and beside and not built.takes("embed_dim", "qkv_dim"):
        built.roles[letters[0]] = "embed_dim"
    if not built.takes("embed_dim", "qkv_dim", "config"):
        shared = [name for name in narrow if _is_cut_into_heads(built, name)]
        built.roles |= dict.fromkeys(shared[:1], "embed_dim")
    if built.takes("num_heads", "config") or not built.takes("embed_dim"):
        return
    for name in narrow:
        made = _quotient(built, name) or "heads"
        if size_of(made) not in ("num_heads", "num_kv_heads", None):
            built.roles[name] = "num_heads"


def _quotient(built: "Construction", name: str) -> str:
    """What is made by a division by it: `self.num_heads = width // name`."""
    divided = rf"([\w.]+)\s*=\s*[\w.]+\s*//\s*(?:self\.)?{re.escape(name)}\b"
    found = re.search(divided, built.subject.source) or re.search(
        divided, source_of(built.subject.target)
    )
    return found[1].rpartition(".")[2] if found else ""


def _is_cut_into_heads(built: "Construction", name: str) -> bool:
    """Whether a number of heads must divide it: `head_size % num_heads`."""
    text = source_of(built.subject.target.__init__)
    heads = [re.escape(n) for n, role in built.roles.items() if role == "num_heads"]
    cut = rf"\b{re.escape(name)}\s*(?:%|//)\s*(?:self\.)?(?:{'|'.join(heads)})\b"
    return bool(heads) and re.search(cut, text) is not None


def _blocks(built: "Construction") -> None:
    """Where an online softmax goes in steps of a length, that is the length of its
    blocks, of which a long sequence has several. Without one, what is right in
    blocks may be meant to stay in them."""
    text = built.subject.source or source_of(built.subject.target)
    if not re.search(r"\bexp2?\(", text):
        return
    stepped = set(_STEP.findall(text))
    of_block = any("block" in words(step) for step in stepped)
    for name, role in built.roles.items():
        kept = re.findall(rf"(\w+)\s*=\s*{re.escape(name)}\b", text)
        steps = stepped & {name, *kept} or (of_block and "block" in words(name))
        if role == "max_length" and steps:
            built.roles[name] = "block"


def _norms(built: "Construction") -> None:
    """Groups that a norm is told, and no heads, are of features."""
    text = built.subject.source or source_of(built.subject.target)
    for name, role in built.roles.items():
        told = r"norm\w*" + AMONG.format(re.escape(name))
        grouped = role == "num_kv_heads" and "groups" in name.lower()
        if grouped and not built.takes("num_heads") and re.search(told, text, re.I):
            built.roles[name] = None


def _sides(built: "Construction") -> None:
    """Height and width of an image, which come together, as capital letters, too:
    h beside H counts the heads."""
    named = [name for name in built.roles if "height" in words(name)]
    pairs = [(name, name.replace("height", "width")) for name in named]
    for height, width in (("H", "W"), ("h", "w"), *pairs):
        if {height, width} <= built.roles.keys():
            built.roles |= {height: "rows", width: "columns"}
            return
