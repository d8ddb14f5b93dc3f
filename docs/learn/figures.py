# SPDX-License-Identifier: MIT
"""The figures of docs/learn.md. What stands in their cells, PyTorch computed."""

import math

import torch
from drawing import Drawing
from torch import Tensor

CELL = (34, 26)


def heads() -> str:
    """How features become heads, and what a view alone does instead."""
    length, count, d = 4, 2, 3
    x = torch.arange(length * count * d).view(1, length, count * d)
    right = x.view(1, length, count, d).transpose(1, 2)
    wrong = x.view(1, count, length, d)

    def element(number: int) -> tuple[str, str]:
        position, feature = divmod(number, count * d)
        return f"{'abcd'[position]}{feature + 1}", f"head{feature // d}"

    def draw(place: tuple[float, float], part: Tensor) -> None:
        pairs = [[element(number) for number in row] for row in part.tolist()]
        words, kinds = ([[p[i] for p in row] for row in pairs] for i in (0, 1))
        sheet.matrix(place, kinds, words, CELL)

    sheet = Drawing(
        760, 410, "Splitting heads: view and transpose against a view alone"
    )
    sheet.text(24, 34, "x  (N, L, H·d)", "text title")
    sheet.text(24, 54, "a, b, c, d: positions", "quiet small")
    sheet.text(24, 72, "colours: the features of a head", "quiet small")
    draw((24, 154), x[0])
    for top, words, parts, kind in (
        (34, "x.view(N, L, H, d).transpose(1, 2)", right, "good"),
        (224, "x.view(N, H, L, d)", wrong, "bad"),
    ):
        mark = "✓" if kind == "good" else "✗"
        sheet.text(330, top, mark, f"{kind} title")
        sheet.text(350, top, words, "text code")
        for head in range(count):
            left = 330 + head * 210
            sheet.text(left, top + 24, f"head {head}  (L, d)", "quiet small")
            draw((left, top + 32), parts[0, head])
        sheet.arrow(24 + 6 * CELL[0] + 8, 206, 320, top + 32 + 2 * CELL[1])
    sheet.text(330, 190, "Each head has its features, of all positions.", "text small")
    sheet.text(
        330,
        380,
        "The shape is right and nothing raises, but head 0 holds",
        "text small",
    )
    sheet.text(330, 397, "all of a and b, and never meets c and d.", "text small")
    return sheet.svg()


