# SPDX-License-Identifier: MIT
"""A program as steps, each of which a fault may edit, and its text in PyTorch."""

import re
import textwrap
from dataclasses import dataclass, field

from .spec import Spec

ROLES = ("q", "k", "v")


@dataclass
class Steps:
    """What the text is made of. Templates: {x} a tensor, {d} the head width, {H} the
    number of heads."""

    spec: Spec
    head: str = ""  # expressions of the number of heads and of a head's width
    width: str = ""
    embed: str = ""
    matrix: dict[str, str] = field(default_factory=lambda: {r: r for r in ROLES})
    source: dict[str, str] = field(default_factory=lambda: {r: r for r in ROLES})
    role: dict[str, str] = field(default_factory=lambda: {r: r for r in ROLES})
    split: dict[str, str] = field(default_factory=dict)
    with_bias: dict[str, bool] = field(
        default_factory=lambda: dict.fromkeys((*ROLES, "o"), True)
    )
    transposed: set[str] = field(default_factory=set)  # matrices of x @ W
    unprojected: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)  # matrices without gradient
    fused: str = ""  # what makes heads of the fused projection, {x}, at once
    exchanged: bool = False  # batch and sequence, on the way in and out
    blocks: list[str] = field(default_factory=list)  # from scores to context
    turn: list[str] = field(default_factory=list)  # what is done to heads {q} and {k}
    keys_t: str = "{x}.transpose(-2, -1)"
    product: str = ""  # scores of heads {q} and {k}, not scaled; "" the usual
    divide: str = ""  # by what scores are divided; "" nothing
    place: str = "after"
    normalise: str = ""
    mask: list[str] = field(default_factory=list)
    causal: list[str] = field(default_factory=list)
    before_softmax: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    mix: str = ""  # what weights make of heads {v}; "" the usual
    expand: str = "{x}.repeat_interleave({n}, dim=1)"
    merge: str = ""
    out: list[str] = field(default_factory=list)
    returned: str = "weights"


def steps_of(s: Spec) -> Steps:
    """The steps of a right program."""
    p = Steps(s)
    self_ = "self." if s.form == "module" else ""
    p.head = self_ + s.sizes[1]
    p.embed = self_ + s.sizes[0]
    p.width = self_ + "head_dim"
    if s.is_core:
        p.width = "{q}.size(-1)" if not s.is_numpy else "{q}.shape[-1]"
    p.split = dict.fromkeys(ROLES, SPLITS.get(s.pieces, SPLITS["view"]))
    p.merge = MERGES["einsum" if s.pieces == "einsum" else "view"]
    p.divide = s.root
    p.place = s.scale
    p.normalise = {
        "method": "{x}.softmax(dim={dim})",
        "F": "F.softmax({x}, dim={dim})",
        "torch": "torch.softmax({x}, dim={dim})",
        "layer": "self.softmax({x})",
    }[s.softmax].replace("{dim}", "-1")
    if s.is_numpy:
        p.split = dict.fromkeys(ROLES, SPLITS["numpy"])
        p.merge = MERGES["numpy"]
        p.normalise = "softmax({x})"
        p.keys_t = "np.swapaxes({x}, -2, -1)"
    p.turn = turn_lines(s)
    p.mask = mask_lines(s)
    p.causal = causal_lines(s)
    p.drop = drop_lines(s)
    p.out = ["out = " + apply(p, "o", "merged")] if not s.is_core else []
    if s.dropout == "output_too":
        p.out.append("out = self.resid_dropout(out)")
    p.returned = {"mean": "weights.mean(dim=1)"}.get(s.returns, "weights")
    return p


SPLITS = {
    "view": "{x}.view({B}, {L}, {H}, {d}).transpose(1, 2)",
    "permute": "{x}.reshape({B}, {L}, {H}, {d}).permute(0, 2, 1, 3)",
    "unflatten": "{x}.unflatten(-1, ({H}, {d})).transpose(1, 2)",
    "bmm": "{x}.view({B}, {L}, {H}, {d}).transpose(1, 2).reshape({B} * {H}, {L}, {d})",
    "einsum": "{x}.reshape({B}, {L}, {H}, {d})",
    "numpy": "{x}.reshape({B}, {L}, {H}, {d}).transpose(0, 2, 1, 3)",
}
MERGES = {
    "view": "context.transpose(1, 2).reshape(B, Lq, {H} * {d})",
    "einsum": "context.reshape(B, Lq, {H} * {d})",
    "numpy": "context.transpose(0, 2, 1, 3).reshape(B, Lq, {H} * {d})",
}


