# SPDX-License-Identifier: MIT
"""What is said in the place of a verdict: of what was made up for the call, of layers
beside attention, of attention of another kind, and of flaws that show whatever else the
code computes."""

import re

from ..calls.models import has_head_behind
from ..calls.tokens import has_many
from ..report import Finding
from ..subject.promised import (
    says_alibi,
    says_rotary,
    speaks_of_positions,
    turns_queries_and_keys,
)
from ..subject.roles import role_of_name, speaks
from ..subject.signature import text_of_entry
from . import (
    across,
    core,
    finite,
    flaws,
    guessing,
    idle,
    observation,
    reads,
    scrambled,
    tables,
    turning,
    wiring,
)
from .ways import Reading

_OF_POSITIONS = ("zero", "past", "position_ids", "positions", "rotation")
_LEARNS_ANGLES = re.compile(
    r"(?:freq|theta|angle|rot)\w*\s*=\s*(?:nn\.)?Parameter\(", re.I
)
# What turns: `self.rotary(q)`, `apply_rotary_emb(q, cos, sin)`.
_CALLED_ROTARY = re.compile(r"(?<![a-z])(?:rotary|rope)\w*\(", re.I)
# BiDAF (Seo et al., 2016) and QANet multiply the weights of one softmax with another's.
_BOTH_WAYS = re.compile(
    r"c2q|q2c|co-?attention|bidaf|query2context|\bcq_?att|trilinear", re.I
)
# As Gemma's and others' do on purpose: v = self.v_norm(v).
# Tokens behind padding on the left: mask.long().cumsum(-1) - 1.
_COUNTS_SHOWN = r"\b{0}\b[\w.()]*\.cumsum\(|cumsum\(\s*{0}\b"
_QUANTISES = re.compile(r"quanti[sz]|\bint8\b|fake_quant", re.I)
_NORMS_VALUES = re.compile(r"\bv(alues?)?\s*=\s*(self\.)?\w*norm\w*\(\s*v", re.I)
# Attention of features of queries and keys, which has no softmax on purpose: Performer
# (Choromanski et al., 2021), linear transformers (Katharopoulos et al., 2020).
_OF_FEATURES = re.compile(r"linear_?att(ention|n)|performer|favor", re.I)
_WITHOUT_SOFTMAX = {"softmax_missing", "scores_normalised_without_exp"}
# self.wq(x / math.sqrt(d)): heads do not show it.
_SCALED_BEFORE = re.compile(
    r"\bself\.(?:to_|w_?|fc_?)?q\w*\(\s*\w+\s*[*/]\s*(?:\([^()\n]*\)|[^()\n,])*?"
    r"(?:sqrt|scale|\*\*\s*-?\s*0?\.5)",
    re.I,
)
_BEFORE_PROJECTION = Finding(
    "other_layers",
    "What it projects is scaled before, which its heads do not show, and nothing explains "
    "the rest.",
    "Check the part that is attention by itself, or scale the queries, not what they "
    "come of.",
    kind="unchecked",
)
_BEHIND_CONTEXT = Finding(
    "outside",
    "It reads its context before the sequence, in one attention, and no later key than "
    "a query's own behind that: whether keys are the context's, nothing here tells.",
    "Check it without a context, as one layer.",
    kind="unchecked",
)