def groups() -> str:
    """Query heads that share key/value heads, and in which order."""
    count, size, step = 8, (24, 24), 27
    sheet = Drawing(760, 300, "Groups: query heads that share heads of keys and values")
    titles = ("multi-head", "grouped-query", "multi-query")
    for column, (number, title) in enumerate(zip((8, 2, 1), titles)):
        left = 24 + column * 246
        sheet.text(left, 34, f"{title}: H = 8, G = {number}", "text title")
        owner = torch.arange(number).repeat_interleave(count // number).tolist()
        for head in range(count):
            kind = f"head{owner[head] % 2}"
            members = [h for h in range(count) if owner[h] == owner[head]]
            middle = left + sum(members) / len(members) * step + size[0] / 2
            top = (left + head * step + size[0] / 2, 84)
            sheet.line(*top, middle, 124)
            sheet.cell((left + head * step, 60), size, kind, str(head))
            if head == members[0]:
                place = (middle - size[0] / 2, 124)
                sheet.cell(place, size, kind, str(owner[head]))
        share = f"cache of keys and values: {number}/8"
        sheet.text(left, 172, share, "quiet small")
    sheet.text(24, 52, "heads of queries", "quiet small")
    for top, code, order, kind, words in (
        (
            196,
            "k.repeat_interleave(4, dim=1)",
            "repeat_interleave",
            "good",
            "neighbours share, as models expect",
        ),
        (
            246,
            "k.repeat(1, 4, 1, 1)",
            "repeat",
            "bad",
            "the same shape, other partners",
        ),
    ):
        mark = "✓" if kind == "good" else "✗"
        sheet.text(24, top + 17, mark, f"{kind} title")
        sheet.text(44, top + 17, code, "text code")
        two = torch.arange(2)
        owner = (
            two.repeat_interleave(4) if order != "repeat" else two.repeat(4)
        ).tolist()
        row = [[str(o) for o in owner]]
        sheet.matrix((288, top), [[f"head{o}" for o in owner]], row, size)
        sheet.text(496, top + 17, words, "text small")
    return sheet.svg()


def masks() -> str:
    """One causal mask as four kinds of code write it."""
    blocked = torch.ones(4, 4, dtype=torch.bool).triu(1)
    added = torch.zeros(4, 4).masked_fill(blocked, -math.inf)
    columns = [
        (
            "True = blocked",
            {False: "False", True: "True"},
            blocked,
            ["nn.MultiheadAttention,", "the functions here"],
        ),
        (
            "True = may attend",
            {False: "False", True: "True"},
            ~blocked,
            ["PyTorch's function", "scaled_dot_product_attention"],
        ),
        (
            "0 = blocked",
            {0: "0", 1: "1"},
            (~blocked).int(),
            ["many exercises; here the", "module MultiHeadAttention"],
        ),
        (
            "added to the scores",
            {0.0: "0", -math.inf: "−∞"},
            added,
            ["float masks,", "in both of PyTorch's"],
        ),
    ]
    kinds = [["blocked" if b else "seen" for b in row] for row in blocked.tolist()]
    sheet = Drawing(760, 262, "One mask in four polarities")
    sheet.text(24, 34, "Who may attend to whom", "text title")
    sheet.text(232, 34, "rows: queries, columns: keys", "quiet small")
    sheet.cell((440, 20), (18, 18), "seen", "")
    sheet.text(464, 34, "may attend", "quiet small")
    sheet.cell((550, 20), (18, 18), "blocked", "")
    sheet.text(574, 34, "blocked", "quiet small")
    for column, (title, names, values, users) in enumerate(columns):
        left = 24 + column * 182
        sheet.text(left, 68, title, "text title")
        words = [[names[value] for value in row] for row in values.tolist()]
        sheet.matrix((left, 80), kinds, words, (41, 28))
        for line, user in enumerate(users):
            sheet.text(left, 214 + 18 * line, user, "quiet small")
    return sheet.svg()


def causal() -> str:
    """Where the diagonal lies when there are fewer queries than keys."""
    queries, keys = 2, 5
    sheet = Drawing(760, 208, "Causal masks of two queries and five keys")
    for column, (title, offset, notes) in enumerate(
        (
            (
                "top left",
                0,
                [
                    "Query i sees the keys 0 … i.",
                    "PyTorch's is_causal; right for Lq = Lk.",
                ],
            ),
            (
                "bottom right",
                keys - queries,
                [
                    "The last query sees every key.",
                    "New tokens that read a cache of old ones.",
                ],
            ),
        )
    ):
        left = 24 + column * 372
        sheet.text(left, 34, f"{title}: Lq = {queries}, Lk = {keys}", "text title")
        visible = torch.ones(queries, keys).tril(offset).tolist()
        kinds = [["seen" if see else "blocked" for see in row] for row in visible]
        words = [["✓" if see else "" for see in row] for row in visible]
        for key in range(keys):
            sheet.text(left + 100 + 38 * key, 62, f"k{key}", "quiet cell")
        for query in range(queries):
            sheet.text(left, 88 + 28 * query, f"query {query}", "quiet small")
        sheet.matrix((left + 81, 70), kinds, words, (38, 28))
        for line, note in enumerate(notes):
            sheet.text(left, 158 + 20 * line, note, "text small")
    return sheet.svg()


def blocked_row() -> str:
    """What becomes of a query that may attend to nothing."""
    scores = torch.tensor([1.0, 0.0, 2.0]) / math.sqrt(2)
    values = torch.tensor([[3.0, 0.0], [0.0, 3.0], [6.0, 6.0]])

    def shown(row: Tensor, digits: int = 2) -> list[str]:
        special = {-math.inf: "−∞", -1e9: "−10⁹"}
        numbers = row.tolist()
        return ["NaN" if x != x else special.get(x, f"{x:.{digits}f}") for x in numbers]

    infinite = torch.full_like(scores, -math.inf)
    finite = torch.full_like(scores, -1e9)
    zeroed = finite.softmax(-1).masked_fill(torch.ones(3, dtype=torch.bool), 0.0)
    rows = [
        (
            "−∞, then softmax",
            infinite,
            infinite.softmax(-1),
            "bad",
            "0 / 0. PyTorch, where weights are returned",
        ),
        (
            "−10⁹, then softmax",
            finite,
            finite.softmax(-1),
            "bad",
            "the mean of what it may not see",
        ),
        (
            "weights set to 0 afterwards",
            finite,
            zeroed,
            "good",
            "nothing. multihead; W_o adds its bias",
        ),
    ]
    sheet = Drawing(760, 300, "A query whose keys are all blocked, in three programs")
    sheet.text(24, 34, "A query whose keys are all blocked", "text title")
    sheet.text(24, 62, "its scores", "text small")
    sheet.matrix((230, 44), [["plain"] * 3], [shown(scores)], (56, 26))
    for left, words in ((230, "masked scores"), (418, "weights"), (606, "output")):
        sheet.text(left, 96, words, "quiet small")
    for number, (title, masked, weights, kind, note) in enumerate(rows):
        top = 104 + 62 * number
        sheet.text(24, top + 18, title, "text small")
        sheet.text(230, top + 44, note, f"{kind} small")
        sheet.matrix((230, top), [["blocked"] * 3], [shown(masked, 0)], (56, 26))
        sheet.matrix((418, top), [["plain"] * 3], [shown(weights)], (56, 26))
        sheet.matrix((606, top), [["plain"] * 2], [shown(weights @ values)], (56, 26))
    return sheet.svg()


FIGURES = {
    "heads": heads,
    "groups": groups,
    "masks": masks,
    "causal": causal,
    "blocked_row": blocked_row,
}
