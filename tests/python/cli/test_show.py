# SPDX-License-Identifier: MIT
"""`multihead show` in the terminal."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import pytest
import torch
from pictures import COMMAND, columns, show, shown, without_codes
from safetensors.torch import load_file, save_file
from terminal import printed_in_terminal

pytestmark = pytest.mark.skipif(
    not COMMAND.exists(),
    reason=f"{COMMAND} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)

SCRIPTS = [
    *("The", "שלום", "مرحبا", "日本語", "👩‍👩‍👧", "e\u0301", "", "🇩🇪", "नमस्ते"),
    *("tab\there", "esc\x1b[31m", "<b>&\"'", "a_very_long_token_that_goes_on_and_on"),
]


def random_weights(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.softmax(3 * torch.randn(shape, generator=generator), -1)


def dump(folder: pathlib.Path, tensors: dict, **facts: str) -> pathlib.Path:
    path = folder / "dump.safetensors"
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, facts)
    return path


def run_in_terminal(width: int, *arguments: object, **environment: str) -> str:
    """Standard output of the command in a terminal of that many columns."""
    colours = {"TERM": "xterm-256color", "COLORTERM": "", "NO_COLOR": ""}
    command = [str(COMMAND), "show", *map(str, arguments)]
    return printed_in_terminal(command, width, **{**colours, **environment})


def assert_fits(text: str, width: int) -> None:
    lines = without_codes(text).splitlines()
    assert "\x1b" not in "".join(lines)
    too_long = [line for line in lines if columns(line) > width]
    assert lines and too_long == []


def test_without_arguments_there_is_an_example():
    text = shown()
    assert "4 heads, 2 key/value heads · 12 queries × 12 keys" in text
    assert "query heads      0 1  2 3\nkey/value heads  └0┘  └1┘" in text
    assert re.search(r"softmax over keys +1 × 4 × 12 × 12", text)
    assert re.search(r"^ *cat  66  34 ╱{40}$", text, re.MULTILINE)
    assert_fits(text, 80)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", ["ascii", "true"])
@pytest.mark.parametrize(
    ("heads", "length"), [(1, 1), (3, 13), (64, 24), (2, 300)], ids=str
)
def test_no_line_is_longer_than_the_screen(tmp_path, width, colour, heads, length):
    facts = {"tokens": json.dumps(SCRIPTS)} if length == 13 else {}
    path = dump(tmp_path, {"weights": random_weights(heads, length, length)}, **facts)
    text = shown(path, "--width", width, "--color", colour)
    assert_fits(text, width)
    assert ("\x1b[" in text) == (colour == "true")
    assert text.isascii() or colour != "ascii"
    assert f"head {heads - 1}" in text


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"COLORTERM": "truecolor"}, r"\x1b\[48;2;\d+;\d+;\d+m"),
        ({}, r"\x1b\[48;5;\d+m"),
        ({"TERM": "linux"}, None),
        ({"TERM": "dumb"}, None),
        ({"NO_COLOR": "1", "COLORTERM": "truecolor"}, None),
    ],
)
def test_colours_are_those_of_the_terminal(environment, code):
    text = run_in_terminal(90, **environment)
    assert re.search(code or r"^(?!.*\x1b)", text, re.DOTALL)
    assert ("48;5" in text) == (environment == {})


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_is_as_wide_as_the_terminal(tmp_path, width):
    path = dump(tmp_path, {"weights": random_weights(2, 400, 400)})
    text = run_in_terminal(width, path)
    assert_fits(text, width)
    assert max(columns(line) for line in without_codes(text).splitlines()) > width / 2
    assert_fits(shown(path, COLUMNS=str(width)), width)


def test_ascii_where_the_locale_has_no_utf8(tmp_path):
    path = dump(
        tmp_path, {"weights": random_weights(2, 13, 13)}, tokens=json.dumps(SCRIPTS)
    )
    text = shown(path, LC_ALL="C")
    assert text.isascii()
    assert "????" in text and "The" in text


def test_tokens_cannot_move_the_cursor(tmp_path):
    hostile = ["a\x1b[2J", "b\r\n", "\u202ec", "d\x9b"]
    path = dump(
        tmp_path, {"weights": random_weights(1, 4, 4)}, tokens=json.dumps(hostile)
    )
    text = shown(path)
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text
    assert "a\\x1b[2J" in text and "b\\r\\n" in text


def test_colours_and_signs_of_single_cells(tmp_path):
    """The largest weight, weight 0, a blocked cell and NaN differ."""
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, float("nan"), 0.0]])
    mask = torch.tensor([[False, False, True], [False, False, False]])
    path = dump(tmp_path, {"weights": weights, "mask": mask}, mask="blocked")
    text = shown(path, "--color", "true")
    rows = [line for line in text.splitlines() if re.match(r"[01] \x1b", line)]
    assert re.search(r"48;2;255;\d+;\d+m\S+ 100", rows[0])  # palest
    assert "\x1b[90m╱╱╱╱" in rows[0]
    assert rows[0].count("╱") == 4
    assert "48;2;0;200;120m" in rows[1] and "??" in rows[1]
    assert "! weights that are not finite (NaN or infinite): 1" in text


def test_queries_that_see_nothing_and_weights_behind_the_mask(tmp_path):
    weights = random_weights(2, 4, 4)
    weights[:, 1] = 0
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    path = dump(tmp_path, {"weights": weights, "mask": mask}, mask="keep")
    text = shown(path)
    assert "! 1 of 4 queries see no key: their weights are 0" in text
    assert "cells with weight where the mask blocks" in text
    assert "rows of weights do not sum to 1" not in text


ENTROPIES_OF = "! entropies are those of rows divided by their sum\n"


def remarks(text: str) -> list[str]:
    return [line[2:] for line in text.splitlines() if line.startswith("! ")]


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((2, 2, 2), "each row of weights sums to 2, not to 1"),
        ((0.25, 0.5, 0.5), "rows of weights sum to 0.25 up to 0.5, not to 1 each"),
        ((3, 4, 5), "rows of weights sum to 3 up to 5, not to 1 each"),
        ((1, 1, 5), "rows of weights sum to 1 up to 5, not to 1 each"),
        ((0, 3, 3), "each row of weights sums to 3, not to 1"),  # 0: sees no key
    ],
)
def test_what_rows_sum_to_instead_of_1(tmp_path, factors, said):
    """And entropies of rows that are in the same proportions as weights."""
    right = random_weights(2, 3, 4)
    wrong = right * torch.tensor(factors).view(3, 1)
    text = shown(dump(tmp_path, {"weights": wrong}))
    assert said in remarks(text) and ENTROPIES_OF in text
    seen = [row for row in range(3) if factors[row]]
    for head in range(2):
        entropy = torch.special.entr(right[head, seen].double()).sum(-1).mean()
        assert f"head {head}    {entropy:7.2f} {entropy.exp():7.1f}" in text


def test_numbers_that_are_no_weights_have_no_entropy(tmp_path):
    """Scores, for instance; of a row that has none below 0 there is one."""
    scores = torch.tensor([[[-1.0, 2.0], [3.0, 1.0]], [[-1.0, -3.0], [2.0, -2.0]]])
    text = shown(dump(tmp_path, {"weights": scores}))
    assert remarks(text) == [
        "numbers below 0, which weights never are: 4",
        "rows of weights sum to -4 up to 4, not to 1 each",
        "entropies are those of rows divided by their sum",
    ]
    entropy = torch.special.entr(torch.tensor([0.75, 0.25])).sum()
    assert f"head 0    {entropy:7.2f} {entropy.exp():7.1f}   " in text
    assert re.search(r"^head 1 {20,}1 → 0 2\.00", text, re.MULTILINE)
    assert "-inf" not in text and " 0.0" not in text.partition("entropy")[2]
    alone = shown(dump(tmp_path, {"weights": scores[1]}))
    assert "entropies" not in alone and "queries see no key" not in alone


def test_nan_in_a_head_is_no_mask(tmp_path):
    """Its row sees keys; what it gives to them is not known."""
    query, key = torch.randn(2, 1, 2, 5, 8).unbind()
    query[0, 0, 1] = key[0, 1, 2] = float("nan")
    text = shown(dump(tmp_path, {"query": query, "key": key}))
    assert remarks(text) == [
        "rows with weights that are not finite (NaN or infinite): 6"
    ]
    right = shown(dump(tmp_path, {"query": torch.ones(1, 1, 5, 8), "key": key[:, :1]}))
    assert remarks(right) == []


def test_infinite_weights_are_no_links(tmp_path):
    weights = random_weights(1, 3, 3)
    weights[0, 1, 2], weights[0, 0] = float("inf"), float("nan")
    text = shown(dump(tmp_path, {"weights": weights}))
    assert "weights that are not finite (NaN or infinite): 4" in remarks(text)[0]
    assert len(remarks(text)) == 1  # finite rows sum to 1
    links = next(line for line in text.splitlines() if line.startswith("head 0    "))
    assert re.search(r"\d\.\d\d +\d\.\d +[12] → ", links) and "0000" not in links


def layer_dump(folder: pathlib.Path, causal: bool) -> tuple[pathlib.Path, torch.Tensor]:
    """A layer with its input and a causal mask, and weights (2, 4, 7, 7) of it."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 7, 32)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    with torch.no_grad():
        _, weights = layer(
            x, x, x, attn_mask=mask if causal else None, average_attn_weights=False
        )
    tensors = {"x": x, "mask": mask, "weights": weights, **layer.state_dict()}
    return dump(folder, tensors, num_heads="4", mask="blocked"), weights


