# SPDX-License-Identifier: MIT
"""Which number says how many keys a query may see, where names leave it open: a
`window_size` is that of a sliding window, or of the windows that an image is cut into."""

import inspect
import re
from collections.abc import Iterable

from .roles import normal
from .texts import compared_with
from .words import words

_EMPTY = inspect.Parameter.empty
_NAMES = set(
    "window windowsize winsize ws w span radius windowradius halfwindow halfwindowsize "
    "localsize localradius localcontext bandwidth lookback attnspan attentionspan".split()
)
# Of images, in the code of Swin and its kind.
_OF_IMAGES = re.compile(
    r"relative_position|meshgrid|window_(partition|reverse)|\bim(age|g)|patch|win_?size\s*\["
    r"|Conv2d|\bheight\b|feature[ _]maps?\b"
    r"|\(\s*2\s*\*\s*\w+\s*-\s*1\s*\)\s*\*"
    r"|\bh\w*\s*,\s*w\w*(\s*,\s*\w+)*\s*=\s*\w+\.(shape|size)|\bws\s*\*\s*ws\b",
    re.I,
)
_OF_SEQUENCES = re.compile(
    r"sliding|\blocal|\bband(ed)?\b|look_?back|neighbou?r|\barange\(|\btri[lu]\(|"
    r"\brange\([^()\n]*\b(window|radius)|\bcausal",
    re.I,
)


_SAYS_SLIDING = re.compile(r"sliding|local|windowed", re.I)
# Of streams: how many frames ahead each sees.
_AHEAD = re.compile(
    r"\b(?:frame|token|step|key|position)s? ahead\b|right_context", re.I
)


def is_sliding(text: str) -> bool:
    """Whether the code of this text has windows that move along a sequence."""
    is_other = _OF_IMAGES.search(text) or _AHEAD.search(text)
    return bool(_OF_SEQUENCES.search(text)) and not is_other


OF_WINDOWS = re.compile("local|slid|window|band", re.I)  # in words for a kind


def is_by_choice(parameters: Iterable[inspect.Parameter], text: str) -> bool:
    """Whether it has such windows if a word asks for them that is not its default."""
    for name, default in ((p.name, p.default) for p in parameters):
        asks = any(map(OF_WINDOWS.search, compared_with(name, text)))
        if asks and isinstance(default, str) and not OF_WINDOWS.search(default):
            return True
    return False


def is_size(name: str) -> bool:
    """Whether it may be the name of the size of such a window."""
    return normal(name) in _NAMES


def is_read(text: str) -> bool:
    """Whether a class of this text reads the window that it keeps."""
    return bool(re.search(r"self\.\w*window\w*(?!\w)(?!\s*=[^=])", text, re.I))


def is_flag(name: str, value: object) -> bool:
    """Whether it switches such windows on and off, as use_sliding_window does."""
    said = set(words(name))
    return type(value) is bool and bool(said & _SLIDES) and said <= _OF_FLAGS


_SLIDES = {"sliding", "window", "windowed", "swa"}
_OF_FLAGS = _SLIDES | set("use is has with enable local attention attn".split())


def sizes(parameters: Iterable[inspect.Parameter], text: str) -> dict[str, str]:
    """The role of those that are that size in code of this text."""
    found = [p.name for p in parameters if _is_size(p, text)]
    return dict.fromkeys(found if is_sliding(text) else [], "sliding_window")


def flags(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """The role of those that switch on what is off by default."""
    off = (p.name for p in parameters if p.default is False)
    return dict.fromkeys((n for n in off if is_flag(n, False)), "windowed")


def _is_size(parameter: inspect.Parameter, text: str) -> bool:
    """Whether code compares something with it, takes it from a position, has a triangle
    of it, or leaves that to another function."""
    name, default = parameter.name, parameter.default
    if not is_size(name) or "tuple" in str(parameter.annotation).lower():
        return False
    if type(default) is not int and (len(name) == 1 or default not in (None, _EMPTY)):
        return False
    kept = re.findall(rf"(\w+)\s*=\s*{re.escape(name)}\b", text)
    kept += filter(is_size, re.findall(r"\bself\.(\w+)", text))
    size = rf"(?:\w+\.)?(?:{'|'.join(map(re.escape, {name, *kept}))})\b"
    used = rf"[<>]=?\s*\(?-?\s*{size}|{size}\s*[<>]|[-+]\s*{size}|=\s*\(?-\s*\(?{size}"
    if _SAYS_SLIDING.search(text):  # a triangle may also look ahead by it
        used += rf"|\btri[lu]\([^()\n]*{size}"
    if "window" in name.lower():
        used += rf"|(?<!def )(?<!torch\.)(?<!F\.)\b\w+\([^()\n]*,\s*{re.escape(name)}\b"
    return re.search(used, text) is not None
