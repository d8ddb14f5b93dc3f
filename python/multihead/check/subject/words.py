# SPDX-License-Identifier: MIT
"""What the words of a name say that it counts: n_heads, dim_per_head, hiddenSize.

Rules by the parts of names, for those that no table has (see roles.py).
"""

import functools
import re

_COUNT = {"n", "num", "nb", "nr", "no", "number", "count", "total"}
_WIDTH = {"d", "dim", "dims", "dimension", "dimensions", "width", "depth", "ndim"}
_WIDTH |= {"feature", "features", "feat", "feats", "channel", "channels", "chan", "ch"}
_SIZE = {"size", "sz", "units", "nodes", "neurons", "embd"}
_HEADS = {"head", "heads"}
_GROUPS = {"group", "groups"}
_QUERY = {"q", "query", "queries", "querys", "qk", "qkv"}
_KEYS = {"k", "key", "keys", "v", "value", "values", "kv"}
_SEVERAL = {"queries", "keys", "values"}
_WHOLE = {"embed", "emb", "embd", "embedding", "embeddings", "model", "hidden"}
_WHOLE |= {"hid", "hiddens", "in", "input", "inputs", "state", "states", "inner"}
_WHOLE |= {"latent", "token", "attn", "attention", "att", "x", "enc", "dec", "src"}
_OUT = {"out", "output", "outputs"}
_OF_INPUTS = {"in", "input", "inputs"}
_LENGTH = {"len", "length", "lens", "lengths", "seq", "sequence", "seqlen", "ctx"}
_LENGTH |= {"context", "max", "maxlen", "time", "steps", "timesteps", "window"}
_LENGTH |= {"position", "positions", "pos", "tokens", "patches", "block", "t"}
_WIDER = {"ff", "ffn", "mlp", "feedforward", "intermediate", "forward", "fc"}
_RATIO = {"ratio", "factor", "mult", "multiplier", "expansion"}
_OTHER = {"layer", "layers", "vocab", "vocabulary", "class", "classes", "expert"}
_OTHER |= {"experts", "blocks", "stage", "stages", "kernel", "ratio"}
_OTHER |= {"stride", "strides"}
# No size, whatever stands beside it.
_NEVER = {"scale", "bias", "mask", "masks", "type", "name", "norm", "eps", "id", "idx"}
_NEVER |= {"index", "weight", "weights", "lr", "rank", "use", "with", "return", "fn"}
_NEVER |= {"batch", "prefix"}
# Counts of words and of classes, which are no sizes of attention.
OF_VOCABULARIES = {"vocab", "vocabulary", "class", "classes", "items", "users", "item"}
OF_VOCABULARIES |= {"tags", "tagset", "labels"}
_DROPOUT = {"drop", "dropout", "dropouts", "pdrop", "droprate"}
_JOINS = {"per", "of", "the", "for", "each", "self", "cross", "multi", "encoder"}
_JOINS |= {"decoder", "memory", "local", "global", "target", "tgt", "proj"}