def of_verdict(reading: Reading) -> list[Finding]:
    """None where the verdict stands."""
    made_up, subject = reading.way.made_up, reading.way.runner.subject
    if chosen := _of_a_choice(reading):
        return [guessing.doubt(chosen, reading.faults)]
    if (said := _of_another_kind(reading)) is not None:
        return said
    doubtful = reading.verdict is not None and reading.verdict.get("doubtful")
    if flaw := _whatever_else(reading, bool(doubtful)):
        return flaw
    unread = reading.beside or reading.gains
    if doubtful or (reading.verdict is not None and unread):
        if made_up:
            way, is_alone = reading.way, not unread and "order" not in made_up.values()
            if is_alone and reads.reads_behind_lengths(way.runner, reading.kept):
                return [reads.HIDDEN_KEYS_READ]
            # All of a video is one sequence: its items are those of the call.
            if way.form and way.form.parts and (mixed := _mixed(reading)):
                return [mixed]
            return [guessing.doubt(made_up, reading.faults)]
        flaw = reading.unused or _weighed_astray(reading) or _mixed(reading)
        flaw = flaw or _apart(reading)
        if flaw is None and across.attends_over_items(
            reading.way.runner, reading.way.base
        ):
            flaw = flaws.ITEMS_MIXED
        return [flaw or guessing.other_layers(unread)]
    if reading.faults == ["causal_bottom_right"] and _reads_first(reading):
        return [_BEHIND_CONTEXT]
    assumed = {one["name"] for one in (reading.verdict or {}).get("assumptions", ())}
    if reading.faults == ["scale_missing"] and assumed & {
        "heads_only",
        "layers_beside",
    }:
        if _SCALED_BEFORE.search(subject.source):
            return [_BEFORE_PROJECTION]
    exchanged = "batch_and_sequence_exchanged" in reading.faults
    if exchanged and flaws.says_it_works_across_items(subject):
        return [guessing.of_another_kind("weights of the items of a batch, as it says")]
    is_ignored = reading.faults == ["mask_ignored"]
    said = _outside(reading) or (reading.mask_doubt if is_ignored else None)
    return [said] if said else []


# What is so in one of the ways that code has, and need not be in the others.
_OF_CHOICES = re.compile(r"window|causal|context_unread|positions_apart")


def _of_a_choice(reading: Reading) -> dict[str, str]:
    """Arguments of which we chose one way of the code, or an order of numbers, where what
    is wrong may come of that."""
    form = reading.way.form
    said = [*reading.faults, *(f.name for f in reading.way.findings)]
    if form is None or not any(map(_OF_CHOICES.search, said)):
        return {}
    return dict.fromkeys(form.chosen, "")


def _of_another_kind(reading: Reading) -> list[Finding] | None:
    """What is said before any verdict, of attention that is not meant to be PyTorch's."""
    made_up, subject = reading.way.made_up, reading.way.runner.subject
    if not reading.is_right and reads.returns_input(reading.kept):
        return [reads.INPUT_RETURNED]
    if not reading.is_right and reads.reads_nothing(reading.way.runner, reading.kept):
        return [reads.INPUT_UNREAD]
    is_open = not reading.is_right and reading.way.pools is not None
    if is_open and (not reading.faults or core.pools_by_a_query(reading.way.base)):
        # Whether a query of its own should be scaled, say, is up to the code.
        return [reading.way.pools]
    if not reading.is_right and _BOTH_WAYS.search(f"{subject.name} {subject.source}"):
        return [
            guessing.of_another_kind("co-attention, weights of either with the other")
        ]
    if _WITHOUT_SOFTMAX & set(reading.faults) and _OF_FEATURES.search(subject.name):
        return [guessing.of_another_kind("no softmax, as its name says")]
    if not reading.is_right and not reading.faults and reading.way.call.left_none:
        left = dict.fromkeys(reading.way.call.left_none, "nothing")
        return [guessing.doubt(left, [])]
    of_queries = "softmax_over_queries" in reading.faults
    if of_queries and flaws.competes(subject):
        return [guessing.of_another_kind("weights for which queries compete")]
    of_one = flaws.SOFTMAX_OF_ONE in reading.way.findings
    if of_one and set(reading.faults) == {"softmax_over_queries"}:
        return [flaws.SOFTMAX_OF_ONE]  # of one query, which it may also run over
    if made_up and wiring.CONTEXT_UNREAD in reading.way.findings:
        return [wiring.CONTEXT_UNREAD]  # whatever asks it
    if not reading.is_right and (gate := _gate(reading)):
        return [guessing.doubt({gate: ""}, reading.faults)]
    seen = reading.way.base.recorder
    if not reading.is_right and seen is not None and seen.chooses:
        return [guessing.of_another_kind(guessing.OF_LARGEST)]
    is_unknown = (reading.verdict or {}).get("verdict") == "unknown"
    if is_unknown and has_head_behind(subject):
        # What a head makes of it, as a mean, nothing here explains.
        return [_outside(reading) or guessing.other_layers([])]
    return None


