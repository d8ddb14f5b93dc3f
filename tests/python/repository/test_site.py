# SPDX-License-Identifier: MIT
"""The site of `./run docs`: what its check of links finds, and that its navigation names
every page. That the site builds, ./run docs says."""

import ast
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
CHECK = ROOT / "docs/site/check_links.py"

PAGE = """<link rel="stylesheet" href="style.css"><h1 id="top">Title</h1>
<a href="#top">up</a> <a href="other%20page.html#there">there</a>
<a href="https://pytorch.org">elsewhere</a> <iframe src="javascript:void(0)"></iframe>
"""
BROKEN = {
    '<a href="gone.html">': "gone.html leads to no file",
    '<a href="folder">': "folder leads to no file",
    '<img src="gone.svg">': "gone.svg leads to no file",
    '<a href="#nowhere">': "#nowhere leads to no place of its page",
    '<a href="other%20page.html#top">': "#top leads to no place of its page",
    '<script src="https://cdn/x.js">': "https://cdn/x.js is loaded from elsewhere",
    '<link rel="stylesheet" href="//fonts/x.css">': "//fonts/x.css is loaded from",
}


@pytest.fixture
def checked(tmp_path):
    """The status and the words of a check of a small site with `more` on its page."""

    def run(more: str = "") -> tuple[int, str]:
        (tmp_path / "folder").mkdir()
        (tmp_path / "style.css").write_text("")
        (tmp_path / "other page.html").write_text('<p id="there">')
        (tmp_path / "index.html").write_text(PAGE + more)
        done = subprocess.run(
            [sys.executable, CHECK, tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    return run


def test_whole_links_pass(checked):
    assert checked() == (0, "")


@pytest.mark.parametrize("tag", BROKEN)
def test_a_broken_link_is_found(checked, tag):
    status, told = checked(tag)
    assert status == 1 and BROKEN[tag] in told and len(told.splitlines()) == 1


def test_the_navigation_has_every_page():
    text = (ROOT / "docs/site/conf.py").read_text()
    (navigation,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "NAVIGATION"
    )
    named = [page for pages in navigation.values() for page in pages]
    assert len(set(named)) == len(named)
    assert {"Start", "Recipes", "API", "Parity", "Kernels", "Learn"} <= set(navigation)
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/site/*.md")]
    pages = {p.relative_to(ROOT).with_suffix("").as_posix() for p in found} - {"README"}
    assert pages <= set(named)
    assert all((ROOT / f"{page}.md").exists() for page in named)


def test_the_command_fails_on_warnings_and_links():
    """Sphinx, Doxygen and Pydoctor, and the check of links at the end."""
    shell = (ROOT / "tools/lint.sh").read_text()
    assert "--fail-on-warning" in shell and "check_links.py" in shell
    assert "FAIL_ON_WARNINGS" in (ROOT / "docs/Doxyfile").read_text()
    assert "warnings-as-errors = true" in (ROOT / "pyproject.toml").read_text()


def test_badges_say_what_the_sources_say():
    path = ROOT / "docs/badges/write.py"
    files = runpy.run_path(str(path))["files"]()
    assert len(files) == 4
    for path, text in files.items():
        assert path.read_text() == text, "python docs/badges/write.py"
        assert f"(docs/badges/{path.name})" in (ROOT / "README.md").read_text()


def test_the_readme_says_early_what_a_stranger_asks():
    """A number in the promise, then code, installation, platform and limits; and each
    entry of the contents is a heading."""
    text = (ROOT / "README.md").read_text()
    promise = re.search(r"^\*\*(.+?)\*\*$", text, re.MULTILINE | re.DOTALL)[1]
    assert re.search(r"\d", promise)
    lines = text.splitlines()[:60]
    first = {
        word: next(i for i, line in enumerate(lines) if word in line)
        for word in ("```python", "pip install", "Runs on", "When not to", "Contents")
    }
    assert list(first.values()) == sorted(first.values())
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    places = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    contents = text[text.index("**Contents**") : text.index("![Before")]
    linked = re.findall(r"\(#([^)]+)\)", contents)
    assert len(linked) == 10 and set(linked) <= places
