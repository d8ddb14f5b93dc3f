# SPDX-License-Identifier: MIT
"""What a sentence about a mask says: which value blocks, or that it is added."""

import re
from collections.abc import Iterator

_TRUE = r"(?:true|1s?|ones?|non-?zero)"
_FALSE = r"(?:false|0s?|zeros?)"
_VALUE = re.compile(
    rf"(?<![\w.-])(?<!axis )(?<!dim )(?:(?P<true>{_TRUE})|(?P<false>{_FALSE}))"
    r"(?!\.?\w)(?:'s)?"
)
# What joins a value and its meaning: "True (1) = ", "1 marks ", "0 -> ".
_IS = re.compile(
    r"(?:\s*(?:\(|/|or\b)\s*\w+\)?)?`*(?:\s*values?\b)?\s*"
    r"(?:[=-]+>|=+|:|→|(?:means?|is|are|will|marks?|indicates?|stands for|for|to|iff?|"
    r"where(?:ver)?|at|when|lets)\b)"
)
_BLOCKS = (
    r"pad(?:s|ded|ding)?\b|mask(?:s|ed|ing)?\b|block|ignor|hid(?:e|es|ing)\b|"
    r"hidden(?! (?:state|size|dim))|forbid|exclud|prevent|stop|suppress|"
    r"drop(?:s|ped)?\b|-\s?inf|-\s?1e\d|-10[_,]?000"
)
_TOKENS = r"(?:(?<=for )|(?<=is )|(?<== )|(?<=: ))tokens?\b(?! (?:to|that|which)\b)"
_SEES = (
    r"allow\w* to (?:be )?\w+|attend|keep|kept|visible|allow|seen?\b|sees\b|look|valid|"
    rf"real\b|participat|take part|includ|{_TOKENS}"
)
_MEANING = re.compile(
    r"(?<!\w)(?P<turned>un|non[- ]?|in|dis)?"
    rf"(?:(?P<sees>{_SEES})|(?P<blocks>{_BLOCKS}))"
)
_NOT = re.compile(r"\b(?:not?|never|cannot|without|neither|nor)\b|n't\b")
# Sentences that turn round what they say, or speak of another mask than comes in.
_INTRICATE = re.compile(
    r"\b(?:unless|except|opposite|invert\w*|negat\w*|ke(?:eps?|pt)\b.*\bfrom)\b"
)
_ADDED = re.compile(
    r"\badditive\b|\badded to (?:the )?(?:\w+ )?(?:attention )?(?:scores|logits)"
)
# 0 where a key is seen and -inf where it is not: numbers to be added.
_INFINITE = re.compile(r"(?:\band|\bor|[,(/])\s*(?:float\()?['\"]?-\s?inf")
_END = re.compile(r"[,;.()\n]|\belse\b|\bbut\b")


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
        joined = _IS.match(text, value.end())
        start = joined.end() if joined else value.end()
        end = min(
            found.start() if found else len(text)
            for found in (_END.search(text, start), _VALUE.search(text, start))
        )
        meaning = _MEANING.match(text, start + 1, end)
        beside = meaning and meaning[0] != "mask"  # in "0/1 mask" a noun
        if joined or beside:
            yield value["true"] is not None, start, end


def _meanings(text: str, start: int, end: int) -> tuple[set[bool], bool]:
    """Whether the words there block, each with the "not" before it; and whether
    there was a "not"."""
    meanings, turned = set(), False
    for word in _MEANING.finditer(text, start, end):
        nots = len(_NOT.findall(text, start, word.start())) + bool(word["turned"])
        blocks = (word["blocks"] is not None) is (nots == 0)
        meanings |= {blocks} if nots < 2 else {True, False}
        turned = turned or nots > 0
        start = word.end()
    return meanings, turned
