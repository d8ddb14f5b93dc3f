# SPDX-License-Identifier: MIT
"""The layouts that tensors of code may have, by its text, its names and its layers."""

import inspect
import re

from torch import nn

from ..calls import cases
from ..capture.runner import Run, Runner
from ..options import Options
from ..subject.documented import (
    are_items,
    batch_first,
    batch_first_in_file,
    docstrings,
)
from ..subject.roles import TENSORS
from ..subject.signature import (
    BATCH,
    LENGTH,
    Call,
    axes,
    states_batch_first,
    text_of_entry,
    unpacks_input,
)
from ..subject.target import Subject
from ..subject.texts import source_of

_CHANNELS = re.compile(r"c|ch|dim|d|channels?|c_in|n_?channels|in_channels|features?")


def layer_layouts(subject: Subject, options: Options, call: Call) -> tuple[str, ...]:
    """The layouts that are not ruled out for code with weights, likeliest first."""
    if call.is_pytorchs_layer:
        return (cases.SEQUENCE_FIRST, cases.UNBATCHED)
    stated = options.batch_first
    if stated is None and subject.kind == "instance":
        flag = getattr(subject.target, "batch_first", None)
        stated = flag if isinstance(flag, bool) else None
    if stated is None and subject.kind == "class":
        # A class that takes batch_first is constructed with True, and keeps to it.
        named = inspect.signature(subject.target).parameters
        stated = True if "batch_first" in named else None
    if stated is None and written_batch_first(subject):
        # Beyond doubt where it is said of what comes in.
        of_input = batch_first(subject) or unpacks_input(subject, call)
        of_input = of_input or _of_others(subject)
        stated = True if of_input else None
    layouts = [cases.LAYER, cases.SEQUENCE_FIRST, cases.UNBATCHED]
    if stated is not None:
        layouts.remove(cases.SEQUENCE_FIRST if stated else cases.LAYER)
    elif not written_batch_first(subject) and (
        written_batch_first(subject) is False or _hands_on(subject)
    ):
        layouts = [cases.SEQUENCE_FIRST, cases.LAYER, cases.UNBATCHED]
    elif len(axes(subject)) == 2:
        layouts = [cases.UNBATCHED, cases.LAYER, cases.SEQUENCE_FIRST]
    if are_items(subject):
        layouts.remove(cases.UNBATCHED)  # its rows are items, and no positions
    others = _of_convolutions(subject)
    if cases.CHANNELS_FIRST not in others and _exchanges_axes(subject):
        layouts.append(cases.CHANNELS_FIRST)
    named = [name.lower() for name in axes(subject)]
    if len(named) == 3 and not _CHANNELS.fullmatch(named[1]):
        return (*layouts[:1], *others, *layouts[1:])
    return (*others, *layouts)


# The last two axes of three.
_LAST_TWO = r"(?:transpose\((?:1, ?2|2, ?1|-1, ?-2|-2, ?-1)\)|permute\(0, ?2, ?1\))"
_EXCHANGED = re.compile(rf"^\s*(\w+)\s*=\s*\1\.(?:{_LAST_TWO}|mT\b)", re.M)
_EXCHANGED_BACK = re.compile(rf"^\s*return [^\n]*\.(?:{_LAST_TWO}|mT)$", re.M)


def _exchanges_axes(subject: Subject) -> bool:
    """Whether the last two axes of what comes in are exchanged, as it came, and those
    of what comes out."""
    text = text_of_entry(subject)
    found = _EXCHANGED.search(text) if _EXCHANGED_BACK.search(text) else None
    return found is not None and found[1] in inspect.signature(subject.entry).parameters


# What einops cuts first, 'b (w1 p1) (w2 p2) c -> ...', and names of features in it.
_PATTERN = re.compile(r"rearrange\(\s*\w+\s*,\s*[rf]?[\"\']([^\"\'\n]+?)->")
_FEATURES = {"c", "d", "ch", "dim", "channels", "e"}


def _of_pattern(subject: Subject) -> list[str]:
    """The layout of images that einops cuts into windows or takes apart."""
    cut = (
        re.findall(r"\([^)]*\)|\w+", one) for one in _PATTERN.findall(subject.source)
    )
    for _, *sides in (one for one in cut if len(one) == 4):
        for layout, place in ((cases.IMAGE, 0), (cases.IMAGE_LAST, 2)):
            rest = "".join(side[0] for side in sides[:place] + sides[place + 1 :])
            if sides[place] in _FEATURES and rest in ("hw", "xy", "(("):
                return [layout]
    return []


