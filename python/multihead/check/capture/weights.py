# SPDX-License-Identifier: MIT
"""The weights of a run by name: parameters, arguments, and what the code made for
itself while it ran. Which is which projection, the engine decides by name; where
names say nothing, the way of the data gives them names here."""

import re
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..subject.holding import Held, walk, wrappers
from ..subject.roles import is_weight, projection, speaks
from ..subject.words import is_position_bias
from .frames import Frames
from .places import place
from .record import Recorder, Use


@dataclass
class Weights:
    """Tensors by name, "out_in" for those whose layer fixes the orientation, and
    phrases on how they were found. by_flow: the same, named by the way of the data,
    if that way could be followed. by_order: what is the query's and what the key's
    follows from their order in the product alone."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    # What norms add to the variance, and in how many groups they take features.
    norms: dict[str, float] = field(default_factory=dict)
    # The gains of norms over the batch, which is no part of attention.
    batch_norms: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    by_flow: "Weights | None" = None
    by_order: bool = False


def collect(
    recorder: Recorder,
    frames: Frames,
    roots: dict,
    given: dict,
    old: dict[str, int],
    told: dict[str, str] | None = None,
) -> Weights:
    """The weights of a run.

    roots: what the code holds, by name ("self" for a module): modules, tensors,
    closures. given: its arguments that are weights. frames: the variables of its
    functions. old: the arrays that an object had before, as arrays_of tells them. told:
    the names by the way of the data that a run with several inputs gave, by their own,
    which holds for those that have one; a first such run notes them there.
    """
    met = {recorder.root(use.weight) for use in recorder.uses.values()}
    used = met | {recorder.root(bias) for bias in recorder.biases.values()}
    now = arrays_of(roots.get("self"))
    # What a call leaves for its backward pass, self.q, is no weight.
    left = {name for name in now if now[name] != old.get(name)}
    found = [replace(c, of_root=True) for c in walk("", {**given, **roots})]
    found = [c for c in found if c.name not in left or is_weight(c.last_name)]
    for variables in reversed(frames.found):
        # What became of an array cannot be followed: wider ones may be computed.
        local = walk("", variables)
        found += [c for c in local if not c.of_array or c.tensor.dim() <= 2]
    passed = {c.name for c in walk("", given)}
    kept = [c for c in found if c.name in passed or _belongs(c, used, recorder)]
    kept = _without_doubles(kept, recorder)
    made = {recorder.root(linear.weight): linear for linear in frames.linears}
    # A weight that the code took out of a layer keeps the layer's orientation.
    shapes = {root: linear.weight.shape for root, linear in made.items()}
    of_layers = [shapes.get(recorder.root(c.tensor)) == c.tensor.shape for c in kept]
    kept = [replace(c, layout="out_in") if o else c for c, o in zip(kept, of_layers)]
    unnamed = met - {recorder.root(c.tensor) for c in kept}
    matrices = [c for c in kept if c.tensor.dim() >= 2]
    by_flow = _named_by_flow(recorder, kept, made)
    by_flow = _as_told(by_flow, kept, told)
    silent = matrices and not any(speaks(c.name) for c in matrices)
    # What no data met has no other name than its own: linears.3, forgotten.
    idle = any(c.of_layer and recorder.root(c.tensor) not in met for c in matrices)
    norms = _norms(roots.get("self"))
    batch_norms = _batch_norms(roots.get("self"))
    if by_flow is not None:
        by_flow.norms, by_flow.batch_norms = norms, batch_norms
        for c in kept:  # norms, which no product tells apart
            unused = recorder.root(c.tensor) not in used
            if c.of_layer and c.tensor.dim() < 2 and unused:
                by_flow.tensors.setdefault(c.name, c.tensor.detach())
    if by_flow is not None and (unnamed or (silent and not idle)):
        return by_flow
    weights = Weights(norms=norms, batch_norms=batch_norms, by_flow=by_flow)
    for c in kept:
        tensor = c.tensor.detach()  # of an array, which the code may write to, a copy
        weights.tensors[c.name] = tensor.clone() if c.of_array else tensor
    weights.layouts = {c.name: c.layout for c in kept if c.layout}
    return weights


def _as_told(
    flow: Weights | None, kept: list[Held], told: dict[str, str] | None
) -> Weights | None:
    """With one input for all, which side of the scores is that of queries is told by
    runs with several."""
    if flow is None or told is None:
        return flow
    own = {c.tensor.data_ptr(): c.name for c in kept if c.tensor.numel()}
    names = {new: own.get(t.data_ptr()) for new, t in flow.tensors.items()}
    if None in names.values() or len(set(names.values())) < len(names):
        return flow
    if not flow.by_order:
        for new, name in names.items():
            told.setdefault(str(name), new)
        return flow
    if told.keys() != set(names.values()):
        return flow
    renamed = {new: told[str(name)] for new, name in names.items()}
    return replace(
        flow,
        tensors={renamed[n]: t for n, t in flow.tensors.items()},
        layouts={renamed[n]: layout for n, layout in flow.layouts.items()},
        by_order=False,
    )


def by_flow(named: Weights, partly: bool) -> Weights:
    """The same weights, named by the way of the data; `partly`: only those whose names
    say nothing."""
    flow = named.by_flow
    assert flow is not None
    if not partly:
        return flow
    found = replace(flow, tensors={}, layouts={})
    names: dict[tuple[int, int], list[str]] = {}
    for name, tensor in flow.tensors.items():
        names.setdefault((tensor.data_ptr(), tensor.numel()), []).append(name)
    several = {
        n: names.get((t.data_ptr(), t.numel())) for n, t in named.tensors.items()
    }
    told = {name: new[0] if new else None for name, new in several.items()}
    # What stands beside a matrix in the same layer belongs to it.
    owners = {
        n.rpartition(".")[0]: new.rpartition(".")[0]
        for n, new in told.items()
        if new and "." in n and "." in new
    }
    for name, tensor in named.tensors.items():
        owner, _, last = name.rpartition(".")
        of_layer = f"{owners[owner]}.{last}" if owner in owners else ""
        one = name if speaks(name) else told[name] or of_layer or name
        for new in [one] if speaks(name) else several[name] or [one]:
            found.tensors[new] = tensor
            if name in named.layouts:
                found.layouts[new] = named.layouts[name]
    return found


def disagree(named: Weights) -> bool:
    """Whether a matrix whose name says that it is that of queries, keys or values is
    another's by the way of the data."""
    flow = named.by_flow.tensors if named.by_flow else {}
    roles: dict[tuple[int, int], set[str]] = {}
    for name, tensor in flow.items():
        key = tensor.data_ptr(), tensor.numel()
        roles.setdefault(key, set()).add(projection(name))
    said = (
        (projection(name), roles.get((tensor.data_ptr(), tensor.numel()), set()))
        for name, tensor in named.tensors.items()
        if tensor.dim() >= 2
    )
    return any(own and others - {""} and own not in others for own, others in said)


