# SPDX-License-Identifier: MIT
"""Training with the fused kernels, by the example that shows it: examples/train.py."""

import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from paths import fused_calls

from multihead.functional import current_backend

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples/train.py"
BATCH = torch.arange(2 * 65).view(2, 65)


@pytest.fixture
def example():
    """The example, with a smaller model."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LENGTH, module.BLOCKS = 64, 2
    return module


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["exact", "fused"])
def test_each_backend_takes_its_path(example, backend, dropout):
    training = example.Training(backend, dropout)
    layers = example.BLOCKS if backend == "fused" else 0
    forward, backward = ["attention"] * layers, ["backward"] * layers
    assert fused_calls(training.step, BATCH) == forward + backward


def test_exact_is_pytorch(example, monkeypatch):
    training = example.Training("exact", 0.1)
    monkeypatch.setattr(
        example.multihead, "MultiheadAttention", torch.nn.MultiheadAttention
    )
    reference = example.Training("exact", 0.1)
    for one in (training, reference):
        torch.manual_seed(1)
        one.step(BATCH)
        one.step(BATCH)
    assert training.losses == reference.losses


def test_losses_agree(example, tmp_path, capsys):
    file = tmp_path / "picture.svg"
    assert example.main(["--steps", "10", "--out", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1].endswith(": fused agrees.")
    rows = [line.split() for line in lines if re.match(r" +\d+ +\d\.\d{5} ", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    assert float(rows[-1][1]) < float(rows[0][1]) - 1
    assert re.search(r"^dropout 0\.1: .* times faster$", "\n".join(lines), re.MULTILINE)
    curves = ElementTree.parse(file).iterfind(".//{*}path[@class='fused']")
    assert len(list(curves)) == 4  # two curves, two bars


class Faulty(torch.nn.MultiheadAttention):
    """PyTorch's own under "exact", with a fault under "fused"."""

    fault = None

    def forward(self, *args, **kwargs):
        y, weights = super().forward(*args, **kwargs)
        return self.fault(y) if current_backend() == "fused" else y, weights


@pytest.fixture
def faulty(example, monkeypatch):
    """Puts a fault into the example's attention and says what became of it."""

    def run(fault):
        monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
        monkeypatch.setattr(example.multihead, "MultiheadAttention", Faulty)
        return example.main(["--steps", "10", "--dropout", "0"])

    return run


@pytest.mark.parametrize(
    "fault",
    # Ten times what is allowed, which depends on what the pages say: 1e-5 is too near.
    [lambda y: y * (1 + 1e-4), lambda y: y * 1.001 - (y * 0.001).detach()],
    ids=["forward", "backward"],
)
def test_faults_are_seen(faulty, capsys, fault):
    assert faulty(fault) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(": fused DIFFERS.")


def test_a_loss_that_is_no_number_ends_it(faulty):
    with pytest.raises(SystemExit, match=r"^The loss of fused is nan in step 1\.$"):
        faulty(lambda y: y * torch.nan)


def test_too_few_steps_are_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--steps", "9"])
    assert "--steps must be at least 10" in capsys.readouterr().err
