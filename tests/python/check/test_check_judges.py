# SPDX-License-Identifier: MIT
"""Nothing right is accused of what a check itself guessed, and nothing wrong passes
for want of a case that shows it."""

import functools
import inspect
import json
import math
import os
import subprocess
import sys

import pytest
import test_cli
import torch.nn.functional as F
from test_check_command import command
from torch import nn
from verdicts import RIGHT as RIGHT_VERDICT

import multihead
from multihead._library import diagnosis
from multihead.check.report import Finding, Report


class Layer(nn.Module):
    """Multi-head attention, batch first, in parts that the tests below change."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.heads = num_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, query, key, value):
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        heads = F.scaled_dot_product_attention(*map(self.split, (q, k, v)))
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def forward(self, query, key, value):
        return self.attend(query, key, value)


# ---- Signatures that are known as a whole -----------------------------------

FUNCTIONAL = [F.multi_head_attention_forward, multihead.multi_head_attention_forward]


@pytest.mark.parametrize("function", FUNCTIONAL, ids=lambda f: f.__module__)
def test_the_functional_forms_are_right(function):
    report = multihead.check(function)
    assert report.passed, str(report)
    assert "taken for" not in " ".join(report.understood)
    names = {case["name"] for case in report.cases}
    assert {"padding and mask", "is_causal", "weights per head"} <= names


def without_biases_of_keys(
    query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias,
    out_proj_weight, out_proj_bias, key_padding_mask=None, attn_mask=None,
):  # fmt: skip
    return FUNCTIONAL[0](
        query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias,
        None, None, False, 0.0, out_proj_weight, out_proj_bias,
        key_padding_mask=key_padding_mask, attn_mask=attn_mask,
    )  # fmt: skip


PARTLY = [
    without_biases_of_keys,
    functools.partial(FUNCTIONAL[0], add_zero_attn=False),
    functools.partial(FUNCTIONAL[0], bias_k=None, bias_v=None),
]


@pytest.mark.parametrize("function", PARTLY, ids=["subset", "partial", "two fixed"])
def test_a_part_of_a_known_signature_is_right(function):
    report = multihead.check(function, allow="all")
    assert report.passed, str(report)


def test_what_a_function_of_any_arguments_lacks_is_not_its_fault():
    report = multihead.check(lambda *args: FUNCTIONAL[0](*args))
    assert report.unchecked and report.cause == "not_called", str(report)
    assert multihead.check(lambda *args: F.scaled_dot_product_attention(*args)).passed


def test_a_fault_behind_a_known_signature_is_named():
    def swapped(query, key, value, *others, **keywords):
        return FUNCTIONAL[0](query, value, key, *others, **keywords)

    swapped.__signature__ = inspect.signature(FUNCTIONAL[0])
    assert multihead.check(swapped).cause == "inputs_swapped"


# ---- What was guessed -------------------------------------------------------

GUESSED = """
import torch

def attend(q, k, v, spline):
    return (q @ k.mT * spline.at(0)).softmax(-1) @ v

def misspelt(q, k, v, spline):
    return (q @ k.mT * spilne).softmax(-1) @ v

def called_shape(q, k, v, spline):
    batch, length, width = q.shape()
    return q

class Attend:
    def __init__(self, kernel):
        self.weight = kernel.weight

    def forward(self, x):
        return x

class Misnamed(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, rank=3)

    def forward(self, x):
        return x