_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "_eps")


def _batch_norms(module: object) -> frozenset[str]:
    parts = module.named_modules() if isinstance(module, nn.Module) else ()
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return frozenset(f"{path}.weight" for path, p in parts if isinstance(p, kinds))


def _norms(module: object) -> dict[str, float]:
    """The facts of the layers of a module that add something to a variance, by the
    engine's names."""
    found: dict[str, float] = {}
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        kept = next((vars(part)[name] for name in _EPS if name in vars(part)), None)
        weight = getattr(part, "weight", None)
        if kept is None and isinstance(part, nn.RMSNorm) and weight is not None:
            kept = torch.finfo(weight.dtype).eps
        if isinstance(kept, float):
            found[f"eps:{path}"] = kept
            if isinstance(part, nn.GroupNorm):
                found[f"groups:{path}"] = part.num_groups
    return found


def named(target: object, recorder: Recorder) -> dict[str, Tensor]:
    """The parameters of a module that learn and that products of the run met, and tables
    of what is added for positions."""
    if not isinstance(target, nn.Module):
        return {}
    met = {recorder.root(use.weight) for use in recorder.uses.values()}
    wrapped = wrappers(target)

    def short(name: str) -> str:
        owner, _, last = name.rpartition(".")
        return f"{wrapped[owner]}.{last}" if owner in wrapped else name

    return {
        short(name): parameter
        for name, parameter in target.named_parameters()
        if parameter.requires_grad
        and (recorder.root(parameter) in met or is_of_positions(name))
    }


def is_of_positions(name: str) -> bool:
    """Whether a parameter is a bias of positions, by its name or its layer's."""
    return any(map(is_position_bias, name.split(".")))


_TABLES = (("cos", "sin"), ("freqs_cos", "freqs_sin"), ("cos_cached", "sin_cached"))


def arrays_of(target: object) -> dict[str, int]:
    """Where the arrays of an object are kept, by their names."""
    if target is None or isinstance(target, nn.Module):
        return {}
    return {c.name: c.tensor.data_ptr() for c in walk("self", target) if c.of_array}


def rotary_tables(frames: Frames) -> dict[str, Tensor]:
    """Cosines and sines of positions, as some function called them; or a table of
    complex numbers."""
    for variables in frames.found:
        for cosines, sines in _TABLES:
            pair = variables.get(cosines), variables.get(sines)
            if all(isinstance(t, Tensor) and t.dim() >= 2 for t in pair):
                return {"cos": pair[0].detach(), "sin": pair[1].detach()}
        for value in variables.values():
            if isinstance(value, Tensor) and value.is_complex() and value.dim() == 2:
                return {"cos": value.detach().real, "sin": value.detach().imag}
    return {}