_ATOMS = set().union(
    *(_COUNT, _WIDTH, _SIZE, _HEADS, _GROUPS, _QUERY, _KEYS, _WHOLE, _OUT, _LENGTH),
    *(_WIDER, _OTHER, _NEVER, _DROPOUT, _JOINS),
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def words(name: str) -> list[str]:
    """The words of a name, also of one that is written without gaps: nhead, dModel."""
    found = [part.lower() for part in _PARTS.findall(name)]
    return [word for part in found for word in _cut(part)]


@functools.cache
def _cut(part: str) -> tuple[str, ...]:
    """A word as the fewest known ones, else as it is. One letter begins a word only
    (nhead, dmodel), or is all that follows (dimq)."""
    if part in _ATOMS:
        return (part,)
    best: tuple[str, ...] = ()
    for end in range(1, len(part)):
        first, rest = part[:end], part[end:]
        if first not in _ATOMS or (len(first) == 1 and first not in "nd"):
            continue
        if len(rest) == 1 and (len(first) == 1 or rest not in "qkv"):
            continue
        following = _cut(rest)
        if all(word in _ATOMS for word in following):
            if not best or 1 + len(following) < len(best):
                best = (first, *following)
    return best or (part,)


def speaks_of_caches(name: str) -> bool:
    return any(word.startswith("cach") for word in words(name))


def role_of_words(name: str) -> str | None:
    """The role of a size by the words of its name; "qkv_dim" is the width of queries,
    keys or values, of all heads or of one; "mlp_dim" that of a layer after them."""
    said = words(name)
    if len(said) > 1 and said[-1] == "s":
        said = [*said[:-1], "size"]  # embedding_s
    have = set(said)
    counts, wide = have & _COUNT, have & _WIDTH
    wide = wide or (len(said) > 1 and have & {said[0]} & {"c"})  # c_q: of channels
    if have & _DROPOUT:
        return "dropout"
    if have & _NEVER or said == ["depth"]:
        return None
    if have & _HEADS:
        # num_head_channels: how many there are in each.
        if (wide or have & _SIZE) and (said[-1] in _WIDTH or not counts - {"n"}):
            return "head_dim"
        shared = have & (_KEYS | _GROUPS)
        return "num_kv_heads" if shared else "num_heads"
    if have & _GROUPS:
        return None if have & {"expert", "experts", "topk"} else "num_kv_heads"
    if have & _WIDER and (
        wide or have & (_SIZE | {"hidden", "hid", "inner"}) or counts
    ):
        return "mlp_dim"
    if have & _RATIO and have <= _RATIO | _WIDER:
        return "mlp_ratio"
    if have & _OTHER:
        return None
    if have >= {"max", "per"}:
        return None  # what is done at a time: max_tokens_per_batch
    if have & _LENGTH and not wide and not have & {"value", "values"}:
        return "max_length"
    sized = wide or have & _SIZE or counts
    if not sized:
        return None
    if have & _OUT and not have & _OF_INPUTS:
        return "out_dim"
    if have & _SEVERAL and not (wide or have & _SIZE):
        return None  # how many there are: n_keys
    if have & (_QUERY | _KEYS):
        return "embed_dim" if have & _OF_INPUTS else "qkv_dim"
    whole = wide or have & _WHOLE or have & {"units", "nodes", "neurons"}
    return "embed_dim" if whole or said == ["size"] else None


_BESIDE = {
    "input",
    "inputs",
    "in",
    "x",
    "tensor",
    "tensors",
    "state",
    "states",
    "layer",
}
_BESIDE |= {"sequences", "vectors"}
_BESIDE |= {"seq", "sequence", "embed", "emb", "embedding", "embeddings", "features"}
_BESIDE |= {"feature", "feat", "feats", "hidden", "src", "source", "data", "proj"}
_BESIDE |= {
    "decoder",
    "dec",
    "target",
    "tgt",
    "trg",
    "text",
    "visual",
    "textual",
    "image",
}
_ATTENDS = {"attn", "attend", "attends", "attention"}
_VALUES = {"value", "values", "v", "val", "vals"}
OF_QUERIES = {"query", "queries", "q"}
_FROM_ELSEWHERE = {
    "cross",
    "encoder",
    "enc",
    "memory",
    "context",
    "cond",
    "other",
    "kv",
    "m",
}


def tensor_of_words(name: str) -> str | None:
    """The sequence that a parameter of this name takes: input_query, key_states."""
    said = set(words(name))
    ways = said & {"from", "to"}  # a query attends from its place to others
    if len(ways) == 1 and said <= _BESIDE | _ATTENDS | ways:
        return "query" if ways == {"from"} else "key"
    if said & OF_QUERIES and said <= _BESIDE | OF_QUERIES:
        return "query"
    pair = said & {"key", "keys"} and said & {"value", "values"}
    if pair and said <= _BESIDE | {"key", "keys", "value", "values"}:
        return "context"
    for role, kinds in (("key", {"key", "keys", "k"}), ("value", _VALUES)):
        if said & kinds and said <= _BESIDE | kinds:
            return role
    if said & _BESIDE and said <= _BESIDE | _FROM_ELSEWHERE:
        return "context" if said & _FROM_ELSEWHERE else "x"
    return None


_PADS = {"key", "keys", "kv", "pad", "padding", "padded", "valid"}
_ELSEWHERE = {"encoder", "enc", "memory", "context", "cross", "cond"}
# What a mask is of, where a decoder has two.
OF_SOURCE = {"src", "source", "enc", "encoder", "memory", "mem", "cross", "context"}
OF_TARGET = {"tgt", "trg", "target", "dec", "decoder", "self", "ahead", "causal"}
_SHAPED = {"d", "tensor", "matrix", "bool"}
_ADDED = {"additive", "added", "add"}
# Masks of whole heads, of layers, and what is said about a mask.
_NO_MASK = {"head", "heads", "layer", "layers", "token", "tokens", "out", "output"}


def mask_of_words(name: str) -> str | None:
    """What a parameter masks whose name ends in the word: attention_masks, kv_mask;
    "query_mask" is of queries that count for nothing."""
    said = words(name)
    while said and (said[-1] in _SHAPED or said[-1].isdigit()):
        said.pop()  # mask_3d
    have = set(said)
    if (
        said[:1] == ["mask"]
        and have <= {"mask"} | _ATTENDS | _PADS | OF_SOURCE | OF_TARGET
    ):
        said = [*said[1:], "mask"]  # mask_tgt
    is_other = have & _NO_MASK and not have & {"attention", "attn"}
    if said[-1:] not in (["mask"], ["masks"], ["masking"]) or is_other:
        return None
    if have & OF_QUERIES and not have & {"key", "keys", "kv"}:
        return "query_mask"
    if have & _PADS:
        return "padding"
    return "context_mask" if have & _ELSEWHERE else "mask"


_POSITIONS = {"pos", "position", "positions", "rel", "relative"}
_FLAG = {"use", "with", "add", "has", "is", "no", "enable"}


def is_position_bias(name: str) -> bool:
    """Whether it is a bias of positions, and no flag for one."""
    said = set(words(name))
    return "bias" in said and bool(said & _POSITIONS) and not said & _FLAG


def says_added(name: str) -> bool:
    """Whether a mask is added, as its name says."""
    return mask_of_words(name) == "mask" and bool(set(words(name)) & _ADDED)
