# SPDX-License-Identifier: MIT
"""The pictures of `multihead show`: SVG, PNG, and the page in a real browser."""

from __future__ import annotations

import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from pictures import (
    BROWSER,
    COMMAND,
    after,
    can_draw_png,
    decode_png,
    screenshot,
    show,
    shown,
)
from test_show import SCRIPTS, dump, layer_dump, random_weights

pytestmark = pytest.mark.skipif(
    not COMMAND.exists(),
    reason=f"{COMMAND} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)
needs_librsvg = pytest.mark.skipif(
    not can_draw_png(), reason="no librsvg-2.so.2 is there (Debian: librsvg2-2)"
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome is there"
)

SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """The first map of an SVG: where it lies, and its cells' colours."""

    def __init__(self, path: pathlib.Path) -> None:
        self.root = ElementTree.fromstring(path.read_text())
        group = next(self.root.iter(f"{SVG}g"))
        numbers = [float(x) for x in re.findall(r"[\d.]+", group.get("transform"))]
        x, middle, self.width, self.height = numbers
        self.left, self.top = x, middle - self.height / 2
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        for path in group:
            colour = tuple(bytes.fromhex(path.get("stroke")[1:]))
            runs = re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d"))
            for column, row, count in (map(int, run) for run in runs):
                for i in range(column, column + count):
                    self.cells[row, i] = colour

    def texts(self) -> list[str]:
        return ["".join(text.itertext()) for text in self.root.iter(f"{SVG}text")]


def light(colour) -> float:
    return 0.2 * colour[0] + 0.7 * colour[1] + 0.1 * colour[2]


def example(folder: pathlib.Path) -> tuple[pathlib.Path, torch.Tensor]:
    """Weights (6, 6) with a causal mask, in distinct steps."""
    weights = torch.ones(6, 6).tril().cumsum(1).tril()
    weights /= weights.sum(-1, keepdim=True)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    tokens = json.dumps(["zero", "one", "two", "three", "four", "five"])
    path = dump(
        folder, {"weights": weights, "mask": mask}, mask="blocked", tokens=tokens
    )
    return path, weights


def test_svg_has_every_cell(tmp_path):
    path, weights = example(tmp_path)
    svg = tmp_path / "picture.svg"
    assert shown(path, "--svg", svg) == ""
    drawn = Drawn(svg)
    assert set(drawn.cells) == {(i, j) for i in range(6) for j in range(i + 1)}
    ordered = sorted(drawn.cells, key=lambda cell: weights[cell])
    lights = [light(drawn.cells[cell]) for cell in ordered]
    assert lights == sorted(lights) and lights[-1] > 200 > 100 > lights[0]
    # The blocked triangle: a run in each row but the last.
    hatched = [p for p in drawn.root.iter(f"{SVG}path") if "url(" in p.get("fill", "")]
    assert hatched[0].get("d").count("M") == 5
    texts = drawn.texts()
    assert {"zero", "five", "blocked", "100", "0 %", "≥ 67 %"} <= set(texts)
    assert "http" not in svg.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("heads", [1, 2, 12, 64])
def test_svg_has_every_head(tmp_path, heads):
    svg = tmp_path / "picture.svg"
    shown(dump(tmp_path, {"weights": random_weights(heads, 9, 14)}), "--svg", svg)
    drawn = Drawn(svg)
    texts = drawn.texts()
    assert all(f"head {head}" in texts for head in range(heads))
    groups = list(drawn.root.iter(f"{SVG}g"))
    assert len(groups) == (heads > 1) + heads + 1  # the last is the scale
    width, height = (float(drawn.root.get(side)) for side in ("width", "height"))
    for text in drawn.root.iter(f"{SVG}text"):
        if text.get("x"):
            assert 0 < float(text.get("x")) < width
            assert 0 < float(text.get("y")) < height


def test_svg_shows_stages_and_groups(tmp_path):
    svg = tmp_path / "picture.svg"
    shown("--svg", svg)
    texts = Drawn(svg).texts()
    assert {"heads", "scores", "context", "1 × 4 × 12 × 12", "q·kᵀ / √16"} <= set(texts)
    assert {"query heads", "key/value heads"} <= set(texts)


def test_svg_takes_any_token(tmp_path):
    path = dump(
        tmp_path, {"weights": random_weights(1, 13, 13)}, tokens=json.dumps(SCRIPTS)
    )
    svg = tmp_path / "picture.svg"
    shown(path, "--svg", svg)
    texts = Drawn(svg).texts()
    for token in ("日本語", "שלום", "नमस्ते", "<b>&\"'", "esc\\x1b[31m"):
        assert token in texts
    assert "a_very_long_t…" in texts and '""' in texts


def test_difference_is_white_where_nothing_differs(tmp_path):
    path, _ = layer_dump(tmp_path, causal=True)
    svg = tmp_path / "picture.svg"
    shown(path, "--difference", "--svg", svg)
    assert all(light(colour) > 225 for colour in Drawn(svg).cells.values())
    path, _ = layer_dump(tmp_path, causal=False)
    shown(path, "--difference", "--svg", svg)
    cells = Drawn(svg).cells
    assert cells[0, 0][2] > cells[0, 0][0] + 50  # blue: too little
    assert cells[0, 3][0] > cells[0, 3][2] + 20  # red: too much


@needs_librsvg
@pytest.mark.parametrize("length", [1, 6, 500])
def test_png_has_the_colours_of_the_svg(tmp_path, length):
    path = dump(tmp_path, {"weights": random_weights(2, length, length)})
    svg, png = tmp_path / "picture.svg", tmp_path / "picture.png"
    shown(path, "--svg", svg, "--png", png)
    drawn, image = Drawn(svg), decode_png(png.read_bytes())
    assert image.shape[1] == 2 * float(drawn.root.get("width"))
    assert (image[0, 0] == 255).all()
    assert len(drawn.cells) >= min(length, 50) ** 2
    for (row, column), colour in drawn.cells.items():
        y = int(2 * (drawn.top + (row + 0.15) * drawn.height))
        x = int(2 * (drawn.left + (column + 0.15) * drawn.width))
        assert np.abs(image[y + 1, x + 1] - np.array(colour)).max() <= 6


@needs_librsvg
def test_png_hatches_what_is_blocked_and_has_letters(tmp_path):
    path, _ = example(tmp_path)
    svg, png = tmp_path / "picture.svg", tmp_path / "picture.png"
    shown(path, "--svg", svg, "--png", png)
    drawn, image = Drawn(svg), decode_png(png.read_bytes())
    top, left = int(2 * drawn.top), int(2 * drawn.left)
    cell = int(2 * drawn.width)
    blocked = image[top + 2 : top + cell - 2, left + 3 * cell : left + 4 * cell]
    grey = (blocked.max(-1) < 200).mean()
    assert 0.1 < grey < 0.3 and (blocked > 240).mean() > 0.6  # lines have soft edges
    labels = image[top : top + 6 * cell, 56 : left - 16]
    assert (labels.max(-1) < 100).sum() > 200


@needs_librsvg
def test_png_turns_only_what_is_read_from_the_right(tmp_path):
    """Words stand in the order of the SVG, whose line begins on the left.

    Letters of one shape at one place differ by the rounding of their soft edges.
    """

    def title(name: str) -> np.ndarray:
        path = dump(tmp_path, {"weights": random_weights(1, 2, 2)})
        path.rename(tmp_path / name)
        shown(name, "--png", "picture.png", cwd=tmp_path)
        image = decode_png((tmp_path / "picture.png").read_bytes())
        return image[40:96, 56:, 0].astype(int)

    latin, mixed = title("layer 12.safetensors"), title("layer 12 שלום.safetensors")
    assert (latin[:, :140] < 128).sum() > 500  # a font is there
    assert (latin[:, :140] == mixed[:, :140]).all()
    hebrew, mixed = title("שלום"), title("שלום layer 12")
    assert (hebrew[:, :70] < 128).sum() > 500
    assert np.abs(hebrew[:, :70] - mixed[:, :70]).max() <= 4


@needs_librsvg
def test_long_tokens_stay_inside_and_apart(tmp_path):
    """Of letters as wide as W; the caption of the map is not among them."""
    tokens = ["W" * 14, "mmmm", "WWWWWWWW", "iiii"]
    path = dump(
        tmp_path, {"weights": random_weights(1, 4, 4)}, tokens=json.dumps(tokens)
    )
    png, svg = tmp_path / "picture.png", tmp_path / "picture.svg"
    shown(path, "--png", png, "--svg", svg)
    image, drawn = decode_png(png.read_bytes()), Drawn(svg)
    assert (image[:, :16] == 255).all()  # nothing is cut at the edge
    name = next(t for t in drawn.root.iter(f"{SVG}text") if t.text == "head 0")
    row = 2 * int(float(name.get("y")))
    right = 2 * int(drawn.left) + 2 * 110  # of the caption
    assert (image[row - 16 : row, right:] == 255).all()
    assert re.fullmatch(
        r"\d\.\d keys", drawn.texts()[drawn.texts().index("head 0") + 1]
    )


def test_png_goes_to_standard_output_and_nothing_is_left_of_a_failure(tmp_path):
    assert shown("--svg", "-").startswith("<svg ")
    assert show("--svg", tmp_path / "a.svg", "--head", 7).returncode == 2
    assert list(tmp_path.iterdir()) == []


@needs_librsvg
def test_without_a_font_png_is_refused(tmp_path):
    config = tmp_path / "fonts.conf"
    config.write_text("<fontconfig></fontconfig>")
    result = show("--png", tmp_path / "a.png", FONTCONFIG_FILE=str(config))
    assert result.returncode == 2 and not (tmp_path / "a.png").exists()
    assert "show: --png must have a font to write with, got none" in result.stderr


def test_without_librsvg_png_alone_is_refused(tmp_path):
    (tmp_path / "librsvg-2.so.2").write_text("")
    there = {"LD_LIBRARY_PATH": str(tmp_path)}
    result = show("--png", tmp_path / "a.png", **there)
    assert result.returncode == 2 and result.stdout == ""
    assert "show: --png must have librsvg" in result.stderr
    assert "librsvg2-2); --svg needs nothing" in result.stderr
    assert shown("--svg", "-", **there).startswith("<svg ")


# ---- The page ---------------------------------------------------------------

#: Reports where the cells of the large map lie.
PLACES = """
  const box = map.getBoundingClientRect(), {left, above, cell} = measure();
  report("left", box.left + left); report("top", box.top + above);
  report("cell", cell);
"""


def page_of(folder: pathlib.Path, *arguments: object) -> pathlib.Path:
    page = folder / "page.html"
    shown(*arguments, "--html", page)
    return page


def test_page_asks_for_nothing(tmp_path):
    text = page_of(tmp_path).read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=|<link", text)


@needs_browser
def test_page_draws_the_weights(tmp_path):
    path, _ = example(tmp_path)
    page, svg = page_of(tmp_path, path), tmp_path / "picture.svg"
    shown(path, "--svg", svg)
    place = {name: float(x) for name, x in after(page, PLACES).items()}
    image = screenshot(page)
    for (row, column), colour in Drawn(svg).cells.items():
        y = int(place["top"] + (row + 0.5) * place["cell"])
        x = int(place["left"] + (column + 0.5) * place["cell"])
        assert np.abs(image[y, x] - np.array(colour)).max() <= 6
    y, x = (int(place[side] + 0.5 * place["cell"]) for side in ("top", "left"))
    hatched = image[y - 10 : y + 10, x + int(3 * place["cell"]) :][:, :20]
    assert hatched.min() < 190 and (hatched == 255).mean() > 0.4


@needs_browser
def test_page_answers_pointer_keyboard_and_choices(tmp_path):
    path = dump(tmp_path, {"weights": random_weights(2, 3, 5, 5)})
    page = page_of(tmp_path, path)
    found = after(
        page,
        PLACES
        + """
        const point = (row, column) => map.dispatchEvent(new PointerEvent("pointermove",
          {clientX: box.left + left + (column + 0.5) * cell,
           clientY: box.top + above + (row + 0.5) * cell}));
        point(1, 2); report("tip", tip.textContent); report("seen", !tip.hidden);
        point(-9, 0); report("outside", tip.hidden);
        for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"])
          map.dispatchEvent(new KeyboardEvent("keydown", {key}));
        report("key", element("said").textContent);
        const choose = (id, value) => {
          element(id).value = value; element(id).dispatchEvent(new Event("change")); };
        choose("head", 2); report("head", element("name").textContent);
        report("pressed", element("heads").children[2].getAttribute("aria-pressed"));
        report("links", element("links").rows.length);
        choose("item", 1); report("hash", location.hash);
        element("heads").children[1].click(); report("clicked", element("name").textContent);
        """,
    )
    weights = random_weights(2, 3, 5, 5)
    said, value = found["tip"].split(": ")
    assert said == "1 → 2" and found["seen"] == "true"
    assert float(value) == pytest.approx(weights[0, :, 1, 2].mean().item(), rel=1e-3)
    assert found["outside"] == "true"
    assert found["key"].startswith("1 → 1: ")
    assert found["head"].startswith("head 1: entropy ") and found["pressed"] == "true"
    assert found["links"] == "3"
    assert found["hash"].replace("&amp;", "&") == "#item=1&panel=2&mask=1"
    assert found["clicked"].startswith("head 0: entropy ")


@needs_browser
def test_page_keeps_head_and_mask_in_its_address(tmp_path):
    page = page_of(tmp_path)
    place = {name: float(x) for name, x in after(page, PLACES).items()}
    y = int(place["top"] + 0.5 * place["cell"])
    x = int(place["left"] + 8.5 * place["cell"])
    with_mask, without = (
        screenshot(page, fragment=f"#panel=1&mask={mask}")[y - 8 : y + 8, x - 8 : x + 8]
        for mask in (1, 0)
    )
    assert (with_mask == 255).mean() > 0.4  # a hatched page
    assert without.max() < 100  # weight 0, in its colour
    with open(page) as text:
        assert "head 3" in text.read()


@needs_browser
def test_page_in_the_dark_with_any_token(tmp_path):
    tokens = [*SCRIPTS[:-1], "</script><script>document.title='x'</script>"]
    path = dump(
        tmp_path, {"weights": random_weights(1, 13, 13)}, tokens=json.dumps(tokens)
    )
    page = page_of(tmp_path, path)
    image = screenshot(page, "--blink-settings=preferredColorScheme=0")
    assert image[2, 2].max() < 40
    found = after(
        page,
        """
        report("title", document.title);
        report("last", item().keys.labels.at(-1).length);
        report("hebrew", item().keys.labels[1]);
        """,
    )
    assert found["title"] == str(path)
    assert found["last"] == str(len(tokens[-1])) and found["hebrew"] == "שלום"


@needs_browser
def test_captions_of_the_page_have_a_line_each(tmp_path):
    weights = torch.full((120, 2, 3000), 1 / 3000)
    page = page_of(tmp_path, dump(tmp_path, {"weights": weights}))
    found = after(
        page,
        """
        const spans = [...element("heads").querySelectorAll("span")];
        report("lines", Math.max(...spans.map(x => x.clientHeight)) / 14);
        report("excess", Math.max(...spans.map(x => x.scrollWidth - x.clientWidth)));
        report("gap", Math.min(...spans.filter(x => x.children.length == 2).map(x =>
          x.children[1].getBoundingClientRect().left -
          x.children[0].getBoundingClientRect().right)));
        report("last", spans.at(-1).textContent);
        """,
    )
    assert float(found["lines"]) < 1.5 and found["excess"] == "0"
    assert float(found["gap"]) >= 4
    assert found["last"] == "head 1193000 keys"


@needs_browser
def test_page_of_a_long_sequence(tmp_path):
    query = torch.randn(1, 64, 2048, 8)
    page = page_of(tmp_path, dump(tmp_path, {"query": query}, is_causal="true"))
    assert page.stat().st_size < 8e6
    found = after(
        page,
        PLACES + 'report("heads", element("heads").children.length);'
        'report("pooling", element("pooling").textContent);',
    )
    assert found["heads"] == "65"
    assert found["pooling"].startswith("a cell: 17 × 17 positions; the sum over")


@pytest.mark.parametrize("shape", [(2, 300, 9), (12, 6, 200), (120, 6, 600)], ids=str)
def test_names_of_narrow_maps_do_not_touch(tmp_path, shape):
    weights = random_weights(*shape) ** 0.1
    path = dump(tmp_path, {"weights": weights / weights.sum(-1, keepdim=True)})
    picture = ElementTree.fromstring(shown(path, "--svg", "-"))
    texts = list(picture.iterfind(".//{*}text"))
    for head in range(shape[0]):
        name = next(text for text in texts if text.text == f"head {head}")
        entropy = texts[texts.index(name) + 1]
        assert entropy.text.endswith(" keys")
        room = float(entropy.get("x")) - float(name.get("x"))
        assert room > 6 * len(name.text + " " + entropy.text)
    note = next(text for text in texts if text.text.startswith("a cell:"))
    assert "warning" not in note.get("class")
