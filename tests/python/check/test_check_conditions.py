# SPDX-License-Identifier: MIT
"""Right, right if something is meant that nothing states, wrong, not judged."""

import json
import math
import subprocess
import sys

import pytest
import test_cli
import torch
from safetensors.torch import save_file
from test_check_command import command
from torch import nn
from verdicts import FAULT, RIGHT

import multihead
from multihead.check.report import Finding, Report


def attend(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    return scores.softmax(-1) @ v


def keep(q, k, v, mask=None):
    return attend(q, k, v, None if mask is None else mask == 0)


def keep_as_said(q, k, v, mask=None):
    """mask: True = may attend"""
    return attend(q, k, v, None if mask is None else mask == 0)


def keep_against_its_text(q, k, v, mask=None):
    """mask: 0 = not masked"""
    return attend(q, k, v, None if mask is None else mask == 0)


def without_mask(q, k, v):
    return attend(q, k, v)


def triangular(q, k, v):
    return attend(q, k, v, q.new_ones(q.size(-2), k.size(-2)).triu(1) == 1)


def causal(q, k, v):
    return triangular(q, k, v)


def lengths_of_the_query(q, k, v):
    return attend(q.view(k.shape), k, v)


def adds(q, k, v, attention_mask=None):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return (scores if attention_mask is None else scores + attention_mask).softmax(
        -1
    ) @ v


class Layer(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.heads = num_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))

    def merged(self, *inputs):
        layers = self.q_proj, self.k_proj, self.v_proj
        split = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, x in zip(layers, inputs)
        )
        return attend(*split).transpose(1, 2).flatten(2)

    def forward(self, query, key, value):
        return self.out_proj(self.merged(query, key, value))


class NoOutput(Layer):
    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)
        del self.out_proj

    def forward(self, query, key, value):
        return self.merged(query, key, value)


class OneHeadNoOutput(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(embed_dim, embed_dim) for _ in range(3))

    def forward(self, x):
        return attend(self.q(x), self.k(x), self.v(x))


class OfOneSequence(Layer):
    def forward(self, query, key, value):
        assert query is key is value or torch.equal(query, key), "one sequence"
        return self.out_proj(self.merged(query, key, value))


class Self(Layer):
    def forward(self, x):
        return self.out_proj(self.merged(x, x, x))


class WithResidual(Layer):
    def forward(self, x):
        return x + self.out_proj(self.merged(x, x, x))


class WithResidualAndNorm(WithResidual):
    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x):
        return self.norm(super().forward(x))


class SequenceFirst(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, x):
        return self.attn(x, x, x)[0]


class OverRows(nn.Module):
    """As in SAGAN: what is called keys asks. One head, (B, L, E)."""

    def __init__(self, dim):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def context(self, weights, v):
        return weights.mT @ v

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(1)
        return self.out(self.context(weights, v))


class OverRowsAlone(OverRows):
    """The weights meet the values as if rows added up to 1."""

    def context(self, weights, v):
        return weights @ v


CONDITIONS = {
    attend: ["mask_blocks"],
    keep: ["mask_keeps"],
    keep_as_said: [],
    keep_against_its_text: ["mask_keeps"],
    without_mask: [],
    triangular: ["causal_by_itself"],
    causal: [],
    lengths_of_the_query: ["equal_lengths_only"],
    adds: ["mask_additive"],
    Layer: [],
    NoOutput: ["no_output_projection"],
    OneHeadNoOutput: [],
    OfOneSequence: ["self_attention_only"],
    Self: [],
    WithResidual: ["residual_inside"],
    WithResidualAndNorm: [],
    SequenceFirst: ["sequence_first"],
    OverRows: ["queries_called_keys"],
}


@pytest.mark.parametrize("target", CONDITIONS, ids=lambda t: t.__name__)
def test_what_decides_and_is_not_stated_is_a_condition(target):
    report = multihead.check(target)
    names = [condition["name"] for condition in report.conditions]
    assert report.cause is None and names == CONDITIONS[target], str(report)
    assert report.judgement == ("right_if" if names else "right")
    assert report.passed is (not names) and report.exit_status == (3 if names else 0)
    for condition in report.conditions:
        assert condition["sentence"] in " ".join(str(report).split())
    headline = " ".join(str(report).split())
    assert headline.startswith("! " if names else "✓ ")
    assert ("is right if " if names else "is right: ") in headline


