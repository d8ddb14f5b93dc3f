# SPDX-License-Identifier: MIT
"""What `check` says of the attempts: no right one accused, the wrong ones named."""

import functools
import random
import time
import warnings

import numpy as np
import pytest
import torch
from attempts import table, table_beside, table_inputs, table_unusual
from attempts.table import FOLDER, MISBEHAVING, Attempt

import multihead
from multihead._library import diagnosis

RIGHT = table.RIGHT + table_beside.RIGHT + table_unusual.RIGHT
WRONG = table.WRONG + table_inputs.WRONG + table_unusual.WRONG + table_beside.WRONG
NAMED = 0.95  # of the wrong ones whose fault has a name
TYPICAL = ("right_functions:exercise_keep", "right_modules:SplitAndCombine")


NAMES, IN_ORDER, HEADLINES = diagnosis().faults()  # ordered by stage
STAGES = dict(zip(NAMES, IN_ORDER))


def first_stages(attempt: Attempt) -> set[str]:
    """Those that may be called the first to differ: of two faults, the earlier."""
    if attempt.stages:
        return set(attempt.stages)
    causes = [cause.split("+") for cause in attempt.causes]
    return {min((STAGES[n] for n in names), key=IN_ORDER.index) for names in causes}


@functools.cache
def report(attempt: Attempt):
    """One report for all tests of an attempt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return multihead.check(attempt.target, allow="all", **attempt.stated)


def state() -> list:
    """What code may change for everybody else."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    ]


@pytest.mark.parametrize("attempt", RIGHT, ids=str)
def test_right_ones_pass(attempt):
    found = report(attempt)
    assert found.passed and bool(found), str(found)
    assert found.cause is None and found.causes == []


@pytest.mark.parametrize("attempt", WRONG, ids=str)
def test_wrong_ones_get_no_wrong_name(attempt):
    found = report(attempt)
    assert not found.passed and not bool(found)
    assert found.cause == "unknown" or attempt.is_(found.cause), str(found)
    if found.cause == "unknown":
        assert found.first_stage in first_stages(attempt), str(found)


def test_every_fault_of_the_catalogue_has_a_headline():
    assert all(HEADLINES)


def test_every_fault_of_the_catalogue_has_an_attempt():
    named = {n for a in WRONG for cause in a.causes for n in cause.split("+")}
    assert sorted(STAGES.keys() - named) == []
    assert sorted(named - STAGES.keys()) == ["unknown"]


def test_nearly_all_faults_are_named():
    with_name = [a for a in WRONG if not a.is_("unknown")]
    missed = [str(a) for a in with_name if not a.is_(report(a).cause)]
    assert len(missed) <= (1 - NAMED) * len(with_name), missed


@pytest.mark.parametrize("attempt", MISBEHAVING, ids=str)
def test_misbehaviour_is_a_finding(attempt):
    before, start = state(), time.monotonic()
    found = multihead.check(attempt.path, time_limit=3.0)
    assert time.monotonic() - start < 60
    assert state() == before
    assert not found.passed and attempt.is_(found.cause), str(found)


@pytest.mark.parametrize(
    "attempt",
    [a for a in MISBEHAVING if a.file == "misbehaving" and not a.is_("hangs")],
    ids=str,
)
def test_misbehaviour_in_this_process_leaves_no_trace(attempt):
    before = state()
    found = multihead.check(attempt.target, time_limit=3.0)
    assert state() == before
    assert not found.passed and attempt.is_(found.cause), str(found)


def test_prints_are_no_fault(capfd):
    import attempts.misbehaving

    found = multihead.check(attempts.misbehaving.prints)
    assert found.passed
    assert "prints" in str([*found.remarks, *found.findings])
    assert "scores" not in capfd.readouterr().out


def test_an_exercise_that_fails_its_own_assertion_passes():
    exercise = FOLDER / "published_assertion.py"
    found = multihead.check(f"{exercise}:multi_head_attention", allow="all")
    assert found.passed, str(found)


@pytest.mark.parametrize("attempt", [a for a in RIGHT if str(a) in TYPICAL], ids=str)
def test_a_check_takes_two_seconds_at_most(attempt):
    multihead.check(attempt.target)
    start = time.process_time()
    multihead.check(attempt.target)
    assert time.process_time() - start < 2