def mask_name(s: Spec) -> str:
    if s.mask == "padding":
        return "key_padding_mask"
    return "attn_mask" if s.seed % 3 == 0 else "mask"


def mask_lines(s: Spec) -> list[str]:
    if s.mask is None:
        return []
    name = mask_name(s)
    fill = s.fill.replace("{x}", "scores")
    if s.is_numpy:
        test = f"{name} == 0" if s.mask == "keep" else f"{name} != 0"
        line = f"scores = np.where({test}, {fill}, scores)"
    elif s.mask == "keep":
        line = f"scores = scores.masked_fill({name} == 0, {fill})"
    elif s.mask == "blocked":
        line = f"scores = scores.masked_fill({name}, {fill})"
    elif s.mask == "additive":
        line = f"scores = scores + {name}"
    else:
        line = f"scores = scores.masked_fill({name}[:, None, None, :], {fill})"
    return [f"if {name} is not None:", "    " + line]


def causal_lines(s: Spec) -> list[str]:
    if s.causal is None:
        return []
    if s.causal == "buffer":
        return ['scores = scores.masked_fill(self.tril[:Lq, :Lk] == 0, float("-inf"))']
    return [
        "future = torch.ones(Lq, Lk, dtype=torch.bool, device=scores.device)"
        ".triu(diagonal=1)",
        'scores = scores.masked_fill(future, float("-inf"))',
    ]


def turn_lines(s: Spec) -> list[str]:
    lines = norm_lines(s, "heads", "{q}", "{k}")
    if s.heads in ("rotary_halves", "rotary_pairs"):
        axis = 1 if s.pieces == "einsum" else -2
        lines += [f"{{{x}}} = apply_rotary({{{x}}}, {axis})" for x in ("q", "k")]
    return lines


def norm_lines(s: Spec, place: str, *tensors: str) -> list[str]:
    """What normalises tensors there; none where the program has no norm there."""
    if s.norm is None or s.norm.place != place:
        return []
    return [s.norm.line(x, nth) for nth, x in enumerate(tensors)]


def drop_lines(s: Spec) -> list[str]:
    if s.dropout in ("layer", "output_too"):
        return ["weights = self.dropout(weights)"]
    if s.dropout == "functional":
        return ["weights = F.dropout(weights, p=self.p, training=self.training)"]
    return []


def matrix_name(s: Spec, role: str) -> str:
    return s.matrices["qkvo".index(role)]


def apply(p: Steps, role: str, x: str) -> str:
    """What projects x by the matrix of a role."""
    s = p.spec
    name = matrix_name(s, role)
    own = "self." if s.form == "module" else ""
    if role in p.unprojected:
        return x
    if role in p.frozen:
        bias = f", {own}{name}.bias" if s.bias else ""
        return f"F.linear({x}, {own}{name}.weight.detach(){bias})"
    if s.projections == "matrices":
        turned = (".T" if s.is_numpy else ".t()") if role in p.transposed else ""
        return f"{x} @ {own}{name}{turned}"
    if role in p.transposed:
        return f"{x} @ {own}{name}.weight"
    if s.bias and not p.with_bias[role]:
        return f"F.linear({x}, {own}{name}.weight)"
    return f"{own}{name}({x})"


def input_names(s: Spec) -> dict[str, str]:
    if s.inputs == "self":
        return dict.fromkeys(ROLES, "x")
    if s.inputs == "cross":
        return {"q": "x", "k": "context", "v": "context"}
    return dict(zip(ROLES, s.names))


# ---- The text of a call ----------------------------------------------------


def call_lines(p: Steps) -> list[str]:
    """From the inputs to the result."""
    s = p.spec
    names = input_names(s)
    lines: list[str] = []
    if s.sequence_first or p.exchanged:
        for name in dict.fromkeys(names.values()):
            lines.append(f"{name} = {name}.transpose(0, 1)")
    if s.residual:
        lines.append(f"residual = {names['q']}")
    lines += norm_lines(s, "before", names["q"])
    lines += norm_lines(s, "before_all", *dict.fromkeys(names.values()))
    lines += [
        f"B, Lq = {names['q']}.shape[0], {names['q']}.shape[1]",
        f"Lk = {names['k']}.shape[1]",
    ]
    lines += project_lines(p, names)
    lines += norm_lines(s, "whole", "q", "k")
    lines += loop_lines(p) if s.pieces == "loop" else head_lines(p)
    lines += [*norm_lines(s, "context", "merged"), *p.out, *norm_lines(s, "out", "out")]
    if s.residual:
        lines.append("out = out + residual")
    lines += norm_lines(s, "after", "out")
    if s.sequence_first or p.exchanged:
        lines.append("out = out.transpose(0, 1)")
    return lines + return_lines(p)


