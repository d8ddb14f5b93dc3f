# SPDX-License-Identifier: MIT
"""What code says that it does, where attention leaves a choice: then that is right, and
what it does otherwise is wrong."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator

from .documented import docstrings, one_line
from .signature import Call
from .target import Subject, text_of_file
from .words import is_position_bias, words

_DOT_PRODUCT = re.compile(r"dot[-_ ]?(?:product[-_ ]?)?att|luong|soft[-_ ]?align", re.I)
_SCALES = re.compile(r"scal(?:e|ing)|sqrt|\*\*\s*-?\s*0?\.5|multi[-_ ]?head", re.I)
# Blocks of images that have no scale in their papers: non-local ones (Wang et al.,
# 2018), and those of SAGAN (Zhang et al., 2019) and DANet, whose sum a gamma weighs.
_NON_LOCAL = re.compile(r"non[-_ ]?local|\bNL_?block|\bsagan\b", re.I)
_GAMMA = re.compile(
    r"\bgamma\w*\s*=\s*(?:torch\.)?(?:nn\.)?Parameter\([^\n]*[\[(]\s*[01]\.?0?\s*[\])]"
)
_HEADS = re.compile(r"heads?\b|heads_", re.I)
_LAYERS = {"rnn", "lstm", "gru"}
_RECURRENT = re.compile(r"\b(?:LSTM|GRU|RNN)(?:Cell)?\(")
_OF_STATES = re.compile(r"\b(?:LSTM|GRU|RNN)(?:Cell)?s?\b|\bspeller\b")
_CONVOLUTION = re.compile(r"\bConv[123]d\b")
# What calls a function of the same file with queries that are scaled.
_BY_CALLER = re.compile(r"\bq\w*\s*(?:\*=|=\s*\(?q\w*\s*\*)\s*[\w.]*scal", re.I)
_UNSCALED = re.compile(r"\b(?:no|not|without|un|omits? the) ?scal(?:ed|e|ing)\b", re.I)
_OF_SCORES = re.compile(
    r"\b(?:scores?|logits?|dot[- ]products?|energ(?:y|ies))\b", re.I
)
_BIAS = re.compile(
    r"alibi|linear[-_ ]?bias|relative[-_ ]?(?:pos|bias|dist)|pos(?:ition)?s?[-_ ]?bias",
    re.I,
)
# T5 (Raffel et al., 2020) does not scale, and has its bias for buckets of positions.
_T5 = re.compile(r"(?<![a-z])t5|bucket|relative_attention", re.I)
# Masks that show what others hide, on purpose.
_OPENS_KEYS = re.compile(
    r"prefix|global|prompt|bidirectional|longformer|big_?bird|sink|prefill", re.I
)
_SEES_ITSELF = re.compile(r"\beye\(|fill_diagonal_?\(|self[-_ ]loops?\b", re.I)
_LAST = re.compile(
    r"quer(?:y|ies)\b[^.;\n]{0,30}\b(?:are|is) (?:taken (?:as|for) )?"
    r"(?:the )?(?:last|latest|newest|most recent)\b"
    r"(?! (?:in the )?(?:\w+ )?(?:arg|param|dim|axis|axes))|"
    r"\blast quer(?:y|ies)\b[^.;\n]{0,20}\baligned\b[^.;\n]{0,20}\blast keys?\b|"
    r"\b(?:bottom[- ]right|right[- ]aligned|aligned (?:to|at|with) the end)\b",
    re.I,
)
_TURNS_BOTH = re.compile(
    r"\b(?:rotary|rope|rotat\w*|turn\w*)\b[^.\n]{0,60}\bq(?:uer(?:y|ies))?\b[^.\n]{0,12}"
    r"\bk(?:eys?)?\b|\bq(?:uer(?:y|ies))?\b[^.\n]{0,12}\bk(?:eys?)?\b[^.\n]{0,40}"
    r"\b(?:rotary|rope|rotated|turned)\b",
    re.I,
)
_OF_TURNS = re.compile(r"\b(?:rotary|rope|rotat\w*|turn\w*)\b", re.I)
_VALUES = re.compile(r"\bv(?:alues?)?\b", re.I)
_ROTARY = re.compile(r"\brotary\b|\brope\b", re.I)
_ALIBI = re.compile(r"\balibi\b|\blinear biases\b", re.I)
_NAMED_ALIBI = re.compile(r"\balibi_\w+\(|_alibi\w*\(|\balibi\(|\balibi\s*=")
_ALIBI_LAYER = re.compile(r"alibi\w*att|att\w*alibi", re.I)
_ALIBI_FLAG = re.compile(
    r"(?:use|with|no|is|has|enable)_?alibi|\balibi\s*(?::\s*\w+\s*)?=\s*(?:None|False|True)",
    re.I,
)
_NOT = re.compile(r"\b(?:not|never|unlike|instead of|rather than)\b", re.I)
_WAVES = re.compile(
    r"\b(sin|cos)\(|\brope\b|rotary|slopes?\b|alibi|\bpos(ition)?s?\b", re.I
)
_UNUSED = re.compile(r"\bunused\b|\bnot (?:currently |yet )?(?:used|applied)\b", re.I)
# Its author knows that others divide by something else.
_BY_DESIGN = re.compile(
    r"\b(?:as|like) in the (?:reference|original|official|published|authors'?)\b"
    r"[^.;]*\b(?:scaled?|scores? (?:is|are) divided)\b"
    r"|\b(?:scaled?|scores? (?:is|are) divided)\b[^;]*"
    r"\b(?:as|like) in the (?:reference|original|official|published|authors'?)\b",
    re.I,
)
_OWN_KEY_COUNTS = re.compile(
    r"\bwindow\w*\s*-\s*1\b[^.;\n]{0,30}\b(?:before|previous|earlier|preceding|past)"
    r"|(?:before|previous|earlier|preceding|past)\b[^.;\n]{0,20}\bwindow\w*\s*-\s*1\b"
    r"|\bwindow\w*\b[^.;\n]{0,40}\b(?:including|counting) (?:itself|its own|the current)"
    r"|\bwindow\w*\b[^.;\n]{0,40}\bitself (?:among them|included)"
    r"|\bi\s*-\s*window\w*\s*\+\s*1\b",
    re.I,
)


def promises(subject: Subject, call: Call) -> dict[str, str]:
    """All of it, as the engine is told."""
    said = {
        "takes_position_bias": any(map(is_position_bias, call.roles)),
        "says_dot_product": is_dot_product(subject) or is_recurrent(subject, call),
        "says_position_bias": has_position_bias(subject),
        "scales_by_design": any(map(_BY_DESIGN.search, docstrings(subject))),
        "speaks_of_t5": _T5.search(text_of_file(subject)) is not None,
        "queries_are_last": queries_are_last(subject),
        "opens_keys": any(map(_OPENS_KEYS.search, (subject.source, *call.roles))),
        "sees_itself": _SEES_ITSELF.search(subject.source) is not None,
    }
    told = {name: "true" for name, is_said in said.items() if is_said}
    own = {"window_counts": "own_key"} if window_counts_own_key(subject) else {}
    return told | own


# Of several kinds of scores, the default: score_function="dot_product".
_CHOSEN = re.compile(r"\w=[\"'](dot(?:[-_]?prod(?:uct)?)?)([\"'])")


def is_dot_product(subject: Subject) -> bool:
    """Whether it calls itself dot-product attention, by its name or by the kind of scores
    that it has by default; or is a block of images that has no scale where it was
    published, and speaks of none."""
    said, text = [subject.name, *docstrings(subject)], subject.source
    if any(f"== {quote}{kind}{quote}" in text for kind, quote in _CHOSEN.findall(text)):
        return True
    named = any(_DOT_PRODUCT.search(one) for one in said)
    named = named or any(map(_says_unscaled, _sentences(subject)))
    if _CONVOLUTION.search(text) and not _HEADS.search(text):
        classes = re.findall(r"^class (\w+)", text, re.M)
        named = named or any(map(_NON_LOCAL.search, [subject.name, *classes]))
        named = named or _GAMMA.search(text) is not None
    named = named or (subject.kind == "function" and _is_scaled_by_caller(subject))
    texts = (_UNSCALED.sub("", text) for text in (*said, subject.source))
    return named and not any(map(_SCALES.search, texts))


def is_recurrent(subject: Subject, call: Call) -> bool:
    """Whether it reads for the state of a recurrent net, which asks, as in code of Luong
    et al., 2015, and Chan et al., 2016: without heads, and without a scale."""
    name, text = call.parameter("query") or call.parameter("x") or "", subject.source
    of_layer = bool(_LAYERS & set(words(name)))  # rnn_output
    is_read = call.takes("key") or call.takes("context")
    asks = is_read and (call.takes("query") or of_layer)
    if not asks or _HEADS.search(text) or _SCALES.search(text):
        return False
    said = any(map(_OF_STATES.search, docstrings(subject)))
    return said or of_layer or _RECURRENT.search(text_of_file(subject)) is not None


def _says_unscaled(sentence: str) -> bool:
    return bool(_UNSCALED.search(sentence) and _OF_SCORES.search(sentence))


def _is_scaled_by_caller(subject: Subject) -> bool:
    """Whether what calls a function of the same file scales its queries before."""
    try:
        tree = ast.parse(text_of_file(subject))
    except SyntaxError:
        return False
    called = re.compile(rf"\b{re.escape(subject.name)}\(")
    bodies = (
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name != subject.name
    )
    return any(_BY_CALLER.search(one) and called.search(one) for one in bodies)


def has_position_bias(subject: Subject) -> bool:
    """Whether its text speaks of a bias of positions, as that of ALiBi."""
    lines = subject.source.splitlines()
    said = [subject.name, *_sentences(subject)]
    said += [line.partition("#")[0] for line in lines if "import" not in line]
    return any(_BIAS.search(text) and not _NOT.search(text) for text in said)


def queries_are_last(subject: Subject) -> bool:
    """Whether it says that queries are the last of the keys, as with a cache."""
    for sentence in _sentences(subject):
        if _LAST.search(sentence) and not _NOT.search(sentence):
            return True
    return False


def turns_queries_and_keys(subject: Subject) -> bool:
    """Whether it says that queries and keys are turned, and nowhere that values are."""
    said = [one for one in _sentences(subject) if _OF_TURNS.search(one)]
    of_both = any(map(_TURNS_BOTH.search, said))
    return of_both and not any(map(_VALUES.search, said))


def says_rotary(subject: Subject) -> bool:
    """Whether its docstring or its name says that it has rotary positions."""
    said = [" ".join(words(subject.name)), *docstrings(subject)]
    of_them = [s for text in said for s in text.splitlines() if _ROTARY.search(s)]
    return any(not _NOT.search(sentence) for sentence in of_them)


def says_alibi(subject: Subject) -> bool:
    """Whether it says that its bias is that of ALiBi (Press et al., 2022), or calls
    something so."""
    is_flag = _ALIBI_FLAG.search(subject.source) is not None
    named = _ALIBI_LAYER.search(subject.name) or _NAMED_ALIBI.search(subject.source)
    if named and not is_flag:
        return True
    said = filter(_ALIBI.search, _sentences(subject))
    return any(not _NOT.search(sentence) for sentence in said)


def window_counts_own_key(subject: Subject) -> bool:
    """Whether it says, or a function of its file that makes its mask, that a window of w
    is w - 1 keys beside the query's own."""
    called = re.findall(r"\b(\w*(?:window|mask|local|band)\w*)\(", subject.source)
    known = getattr(inspect.unwrap(subject.entry), "__globals__", {})
    makers = (known.get(name) for name in dict.fromkeys(called))
    said = [inspect.getdoc(m) or "" for m in makers if inspect.isfunction(m)]
    return any(_OWN_KEY_COUNTS.search(one) for one in (*_sentences(subject), *said))


