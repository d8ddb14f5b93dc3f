# SPDX-License-Identifier: MIT
"""Single faults that need more of a program: an argument, a sentence of its docstring,
a step of another shape."""

from collections.abc import Callable

from .faults import (
    TWICE,
    Fault,
    _causal,
    _divide,
    _is,
    _lines,
    _matrices,
    _no_bias,
    _roles,
    _set,
    _softmax,
    _sources,
    _split,
    _transposed,
    form,
    has_heads,
    has_layers,
    is_torch,
    masked,
    returns,
    separate,
)
from .program import Steps, input_names, mask_name
from .spec import Spec

Plant = Callable[[Steps], None]


def _all(*plants: Plant) -> Plant:
    def plant(p: Steps) -> None:
        for one in plants:
            one(p)

    return plant


def _said(**facts: object) -> Plant:
    """Something of the call, or of the docstring, that a fault needs."""

    def plant(p: Steps) -> None:
        for name, value in facts.items():
            old = getattr(p.spec, name)
            setattr(p.spec, name, [*old, value] if name == "notes" else value)

    return plant


equal = _said(equal=True)


def as_wide(s: Spec) -> bool:
    """All matrices have one shape."""
    return separate(s) and not s.groups


def owns_matrices(s: Spec) -> bool:
    return s.form == "module" and s.projections == "matrices"


def layers(s: Spec) -> bool:
    return has_layers(s) and s.form == "module"


def bare_layers(s: Spec) -> bool:
    return layers(s) and not s.bias and not s.groups


def biased_layers(s: Spec) -> bool:
    return layers(s) and s.bias


def unmasked(s: Spec) -> bool:
    return not s.mask and not s.causal


def three(s: Spec) -> bool:
    """Three inputs of any length, whose names stay theirs."""
    return s.inputs == "three" and not s.is_core and s.names[0] != "q"


def free(s: Spec) -> bool:
    """Three inputs, which nothing but their use tells apart."""
    return three(s) and as_wide(s) and has_heads(s) and not s.mask


def one_sequence(s: Spec) -> bool:
    return s.inputs == "self" and as_wide(s) and has_heads(s)


def causal(s: Spec) -> bool:
    return is_torch(s) and s.causal is not None and not s.mask


def _exchange(names: tuple[str, ...], q: str, k: str, v: str) -> Fault:
    """Parts that play each other's role; of one sequence, so do their matrices."""
    return Fault(names, _is(is_torch, one_sequence), _roles(q, k, v))


def _merge(text: str) -> Plant:
    return _set(merge=text)


_LAID = ".transpose(1, 2).reshape(B, Lq, {H} * {d})"
PROJECTIONS = [
    Fault(("key_weight_transposed",), bare_layers, _transposed("k")),
    Fault(("all_weights_transposed",), bare_layers, _transposed(*"qkvo")),
    Fault(("all_weights_transposed",), bare_layers, _transposed(*"qkv")),
    Fault(
        # Of bare matrices, which may be (in, out): that one, or all the others. A
        # module's own may be stored in any way.
        ("output_weight_transposed", "all_weights_transposed"),
        lambda s: not (s.is_core or s.bias or s.form == "made" or owns_matrices(s)),
        _transposed("o"),
    ),
    Fault(("projections_rotated",), as_wide, _matrices("k", "v", "q")),
    Fault(("projections_rotated",), as_wide, _matrices("v", "q", "k")),
    Fault(("query_weight_for_values", TWICE), as_wide, _matrices("q", "k", "q")),
    Fault(("key_weight_for_queries", TWICE), as_wide, _matrices("k", "k", "v")),
    Fault(("value_weight_for_queries", TWICE), as_wide, _matrices("v", "k", "v")),
    Fault(("key_from_query",), free, _all(equal, _sources("q", "q", "v"))),
    Fault(("value_from_query",), free, _all(equal, _sources("q", "k", "q"))),
    Fault(("query_from_key",), free, _all(equal, _sources("k", "k", "v"))),
    Fault(("inputs_swapped",), free, _sources("q", "v", "k")),
    Fault(("biases_forgotten",), biased_layers, _no_bias(*"qkvo")),
    Fault(("input_biases_forgotten",), biased_layers, _no_bias(*"qkv")),
    Fault(("input_projection_forgotten",), as_wide, lambda p: p.unprojected.add("v")),
    Fault(
        ("input_projection_forgotten",),
        lambda s: as_wide(s) and s.projections != "lists",
        lambda p: p.unprojected.update("qkv"),
    ),
    Fault(
        ("weights_without_gradient",),
        layers,
        lambda p: p.frozen.add("v"),
        "gradients",
    ),
    Fault(
        ("batch_and_sequence_exchanged",),
        lambda s: (
            is_torch(s) and one_sequence(s) and unmasked(s) and not s.sequence_first
        ),
        _all(
            _said(notes="Inputs are (batch, seq_len, embed_dim)."),
            lambda p: setattr(p, "exchanged", True),
        ),
    ),
]