def test_weights_follow_from_inputs_and_parameters(tmp_path):
    path, _ = layer_dump(tmp_path, causal=True)
    text = shown(path, "--difference", "--color", "none")
    assert "yours − reference" in text
    largest = re.search(r"! the largest difference is (\S+)\n", text)
    assert largest and float(largest[1]) < 1e-6
    heads = text.partition("head 0")[2].partition("largest")[0]
    assert "╱" in heads and not re.search(r"[=+#]", heads)  # rounding is not drawn
    assert "weight where the mask blocks" not in text


def test_difference_shows_a_forgotten_mask(tmp_path):
    path, _ = layer_dump(tmp_path, causal=False)
    text = shown(path, "--difference")
    assert "cells with weight where the mask blocks" in text
    assert re.search(r"head 0 +0 → 0 -0\.\d\d", text)
    assert re.search(r"! the largest difference is 0\.\d+\n", text)


def test_heads_items_and_the_mean(tmp_path):
    path = dump(tmp_path, {"weights": random_weights(2, 3, 5, 5)})
    alone = shown(path, "--head", 2, "--batch", 1)
    assert "item 1 of a batch of 2" in alone
    assert "head 2 · entropy" in alone and "head 1" not in alone
    mean = shown(path, "--head", "mean")
    assert "mean of 3 heads" in mean and "head 1" not in mean
    assert shown(path, "--batch", 1) != shown(path, "--batch", 0)


