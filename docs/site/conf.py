# SPDX-License-Identifier: MIT
"""The site of `./run docs`: this repository's Markdown and notebooks as pages, with a
navigation and a search that need no network. The pages stay where they are and are read
as GitHub reads them; what only a site has, this file adds.
"""

import json
import os
import re

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

project = "multihead"
author = "The multihead authors"
version = release = os.environ.get("PROJECT_NUMBER", "")
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/faults/*.md",
    "docs/site/*.md",
    "benchmarks/**.md",
    "examples/learn/*.ipynb",
]
exclude_patterns = [".*", "build", "tests"]
myst_heading_anchors = 4
highlight_language = "none"

html_theme = "furo"
html_title = "multihead"
html_copy_source = False
html_show_sphinx = False
html_static_path: list[str] = []

# The heading of each part of the navigation, and its pages. A page that stands in no
# part is a warning of Sphinx.
NAVIGATION = {
    "Start": ["docs/install", "CHANGELOG"],
    "Recipes": [
        "docs/decoding",
        "docs/distributed",
        "docs/integration",
        "docs/edges",
        "docs/show",
        "docs/workplace",
    ],
    "Learn": ["docs/learn", "docs/textbook", "docs/explain", "docs/faults/README"],
    "API": ["docs/site/api"],
    "Parity": ["docs/parity"],
    "Kernels": ["docs/kernels", "benchmarks/README", "docs/architecture"],
    "Contribute": ["CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT"],
}
# Pages with a list of pages below them.
BELOW = {
    "docs/learn": "/examples/learn/*",
    "docs/faults/README": "*",
    "benchmarks/README": "results/*\ncall_cost",
}


def toctree(caption: str, pages: list[str]) -> str:
    lines = [":hidden:", *([f":caption: {caption}"] if caption else []), ":glob:", ""]
    return "\n\n```{toctree}\n" + "\n".join([*lines, *pages]) + "\n```\n"


def add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    """What GitHub's readers would see as a block of code."""
    if page == root_doc:
        parts = NAVIGATION.items()
        source[0] += "".join(toctree(caption, pages) for caption, pages in parts)
    if page in BELOW:
        source[0] += toctree("", [BELOW[page]])


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


class Notebook(MystParser):
    """Cells in order, those of code with what they show."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            parts.append(
                text if cell["cell_type"] == "markdown" else fenced("python", text)
            )
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                page = "".join(data.get("text/html", ()))
                shown = "".join(output.get("text", data.get("text/plain", ())))
                # A blank line would end a block of HTML.
                parts.append(re.sub(r"\n\s*\n", "\n", page) or fenced("", shown))
        super().parse("\n\n".join(parts), document)


class Site(StandaloneHTMLBuilder):
    """The README is the front page."""

    name = "html"

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        return super().get_target_uri("index" if docname == root_doc else docname, typ)

    def get_output_path(self, page_name: str, /):
        return super().get_output_path("index" if page_name == root_doc else page_name)


def setup(app: Sphinx) -> None:
    app.add_builder(Site, override=True)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebook)
    app.connect("source-read", add_navigation)
