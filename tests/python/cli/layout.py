# SPDX-License-Identifier: MIT
"""Where the letters of an SVG stand, about, and which of them stand on each other."""

from __future__ import annotations

import math
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

SVG = "{http://www.w3.org/2000/svg}"

# Of the size of letters: what they take above and below the line they stand on.
_ABOVE, _BELOW = 0.72, 0.18
_NARROW = frozenset("ijlftrI|'.,:;!()[]-/ ·")


@dataclass(frozen=True)
class Lettered:
    """A text of a picture and the four corners of its letters, which may be slanted."""

    text: str
    corners: tuple[tuple[float, float], ...]


def width(text: str, size: float) -> float:
    """As most fonts have it: this test draws nothing."""
    sum_ = 0.0
    for letter in re.sub(r"\u200d.", "", text):
        if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
            continue
        wide = unicodedata.east_asian_width(letter) in ("W", "F")
        sum_ += 1.0 if wide else 0.32 if letter in _NARROW else 0.58
    return sum_ * size


def lettered(svg: str) -> list[Lettered]:
    """The texts of an SVG that this library wrote, in their order."""
    found = []
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        words = "".join(text.itertext())
        classes = (text.get("class") or "").split()
        small = 11.0 if {"w", "b"} & set(classes) else 12.0
        styled = re.search(r"font-size:([\d.]+)px", text.get("style") or "")
        size = float(styled[1]) if styled else small
        numbers = re.findall(r"-?[\d.]+", text.get("transform") or "")
        x, y, *turn = map(float, numbers or (text.get("x"), text.get("y")))
        length = width(words, size)
        middle = {"middle", "w", "b"} & set(classes)
        left = -length if "end" in classes else -length / 2 if middle else 0.0
        angle = math.radians(turn[0]) if turn else 0.0
        corners = tuple(
            (
                x + a * math.cos(angle) - b * math.sin(angle),
                y + a * math.sin(angle) + b * math.cos(angle),
            )
            for a, b in (
                (left, -_ABOVE * size),
                (left + length, -_ABOVE * size),
                (left + length, _BELOW * size),
                (left, _BELOW * size),
            )
        )
        found.append(Lettered(words, corners))
    return found


def overlap(one: Lettered, other: Lettered) -> bool:
    """Whether no line parts the two: one along a side of either would, if any did."""
    for corners in (one.corners, other.corners):
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1]):
            normal = (y1 - y0, x0 - x1)
            spans = [
                [x * normal[0] + y * normal[1] for x, y in shape.corners]
                for shape in (one, other)
            ]
            if max(spans[0]) <= min(spans[1]) or max(spans[1]) <= min(spans[0]):
                return False
    return True


def collisions(svg: str) -> list[tuple[str, str]]:
    """Pairs of texts that stand on each other."""
    texts = [text for text in lettered(svg) if text.text.strip()]
    return [
        (one.text, other.text)
        for i, one in enumerate(texts)
        for other in texts[i + 1 :]
        if overlap(one, other)
    ]


def outside(svg: str) -> list[str]:
    """Texts that the edge of the picture cuts."""
    root = ElementTree.fromstring(svg)
    right, bottom = (float(root.get(side) or 0) for side in ("width", "height"))
    return [
        text.text
        for text in lettered(svg)
        if any(not (0 <= x <= right and 0 <= y <= bottom) for x, y in text.corners)
    ]
