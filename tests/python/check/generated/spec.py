# SPDX-License-Identifier: MIT
"""What a program is to be like: its style and its conventions, drawn by a seed."""

import random
from dataclasses import dataclass, field, replace

from .norms import Norm, draw_norm

# How people call the four matrices, the sizes, the inputs.
MATRICES = [
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("W_q", "W_k", "W_v", "W_o"),
    ("wq", "wk", "wv", "wo"),
    ("query", "key", "value", "dense"),
    ("to_q", "to_k", "to_v", "to_out"),
    ("query_linear", "key_linear", "value_linear", "out_linear"),
    ("fc_q", "fc_k", "fc_v", "fc_o"),
    ("linear_q", "linear_k", "linear_v", "proj"),
]
SIZES = [
    ("embed_dim", "num_heads"),
    ("d_model", "num_heads"),
    ("d_model", "n_heads"),
    ("dim", "heads"),
    ("hidden_size", "num_attention_heads"),
    ("embed_size", "heads"),
    ("d_model", "h"),
    ("n_embd", "n_head"),
]
INPUTS = [
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("queries", "keys", "values"),
]
CLASSES = [
    "MultiHeadAttention",
    "MultiheadAttention",
    "Attention",
    "MultiHeadSelfAttention",
    "SelfAttention",
    "CrossAttention",
    "MultiHeadedAttention",
]
FORMS = ["module"] * 12 + ["made", "given", "core", "core", "numpy", "numpy_core"]
PIECES = ["view"] * 5 + ["permute", "bmm", "einsum", "einsum", "unflatten", "loop"]
HEADS = ["rotary_halves", "rotary_pairs", "norm", "alibi"]  # "norm": of each head


@dataclass
class Spec:
    """All choices of one program.

    form: "module"; functions that make their layers ("made"), take their matrices
    ("given"), or attention by itself ("core"); the last two of NumPy, too.
    inputs: "self" (x), "cross" (x, context) or "three" (query, key, value).
    projections: "separate", "fused" (qkv), "fused_kv", "lists" (a layer for each head)
    or "matrices" (x @ W). mask: None, "keep", "blocked", "additive" or "padding";
    causal: None, "buffer" or "made". says: the text states what the mask means. heads:
    what is done to heads before they meet, "rotary_halves" or "rotary_pairs"; or to
    their scores, "alibi". residual: the input of queries is added to the output.
    """

    seed: int
    form: str = "module"
    pieces: str = "view"
    inputs: str = "three"
    projections: str = "separate"
    matrices: tuple[str, ...] = MATRICES[0]
    sizes: tuple[str, str] = SIZES[0]
    names: tuple[str, str, str] = INPUTS[0]
    class_name: str = CLASSES[0]
    config: bool = False
    bias: bool = True
    groups: bool = False
    sequence_first: bool = False
    mask: str | None = None
    fill: str = 'float("-inf")'
    says: bool = True
    causal: str | None = None
    scale: str = "after"
    root: str = "math.sqrt({d})"
    softmax: str = "method"
    dropout: str | None = None
    returns: str = "out"
    residual: bool = False
    norm: Norm | None = None
    heads: str | None = None
    annotated: bool = False
    fault: str | None = None
    notes: list[str] = field(default_factory=list)  # sentences of its docstring
    # What faults need of a call: as many keys as queries; masks of each item or head,
    # "items" or "heads"; a flag that asks for causal; queries that are the last of the
    # keys; a window of that many keys.
    equal: bool = False
    masks_of: str | None = None
    flag: bool = False
    last: bool = False
    window: int | None = None

    @property
    def is_numpy(self) -> bool:
        return self.form.startswith("numpy")

    @property
    def is_core(self) -> bool:
        return self.form in ("core", "numpy_core")

    def __str__(self) -> str:
        shown = [self.form, self.pieces, self.inputs, self.projections]
        for name in ("groups", "sequence_first", "config", "residual"):
            shown += [name] if getattr(self, name) else []
        shown += [str(what) for what in (self.heads, self.norm) if what]
        for name in ("mask", "causal", "dropout", "returns"):
            if getattr(self, name):
                shown.append(f"{name}={getattr(self, name)}")
        return " ".join(shown)


