# SPDX-License-Identifier: MIT
"""python docs/badges/write.py: draws the badges of the README from what the sources say, so
that they are true without a service. A test says when that is due.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLOUR = "#1f6feb"
LETTER = 6.6  # pixels, of Verdana at 11


def said(file: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text())
    assert found, f"{file} does not say {pattern}"
    return found[1]


def badge(label: str, value: str) -> str:
    widths = [round(LETTER * len(words)) + 14 for words in (label, value)]
    full = sum(widths)
    font = 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{full}" height="20" role="img">
<title>{label}: {value}</title>
<clipPath id="c"><rect width="{full}" height="20" rx="4"/></clipPath>
<g clip-path="url(#c)"><rect width="{full}" height="20" fill="#40474f"/>
<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{COLOUR}"/></g>
<g fill="#fff" text-anchor="middle" {font}>
<text x="{widths[0] / 2:g}" y="14">{label}</text>
<text x="{widths[0] + widths[1] / 2:g}" y="14">{value}</text></g>
</svg>
"""


def files() -> dict[pathlib.Path, str]:
    """Every badge, and what it holds."""
    values = {
        "licence": said("pyproject.toml", r'license = "(\w+)"'),
        "python": said("pyproject.toml", r'requires-python = ">=([\d.]+)"') + "+",
        "pytorch": said("CMakeLists.txt", r"find_package\(LibTorch ([\d.]+)") + "+",
        "cpp": said("CMakeLists.txt", r"cxx_std_(\d+)"),
    }
    labels = {"python": "Python", "pytorch": "PyTorch", "cpp": "C++"}
    folder = ROOT / "docs/badges"
    return {
        folder / f"{name}.svg": badge(labels.get(name, name), value)
        for name, value in values.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
