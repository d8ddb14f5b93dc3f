# SPDX-License-Identifier: MIT
"""Files that import: their own package, what is absent, what needs a GPU."""

import sys
import textwrap

import pytest
from check_samples import call, only

import multihead
from multihead.check.sandbox.guard import Guard
from multihead.check.subject import script

ATTENTION = """
def attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
"""


@pytest.fixture
def lay(tmp_path):
    """Writes files by path; returns the path of the last."""

    def lay(**texts: str):
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return path

    return lay


def load(path):
    with Guard(20) as guard:
        return script.run_file(path, guard)


BESIDE = {
    "from .helper import attention": {"work/layers/helper": ATTENTION},
    "from . import helper\nattention = helper.attention": {
        "work/layers/helper": ATTENTION
    },
    "from ..helper import attention": {"work/helper": ATTENTION},
    "from work.helper import attention": {"work/helper": ATTENTION},
    "from work.deep.helper import attention": {"work/deep/helper": ATTENTION},
    "from helper import attention": {"helper": ATTENTION},
    "from work import attention": {
        "work/__init__": "from .helper import attention\nraise ValueError('heavy')",
        "work/helper": ATTENTION,
    },
    "from .deep import *": {
        "work/layers/deep/__init__": "from .helper import *",
        "work/layers/deep/helper": ATTENTION,
    },
}


@pytest.mark.parametrize("line", BESIDE)
def test_what_lies_beside_a_file_is_imported(lay, line):
    before = set(sys.modules), list(sys.meta_path), list(sys.path)
    file = lay(**BESIDE[line], **{"work/layers/mine": line})
    report = multihead.check(f"{file}:attention")
    assert report.cause is None, str(report)
    left = {name for name in set(sys.modules) - before[0] if "helper" in name}
    assert (left, sys.meta_path, sys.path) == (set(), *before[1:])


def test_a_package_is_not_run_for_what_nobody_asks(lay):
    texts = {
        "work/__init__": "raise ValueError('heavy')",
        "work/layers/__init__": "from .other import nothing",
        "work/layers/other": "raise ValueError('heavy')",
        "work/layers/helper": f"import no_such_package\n{ATTENTION}\nprint(1 / 0)",
        "work/layers/mine": "from .helper import attention",
    }
    file = lay(**texts)
    _, outcome = load(file)
    assert outcome.error is None and outcome.findings == []
    assert multihead.check(f"{file}:attention").cause is None


def test_a_file_of_its_package_that_is_not_there_is_said(lay):
    text = """
        from .lost import attend
        def attention(q, k, v): return attend(q, k, v)
        """
    file = lay(**{"work/mine": text})
    report = multihead.check(str(file))
    assert report.unchecked and report.cause == "missing_package", str(report)
    assert "`work.lost` of its own package" in report.findings[0].sentence


ABSENT = {
    "base": "class Attention(absent_one.LightningModule):",
    "bases": "class Attention(absent_one.Model, absent_one.Mixin):",
    "beside": "class Attention(nn.Module, absent_one.Mixin):",
    "decorated": "@absent_one.MODELS.register_module('x')\nclass Attention(nn.Module):",
    "annotated": "K: absent_one.Int['n'] = 3\nclass Attention(nn.Module):",
    "guarded": (
        "try:\n    import absent_two\nexcept ImportError:\n    raise\n"
        "class Attention(nn.Module):"
    ),
}
BODY = """
    def __init__(self, dim: "absent", heads):
        super().__init__()
        self.heads, self.drop = heads, DropPath(0.0)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        trunc_normal_(self.o.weight, std=0.2)
        absent_one.logger.info("made")

    @absent_one.typed
    def forward(self, x: absent_one.Float["b l e"]) -> absent_one.Out:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*qkv)
        return self.drop(self.o(out.transpose(1, 2).flatten(2)))
"""


@pytest.mark.parametrize("head", ABSENT)
def test_what_an_absent_package_would_add_is_not_needed(lay, head):
    imports = """
import absent_one
from torch import nn
from absent_three.layers import DropPath, trunc_normal_
"""
    file = lay(mine=f"{imports}\n{ABSENT[head]}{BODY}")
    report = multihead.check(f"{file}:Attention")
    assert report.cause is None, str(report)


def test_who_needs_what_is_absent_is_not_judged(lay):
    file = lay(
        mine="""
        import torch
        from no_einops import rearrange, repeat
        def attention(q, k, v):
            q, k = rearrange(q, "b n d -> b n d"), repeat(k)
            return (q @ k.mT).softmax(-1) @ v
        """
    )
    report = multihead.check(str(file))
    assert report.unchecked and report.cause == "missing_package", str(report)
    assert "pip install no_einops" in report.findings[0].remedy


def test_names_of_an_absent_star_are_missing_when_they_are_used(lay):
    module, outcome = load(
        lay(
            mine="""
            from no_such_package import *
            def fine(): return len("12")
            def uses(x): return helper(x)
            """
        )
    )
    assert outcome.error is None and module.fine() == 2
    assert only(call(module.uses, 1)).name == "missing_package"


def test_what_a_package_no_longer_has_is_said(lay):
    file = lay(
        mine="""
        from math import sqrt, no_longer
        def attention(q, k, v): return no_longer(q) + sqrt(2)
        """
    )
    report = multihead.check(str(file))
    assert report.unchecked and report.cause == "missing_package", str(report)
    assert "Another version of `math`" in report.findings[0].remedy


def test_a_decorator_that_fails_is_left_out(lay):
    module, outcome = load(
        lay(
            mine="""
            def register(name):
                raise KeyError(name)
            @register("x")
            def attention(x: Tensor): return 3
            """
        )
    )
    assert outcome.error is None and module.attention(1) == 3


def test_options_of_the_command_line_are_their_defaults(lay):
    module, outcome = load(
        lay(
            mine="""
            import argparse
            parser = argparse.ArgumentParser()
            parser.add_argument("--heads", type=int, default=4)
            args = parser.parse_args()
            """
        )
    )
    assert outcome.findings == [] and module.args.heads == 4


def test_code_that_asks_for_a_gpu_runs_without(lay):
    file = lay(
        mine="""
        import torch
        def attention(q, k, v):
            scores = (q.cuda() @ k.to("cuda:0").mT) / q.shape[-1] ** 0.5
            return scores.softmax(-1) @ v + torch.zeros(1, device="cuda")
        """
    )
    report = multihead.check(str(file))
    assert report.cause is None, str(report)


def test_loading_has_time_of_its_own(lay):
    file = lay(
        slow_neighbour="import time\nclass Slow:\n    time.sleep(1.5)",
        mine="import slow_neighbour\n" + ATTENTION,
    )
    report = multihead.check(f"{file}:attention", time_limit=1.4)
    assert report.verdict is not None, str(report)
