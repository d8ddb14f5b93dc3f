# SPDX-License-Identifier: MIT
"""./run python docs/faults/write.py: writes the page of each fault anew, from the table
in diagnosis/. A test says when that is due."""

import json
import pathlib
import re
import sys

from multihead._library import diagnosis

FOLDER = pathlib.Path(__file__).parent
GROUPS = {
    "MH1": "Projections",
    "MH2": "Heads",
    "MH3": "Scale of the scores",
    "MH4": "Masks",
    "MH5": "Weights",
    "MH6": "Output",
    "MH9": "The program around it",
}
INTRODUCTION = """\
# What can be wrong with attention

Each fault that `multihead check` names has a name and a code, which are stable: they are
what JSON, SARIF and reviews show. [How a check knows](../explain.md), and
[how to run it on a whole checkout](../workplace.md).
"""
RECOGNISED = """\
It is named when the reference, with this one change at the step **{stage}**, returns what
the code returned, to rounding, in every case that was run, and nothing simpler does.
"""
OF_PROGRAM = """\
It is seen when the code runs.
"""


def catalogue() -> list[dict]:
    return json.loads(diagnosis().fault_catalogue())


def general(text: str) -> str:
    """Without the numbers that a report fills in: "sqrt(d) = sqrt({D})"."""
    text = text.replace("{D}", "d").translate({ord("{"): None, ord("}"): None})
    return re.sub(r"((?:sqrt\()?\w+\)?) = \1", r"\1", text)


def page(fault: dict) -> str:
    """One fault: what, why it hurts, how it is recognised, repair."""
    parts = [f"# {fault['code']}: {fault['name']}\n"]
    several = len(fault["places"]) > 1
    for place in fault["places"]:
        parts.append(general(place["sentence"]) + "\n")
    parts.append("## Why it hurts\n\n" + fault["hurts"] + "\n")
    parts.append("## How it is recognised\n")
    for place in fault["places"]:
        stage = place["stage"]
        parts.append(RECOGNISED.format(stage=stage) if stage else OF_PROGRAM)
        details = [general(detail) for detail in place["details"]]
        if details:
            parts.append("The report says which of these it is:\n")
            parts.append("\n".join(f"* {detail}" for detail in details) + "\n")
    parts.append("## Repair\n")
    for place in fault["places"]:
        where = f"At the step {place['stage']}: " if several else ""
        parts.append(where + general(place["remedy"]) + "\n")
    return "\n".join(parts)


def index(faults: list[dict]) -> str:
    parts = [INTRODUCTION]
    for prefix, title in GROUPS.items():
        rows = [
            f"| [{f['code']}]({f['name']}.md) | `{f['name']}` | "
            f"{general(f['places'][0]['sentence'])} |"
            for f in faults
            if f["code"].startswith(prefix)
        ]
        head = ["| code | name | |", "|---|---|---|"]
        parts.append(f"## {title}\n\n" + "\n".join([*head, *rows]) + "\n")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """The text of each file by its name."""
    faults = catalogue()
    return {"README.md": index(faults)} | {f"{f['name']}.md": page(f) for f in faults}


def main() -> int:
    new = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in new:
            old.unlink()
    for name, text in new.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