@functools.cache
def _adds_a_little(text: str) -> bool:
    return (
        re.search(r"\b1(\.0*)?e-(0?[6-9]|1\d)\b|\beps(ilon)?\b", text, re.I) is not None
    )


def adds_a_little(subject: Subject) -> bool:
    """Whether its file speaks of a number so small that float32 loses it, as what keeps
    a sum from being 0."""
    return _adds_a_little(text_of_file(subject))


def speaks_of_positions(subject: Subject) -> bool:
    """Whether its file computes with what positions are made into: waves, slopes."""
    return _WAVES.search(text_of_file(subject)) is not None


def leaves_dropout(subject: Subject) -> bool:
    """Whether it says that the dropout that it is given has no use."""
    said = (text for text in _sentences(subject) if "dropout" in text.lower())
    return any(map(_UNUSED.search, said))


def _sentences(subject: Subject) -> Iterator[str]:
    for text in docstrings(subject):
        yield from re.split(r"(?<=[.;])\s|\n\s*\n", one_line(text))
    for line in subject.source.splitlines():
        yield line.partition("#")[2]


_SERVES = r"@torch\.(?:no_grad|inference_mode)\(\)\s+def (?:forward|__call__|{})\b"
# What a function is given is handed to NumPy, which knows of no gradients.
_IN_NUMPY = r"\b(?:{})\.detach\(\)(?:\.cpu\(\))?\.numpy\(\)"


def leaves_gradients(subject: Subject, call: Call) -> bool:
    """Whether gradients say nothing: queries are exchanged for others, the context is of
    a module that is not to learn of it, `context = context.detach()`, or all of it says
    that nobody trains it, `@torch.inference_mode()`."""
    name = re.escape(call.parameter("context") or "")
    cut = name and re.search(
        rf"^\s*{name}\s*=\s*{name}\.detach\(\)", subject.source, re.M
    )
    serves = re.search(_SERVES.format(re.escape(subject.name)), subject.source)
    given = _IN_NUMPY.format("|".join(map(re.escape, call.roles)))
    serves = serves or (subject.kind == "function" and re.search(given, subject.source))
    return bool(cut or serves) or getattr(subject.how, "has_no_gradients", False)
