# SPDX-License-Identifier: MIT
"""A sheet to draw cells, arrows and words on, and its SVG.

The sheet brings its own background, in the reader's light or dark scheme, so that its
words can be read on any page.
"""

from html import escape

# class: (property, in light, in dark)
COLOURS = {
    "sheet": ("fill", "#ffffff", "#161b22"),
    "edge": ("stroke", "#d0d7de", "#3d444d"),
    "text": ("fill", "#1f2328", "#f0f6fc"),
    "quiet": ("fill", "#59636e", "#9198a1"),
    "good": ("fill", "#116329", "#57d364"),
    "bad": ("fill", "#b3261e", "#ff8a80"),
    "line": ("stroke", "#59636e", "#9198a1"),
    "head0": ("fill", "#cfe3ff", "#1f4b85"),
    "head1": ("fill", "#ffdfb3", "#7a4a0c"),
    "seen": ("fill", "#cfe3ff", "#1f4b85"),
    "blocked": ("fill", "#e3e6ea", "#2b3138"),
    "plain": ("fill", "#f6f8fa", "#21262d"),
}
FONT = "system-ui,-apple-system,'Segoe UI',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


def style() -> str:
    """The rules of all classes, and how they change in the dark."""

    def rules(scheme: int) -> str:
        return "".join(f".{k}{{{v[0]}:{v[scheme]}}}" for k, v in COLOURS.items())

    shapes = (
        f"text{{font:14px {FONT}}}.title{{font-weight:600;font-size:15px}}"
        f".code{{font:13px {MONO}}}.cell{{font:12.5px {MONO};text-anchor:middle}}"
        ".small{font-size:12.5px}.edge{stroke-width:1}"
        ".line{stroke-width:1.3;fill:none}"
    )
    dark = f"@media(prefers-color-scheme:dark){{{rules(2)}}}"
    return f"<style>{shapes}{rules(1)}{dark}</style>"


class Drawing:
    """Shapes in the order in which they are drawn; (x, y) is a shape's upper left."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.size = (width, height)
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(description)}</title>",
            style(),
            f'<rect class="sheet edge" x="0.5" y="0.5" width="{width - 1}" '
            f'height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "text") -> None:
        """kind: classes. Words begin at x, those of a cell have their middle there."""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'
        )

    def cell(
        self,
        place: tuple[float, float],
        size: tuple[float, float],
        kind: str,
        words: str,
    ) -> None:
        (x, y), (width, height) = place, size
        self.parts.append(
            f'<rect class="{kind} edge" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}"/>'
        )
        self.text(x + width / 2, y + height / 2 + 4.5, words, "text cell")

    def matrix(
        self,
        place: tuple[float, float],
        kinds: list[list[str]],
        words: list[list[str]],
        size: tuple[float, float] = (34, 26),
    ) -> None:
        """A cell for each element; rows go down."""
        x, y = place
        for i, row in enumerate(words):
            for j, word in enumerate(row):
                at = (x + j * size[0], y + i * size[1])
                self.cell(at, size, kinds[i][j], word)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """To (x2, y2), from the left."""
        bend = (x1 + x2) / 2
        self.parts.append(
            f'<path class="line" d="M{x1:g} {y1:g}C{bend:g} {y1:g} {bend:g} {y2:g} '
            f'{x2:g} {y2:g}m-7 -4.5l7 4.5l-7 4.5"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"