def _hands_on(subject: Subject) -> bool:
    """Whether what comes in meets PyTorch's layer as it came, which by default wants
    the sequence first."""
    text = subject.source
    is_default = "nn.MultiheadAttention(" in text and "batch_first" not in text
    return is_default and not re.search(r"transpose|permute|swapaxes|rearrange", text)


def written_batch_first(subject: Subject) -> bool | None:
    """What texts and names say of a layout, which may be that of a step inside."""
    said = batch_first(subject)
    said = states_batch_first(subject) if said is None else said
    if said is None and _turns_for_conv1d(subject.source):
        return True
    return _of_others(subject) if said is None else said


def _of_others(subject: Subject) -> bool | None:
    """What the file says of the sequences that PyTorch's layer is handed, where the code
    itself says nothing of them."""
    is_pytorchs = "MultiheadAttention(" in subject.source
    return batch_first_in_file(subject) if is_pytorchs else None


def _turns_for_conv1d(text: str) -> bool:
    """Whether the last two axes are exchanged for a convolution, which takes (B, E, L)."""
    exchanged = re.search(_LAST_TWO, text)
    others = re.search(r"permute\(1, ?0|transpose\((0, ?1|1, ?0)\)", text)
    return "Conv1d(" in text and bool(exchanged) and not others


# Any number of axes behind the channels: b, c, *spatial = x.shape.
_SPATIAL = re.compile(r"\bc\w*\s*,\s*\*\w+\s*=\s*\w+\.(?:shape|size\(\))")


# The axes of an image, as a text has them: (B, C, H, W), or the channels last.
_IMAGE = re.compile(
    r"\(\s*[bn]\w*,\s*(c\w*,\s*)?h\w*,\s*w\w*(?(1)|,\s*[cd]\w*)\s*\)", re.I
)


# A side that is multiplied by itself, which makes the length of an image.
_OF_A_SIDE = re.compile(
    r"\b(?:self\.)?(\w*(?:size|side|resolution))\s*\*\s*(?:self\.)?\1\b"
)
_SIDES = ({"h", "w"}, {"x", "y"})  # the first letters of rows and columns
# Pixels become a sequence: x.flatten(2).permute(2, 0, 1), x.flatten(2).transpose(1, 2).
_OF_PIXELS = re.compile(
    r"(?P<before>.*?)\b\w+\s*=\s*(?P<x>\w+)\."
    r"(?:flatten\(\s*(?:start_dim\s*=\s*)?2[^)]*\)|"
    r"(?:view|reshape)\(\s*\*(?P=x)\.shape\[:2\],\s*-1\s*\))"
    r"\s*\.(?:permute\(\s*[20]|transpose\(\s*1|mT\b)",
    re.S,
)
# B, L, E = x.shape, and what asks how wide the last axis is.
_OF_THREE_AXES = re.compile(
    r"\.(?:shape|size\(\))[ \t]*(?:#.*)?$|(?:shape\[|size\()-1", re.M
)
# Those of a sequence whose channels come first: (B, C, L).
_CHANNELS_FIRST = re.compile(
    r"\(\s*b\w*,\s*c\w*,\s*(?:[ltn]|len\w*|time\w*|seq\w*)\s*\)", re.I
)


def _of_convolutions(subject: Subject) -> list[str]:
    """The layouts of code that projects by convolutions, or that unpacks the axes of
    an image."""
    is_module = isinstance(subject.target, nn.Module)
    parts = list(subject.target.modules()) if is_module else []
    kinds = {cases.CHANNELS_FIRST: nn.Conv1d, cases.IMAGE: nn.Conv2d}
    found = [
        layout
        for layout, kind in kinds.items()
        if re.search(kind.__name__.replace("v", "v_?"), subject.source, re.I)
        or any(isinstance(p, kind) for p in parts)
    ]
    found = [*_of_pattern(subject), *found]
    if _SPATIAL.search(subject.source):
        found = [cases.CHANNELS_FIRST, cases.IMAGE, *found]
    if _flattens_image(subject):
        found = [cases.IMAGE, *found]
    named = [name.lower() for name in axes(subject)]
    if not named and _OF_A_SIDE.search(subject.source):
        found = [cases.IMAGE, *found]
    if len(named) < 4:  # which may be those of what it is cut into
        said = " ".join(docstrings(subject)) if named else subject.source
        written = _IMAGE.findall(said)
        found += [cases.IMAGE if channels else cases.IMAGE_LAST for channels in written]
        found += [cases.CHANNELS_FIRST] * bool(_CHANNELS_FIRST.search(said))
    if len(named) == 4:
        sides = [name.removeprefix("n_")[:1] for name in named]
        if {*sides[2:]} in _SIDES:
            found = [cases.IMAGE, *found]
        elif {*sides[1:3]} in _SIDES:
            found = [cases.IMAGE_LAST, *found]
    if len(named) == 3:
        is_length = LENGTH.fullmatch(named[2]) is not None
        if named[1] in ("c", "channels", "ch", "dim") or (
            named[1] == "_" and is_length
        ):
            found = [cases.CHANNELS_FIRST, *found]
    if not found and "Linear(" not in subject.source:
        parts = "".join(map(source_of, _classes_inside(subject)))
        found = [layout for layout, kind in kinds.items() if kind.__name__ in parts]
    return list(dict.fromkeys(found))