def _whatever_else(reading: Reading, doubtful: bool) -> list[Finding]:
    """Flaws that no guess brings about."""
    way = reading.way
    replaced = (
        [] if reading.faults else idle.replaced(way.base, way.runner.subject.source)
    )
    twice = way.base.twice if not reading.faults else None
    if replaced or twice or (doubtful and _scrambled(reading)):
        return replaced or [twice or scrambled.SCRAMBLED]
    if way.later_tokens_seen:
        return [flaws.LATER_TOKENS_SEEN]
    subject = way.runner.subject
    if not reading.faults:
        made, _ = way.runner.target_of(way.base.case, may_hang=True)
        entry = text_of_entry(subject)
        if thrown := idle.layer_thrown_away(entry, subject.source, made):
            return [thrown]
    if not reading.faults and flaws.is_causal_in_training_alone(way.runner, way.base):
        return [flaws.CAUSAL_IN_TRAINING]
    if not reading.faults and flaws.normalises_over_heads(way.base):
        return [flaws.NORMALISED_OVER_HEADS]
    if reading.is_right and (cancels := tables.bias_cancels(reading.kept)):
        return [cancels]
    if reading.is_right and finite.blocks_zeros(way.runner, way.base):
        return [finite.ZEROS_BLOCKED]
    assumed = {one["name"] for one in (reading.verdict or {}).get("assumptions", ())}
    is_plain = way.form is None and "attends_elsewhere" not in assumed
    if reading.is_right and is_plain and across.differs_alone(way.runner, way.base):
        return [across.BATCH_COUNTS]
    if contradiction := _against_its_text(reading):
        return [contradiction]
    draws = any(finding.name == "random" for finding in reading.findings)
    mixes = draws and across.attends_over_items(way.runner, way.base)
    return [flaws.ITEMS_MIXED] if mixes else []


def _against_its_text(reading: Reading) -> Finding | None:
    """What would be right if it were meant, and its text says otherwise."""
    if reading.faults or reading.verdict is None:
        return None
    subject = reading.way.runner.subject
    conditions = {one["name"] for one in reading.verdict.get("conditions", ())}
    if "rising_bias" in conditions and says_alibi(subject):
        return flaws.ALIBI_RISES
    call, built = reading.way.call, reading.way.runner.construction
    counts_on = any(map(call.takes, _OF_POSITIONS)) or bool(call.guessed)
    counts_on |= any(role_of_name(p.name) in _OF_POSITIONS for p in call.parameters)
    counts_on |= built is not None and built.is_unturned
    counts_on |= any(
        type(p.default) is int or p.annotation is int for p in call.parameters
    )
    counts_on |= _LEARNS_ANGLES.search(subject.source) is not None
    remarks = {one["name"] for one in reading.verdict.get("remarks", ())}
    of_positions = says_rotary(subject) or "rotary_by_head" in remarks
    of_positions |= _CALLED_ROTARY.search(subject.source) is not None
    if turning.ALIKE in conditions and not counts_on and of_positions:
        return flaws.TURNED_ALIKE
    if "values_turned" in conditions and turns_queries_and_keys(subject):
        return flaws.VALUES_TURNED_TOO
    return None


def _gate(reading: Reading) -> str | None:
    """What was taken for another sequence because nobody understands it, and of which
    nothing comes that meets in attention: a gate, perhaps."""
    call, seen = reading.way.call, reading.way.base.recorder
    name = call.parameter("context")
    if name not in call.guessed or seen is None:
        return None
    sources = [of_one for core in seen.cores.found for of_one in core.sources]
    is_read = any({"key", "value"} & of_any for of_any in sources)
    return name if any(sources) and not is_read else None


def _reads_first(reading: Reading) -> bool:
    """Whether a context stands before the sequence: torch.cat([memory, x])."""
    call, text = reading.way.call, reading.way.runner.subject.source
    context = call.parameter("context") or call.parameter("key")
    joined = rf"cat\(\s*[\[(]\s*{context}\b[^\])\n]*,"
    return context is not None and re.search(joined, text) is not None


