# SPDX-License-Identifier: MIT
"""How a block with several attentions hands them their inputs: what of its context and
of its masks reaches which. That each of them is attention says nothing of that.

A layer of a decoder (Vaswani et al., 2017, section 3.2.3) has one attention of its own
sequence and one in which that sequence asks and the context is read.
"""

from ..capture import core
from ..capture.core import Core
from ..capture.runner import Run
from ..report import Finding
from ..subject.signature import Call
from .observation import NO_WEIGHTS

CONTEXT_UNREAD = Finding(
    "context_unread",
    "It must be given a context, and none of its attentions reads it.",
    "Hand the context to the attention that is meant to read it, as its keys and values: "
    "`cross_attention(x, context, context, context_mask)`.",
)
CONTEXT_HALF_READ = Finding(
    "context_half_read",
    "An attention has its keys of the context and its values of the queries' own "
    "sequence, or the other way round.",
    "Take keys and values of one sequence: a weight says how much of the value at the "
    "place of its key is read.",
)
CONTEXT_ASKS = Finding(
    "context_asks",
    "The context asks and the sequence itself is read: the result has a place for each "
    "position of the context.",
    "Queries are of the sequence, keys and values of the context: "
    "`cross_attention(x, context, context, context_mask)`.",
)
MASKS_EXCHANGED = Finding(
    "masks_exchanged",
    "The mask of its own sequence and that of its context are exchanged: each reaches "
    "the attention that the other is for.",
    "The target's mask, which hides later positions, is for self-attention; the source's "
    "is for the keys of the context.",
)
FLAWS = {CONTEXT_UNREAD, CONTEXT_HALF_READ, CONTEXT_ASKS, MASKS_EXCHANGED}
_MOST = 4  # attentions of a block


def attentions(run: Run) -> list[list[Core]]:
    """The cores of each attention of a block that has several; none of other code."""
    found = [] if run.recorder is None else core.attentions(run.recorder.cores.found)
    return found if 2 <= len(found) <= _MOST else []


def reads_context(attention: list[Core]) -> bool:
    """Whether its keys come of the context; in later layers the sequence does, too."""
    asking, keys, _ = attention[0].sources
    return "key" in keys and keys != asking


def reads_its_own(attention: list[Core]) -> bool:
    asking, keys, _ = attention[0].sources
    return keys == asking


def are_beside(found: list[list[Core]]) -> bool:
    """Whether the queries of the context's attention come of the sequence as it is, and
    not of what the attention of its own sequence, which comes first, has read."""
    first, *later = found
    across = [one for one in later if reads_context(one)]
    return reads_its_own(first) and any(
        one[0].depth == first[0].depth and one[0].sources[0] == first[0].sources[0]
        for one in across
    )


def of_context(call: Call, base: Run) -> list[Finding]:
    """What the block makes of its context."""
    found = attentions(base)
    context = call.parameter("context")
    if not found or context is None or "key" not in base.arguments.tensors:
        return []
    required = any(p.name == context and p.default is p.empty for p in call.parameters)
    origins: list[tuple[frozenset[str], ...]] = [one[0].sources for one in found]
    reached = {name for three in origins for one in three for name in one}
    reached |= base.recorder.origin(base.out).inputs
    if "key" not in reached:
        return [CONTEXT_UNREAD] if required else []
    if any(("key" in keys) is not ("key" in values) for _, keys, values in origins):
        return [CONTEXT_HALF_READ]
    crossing = [
        three for three in origins if ("key" in three[0]) is not ("key" in three[1])
    ]
    asks = [three for three in crossing if "key" in three[0]]
    begins_alone = all(one == {"query"} for one in origins[0])
    return [CONTEXT_ASKS] if asks and asks == crossing and begins_alone else []


def of_masks(call: Call, kept: list[Run]) -> list[Finding]:
    """Whether a mask reaches first what the other one is for."""
    if not (call.takes("mask") and call.takes("context_mask") and attentions(kept[0])):
        return []
    across = [reads_context(one) for one in attentions(kept[0])]
    for run in kept:
        own = run.case.of_self or run.case.relation == "self"
        found = attentions(run)
        if "mask" not in run.arguments.masks or len(found) != len(across):
            continue
        # Behind one that it masks, it has a part in all.
        masked = (i for i, one in enumerate(found) if "mask" in one[0].masked_by)
        first = next(masked, None)
        if first is not None and across[first] is own and len(set(across)) == 2:
            return [MASKS_EXCHANGED]
    return []


def settled(findings: list[Finding]) -> list[Finding]:
    """Without what a flaw of the block answers: that its weights are of two."""
    if not FLAWS.intersection(findings):
        return findings
    return [finding for finding in findings if finding.name != NO_WEIGHTS]
