# SPDX-License-Identifier: MIT
"""Runs an attempt in float64 and computes the same in loops, in every convention.

A right attempt agrees with the loops in one convention (what a mask says, the order
of axes, whether it is causal by itself); a wrong one in none that the user left open.
"""

import dataclasses
import inspect
import itertools
import math

import torch
from torch import Tensor, nn

import reference
from attempts import weights
from attempts.table import Attempt

SIZES = {
    "d_model embed_dim dim n_embd embed_size input_dim d_in d_out hidden_size breite "
    "dim_modelo": "E",
    "num_heads h heads n_head n_heads koepfe num_cabezas num_attention_heads "
    "num_query_heads": "H",
    "num_kv_heads n_kv_heads num_key_value_heads num_query_groups": "G",
    "context_length block_size": "Lk",
}
INPUTS = {
    "q Q query x anfrage hidden_states": "query",
    "k K key keys schluessel context xa": "key",
    "v V value values werte": "value",
    "mask maske mascara attn_mask": "mask",
    "key_padding_mask": "padding",
    "is_causal": "causal",
    "W_q W_k W_v W_o": "weight",
}
SIZES = {name: size for names, size in SIZES.items() for name in names.split()}
INPUTS = {name: role for names, role in INPUTS.items() for name in names.split()}
# Right, and not in float64.
ROUNDED = {"SoftmaxInFloat32", "AlwaysFloat32", "MaskOfZerosAndInfinities"}
KINDS = (
    "plain",
    "square",
    "mask",
    "batch mask",
    "head mask",
    "folded mask",
    "padding",
    "causal",
)


@dataclasses.dataclass(frozen=True)
class Convention:
    """What code does not say about itself."""

    blocked: bool  # a mask that is not 0 hides a key
    by_head: bool  # rows of a fused matrix: (H, 3, D)
    sequence_first: bool
    causal: bool


@dataclasses.dataclass
class Run:
    """One call: its inputs by role, its weights, what it returned."""

    inputs: dict[str, Tensor | bool]
    weights: dict[str, list[Tensor]]
    out: Tensor
    returned: Tensor | None
    matrices: str = "qkv"  # whose projects queries, keys and values
    sources: str = "qkv"  # and of whose input


def parameters(target) -> dict[str, str | None]:
    """Names of the arguments of a function or of a module's call, and their roles."""
    module = isinstance(target, nn.Module) or inspect.isclass(target)
    forward = target.forward if module else target
    roles = {}
    for name, argument in inspect.signature(forward).parameters.items():
        if name != "self":
            # A mask that is a switch makes a causal one.
            switch = INPUTS.get(name) == "mask" and argument.default is False
            roles[name] = "causal" if switch else INPUTS.get(name)
    return roles


def conventions(attempt: Attempt) -> list[Convention]:
    """Those that the user and the names of the arguments leave open."""
    stated, names = attempt.stated, parameters(attempt.target)
    either = [False, True]
    like_pytorch = {"attn_mask", "key_padding_mask"} & set(names)
    blocked = [True] if like_pytorch else either
    if stated.get("mask", "additive") != "additive":
        blocked = [stated["mask"] == "blocked"]
    first = stated.get("batch_first")
    asked = INPUTS.keys() & {"is_causal", "mask", "attn_mask"} & set(names)
    choices = (
        blocked,
        either,
        either if first is None else [not first],
        [stated["causal"]] if "causal" in stated else [False] if asked else either,
    )
    return [Convention(*choice) for choice in itertools.product(*choices)]


def dimensions(attempt: Attempt, kind: str) -> dict[str, int]:
    """Different from each other, except where a fault needs two that are equal."""
    dims = {"B": 2, "H": 4, "G": 2, "E": 24, "Lq": 5, "Lk": 7}
    if "mask_batch_as_heads" in attempt.causes:
        dims["B"] = 4
    if "mask_batch_as_queries" in attempt.causes:
        dims["B"] = 5
    if kind == "square":
        dims["Lk"] = dims["Lq"]
    if attempt.stated.get("num_heads"):
        dims.update(H=6, G=3)
    return dims


def build(attempt: Attempt, dims: dict[str, int]):
    """The attempt's function, or its module with random parameters."""
    target = attempt.target
    if inspect.isclass(target):
        names = inspect.signature(target).parameters
        values = {name: dims[SIZES[name]] for name in names if name in SIZES}
        if "dropout" in names:
            values["dropout"] = 0.25
        if "batch_first" in names:
            values["batch_first"] = True
        target = target(**values)
    if isinstance(target, nn.Module):
        target = target.double().eval()
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.normal_(std=0.7)
    return target


def half(shape: tuple[int, ...]) -> Tensor:
    """True and False in every row, by chance."""
    order = torch.rand(shape).argsort(dim=-1).argsort(dim=-1)
    return order < torch.randint(1, shape[-1], (*shape[:-1], 1))


def inputs(attempt: Attempt, target, dims: dict[str, int], kind: str) -> dict | None:
    """Arguments by name; None if there is no argument of this kind."""
    names = parameters(target)
    roles = set(names.values())
    if kind not in ("plain", "square") and kind.split()[-1] not in roles:
        return None
    B, H, E, Lq = dims["B"], dims["H"], dims["E"], dims["Lq"]
    Lk = dims["Lk"] if "key" in roles else Lq
    layers = isinstance(target, nn.Module) or {"weight"} <= roles or "d_model" in names
    shape = (B,) if layers else () if "unbatched" in attempt.name else (B, H)
    masks = {
        "mask": (Lq, Lk),
        "batch mask": (B, Lq, Lk),
        "head mask": (B, H, Lq, Lk),
        "folded mask": (B * H, Lq, Lk),
    }
    width = E if layers else E // H
    make = {
        "query": lambda: torch.randn(*shape, Lq, width, dtype=torch.float64),
        "key": lambda: torch.randn(*shape, Lk, width, dtype=torch.float64),
        "value": lambda: torch.randn(*shape, Lk, width, dtype=torch.float64),
        "weight": lambda: torch.randn(E, E, dtype=torch.float64),
        "mask": lambda: half(masks[kind]) if kind in masks else None,
        "padding": lambda: half((B, Lk)) if kind == "padding" else None,
        "causal": lambda: kind == "causal",
    }
    found = {name: make[role]() for name, role in names.items() if role}
    if attempt.stated.get("batch_first") is False:
        found = {
            name: value.transpose(0, 1)
            if value is not None and value.dim() > 2
            else value
            for name, value in found.items()
        }
    return found | {name: dims[SIZES[name]] for name in names if name in SIZES}


