# SPDX-License-Identifier: MIT
"""How pictures of `multihead show` are laid out: no letters on others, colours that
tell weights apart, a page whose map stays in sight."""

from __future__ import annotations

import json

import pytest
import test_show
import torch
from layout import collisions, lettered, outside, overlap
from pictures import after, shown
from test_show import SCRIPTS, dump, random_weights
from test_show_pictures import Drawn, needs_browser, page_of

pytestmark = test_show.pytestmark

ARABIC = "مرحبا بالعالم"


def svg_of(tmp_path, tensors: dict, **facts: str) -> str:
    return shown(dump(tmp_path, tensors, **facts), "--svg", "-")


def test_letters_on_others_are_found():
    """The test itself: slanted ones beside each other, and one that is crossed."""
    text = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="99" height="99">'
        '<text transform="translate(20 60) rotate(-45)">one</text>'
        '<text transform="translate(37 60) rotate(-45)">two</text>'
        '<text x="38" y="50">three</text><text x="90" y="90">edge</text></svg>'
    )
    assert collisions(text) == [("two", "three")]
    assert outside(text) == ["edge"]
    one, *_ = lettered(text)
    assert overlap(one, one)


@pytest.mark.parametrize("heads", [1, 2, 12, 144])
@pytest.mark.parametrize("length", [1, 2, 13, 24, 300])
def test_no_letters_stand_on_others(tmp_path, heads, length):
    facts = {"tokens": json.dumps(SCRIPTS)} if length == 13 else {}
    svg = svg_of(tmp_path, {"weights": random_weights(heads, length, length)}, **facts)
    assert collisions(svg) == [] and outside(svg) == []


@pytest.mark.parametrize("token", ["W" * 14, "日本語日本語日本", "👩‍👩‍👧" * 7, ARABIC])
@pytest.mark.parametrize("heads", [1, 4])
def test_nor_where_tokens_are_wide(tmp_path, heads, token):
    weights = {"weights": random_weights(heads, 3, 3)}
    svg = svg_of(tmp_path, weights, tokens=json.dumps([token] * 3), title=9 * ARABIC)
    assert collisions(svg) == [] and outside(svg) == []


@pytest.mark.parametrize("heads", [4, 64])
def test_nor_beside_stages_and_groups(tmp_path, heads):
    query, key = torch.randn(16, heads, 40, 128), torch.randn(16, heads // 2, 40, 128)
    svg = svg_of(tmp_path, {"query": query, "key": key}, is_causal="true")
    assert collisions(svg) == [] and outside(svg) == []


def causal(length: int) -> torch.Tensor:
    """Every query gives the same weight to each key that it sees."""
    weights = torch.ones(length, length).tril()
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("masked", [True, False])
def test_a_query_of_one_key_does_not_stretch_the_colours(tmp_path, masked):
    """The first of a causal head gives 1 to itself, whatever the others do."""
    tensors = {"weights": causal(6)}
    if masked:
        tensors["mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
    path = dump(tmp_path, tensors, mask="blocked")
    svg = tmp_path / "picture.svg"
    shown(path, "--svg", svg)
    drawn = Drawn(svg)
    ends = [text for text in drawn.texts() if text.endswith(" %")]
    assert ends == ["0 %", "3.1 %", "12 %", "28 %", "≥ 50 %"]
    assert drawn.cells[0, 0] == drawn.cells[1, 0]
    assert "≥0.5" in shown(path) and ">=0.5" in shown(path, "--color", "ascii")


def test_colours_go_to_1_where_a_choice_is_that_clear(tmp_path):
    svg = tmp_path / "picture.svg"
    shown(dump(tmp_path, {"weights": torch.eye(4)}), "--svg", svg)
    assert "100 %" in Drawn(svg).texts()
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    shown(dump(tmp_path, {"weights": weights}), "--svg", svg)
    assert "≥ 75 %" in Drawn(svg).texts()


@needs_browser
@pytest.mark.parametrize("is_masked", [True, False])
def test_the_page_has_a_box_for_the_mask_where_there_is_one(tmp_path, is_masked):
    facts = {"is_causal": "true"} if is_masked else {}
    query = torch.randn(1, 2, 5, 4)
    page = page_of(
        tmp_path, dump(tmp_path, {"query": query, "key": query + 1}, **facts)
    )
    script = """
      report("shown", element("mask").checkVisibility());
      report("high", element("high").textContent.startsWith("≥"));
    """
    found = after(page, script)
    assert found == {"shown": str(is_masked).lower(), "high": str(is_masked).lower()}


@needs_browser
@pytest.mark.parametrize("width", [800, 1100, 1600])
@pytest.mark.parametrize("heads", [2, 144])
def test_the_map_stays_in_sight_while_heads_are_scrolled(tmp_path, width, heads):
    page = page_of(tmp_path, dump(tmp_path, {"weights": random_weights(heads, 24, 24)}))
    script = """
      scrollTo(0, 1e6);
      const at = map.getBoundingClientRect(), last = element("heads").lastChild;
      report("top", at.top); report("bottom", at.bottom); report("left", at.left);
      report("right", at.right); report("window", innerHeight);
      report("beside", last.getBoundingClientRect().left);
      report("excess", document.documentElement.scrollWidth - innerWidth);
    """
    found = {
        name: float(x)
        for name, x in after(page, script, f"--window-size={width},900").items()
    }
    assert 0 <= found["top"] < found["bottom"] <= found["window"]
    assert found["right"] <= found["beside"] and found["excess"] <= 0