def project_lines(p: Steps, names: dict[str, str]) -> list[str]:
    s = p.spec
    source = {r: names[p.source[r]] for r in ROLES}
    if s.projections == "lists":
        return [f"{r}_in = {source[r]}" for r in ROLES]
    if s.projections == "fused":
        first = ["q", "k", "v"]
        targets = ", ".join(first[ROLES.index(p.matrix[r])] + "_" for r in ROLES)
        if p.fused:
            whole = f"self.qkv({source['q']})"
            return ["q, k, v = " + p.fused.format(x=whole, H=p.head, d=p.width)]
        cut = f"self.qkv({source['q']}).chunk(3, dim=-1)"
        if p.matrix == dict(zip(ROLES, ROLES)):
            return [f"q, k, v = {cut}"]
        return [f"q_, k_, v_ = {cut}", f"q, k, v = {targets}"]
    if s.projections == "fused_kv":
        lines = [f"q = {apply(p, p.matrix['q'], source['q'])}"]
        return [*lines, f"k, v = self.to_kv({source['k']}).chunk(2, dim=-1)"]
    if s.inputs == "three" and set(s.names) & set(ROLES):
        # The names of the inputs are those of what is made of them.
        made = ", ".join(apply(p, p.matrix[r], source[r]) for r in ROLES)
        return [f"q, k, v = {made}"]
    return [f"{r} = {apply(p, p.matrix[r], source[r])}" for r in ROLES]


def head_lines(p: Steps) -> list[str]:
    s = p.spec
    lines = []
    for r in ROLES:
        size = {"B": "B", "L": "Lq" if r == "q" else "Lk", "d": p.width}
        heads = p.head if r == "q" or not s.groups else groups_name(s)
        lines.append(f"{r} = " + p.split[r].format(x=r, H=heads, **size))
    if s.groups:
        n = f"{p.head} // {groups_name(s)}"
        lines += [f"{r} = " + p.expand.format(x=r, n=n) for r in ("k", "v")]
    return [*lines, *attend_lines(p), merge_line(p)]


def groups_name(s: Spec) -> str:
    return "self.num_kv_heads"


def merge_line(p: Steps) -> str:
    return "merged = " + p.merge.format(H=p.head, d=p.width)


def attend_lines(p: Steps) -> list[str]:
    """From heads to the context; of attention by itself, all there is."""
    s = p.spec
    q, k, v = (p.role[r] for r in ROLES)
    core = dict(zip(ROLES, s.names)) if s.is_core else dict(zip(ROLES, ROLES))
    q, k, v = core[q], core[k], core[v]
    root = p.divide.replace("{d}", p.width.replace("{q}", q)).replace("{H}", p.head)
    turned = {"q": core["q"], "k": core["k"]}
    lines, product = [line.format(**turned) for line in p.turn], ""
    if p.divide and p.place == "query":
        lines.append(f"{q} = {q} / {root}")
    if p.divide and p.place == "both":
        fourth = f"{root} ** 0.5"
        lines += [f"{q} = {q} / {fourth}", f"{k} = {k} / {fourth}"]
    if p.product:
        product = p.product.format(q=q, k=k)
    elif s.pieces == "einsum":
        product = f'torch.einsum("bqhd,bkhd->bhqk", {q}, {k})'
    elif s.pieces == "einsum_core":
        product = f'torch.einsum("...qd,...kd->...qk", {q}, {k})'
    elif s.pieces == "bmm":
        product = f"torch.bmm({q}, {p.keys_t.format(x=k)})"
    elif s.seed % 2 or s.is_numpy:
        product = f"{q} @ {p.keys_t.format(x=k)}"
    else:
        product = f"torch.matmul({q}, {p.keys_t.format(x=k)})"
    if p.divide and p.place == "after":
        product = f"{product} / {root}"
    elif p.divide and p.place == "multiply":
        product = f"{product} * (1.0 / {root})"
    lines.append(f"scores = {product}")
    if s.pieces == "bmm":
        lines.append(f"scores = scores.view(B, {p.head}, Lq, Lk)")
    if s.heads == "alibi":
        lines.append("scores = scores + straight_line(scores)")
    lines += [*p.mask, *p.causal, *p.before_softmax]
    if p.blocks:
        return lines + [line.replace("{v}", v) for line in p.blocks]
    lines.append("weights = " + p.normalise.format(x="scores"))
    lines += [*p.drop, *p.after]
    if p.mix:
        lines.append("context = " + p.mix.format(v=v))
    elif s.pieces == "einsum":
        lines.append(f'context = torch.einsum("bhqk,bkhd->bqhd", weights, {v})')
    elif s.pieces == "bmm":
        flat = f"weights.reshape(B * {p.head}, Lq, Lk)"
        lines.append(
            f"context = torch.bmm({flat}, {v}).view(B, {p.head}, Lq, {p.width})"
        )
    else:
        lines.append(f"context = weights @ {v}")
    return lines