def _passed(attempt: Attempt, value):
    """A value as the attempt wants it: NumPy, an additive mask, a copy."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool and attempt.stated.get("mask") == "additive":
        return torch.zeros(value.shape, dtype=torch.float64).masked_fill(
            value, -torch.inf
        )
    return value.numpy() if attempt.name.startswith("numpy") else value.clone()


def call(attempt: Attempt, target, given: dict) -> Run | None:
    """One call; None if it raises."""
    with weights.created() as made:
        try:
            result = target(**{n: _passed(attempt, t) for n, t in given.items()})
        except (RuntimeError, IndexError, ValueError, AssertionError):
            return None
    if isinstance(target, nn.Module):
        found = weights.named(target)
    elif "W_q" in given:
        found = {f"{n[-1]}.weight": [given[n].T] for n in given if n[:2] == "W_"}
    else:
        found = weights.in_order(made)
    out, returned = result if isinstance(result, tuple) else (result, None)
    roles = parameters(target)
    by_role = {roles[n]: value for n, value in given.items() if roles[n]}
    returned = None if returned is None else torch.as_tensor(returned)
    return Run(by_role, found, torch.as_tensor(out), returned)


def expected(run: Run, dims: dict[str, int], convention: Convention):
    """Output and weights (B, H, Lq, Lk) by float64 loops."""
    w = weights.separate(run.weights, dims["H"], convention.by_head)
    query = run.inputs["query"]
    key = run.inputs.get("key", query)
    given = {"q": query, "k": key, "v": run.inputs.get("value", key)}
    q, k, v = (given[source] for source in run.sources)
    if w:
        if convention.sequence_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        q, k, v = (
            project(t, w, role, dims) for t, role in zip((q, k, v), run.matrices)
        )
    q, k, v = (
        t.reshape(-1, *t.shape[-3:]) if t.dim() > 2 else t[None, None]
        for t in (q, k, v)
    )
    rules = reference.Rules(
        scale=1 / math.sqrt(q.shape[-1]),
        keep=visible(run, (*q.shape[:-1], k.shape[-2]), convention),
        is_causal=convention.causal or bool(run.inputs.get("causal")),
    )
    result = reference.attention(*(t.detach().numpy() for t in (q, k, v)), rules)
    out = torch.from_numpy(result.out)
    if not w:
        return out.reshape(run.out.shape), torch.from_numpy(result.weights)
    out = out.transpose(1, 2).flatten(2)
    if "o.weight" in w:
        out = out @ w["o.weight"].T + w.get("o.bias", 0)
    if convention.sequence_first:
        out = out.transpose(0, 1)
    return out.detach(), torch.from_numpy(result.weights)


def project(x: Tensor, w: dict[str, Tensor], role: str, dims: dict) -> Tensor:
    """(B, L, E) to heads (B, H or fewer, L, D)."""
    x = x @ w[f"{role}.weight"].T + w.get(f"{role}.bias", 0)
    return x.unflatten(-1, (-1, dims["E"] // dims["H"])).transpose(1, 2)


def visible(run: Run, shape: tuple[int, ...], convention: Convention):
    """Which keys are seen, (B, H, Lq, Lk), or None for all."""
    keep = torch.ones(shape, dtype=torch.bool)
    mask, padding = run.inputs.get("mask"), run.inputs.get("padding")
    if mask is not None:
        if mask.dim() == 3:
            mask = mask.unflatten(0, (shape[0], -1))
        keep &= mask != convention.blocked
    if padding is not None:
        keep &= padding[:, None, None, :] != convention.blocked
    return keep.numpy()


def agrees(run: Run, dims: dict, convention: Convention, precision: float) -> bool:
    """Output, and weights if they were returned, are those of the loops."""
    try:
        out, attention = expected(run, dims, convention)
    except RuntimeError:
        return False  # a mask that does not fit in this convention
    pairs = [(run.out, out)]
    if run.returned is not None:
        averaged = run.returned.dim() < attention.dim()
        pairs.append((run.returned, attention.mean(1) if averaged else attention))
    return all(
        a.shape == b.shape
        and torch.allclose(a.double(), b.double(), rtol=precision, atol=precision)
        for a, b in pairs
    )


def verdicts(attempt: Attempt, **exchanged: str) -> dict[str, set[Convention]]:
    """For each kind of call that did not raise, the conventions that agree.

    exchanged: the matrices and sources of a Run.
    """
    torch.manual_seed(7)
    precision = 1e-5 if attempt.name in ROUNDED else 1e-9
    found = {}
    for kind in KINDS:
        dims = dimensions(attempt, kind)
        target = build(attempt, dims)
        given = inputs(attempt, target, dims, kind)
        run = None if given is None else call(attempt, target, given)
        if run is not None:
            run = dataclasses.replace(run, **exchanged)
            choices = conventions(attempt)
            found[kind] = {c for c in choices if agrees(run, dims, c, precision)}
    return found