def _fused(view: str) -> Fault:
    return Fault(
        ("fused_view_without_permute",),
        lambda s: s.projections == "fused" and has_heads(s),
        _all(_set(fused=view), _split("{x}", *"qkv")),
    )


def _expand(index: str) -> Plant:
    """Key/value heads of query heads 0, 1, …"""

    def plant(p: Steps) -> None:
        heads = f"torch.arange({p.head})"
        last = "clamp(max=self.num_kv_heads - 1)"
        p.expand = "{x}[:, " + index.format(heads=heads, last=last) + "]"

    return plant


HEADS = [
    _fused("{x}.reshape(3, B, {H}, Lq, {d})"),
    _fused("{x}.reshape(B, 3, {H}, Lq, {d}).unbind(1)"),
    _fused("{x}.reshape(3, B, Lq, {H}, {d}).transpose(2, 3)"),
    Fault(
        ("heads_not_split",),
        lambda s: is_torch(s) and has_heads(s) and not s.groups,
        _split("{x}.reshape({B}, {L}, 1, {H} * {d}).transpose(1, 2)", *"qkv"),
    ),
    Fault(("groups_clamped",), lambda s: s.groups, _expand("{heads}.{last}")),
    Fault(
        ("group_size_wrong",),
        lambda s: s.groups,
        _expand("({heads} // self.num_kv_heads).{last}"),
    ),
    _exchange(("values_are_queries", "query_weight_for_values"), "q", "k", "q"),
    _exchange(("keys_are_queries", "query_weight_for_keys"), "q", "q", "v"),
    _exchange(("queries_are_keys", "key_weight_for_queries"), "k", "k", "v"),
    _exchange(("queries_and_keys_exchanged", "query_key_swapped"), "k", "q", "v"),
    Fault(
        ("head_left_out",),
        _is(has_heads, is_torch),
        _merge(
            "(context * (torch.arange({H}) > 0)[:, None, None]).transpose(1, 2)"
            ".reshape(B, Lq, {H} * {d})"
        ),
    ),
    Fault(
        ("one_head_for_all",),
        _is(has_heads, is_torch),
        _merge("context[:, :1].expand_as(context)" + _LAID),
    ),
    Fault(
        ("merge_of_batch_and_heads",),
        _is(has_heads, is_torch),
        _merge("context.transpose(0, 1).reshape(B, Lq, {H} * {d})"),
    ),
]
SCALE = [
    Fault(("scale_by_embed_dim_not_root",), form("module"), _divide("{E}")),
    Fault(
        ("scale_by_group_count",),
        lambda s: s.groups,
        _divide("math.sqrt(self.num_kv_heads)"),
    ),
    Fault(("scale_wrong_power",), is_torch, _divide("({d} ** 0.25)")),
    Fault(("scale_wrong_power",), is_torch, _divide("({d} ** 2)")),
    Fault(("scale_wrong_power",), is_torch, _divide("({d} ** 1 / 2)")),
    Fault(("scale_of_another_number",), is_torch, _divide("3.7")),
    Fault(
        ("scores_summed_apart",),
        _is(is_torch, has_heads),
        _set(product="({q}.sum(-1, keepdim=True) * {k}.sum(-1).unsqueeze(-2))"),
    ),
    Fault(
        ("scores_floored",),
        is_torch,
        lambda p: p.mask.insert(0, "scores = scores.floor()"),
    ),
]


def one_length(s: Spec) -> bool:
    return s.inputs == "self" and s.pieces != "bmm"


def of_each(kind: str) -> Callable[[Spec], bool]:
    return lambda s: (
        masked("keep", "blocked")(s) and is_torch(s) and has_heads(s) and not s.causal
    )


def _kept_raw(p: Steps) -> None:
    p.mask.insert(0, "unmasked = scores")
    p.returned = "unmasked.softmax(dim=-1)"


def _first_head_of_mask(p: Steps) -> None:
    name = mask_name(p.spec)
    p.mask.insert(0, f"if {name} is not None and {name}.dim() == 4:")
    p.mask.insert(1, f"    {name} = {name}[:, :1]")


