# SPDX-License-Identifier: MIT
"""The code of a notebook."""

import json
import pathlib
import re
from collections.abc import Iterator


def code_of(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The text of each code cell and its name, as in "exercise.ipynb[2]". Lines that
    are IPython's own are left out.

    Raises ValueError where the file is no notebook.
    """
    for number, source in enumerate(_sources(path), 1):
        if not source.lstrip().startswith("%%"):
            text = re.sub(r"(?m)^[ \t]*[%!].*$", "", source)
            yield f"{path.name}[{number}]", text


def _sources(path: pathlib.Path) -> list[str]:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in code]
    except (KeyError, TypeError):
        reason = "no list of cells with a cell_type and a source"
    except (ValueError, RecursionError):
        reason = "no JSON"
    raise ValueError(
        f"check: target must be a notebook, got {path}, which has {reason}"
    )
