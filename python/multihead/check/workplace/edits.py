# SPDX-License-Identifier: MIT
"""Small edits of a text that may repair a fault, by its name. Whether one does, only
running it says: these are guesses, the likeliest first."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .evidence import called

_BLOCK = 'float("-inf")'
_VIEWS = ("view", "reshape")
_PRODUCTS = ("matmul", "bmm", "einsum", "mm")
_FILLS = ("masked_fill", "masked_fill_")


@dataclass(frozen=True)
class Change:
    """The characters [start, end) become `text`."""

    start: int
    end: int
    text: str


Edit = tuple[Change, ...]


class Text:
    """A file, and the functions in it that a fault can lie in."""

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        # ast counts columns in bytes of UTF-8.
        lines = source.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._bytes = source.encode()
        self.roots = self._roots(name)

    def _roots(self, name: str) -> list[ast.AST]:
        """The target, then what it calls or inherits from in its own file."""
        known = {n.name: n for n in self.tree.body if hasattr(n, "name")}
        found, new = [], [name]
        while new:
            node = known.get(new.pop(0))
            if node is None or node in found:
                continue
            found.append(node)
            new += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
        return found

    def nodes(self, *kinds: type) -> Iterator:
        """In the order of the text, those of the target first."""
        for root in self.roots:
            nodes = [n for n in ast.walk(root) if isinstance(n, kinds)]
            yield from sorted(nodes, key=lambda n: (n.lineno, n.col_offset))

    def calls(self, *names: str) -> Iterator[ast.Call]:
        return (c for c in self.nodes(ast.Call) if called(c) in names)

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self._bytes[start:end].decode()

    def operand(self, node: ast.AST) -> str:
        """The same where a dot follows."""
        closed = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
        return self.of(node) if isinstance(node, closed) else f"({self.of(node)})"

    def replace(self, node: ast.AST, text: str) -> Change:
        return Change(*self.span(node), text)

    def edited(self, edit: Edit) -> str:
        content = self._bytes
        for change in sorted(edit, key=lambda c: -c.start):
            content = (
                content[: change.start] + change.text.encode() + content[change.end :]
            )
        return content.decode()


def edits(fault: str, text: Text) -> Iterator[Edit]:
    """Without repetitions."""
    seen = set()
    for names, candidates in _EDITS:
        if any(fault.startswith(name) for name in names):
            for edit in candidates(text):
                if edit and edit not in seen:
                    seen.add(edit)
                    yield edit


# ---- Scale -----------------------------------------------------------------


def _products(t: Text) -> list[tuple[ast.AST, ast.AST]]:
    """Products, each with its left operand, that may be the scores."""
    found: list[tuple[ast.AST, ast.AST]] = []
    for node in t.nodes(ast.BinOp, ast.Call):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.append((node, node.left))
        elif isinstance(node, ast.Call) and called(node) in _PRODUCTS:
            arguments = [a for a in node.args if not isinstance(a, ast.Constant)]
            if isinstance(node.func, ast.Attribute) and len(arguments) == 1:
                found.append((node, node.func.value))
            elif arguments:
                found.append((node, arguments[0]))
    return found


def _width(t: Text, left: ast.AST) -> str:
    return f"{t.operand(left)}.shape[-1]"


def _divide(t: Text) -> Iterator[Edit]:
    """A product that nothing divides."""
    for product, left in _products(t):
        text = t.of(product)
        wrapped = f"({text})" if "\n" in text else text
        yield (t.replace(product, f"{wrapped} / {_width(t, left)} ** 0.5"),)


def _other_divisor(t: Text) -> Iterator[Edit]:
    """What scores are divided by, or multiplied with, as another number."""
    widths = list(dict.fromkeys(_width(t, left) for _, left in _products(t)))
    names = [n for n in _names(t) if any(w in n for w in ("head", "d_k", "dk", "dim"))]
    for call in t.calls("sqrt"):
        for argument in call.args[:1]:
            for width in [*names, *widths]:
                yield (t.replace(argument, _like(t.of(argument), width)),)
    for node in t.nodes(ast.BinOp):
        if isinstance(node.op, ast.Pow):
            for width in [*names, *widths]:
                for power in ("-0.5", "0.5"):
                    yield (t.replace(node, f"{width} ** {power}"),)
    for node in t.nodes(ast.BinOp):
        if isinstance(node.op, (ast.Div, ast.Mult)):
            sign = "" if isinstance(node.op, ast.Div) else "-"
            for width in widths:
                yield (t.replace(node.right, f"{width} ** {sign}0.5"),)
    for node in t.nodes(ast.Assign):
        if "scale" in t.of(node.targets[0]).lower():
            for name in names:
                for power in ("-0.5", "0.5"):
                    yield (t.replace(node.value, f"{name} ** {power}"),)


def _like(old: str, new: str) -> str:
    """As a tensor where the old one was one."""
    return f"torch.tensor({new})" if "tensor(" in old else new


def _names(t: Text) -> list[str]:
    """Names and attributes of numbers, as they are written."""
    found = {}
    for node in t.nodes(ast.Name, ast.Attribute):
        written = t.of(node)
        if written.replace(".", "").replace("_", "").isalnum():
            found[written] = None
    return list(found)


def _no_second_scale(t: Text) -> Iterator[Edit]:
    for node in t.nodes(ast.BinOp, ast.AugAssign):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
            yield (t.replace(node, t.of(node.left)),)
        elif isinstance(node, ast.AugAssign) and isinstance(
            node.op, (ast.Div, ast.Mult)
        ):
            yield (t.replace(node, "pass"),)


# ---- Softmax ---------------------------------------------------------------


def _last_axis(t: Text) -> Iterator[Edit]:
    for call in t.calls("softmax", "log_softmax", "Softmax"):
        is_free = t.of(call.func).startswith(
            ("F.", "torch.", "nn.functional.", "softmax")
        )
        for keyword in call.keywords:
            if keyword.arg in ("dim", "axis"):
                yield (t.replace(keyword.value, "-1"),)
        position = 0 if called(call) == "Softmax" or not is_free else 1
        if len(call.args) > position:
            yield (t.replace(call.args[position], "-1"),)
        elif not call.keywords:
            start, end = t.span(call)
            comma = ", " if call.args else ""
            yield (Change(end - 1, end, f"{comma}dim=-1)"),)


def _one_softmax(t: Text) -> Iterator[Edit]:
    for call in t.calls("softmax"):
        inner = call.args[0] if call.args else getattr(call.func, "value", None)
        if isinstance(call.func, ast.Attribute) and inner is not None:
            yield (t.replace(call, t.of(inner)),)
            yield (t.replace(call, t.of(call.func.value)),)


# ---- Masks -----------------------------------------------------------------


def _inverted(t: Text) -> Iterator[Edit]:
    for test in _tests(t):
        written = t.of(test)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right = t.of(test.left), t.of(test.comparators[0])
            other = {ast.Eq: "!=", ast.NotEq: "==", ast.Gt: "<=", ast.Lt: ">="}
            sign = other.get(type(test.ops[0]))
            if sign:
                yield (t.replace(test, f"{left} {sign} {right}"),)
        elif isinstance(test, ast.UnaryOp):
            yield (t.replace(test, t.of(test.operand)),)
        else:
            yield (t.replace(test, f"~{written}"),)
            yield (t.replace(test, f"{written} == 0"),)
    for call in t.calls("where"):
        if len(call.args) == 3:
            _, yes, no = call.args
            yield (t.replace(yes, t.of(no)), t.replace(no, t.of(yes)))


def _tests(t: Text) -> list[ast.expr]:
    """What says where a score is filled."""
    fills = [c.args[0] for c in t.calls(*_FILLS) if c.args]
    return fills + [c.args[0] for c in t.calls("where") if len(c.args) == 3]


def _kept(t: Text) -> Iterator[Edit]:
    """A masked_fill whose result nobody keeps."""
    for node in t.nodes(ast.Expr):
        call = node.value
        if isinstance(call, ast.Call) and called(call) == "masked_fill":
            target = t.of(call.func.value)
            if not target.startswith(("torch", "F")):
                yield (t.replace(node, f"{target} = {t.of(call)}"),)


def _filled(t: Text) -> Iterator[Edit]:
    """Scores that are filled with another number than -inf, or multiplied."""
    for call in t.calls(*_FILLS):
        values = [
            *call.args[1:2],
            *(k.value for k in call.keywords if k.arg == "value"),
        ]
        for value in values:
            yield (t.replace(value, _BLOCK),)
    for call in t.calls("where"):
        for value in call.args[1:]:
            if not isinstance(value, (ast.Name, ast.Attribute)):
                yield (t.replace(value, _BLOCK),)
    yield from _fill_instead(t)


def _fill_instead(t: Text) -> Iterator[Edit]:
    """`scores * mask` or `scores + mask` as a fill."""
    for node in t.nodes(ast.BinOp):
        if isinstance(node.op, (ast.Mult, ast.Add)) and "mask" in t.of(node.right):
            left, mask = t.of(node.left), t.of(node.right)
            for test in (f"{mask} == 0", f"{mask} != 0"):
                yield (t.replace(node, f"({left}).masked_fill({test}, {_BLOCK})"),)
    for node in t.nodes(ast.AugAssign):
        if isinstance(node.op, (ast.Mult, ast.Add)) and "mask" in t.of(node.value):
            left, mask = t.of(node.target), t.of(node.value)
            for test in (f"{mask} == 0", f"{mask} != 0"):
                text = f"{left} = {left}.masked_fill({test}, {_BLOCK})"
                yield (t.replace(node, text),)


def _triangle(t: Text) -> Iterator[Edit]:
    """triu and tril at every diagonal, and each as the other."""
    for call in t.calls("triu", "tril"):
        is_method = isinstance(call.func, ast.Attribute) and not t.of(
            call.func
        ).startswith(("torch.", "np."))
        first = t.operand(call.func.value) if is_method else t.of(call.args[0])
        rest = [k for k in call.keywords if k.arg not in ("diagonal", "k")]
        options = "".join(f", {t.of(k)}" for k in rest)
        word = "k" if t.of(call.func).startswith("np.") else "diagonal"
        for kind, diagonals in (("triu", (1, 0)), ("tril", (0, -1))):
            for diagonal in diagonals:
                at = f"{word}={diagonal}{options}"
                text = (
                    f"{first}.{kind}({at})"
                    if is_method
                    else f"{t.of(call.func)[:-4]}{kind}({first}, {at})"
                )
                yield (t.replace(call, text),)


# ---- Heads -----------------------------------------------------------------


def _viewed(t: Text) -> list[tuple[ast.Call, list[str]]]:
    """Views in four dimensions."""
    found = []
    for call in t.calls(*_VIEWS):
        sizes = call.args
        if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
            sizes = sizes[0].elts
        if len(sizes) == 4 and isinstance(call.func, ast.Attribute):
            found.append((call, [t.of(size) for size in sizes]))
    return found


def _transposed_heads(t: Text) -> Iterator[Edit]:
    def cut(call: ast.Call, sizes: list[str]) -> Change:
        a, b, c, d = sizes
        x = f"{t.operand(call.func.value)}.{called(call)}"
        return t.replace(call, f"{x}({a}, {c}, {b}, {d}).transpose(1, 2)")

    def exchange(call: ast.Call, sizes: list[str]) -> Change:
        return t.replace(call, f"{t.of(call)}.transpose(1, 2)")

    views = _viewed(t)
    for make in (cut, exchange):
        # Mostly all are cut alike, and one that is right is no more so if exchanged.
        yield tuple(make(*view) for view in views)
        for view in views if len(views) > 1 else ():
            yield (make(*view),)
        for merge in _merges(t):
            for merged in merge:
                yield (*(make(*view) for view in views), merged)


def _merges(t: Text) -> list[Edit]:
    """Heads exchanged back before they are laid side by side."""
    found = []
    for call in t.calls(*_VIEWS):
        sizes = call.args
        if len(sizes) == 3 and isinstance(call.func, ast.Attribute):
            x = call.func.value
            text = ", ".join(t.of(size) for size in sizes)
            found.append(
                (t.replace(call, f"{t.operand(x)}.transpose(1, 2).reshape({text})"),)
            )
    return found


def _keys_transposed(t: Text) -> Iterator[Edit]:
    for call in t.calls(*_VIEWS):
        if isinstance(call.func, ast.Attribute):
            yield (t.replace(call, f"{t.operand(call.func.value)}.transpose(-2, -1)"),)


def _repeated(t: Text) -> Iterator[Edit]:
    for call in t.calls("repeat", "expand", "tile"):
        if isinstance(call.func, ast.Attribute):
            for size in call.args:
                if not isinstance(size, ast.Constant):
                    x = t.operand(call.func.value)
                    text = f"{x}.repeat_interleave({t.of(size)}, dim=1)"
                    yield (t.replace(call, text),)


# ---- Projections, output, the rest -----------------------------------------


def _other_input(t: Text) -> Iterator[Edit]:
    """A layer that is given another input."""
    layers = [c for c in t.nodes(ast.Call) if t.of(c.func).startswith("self.")]
    single = [c for c in layers if c.args and isinstance(c.args[0], ast.Name)]
    names = list(dict.fromkeys(c.args[0].id for c in single))
    names += [n for n in _arguments(t) if n not in names]
    for call in single:
        for name in names:
            if name != call.args[0].id:
                yield (t.replace(call.args[0], name),)


def _other_layer(t: Text) -> Iterator[Edit]:
    """Two layers exchanged, or one used for another."""
    calls = [
        c
        for c in t.nodes(ast.Call)
        if isinstance(c.func, ast.Attribute) and t.of(c.func.value) == "self"
    ]
    layers = _layers(t)
    calls = [c for c in calls if c.func.attr in layers]
    for i, one in enumerate(calls):
        for other in calls[i + 1 :]:
            if one.func.attr != other.func.attr:
                yield (
                    t.replace(one.func, t.of(other.func)),
                    t.replace(other.func, t.of(one.func)),
                )
    for call in calls:
        for name in layers:
            if name != call.func.attr:
                yield (t.replace(call.func, f"self.{name}"),)


def _layers(t: Text) -> list[str]:
    return list(
        dict.fromkeys(
            node.targets[0].attr
            for node in t.nodes(ast.Assign)
            if isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.value, ast.Call)
            and called(node.value) == "Linear"
        )
    )


def _arguments(t: Text) -> list[str]:
    names: dict[str, None] = {}
    for function in t.nodes(ast.FunctionDef):
        if function.name in ("forward", "__call__") or function in t.roots:
            names |= {a.arg: None for a in function.args.args if a.arg != "self"}
    return list(names)


def _projected_output(t: Text) -> Iterator[Edit]:
    """A layer that is made, and never used, around what is returned."""
    used = {t.of(c.func) for c in t.nodes(ast.Call)}
    unused = [name for name in _layers(t) if f"self.{name}" not in used]
    for node in t.nodes(ast.Return):
        value = node.value
        if isinstance(value, ast.Tuple) and value.elts:
            value = value.elts[0]
        for name in unused if value is not None else ():
            yield (t.replace(value, f"self.{name}({t.of(value)})"),)


def _other_value(t: Text) -> Iterator[Edit]:
    """An operand of a product as another tensor."""
    for product, left in _products(t):
        parts = [left, getattr(product, "right", None)]
        if isinstance(product, ast.Call):
            parts = [*parts[:1], *product.args]
        for part in parts:
            root = part
            while isinstance(root, (ast.Attribute, ast.Call)):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name):
                for name in ("q", "k", "v", "Q", "K", "V", *_arguments(t)):
                    if name != root.id:
                        yield (t.replace(root, name),)


def _in_training(t: Text) -> Iterator[Edit]:
    for call in t.calls("dropout"):
        words = [k for k in call.keywords if k.arg == "training"]
        if words:
            yield (t.replace(words[0].value, "self.training"),)
        else:
            end = t.span(call)[1]
            yield (Change(end - 1, end, ", training=self.training)"),)


def _attached(t: Text) -> Iterator[Edit]:
    for call in t.calls("detach"):
        if isinstance(call.func, ast.Attribute):
            yield (t.replace(call, t.of(call.func.value)),)
    for node in t.nodes(ast.Attribute):
        if node.attr == "data":
            yield (t.replace(node, t.of(node.value)),)


def _merge_edits(t: Text) -> Iterator[Edit]:
    yield from _merges(t)


Candidates = Callable[[Text], Iterator[Edit]]
# Beginnings of names, and the edits that may repair such a fault.
_EDITS: list[tuple[tuple[str, ...], Candidates]] = [
    (("scale_applied_twice",), _no_second_scale),
    (("scale_missing", "scale_after"), _divide),
    (("scale_",), _other_divisor),
    (("softmax_over",), _last_axis),
    (("softmax_twice",), _one_softmax),
    (("mask_ignored", "mask_not", "masked_fill", "padding_ignored"), _kept),
    (("mask_inverted", "padding_inverted", "causal_inverted"), _inverted),
    (("causal_", "mask_"), _triangle),
    (("mask_sentinel", "mask_multiplied", "mask_added"), _filled),
    (("heads_not_transposed", "heads_not_split"), _transposed_heads),
    (("merge_not_transposed", "merge_interleaved"), _merge_edits),
    (("keys_reshaped",), _keys_transposed),
    (("groups_",), _repeated),
    (("output_forgotten",), _projected_output),
    (("dropout_left_on",), _in_training),
    (("gradient_detached",), _attached),
    (("value", "key", "quer", "inputs_swapped"), _other_input),
    (("value", "key", "quer", "projections", "one_projection"), _other_layer),
    (("values_are", "keys_are", "queries_"), _other_value),
]
