# SPDX-License-Identifier: MIT
"""What `multihead show` refuses."""

from __future__ import annotations

import pytest
import test_show
import torch
from pictures import show, shown
from test_show import dump, random_weights

pytestmark = test_show.pytestmark

ERRORS = [
    (("--head", "9"), "--head must be all, mean or a head from 0 to 2, got 9"),
    (("--head", "x"), "--head must be all, mean or a head from 0 to 2, got x"),
    (("--batch", "2"), "--batch must be an item from 0 to 1, got 2"),
    (
        ("--tokens", "a b"),
        "--tokens must have one entry for each of the 5 positions, got 2 entries",
    ),
    (
        ("--query-tokens", '["a"]'),
        "--query-tokens must have one entry for each of the 4 positions, got 1 entry",
    ),
    (
        ("--tokens", '["a", 1]'),
        '--tokens must be words between spaces or a JSON array of strings, got ["a", 1]',
    ),
    (
        ("--tokens", '[["a"], ["b"], ["c"]]'),
        "--tokens must be one list, or one for each of the 2 items, got 3 lists",
    ),
    (
        ("--difference",),
        "must hold weights and inputs, from which they follow, for --difference "
        "without a file, got weights alone",
    ),
    (("--svg", "/nonexistent/x.svg"), "show: --svg /nonexistent/x.svg"),
    (("--svg", "-", "--png", "-"), "show: only one output must be printed, got 2"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=lambda x: str(x)[:30])
def test_errors(tmp_path, arguments, message):
    path = dump(tmp_path, {"weights": random_weights(2, 3, 4, 5)})
    result = show(path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == "" and result.stderr.count("\n") == 1


def test_differences_need_one_shape(tmp_path):
    (tmp_path / "a").mkdir()
    one = dump(tmp_path / "a", {"weights": random_weights(3, 5, 5)})
    two = dump(tmp_path, {"weights": random_weights(2, 5, 5)})
    result = show(one, "--difference", two)
    assert result.returncode == 2
    assert (
        "--difference must have weights of the same shape, 1 × 3 × 5 × 5, "
        "got 1 × 2 × 5 × 5"
    ) in result.stderr
    result = show("--difference", two)
    assert "--difference must come with a dump, got none" in result.stderr


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"out": torch.zeros(2)}, "must hold a tensor weights, query or x, got out"),
        ({"weights": torch.zeros(3)}, "the dump's weights must be floating and have"),
        ({"weights": torch.ones(2, 2).int()}, "the dump's weights must be floating"),
        ({"weights": torch.zeros(0, 4)}, "without a size of 0"),
        (
            {"weights": torch.rand(3, 3), "mask": torch.ones(3, 3).bool()},
            "the dump's mask must be known as blocked, keep or additive",
        ),
        (
            {"weights": torch.rand(3, 3), "mask": torch.ones(2, 5).bool()},
            "mask must broadcast to (B, H, Lq, Lk)",
        ),
    ],
)
def test_dumps_that_cannot_be_shown(tmp_path, tensors, message):
    result = show(dump(tmp_path, tensors))
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        *(("--num-heads", 3), ("--batch", 0), ("--weights", "x")),
        *(("--tokens", "a"), ("--query-tokens", "a"), ("--mask", "keep")),
        ("--difference",),
    ],
    ids=lambda option: option[0],
)
def test_no_option_is_ignored(option):
    result = show(*option)
    assert result.returncode == 2 and result.stdout == ""
    assert f"show: {option[0]} must come with" in result.stderr


def test_groups_must_divide_the_heads(tmp_path):
    weights = {"weights": random_weights(6, 4, 4)}
    assert "└─0─┘" in shown(dump(tmp_path, weights, num_kv_heads="2"))
    result = show(dump(tmp_path, weights, num_kv_heads="4"))
    assert result.returncode == 2
    assert "the dump's num_kv_heads must divide its 6 heads, got 4" in result.stderr


def test_files_that_are_none(tmp_path):
    missing = show(tmp_path / "none.safetensors")
    assert missing.returncode == 2 and "No such file" in missing.stderr
    (tmp_path / "text").write_text("no header, but long enough to have one")
    assert "a safetensors file, got text" in show(tmp_path / "text").stderr
