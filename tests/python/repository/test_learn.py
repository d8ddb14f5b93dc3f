# SPDX-License-Identifier: MIT
"""docs/learn.md: its figures and what stands between its markers are what the programs
that write them say today."""

import importlib.util
import itertools
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = load(ROOT / "docs/learn/write.py")
FILES = writer.files()
FIGURES = [path for path in FILES if path.suffix == ".svg"]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_is_written_is_up_to_date(path):
    assert path.read_text() == FILES[path], "./run python docs/learn/write.py"


def test_figures_and_blocks_are_found():
    drawn = {path.name for path in FIGURES}
    assert drawn == {path.name for path in (ROOT / "docs/learn").glob("*.svg")}
    page = (ROOT / "docs/learn.md").read_text()
    assert all(f"(learn/{name})" in page for name in drawn)
    marks = re.findall(r"<!-- written: (.*?) -->", page)
    assert len(marks) > 10 and page.count("<!-- until here -->") == len(marks)
    assert "0.2840   0.1400   0.5760" in page  # the first row of the weights


def test_a_change_of_a_program_is_seen(monkeypatch):
    by_hand = writer.load(ROOT / "examples/learn/by_hand.py")
    monkeypatch.setattr(by_hand, "K", [[1, 1], [0, 2], [1, 0]])
    monkeypatch.setattr(writer, "load", lambda path: by_hand)
    assert "0.2840   0.1400   0.5760" not in writer.block("by_hand.py forward")


def test_by_hand_ends_where_its_gradient_is_wrong(monkeypatch):
    by_hand = writer.load(ROOT / "examples/learn/by_hand.py")
    right = by_hand.backward
    wrong = lambda *given: (2 * right(*given)[0], *right(*given)[1:])  # noqa: E731
    monkeypatch.setattr(by_hand, "backward", wrong)
    with pytest.raises(AssertionError, match="not close"):
        by_hand.main()


def test_words_stand_out_in_light_and_dark():
    """By 4.5 to 1 from each ground that they stand on, as WCAG asks of text."""
    colours = writer.load(ROOT / "docs/learn/drawing.py").COLOURS
    grounds = ("sheet", "head0", "head1", "seen", "blocked", "plain")
    pairs = [("text", ground) for ground in grounds]
    pairs += [(ink, "sheet") for ink in ("quiet", "good", "bad")]
    for scheme, pair in itertools.product((1, 2), pairs):
        dark, light = sorted(luminance(colours[kind][scheme]) for kind in pair)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (pair, scheme)


@pytest.mark.parametrize("path", FIGURES, ids=name_of)
def test_words_stay_on_the_sheet(path):
    picture = ElementTree.fromstring(path.read_text())
    width, height = float(picture.get("width")), float(picture.get("height"))
    for text in picture.iterfind("{*}text"):
        kinds = text.get("class").split()
        each = {"code": 7.9, "title": 8.6}.get(kinds[-1], 6.9)  # pixels a letter
        start = float(text.get("x"))
        end = start + len(text.text or "") * each / (2 if "cell" in kinds else 1)
        assert 0 <= start and end <= width, text.text
        assert 0 < float(text.get("y")) < height


def luminance(colour):
    """WCAG's relative luminance of "#rrggbb"."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear))