def test_a_softmax_over_queries_is_a_fault_where_rows_are_used():
    assert multihead.check(OverRowsAlone).cause == "softmax_over_queries"


def test_what_is_stated_is_no_condition():
    assert multihead.check(attend, mask="blocked").passed
    assert multihead.check(triangular, causal=True).passed
    assert multihead.check(SequenceFirst, batch_first=False).passed
    assert multihead.check(attend, mask="keep").cause == "mask_inverted"


def test_what_is_allowed_passes():
    for allow in ("mask_keeps", ["causal_by_itself", "mask_keeps"], "all", ("all",)):
        report = multihead.check(keep, allow=allow)
        assert report.passed and report and report.exit_status == 0
        assert report.judgement == "right" and str(report).startswith("✓ keep")
        assert "is right if True in the mask means may attend" in " ".join(
            str(report).split()
        )
    assert not multihead.check(keep, allow=["mask_blocks"]).passed
    assert not multihead.check(lambda q, k, v: attend(q, q, v), allow="all").passed


@pytest.mark.parametrize("allow", ["mask_kept", ["all", "mask"], ("",), [1], None, 3])
def test_unknown_conditions_are_refused(allow):
    if allow == ("",):
        assert not multihead.check(keep, allow=allow).passed
        return
    with pytest.raises(ValueError, match="check: allow must be") as error:
        multihead.check(keep, allow=allow)
    if isinstance(allow, str):
        assert "mask_keeps" in str(error.value) and "'mask_kept'" in str(error.value)


def test_every_form_of_a_report_has_the_condition():
    verdict = {
        **RIGHT,
        "conditions": [
            {"name": "mask_keeps", "sentence": "A <b> holds", "remedy": "Say so."},
            {"name": "sequence_first", "sentence": "C holds", "remedy": ""},
        ],
    }
    report = Report("attend", verdict)
    words = "attend is right if A <b> holds and C holds: within rounding"
    assert words in " ".join(str(report).split())
    assert "\033[1;33m!\033[0m" in report.render("ansi")
    html = report._repr_html_()
    assert '<span class="open">!</span>' in html and "right if A &lt;b&gt;" in html
    assert 'class="open">!</text>' in report.render("svg")
    assert repr(report) == "<multihead.Report: attend: right if …>"
    content = json.loads(report.to_json())
    assert content["judgement"] == "right_if" and content["passed"] is False
    assert content["verdict"] == "rounding" and content["cause"] is None
    assert [c["name"] for c in content["conditions"]] == [
        "mask_keeps",
        "sequence_first",
    ]
    assert not Report("attend", verdict, allow=["mask_keeps"])
    to_pass = "say --allow mask_keeps,sequence_first"
    assert to_pass in " ".join(str(report).split())
    allowed = Report("attend", verdict, allow=["mask_keeps", "sequence_first"])
    assert "--allow" not in str(allowed)
    assert allowed and json.loads(allowed.to_json())["passed"] is True


def test_a_finding_comes_before_a_condition():
    verdict = {**RIGHT, "conditions": [{"name": "mask_keeps", "sentence": "A"}]}
    assert Report("f", verdict, [Finding("hangs", "It hangs.")]).judgement == "wrong"
    assert Report("f", FAULT).judgement == "wrong"
    assert Report("f", None).judgement == "not_judged"


# ---- Not judged -------------------------------------------------------------


def by_a_number(q, k, v, wibble: int, wobble: int):
    """Two numbers of which nothing is known; the last divides the scores."""
    return attend(q * math.sqrt(q.size(-1)) / wobble, k, v)


def by_nothing(q, k, v, wibble, wobble):
    """A mask, perhaps, and what may be None: then it returns something else."""
    return attend(q, k, v) if wobble is not None else attend(q, k, v).square()


