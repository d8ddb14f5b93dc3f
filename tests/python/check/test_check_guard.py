# SPDX-License-Identifier: MIT
"""Code that misbehaves in this process: a finding, and the process as before."""

import inspect
import os
import random
import re
import sys
import threading
import time

import numpy as np
import pytest
import torch
from check_samples import call, only

from multihead.check.sandbox import guard as sandbox
from multihead.check.sandbox.guard import Guard
from multihead.check.sandbox.state import Snapshot

HERE = os.path.basename(__file__)


def test_a_value_comes_back():
    outcome = call(lambda a, b: a + b, 1, 2)
    assert (outcome.value, outcome.error) == (3, None)
    assert outcome.findings == [] and outcome.printed == ""


def raises_view():
    return torch.ones(3).view(7)


def test_an_error_is_told_in_the_codes_own_lines():
    finding = only(call(raises_view))
    assert finding.name == "raises"
    assert finding.sentence.startswith("RuntimeError: shape '[7]' is invalid")
    place, source = finding.detail.splitlines()
    assert re.fullmatch(rf".*{HERE}, line \d+, in raises_view", place)
    assert source == "`return torch.ones(3).view(7)`"


def test_wrong_arguments_have_no_place_of_ours():
    finding = only(call(raises_view, 1))
    assert "takes 0 positional arguments but 1 was given" in finding.sentence
    assert finding.detail == ""


def exits():
    sys.exit(3)


def interrupts():
    raise KeyboardInterrupt


def asks():
    return input("your name? ")


def recurses():
    return recurses()


def runs_out_of_memory():
    return torch.empty(2**60)


def unprintable():
    class Odd(Exception):
        def __str__(self):
            raise ValueError

    raise Odd


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (exits, "It ends the program: it calls `exit()`."),
        (interrupts, "KeyboardInterrupt"),
        (asks, "EOFError: it waits for somebody to type"),
        (recurses, "RecursionError: maximum recursion depth exceeded"),
        (runs_out_of_memory, "RuntimeError: "),
        (unprintable, "Odd: (its message cannot be printed)"),
    ],
)
def test_every_way_out_is_closed(code, sentence):
    finding = only(call(code))
    assert finding.name == "raises"
    assert finding.sentence.startswith(sentence)
    assert f"in {code.__name__}" in finding.detail


def imports():
    import no_such_package.part  # noqa: F401


def test_an_absent_package_is_named():
    finding = only(call(imports))
    assert finding.name == "missing_package"
    assert "`no_such_package`" in finding.sentence
    assert "pip install no_such_package" in finding.remedy


def loops():
    while True:
        pass


def sleeps():
    time.sleep(60)


def catches_everything():
    caught = 0
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            caught += 1
            if caught == 3:
                raise


@pytest.mark.parametrize("code", [loops, sleeps, catches_everything])
def test_a_time_limit_ends_it(code):
    start = time.monotonic()
    finding = only(call(code, time_limit=0.3))
    assert time.monotonic() - start < 5
    assert finding.name == "hangs"
    assert "0.3 s" in finding.sentence
    assert f"in {code.__name__}" in finding.detail


@pytest.mark.parametrize("code", [loops, catches_everything])
def test_a_time_limit_ends_it_in_another_thread(code):
    outcomes = []
    thread = threading.Thread(
        target=lambda: outcomes.append(call(code, time_limit=0.3))
    )
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert only(outcomes[0]).name == "hangs"


class Lingers:
    """Time runs out in its destructor, which can raise nothing."""

    def __del__(self):
        time.sleep(60)


class Fails:
    def __del__(self):
        raise ValueError


def leaves_objects_behind():
    Fails()
    Lingers()
    loops()


