# SPDX-License-Identifier: MIT
"""Attention by itself, without weights: in which layout it is called."""

import math

import torch

import multihead


def padded_keys(q, k, v, key_padding_mask=None):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, :], -1e9)
    return scores.softmax(-1) @ v


def padded_queries(q, k, v, key_padding_mask=None):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask.unsqueeze(-1), -1e9)
    return scores.softmax(-1) @ v


def test_padding_settles_whether_there_are_heads():
    """Without it both run with heads, or without a batch."""
    report = multihead.check(padded_keys)
    assert report.cause is None, str(report)
    assert "tensors as (B, L, D)" in report.understood
    assert not report.remarks
    assert multihead.check(padded_queries).cause == "padding_on_queries"


def masked_queries(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask.unsqueeze(-1) == 0, -1e9)
    return scores.softmax(-1) @ v


def test_a_mask_that_fits_only_a_square_without_heads():
    report = multihead.check(masked_queries)
    assert report.cause in ("padding_on_queries", "mask_transposed"), str(report)


def grouped(q, k, v, num_kv_heads, mask=None):
    b, h, n, d = q.shape
    q = q.view(b, num_kv_heads, h // num_kv_heads, n, d)
    scores = torch.einsum("bghld,bgsd->bghls", q, k) / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("bghls,bgsd->bghld", scores.softmax(-1), v)
    return out.reshape(b, h, n, d)


def test_heads_that_are_counted_may_be_there_already():
    report = multihead.check(grouped)
    assert report.cause is None, str(report)
    assert {case["name"] for case in report.cases} >= {"4 groups", "no mask"}


def test_the_complaint_is_about_calls_with_heads():
    def broken(q, k, v, num_kv_heads):
        b, h, n, d = q.shape
        return q.view(b, num_kv_heads, groups, n, d)  # noqa: F821

    report = multihead.check(broken)
    assert report.cause == "raises" and "groups" in str(report)


def tiled(q, k, v, mask=None):
    if k.size(1) != q.size(1):
        shared = q.size(1) // k.size(1)
        k, v = k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def test_a_layout_in_which_nothing_can_go_wrong_proves_nothing():
    assert multihead.check(tiled).cause == "groups_tiled"


def biased(q, k, v, attn_bias=None):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return (scores if attn_bias is None else scores + attn_bias).softmax(-1) @ v


def bias_divided_too(q, k, v, bias=None):
    scores = q @ k.mT
    scores = scores if bias is None else scores + bias
    return (scores / math.sqrt(q.size(-1))).softmax(-1) @ v


def test_a_bias_is_more_than_0_and_infinity():
    report = multihead.check(biased)
    assert report.cause is None, str(report)
    report = multihead.check(bias_divided_too)
    assert not report.passed
    assert report.first_stage in ("scores", "masked scores")


def shares_on_request(q, k, v, enable_gqa=False):
    if enable_gqa:
        shared = q.size(-3) // k.size(-3)
        k, v = k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)
    return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


def test_heads_are_shared_where_a_flag_offers_it():
    assert multihead.check(shares_on_request).cause == "groups_tiled"


def blind_to_the_present(q, k, v):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    earlier = torch.ones(scores.shape[-2:]).tril(-1)
    return scores.masked_fill(earlier == 0, -torch.inf).softmax(-1) @ v


def one_number_lost(q, k, v):
    out = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
    return out.index_fill(-2, torch.tensor(1), math.nan)


def test_some_numbers_that_are_not_finite_may_have_a_name():
    assert multihead.check(blind_to_the_present, causal=True).cause == (
        "causal_misses_diagonal"
    )
    assert multihead.check(one_number_lost).cause == "not_finite"