def loop_lines(p: Steps) -> list[str]:
    """One head after the other."""
    s = p.spec
    own = "self." if s.form == "module" else ""
    lines = ["results = []", f"for i in range({p.head}):"]
    for r in ROLES:
        if s.projections == "lists":
            name = f"{own}{matrix_name(s, p.matrix[r])}"
            lines.append(f"    {r} = {name}[i]({r}_in)")
        else:
            cut = f"{r}[:, :, i * {p.width} : (i + 1) * {p.width}]"
            lines.append(f"    {r}_i = {cut}")
    inner = attend_lines(p)
    if s.projections != "lists":
        inner = [_renamed(line, {"q": "q_i", "k": "k_i", "v": "v_i"}) for line in inner]
    lines += ["    " + line for line in inner]
    lines.append("    results.append(context)")
    return [*lines, "merged = torch.cat(results, dim=-1)"]


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"(?<![\w.\"])([qkv])(?![\w\"=])", lambda m: names[m[1]], line)


def return_lines(p: Steps) -> list[str]:
    s = p.spec
    result = "context" if s.is_core else "out"
    if s.returns in ("weights", "mean"):
        return [f"return {result}, {p.returned}"]
    if s.returns == "asked":
        return [
            "if need_weights:",
            f"    return {result}, {p.returned}",
            f"return {result}",
        ]
    return [f"return {result}"]


# ---- The text of a file ----------------------------------------------------

IMPORTS = """\
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""
SOFTMAX = """

def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
"""

_TABLES = """

def apply_rotary(x, axis):
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    places = torch.arange(x.shape[axis], device=x.device, dtype=x.dtype)
    angles = torch.outer(places, rates)
    if axis == 1:
        angles = angles.unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
"""
HELPERS = {
    "rotary_halves": _TABLES
    + """\
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)
""",
    "rotary_pairs": _TABLES
    + """\
    x1, x2 = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)
    return turned.flatten(-2)
""",
    "alibi": """

def straight_line(scores):
    heads, queries, keys = scores.shape[-3:]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=scores.dtype) / heads)
    places = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    return -slopes.view(-1, 1, 1) * places.abs()