def right_by_a_flag(q, k, v, wibble: bool):
    return attend(q, k, v)


def no_mask_by_a_flag(q, k, v, wibble: bool, mask=None):
    return attend(q, k, v, None if mask is None else wibble.at(mask))


def refuses(q, k, v):
    raise ValueError("not these")


def of_512_channels(q, k, v):
    return attend(q, k, v) @ torch.eye(512, dtype=q.dtype)


def misses_a_name(q, k, v, wibble):
    return attend(q, k, w)  # noqa: F821


class MissesAnAttribute(Layer):
    def forward(self, query, key, value):
        return self.output(self.merged(query, key, value))


def needs_a_package(q, k, v):
    import a_package_that_nobody_has

    return a_package_that_nobody_has.attend(q, k, v)


def raises_now_and_then(q, k, v, mask=None):
    return attend(q, k, v, mask.no_such_method() if mask is not None else None)


NOT_JUDGED = {
    by_a_number: "argument_guessed",
    by_nothing: "argument_guessed",
    refuses: "raises",
    of_512_channels: "raises",
    needs_a_package: "missing_package",
}
WRONG = {
    misses_a_name: "raises",
    MissesAnAttribute: "raises",
    raises_now_and_then: "raises",
}


@pytest.mark.parametrize("target", NOT_JUDGED, ids=lambda t: t.__name__)
def test_what_cannot_be_judged_is_not_accused(target):
    report = multihead.check(target)
    assert report.cause == NOT_JUDGED[target], str(report)
    assert report.judgement == "not_judged" and report.exit_status == 2
    assert report.unchecked and not report.passed
    text = str(report)
    assert text.startswith("? ") and "is not judged" in text and "✗" not in text
    (finding,) = report.findings
    assert finding.remedy and "wobble" in finding.sentence or not target.__doc__


@pytest.mark.parametrize("target", WRONG, ids=lambda t: t.__name__)
def test_what_no_argument_brings_about_is_wrong(target):
    report = multihead.check(target)
    assert report.cause == WRONG[target], str(report)
    assert report.judgement == "wrong" and report.exit_status == 1
    assert str(report).startswith("✗ ") and "is wrong: it " in str(report)


def test_right_code_is_right_whatever_was_made_up():
    assert multihead.check(right_by_a_flag).judgement == "right"
    report = multihead.check(no_mask_by_a_flag)
    assert report.judgement == "not_judged", str(report)
    assert "wibble.at(mask)" in report.findings[0].detail


class Unknown(Layer):
    """Cubes weights, masked or not: no run says what its mask means."""

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, x in (
                (self.q_proj, query),
                (self.k_proj, key),
                (self.v_proj, value),
            )
        )
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) ** 3
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def test_what_nothing_explains_has_no_assumption_without_support():
    report = multihead.check(Unknown)
    assert report.cause == "unknown" and report.assumptions == [], str(report)


# ---- The command ------------------------------------------------------------

CODE = """
def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v
"""


@test_cli.pytestmark
def test_exit_statuses_of_check(tmp_path):
    (tmp_path / "a.py").write_text(CODE)

    def run(*options):
        return command("check", "a.py", *options, cwd=tmp_path)

    done = run()
    assert done.returncode == 3 and done.stdout.startswith(
        "! attend (a.py:2) is right if True in the mask means may attend:"
    )
    for options in (
        ("--allow", "mask_keeps"),
        ("--allow", "mask_blocks,mask_keeps"),
        ("--allow", "mask_blocks", "--allow", "mask_keeps"),
        ("--allow", "all"),
        ("--mask", "keep"),
    ):
        done = run(*options)
        assert done.returncode == 0 and done.stdout.startswith("✓ "), done.stderr
    assert run("--allow", "mask_blocks").returncode == 3
    done = run("--allow", "mask_kept")
    assert done.returncode == 2 and done.stdout == ""
    assert "mask_keeps" in done.stderr and "mask_kept" in done.stderr
    report = json.loads(run("--json").stdout)
    assert report["judgement"] == "right_if" and report["passed"] is False
    own = [sys.executable, "-m", "multihead.check", str(tmp_path / "a.py")]
    assert subprocess.run(own, capture_output=True).returncode == 3
    own += ["--allow", "all"]
    assert subprocess.run(own, capture_output=True).returncode == 0