def _one_key_later(p: Steps) -> None:
    """A padding mask whose keys have the places of the next ones."""
    name = mask_name(p.spec)
    p.mask.insert(0, f"if {name} is not None:")
    p.mask.insert(1, f"    {name} = torch.cat(({name}[:, :1], {name}[:, :-1]), 1)")


def _repeated(p: Steps) -> None:
    """A mask of each item, for items and heads in one dimension, in the wrong order."""
    name = mask_name(p.spec)
    p.mask.insert(0, f"if {name} is not None and {name}.dim() == 3:")
    repeated = f"{name}.repeat({p.head}, 1, 1).view(B, {p.head}, Lq, Lk)"
    p.mask.insert(1, f"    {name} = {repeated}")


_FUTURE = "torch.ones(Lq, Lk, dtype=torch.bool).triu(1)"
MASKS = [
    Fault(
        ("mask_transposed",),
        _is(is_torch, one_length, masked("keep", "blocked")),
        _lines('scores = scores.masked_fill(({test}).mT, float("-inf"))'),
    ),
    Fault(
        ("padding_on_queries",),
        lambda s: is_torch(s) and s.inputs == "self" and s.mask == "padding",
        lambda p: setattr(
            p,
            "mask",
            [line.replace("None, None, :]", "None, :, None]") for line in p.mask],
        ),
    ),
    Fault(
        ("padding_off_by_one",),
        lambda s: is_torch(s) and s.mask == "padding",
        _one_key_later,
    ),
    Fault(
        ("mask_head_order",),
        of_each("items"),
        _all(
            _said(masks_of="items", notes="The mask is (batch, queries, keys)."),
            _repeated,
        ),
    ),
    Fault(
        ("mask_of_first_head",),
        of_each("heads"),
        _all(_said(masks_of="heads"), _first_head_of_mask),
    ),
    Fault(
        ("mask_taken_for_causal",),
        lambda s: (
            is_torch(s)
            and masked("keep", "blocked")(s)
            and not s.causal
            and not s.is_core
        ),
        _lines(f'scores = scores.masked_fill({_FUTURE}, float("-inf"))'),
    ),
    Fault(
        ("returned_weights_unmasked",),
        _is(is_torch, returns("weights"), masked("keep", "blocked")),
        _kept_raw,
        "weights",
    ),
]
CAUSAL = [
    Fault(
        ("causal_ignored",),
        lambda s: is_torch(s) and unmasked(s) and s.form == "module",
        _said(flag=True),
    ),
    Fault(
        ("causal_without_effect",),
        lambda s: causal(s) and s.inputs == "self",
        _set(causal=[f"future = {_FUTURE}", "scores.masked_fill(future, -math.inf)"]),
    ),
    Fault(
        ("causal_without_effect",),
        lambda s: s.causal == "buffer" and not s.mask and s.inputs == "self",
        _set(causal=[]),
    ),
    Fault(
        ("causal_bottom_right",),
        lambda s: causal(s) and s.inputs == "three",
        _causal(".triu(diagonal=1 + Lk - Lq)"),
    ),
    Fault(
        ("causal_top_left",),
        lambda s: causal(s) and s.inputs == "three",
        _said(last=True, notes="The queries are the last ones of the keys."),
    ),
]
_WINDOW = "Each query sees itself and the window - 1 keys before it."


def _windowed(name: str, hidden: str) -> Fault:
    lines = [
        "sliding_window = 3",
        "ahead = torch.arange(Lk) - torch.arange(Lq)[:, None]",
    ]
    if hidden:
        lines.append(f"scores = scores.masked_fill({hidden}, -math.inf)")
    return Fault(
        (name,),
        lambda s: is_torch(s) and unmasked(s) and not s.is_core,
        _all(_said(window=3, notes=_WINDOW), _set(causal=lines)),
    )


CAUSAL += [
    _windowed("window_ignored", ""),
    _windowed("window_on_wrong_side", "(ahead < 0) | (ahead > 2)"),
    _windowed("window_off_by_one", "(ahead > 0) | (ahead < -3)"),
]


