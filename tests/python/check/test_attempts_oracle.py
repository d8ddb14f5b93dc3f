# SPDX-License-Identifier: MIT
"""The attempts are what their table says, by float64 loops and without the checker."""

import warnings

import pytest
import torch
from attempts import oracle, table, table_inputs, weights
from torch import Tensor, nn

HIDDEN_IN_EVALUATION = {
    "dropout_before_softmax",
    "dropout_not_rescaled",
    "dropout_on_context",
    "dropout_missing",
    "dropout_keeps_what_it_should_drop",
}
HIDDEN = {*HIDDEN_IN_EVALUATION, "gradient_detached"}
# Whose matrix projects queries, keys and values, and of whose input.
EXCHANGED = {
    "query_key_swapped": ("kqv", "qkv"),
    "query_value_swapped": ("vkq", "qkv"),
    "key_value_swapped": ("qvk", "qkv"),
    "query_weight_for_keys": ("qqv", "qkv"),
    "query_weight_for_values": ("qkq", "qkv"),
    "key_weight_for_queries": ("kkv", "qkv"),
    "key_weight_for_values": ("qkk", "qkv"),
    "value_weight_for_keys": ("qvv", "qkv"),
    "value_weight_for_queries": ("vkv", "qkv"),
    "key_from_value": ("qkv", "qvv"),
    "value_from_key": ("qkv", "qkk"),
    "value_from_query": ("qkv", "qkq"),
    "query_from_key": ("qkv", "kkv"),
    "inputs_swapped": ("qkv", "qvk"),
    "keys_are_queries": ("qqv", "qqv"),
    "keys_are_values": ("qvv", "qvv"),
    "keys_and_values_exchanged": ("qvk", "qvk"),
    "queries_are_keys": ("kkv", "kkv"),
    "queries_are_values": ("vkv", "vkv"),
    "queries_and_keys_exchanged": ("kqv", "kqv"),
    "values_are_keys": ("qkk", "qkk"),
    "values_are_queries": ("qkq", "qkq"),
}
OF_MASKS = ("mask_", "causal_", "padding_", "returned_weights_unmasked")
RIGHT = table.RIGHT
WRONG = table.WRONG + table_inputs.WRONG
SHOWN = [a for a in WRONG if not HIDDEN & set(a.causes)]
MASKED = [
    a
    for a in SHOWN
    if "causal" not in a.stated
    and all(name.startswith(OF_MASKS) for name in a.causes[0].split("+"))
]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # softmax without dim, which is the fault
        yield


@pytest.mark.parametrize("attempt", RIGHT, ids=str)
def test_right_ones_agree_with_the_loops(attempt):
    found = oracle.verdicts(attempt)
    roles = set(oracle.parameters(attempt.target).values())
    asked = "mask" if "mask" in roles else "causal"
    assert set(found) >= roles & {"padding", asked}
    assert set.intersection(*found.values())


@pytest.mark.parametrize("attempt", SHOWN, ids=str)
def test_wrong_ones_agree_in_no_convention(attempt):
    found = oracle.verdicts(attempt)
    assert found
    assert not set.intersection(*found.values())


@pytest.mark.parametrize(
    "attempt", [a for a in WRONG if EXCHANGED.keys() & set(a.causes)], ids=str
)
def test_exchanged_ones_agree_when_the_loops_exchange_the_same(attempt):
    for cause in EXCHANGED.keys() & set(attempt.causes):
        matrices, sources = EXCHANGED[cause]
        found = oracle.verdicts(attempt, matrices=matrices, sources=sources)
        assert set.intersection(*found.values())


@pytest.mark.parametrize("attempt", MASKED, ids=str)
def test_faults_of_masks_do_not_show_without_one(attempt):
    found = oracle.verdicts(attempt)
    assert found["square"]


@pytest.mark.parametrize(
    "attempt", [a for a in WRONG if "gradient_detached" in a.causes], ids=str
)
def test_gradients_are_missing(attempt):
    assert oracle.verdicts(attempt)["square"]
    dims = oracle.dimensions(attempt, "square")
    target = oracle.build(attempt, dims)
    given = oracle.inputs(attempt, target, dims, "square")
    tensors = [t.requires_grad_() for t in given.values() if isinstance(t, Tensor)]
    assert not torch.autograd.gradcheck(target, tensors, raise_exception=False)


def moments(x: Tensor) -> Tensor:
    """Mean and variance over the batch, of every number in (L, E)."""
    return torch.stack([x.mean(0), x.var(0)])


def draws_as_they_should(attempt: table.Attempt) -> tuple[Tensor, Tensor]:
    """Moments of 20000 draws by the attempt and of those by the definition."""
    torch.manual_seed(3)
    dims = oracle.dimensions(attempt, "square")
    target = oracle.build(attempt, dims).train()
    x = torch.randn(1, dims["Lq"], dims["E"], dtype=torch.float64)
    x = x.expand(20000, -1, -1)
    w = weights.separate(weights.named(target), dims["H"], by_head=False)
    q, k, v = (oracle.project(x, w, role, dims) for role in "qkv")
    p = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
    context = nn.functional.dropout(p, 0.25) @ v
    expected = context.transpose(1, 2).flatten(2) @ w["o.weight"].T + w["o.bias"]
    with torch.no_grad():
        return moments(target(x)), moments(expected)


@pytest.mark.parametrize(
    "attempt",
    [a for a in WRONG if HIDDEN_IN_EVALUATION & set(a.causes)],
    ids=str,
)
def test_dropout_is_distributed_otherwise(attempt):
    assert oracle.verdicts(attempt)["square"]
    found, expected = draws_as_they_should(attempt)
    mean, variance = (found - expected).abs() / expected[1].sqrt()
    assert mean.max() > 0.1 or variance.max() > 0.1


def test_right_dropout_is_distributed_as_defined():
    attempt = next(a for a in RIGHT if str(a) == "published:SelfAttention")
    found, expected = draws_as_they_should(attempt)
    mean, variance = (found - expected).abs() / expected[1].sqrt()
    assert mean.max() < 0.05
    assert (found[1] / expected[1] - 1).abs().max() < 0.1