class OfABias(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        torch.nn.init.xavier_normal_(self.layer.bias)

    def forward(self, x):
        return x
"""


@pytest.mark.parametrize("name, argument", [("attend", "spline"), ("Attend", "kernel")])
def test_what_was_guessed_is_not_the_codes_fault(tmp_path, name, argument):
    file = tmp_path / "attention.py"
    file.write_text(GUESSED)
    report = multihead.check(f"{file}:{name}")
    assert report.unchecked and not report.passed and not report
    assert report.cause == "not_called"
    text = str(report)
    assert text.startswith("? ") and "could not be called" in text and "✗" not in text
    assert f"`{argument}`" in report.findings[0].sentence
    assert "AttributeError" in report.findings[0].sentence
    assert "inputs=" in report.findings[0].remedy


@pytest.mark.parametrize("name", ["misspelt", "called_shape", "Misnamed", "OfABias"])
def test_what_no_argument_brings_about_is_the_codes_fault(tmp_path, name):
    file = tmp_path / "attention.py"
    file.write_text(GUESSED)
    report = multihead.check(f"{file}:{name}")
    assert report.cause == "raises" and not report.unchecked
    assert str(report).startswith("✗ ")


@test_cli.pytestmark
def test_the_status_of_what_could_not_be_called_is_2(tmp_path):
    file = tmp_path / "attention.py"
    file.write_text(GUESSED)
    done = command("check", f"{file}:attend", "--json", cwd=tmp_path)
    assert done.returncode == 2 and "spline" not in done.stderr
    assert json.loads(done.stdout)["cause"] == "not_called"
    own = subprocess.run(
        [sys.executable, "-m", "multihead.check", f"{file}:attend"],
        capture_output=True,
        text=True,
    )
    assert own.returncode == 2 and own.stdout.startswith("? ")


def test_heads_that_do_not_divide_are_said_to():
    module = nn.MultiheadAttention(48, 8, batch_first=True)
    with pytest.raises(ValueError, match="num_heads must divide .* got 7"):
        multihead.check(module, num_heads=7)


# ---- Lengths ----------------------------------------------------------------


class FirstKeys(Layer):
    seen = 8

    def forward(self, query, key, value):
        return self.attend(query, key[:, : self.seen], value[:, : self.seen])


class FirstKeysOfItself(FirstKeys):
    seen = 128

    def forward(self, x):
        return super().forward(x, x, x)


@pytest.mark.parametrize("kind", [FirstKeys, FirstKeysOfItself])
def test_a_window_longer_than_the_small_cases_is_seen(kind):
    report = multihead.check(kind)
    assert report.cause == "unknown", str(report)
    wrong = [case for case in report.cases if not case["agrees"]]
    assert [case["shape"][1] for case in wrong] == [130]


def test_code_that_takes_no_long_sequences_still_passes():
    class Short(Layer):
        def forward(self, x):
            if x.shape[1] > 64:
                raise ValueError("at most 64 positions")
            return self.attend(x, x, x)

    report = multihead.check(Short)
    assert report.passed, str(report)


# ---- Batch or sequence first ------------------------------------------------


class SequenceFirstInside(Layer):
    def forward(self, query, key, value):
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        L, N, E = q.shape
        d = E // self.heads
        q = self.q_proj(q).reshape(L, N * self.heads, d).transpose(0, 1)
        k = self.k_proj(k).reshape(-1, N * self.heads, d).transpose(0, 1)
        v = self.v_proj(v).reshape(-1, N * self.heads, d).transpose(0, 1)
        out = (q @ k.mT / math.sqrt(d)).softmax(-1) @ v
        return self.out_proj(out.transpose(0, 1).reshape(L, N, E)).transpose(0, 1)


class NamesExchanged(Layer):
    def forward(self, query, key, value):
        L, N, E = query.shape
        return self.attend(query, key, value)


@pytest.mark.parametrize("kind", [SequenceFirstInside, NamesExchanged])
def test_names_inside_only_order_the_readings(kind):
    report = multihead.check(kind)
    assert report.passed, str(report)
    assert "batch_first" in [a["name"] for a in report.assumptions]
    assert "tensors as (L, B, E)" not in report.understood


def test_the_shape_of_an_input_is_believed():
    class Forgotten(nn.Module):
        def __init__(self, embed_dim, num_heads):
            super().__init__()
            self.attn = nn.MultiheadAttention(embed_dim, num_heads)

        def forward(self, x):
            B, L, E = x.shape
            return self.attn(x, x, x)[0]

    assert multihead.check(Forgotten).cause == "batch_and_sequence_exchanged"


# ---- Dropout, remarks, threads ----------------------------------------------


class OutputAlwaysDropped(Layer):
    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__(embed_dim, num_heads)
        self.p = dropout

    def forward(self, query, key, value):
        return F.dropout(self.attend(query, key, value), self.p)


def test_output_dropout_left_on_is_named():
    report = multihead.check(OutputAlwaysDropped)
    assert report.cause == "dropout_left_on", str(report)
    (fault,) = report.verdict["faults"]
    assert report.first_stage == fault["stage"] == "output"
    assert "F.dropout(out, p, training=self.training)" in fault["remedy"]
    assert "weights" not in " ".join(fault.values())


def test_the_same_remark_is_printed_once():
    said = {"name": "nan_rows", "sentence": "Rows are NaN.", "remedy": "Set them."}
    verdict = {**RIGHT_VERDICT, "remarks": [said, dict(said)]}
    again = Finding("nan_rows", "Rows are NaN.", "Set them.", kind="remark")
    report = Report("attention.py", verdict, [again])
    assert len(report.remarks) == 1
    assert str(report).count("Rows are NaN.") == 1
    text = diagnosis().render_report(json.dumps(verdict), "text", 80)
    assert text.count("Rows are NaN.") == 1


ONE_THREAD = """
import os
import torch
from multihead.check.reading.observation import Observation, explain
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 256, 4, dtype=torch.float64)
rows = [(row @ k[0, 0].mT / 2).softmax(-1) @ v[0, 0] for row in q[0, 0, :, None]]
seen = Observation({"query": q, "key": k, "value": v, "out": torch.cat(rows)[None, None]})
threads, before = torch.get_num_threads(), len(os.listdir("/proc/self/task"))
assert explain([seen])["verdict"] == "rounding"
assert torch.get_num_threads() == threads
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_explain_starts_no_threads():
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", ONE_THREAD],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout == "0\n"