def draw(seed: int) -> Spec:
    """A right program of one style."""
    r = random.Random(seed)
    s = Spec(seed, form=r.choice(FORMS))
    s.pieces = r.choice(PIECES)
    s.matrices, s.sizes = r.choice(MATRICES), r.choice(SIZES)
    s.names, s.class_name = r.choice(INPUTS), r.choice(CLASSES)
    s.inputs = r.choice(["self", "self", "cross", "three", "three", "three"])
    s.projections = r.choice(["separate"] * 4 + ["fused", "fused_kv", "matrices"])
    s.bias = r.random() < 0.6
    s.config = r.random() < 0.12
    s.groups = r.random() < 0.12
    s.sequence_first = r.random() < 0.12
    s.mask = r.choice([None, None, "keep", "keep", "blocked", "additive", "padding"])
    s.fill = r.choice(
        ['float("-inf")', 'float("-inf")', "-1e9", "torch.finfo({x}.dtype).min"]
    )
    s.says = r.random() < 0.5
    s.causal = r.choice([None, None, None, "buffer", "made"])
    s.scale = r.choice(["after", "after", "query", "multiply", "both"])
    s.root = r.choice(["math.sqrt({d})", "({d} ** 0.5)", "np.sqrt({d})"])
    s.softmax = r.choice(["method", "F", "torch", "layer"])
    s.dropout = r.choice([None, None, "layer", "functional", "output_too"])
    s.returns = r.choice(["out", "out", "out", "weights", "weights", "mean", "asked"])
    s.annotated = r.random() < 0.3
    around = r.choice([None] * 12 + ["residual", "norm"])
    s = settle(s, r)
    s.residual = around is not None and s.form == "module"
    if s.form == "module" and s.inputs == "self":
        s.heads = r.choice([None] * 4 + HEADS)
    if s.heads == "alibi" and (s.pieces == "loop" or s.mask == "additive"):
        s.heads = None
    if s.form == "module" and random.Random(f"has norm {seed}").random() < 0.15:
        s.norm = draw_norm(seed)
    if s.heads == "norm":
        s.heads, s.norm = None, draw_norm(seed, ("heads",))
    if around == "norm" and s.form == "module":
        s.norm = draw_norm(seed, ("after",))
    return settle_norm(s)


def settle_norm(s: Spec) -> Spec:
    """The same for the places of norms."""
    if s.norm and s.norm.place == "whole" and (s.pieces == "loop" or s.groups):
        s.norm = replace(s.norm, place="heads")
    if s.norm and s.norm.place == "before_all" and s.inputs != "cross":
        s.norm = replace(s.norm, place="before")
    s.residual = s.residual or bool(s.norm and s.norm.place == "after")
    return s


def settle(s: Spec, r: random.Random) -> Spec:
    """Choices that do not go together give way."""
    if s.form != "module":
        s.config, s.groups, s.softmax = False, False, "F"
        s.dropout = None
        s.causal = s.causal and "made"
        if s.returns == "asked":
            s.returns = "weights"
    if s.form == "given":
        s.projections = "matrices"
    if s.form == "made":
        s.projections = "separate"
    if s.is_core:
        s.inputs, s.projections, s.sequence_first = "three", "none", False
        s.pieces = r.choice(["view", "einsum_core"])
        s.mask = s.mask if s.mask != "padding" else "keep"
        s.names = r.choice(INPUTS)
    if s.is_numpy:
        s.fill, s.root = r.choice(["-np.inf", "-1e9"]), "np.sqrt({d})"
        s.pieces = "view"
        s.mask = s.mask if s.mask in ("keep", "blocked") else None
        s.projections = s.projections if s.is_core else "matrices"
        s.sequence_first, s.causal = False, None
        s.scale = r.choice(["after", "multiply"])
        s.returns = "out" if s.returns == "mean" else s.returns
    if s.inputs != "self" and s.projections == "fused":
        s.projections = "separate"
    if s.inputs == "three" and s.projections == "fused_kv":
        s.projections = "separate"
    if s.inputs == "self" and s.projections == "fused_kv":
        s.projections = "fused"
    if s.inputs != "self":
        s.causal = None if r.random() < 0.7 else s.causal
    if s.causal and s.mask and r.random() < 0.7:
        s.mask = None
    if s.groups:
        s.projections, s.pieces = "separate", r.choice(["view", "permute"])
    if s.pieces == "loop":
        s.projections = r.choice(["separate", "lists"])
        s.mask = s.mask if s.mask in (None, "keep", "blocked") else "keep"
        s.groups = False
        if s.form != "module":
            s.projections = "separate" if s.form == "made" else "matrices"
        s.returns = "out"
    if s.form != "module" and s.matrices[0] == "query":
        s.matrices = MATRICES[0]  # the names of inputs, too
    if s.projections == "matrices":
        s.bias = False
    if s.form == "numpy":
        s.inputs = r.choice(["self", "three"])
        s.pieces = "view"
    # In the form of exercises a mask is yes or no, unless it says something else.
    if s.sequence_first or (s.mask == "additive" and s.form == "made"):
        s.says = True
    return s
