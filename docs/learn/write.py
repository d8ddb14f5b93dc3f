# SPDX-License-Identifier: MIT
"""./run python docs/learn/write.py: draws the figures of docs/learn.md anew, and writes
into the page what stands between its markers, the code of examples/learn and what
examples/learn/by_hand.py prints. A test says when that is due.
"""

import ast
import contextlib
import importlib.util
import io
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/learn"
PAGE = ROOT / "docs/learn.md"
LEARN = ROOT / "examples/learn"
MARKED = re.compile(r"(<!-- written: (.+?) -->\n).*?(<!-- until here -->)", re.DOTALL)


def load(path: pathlib.Path):
    """The module of a file, whose neighbours it may import."""
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def python_source(name: str) -> str:
    """A function or class of attention.py."""
    text = (LEARN / "attention.py").read_text()
    (found,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == name)
    return ast.get_source_segment(text, found) + "\n"


def cpp_source(name: str) -> str:
    """A function or struct of attention.h, with the comment above it."""
    parts = re.split(r"\n\n(?! )", (LEARN / "attention.h").read_text())
    starts = re.compile(rf"^(inline .*?\b{name}\(|struct {name}\b)", re.MULTILINE)
    (found,) = (part for part in parts if starts.search(part))
    return found + "\n"


def printed(section: str) -> str:
    """What by_hand.py prints in one of its sections."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        load(LEARN / "by_hand.py").main()
    parts = re.split(r"^== (\w+)\n", output.getvalue(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))[section]


def block(name: str) -> str:
    """What belongs between the markers of that name: "by_hand.py forward"."""
    file, *names = name.split()
    kinds = {
        "attention.py": ("python", python_source, "\n\n\n"),
        "attention.h": ("cpp", cpp_source, "\n\n"),
        "by_hand.py": ("", printed, "\n"),
    }
    language, source, between = kinds[file]
    text = between.join(source(each).rstrip("\n") for each in names)
    return f"```{language}\n{text}\n```\n"


def files() -> dict[pathlib.Path, str]:
    """Every file that is written here, and what it holds."""
    figures = load(FOLDER / "figures.py").FIGURES
    found = {FOLDER / f"{name}.svg": draw() for name, draw in figures.items()}
    found[PAGE] = MARKED.sub(
        lambda match: match[1] + block(match[2]) + match[3], PAGE.read_text()
    )
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
