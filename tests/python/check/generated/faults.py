# SPDX-License-Identifier: MIT
"""Single faults, as edits of a program's steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .program import SPLITS, Steps, mask_name
from .spec import Spec


@dataclass(frozen=True)
class Fault:
    """names: what it may be called; fits: the programs that can have it; plant: puts
    it into the steps. seen: where it shows, beside the output: "weights" that are
    returned, "gradients", "training"."""

    names: tuple[str, ...]
    fits: Callable[[Spec], bool]
    plant: Callable[[Steps], None]
    seen: str = "output"

    @property
    def name(self) -> str:
        return self.names[0]


def is_torch(s: Spec) -> bool:
    return not s.is_numpy


def has_heads(s: Spec) -> bool:
    """In one tensor of four axes."""
    return not s.is_core and s.pieces in ("view", "permute", "unflatten")


def has_layers(s: Spec) -> bool:
    return s.projections == "separate" and s.pieces != "loop"


def _set(**changes: object) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        for name, value in changes.items():
            setattr(p, name, value)

    return plant


def _divide(text: str) -> Callable[[Steps], None]:
    """Scores divided by something else; {d} the head width, {H} the heads, {E} the
    width of the inputs, {Lk} the keys."""

    def plant(p: Steps) -> None:
        p.divide = (
            text.replace("{H}", p.head).replace("{E}", p.embed).replace("{Lk}", "Lk")
        )
        p.place = "after" if p.place == "both" else p.place

    return plant


def _softmax(text: str) -> Callable[[Steps], None]:
    return _set(normalise=text)


def _mask(old: str, new: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        p.mask = [line.replace(old, new) for line in p.mask]

    return plant


def _lines(text: str) -> Callable[[Steps], None]:
    """The mask's line as another; {mask} its name, {test} where it blocks."""

    def plant(p: Steps) -> None:
        name = mask_name(p.spec)
        tests = {
            "keep": f"{name} == 0",
            "blocked": name,
            "padding": f"{name}[:, None, None, :]",
        }
        line = text.replace("{test}", tests.get(p.spec.mask, name))
        p.mask = [f"if {name} is not None:", "    " + line.replace("{mask}", name)]

    return plant