def test_tokens_by_option_and_by_item(tmp_path):
    weights = {"weights": random_weights(2, 1, 2, 3)}
    path = dump(tmp_path, weights)
    text = shown(path, "--tokens", "one two three", "--query-tokens", '["p", "q"]')
    assert re.search(r"[pq] → (one|two|three) 0\.\d\d", text)
    lists = json.dumps([["a", "b", "c"], ["x", "y", "z"]])
    path = dump(tmp_path, weights, tokens=lists)
    assert re.search(r"\d → [abc] 0\.", shown(path))
    assert re.search(r"\d → [xyz] 0\.", shown(path, "--batch", 1))


def test_long_sequences_are_pooled(tmp_path):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, h, 4096, 16, generator=generator) for h in (4, 2))
    path = dump(tmp_path, {"query": query, "key": key}, is_causal="true")
    text = shown(path, "--width", 100, "--color", "true")
    assert_fits(text, 100)
    assert "the sum over its keys, the mean of its queries" in text
    assert "1 × 4 × 4096 × 4096" in text
    assert "0–" in text
    # What the command says of a head is what its weights say.
    scores = (query[0, 3] @ key[0, 1].T / 4).double()
    scores.masked_fill_(torch.ones(4096, 4096, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).mean().item()
    assert f"head 3    {entropy:7.2f}" in text


def test_the_mean_of_heads_is_called_so(tmp_path):
    """nn.MultiheadAttention returns it by default."""
    path, weights = layer_dump(tmp_path, causal=True)
    tensors = {**load_file(path), "weights": weights.mean(1)}
    path = dump(tmp_path, tensors, num_heads="4", mask="blocked")
    text = shown(path)
    assert "4 heads" in text and "mean of 4 heads" in text and "head 0" not in text
    largest = re.search(
        r"! the largest difference is (\S+)\n", shown(path, "--difference")
    )
    assert largest and float(largest[1]) < 1e-6
    refused = show(path, "--head", 0)
    assert "--head must be all or mean, since the dump holds the mean" in refused.stderr
    alone = dump(tmp_path, {"weights": weights[0].mean(0)}, num_heads="4")
    assert "mean of 4 heads" in shown(alone)
    refused = show(dump(tmp_path, {"weights": weights[0]}, num_heads="-1"))
    assert "the dump's num_heads must be from 1 to 65536, got -1" in refused.stderr


def test_files_are_replaced_as_a_whole(tmp_path):
    """And nothing is left of a run that was ended."""
    (tmp_path / "a.svg").write_text("old")
    (tmp_path / "a.svg").chmod(0o600)
    shown("--svg", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.svg").stat().st_mode & 0o777 == 0o600
    path = dump(tmp_path, {"query": torch.randn(1, 16, 2**14, 8)})
    arguments = [COMMAND, "show", path, "--svg", tmp_path / "b.svg"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(arguments, timeout=2)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"a.svg", "dump.safetensors"}


@pytest.mark.parametrize("weight", [1e17, -1e30, 3e38])
def test_a_weight_of_any_size_is_drawn(tmp_path, weight):
    """As exp gives it to whoever subtracts no maximum."""
    path = dump(tmp_path, {"weights": torch.tensor([[weight, 0.5], [0.0, 1.0]])})
    for colour in ("ascii", "true"):
        assert "big" in shown(path, "--color", colour)
