# SPDX-License-Identifier: MIT
"""Which forms are tried, likelier first: those of which its text or a name speaks, and
those that are left where code takes none of the usual."""

import re
from collections.abc import Iterator

from ..report import Finding
from ..subject.signature import Call
from ..subject.target import Subject
from . import cases, forms
from .at_rest import with_zeros
from .conditioned import beside_images, beside_others, conditioned
from .forms import Form
from .images import of_images
from .learned import with_learned_queries
from .models import of_models
from .probed import probed
from .recurrent import recurrent
from .stacked import in_blocks, of_frames, of_stacked, of_vectors
from .tokens import of_tokens
from .videos import of_videos, takes_videos

FORMS_LEFT = Finding(
    "forms_left",
    "Its tensors were not tried in all forms: the time for that was over.",
    "Give a call of yours, which it takes, by `inputs=` or `call=`.",
    kind="remark",
)
# Complaints that other shapes may settle.
_OF_SHAPES = re.compile(
    r"shape|size|dim|axis|axes|unpack|index|einsum|rearrange|token|vector|\dD\b", re.I
)


def in_said_forms(subject: Subject, call: Call) -> Iterator[Form]:
    """Those of which its text or a name speaks."""
    yield from forms.in_parts(subject, call)
    yield from forms.packed(subject, call)
    yield from forms.joined(subject, call)
    yield from of_frames(subject, call)
    yield from of_stacked(subject, call)
    if takes_videos(subject):
        yield from of_videos(subject, call)


def beside_plain(subject: Subject, call: Call) -> Iterator[Form]:
    """Those that may explain more of code that takes a plain call, too."""
    yield from recurrent(subject, call)
    yield from in_blocks(subject, call)
    masks = {n for n, role in call.roles.items() if role == "mask"}
    if masks & call.guessed:  # which may be anything
        yield from probed(subject, call)


def in_unusual_forms(
    subject: Subject, call: Call, refusals: list[str], is_core: bool
) -> Iterator[Form]:
    """refusals: what it says of the usual ones; is_core: it may be handed its heads."""
    yield from recurrent(subject, call)
    yield from of_vectors(subject, call)
    yield from of_models(subject, call, refusals)
    wants_four = any("expected 4, got 3" in one for one in refusals)
    if wants_four and not is_core:
        yield from forms.with_an_axis_more(subject, call)
    yield from of_tokens(subject, call, " ".join(refusals))
    yield from of_images(subject, call)
    of_shapes = " ".join(filter(_OF_SHAPES.search, refusals))
    of_nothing = any("NoneType" in one for one in refusals)
    if of_nothing:
        yield from forms.with_positions(subject, call)
        yield from with_zeros(subject, call)
    if of_shapes or of_nothing:
        yield from conditioned(subject, call)
    if of_shapes:
        yield from beside_images(subject, call)
    if of_shapes:
        for by_complaints in (with_learned_queries, of_videos):
            yield from by_complaints(subject, call, of_shapes)
        yield from forms.with_transposed_keys(subject, call)
        if is_core:
            yield from forms.with_shared_keys(subject, call)
        yield from forms.with_cut_heads(subject, call, of_shapes)
        yield from forms.with_one_query(subject, call, is_core)
        if not is_core and not wants_four:
            yield from forms.with_an_axis_more(subject, call)
    if of_nothing:
        yield from beside_others(subject, call)
    yield from probed(subject, call)
    if is_core:
        yield from probed(subject, call, (cases.HEADS,))