# As layers in NumPy keep them beside their matrices: grads["Wq"], self.grad_w.
_OF_GRADIENTS = re.compile(r"(^|[._])(grads?|gradients?)([._]|$)", re.I)


def _belongs(candidate: Held, used: set[int], recorder: Recorder) -> bool:
    if candidate.of_layer:
        return True
    if candidate.of_array and _OF_GRADIENTS.search(candidate.name):
        return False
    tensor = candidate.tensor
    if recorder.origin(tensor).inputs:
        return False
    if candidate.of_array and any(_are_same(tensor, one) for one in recorder.given):
        return False  # a sequence that is called query_matrix
    if recorder.root(tensor) in used:
        return True
    # Made as a weight and then forgotten: the engine may say so.
    kept = candidate.of_root or candidate.of_array or isinstance(tensor, nn.Parameter)
    of_object = candidate.of_array and candidate.of_root
    named = is_weight(candidate.last_name) or of_object and speaks(candidate.name)
    return named and (recorder.origin(tensor).drawn or kept)


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def _without_doubles(candidates: list[Held], recorder: Recorder) -> list[Held]:
    """One name for each tensor: the first that says something; and either a whole
    or its parts, whichever names say more."""
    best: dict[tuple, Held] = {}
    shared: dict[tuple, Held] = {}
    # An array shares the memory of a tensor, or of itself under another name, and not
    # its storage.
    tensors = (c.tensor for c in candidates if not c.of_array)
    roots = {t.data_ptr(): recorder.root(t) for t in tensors if t.numel()}
    arrays: dict[tuple[int, torch.Size], int] = {}
    for candidate in candidates:
        tensor = candidate.tensor
        offset = tensor.storage_offset() if tensor.numel() else 0
        root = recorder.root(tensor)
        if candidate.of_array and tensor.numel():
            first = arrays.setdefault((tensor.data_ptr(), tensor.shape), root)
            root = roots.get(tensor.data_ptr()) or first
        key = (root, offset, tensor.numel())
        known = best.get(key)
        if known is None or (speaks(candidate.name) and not speaks(known.name)):
            best[key] = candidate
        elif candidate.of_layer and known.of_layer and speaks(known.name):
            # Two layers may share a matrix, the queries' and the keys' own.
            letters = projection(known.name), projection(candidate.name)
            if all(letters) and letters[0] != letters[1]:
                shared.setdefault((key, letters[1]), candidate)
    wholes: dict[int, int] = {}
    for root, _, size in best:
        wholes[root] = max(size, wholes.get(root, 0))

    def speaking(of_parts: bool) -> set[int]:
        return {
            root
            for (root, _, size), c in best.items()
            if (size < wholes[root]) is of_parts and speaks(c.name)
        }

    by_parts = speaking(True) - speaking(False)
    kept = [
        c
        for key, c in best.items()
        if (key[2] < wholes[key[0]]) == (key[0] in by_parts)
    ]
    return [*kept, *shared.values()]


def _named_by_flow(
    recorder: Recorder, kept: list[Held], made: dict[int, nn.Linear]
) -> Weights | None:
    """Names from the way of the data: what meets the query makes the query, the two
    sides of the first product of computed tensors are queries and keys, what is
    weighted are values, and what comes after all that is the output."""
    groups: dict[str, list[Use]] = {}
    met = [use.direct for use in recorder.uses.values() if use.direct]
    in_pairs = {key: _role_in_pairs(key, recorder) for key in recorder.uses}
    distinct = len(set(met)) > 1
    if distinct and len(met) > len(set(met)):
        # What meets one input twice, as keys and values of a context, the products tell.
        early = [key for key, use in recorder.uses.items() if not use.late]
        distinct = not all(in_pairs[key] for key in early)
    for key, use in recorder.uses.items():
        role = use.direct if distinct else in_pairs[key]
        role = role or use.direct or ("out" if use.late else None)
        for one in _shared_by(key, recorder) or ([role] if role else []):
            groups.setdefault(one, []).append(use)
    if "query" not in groups and groups.keys() != {"out"}:
        return None
    _join_heads(groups, recorder)
    _name_fused(groups)
    layers = {root: Held("", linear.weight, "out_in") for root, linear in made.items()}
    layers |= {recorder.root(c.tensor): c for c in kept}
    weights = Weights(by_order=not distinct)
    for role, uses in groups.items():
        known = [layers.get(recorder.root(use.weight)) for use in uses]
        # One of a stack of matrices, W[0], is not the stack.
        known = [
            layer if layer and layer.tensor.numel() == use.weight.numel() else None
            for use, layer in zip(uses, known)
        ]
        for index, (use, layer) in enumerate(zip(uses, known)):
            name = role if len(uses) == 1 else f"{role}.{index}"
            # A product has them as (in, out); all of a list are shown alike.
            layer = layer if all(known) else None
            shown = layer.tensor if layer else use.weight
            weights.tensors[f"{name}.weight"] = shown.detach()
            if layer and layer.layout:
                weights.layouts[f"{name}.weight"] = layer.layout
            if use.bias is not None:
                weights.tensors[f"{name}.bias"] = use.bias.detach()
    weights.notes.append(
        "weights told apart by what each is multiplied with, as their names do not say"
    )
    return weights


