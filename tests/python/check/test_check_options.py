# SPDX-License-Identifier: MIT
"""What may be said to `check`, and what is said to it by threads."""

import sys
import threading

import check_samples as samples
import pytest
import torch
from torch import nn

import multihead


@pytest.mark.parametrize(
    "stated, message",
    [
        (
            {"mask": "inverted"},
            "mask must be 'blocked', 'keep' or 'additive', got 'inv",
        ),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"embed_dim": 10, "num_heads": 4}, "embed_dim must be divisible by num_heads"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_heads must be divisible by num_kv"),
        ({"time_limit": 0}, "time_limit must be positive, got 0"),
        ({"inputs": (torch.ones(2, 3).int(),)}, "inputs must be floating-point"),
        (
            {"inputs": {"w": 1}},
            "inputs must be among q, k, v, num_heads, d_model, mask",
        ),
        ({"inputs": [1] * 9}, "inputs must be at most 6"),
        ({"inputs": {"mask": None}}, "inputs must give a tensor to 'q', got none"),
        ({"inputs": {"q": 1}}, "inputs must give a tensor to 'q', got int"),
        ({"inputs": (torch.ones(2, 3, 48),)}, "inputs must give a value to 'k', got"),
        ({"time_limit": "x"}, "time_limit must be positive, got 'x'"),
        ({"weights": 5}, "weights must be a module or a dictionary .*, got int"),
        ({"batch_first": 3}, "batch_first must be True, False or None, got 3"),
        ({"causal": "x"}, "causal must be True, False or None, got 'x'"),
    ],
)
def test_arguments_that_cannot_be(stated, message):
    with pytest.raises(ValueError, match=f"^check: {message}"):
        multihead.check(samples.layers_inside, **stated)


def cuts_values(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v[..., : k.shape[-2], :]


def test_inputs_that_do_not_fit_together():
    q, k, v = torch.ones(2, 3, 8), torch.ones(2, 4, 8), torch.ones(2, 5, 8)
    with pytest.raises(ValueError, match="^check: inputs: .* key and value one length"):
        multihead.check(cuts_values, inputs=(q, k, v))


def test_stated_sizes_are_used():
    report = multihead.check(samples.layers_inside, num_heads=3, embed_dim=30)
    assert report.cause is None and report.cases[0]["shape"][-1] == 30


@pytest.mark.parametrize("heads", [7, 5, 50])  # 50: more than the usual width
def test_a_stated_number_of_heads_divides_the_width(heads):
    for target in (samples.layers_inside, samples.grouped):
        report = multihead.check(target, num_heads=heads)
        assert report.cause is None, str(report)
        assert report.cases[0]["shape"][-1] % heads == 0


def test_no_time_limit_is_one_too():
    assert multihead.check(samples.core, time_limit=float("inf")).cause is None


def test_a_target_without_a_name_is_quoted():
    with pytest.raises(FileNotFoundError, match="must name a file, got ''"):
        multihead.check("")


def drops_in_a_layer(q, k, v, dropout=nn.Dropout(0.0)):  # noqa: B008
    return dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v


def drops_in_a_function(q, k, v, dropout=lambda weights: weights):
    return dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v


@pytest.mark.parametrize("target", [drops_in_a_layer, drops_in_a_function])
def test_dropout_that_is_called_by_default(target):
    report = multihead.check(target)
    assert report.cause is None, str(report)


def test_checks_in_threads_take_turns():
    stdout, dtype = sys.stdout, torch.get_default_dtype()
    reports = []

    def check():
        reports.append(multihead.check(samples.core))
        reports.append(multihead.check(samples.layers_inside))

    threads = [threading.Thread(target=check) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.cause for report in reports] == [None] * 6
    assert sys.stdout is stdout and torch.get_default_dtype() is dtype
