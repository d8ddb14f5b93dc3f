# SPDX-License-Identifier: MIT
"""What one way to call the code gave, and which of two ways says more."""

from dataclasses import dataclass, field

from ..capture.runner import Run
from ..finding import Finding
from ..subject.documented import Said
from .first_call import Base
from .observation import Observation

_RIGHT = ("bits", "rounding")
_QUOTED = 120  # characters of a sentence
_OTHER = {"blocked": "keep", "keep": "blocked"}
_VERBS = {"blocked": "blocks", "keep": "keeps"}
_MEANS = {"blocked": "blocked", "keep": "may be seen"}


@dataclass
class Reading:
    """What one way to call the code gave."""

    base: Base
    observations: list[Observation] = field(default_factory=list)
    verdict: dict | None = None
    findings: list[Finding] = field(default_factory=list)
    understood: list[str] = field(default_factory=list)
    # Kinds of calls by name.
    taken: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    @property
    def is_right(self) -> bool:
        return self.verdict is not None and self.verdict["verdict"] in _RIGHT

    @property
    def faults(self) -> list[str]:
        return [fault["name"] for fault in (self.verdict or {}).get("faults", [])]

    def beats(self, likelier: "Reading") -> bool:
        """Whether it is to be believed instead of a likelier one: it takes all calls
        that the other takes, and is right or takes more of them. A fault by a
        stranger reading proves nothing else."""
        if self.verdict is None or not likelier.taken <= self.taken:
            return False
        exculpates = self.is_right and not likelier.is_right
        return exculpates or bool(self.taken & likelier.refused)

    def names_more(self, other: "Reading") -> bool:
        """Whether it names faults where the other finds none that it knows, or more."""
        count = len(other.faults) or len(self.faults) + 1
        return 0 < len(self.faults) < count

    def assume(self, name: str, sentence: str, remedy: str = "") -> None:
        """Adds what the runs themselves assumed, which the engine cannot know."""
        said = {"name": name, "sentence": sentence, "remedy": remedy}
        self.verdict.setdefault("assumptions", []).append(said)

    def say_polarity(self) -> None:
        """Adds the polarity that was assumed where it is the engine's first choice,
        of which it says nothing."""
        if self.verdict is None:
            return
        known = {a["name"] for a in self.verdict.get("assumptions", [])}
        for tensor, fact, kept, ignored, sentence, remedy in _POLARITIES:
            open_to_both = any(
                tensor in o.tensors and not o.metadata.keys() & {fact, "mask"}
                for o in self.observations
            )
            if tensor == "mask" and "mask_added" in self.faults:
                remedy = (
                    'If 0 and -inf are meant, which are added, say mask="additive".'
                )
            if open_to_both and kept not in known and ignored not in self.faults:
                self.assume(kept.replace("keeps", "blocks"), sentence, remedy)

    def say_text(self, believed: dict[str, Said], against: set[str]) -> None:
        """Adds what the code's text was believed to say of its masks, and quotes it;
        `against`: what the numbers say otherwise of."""
        if self.verdict is None:
            return
        for fact, said in believed.items():
            of_keys = "padding" not in believed  # a mask that is used as padding
            facts = ("mask", "padding") if fact == "mask" and of_keys else (fact,)
            quote = said.quote.replace("`", "'")
            quote = quote if len(quote) <= _QUOTED else quote[:_QUOTED] + "…"
            what = "The padding mask" if fact == "padding" else "The mask"
            meant = f"True (or 1) = {_MEANS[said.meaning]}"
            if fact in against:
                self.assume(
                    f"{fact}_against_text",
                    f'{what} is not read as its text may say: "{quote}".',
                    f'If {meant} is meant, say mask="{said.meaning}": then it is '
                    "inverted.",
                )
            elif any(
                o.metadata.get(key) == said.meaning
                for o in self.observations
                for key in facts
            ):
                self.assume(
                    f"{fact}_{_VERBS[said.meaning]}",
                    f'{what} is read as {meant}, as its text says: "{quote}".',
                    f'If that is not meant, say mask="{_OTHER[said.meaning]}".',
                )
                for fault in self.verdict.get("faults", []):
                    if fault["name"] in [f"{key}_inverted" for key in facts]:
                        fault["detail"] = f'Its text says: "{quote}".'

    def say_additive(self, why: str) -> None:
        """Adds that the mask is read as numbers to add, and why."""
        if self.verdict is not None:
            self.assume(
                "mask_additive",
                f"The mask is read as added to the scores, {why}.",
                'If it is True and False, say mask="blocked" or "keep": added, they '
                "block nothing.",
            )

    def say_output(self, kept: list[Run]) -> None:
        """Adds that nothing is projected out, where several heads are projected in."""
        if self.verdict is None or self.verdict["verdict"] == "unknown":
            return
        matched = self.verdict.get("weights", [])
        projected_out = any(m.startswith("output") for m in matched)
        one_head = self.observations[0].metadata["num_heads"] == "1"
        if kept[0].parameters.tensors and not one_head and not projected_out:
            self.assume(
                "no_output_projection",
                "There is no output projection; it is judged as attention without one.",
                "In multi-head attention one more matrix follows: `out = W_o(merged)`.",
            )


_POLARITIES = (
    (
        "mask",
        "mask",
        "mask_keeps",
        "mask_ignored",
        "The mask is read as True (or 1) = blocked.",
        'If True is meant to be seen, say mask="keep".',
    ),
    (
        "key_padding_mask",
        "padding",
        "padding_keeps",
        "padding_ignored",
        "The padding mask is read as True (or 1) = padding.",
        'If True is meant to mark real tokens, say mask="keep".',
    ),
)
