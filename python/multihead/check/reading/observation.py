# SPDX-License-Identifier: MIT
"""A run in the form that the engine reads, tensors by name and metadata, and the one
place where observations become a verdict."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._library import diagnosis
from ..calls import cases
from ..calls.construct import DROPOUT, Construction
from ..capture.core import Core, joined
from ..capture.record import Draw
from ..capture.runner import Run
from ..report import Finding
from ..subject.signature import Call

# The finding that says that no weights were understood.
NO_WEIGHTS = "no_weights_found"
# What complaints about weights, and counts of heads, begin with.
_OF_WEIGHTS = ("weights", "num_heads", "num_kv_heads", "embed_dim")


@dataclass(frozen=True)
class Stated:
    """What the user, a name or a type states beyond doubt; None is for the engine
    to find out. mask and padding: "blocked", "keep" or "additive"."""

    num_heads: int | None = None
    num_kv_heads: int | None = None
    mask: str | None = None
    padding: str | None = None
    causal: bool | None = None


@dataclass
class Observation:
    """One run: tensors and metadata, both by the engine's names."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def explain(observations: list[Observation]) -> dict[str, Any]:
    """The verdict on observations of one implementation, as the operator's JSON."""
    tensors = [o.tensors for o in observations]
    metadata = [o.metadata for o in observations]
    return dict(json.loads(diagnosis().explain(tensors, metadata)))


def fewest_faults(seen: Observation, most: int = 1) -> int:
    """With how many faults, up to `most`, attention explains a run; most + 1 for more
    and for what it does not explain; 3 where the run cannot be read."""
    try:
        found: int = diagnosis().fewest_faults([seen.tensors], [seen.metadata], most)
    except ValueError:
        return 3
    return found


