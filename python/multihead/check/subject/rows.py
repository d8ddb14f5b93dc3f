# SPDX-License-Identifier: MIT
"""Masks that only zero rows of what code returns, as SASRec has them for padding."""

import ast
import re
import textwrap


def zeroes_output(text: str, name: str) -> bool | None:
    """Whether the reverse of the mask is what the last lines of a function multiply
    their output by, and nothing else is done with it; None where it is not so."""
    try:
        body = ast.parse(textwrap.dedent(text)).body[0].body  # type: ignore[attr-defined]
    except (SyntaxError, IndexError, AttributeError):
        return None
    reads = [
        node
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == name
    ]
    last = body[-1].value if isinstance(body[-1], ast.Return) else None
    if len(reads) != 1 or last is None:
        return None
    parts = last.elts if isinstance(last, ast.Tuple) else [last]
    returned = {node.id for node in parts if isinstance(node, ast.Name)}
    for statement in body[-2:]:
        target, factor = _product(statement, name)
        if factor is not None and target in {*returned, ""}:
            shown = ast.unparse(factor)
            return "~" in shown or re.search(r"\b1(\.0)? - ", shown) is not None
    return None


def _product(statement: ast.stmt, name: str) -> tuple[str, ast.AST | None]:
    """What a statement sets or, "", returns, and the factor that holds the name."""
    factors: list[ast.AST] = []
    target = ""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        target, factors = ast.unparse(statement.target), [statement.value]
    elif isinstance(statement, (ast.Assign, ast.Return)):
        value = statement.value
        if isinstance(statement, ast.Assign):
            target = ast.unparse(statement.targets[0])
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            factors = [value.left, value.right]
    for factor in factors:
        if any(getattr(node, "id", "") == name for node in ast.walk(factor)):
            return target, factor
    return target, None
