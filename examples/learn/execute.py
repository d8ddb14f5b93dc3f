# SPDX-License-Identifier: MIT
"""Runs the notebooks beside this file, without Jupyter.

    python examples/learn/execute.py [--write] [--as-is] NOTEBOOK

All cells run in order, as one program. A cell whose metadata say "exercise" is for the
reader; in its place runs the answer, the function or class of that name in attention.py
or answers.py. --as-is leaves such cells empty. The outputs are printed as JSON, a list for
each code cell; --write stores them in the notebook instead.
"""

import argparse
import ast
import contextlib
import io
import json
import linecache
import os
import pathlib
import sys
import traceback
import types

FOLDER = pathlib.Path(__file__).parent
ANSWERS = ("attention.py", "answers.py")


def answer(name: str) -> str:
    """The text of a function or class of that name."""
    for file in ANSWERS:
        text = (FOLDER / file).read_text()
        for node in ast.parse(text).body:
            if getattr(node, "name", None) == name:
                return ast.get_source_segment(text, node) or ""
    raise KeyError(f"{name} is in none of {', '.join(ANSWERS)}")


def shown(value: object) -> dict[str, object]:
    """What a notebook shows of a cell's last expression."""
    data: dict[str, object] = {"text/plain": lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = lines(value._repr_html_())
    return {
        "data": data,
        "execution_count": None,
        "metadata": {},
        "output_type": "execute_result",
    }


def lines(text: str) -> list[str]:
    """As notebooks store a text."""
    return text.splitlines(keepends=True)


def run_cell(text: str, number: int, names: dict[str, object]) -> list[dict]:
    """Runs a cell; what it prints, what its last line is worth, or how it failed."""
    # Named as Jupyter names cells, so that what reads sources reads these.
    file = f"/tmp/ipykernel_{os.getpid()}/{number}.py"
    linecache.cache[file] = (len(text), None, lines(text), file)
    tree = ast.parse(text)
    last = (
        tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    )
    printed, outputs, value = io.StringIO(), [], None
    failure: list[dict] = []
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(tree, file, "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), file, "eval"), names)
        except Exception as error:
            told = traceback.format_exception_only(error)
            failure = [{"output_type": "error", "ename": type(error).__name__}]
            failure[0] |= {"evalue": str(error), "traceback": told}
    if printed.getvalue():
        text = printed.getvalue()
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if value is not None:
        outputs.append(shown(value))
    return outputs + failure


def run(notebook: dict, as_is: bool = False) -> list[list[dict]]:
    """The outputs of each code cell."""
    program = types.ModuleType("__main__")
    usual, sys.modules["__main__"] = sys.modules["__main__"], program
    found = []
    try:
        for number, cell in enumerate(code_cells(notebook)):
            text = "".join(cell["source"])
            exercise = cell["metadata"].get("exercise")
            if exercise and not as_is:
                text = "\n\n\n".join(map(answer, exercise)) + "\n"
            found.append(run_cell(text, number, vars(program)))
    finally:
        sys.modules["__main__"] = usual
    return found


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--as-is", action="store_true")
    options = parser.parse_args()
    notebook = json.loads(options.notebook.read_text())
    outputs = run(notebook, options.as_is)
    if not options.write:
        print(json.dumps(outputs))
        return
    for count, (cell, found) in enumerate(zip(code_cells(notebook), outputs), 1):
        cell["outputs"], cell["execution_count"] = found, count
        for output in found:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    options.notebook.write_text(text + "\n")


if __name__ == "__main__":
    main()
