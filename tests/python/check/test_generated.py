# SPDX-License-Identifier: MIT
"""Some of the programs of generated/, whose command tries thousands."""

import warnings

import pytest
from generated.judge import NoProgram, judged, right_program, wrong_program
from generated.truth import run

RIGHT, WRONG = 20, 40


def first(count: int, make) -> list:
    """The first `count` seeds that give a program."""
    found, seed = [], 0
    while len(found) < count:
        try:
            make(seed)
            found.append(seed)
        except NoProgram:
            pass
        seed += 1
    return found


def test_programs_are_of_many_styles():
    programs = [right_program(seed) for seed in first(40, right_program)]
    specs = [program.spec for program in programs]
    assert len({program.text for program in programs}) == 40
    assert len({spec.form for spec in specs}) >= 4
    assert len({spec.pieces for spec in specs}) >= 5


def test_the_truth_is_the_generators_own():
    """A fault that it plants shows beside plain loops."""
    for seed in first(10, wrong_program):
        program = wrong_program(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, expected = run(program.spec, program.text)
        if program.fault.seen == "output":
            assert any(found.differs(expected, n) for n in ("out", "weights"))


@pytest.mark.parametrize("seed", first(RIGHT, right_program))
def test_right_ones_are_not_accused(seed):
    result = judged(seed, True)
    assert result.kind in ("passed", "right if"), result


@pytest.mark.parametrize("seed", first(WRONG, wrong_program))
def test_wrong_ones_have_no_wrong_name(seed):
    result = judged(seed, False)
    assert result.kind not in ("wrongly named", "called right"), result
