# SPDX-License-Identifier: MIT
"""python docs/site/check_links.py FOLDER: whether each link, picture and script of the
pages in FOLDER leads to a file and a place that are there, and nothing is loaded from the
network. Prints what is not so, and ends with 1.
"""

import functools
import pathlib
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

# What a browser loads by itself; a link to another site is followed by the reader only.
LOADED = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src")}
STYLES = ("stylesheet", "icon", "preload", "preconnect", "dns-prefetch")


class Page(HTMLParser):
    """The places of a page, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        for name in ("href", "src"):
            if name in given:
                self.links.append(given[name])
                if (tag, name) in LOADED or given.get("rel") in STYLES:
                    self.loaded.append(given[name])


@functools.cache
def read(path: pathlib.Path) -> Page:
    return Page(path.read_text(errors="replace"))


def problem(page: pathlib.Path, link: str) -> str:
    """What is wrong with a link of a page, or "" if nothing is."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "javascript"):
        return ""
    if parts.scheme or parts.netloc:
        return "is loaded from elsewhere" if link in read(page).loaded else ""
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir() or not target.exists():
        return "leads to no file"
    if target.suffix == ".html" and parts.fragment:
        if unquote(parts.fragment) not in read(target).places:
            return "leads to no place of its page"
    return ""


def problems(folder: pathlib.Path) -> list[str]:
    found = []
    # Pydoctor writes the page of a program, __main__, whatever is hidden, and its types are.
    pages = [page for page in folder.rglob("*.html") if "__main__" not in page.name]
    for page in sorted(pages):
        for link in dict.fromkeys(read(page).links):
            if told := problem(page, link):
                found.append(f"{page.relative_to(folder)}: {link} {told}")
    return found


if __name__ == "__main__":
    found = problems(pathlib.Path(sys.argv[1]).resolve())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