def _scrambled(reading: Reading) -> bool:
    """Whether positions do not stay together, whatever an unusual form of the call
    leaves open, as which axis of a video is the sequence."""
    way = reading.way
    if way.form is None or set(way.made_up.values()) != {"form"}:
        return False
    if way.base.recorder is None or not way.base.recorder.cores.found:
        return False
    return bool(scrambled.of_positions(way.runner, way.base, way.form.parts))


def _outside(reading: Reading) -> Finding | None:
    """What is said where nothing explains it, and it is attention of another kind, as
    what PyTorch computed on the way shows; or mixes the items of a batch."""
    way, verdict = reading.way, reading.verdict or {}
    seen, subject = way.base.recorder, way.runner.subject
    is_unnamed = any(f.name == observation.NO_WEIGHTS for f in reading.findings)
    if is_unnamed and reading.verdict is None:
        mixed = _mixed(reading) if has_many(subject) else None
        if mixed is None and across.attends_over_items(way.runner, way.base):
            mixed = flaws.ITEMS_MIXED
        additive = seen is not None and seen.has_softmax and not seen.has_scores
        other = guessing.outside(seen) if additive else None
        return mixed or _weighed_astray(reading) or _apart(reading) or other
    if seen is None or verdict.get("verdict") != "unknown":
        return None
    if way.base.case.style.numpy:
        return guessing.UNSEEN if speaks_of_positions(subject) else None
    owner = subject.target if subject.kind == "function" else subject.type
    name = getattr(owner, "__name__", "")
    mask = re.escape(reading.way.call.parameter("padding") or "")
    mask = mask or re.escape(reading.way.call.parameter("mask") or "")
    if mask and re.search(_COUNTS_SHOWN.format(mask), subject.source):
        return guessing.of_another_kind("positions that are counted along its mask")
    if _QUANTISES.search(subject.source):
        return guessing.of_another_kind("numbers that are quantised")
    if _NORMS_VALUES.search(subject.source):
        return guessing.of_another_kind("values that pass a norm")
    return (
        idle.thrown_away(subject.source)
        or _weighed_astray(reading)
        or _cancelled(reading)
        or guessing.outside(seen, way.base.case, name, _doc(owner))
        or _mixed(reading)
        or (turning.MISAPPLIED if way.turning is turning.MISAPPLIED else None)
        or reads.astray(way.runner, way.base, reading.kept)
    )


def _doc(owner: object) -> str:
    """What a class or a function says of itself, not what it inherits."""
    return str(getattr(owner, "__dict__", {}).get("__doc__") or "")


def _cancelled(reading: Reading) -> Finding | None:
    """What is said of projections whose part in the result cancels."""
    first = reading.kept[0] if reading.kept else reading.way.base
    names = [f"`{n}`" for n in first.cancelled if speaks(n)]
    return flaws.projection_cancels(names) if names else None


def _weighed_astray(reading: Reading) -> Finding | None:
    """What is said of weights that do not add up to 1, in attention of any kind."""
    way = reading.way
    if flaws.SOFTMAX_OF_ONE in reading.findings:
        return None
    if flaws.weighs_along_another_axis(way.runner, way.base):
        return flaws.SOFTMAX_OF_ANOTHER_AXIS
    if way.base.recorder is not None and way.base.recorder.cores.sums.is_averaged:
        return flaws.VALUES_AVERAGED
    if flaws.weighs_alike(way.base):
        return flaws.WEIGHTS_ALIKE
    masks = flaws.masks_weights([way.base, *reading.kept])
    return flaws.MASK_BEHIND_WEIGHTS if masks else None


def _apart(reading: Reading) -> Finding | None:
    """What is said of code in which no position reads another, whose scores are none of
    features on purpose."""
    way = reading.way
    seen = way.base.recorder
    if seen is None or not seen.cores.found or guessing.outside(seen, way.base.case):
        return None
    apart = reads.are_apart(way.runner, way.base)
    return reads.POSITIONS_APART if apart else None


def _mixed(reading: Reading) -> Finding | None:
    """What is said of code that mixes the items of a batch."""
    return flaws.mixed_items(reading.way.runner, reading.way.base)
