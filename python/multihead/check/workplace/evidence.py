# SPDX-License-Identifier: MIT
"""What the text of a function says about attention: nothing of it is run.

The sign is a softmax of a product whose result enters another product. Names alone
only add to that.
"""

import ast
import re
from dataclasses import dataclass

NAME = re.compile(r"attention|attn|mha(?![a-z])|[gm]qa(?![a-z])|sdpa", re.IGNORECASE)
# Other definitions of attention, by their usual names.
_OTHER = re.compile(
    r"linear_?att|performer|linformer|favor|nystr|bahdanau|additive|longformer|reformer"
    r"|lsh|fourier|fnet|pool|block(?!_?size)|layer_?norm|encoder|decoder|model|config"
    r"|mask|processor|visuali[sz]|plot|loss|rollout|^get_|^make_|^create_|^build_",
    re.IGNORECASE,
)
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "mm", "dot", "tensordot", "mul_sum"}
_SOFTMAX = re.compile(r"(?:masked_|safe_|stable_)?softmax(?:_\w*)?|Softmax", re.I)
_WHOLE = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "memory_efficient_attention",
    "flash_attn_func",
}


@dataclass
class Evidence:
    """Of one function, or of a class: of all its methods."""

    whole: bool = False  # calls PyTorch's attention
    products: int = 0
    softmax: bool = False
    of_product: bool = False  # a softmax of a product
    used: bool = False  # whose result enters a product

    def __or__(self, other: "Evidence") -> "Evidence":
        return Evidence(
            self.whole or other.whole,
            self.products + other.products,
            self.softmax or other.softmax,
            self.of_product or other.of_product,
            self.used or other.used,
        )

    def score(self, name: str) -> int:
        """0: no candidate; the higher, the likelier it is attention by itself."""
        named = bool(NAME.search(name))
        score = 0
        if self.of_product and self.used:
            score = 6
        elif self.of_product and named:
            score = 4
        elif self.whole:
            score = 5 if named else 3
        elif named and self.softmax and self.products:
            score = 3
        elif named and self.products >= 2:
            score = 1  # perhaps the softmax is what is missing
        if not score:
            return 0
        score += 2 * named + 2 * bool(re.search(r"multi_?head|self_?att", name, re.I))
        return max(score - 4 * bool(_OTHER.search(name)), 1)


def called(node: ast.Call) -> str:
    """The last name of what is called: `F.softmax(x)` and `x.softmax(-1)` alike."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def of_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    layers: frozenset[str] = frozenset(),
) -> Evidence:
    """Follows products through the names that they are assigned to. layers: what the
    object calls its softmax, `attend` of `self.attend = nn.Softmax(dim=-1)`."""
    found = Evidence()
    flow = _Flow(found, layers)
    for statement in function.body:
        flow.visit(statement)
    return found


class _Flow(ast.NodeVisitor):
    """Which names hold a product, and which the softmax of one."""

    def __init__(self, found: Evidence, layers: frozenset[str]) -> None:
        self.found = found
        self.layers = layers
        self.products: set[str] = set()
        self.weights: set[str] = set()
        self.exponentials: set[str] = set()  # of products

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        self.assign([n for target in node.targets for n in _names(target)], node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self.assign(_names(node.target), node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        names = _names(node.target)
        if self.holds(node.value, self.products, self.is_product):
            self.products |= set(names)

    def assign(self, names: list[str], value: ast.expr) -> None:
        if self.is_exponential(value):
            self.exponentials |= set(names)
        if self.holds(value, self.weights, self.is_weights):
            self.weights |= set(names)
        if self.holds(value, self.products, self.is_product):
            self.products |= set(names)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            self.product([node.left, node.right])
        if isinstance(node.op, ast.Div) and self.is_exponential(node.left):
            self.softmax([node.left])

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = called(node)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            arguments.append(node.func.value)
        if name in _PRODUCTS:
            self.product(arguments)
        elif name in _WHOLE:
            self.found.whole = True
        elif self.is_softmax(name):
            self.softmax(arguments)

    def product(self, parts: list[ast.expr]) -> None:
        self.found.products += 1
        if any(self.holds(part, self.weights, self.is_weights) for part in parts):
            self.found.used = True

    def softmax(self, parts: list[ast.expr]) -> None:
        self.found.softmax = True
        of_product = any(self.holds(p, self.products, self.is_product) for p in parts)
        self.found.of_product |= of_product or any(map(self.is_exponential, parts))

    def holds(self, value: ast.AST, names: set[str], is_one) -> bool:
        """Whether the value is made of one of the names, or of what is_one knows."""
        return any(
            _name(node) in names if _name(node) else is_one(node)
            for node in ast.walk(value)
        )

    @staticmethod
    def is_product(node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        return isinstance(node, ast.Call) and called(node) in _PRODUCTS

    def is_weights(self, node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.Div) and self.is_exponential(node.left)
        return isinstance(node, ast.Call) and self.is_softmax(called(node))

    def is_softmax(self, name: str) -> bool:
        return bool(_SOFTMAX.fullmatch(name)) or name in self.layers

    def is_exponential(self, node: ast.AST) -> bool:
        """exp of something made of a product, which is divided by its sum."""
        return any(
            _name(part) in self.exponentials
            or isinstance(part, ast.Call)
            and called(part) in ("exp", "exp_")
            and self.holds(part, self.products, self.is_product)
            for part in ast.walk(node)
        )


def _name(node: ast.AST) -> str:
    """`scores`, or `self.scores` as it is written."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}" if node.value.id == "self" else ""
    return ""


def _names(target: ast.AST) -> list[str]:
    """The names that an assignment gives values to, `x[...] = y` among them."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for part in target.elts for name in _names(part)]
    if isinstance(target, (ast.Subscript, ast.Starred)):
        return _names(target.value)
    name = _name(target)
    return [name] if name else []
