# SPDX-License-Identifier: MIT
"""How a block with several attentions hands them their inputs: what of its context and
of its masks reaches which. That each of them is attention says nothing of that.

A layer of a decoder (Vaswani et al., 2017, section 3.2.3) has one attention of its own
sequence and one in which that sequence asks and the context is read.
"""

from inspect import Parameter

import torch

from ..capture import core
from ..capture.core import Core
from ..capture.runner import Run
from ..report import Finding
from ..subject.roles import role_of_name
from ..subject.signature import Call
from ..subject.words import OF_SOURCE, OF_TARGET, words
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
MASK_OF_ANOTHER = Finding(
    "mask_of_another",
    "An attention is masked by the mask of another sequence: that of its own sequence by "
    "the context's, or that of the context by the mask of the sequence that asks.",
    "Give each attention the mask of the keys that it reads: the target's to "
    "self-attention, the source's to that of the context.",
)
FLAWS = {CONTEXT_UNREAD, CONTEXT_HALF_READ, CONTEXT_ASKS}
FLAWS |= {MASKS_EXCHANGED, MASK_OF_ANOTHER}
_SEQUENCES = {"query", "key", "value", "x", "context"}
# What else is read, by names.
_READ = {"image", "images", "img", "text", "audio", "video", "speech", "visual"}
_READ |= {"features", "feats", "feat", "patches", "embeds", "states"}
_NOTHING = 1e-12  # a weight of what is blocked, or less
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
    if not found:
        is_left = call.insists_on("context") and leaves_keys(base)
        return [CONTEXT_UNREAD] if is_left else []
    if any(p.default is p.empty for p in _unread(call)):
        return [CONTEXT_UNREAD]
    if context is None or "key" not in base.arguments.tensors:
        return []
    required = call.insists_on("context")
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
    if asks and asks == crossing and begins_alone:
        return [CONTEXT_ASKS]
    is_encoded = bool(set(words(context)) & OF_SOURCE)
    if is_encoded and not base.arguments.masks and begins_alone:
        later = [all(map(_hides_later, one)) for one in found]
        if later[0] and any(h for one, h in zip(found, later) if reads_context(one)):
            return [MASK_OF_ANOTHER]
    return []


def leaves_keys(base: Run) -> bool:
    """Whether attention that is given keys returns nothing of them."""
    if base.recorder is None or not base.recorder.cores.found:
        return False
    is_given = "key" in base.arguments.tensors
    return is_given and "key" not in base.recorder.origin(base.out).inputs


def leaves_context(call: Call, base: Run) -> bool:
    """Whether a context that may be given to a block is never read."""
    return bool(attentions(base) and _unread(call))


def _unread(call: Call) -> list[Parameter]:
    """Sequences with which the code does nothing."""
    unread = (p for p in call.parameters if p.name in call.unread)
    return [
        p
        for p in unread
        if {call.roles[p.name], role_of_name(p.name)} & _SEQUENCES
        or set(words(p.name)) <= _READ
    ]


def of_masks(call: Call, kept: list[Run]) -> list[Finding]:
    """Whether a mask reaches what another one is for."""
    if not (call.takes("mask") and attentions(kept[0])):
        return []
    if not call.takes("context_mask"):
        named = set(words(call.parameter("mask") or "")) & OF_TARGET
        return [MASK_OF_ANOTHER] if named and mask_of_both(call, kept) else []
    plain = attentions(kept[0])
    across = [reads_context(one) for one in plain]
    if len(set(across)) == 1:
        return []
    astray: set[bool] = set()  # whether it is the mask of its own sequence
    for run in kept:
        own, found = run.case.of_self, attentions(run)
        is_alone = {*run.arguments.masks} == {"mask"} and not run.case.training
        if not is_alone or run.case.relation == "self" or len(found) != len(plain):
            continue
        masked = zip(across, _are_masked(found, plain))
        if any(hit and of_context is own for of_context, hit in masked):
            astray.add(own)
    if len(astray) == 2:
        return [MASKS_EXCHANGED]
    return [MASK_OF_ANOTHER] if astray else []


def mask_of_both(call: Call, kept: list[Run]) -> bool:
    """Whether the one mask that it takes reaches attention of its own sequence and of
    a context that an encoder has made."""
    context = call.parameter("context")
    if context is None or not set(words(context)) & OF_SOURCE:
        return False
    if not call.takes("mask") or call.takes("context_mask"):
        return False
    plain = attentions(kept[0])
    across = [reads_context(one) for one in plain]
    for run in kept:
        found = attentions(run)
        is_alone = {*run.arguments.masks} == {"mask"} and not run.case.training
        if not is_alone or run.case.relation == "self" or len(found) != len(plain):
            continue
        hits = _are_masked(found, plain)
        reached = {of_context for of_context, hit in zip(across, hits) if hit}
        if len(reached) == 2:
            return True
    return False


def _are_masked(found: list[list[Core]], plain: list[list[Core]]) -> list[bool]:
    """Of each attention, whether a mask has a part in what it returns. plain: the same
    without one."""
    if all(is_plain(one) for each in plain for one in each):
        return [not all(map(is_plain, each)) for each in found]
    if all(one.scores is not None for each in (*found, *plain) for one in each):
        # One that blocks without a mask may do so with the other's.
        both = zip(found, plain)
        return [any(map(blocks, x)) and not any(map(blocks, y)) for x, y in both]
    # By what its scores come of: behind one that is masked, those of all do.
    hits = [any("mask" in one.masked_by for one in each) for each in found]
    return [hit and not any(hits[:place]) for place, hit in enumerate(hits)]


def _hides_later(core: Core) -> bool:
    """Whether every query sees the keys up to its own place, and no other."""
    scores = core.query @ core.key.mT / core.query.shape[-1] ** 0.5
    seen = torch.ones_like(scores, dtype=torch.bool).tril()
    if core.scores is not None:
        return bool(((core.scores.softmax(-1) > _NOTHING) == seen).all())
    returned = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ core.value
    return torch.allclose(returned, core.context, rtol=1e-4, atol=1e-6)


def hides_nothing(core: Core) -> bool:
    """Whether every query sees every key."""
    return is_plain(core) if core.scores is None else not blocks(core)


def blocks(core: Core) -> bool:
    """Whether a weight is nothing, as behind a mask; not in a row that sees nothing."""
    assert core.scores is not None
    weights = core.scores.softmax(-1)
    return bool((weights < _NOTHING).any())


def is_plain(core: Core) -> bool:
    """Whether it is attention that blocks nothing; also where one before has returned
    what is not finite, for a row that sees nothing."""
    scores = core.query @ core.key.mT / core.query.shape[-1] ** 0.5
    returned = scores.softmax(-1) @ core.value
    is_close = torch.allclose(returned, core.context, rtol=1e-4, atol=1e-6)
    return is_close or not returned.isfinite().all()


def settled(findings: list[Finding]) -> list[Finding]:
    """Without what a flaw answers: that its weights were not found."""
    if not any(f.kind == "failure" for f in findings):
        return findings
    return [finding for finding in findings if finding.name != NO_WEIGHTS]