def _causal(line: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        made = "torch.ones(Lq, Lk, dtype=torch.bool, device=scores.device)"
        p.causal = [f"future = {made}{line}", *p.causal[-1:]]
        p.causal[-1] = 'scores = scores.masked_fill(future, float("-inf"))'

    return plant


def _split(template: str, *roles: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        for role in roles:
            p.split[role] = template

    return plant


def _after(*lines: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        p.after += lines

    return plant


def _matrices(q: str, k: str, v: str) -> Callable[[Steps], None]:
    return _set(matrix={"q": q, "k": k, "v": v})


def _sources(q: str, k: str, v: str) -> Callable[[Steps], None]:
    return _set(source={"q": q, "k": k, "v": v})


def _roles(q: str, k: str, v: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        # What plays two parts is scaled in none of them, or it is two faults.
        alone = p.place == "both" or (p.place == "query" and q + k + v != "qkv")
        p.place = "after" if alone else p.place
        p.role = {"q": q, "k": k, "v": v}

    return plant


def _no_bias(*roles: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        p.with_bias |= dict.fromkeys(roles, False)
        if "o" in roles:
            p.out[0] = (
                p.out[0]
                .replace("(merged)", ".weight)")
                .replace("out = ", "out = F.linear(merged, ")
            )

    return plant


def _transposed(*roles: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        own = "self." if p.spec.form == "module" else ""
        p.transposed |= set(roles)
        if "o" in roles:
            name = own + p.spec.matrices[3]
            turned = name + (".T" if p.spec.is_numpy else ".t()")
            turned = turned if p.spec.projections == "matrices" else f"{name}.weight"
            p.out[0] = f"out = merged @ {turned}"

    return plant


def _out(*lines: str) -> Callable[[Steps], None]:
    def plant(p: Steps) -> None:
        own = "self." if p.spec.form == "module" else ""
        name = own + p.spec.matrices[3]
        p.out[:1] = [line.replace("{o}", name) for line in lines]

    return plant


def masked(*kinds: str) -> Callable[[Spec], bool]:
    return lambda s: s.mask in kinds and s.pieces != "loop"


def stated(*kinds: str) -> Callable[[Spec], bool]:
    return lambda s: s.mask in kinds and s.says


def separate(s: Spec) -> bool:
    return s.projections in ("separate", "matrices", "lists")


def scaled(s: Spec) -> bool:
    return True


def _is(*tests: Callable[[Spec], bool]) -> Callable[[Spec], bool]:
    return lambda s: all(test(s) for test in tests)


def form(*names: str) -> Callable[[Spec], bool]:
    return lambda s: s.form in names


def with_heads_by_name(s: Spec) -> bool:
    return not s.is_core


def drops(s: Spec) -> bool:
    return bool(s.dropout)


def returns(*kinds: str) -> Callable[[Spec], bool]:
    return lambda s: s.returns in kinds


IGNORED = ("mask_ignored", "mask_not_used", "mask_unused", "masked_fill_thrown_away")
SCALE = [
    Fault(("scale_missing",), scaled, _set(divide="")),
    Fault(("scale_not_root",), scaled, _divide("{d}")),
    Fault(("scale_by_embed_dim",), form("module"), _divide("math.sqrt({E})")),
    Fault(("scale_multiplied",), is_torch, _divide("(1.0 / math.sqrt({d}))")),
    Fault(
        ("scale_applied_twice", "scale_not_root"),
        is_torch,
        _divide("math.sqrt({d}) ** 2"),
    ),
    Fault(
        ("scale_by_heads",),
        _is(is_torch, with_heads_by_name),
        _divide("math.sqrt({H})"),
    ),
    Fault(
        ("scale_by_length",),
        _is(is_torch, with_heads_by_name),
        _divide("math.sqrt({Lk})"),
    ),
    Fault(
        ("scale_after_softmax",),
        is_torch,
        lambda p: (
            p.after.append(
                "weights = weights / "
                + p.divide.replace("{d}", p.width.replace("{q}", p.spec.names[0]))
            ),
            setattr(p, "divide", ""),
        )[-1],
    ),
]
SOFTMAX = [
    Fault(("softmax_over_queries",), is_torch, _softmax("{x}.softmax(dim=-2)")),
    Fault(
        ("softmax_over_heads",),
        _is(is_torch, has_heads),
        _softmax("F.softmax({x}, dim=1)"),
    ),
    Fault(
        ("softmax_over_batch",),
        _is(is_torch, has_heads),
        _softmax("torch.softmax({x}, dim=0)"),
    ),
    Fault(("softmax_twice",), is_torch, _softmax("F.softmax(F.softmax({x}, -1), -1)")),
    Fault(("softmax_missing",), lambda s: is_torch(s) and not s.mask, _softmax("{x}")),
    Fault(("softmax_not_normalised",), is_torch, _softmax("torch.exp({x})")),
    Fault(("sigmoid_instead_of_softmax",), is_torch, _softmax("torch.sigmoid({x})")),
    Fault(
        ("log_softmax",),
        lambda s: is_torch(s) and not s.mask and not s.causal,
        _softmax("F.log_softmax({x}, dim=-1)"),
    ),
    Fault(
        ("weights_transposed",),
        lambda s: is_torch(s) and s.inputs == "self" and s.pieces in SPLITS,
        _after("weights = weights.transpose(-2, -1)"),
    ),
    Fault(
        ("weights_averaged",),
        _is(is_torch, has_heads),
        _after("weights = weights.mean(dim=1, keepdim=True).expand_as(weights)"),
    ),
    Fault(
        ("gradient_detached",),
        is_torch,
        _after("weights = weights.detach()"),
        "gradients",
    ),
]
MASKS = [
    Fault(IGNORED, masked("keep", "blocked"), _lines("pass")),
    Fault(
        IGNORED,
        _is(is_torch, masked("keep", "blocked")),
        _lines('scores.masked_fill({test}, float("-inf"))'),
    ),
    Fault(
        ("padding_ignored", *IGNORED),
        masked("padding"),
        _lines('scores.masked_fill({test}, float("-inf"))'),
    ),
    Fault(("mask_inverted",), _is(stated("keep"), is_torch), _mask("== 0", "!= 0")),
    Fault(
        ("mask_inverted",),
        _is(stated("blocked"), is_torch),
        _mask("masked_fill(mask", "masked_fill(~mask"),
    ),
    Fault(
        ("padding_inverted",),
        stated("padding"),
        _mask("(key_padding", "(~key_padding"),
    ),
    Fault(
        ("mask_multiplied",),
        _is(is_torch, masked("keep", "blocked")),
        _lines("scores = scores.masked_fill({test}, 0.0)"),
    ),
    Fault(
        ("mask_multiplied",), _is(masked("keep")), _lines("scores = scores * {mask}")
    ),
    Fault(
        ("mask_added",),
        _is(is_torch, masked("blocked"), stated("blocked")),
        _lines("scores = scores + {mask}"),
    ),
    Fault(
        ("mask_sentinel_leaks",),
        _is(is_torch, masked("keep", "blocked")),
        _lines("scores = scores.masked_fill({test}, 1e-9)"),
    ),
    Fault(
        ("mask_sentinel_leaks",),
        _is(is_torch, masked("keep", "blocked")),
        _lines("scores = scores.masked_fill({test}, -10.0)"),
    ),
    Fault(
        ("mask_after_softmax",),
        _is(is_torch, masked("keep")),
        lambda p: (
            _lines("pass")(p),
            p.after.extend(
                [
                    f"if {mask_name(p.spec)} is not None:",
                    f"    weights = weights * ({mask_name(p.spec)} != 0)",
                ]
            ),
        )[-1],
    ),
    Fault(
        ("mask_of_first_item",),
        _is(is_torch, masked("padding")),
        _mask("[:, None, None, :]", "[:1, None, None, :]"),
    ),
]
CAUSAL = [
    Fault(
        ("causal_misses_diagonal",),
        lambda s: is_torch(s) and s.causal is not None,
        _causal(".triu(diagonal=0)"),
    ),
    Fault(
        ("causal_one_too_far",),
        lambda s: is_torch(s) and s.causal is not None,
        _causal(".triu(diagonal=2)"),
    ),
    Fault(
        ("causal_inverted",),
        lambda s: is_torch(s) and s.causal is not None,
        _causal(".tril(diagonal=-1)"),
    ),
    Fault(
        ("causal_first_key_only",),
        lambda s: is_torch(s) and s.causal is not None,
        _causal("[:1].triu(diagonal=1)"),
    ),
]
HEADS = [
    Fault(
        ("heads_not_transposed",),
        lambda s: has_heads(s) and is_torch(s) and not s.groups,
        _split("{x}.reshape({B}, {H}, {L}, {d})", "q", "k", "v"),
    ),
    Fault(
        ("heads_not_transposed",),
        lambda s: has_heads(s) and is_torch(s),
        _split("{x}.reshape({B}, {H}, {L}, {d})", "k"),
    ),
    Fault(
        # Of one fused matrix that is an order of columns, which is learned so.
        ("heads_interleaved",),
        lambda s: has_heads(s) and is_torch(s) and not s.groups and separate(s),
        _split("{x}.view({B}, {L}, {d}, {H}).permute(0, 3, 1, 2)", "q", "k", "v"),
    ),
    Fault(
        ("merge_not_transposed",),
        _is(has_heads, is_torch),
        _set(merge="context.reshape(B, Lq, {H} * {d})"),
    ),
    Fault(
        ("merge_interleaved",),
        _is(has_heads, is_torch),
        _set(merge="context.permute(0, 2, 3, 1).reshape(B, Lq, {H} * {d})"),
    ),
    Fault(
        ("keys_reshaped",),
        lambda s: has_heads(s) and is_torch(s),
        _set(keys_t="{x}.reshape(*{x}.shape[:-2], {x}.shape[-1], {x}.shape[-2])"),
    ),
    Fault(("values_are_keys",), lambda s: s.pieces != "loop", _roles("q", "k", "k")),
    Fault(("keys_are_values",), lambda s: s.pieces != "loop", _roles("q", "v", "v")),
    Fault(("queries_are_values",), lambda s: s.pieces != "loop", _roles("v", "k", "v")),
    Fault(
        ("keys_and_values_exchanged", "key_value_swapped"),
        lambda s: s.pieces != "loop",
        _roles("q", "v", "k"),
    ),
    Fault(
        ("groups_tiled",),
        lambda s: s.groups,
        _set(expand="{x}.repeat(1, {n}, 1, 1)"),
    ),
    Fault(
        ("groups_truncated",),
        lambda s: s.groups,
        lambda p: setattr(p, "expand", "{x}[:, :1].expand(-1, " + p.head + ", -1, -1)"),
    ),
]
# Beside norms that only its heads are judged behind, one of these is told by its layers.
TWICE = "layer_used_twice"
PROJECTIONS = [
    Fault(("query_key_swapped",), separate, _matrices("k", "q", "v")),
    Fault(("key_value_swapped",), separate, _matrices("q", "v", "k")),
    Fault(("query_value_swapped",), separate, _matrices("v", "k", "q")),
    Fault(("one_projection_for_all", TWICE), separate, _matrices("q", "q", "q")),
    Fault(("key_weight_for_values", TWICE), separate, _matrices("q", "k", "k")),
    Fault(("query_weight_for_keys", TWICE), separate, _matrices("q", "q", "v")),
    Fault(("value_weight_for_keys", TWICE), separate, _matrices("q", "v", "v")),
    Fault(
        ("value_from_key",),
        lambda s: s.inputs == "three" and separate(s),
        _sources("q", "k", "k"),
    ),
    Fault(
        ("key_from_value",),
        lambda s: s.inputs == "three" and separate(s),
        _sources("q", "v", "v"),
    ),
    Fault(
        ("value_bias_forgotten",),
        lambda s: s.bias and has_layers(s) and s.form == "module",
        _no_bias("v"),
    ),
    Fault(
        ("query_bias_forgotten",),
        lambda s: s.bias and has_layers(s) and s.form == "module",
        _no_bias("q"),
    ),
    Fault(
        ("output_bias_forgotten",),
        lambda s: s.bias and s.form == "module" and not s.is_core,
        _no_bias("o"),
    ),
    Fault(
        ("query_weight_transposed",),
        lambda s: has_layers(s) and not s.bias and s.form == "module",
        _transposed("q"),
    ),
    Fault(
        ("value_weight_transposed",),
        lambda s: has_layers(s) and not s.bias and not s.groups and s.form == "module",
        _transposed("v"),
    ),
]
OUTPUT = [
    Fault(("output_forgotten",), lambda s: not s.is_core, _out("out = merged")),
    Fault(
        ("output_projection_twice",),
        form("module", "made"),
        lambda p: (
            _out("out = {o}({o}(merged))")(p)
            if p.spec.projections != "matrices"
            else _out("out = merged @ {o} @ {o}")(p)
        ),
    ),
    Fault(
        ("returned_weights_before_softmax",),
        returns("weights"),
        _set(returned="scores"),
        "weights",
    ),
    Fault(
        ("returned_weights_summed",),
        _is(returns("mean"), has_heads),
        _set(returned="weights.sum(dim=1)"),
        "weights",
    ),
    Fault(
        ("returned_weights_of_one_head",),
        _is(returns("mean"), has_heads),
        _set(returned="weights[:, 0]"),
        "weights",
    ),
]
DROPOUT = [
    Fault(
        ("dropout_left_on",),
        drops,
        lambda p: setattr(
            p,
            "drop",
            [
                "weights = F.dropout(weights, p="
                + ("self.p" if p.spec.dropout == "functional" else "self.dropout.p")
                + ")"
            ],
        ),
    ),
    Fault(
        ("dropout_missing",),
        lambda s: s.dropout == "layer",
        _set(drop=[]),
        "training",
    ),
    Fault(
        ("dropout_before_softmax",),
        lambda s: s.dropout == "layer",
        lambda p: (
            p.before_softmax.append("scores = self.dropout(scores)"),
            setattr(p, "drop", []),
        )[-1],
        "training",
    ),
    Fault(
        ("dropout_on_context",),
        lambda s: s.dropout == "layer" and has_heads(s),
        lambda p: (
            p.out.insert(0, "merged = self.dropout(merged)"),
            setattr(p, "drop", []),
        )[-1],
        "training",
    ),
]
FAULTS = [
    *SCALE,
    *SOFTMAX,
    *MASKS,
    *CAUSAL,
    *HEADS,
    *PROJECTIONS,
    *OUTPUT,
    *DROPOUT,
]


def planted(s: Spec, fault: Fault) -> Spec:
    return replace(s, fault=fault.name)