""",
}


def docstring(s: Spec) -> list[str]:
    said = list(s.notes)
    if s.sequence_first:
        said.append("Inputs are (seq_len, batch, embed_dim).")
    if s.mask and s.says:
        said.append(
            {
                "keep": f"{mask_name(s)}: 1 = may attend, 0 = masked out.",
                "blocked": f"{mask_name(s)}: True = masked, may not attend.",
                "additive": f"{mask_name(s)}: added to the scores (0 or -inf).",
                "padding": "key_padding_mask: (batch, keys), True = padding.",
            }[s.mask]
        )
    return ['"""' + " ".join(said) + '"""'] if said else []


def arguments(s: Spec) -> str:
    names = list(dict.fromkeys(input_names(s).values()))
    if s.is_core:
        names = list(s.names)
    if s.annotated and not s.is_numpy:
        names = [f"{name}: torch.Tensor" for name in names]
    if s.form == "made":
        names += [s.sizes[0], s.sizes[1]]
    if s.form in ("given", "numpy"):
        names += [*s.matrices, s.sizes[1]]
    if s.mask:
        names.append(f"{mask_name(s)}=None")
    if s.flag:
        names.append("is_causal=False")
    if s.returns == "asked":
        names.append("need_weights=False")
    return ", ".join(names)


def text_of(p: Steps) -> str:
    s = p.spec
    if s.form == "module":
        norm = s.norm.helper() if s.norm else ""
        return IMPORTS + HELPERS.get(s.heads, "") + norm + module_text(p)
    if s.is_core:
        body = [*docstring(s)]
        if p.causal or p.blocks:
            size = "shape[-2]"
            body.append(f"Lq, Lk = {s.names[0]}.{size}, {s.names[1]}.{size}")
        body += [*attend_lines(p), *return_lines(p)]
        name = "scaled_dot_product_attention"
    else:
        body = [*docstring(s), *function_head(p), *call_lines(p)]
        name = "multi_head_attention"
    imports = "import numpy as np\n" + SOFTMAX if s.is_numpy else IMPORTS
    return f"{imports}\n\ndef {name}({arguments(s)}):\n" + indented(body)


def function_head(p: Steps) -> list[str]:
    s = p.spec
    embed, heads = s.sizes
    if s.form == "made":
        makes = [
            f"{name} = nn.Linear({embed}, {embed}, bias={s.bias})"
            for name in s.matrices
        ]
        return [*makes, f"head_dim = {embed} // {heads}"]
    first = input_names(s)["q"]
    return [f"head_dim = {first}.shape[-1] // {heads}"]


def module_text(p: Steps) -> str:
    s = p.spec
    embed, heads = s.sizes
    head = [f"class {s.class_name}(nn.Module):"]
    extra = []
    if s.groups:
        extra.append("num_kv_heads=2")
    if s.dropout:
        extra.append("dropout=0.1")
    if s.causal == "buffer":
        extra.append("max_len=512")
    typed = ": int" if s.annotated else ""
    sizes = [f"{embed}{typed}", f"{heads}{typed}", *extra]
    value = dict(zip([x.partition("=")[0] for x in extra], extra))
    config = ""
    if s.config:
        config = "class Config:\n" + indented(
            [f"{embed} = 48", f"{heads} = 6", *(x.replace("=", " = ") for x in extra)]
        )
        config = f"\n\n{config}"
        sizes = ["config"]
    get = "config." if s.config else ""
    lines = [
        "super().__init__()",
        f"self.{embed} = {get}{embed}",
        f"self.{heads} = {get}{heads}",
        f"self.head_dim = {get}{embed} // {get}{heads}",
        *layer_lines(s, get, value),
    ]
    init = [f"def __init__(self, {', '.join(sizes)}):", *map(_in, lines)]
    body = [*docstring(s), *call_lines(p)]
    forward = [f"def forward(self, {arguments(s)}):", *map(_in, body)]
    return (
        config
        + "\n\n"
        + "\n".join([*head, *map(_in, init), "", *map(_in, forward), ""])
    )


def layer_lines(s: Spec, get: str, extra: dict[str, str]) -> list[str]:
    embed, heads = (get + size for size in s.sizes)
    bias = "" if s.bias else ", bias=False"
    q, k, v, o = s.matrices
    lines = []
    if s.groups:
        lines.append(f"self.num_kv_heads = {get}num_kv_heads")
        wide = "self.num_kv_heads * self.head_dim"
        sizes = {q: embed, k: wide, v: wide, o: embed}
        lines += [f"self.{n} = nn.Linear({embed}, {w}{bias})" for n, w in sizes.items()]
    elif s.projections == "fused":
        lines.append(f"self.qkv = nn.Linear({embed}, 3 * {embed}{bias})")
        lines.append(f"self.{o} = nn.Linear({embed}, {embed}{bias})")
    elif s.projections == "fused_kv":
        lines.append(f"self.{q} = nn.Linear({embed}, {embed}{bias})")
        lines.append(f"self.to_kv = nn.Linear({embed}, 2 * {embed}{bias})")
        lines.append(f"self.{o} = nn.Linear({embed}, {embed}{bias})")
    elif s.projections == "lists":
        one = f"nn.Linear({embed}, self.head_dim{bias})"
        lines += [
            f"self.{n} = nn.ModuleList([{one} for _ in range({heads})])"
            for n in (q, k, v)
        ]
        lines.append(f"self.{o} = nn.Linear({embed}, {embed}{bias})")
    elif s.projections == "matrices":
        made = f"nn.Parameter(torch.randn({embed}, {embed}) / {embed} ** 0.5)"
        lines += [f"self.{n} = {made}" for n in s.matrices]
    else:
        lines += [f"self.{n} = nn.Linear({embed}, {embed}{bias})" for n in s.matrices]
    if s.softmax == "layer":
        lines.append("self.softmax = nn.Softmax(dim=-1)")
    if s.dropout == "functional":
        lines.append(f"self.p = {get}dropout")
    elif s.dropout:
        lines.append(f"self.dropout = nn.Dropout({get}dropout)")
    if s.dropout == "output_too":
        lines.append(f"self.resid_dropout = nn.Dropout({get}dropout)")
    if s.causal == "buffer":
        ones = f"torch.ones({get}max_len, {get}max_len)"
        lines.append(f'self.register_buffer("tril", torch.tril({ones}))')
    if s.norm:
        width = "self.head_dim" if s.norm.place == "heads" else embed
        lines += s.norm.layer_lines(width)
    return lines


def _in(line: str) -> str:
    return "    " + line if line else line


def indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines) + "\n", "    ")