def _join_heads(groups: dict[str, list[Use]], recorder: Recorder) -> None:
    """Matrices, one for each head, that make its queries, keys and values at once, are
    one with the heads in the order of their use."""
    uses = groups.get("query", [])
    fused = [
        (place(use.weight),) * 2 in [(*left, *right) for left, right in recorder.pairs]
        for use in uses
    ]
    alone = "key" not in groups and "value" not in groups
    if len(uses) < 2 or not all(fused) or not alone:
        return
    biases = [use.bias for use in uses if use.bias is not None]
    joined = replace(
        uses[0],
        weight=torch.cat([use.weight for use in uses], -1),
        bias=torch.cat(biases, -1) if len(biases) == len(uses) else None,
    )
    groups["query"] = [joined]


def _name_fused(groups: dict[str, list[Use]]) -> None:
    """One matrix for several projections is wider than its input."""
    for role, others, fused in (
        ("query", ("key", "value"), "qkv"),
        ("key", ("value",), "kv"),
    ):
        uses = groups.get(role, [])
        if len(uses) == 1 and not any(other in groups for other in others):
            into, out = _sides(uses[0].weight)
            if out > into:
                groups[fused] = groups.pop(role)


def _sides(weight: Tensor) -> tuple[int, int]:
    """How many features go into a matrix and come out: a product has it as (in, out), a
    convolution that looks at one position as (out, in, 1)."""
    if weight.dim() > 2 and all(size == 1 for size in weight.shape[2:]):
        return weight.shape[1], weight.shape[0]
    return weight.shape[-2], weight.shape[-1]


def _shared_by(key: tuple[int, int], recorder: Recorder) -> list[str]:
    """The projections that are one matrix, each of them a product of its own, or the
    same numbers; none where it is that of one, or a fused one, whose product makes
    several at once."""
    use = recorder.uses[key]
    roles = [
        role
        for role, of in (("query", 0), ("key", 1))
        if any(pair[of] == (key,) for pair in recorder.pairs[:1])
    ]
    # The scores, which come first, may be of one matrix, too.
    if any(right == (key,) for _, right in recorder.pairs[1:]):
        roles.append("value")
    core = next(iter(recorder.cores.found), None)
    made: list[Tensor] = []
    for heads in (getattr(core, role) for role in roles if core is not None):
        if not any(heads.shape == x.shape and heads.equal(x) for x in made):
            made.append(heads)
    if use.is_output_too:
        roles.append("out")
    products = len(roles), len(made) + use.is_output_too
    return roles if len(roles) > 1 and use.products in products else []


def _role_in_pairs(key: tuple[int, int], recorder: Recorder) -> str | None:
    of_one = {left for left, right in recorder.pairs if left == right}
    for index, (left, right) in enumerate(recorder.pairs):
        if left in of_one and right == (key,) and left != right:
            return "value"  # which meets scores of one matrix
        if left == (key,) and len(right) == 1:
            return "query"
        if right == (key,) and len(left) == 1:
            return "key"
        if index and (key,) in (left, right):
            return "value"
    return None


_ROUNDING = 1e-10
_CANCELS = 1e-12  # of the largest gradient, in float64


def with_idle_third(gradients: dict[str, Tensor | None]) -> list[str]:
    """Matrices of three parts, one of which has no part in the result."""
    fused = {
        name: gradient.chunk(3)
        for name, gradient in gradients.items()
        if gradient is not None
        and gradient.dim() == 2
        and len(gradient) % 3 == 0
        and not is_of_positions(name)
    }
    return [n for n, parts in fused.items() if any(not p.any() for p in parts)]


def that_cancel(
    gradients: dict[str, Tensor | None], learned: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Matrices that the result would follow, if what comes of them did not cancel."""
    matrices = {n: g for n, g in gradients.items() if g is not None and g.dim() == 2}
    largest = {n: float(g.abs().max()) for n, g in matrices.items() if g.numel()}
    most = max(largest.values(), default=0.0)
    if most < _ROUNDING:  # all of it cancels, as the sum of all classes
        return {}
    return {n: learned[n] for n, size in largest.items() if size < _CANCELS * most}
