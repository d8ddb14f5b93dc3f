# SPDX-License-Identifier: MIT
"""The page of a model in a real browser: its views, sizes, light and dark, notebooks."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from pictures import BROWSER, after, screenshot
from test_show_weights import random_weights
from torch import nn

import multihead

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome is there"
)

SCRIPTS = ["The", "שלום", "مرحبا", "日本語", "👩‍👩‍👧"]
DARK = "--blink-settings=preferredColorScheme=0"


def saved(shown: multihead.Pictures, folder: pathlib.Path) -> pathlib.Path:
    path = folder / "page.html"
    shown.save(path)
    return path


def model_of(layers: int, heads: int) -> multihead.Pictures:
    weights = {f"layer {i}": random_weights(heads, 5, 5) for i in range(layers)}
    return multihead.show(weights, tokens=SCRIPTS, title="مرحبا بالعالم 3")


@pytest.mark.parametrize("width", [800, 1100, 1600])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 144), (12, 12)], ids=str)
def test_nothing_is_cut_at_any_width(tmp_path, width, layers, heads):
    page = saved(model_of(layers, heads), tmp_path)
    views = ["map", "lines"] + (["entropies"] if layers > 1 else [])
    script = """
      const excess = [];
      for (const view of VIEWS) {
        element(`tab-${view}`).click();
        excess.push(document.documentElement.scrollWidth - innerWidth);
        for (const id of [view === "entropies" ? "entropies" : view, "heads", "links"])
          excess.push(element(id).getBoundingClientRect().left < 0 ? 1 : 0);
      }
      report("excess", Math.max(...excess));
      const at = element("entropies").hidden ? null : map;
      report("thumbnails", element("heads").querySelectorAll("canvas").length);
    """
    found = after(
        page, script.replace("VIEWS", str(views)), f"--window-size={width},900"
    )
    assert int(found["excess"]) <= 0
    paths = 3 if layers > 1 else 0  # the mean, rollout, flow
    panels = heads + (heads > 1)
    assert int(found["thumbnails"]) == (
        0 if layers * heads == 1 else layers * panels + paths
    )


@pytest.mark.parametrize("width", [800, 1600])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 144), (12, 12)], ids=str)
def test_screenshots(tmp_path, width, dark, layers, heads):
    """A map is there in its colours, labels of every script are, on a page as bright as
    the reader has chosen."""
    shown = model_of(layers, heads)
    page = saved(shown, tmp_path)
    options = [f"--window-size={width},1400", *([DARK] if dark else [])]
    place = after(
        page,
        """
        const box = map.getBoundingClientRect(), {left, above, cell} = measure();
        report("left", box.left + left); report("top", box.top + above);
        report("cell", cell); report("edge", box.left);
        report("first", shade(numbers(panel()).values[7]).join(" "));
        """,
        *options,
    )
    image = screenshot(page, *options).astype(int)
    assert (image[2, 2].max() < 40) if dark else (image[2, 2].min() > 250)
    top, left, cell = (float(place[x]) for x in ("top", "left", "cell"))
    middle = image[int(top + 1.5 * cell), int(left + 2.5 * cell)]  # row 1, column 2
    assert (
        np.abs(middle - np.array([int(x) for x in place["first"].split()])).max() <= 6
    )
    for row in range(5):  # the labels of queries
        y = int(top + row * cell)
        label = image[
            y + 4 : y + int(cell) - 4, int(float(place["edge"])) : int(left) - 4
        ]
        assert np.abs(label - image[2, 2]).max() > 60, SCRIPTS[row]


def test_thumbnails_are_enlarged_and_lines_follow_the_pointer(tmp_path):
    weights = [random_weights(1, 3, 5, 5), random_weights(2, 3, 5, 5)[1:]]
    page = saved(multihead.show(weights, tokens=SCRIPTS), tmp_path)
    found = after(
        page,
        """
        const shown = panel();
        element("heads").querySelectorAll("button")[6].click();
        report("name", element("name").textContent);
        report("weight", numbers(panel()).values[7]);
        element("tab-lines").click();
        const all = document.documentElement.dataset;
        report("all", all.lines);
        const point = (x, y) => {
          const box = lines.getBoundingClientRect();
          lines.dispatchEvent(new PointerEvent("pointermove",
            {clientX: box.left + x, clientY: box.top + y}));
        };
        point(10, 30); report("one", all.lines);
        lines.onpointerleave(); report("left", all.lines);
        lines.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown"}));
        report("pinned", `${state.pinned.side} ${state.pinned.at}`);
        report("hash", location.hash);
        element("tab-entropies").click();
        report("cells", element("entropies").querySelectorAll("td").length);
        element("entropies").querySelectorAll("td")[1].click();
        report("clicked", element("name").textContent);
        const path = data.layers.findIndex(x => x.path);
        choose(path, 1);
        report("path", element("name").textContent);
        report("caveat", element("remarks").textContent.slice(0, 16));
        """,
    )
    assert found["name"].startswith("layer 1, head 1: entropy ")
    expected = weights[1][0, 1].flatten()[7].item()
    assert float(found["weight"]) == pytest.approx(expected, rel=1e-5)
    assert int(found["one"]) <= 5 < int(found["all"]) == int(found["left"])
    assert found["pinned"] == "query 0" and "view=lines" in found["hash"]
    assert found["cells"] == "8" and found["clicked"].startswith("layer 0, head 1")
    assert found["path"] == "through 2 layers, rollout"
    assert found["caveat"] == "rollout and flow"


def test_features_of_a_head(tmp_path):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 5, 32)
    page = saved(multihead.show(layer, x, x, x, tokens=SCRIPTS), tmp_path)
    found = after(
        page,
        """
        report("mean", element("tab-features").hidden);
        choose(0, 2);
        element("tab-features").click();
        for (const [id, value] of [["query", 3], ["key", 1]]) {
          element(id).value = value; element(id).dispatchEvent(new Event("change")); }
        report("score", element("score").textContent);
        """,
    )
    assert found["mean"] == "true"
    q, k, _ = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(
        3, -1
    )
    score = (q[0, 3, 8:16] @ k[0, 1, 8:16] / 8**0.5).item()
    assert float(found["score"].split()[1].rstrip(":")) == pytest.approx(
        score, rel=1e-3
    )


def test_two_frames_of_a_notebook_do_not_meet(tmp_path):
    """Each as high as it needs to be, with a title and a state of its own."""
    one = multihead.show(random_weights(2, 5, 5), title="the first", tokens=SCRIPTS)
    two = model_of(12, 12)
    page = tmp_path / "notebook.html"
    frames = one._repr_html_() + two._repr_html_()
    page.write_text(f"<!doctype html><body>{frames}</body>")
    found = after(
        page,
        """
        onload = () => {
          const pages = [...document.querySelectorAll("iframe")].map(x => x.contentDocument);
          pages[0].querySelectorAll("#heads button")[1].click();
          report("titles", pages.map(x => x.title).join(" | "));
          report("names", pages.map(x => x.getElementById("name").textContent).join(" | "));
          report("excess", Math.max(...pages.map(x =>
            x.documentElement.scrollHeight - x.documentElement.clientHeight)));
          report("outer", document.documentElement.scrollWidth - innerWidth);
        };
        """,
    )
    assert found["titles"] == "the first | مرحبا بالعالم 3"
    assert found["names"].startswith("head 0: entropy ")
    assert found["names"].endswith("| layer 0, mean of 12 heads")
    assert int(found["excess"]) <= 0 and int(found["outer"]) <= 0


def test_every_line_begins_on_the_left(tmp_path):
    """As in SVG and PNG: its first word, of whatever script, stands left of the next."""
    weights = torch.full((1, 2, 2), 0.5)
    words, title = ["שלום", "مرحبا"], "שלום layer 12"
    shown = multihead.show({"עולם 3": weights, "b": weights}, tokens=words, title=title)
    found = after(
        saved(shown, tmp_path),
        """
        const begins = (node, word) => {
          const range = document.createRange(), at = node.textContent.indexOf(word);
          range.setStart(node.firstChild, at);
          range.setEnd(node.firstChild, at + word.length);
          return range.getBoundingClientRect().left;
        };
        const goesRight = (id, words) => {
          const places = words.map(word => begins(element(id), word));
          report(id, places.every((x, i) => i === 0 || places[i - 1] < x));
        };
        goesRight("title", ["שלום", "layer", "12"]);
        say(0, 1);
        goesRight("said", ["שלום", "→", "مرحبا", "0.5"]);
        goesRight("name", ["עולם", "head"]);
        """,
    )
    assert found == {"title": "true", "said": "true", "name": "true"}
