# SPDX-License-Identifier: MIT
"""A plugin of pytest: PyTorch's tests meet multihead under PyTorch's names.

Loaded into a process of its own by run.py. With --own-backend none the tests run as
they are, with installed as they are under multihead.install(). In --own-folder it reads
select.json, the ids that may run (without it all), and done.json, those that need not.
It writes collected.json, and to results.jsonl a line for each result at once: a test
that ends the process began and has no result.
"""

import collections
import inspect
import json
import pathlib
import re
import sys

import pytest
import torch
from torch import nn

# What PyTorch calls it, and what it becomes. multihead is imported only where it
# is asked for: PyTorch's own run shall not even load it.
_FUNCTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward")
_sdpa = nn.functional.scaled_dot_product_attention
_calls = collections.Counter()


def pytest_addoption(parser):
    backends = ("none", "auto", "exact", "installed")
    parser.addoption("--own-backend", choices=backends)
    parser.addoption("--own-folder", type=pathlib.Path)
    parser.addoption("--own-every", type=int, default=1)
    parser.addoption("--own-reference", default="$^", help="a regular expression")


def _bind(package: str, old, new) -> None:
    """Puts new in the place of old wherever modules of the package hold it."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def _counted(call):
    """A function by which multihead calls its operators, counting."""

    def counted(*args, **kwargs):
        _calls["operators"] += 1
        return call(*args, **kwargs)

    return counted


def pytest_configure(config):
    """Binds the names before any test file is imported: wherever PyTorch's modules
    hold one of the three, nn.TransformerEncoderLayer's for example, they get ours."""
    if config.getoption("--own-backend") == "none":
        return
    import multihead

    if config.getoption("--own-backend") == "installed":
        multihead.install()
        return
    functional = multihead.functional
    for way in (functional.call, functional._call_plain):
        _bind("multihead", way, _counted(way))
    for name in _FUNCTIONS:
        _bind("torch.nn", getattr(nn.functional, name), getattr(multihead, name))
    _bind("torch.nn", nn.MultiheadAttention, multihead.MultiheadAttention)


def _name(item) -> str:
    """The id without its folders: the forms of PyTorch keep the files elsewhere."""
    return item.nodeid.rpartition("/")[2]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps what may run, or of each parametrised family every n-th case; writes down
    what that is, and leaves out what has a result already."""
    folder, every = config.getoption("--own-folder"), config.getoption("--own-every")
    select = folder / "select.json"
    allowed = set(json.loads(select.read_text())) if select.exists() else None
    families = collections.Counter()
    kept = []
    for item in items:
        family = inspect.unwrap(item.function).__qualname__
        if _name(item) in allowed if allowed is not None else families[family] == 0:
            kept.append(item)
        families[family] = (families[family] + 1) % every
    (folder / "collected.json").write_text(json.dumps([_name(item) for item in kept]))
    done = set(json.loads((folder / "done.json").read_text()))
    items[:] = [item for item in kept if _name(item) not in done]


def _write(config, **line) -> None:
    path = config.getoption("--own-folder") / "results.jsonl"
    with path.open("a") as results:
        print(json.dumps(line), file=results)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    _calls.clear()
    _write(item.config, began=_name(item))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    backend = item.config.getoption("--own-backend")
    if backend == "none":
        return (yield)
    import multihead

    if backend == "installed":
        multihead.reset_stats()
        try:
            return (yield)
        finally:
            _calls["operators"] = multihead.stats().calls("fused")
    # A test that compares a fused kernel with PyTorch's formula shall compare ours
    # with PyTorch's formula, not with ours.
    ours = multihead.scaled_dot_product_attention
    if re.search(item.config.getoption("--own-reference"), _name(item)):
        ours = _unless_reference(ours)
    nn.functional.scaled_dot_product_attention = ours
    if hasattr(item.module, "scaled_dot_product_attention"):
        item.module.scaled_dot_product_attention = ours
    with multihead.backend(backend):
        return (yield)


def _unless_reference(ours):
    """`ours`, save where sdpa_kernel allows PyTorch nothing but its formula."""
    cuda = torch.backends.cuda

    def attention(*args, **kwargs):
        fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()
        return (ours if fused else _sdpa)(*args, **kwargs)

    return attention


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or report.outcome != "passed":
        outcome = report.outcome
        text = ""
        if call.excinfo is not None:
            text = f"{call.excinfo.typename}: {call.excinfo.value}"
        if hasattr(report, "wasxfail"):
            outcome = "expected to fail" if report.skipped else "passed"
        _write(
            item.config,
            test=_name(item),
            outcome=outcome,
            text=text,
            calls=_calls["operators"],
            seconds=round(report.duration, 2),
        )
    return report