@test_cli.pytestmark
def test_exit_statuses_of_explain(tmp_path):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.rand(5, 7) > 0.6
    mask[:, 0] = False
    tensors = {"query": q, "key": k, "value": v, "mask": mask}
    save_file({**tensors, "out": attend(q, k, v, mask)}, tmp_path / "a.safetensors")

    def run(*options):
        return command("explain", *options, "a.safetensors", cwd=tmp_path)

    done = run()
    assert done.returncode == 3 and done.stdout.startswith(
        "! a.safetensors is right if True in the mask means blocked:"
    )
    assert json.loads(run("--json").stdout)["judgement"] == "right_if"
    for options in (("--allow", "mask_blocks"), ("--mask", "blocked")):
        done = run(*options)
        assert done.returncode == 0 and done.stdout.startswith("✓ "), done.stderr
    assert run("--mask", "keep").returncode == 1
    assert "mask_keeps" in run("--allow", "nonsense").stderr


class WithItsFeedForward(Self):
    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)
        self.up = nn.Linear(embed_dim, 2 * embed_dim)
        self.down = nn.Linear(2 * embed_dim, embed_dim)

    def forward(self, x):
        return self.down(self.up(super().forward(x)).relu())


def test_what_other_layers_do_is_a_condition():
    report = multihead.check(WithItsFeedForward)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["layers_beside"]
    sentences = [fact["sentence"] for fact in report.assumptions]
    assert any("`up.weight` and `down.weight`" in said for said in sentences)


class WeighsByPosition(Self):
    """Weights are multiplied by learned numbers, after the softmax."""

    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)
        self.by_time = nn.Parameter(torch.rand(300, 300))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        weights = weights * self.by_time[: x.size(1), : x.size(1)]
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def test_what_other_layers_do_among_the_heads_is_not_judged():
    report = multihead.check(WeighsByPosition)
    assert report.cause == "other_layers" and report.unchecked, str(report)
    assert "`by_time`" in report.findings[0].sentence


class WithinBlocks(nn.Module):
    """Cuts the sequence into blocks, the last of which is filled up."""

    def __init__(self, dim, num_heads, chunk_size=4):
        super().__init__()
        self.heads, self.size = num_heads, chunk_size
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        length = x.size(1)
        filled = nn.functional.pad(x, (0, 0, 0, -length % self.size))
        real = (torch.arange(filled.size(1)) < length).unflatten(0, (-1, self.size))
        layers = self.q(filled), self.k(filled), self.v(filled)
        q, k, v = (
            t.unflatten(1, (-1, self.size)).unflatten(-1, (self.heads, -1))
            for t in layers
        )
        q, k, v = (t.transpose(2, 3) for t in (q, k, v))
        scores = self.scale(q @ k.mT).masked_fill(~real[:, None, None], -torch.inf)
        context = (self.block(scores).softmax(-1) @ v).transpose(2, 3)
        return self.out(context.flatten(3).flatten(1, 2)[:, :length])

    def scale(self, scores):
        return scores / (self.q.in_features // self.heads) ** 0.5

    def block(self, scores):
        return scores


class CausalWithinBlocks(WithinBlocks):
    def block(self, scores):
        later = torch.ones(self.size, self.size, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf)


class UnscaledWithinBlocks(WithinBlocks):
    def scale(self, scores):
        return scores


@pytest.mark.parametrize("target", [WithinBlocks, CausalWithinBlocks])
def test_attention_within_blocks_is_right_if_that_is_meant(target):
    report = multihead.check(target)
    assert report.cause is None and report.verdict is not None, str(report)
    assert [c["name"] for c in report.conditions] == ["within_blocks"]


def test_a_fault_within_blocks_is_named():
    assert multihead.check(UnscaledWithinBlocks).cause == "scale_missing"