def is_better(later: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """The engine's rule for two readings of the same code, by their verdicts."""
    found: bool = diagnosis().is_better_reading(json.dumps(later), json.dumps(earlier))
    return found


def complaint(error: ValueError) -> Finding:
    """What the engine could not read, as a finding, with its reason as detail."""
    reason = str(error).removeprefix("explain: ")
    if reason.startswith(_OF_WEIGHTS):
        return Finding(
            NO_WEIGHTS,
            "Its weights could not be matched with those of attention.",
            "Name them W_q, W_k, W_v and W_o, or like those of "
            "nn.MultiheadAttention; or state num_heads and num_kv_heads.",
            detail=reason,
            kind="unchecked",
        )
    return Finding(
        "not_comparable",
        "What it takes and returns cannot be compared with attention.",
        detail=reason,
        kind="unchecked",
    )


def observe_all(kept: list[Run], call: Call, stated: Stated) -> list[Observation]:
    """What a norm gets, the first shows, whose inputs differ; with the same tensor for
    all of them, it is open."""
    seen = [observe(run, call, stated) for run in kept]
    known = {n: v for n, v in seen[0].metadata.items() if n.startswith("norms:")}
    for one in seen[1:]:
        one.metadata |= known
    return seen


def observe(run: Run, call: Call, stated: Stated) -> Observation:
    """The observation of a run that returned an output."""
    seen = Observation(metadata={"name": run.case.name})
    _put_sequences(seen, run)
    if run.case.relation == "self" and call.insists_on("context"):
        seen.metadata["is_given_keys"] = "true"
    # A scale that is a parameter makes no layer of what is handed its heads.
    numbers = all(t.dim() == 0 for t in run.parameters.tensors.values())
    is_core = numbers and run.case.layout in cases.CORE
    for name, tensor in ({} if is_core else run.parameters.tensors).items():
        if diagnosis().is_reserved(name):  # the engine has another tensor of that name
            name += ".bias" if tensor.dim() == 1 else ".weight"
        seen.tensors[name] = tensor
    for name, layout in run.parameters.layouts.items():
        seen.metadata[f"layout:{name}"] = layout
    if run.parameters.tensors and not call.weights and not is_core:
        seen.metadata["weights"] = "own"
    if run.parameters.by_order:
        seen.metadata["roles"] = "by_order"
    if call.fused_parts:
        seen.metadata["fused_parts"] = call.fused_parts
    heads = known_heads(run, call, stated.num_heads) or guessed_heads(run)[0]
    _cut_heads_from_inputs(seen, run, heads)
    seen.metadata["num_heads"] = str(heads)
    groups = _group_count(seen, run, call, stated)
    if groups is not None:
        seen.metadata["num_kv_heads"] = str(groups)
    _put_masks(seen, run, call, stated)
    _put_results(seen, run)
    _put_dropout(seen, run, heads, run.recorder.draws, run.case.keys)
    if call.takes("dropout") and not run.case.training and not run.recorder.draws:
        # Asked to drop nothing, which says nothing about what is always on.
        batch = 1 if cases.unbatched(run.case) else run.case.sizes.batch
        shape = (batch, heads, run.case.sizes.queries, run.case.keys)
        seen.tensors["dropout_keep.0"] = torch.ones(shape, dtype=torch.bool)
    _put_beside(seen, run)
    _put_trace(seen, run, *_heads_of_loop(run))
    return seen


def observe_core(run: Run, core: Core, call: Call, stated: Stated) -> Observation:
    """The observation of what a run did from its heads on, (B, H, L, D), up to what
    these returned, whatever stands before and after."""
    heads = core.query.shape[1]
    width = run.case.sizes.embed
    names = {"name": run.case.name, "num_heads": str(heads), "embed_dim": str(width)}
    tensors = {"query": core.query, "key": core.key, "value": core.value}
    names |= {"own_scale": "true"} if core.own_scale else {}
    seen = Observation({**tensors, "out": core.context}, names)
    _put_masks(seen, run, call, stated)
    _put_window(seen, run)
    draws = run.recorder.draws[core.first_draw : core.draws]
    _put_dropout(seen, run, heads, draws, core.key.shape[-2])
    # In their own order, which may be that of heads before items.
    beside = () if core.are_given else (core.scores, core.added)
    shown = [t for t in beside if t is not None]
    _put_trace(seen, run, *shown)
    if core.own_scale:  # which is in the queries, however it was rounded
        seen.metadata.pop("rounds_to", None)
    return seen


def observe_unsplit(
    run: Run, core: Core, heads: int, call: Call, stated: Stated
) -> Observation:
    """The same of one head that should have been cut into so many: of a layer whose
    matrices change nothing, (B, L, E) in and out."""
    seen = observe_core(run, core, call, stated)
    tensors = {n: t for n, t in seen.tensors.items() if not n.startswith("trace.")}
    for name in ("query", "key", "value", "out"):
        tensors[name] = tensors[name].squeeze(1)
    unit = torch.eye(core.query.shape[-1], dtype=core.query.dtype)
    tensors |= {f"{name}_proj.weight": unit for name in "qkv"}
    return Observation(tensors, seen.metadata | {"num_heads": str(heads)})


def known_heads(run: Run, call: Call, stated: int | None) -> int | None:
    """The number of heads that is stated, given or counted by the code, if any."""
    if stated:
        return stated
    layout = run.case.layout
    if layout in cases.WITH_HEADS or call.takes("num_heads"):
        return run.case.sizes.heads
    counted = call.bound.get("num_heads") or run.counted.get("num_heads")
    sizes = run.case.sizes
    if not counted and sizes.heads == 1 and sizes.out and sizes.out < sizes.embed // 2:
        return 1  # it was told the width of one head, and no number
    if not counted and layout in (cases.SINGLE, cases.FLAT):
        return 1
    if counted and run.out is not None and run.out.size(-1) * counted == sizes.embed:
        return 1  # one of them, which others are to be joined with
    return counted


def guessed_heads(run: Run) -> list[int]:
    """The numbers of heads that a run may have had, likeliest first: that of its
    scores, of axes (H, L, D) or (H, D) that make up the width, of slices of the
    width, and one."""
    embed, lengths = run.case.sizes.embed, (run.case.sizes.queries, run.case.keys)
    batch = 1 if cases.unbatched(run.case) else run.case.sizes.batch
    shapes = [tuple(tensor.shape) for tensor in run.recorder.trace]
    deep = [shape for shape in shapes if len(shape) >= 3 and 0 not in shape]
    scores = [math.prod(s[:-2]) // batch for s in deep if s[-2:] == lengths][:1]
    cut = [
        count
        for s in deep
        if s[-2] in lengths
        for count in (s[-3], s[-3] // batch)
        if count * s[-1] == embed
    ]
    viewed = [s[-2] for s in deep if s[-2] * s[-1] == embed and s[-1] > 1]
    narrow = [s for s in deep if s[-2] in lengths and embed % s[-1] == 0]
    sliced = Counter(embed // s[-1] for s in narrow if s[-1] < embed)
    # Queries, keys, values and context of each head, in a loop.
    is_once = len(run.recorder.cores.found) == 1
    looped = [n for n, seen in sliced.items() if seen >= 4 * n and not is_once]
    several = [n for n in [*scores, *cut, *viewed, *looped] if 1 < n < embed]
    one = [1] if scores == [1] else []
    found = dict.fromkeys([*several, *one, *sliced, 1])
    return [count for count in found if embed % count == 0]


def has_one_head(kept: list[Run]) -> bool:
    """Whether the first run has one head, of which others' equal sizes make more: where
    keys are as many as features of a head, its scores look like slices."""
    first, *others = [guessed_heads(run)[0] for run in kept]
    return first == 1 and any(count > 1 for count in others)


def _heads_first(run: Run, tensor: Tensor) -> Tensor:
    """(B, H, L, D), however the code orders them."""
    later = run.case.layout in cases.HEADS_BEHIND and tensor.dim() == 4
    return tensor.transpose(1, 2) if later else tensor


def _put_sequences(seen: Observation, run: Run) -> None:
    given = run.leaves or run.arguments.tensors
    for role, tensor in given.items():
        repeated = any(tensor is given.get(r) for r in ("query", "key") if r != role)
        if role == "query" or not repeated:
            seen.tensors[role] = _heads_first(run, cases.as_sequence(tensor, run.case))
    if run.asks is not None:
        whole, axis = seen.tensors["query"], cases.query_axis(run.case)
        seen.tensors["key"] = whole
        seen.tensors["query"] = whole.narrow(axis, run.asks, 1)
    if run.case.layout == cases.SEQUENCE_FIRST:
        seen.metadata["batch_first"] = "false"


def _cut_heads_from_inputs(seen: Observation, run: Run, heads: int) -> None:
    """The projections of code that cuts heads from its inputs as they are."""
    layer = run.case.layout not in (*cases.CORE, *cases.IMAGES)
    only_after = all(name.startswith("out.") for name in run.parameters.tensors)
    if not only_after or heads == 1 or not layer:
        return
    width = seen.tensors["query"].shape[-1]
    identity = torch.eye(width, dtype=run.case.dtype)
    for name in ("q_proj", "k_proj", "v_proj"):
        seen.tensors[f"{name}.weight"] = identity.clone()
        seen.metadata[f"layout:{name}.weight"] = "out_in"


def _group_count(seen, run: Run, call: Call, stated: Stated) -> int | None:
    """The number of key and value heads where it is not that of the queries."""
    if stated.num_kv_heads:
        return stated.num_kv_heads
    by_itself = run.case.layout in cases.WITH_HEADS
    if call.takes("num_kv_heads") or by_itself:
        return run.case.sizes.kv_heads
    if bound := call.bound.get("num_kv_heads"):
        return bound
    # What the code calls groups may be the heads of each: its matrices tell.
    shown = _groups_of_keys(seen) or _groups_of_fused(seen)
    told = shown or run.counted.get("num_kv_heads")
    return None if told == int(seen.metadata["num_heads"]) else told


def _groups_of_keys(seen: Observation) -> int | None:
    """From a key projection that is narrower than the query's."""
    widths = {}
    embed = seen.tensors["query"].shape[-1]
    for name, tensor in seen.tensors.items():
        found = re.search(r"(^|[._])(w_?|to_)?(q|k|query|key)s?(_proj)?($|[._])", name)
        is_weight = found and not diagnosis().is_reserved(name)
        if not is_weight or tensor.dim() < 2 or len(tensor) == 1:
            continue
        if seen.metadata.get(f"layout:{name}") == "out_in" and tensor.dim() == 2:
            widths[found[3][0]] = tensor.shape[0]
        elif embed in tensor.shape:  # (in, out), or with heads as an axis
            widths[found[3][0]] = tensor.numel() // embed
    heads = int(seen.metadata["num_heads"])
    query, key = widths.get("q"), widths.get("k")
    if not query or not key or query == key or query % heads:
        return None
    groups, rest = divmod(key, query // heads)
    is_of_patches = groups > heads  # by a convolution of several pixels
    return groups if groups and not rest and not is_of_patches else None


_FUSED = re.compile(
    r"(?:^|[._])(?:w_?|c_|to_)?(qkv|attn|in|query_key_value|kv|key_value)"
    r"(?:_?proj)?(?:_?weight)?(?:$|[._])",
    re.I,
)


def _groups_of_fused(seen: Observation) -> int | None:
    """From one matrix for queries, keys and values, E + 2·G·d wide, or for keys and
    values, 2·G·d wide, if heads are as wide as usual."""
    heads = int(seen.metadata["num_heads"])
    embed = seen.tensors["query"].shape[-1]
    for name, tensor in seen.tensors.items():
        found = _FUSED.search(name)
        if not found or tensor.dim() != 2 or embed not in tensor.shape:
            continue
        is_out_in = seen.metadata.get(f"layout:{name}") == "out_in"
        wide = tensor.shape[0] if is_out_in else tensor.numel() // embed
        shared = wide if found[1].lower() in ("kv", "key_value") else wide - embed
        groups, rest = divmod(shared * heads, 2 * embed)
        if not rest and 0 < groups <= heads and heads % groups == 0:
            return groups
    return None


def _put_masks(seen: Observation, run: Run, call: Call, stated: Stated) -> None:
    masks = run.arguments.masks
    for role, mask in masks.items():
        wide = role == "key_padding_mask" and mask.dim() > 2
        turned = role == "mask" and run.case.mask == "items last"
        mask = mask.permute(2, 0, 1) if turned else mask
        seen.tensors[role] = mask.flatten(1) if wide else mask
    if stated.mask and "mask" in masks:
        seen.metadata["mask"] = stated.mask
    met = set().union(*(one.masked_by for one in run.recorder.cores.found))
    for role in met & {"mask", "key_padding_mask"}:
        seen.metadata[f"{role}_in_scores"] = "true"
    if "key_padding_mask" in masks:
        padding = "keep" if run.case.padding == "lengths" else stated.padding
        if not call.takes("padding") and not call.takes("lengths"):
            padding = stated.mask
        if padding:
            seen.metadata["padding"] = padding
    if run.is_last:  # and so sees all keys, causal or not
        seen.metadata["is_causal"] = "false"
        seen.metadata["queries_are_last"] = "true"
    elif run.case.is_causal or run.case.built_causal or call.bound.get("is_causal"):
        seen.metadata["is_causal"] = "true"
    elif stated.causal is not None:
        seen.metadata["is_causal"] = str(stated.causal).lower()
    elif not call.takes("is_causal"):
        expected = _expects_causal(run, call)
        seen.metadata["is_causal"] = "expected" if expected else "infer"


def _expects_causal(run: Run, call: Call) -> bool:
    """Whether the code means to be causal without being asked: its name says so, or it
    makes a triangle, of which nothing is left in what comes out, or that is added and
    blocks nothing."""
    if run.case.style.numpy or call.may_be_causal:
        return False
    if call.takes("mask"):
        return call.says_causal
    unused = run.recorder.has_triangle and not run.recorder.origin(run.out).triangle
    return call.says_causal or unused or run.recorder.adds_triangle


def _put_results(seen: Observation, run: Run) -> None:
    # NumPy computes in float64 on float32, given a chance.
    wider = run.out.dtype is torch.float64
    out = run.out.to(run.case.dtype) if wider else run.out
    seen.tensors["out"] = _heads_first(run, out)
    if run.attention is not None:
        seen.tensors["weights"] = run.attention
    if run.dout is not None and not run.gradients_off:
        seen.tensors["dout"] = _heads_first(run, run.dout)
        for name, gradient in run.gradients.items():
            if name[1:] in seen.tensors:
                gradient = cases.as_sequence(gradient, run.case)
                seen.tensors[name] = _heads_first(run, gradient)


def _put_beside(seen: Observation, run: Run) -> None:
    """What belongs to other layers of the same module: norms and positions."""
    for fact, number in run.parameters.norms.items():
        seen.metadata[fact] = repr(number)
    if run.recorder.norm_eps is not None:
        seen.metadata["norm_eps"] = repr(run.recorder.norm_eps)
    for count, eps in run.recorder.eps_of_means.items():
        seen.metadata[f"norm_eps:{count}"] = repr(eps)
    seen.tensors |= run.tables
    seen.metadata |= {"turns_heads": "true"} if run.turns else {}
    for name, tensor in run.parameters.tensors.items():
        if roles := run.recorder.gained.get(run.recorder.root(tensor)):
            seen.metadata[f"norms:{name}"] = ",".join(sorted(roles))
        if tensor.dim() >= 2 and run.recorder.root(tensor) in run.recorder.met:
            seen.metadata[f"meets_data:{name}"] = "true"
    _put_window(seen, run)
    places: dict[tuple[int, int], str] = {}
    for name, tensor in run.parameters.tensors.items():
        first = places.setdefault((tensor.data_ptr(), tensor.numel()), name)
        if first != name and tensor.dim() >= 2:
            seen.metadata[f"same_as:{name}"] = first
    for name in run.without_gradient:
        if name in run.parameters.tensors:
            seen.metadata[f"gradient:{name}"] = "none"


def _put_window(seen: Observation, run: Run) -> None:
    if run.window is not None:
        seen.metadata["window_size"] = str(run.window)
        if run.window_elsewhere:
            seen.metadata["window_elsewhere"] = "true"


def _heads_of_loop(run: Run) -> list[Tensor]:
    """What a loop over heads computes, as of all: queries and keys (B, H, L, D), where
    positions that turn them show; scores (B, H, Lq, Lk), where a bias does."""
    found = run.recorder.cores.found if run.recorder is not None else []
    batch = 1 if cases.unbatched(run.case) else run.case.sizes.batch
    one = joined(found, batch, run.case.sizes.queries) if len(found) > 1 else None
    if one is None:
        return []
    return [t for t in (one.scores, one.query, one.key) if t is not None]


def _put_trace(seen: Observation, run: Run, *more: Tensor) -> None:
    for index, tensor in enumerate([*more, *run.recorder.trace, *run.recorder.end]):
        seen.tensors[f"trace.{index}"] = tensor
    if run.recorder.rounds:
        seen.metadata["rounds_to"] = "float32"
    seen.tensors = {n: t.detach().contiguous() for n, t in seen.tensors.items()}


def _put_dropout(
    seen: Observation, run: Run, heads: int, draws: list[Draw], keys: int
) -> None:
    """These draws of dropout; those on a context as its heads are merged."""
    if run.case.training:
        seen.metadata["training"] = "true"
        seen.metadata["dropout_p"] = str(run.case.own_dropout or DROPOUT)
        if run.idle_dropout:
            seen.metadata["idle_dropout"] = run.idle_dropout
    for index, draw in enumerate(draws):
        kept = _kept(draw, run.case.own_dropout or DROPOUT)
        seen.tensors[f"dropout_keep.{index}"] = _in_order(kept, run, heads, keys)
        # In evaluation nothing else tells the rate of what is drawn by hand.
        told = None if run.case.training else run.case.own_dropout or DROPOUT
        if (p := told if draw.p is None else draw.p) is not None:
            seen.metadata[f"dropout_p.{index}"] = str(p)


def _in_order(kept: Tensor, run: Run, heads: int, keys: int) -> Tensor:
    """Draws on weights as (B, H, Lq, Lk), (B, Lq, Lk) or, without a batch, (H, Lq, Lk);
    on a context with its heads merged. All sizes differ, but those of queries and keys
    may not, which then come in this order."""
    sizes = run.case.sizes
    if run.case.layout in cases.IMAGES:
        of_image = kept.dim() == 4 and sizes.image in (kept.shape[2:], kept.shape[1:3])
        kept = cases.as_sequence(kept, run.case) if of_image else kept
    if run.case.layout in (*cases.IMAGES, cases.CHANNELS_FIRST):
        rows = sizes.batch, sizes.embed
        if kept.shape == (*rows, sizes.queries):
            kept = kept.transpose(1, 2)
        elif kept.shape == (*rows, 1, 1):  # whole channels
            kept = kept.flatten(1).unsqueeze(1).expand(-1, sizes.queries, -1)
    shape = list(kept.shape)
    orders: list[tuple[int, ...]] = [
        (sizes.batch, heads, sizes.queries, keys),
        (sizes.batch, heads, sizes.queries, sizes.queries + keys),
        (sizes.batch, sizes.queries, keys),
    ]
    if cases.unbatched(run.case):
        orders.insert(0, (heads, sizes.queries, keys))
    for wanted in orders:
        if sorted(shape) == sorted(wanted):
            order: list[int] = []
            for size in wanted:
                free = [i for i, s in enumerate(shape) if s == size and i not in order]
                order.append(free[0])
            return kept.permute(order)
    of_queries = shape[-1] == sizes.queries  # keys that are taken from the queries
    if shape[1:-1] == [heads, sizes.queries] and not of_queries:
        return kept.transpose(1, 2).flatten(2)
    return kept


def _kept(draw: Draw, p: float) -> Tensor:
    """What was kept: a comparison may say so or the reverse, but most are kept."""
    if draw.p is not None:
        return draw.keep
    share = float(draw.keep.double().mean())
    return draw.keep if abs(share - (1 - p)) <= abs(share - p) else ~draw.keep


def asked_to_scale(call: Call, construction: Construction | None) -> str:
    """The name of an argument without which it may not scale, and which was given."""
    for parameter in call.parameters:
        role = call.roles[parameter.name]
        if role in ("factor", "divisor") and parameter.default is not parameter.empty:
            return parameter.name
    roles = construction.roles if construction is not None else {}
    return next((n for n, role in roles.items() if role == "scaling_switch"), "")