def _online(corrects: bool, last: str = "") -> Plant:
    """From scores to the context in blocks of four keys."""
    factor = " * torch.exp(top - higher)" if corrects else ""
    keys = "Lk - Lk % block_size" if last == "left out" else "Lk"
    filled = [
        "    missing = block_size - part.size(-1)",
        "    part = F.pad(part, (0, missing))",
        "    values = F.pad(values, (0, 0, 0, missing))",
    ]
    lines = [
        "block_size = 4",
        'top = torch.full_like(scores[..., :1], float("-inf"))',
        "total, context = 0.0, 0.0",
        f"for start in range(0, {keys}, block_size):",
        "    part = scores[..., start : start + block_size]",
        "    values = {v}[..., start : start + block_size, :]",
        *(filled if last == "filled up" else []),
        "    higher = torch.maximum(top, part.amax(-1, keepdim=True))",
        "    powers = torch.exp(part - higher)",
        f"    total = total{factor} + powers.sum(-1, keepdim=True)",
        f"    context = context{factor} + powers @ values",
        "    top = higher",
        "context = context / total",
    ]
    return _set(blocks=lines)


def in_blocks(s: Spec) -> bool:
    plain = s.pieces in ("view", "permute", "unflatten")
    return is_torch(s) and plain and unmasked(s) and s.returns == "out"


def undropped(s: Spec) -> bool:
    return in_blocks(s) and not s.dropout


def dropped(s: Spec) -> bool:
    return s.dropout == "layer"


WEIGHTS = [
    Fault(
        ("softmax_over_all",),
        _is(is_torch, unmasked),
        _softmax("{x}.flatten(-2).softmax(-1).view_as({x})"),
    ),
    Fault(
        ("softmax_sums_of_other_rows",),
        _is(is_torch, unmasked, one_sequence),
        _softmax("{x}.exp() / {x}.exp().sum(-1).unsqueeze(-2)"),
    ),
    Fault(
        ("softmax_over_heads_and_keys",),
        _is(is_torch, has_heads),
        _softmax(
            "{x}.transpose(1, 2).flatten(2).softmax(-1)"
            ".unflatten(-1, ({x}.size(1), -1)).transpose(1, 2)"
        ),
    ),
    Fault(
        ("scores_normalised_without_exp",),
        _is(is_torch, unmasked),
        _softmax("{x} / {x}.sum(-1, keepdim=True)"),
    ),
    Fault(
        ("values_summed_apart",),
        _is(is_torch, has_heads),
        _set(mix='torch.einsum("bhqk,bhvd->bhqd", weights, {v})'),
    ),
    Fault(
        ("own_value_only",),
        _is(is_torch, has_heads, one_length),
        _set(mix='torch.einsum("bhss,bhsd->bhsd", weights, {v})'),
    ),
    Fault(("online_softmax_not_corrected",), undropped, _online(corrects=False)),
    Fault(("last_block_left_out",), undropped, _online(True, "left out")),
    Fault(("last_block_filled_up",), undropped, _online(True, "filled up")),
    Fault(
        ("computed_in_bfloat16",),
        _is(is_torch, unmasked),
        _softmax("{x}.to(torch.bfloat16).softmax(-1).to({x}.dtype)"),
    ),
    Fault(
        ("computed_in_float16",),
        _is(is_torch, unmasked),
        _softmax("{x}.half().softmax(-1).to({x}.dtype)"),
    ),
    Fault(
        ("dropout_not_rescaled",),
        dropped,
        _set(
            drop=[
                "if self.training:",
                "    weights = weights * (torch.rand_like(weights) > self.dropout.p)",
            ]
        ),
        "training",
    ),
    Fault(
        ("dropout_keeps_what_it_should_drop",),
        dropped,
        _set(drop=["weights = F.dropout(weights, 1 - self.dropout.p, self.training)"]),
        "training",
    ),
]


def _per_head(p: Steps) -> None:
    own, width = "self." + p.spec.matrices[3], p.width
    cut = f"[i * {width} : (i + 1) * {width}, i * {width} : (i + 1) * {width}]"
    p.out[:1] = [
        f"squares = [{own}.weight{cut} for i in range({p.head})]",
        f"parts = merged.split({width}, dim=-1)",
        "out = torch.cat([x @ w.t() for x, w in zip(parts, squares)], dim=-1)",
    ]


def _diagonal(p: Steps) -> None:
    p.out[:1] = [f"out = merged * self.{p.spec.matrices[3]}.weight.diagonal()"]


def _add_values(p: Steps) -> None:
    p.out.append(f"out = out + {input_names(p.spec)['v']}")


OUTPUT = [
    Fault(("output_per_head",), bare_layers, _per_head),
    Fault(("output_diagonal",), bare_layers, _diagonal),
    Fault(
        ("input_added",),
        lambda s: (
            free(s) and not s.residual and not s.norm and s.dropout != "output_too"
        ),
        _all(equal, _add_values),
    ),
]
FURTHER = [*PROJECTIONS, *HEADS, *SCALE, *MASKS, *CAUSAL, *WEIGHTS, *OUTPUT]