def _flattens_image(subject: Subject) -> bool:
    """Whether it makes a sequence of the pixels of what comes in, as it came."""
    flattened = _OF_PIXELS.match(text_of_entry(subject))
    if flattened is None or _OF_THREE_AXES.search(flattened["before"]):
        return False
    return flattened["x"] in inspect.signature(subject.entry).parameters


def _classes_inside(subject: Subject) -> list[type]:
    """Classes of its file that its own code makes."""
    known = getattr(getattr(subject.target, "__init__", None), "__globals__", {})
    called = dict.fromkeys(re.findall(r"\b([A-Za-z_]\w*)\(", subject.source))
    made = [known.get(name) for name in called]
    own = [one for one in made if inspect.isclass(one) and issubclass(one, nn.Module)]
    return [one for one in own if not one.__module__.startswith("torch.")]


def core_layouts(subject: Subject, options: Options) -> tuple[str, ...]:
    """The layouts to try for attention by itself, likeliest first: sequences before the
    batch where that is stated, or written, or nothing else explains it."""
    stated = options.batch_first
    if stated is None:
        stated = written_batch_first(subject)
    others = _core_layouts(subject)
    if stated is False:
        return (*cases.OF_STEPS, *(() if options.batch_first is False else others))
    single = cases.SINGLE_LAST, cases.SINGLE_OF_STEPS
    return (*others, *(single if stated is None else single[:1]))


_COUNT_OF_HEADS = re.compile(r"(num_?|n_?)?h(eads?)?|nh")


def _core_layouts(subject: Subject) -> tuple[str, ...]:
    names = [name.lower() for name in axes(subject)]
    if len(names) == 4:
        if _COUNT_OF_HEADS.fullmatch(names[0]) and BATCH.fullmatch(names[1]):
            return (cases.HEADS_FIRST,)
        later = _COUNT_OF_HEADS.fullmatch(names[2]) is not None
        orders = (cases.HEADS, cases.HEADS_LATER)
        return (*(orders[::-1] if later else orders), cases.HEADS_LAST)
    otherwise = cases.SINGLE if "bmm(" in subject.source else cases.HEADS
    first = {2: cases.FLAT, 3: cases.SINGLE}.get(len(names), otherwise)
    depths = (first, cases.HEADS, cases.SINGLE, cases.FLAT, *cases.BATCH_THEN_HEADS)
    return tuple(dict.fromkeys(depths))


def _asks_three(call: Call) -> bool:
    return sum(call.takes(role) for role in TENSORS) >= 3


def is_told_heads(call: Call, base: Run) -> bool:
    """Whether code has no weights, so that it may be handed heads, and is told of them
    as it is made."""
    return _asks_three(call) and not call.weights and not base.parameters.tensors


def heads_layouts(call: Call, runner: Runner, is_told: bool = False) -> tuple[str, ...]:
    """The layouts of attention that is handed its heads; none for what projects, as
    most of what is told of them as it is made does."""
    constructed = runner.construction is not None and runner.construction.counts_heads
    if not _asks_three(call) or call.weights or (constructed and not is_told):
        return ()
    return cases.BATCH_THEN_HEADS


def may_be_core(call: Call, runner: Runner) -> bool:
    """Whether it may be attention by itself: nothing speaks of heads or of the width
    of all of them."""
    counts = {"num_heads", "embed_dim", "num_kv_heads"}
    named = any(call.takes(role) or role in call.bound for role in counts)
    return not named and bool(heads_layouts(call, runner))
