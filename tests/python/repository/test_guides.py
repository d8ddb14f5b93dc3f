# SPDX-License-Identifier: MIT
"""What the guides name is there: files, rooms and identifiers.

Between backquotes, what has a slash or ends like a file is a path; a room that is yet to
come is listed here. Any other single word is an identifier, and stands in some source.
"""

import functools
import pathlib
import re

import pytest
from test_repository import CMAKE, CPP, files

ROOT = pathlib.Path(__file__).resolve().parents[3]
GUIDES = ["CONTRIBUTING.md", "docs/architecture.md"]
PLANNED = {"multihead/ops/cuda/", "multihead/kernels/cuda/"}
ELSEWHERE = ("build/", "torch/")  # made, or PyTorch's
PATH = re.compile(r"[\w.\-]*/[\w./\-]*|[\w\-]+\.(?:h|cpp|py|md|txt|toml|json)")
IDENTIFIER = re.compile(r"[A-Za-z_][\w.:]*")


@functools.cache
def words() -> frozenset[str]:
    """The words of all sources, these two files left out."""
    found: set[str] = set()
    for path in files(*CPP, *CMAKE, ".py", ".toml", ".json", "run"):
        if path != pathlib.Path(__file__):
            found.update(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


def missing(text: str) -> list[str]:
    """What `text` names between backquotes and is not there. Lines of shell that a fence
    holds are left out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found, place = [], ROOT
    for name in re.findall(r"`([^`\s]+)`", text):
        if PATH.fullmatch(name):
            here = (ROOT / name).exists() or (place / name).exists()
            if not here and name not in PLANNED and not name.startswith(ELSEWHERE):
                found.append(name)
            if "/" in name and (ROOT / name).is_dir():
                place = ROOT / name  # "`portable.h` there"
        elif IDENTIFIER.fullmatch(name) and name not in PLANNED:
            found += [w for w in re.findall(r"\w+", name) if w not in words()]
    return found


@pytest.mark.parametrize("guide", GUIDES)
def test_what_a_guide_names_is_there(guide):
    assert missing((ROOT / guide).read_text()) == []


def test_what_is_not_there_is_found():
    there = "`multihead/kernels/`, `kernels.h`, `Mask`, `softcap`"
    gone = ["multihead/ops/opengl/", "plan_of_nothing", "nothing.cpp"]
    assert missing(f"{there}, `{'`, `'.join(gone)}`") == gone
