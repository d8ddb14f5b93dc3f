# SPDX-License-Identifier: MIT
"""What a constructor does with arguments whose names say nothing, or too little: what it
reads of them, what they divide, and which layers it hands them to."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping

from ..subject.roles import SIZES, as_written
from ..subject.target import Subject
from ..subject.texts import source_of
from ..subject.words import words
from .asked import size_of
from .cases import constants_of
from .settings import holds_sizes
from .settled import AMONG

Roles = Mapping[str, str | None]  # of arguments, by name
_READ = r"(?<![.\w]){}(?:\.|\[[\"'])(\w+)"  # c.hidden_size, c["hidden_size"]
# Of two axes: (2 * w - 1) ** 2, (2 * w - 1) * (2 * w - 1)
_TABLE = r"\b2 ?\* ?(\w+) ?- ?1\)+\s*(?:\*\*\s*2|\*\s*\(\s*2)"
# torch.ones(n + 1, n + 1)
_SQUARE = r"\bones\(\s*\(?\s*(\w+)(?: ?\+ ?\d+)?\s*,\s*\1(?: ?\+ ?\d+)?\s*[,)]"
_INSIDE = {"chans", "channels", "channel", "chan", "ch", "rank", "class", "classes"}
_INSIDE |= {"latent", "bottleneck", "mlp", "ff", "ffn", "vocab", "layers", "experts"}
_LENGTHS = ("sliding_window", "max_length")
_MADE = r"\b([A-Z]\w*|randn?|zeros|ones|empty)" + AMONG


class Constructor:
    """roles: those known so far, by names."""

    def __init__(
        self, subject: Subject, parameters: Iterable[inspect.Parameter], roles: Roles
    ):
        self._subject, self._roles = subject, roles
        self._parameters = list(parameters)
        self._text = source_of(subject.target.__init__)

    def roles(self) -> dict[str, str | None]:
        """All roles, with what the text says, the first that it says of an argument."""
        readers: dict[str | None, Callable[[], Iterable[str]]] = {
            None: self._for_no_layer,
            "config": self._for_settings,
            "dropout": self._for_dropout,
            "epsilon": self._for_epsilon,
            "slope": self._for_slope,
            "head_dim": self._for_matrices,
            "embed_dim": self._for_widths,
            "window": self._for_window,
            "max_length": self._for_table,
        }
        for role, names in readers.items():
            self._roles = {**self._roles, **dict.fromkeys(names(), role)}
        return dict(self._roles)

    def _unknown(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._roles.get(name, "") is None]

    def _for_no_layer(self) -> list[str]:
        """Counts of words, or of queries, that no layer or parameter is made for; of heads,
        where they count groups of a norm."""
        text = self._subject.source or source_of(self._subject.target)
        counts = [n for n, r in self._roles.items() if r in ("vocabulary", "learned")]
        left = [n for n in counts if not re.search(_MADE.format(re.escape(n)), text)]
        return left + [
            n
            for n, r in self._roles.items()
            if r == "num_heads" and self._is_of_norm(n)
        ]

    def _is_of_norm(self, name: str) -> bool:
        """Whether nothing but the groups of a norm are counted by it."""
        body = self._text.partition("super()")[2]
        used = len(re.findall(rf"\b{re.escape(name)}\b", body))
        return (
            0 < used == len(re.findall(rf"\bGroupNorm\(\s*{re.escape(name)}\b", body))
        )

    def _for_settings(self) -> list[str]:
        """Configurations, whatever their names: what is required, and of which the
        constructor reads sizes, `c.hidden_size`; defaults that hold sizes."""
        by_default = [p.name for p in self._parameters if holds_sizes(p.default)]
        asked = [
            p.name
            for p in self._parameters
            if p.default is p.empty and self._roles[p.name] in (None, *SIZES)
        ]
        return by_default + [
            name
            for name in asked
            if any(
                map(_is_size, re.findall(_READ.format(as_written(name)), self._text))
            )
        ]

    def _for_dropout(self) -> list[str]:
        handed = r"\bDropout\w*\(\s*(?:p\s*=\s*)?(\w+)\s*[,)]"
        return self._unknown(re.findall(handed, self._text))

    def _for_epsilon(self) -> list[str]:
        """What a norm is handed."""
        return self._unknown(re.findall(r"\beps\s*=\s*(\w+)\s*[,)]", self._text))

    def _for_slope(self) -> list[str]:
        """What a leaky ReLU is handed, as in attention of graphs."""
        handed = r"negative_slope\s*=\s*(?:self\.)?(\w+)|LeakyReLU\(\s*(?:self\.)?(\w+)"
        handed += r"|leaky_relu\([^\n]*,\s*(?:self\.)?(\w+)\s*\)"
        found = re.findall(handed, self._subject.source or self._text)
        return self._unknown(name for names in found for name in names)

    def _for_table(self) -> Iterable[str]:
        """How many rows a learned table has: of distances, mostly; the side of a square
        of ones, as of a causal mask."""
        rows = re.findall(r"\bEmbedding\(\s*(\w+)\s*,", self._text)
        return self._unknown([*rows, *re.findall(_SQUARE, self._text)])

    def _by_heads(self) -> list[tuple[str, str]]:
        """The first and the last axis of matrices by heads, (model, heads, dim), whose
        first has no name that says how wide it is."""
        made = re.findall(r"\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)\s*\)", self._text)
        heads = [n for n, role in self._roles.items() if role == "num_heads"]
        return [(a, c) for a, b, c in made if b in heads and self._unknown([a])]

    def _for_matrices(self) -> list[str]:
        return [last for _, last in self._by_heads() if last in self._roles]

    def _for_widths(self) -> list[str]:
        first = [name for name, _ in self._by_heads()]
        return [*first, *self._for_width(), *self._for_inputs()]

    def _for_inputs(self) -> list[str]:
        """Widths by default that matrices read, as of spectra: `nn.Linear(n_mels, dim)`."""
        reads = r"(?:Linear|Conv1d|Conv2d)\(\s*(?:in_\w+\s*=\s*)?(\w+)\s*,"
        sizes = {p.name for p in self._parameters if type(p.default) is int}
        sizes = {name for name in sizes if not set(words(name)) & _INSIDE}
        return self._unknown(n for n in re.findall(reads, self._text) if n in sizes)

    def _for_width(self) -> list[str]:
        """What the heads divide: `out % heads`; or the only width, beside a number of
        heads that the class has fixed."""
        widths = [n for n, r in self._roles.items() if r in ("head_dim", "embed_dim")]
        fixed = "num_heads" in constants_of(self._subject.target)
        of_heads = (
            rf"heads\w*\s*\*\s*({'|'.join(widths)})\b|\b({'|'.join(widths)})\s*\*"
        )
        if len(widths) == 1 and fixed and not re.search(of_heads, self._text):
            return widths
        heads = [n for n, role in self._roles.items() if role == "num_heads"]
        divided = rf"(\w+)\s*(?:%|//)\s*(?:{'|'.join(map(re.escape, heads))})\b"
        found = re.findall(divided, self._text) if heads else []
        return [n for n in found if self._roles.get(n, "") in (None, "head_dim")]

    def _for_window(self) -> list[str]:
        """What has two sides: `group_size[0]`, `group_size[1]`; has a table of two axes,
        `(2 * window - 1) ** 2`; or cuts an image, `H // size` and `W // size`."""
        parts = r"(\w+(?:size|sz|shape|hw))\[{}\]".format
        sides = (set(re.findall(parts(n), self._text)) for n in (0, 1))
        free = {n for n, role in self._roles.items() if role in (None, "num_kv_heads")}
        lengths = [n for n, role in self._roles.items() if role in _LENGTHS]
        tabled = re.findall(_TABLE, self._text)
        cuts = r"\b{}\w*\s*//\s*(?:self\.)?(\w+)\s*,\s*(?:self\.)?\1\b".format
        text = self._subject.source
        cut = set.intersection(*(set(re.findall(cuts(a), text)) for a in "HW"))
        aliases = dict(re.findall(r"^\s*(\w+)\s*=\s*self\.(\w+)\s*$", text, re.M))
        tabled += [aliases.get(name, name) for name in cut]
        return sorted(
            free.intersection(*sides) | {*free, *lengths}.intersection(tabled)
        )


def _is_size(name: str) -> bool:
    return size_of(name) in ("embed_dim", "num_heads", "head_dim")
