# SPDX-License-Identifier: MIT
"""Some of the programs of generated/, whose command tries thousands."""

import contextlib
import functools
import itertools
import warnings

import pytest
import torch
from generated.catalogue import FAULTS, OTHER_SIZES, RAISING
from generated.judge import Judged, NoProgram, judged, right_program, wrong_program
from generated.spec import draw
from generated.truth import EMBED, HEADS, call_of, run

from multihead._library import diagnosis

RIGHT, WRONG = 20, 40


@functools.cache
def first(count: int, is_right: bool) -> tuple[int, ...]:
    """The first `count` seeds that give a program."""
    make = right_program if is_right else wrong_program
    found: list[int] = []
    seeds = itertools.count()
    while len(found) < count:
        with contextlib.suppress(NoProgram):
            seed = next(seeds)
            make(seed)
            found.append(seed)
    return tuple(found)


def test_programs_are_of_many_styles():
    programs = [right_program(seed) for seed in first(40, True)]
    specs = [program.spec for program in programs]
    assert len({program.text for program in programs}) > 35
    assert len({spec.form for spec in specs}) >= 4
    assert len({spec.pieces for spec in specs}) >= 5


def test_the_truth_is_the_generators_own():
    """A fault that it plants shows beside plain loops."""
    for seed in first(10, False):
        program = wrong_program(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, expected = run(program.spec, program.text)
        if program.faults[0].seen == "output":
            assert any(found.differs(expected, n) for n in ("out", "weights"))


def test_every_fault_of_the_engine_is_planted_or_cannot_be():
    names, _, _ = diagnosis().faults()
    planted = {name for fault in FAULTS for name in fault.names}
    others = {fault.name for fault in RAISING} | set(OTHER_SIZES)
    # Generated programs have no positions of their own, no sinks, and one mask.
    alone = {"rotary_misapplied", "sink_weight_kept", "masks_joined_loosely"}
    assert set(names) - planted == others | alone


@pytest.mark.parametrize("fault", RAISING, ids=lambda fault: fault.name)
def test_faults_that_are_not_planted_raise_at_these_sizes(fault):
    for seed in range(4):
        with pytest.raises(NoProgram, match="it does not run"):
            wrong_program(seed, fault)


def test_no_program_has_the_sizes_of_the_others():
    generator = torch.Generator()
    for seed in range(60):
        spec = draw(seed)
        query, _, value = call_of(spec, generator).inputs
        assert query.shape[-1] == value.shape[-1]
    assert (EMBED // HEADS) * HEADS == EMBED


@functools.cache
def of_right(turn: int) -> Judged:
    return judged(first(RIGHT, True)[turn], faults=0)


@pytest.mark.parametrize("turn", range(RIGHT))
def test_right_ones_are_not_accused(turn):
    assert of_right(turn).kind != "accused", of_right(turn)


def test_right_ones_are_judged():
    kinds = [of_right(turn).kind for turn in range(RIGHT)]
    assert kinds.count("not judged") <= RIGHT // 10, kinds


@pytest.mark.parametrize("turn", range(WRONG))
def test_wrong_ones_have_no_wrong_name(turn):
    result = judged(first(WRONG, False)[turn], faults=1)
    assert result.kind not in ("wrongly named", "called right"), result
