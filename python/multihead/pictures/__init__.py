# SPDX-License-Identifier: MIT
"""Attention as pictures: in notebooks, as pages, SVG and PNG. Measures and draws nothing
itself: the library of pictures does."""

import html
import os
import pathlib
import stat
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._call import call, check_int, check_type, shown
from .._library import pictures
from .capture import Facts, captured

__all__ = ["Pictures", "show"]

_FORMS = (".html", ".svg", ".png")


class Pictures:
    """Attention that was measured, a picture for each layer. See show.

    A notebook shows it as a page to explore. save() writes files. ``pictures[3]`` is one
    layer alone, drawn larger; len() counts them, names names them.
    """

    def __init__(self, title: str, layers: Sequence[Any], names: Sequence[str]) -> None:
        """title; layers: of torch.ops.multihead.picture_of_weights and its like."""
        self.title = title.encode(errors="replace").decode()  # no half characters
        self.names = list(names)
        self._layers = list(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> "Pictures":
        check_int("show", "layer", layer)
        if not -len(self) <= layer < len(self):
            raise IndexError(
                f"show: layer must be from {-len(self)} to {len(self) - 1}, got {layer}"
            )
        name = self.names[layer]
        title = ", ".join(filter(None, (self.title, name)))
        return Pictures(title, [self._layers[layer]], [name])

    @property
    def paths(self) -> "Pictures | None":
        """The mean of the layers of each group that has several, and rollout and flow
        through them, as pictures: how much of each token can have reached each, as far
        as weights tell (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020).

        Both take the mean of heads, and half of each layer to pass by; values and the
        other parts of a model are left out. Flow needs short sequences. None: there are
        no two layers, or sequences have more than 256 tokens, or weights are below 0 or
        not finite.
        """
        found = pictures().paths_through(self._layers)
        if not found:
            return None
        return Pictures(self.title, found, [f"path {i}" for i in range(len(found))])

    @property
    def entropies(self) -> list[list[float]]:
        """Of each layer, of each of its panels (the mean, which has none, first where
        there are several heads): -Σ w·ln w, the mean of its queries; NaN: not known."""
        return [list(pictures().picture_facts(x)[1]) for x in self._layers]

    def map(self, panel: int = 0) -> Tensor:
        """The cells of a panel of the first layer, float32 (rows, columns): of short
        sequences the weights (Lq, Lk), of longer ones sums over keys and means over
        queries. panel 0 is the mean where there are several heads, head 0 is then 1."""
        check_int("show", "panel", panel)
        operator = pictures().picture_map.default
        cells: Tensor = call(operator, self._layers[0], int(panel))
        return cells

    def html(self) -> str:
        """A page of its own, which asks nothing of a network."""
        found = pictures().paths_through(self._layers)
        return self._drawn("html", found)

    def svg(self) -> str:
        """One layer with its labels, or, of several, all heads of all of them."""
        return self._drawn("svg", [])

    def _drawn(self, form: str, paths: list[Any]) -> str:
        operator = pictures().draw_pictures.default
        text: str = call(operator, self.title, self._layers, paths, form)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes path, by its ending an .html page, an .svg or a .png.

        A file that is there keeps its permissions, and a link leads where it did.
        PNG is drawn by librsvg, which the system brings (Debian: librsvg2-2).
        Raises ValueError for another ending, RuntimeError where PNG cannot be drawn,
        OSError where the file cannot be written; it is then as it was before.
        """
        words = "a str or os.PathLike of one"
        check_type("show", "path", path, (str, os.PathLike), words)
        check_type("show", "path", os.fspath(path), str, words)
        target = pathlib.Path(path)
        form = target.suffix.lower()
        if form not in _FORMS:
            raise ValueError(
                f"show: path must end in {', '.join(_FORMS)}, got {shown(str(path))}"
            )
        if form == ".png":
            image = call(pictures().draw_png.default, self.svg())
            content = bytes(image.tolist())
        else:
            text = self.html() if form == ".html" else self.svg()
            content = text.encode()
        try:
            _write(os.path.realpath(target), content)
        except OSError as error:  # which names the file that was asked for
            raise OSError(error.errno, error.strerror, str(target)) from None

    def __repr__(self) -> str:
        (heads, queries, keys), _ = pictures().picture_facts(self._layers[0])
        count = f"{len(self)} layers of " if len(self) > 1 else ""
        return (
            f"<multihead.Pictures: {self.title}: {count}{heads} "
            f"head{'s' if heads > 1 else ''}, {queries} queries × {keys} keys>"
        )

    def _repr_html_(self) -> str:
        # A frame of its own: pages beside each other share no names and no styles.
        page = html.escape(self.html(), quote=True)
        return (
            f'<iframe data-multihead title="{html.escape(self.title, quote=True)}" '
            f'srcdoc="{page}" style="width: 100%; height: 760px; border: 0"></iframe>'
        )


def _write(target: str, content: bytes) -> None:
    """The whole content, or nothing, with the permissions of the file before."""
    mask = os.umask(0)
    os.umask(mask)
    is_there = os.path.exists(target)
    mode = stat.S_IMODE(os.stat(target).st_mode) if is_there else 0o666 & ~mask
    handle, name = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".show")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def show(
    subject: Any,
    *inputs: Any,
    tokens: Sequence[str] | str | None = None,
    query_tokens: Sequence[str] | str | None = None,
    reference: Any = None,
    blocked: Tensor | None = None,
    without: Sequence[str] = (),
    scaled: bool = True,
    item: int = 0,
    title: str = "",
    **keywords: Any,
) -> Pictures:
    """Draws attention: weights, a layer with inputs, or a model with its tokens.

    ::

        multihead.show(weights, tokens=["the", "cat"])          # shown by a notebook
        multihead.show(mha, x, x, x).save("layer.svg")
        multihead.show(model, **tokenizer(text, return_tensors="pt"), tokens=words)
        multihead.show(model, **batch, reference=tuned)         # less that of another

    A layer or model is called with inputs and keywords, once, without gradients and in
    evaluation mode. What is drawn are the queries, keys and rules that its attention
    gets, wherever it calls scaled_dot_product_attention, multi_head_attention_forward or
    a layer of PyTorch or this package, on the CPU. Models of transformers are switched
    to this package's attention for the call (multihead.integrations.transformers), so
    that "eager" ones are seen, too. The call runs on the fused kernels, and of long
    sequences no page of Lq × Lk weights is made: they are drawn in cells.

    Args:
        subject: weights, floating, (B, H, Lq, Lk), (H, Lq, Lk) or (Lq, Lk); a sequence
            of those, one for each layer, as a model's ``attentions``, or a mapping from
            names to them; or a torch.nn.Module, such as nn.MultiheadAttention.
        inputs: what a module is called with. None for weights.
        tokens: the names of the keys, and of the queries where there are as many: a
            list, or words between spaces. In a model, of what has that length.
        query_tokens: the names of the queries, where they differ: in a model that has
            a decoder its tokens, which are keys, too, of its self-attention.
        reference: weights of the same shape, or a module for the same inputs: what is
            drawn is then the difference, of layers of the same names, or where names
            differ of one after the other; those of mappings must be the same.
        blocked: beside weights, bool, broadcast to them, True = may not attend.
        without: tokens to leave out, such as ("[CLS]", "[SEP]"); without names,
            positions ("0"). For sequences of up to 2048 tokens.
        scaled: whether rows are then divided by what is left of their sum.
        item: of the batch.
        title: what stands above; else the name of the class.
        keywords: what a module is called with by name.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes or names that do not fit together.
        RuntimeError: a module that calls no attention that can be seen.
    """
    check_int("show", "item", item)
    check_type("show", "title", title, str, "a str")
    check_type("show", "blocked", blocked, (Tensor, type(None)), "a tensor or None")
    facts = Facts(
        tokens=_words("tokens", tokens),
        query_tokens=_words("query_tokens", query_tokens),
        without=_words("without", without) or [],
        scaled=bool(scaled),
        item=int(item),
    )
    if isinstance(subject, nn.Module):
        if blocked is not None:
            raise TypeError(
                "show: blocked must be None with a module, whose masks are its "
                f"arguments, got {shown(blocked)}"
            )
        title = title or type(subject).__name__
        found = captured(subject, inputs, keywords, facts.titled(title))
        if reference is not None:
            check_type(
                "show", "reference", reference, nn.Module, "a module, as subject"
            )
            other = captured(reference, inputs, keywords, facts.titled(title))
            found = _less(found, other)
        return Pictures(title, list(found.values()), list(found))
    for name, given in (("inputs", inputs), *keywords.items()):
        if name != "inputs" or given:
            raise TypeError(f"show: {name} must come with a module, got {shown(given)}")
    title = title or "attention weights"
    found = _of_weights(subject, "subject", blocked, facts.titled(title))
    if reference is not None:
        other = _of_weights(reference, "reference", blocked, facts.titled(title))
        if isinstance(subject, Mapping) and isinstance(reference, Mapping):
            _check_names(found, other)
        found = _less(found, other)
    return Pictures(title, list(found.values()), list(found))


def _words(name: str, words: Sequence[str] | str | None) -> list[str] | None:
    if words is None:
        return None
    listed = words.split() if isinstance(words, str) else words
    check_type("show", name, listed, (list, tuple), "strings or None")
    for word in listed:
        check_type("show", name, word, str, "strings or None")
    return list(listed)


def _of_weights(
    weights: Any, argument: str, blocked: Tensor | None, facts: Facts
) -> dict[str, Any]:
    """Pictures by the names of their layers."""
    if isinstance(weights, Tensor):
        layers: Mapping[str, Any] = {"": weights}
    elif isinstance(weights, Mapping):
        layers = {str(name): layer for name, layer in weights.items()}
        if len(layers) < len(weights):
            raise ValueError(
                f"show: {argument} must have a name for each layer, got some names twice"
            )
    else:
        words = "weights, a sequence or mapping of weights, or a module"
        check_type("show", argument, weights, (list, tuple), words)
        layers = {f"layer {i}": layer for i, layer in enumerate(weights)}
    if not layers:
        raise ValueError(f"show: {argument} must hold weights, got none")
    operator = pictures().picture_of_weights.default
    found = {}
    for name, layer in layers.items():
        check_type("show", argument, layer, Tensor, "tensors")
        found[name] = call(operator, layer, blocked, facts.text(name, ""))
    return found


def _check_names(yours: dict[str, Any], reference: dict[str, Any]) -> None:
    if differing := sorted(yours.keys() ^ reference.keys()):
        raise ValueError(
            "show: reference must have the names of subject, got "
            f"{', '.join(map(repr, differing))} in one of them"
        )


def _less(yours: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The differences of layers of one name, or else of one place."""
    if len(yours) != len(reference):
        raise ValueError(
            f"show: reference must have as many layers, {len(yours)}, got "
            f"{len(reference)}"
        )
    operator = pictures().picture_difference.default
    names = yours if yours.keys() == reference.keys() else reference
    pairs = zip(yours.items(), (reference[name] for name in names), strict=True)
    return {name: call(operator, own, other) for (name, own), other in pairs}
