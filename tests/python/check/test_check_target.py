# SPDX-License-Identifier: MIT
"""`check`: how code is found, built and called, and what is said of code that does
not do as attention does."""

import functools
import textwrap

import check_samples as samples
import pytest
import torch
from torch import nn

import multihead
from multihead.check.options import Options
from multihead.check.session import examine
from multihead.check.subject import signature
from multihead.check.subject.target import describe


def core(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


def findings(report):
    return {f.name: f for f in report.findings}


RIGHT = [
    samples.layers_inside,
    samples.matrices_inside,
    samples.made_by_a_helper,
    samples.loop_over_heads,
    samples.weights_passed,
    samples.in_numpy,
    samples.grouped,
    samples.Fused,
    samples.Numbered,
    samples.HeadsInTheWeights,
    samples.Wraps,
    samples.Configured,
    samples.AnyLength,
    samples.LengthsFirst,
    samples.core,
    samples.core_of_one_head,
    core,
    lambda q, k, v: core(q, k, v),
    functools.partial(samples.layers_inside, num_heads=4, d_model=32),
    torch.nn.functional.scaled_dot_product_attention,
    nn.MultiheadAttention,
    nn.MultiheadAttention(32, 4, dropout=0.1, bias=False),
    multihead.MultiheadAttention,
    multihead.GroupedQueryAttention(32, 8, 4, batch_first=True),
    multihead.scaled_dot_product_attention,
    multihead.textbook.multi_head_attention,
    multihead.textbook.grouped_query_attention,
    multihead.textbook.MultiHeadAttention,
]


@pytest.mark.parametrize("target", RIGHT, ids=lambda t: describe(t).name)
def test_right_code_of_any_style_passes(target):
    report = multihead.check(target)
    assert report.cause is None, (report.cause, report.findings)
    assert len(report.cases) >= 2


ROLES = {
    "q k v num_heads d_model mask": "query key value num_heads embed_dim mask",
    "Q K V mask": "query key value mask",
    "x mask": "x mask",
    "h n_heads": "x num_heads",
    "x_q x_kv": "query context",
    "query kv": "query context",
    "hidden_states encoder_hidden_states attention_mask": "x context mask",
    "queries keys values valid_lens": "query key value lengths",
    "query key value key_padding_mask need_weights attn_mask": (
        "query key value padding need_weights mask"
    ),
    "x W_q W_k W_v W_o b_q": "x weight weight weight weight weight",
    "eins zwei drei": "query key value",
    "q k v num_query_groups dropout_p training is_causal": (
        "query key value num_kv_heads dropout training is_causal"
    ),
}


@pytest.mark.parametrize("names", ROLES)
def test_names_say_what_an_argument_is(names):
    scope = {}
    exec(f"def f({names.replace(' ', ', ')}): pass", scope)
    call = signature.read(describe(scope["f"]))
    roles = [role or "-" for role in call.roles.values()]
    expected = ROLES[names].split()
    if names == "x_q x_kv":
        expected = ["query", "context"]
    assert roles == expected


def test_a_file_is_checked_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
        import torch

        def helper(x):
            return x

        def attention(q, k, v):
            return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v

        assert torch.equal(attention(*torch.ones(3, 1, 2, 2)), torch.zeros(1, 2, 2))
        """)
    )
    for target in (f"{file}:attention", str(file), file):
        report = multihead.check(target)
        assert report.cause is None and report.target.startswith("attention (mine.py:")
        assert any(remark["name"] == "file_stops" for remark in report.remarks)
    with pytest.raises(ValueError, match="must name something defined .* got 'other'"):
        multihead.check(f"{file}:other")
    with pytest.raises(FileNotFoundError, match="must name a file"):
        multihead.check(str(tmp_path / "absent.py"))
    file.write_text("def one(x):\n    return x\n\ndef two(x):\n    return x\n")
    with pytest.raises(ValueError, match="must say which .* defines one, two"):
        multihead.check(str(file))


def test_only_what_can_be_called_is_a_target():
    with pytest.raises(ValueError, match="target must be a function, .* got int"):
        multihead.check(3)
    with pytest.raises(ValueError, match="target must take tensors"):
        multihead.check(lambda: None)


class AnswersNothing:
    def __getattr__(self, name):
        raise RuntimeError(name)


def test_an_object_that_hides_its_attributes_is_no_target():
    with pytest.raises(ValueError, match="target must be .* got AnswersNothing"):
        multihead.check(AnswersNothing())


def test_code_that_refuses_sizes_gets_others():
    def width_64(q, k, v, d_model, mask=None):
        return samples.layers_inside(q, k, v, d_model // 64, d_model, mask)

    report = multihead.check(width_64)
    assert report.cause is None and report.cases[0]["shape"] == [3, 5, 256]

    def equal_lengths(q, k, v):
        return core(q, k.view(q.shape), v)

    report = multihead.check(equal_lengths)
    assert report.cause is None
    assert any("longer than the queries" in r["sentence"] for r in report.remarks)


def test_sequence_first_is_recognised():
    def sequence_first(q, k, v, num_heads, d_model):
        L, N, E = q.shape
        swap = [t.transpose(0, 1) for t in (q, k, v)]
        return samples.layers_inside(*swap, num_heads, d_model).transpose(0, 1)

    report = multihead.check(sequence_first)
    assert report.cause is None and "tensors as (L, B, E)" in report.understood


def test_sequence_first_is_tried_where_nothing_speaks_against_it():
    def silent(q, k, v, num_heads, d_model):
        swap = [t.transpose(0, 1) for t in (q, k, v)]
        return samples.layers_inside(*swap, num_heads, d_model).transpose(0, 1)

    assert multihead.check(silent).cause is None
    report = multihead.check(silent, batch_first=True)
    assert report.cause == "batch_and_sequence_exchanged"


def test_a_module_that_keeps_its_last_weights_can_be_copied():
    class Keeps(samples.Fused):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    module = Keeps(16, 2)
    module(torch.ones(1, 2, 16))
    last = module.last
    assert multihead.check(module).cause is None
    assert module.last is last


def raises(q, k, v):
    return torch.softmaks(q @ k.mT, dim=-1) @ v


def returns_nothing(q, k, v):
    core(q, k, v)


def wrong_type(q, k, v):
    return core(q, k, v).tolist()


def returns_the_weights(q, k, v):
    return torch.softmax(q @ k.mT, dim=-1)


def test_weights_are_recognised():
    found = findings(multihead.check(returns_the_weights))["wrong_shape"]
    assert "`weights @ v`" in found.remedy


def wrong_shape(q, k, v):
    return core(q, k, v)[..., :2]


def integer_output(q, k, v):
    return core(q, k, v).long()


def not_finite(q, k, v):
    return core(q, k, v) / 0 - core(q, k, v) / 0


def random(q, k, v):
    return core(q, k, v) + torch.randn(q.shape)


def changes_inputs(q, k, v, mask=None):
    q /= q.shape[-1] ** 0.5
    scores = q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def changes_global_state(q, k, v):
    torch.manual_seed(0)
    return core(q, k, v)


MISBEHAVING = [
    raises,
    returns_nothing,
    wrong_type,
    wrong_shape,
    integer_output,
    not_finite,
    random,
    changes_inputs,
    changes_global_state,
]


@pytest.mark.parametrize("target", MISBEHAVING, ids=lambda t: t.__name__)
def test_code_that_misbehaves_is_a_finding(target):
    report = multihead.check(target)
    assert not report.passed and report.cause == target.__name__
    assert str(report)


@pytest.mark.parametrize(
    "make, kind",
    [
        (torch.Tensor.to_sparse, "a sparse tensor"),
        (lambda t: t.to(torch.complex64), "complex numbers"),
        (lambda t: torch.nested.as_nested_tensor(list(t)), "a nested tensor"),
        (lambda t: t.to("meta"), "a tensor on the device 'meta'"),
        (
            lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
            "a quantized tensor",
        ),
    ],
)
def test_tensors_of_another_kind_are_a_finding(make, kind):
    report = multihead.check(lambda q, k, v: make(core(q, k, v)))
    assert f"It returns {kind}" in findings(report)["wrong_type"].sentence


def test_an_error_is_shown_with_its_line_and_call():
    found = findings(multihead.check(raises))["raises"]
    assert "has no attribute 'softmaks'" in found.sentence
    assert "torch.softmaks(q @ k.mT, dim=-1) @ v" in found.detail
    assert "called as raises(q (3, 5, 48), k (3, 7, 48), v (3, 7, 48))" in found.detail


def test_a_loop_without_end_is_stopped():
    def loops(q, k, v):
        while True:
            core(q, k, v)

    report = multihead.check(loops, time_limit=0.5)
    assert report.cause == "hangs" and report.seconds < 5


def test_an_endless_recursion_is_seen_at_once():
    def deep(q, k, v):
        return deep(q, k, v)

    report = multihead.check(deep)
    assert "RecursionError" in findings(report)["raises"].sentence
    assert report.seconds < 2


def test_prints_are_a_remark():
    def prints(q, k, v):
        print("shape", q.shape)
        return core(q, k, v)

    report = multihead.check(prints)
    assert report.cause is None
    assert [r for r in report.remarks if r["name"] == "prints"]


def test_a_mask_that_is_never_taken_is_said():
    def mistaken(q, k, v, mask=None):
        return core(q, k, v) if mask is None else mask.apply(q)

    report = multihead.check(mistaken)
    assert "No mask that was tried is taken" in findings(report)["raises"].sentence

    def particular(q, k, v, mask=None):
        return core(q, k, v) if mask is None else core(q, k, v) + mask.view(9, 9)

    report = multihead.check(particular)
    assert report.cause is None
    assert any("No mask that was tried" in r["sentence"] for r in report.remarks)


def test_weights_out_of_sight_may_be_given():
    class Hidden:
        __slots__ = ("matrices",)

    hidden = Hidden()
    hidden.matrices = [torch.randn(16, 16, dtype=torch.float64) for _ in range(4)]

    def attention(x):
        return samples.weights_passed(x, *hidden.matrices, num_heads=4)

    given = dict(zip(("W_q", "W_k", "W_v", "W_o"), hidden.matrices))
    report = multihead.check(attention, weights=given, embed_dim=16, num_heads=4)
    assert report.cause is None and "W_q" in " ".join(report.understood)


def test_global_state_is_as_before():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    multihead.check(samples.Fused)
    assert torch.equal(torch.rand(3), wanted)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


def test_progress_names_the_cases():
    names = []
    examine(samples.layers_inside, Options(), names.append)
    assert names[:3] == ["loading", "first call", "no mask"]
    assert "causal mask" in names and names[-1] == "verdict"