def test_a_time_limit_that_rings_where_nothing_can_be_raised(monkeypatch):
    told = []

    def tell(unraisable):  # as slow as pytest's, which formats a stack
        time.sleep(0.5)
        told.append(unraisable.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", tell)
    finding = only(call(leaves_objects_behind, time_limit=0.3))
    assert finding.name == "hangs"
    assert told == [ValueError] and sys.unraisablehook is tell


def test_time_is_shared_by_all_calls():
    with Guard(0.5) as guard:
        assert guard.remaining == 0.5
        assert guard.call(time.sleep, 0.3).error is None
        assert 0.1 < guard.remaining < 0.25
        assert only(guard.call(time.sleep, 0.3)).name == "hangs"
        assert guard.remaining == 0


def test_prints_are_caught(capfd):
    def prints():
        print("hello")
        print("there", file=sys.stderr)

    outcome = call(prints)
    assert outcome.printed == "hello\nthere\n"
    assert capfd.readouterr() == ("", "")

    endless = call(lambda: [print("x" * 1000) for _ in range(1000)])
    assert len(endless.printed) == 2000


CHANGES = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "the number of threads": lambda: torch.set_num_threads(3),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "the precision of matrix products": (
        lambda: torch.set_float32_matmul_precision("medium")
    ),
    "the choice of attention kernels": (
        lambda: torch.backends.mha.set_fastpath_enabled(False)
    ),
    "hooks of all modules": lambda: (
        torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    ),
    "the working directory": lambda: os.chdir("/"),
    "sys.path": lambda: sys.path.append("/nowhere"),
    "the environment": lambda: os.environ.update(SOME_VARIABLE="1"),
    "sys.excepthook": lambda: setattr(sys, "excepthook", print),
    "the limit of recursion": lambda: sys.setrecursionlimit(5000),
    "torch.softmax": lambda: setattr(torch, "softmax", print),
    "torch.nn.functional.softmax": lambda: setattr(
        torch.nn.functional, "softmax", print
    ),
    "torch.nn.functional.scaled_dot_product_attention": lambda: setattr(
        torch.nn.functional, "scaled_dot_product_attention", print
    ),
    "torch.nn.Linear.forward": lambda: setattr(torch.nn.Linear, "forward", print),
    "the seed of PyTorch's random numbers": lambda: torch.manual_seed(12345),
}


@pytest.mark.parametrize("in_thread", [False, True])
def test_time_in_which_others_had_the_processor_does_not_count(monkeypatch, in_thread):
    start = time.monotonic()

    def half(clock):
        return (time.monotonic() - start) / 2

    monkeypatch.setattr(sandbox._Clock, "_wait", half)
    outcomes = []

    def call():
        with Guard(0.4) as guard:
            outcomes.append(guard.call(time.sleep, 0.5))
            outcomes.append(guard.call(loops))

    if in_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        call()
    assert outcomes[0].findings == []
    assert only(outcomes[1]).name == "hangs"
    assert 0.75 < time.monotonic() - start < 30


@pytest.mark.parametrize("name", CHANGES)
def test_changed_settings_are_named_and_put_back(name):
    CHANGES["the default device"]()  # its first call imports modules
    torch.set_default_device(None)
    before = Snapshot()
    outcome = call(CHANGES[name])
    assert before.restore() == []
    (finding,) = outcome.findings
    assert outcome.error is None
    assert finding.name == "changes_global_state"
    assert finding.sentence == (
        f"It changes {name} for the whole process and leaves it so."
    )


def test_settings_are_put_back_after_an_error():
    def breaks():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        raise ValueError("no")

    outcome = call(breaks)
    assert [f.name for f in outcome.findings] == ["raises", "changes_global_state"]
    assert "the default dtype and grad mode" in outcome.findings[1].sentence
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def test_random_streams_go_on_as_if_nothing_had_been():
    def draws():
        return torch.rand(1).item(), np.random.rand(), random.random()

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    undisturbed = draws()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with Guard(5) as guard:
        first, second = guard.call(draws), guard.call(draws)
        assert first.value != second.value
        assert first.findings == second.findings == []
        guard.call(lambda: (torch.manual_seed(7), np.random.seed(7), random.seed(7)))
    assert draws() == undisturbed


@pytest.mark.alone
def test_a_guard_costs_little():
    with Guard(5) as guard:
        guard.call(int)
        start = time.perf_counter()
        for _ in range(100):
            guard.call(int)
        assert (time.perf_counter() - start) / 100 < 2e-3


def logs_who_called():
    return inspect.stack()[1].function


def test_who_called_is_told_without_looking_for_its_text():
    own = inspect.stack
    with Guard(5) as guard:
        outcome = guard.call(lambda: logs_who_called())
    assert outcome.value == "<lambda>"
    assert inspect.stack is own
