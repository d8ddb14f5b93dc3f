# SPDX-License-Identifier: MIT
"""The generating examples: the same tokens in Python and in C++."""

import re
import runpy
import subprocess
import sys

import pytest
import torch
from pictures import BUILD, ROOT

import multihead

PROGRAM = BUILD / "examples" / "generate"
SCRIPT = ROOT / "examples" / "generate.py"


def printed(*command) -> list[str]:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(
    not PROGRAM.exists(),
    reason=f"{PROGRAM} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)
@pytest.mark.parametrize("seed", [1, 2**64 - 1])
def test_both_languages_say_the_same(tmp_path, seed):
    model = tmp_path / "model.safetensors"
    options = ("--tokens", 90, "--seed", seed)
    greedy, sampled, ours, theirs = printed(sys.executable, SCRIPT, model, *options)
    assert printed(PROGRAM, model, 90, seed) == [greedy, sampled]
    assert len(greedy.split()) == len(sampled.split()) == 91
    assert len(set(sampled.split())) > 10
    for line, name in ((ours, "multihead"), (theirs, "PyTorch")):
        assert re.fullmatch(rf"{name}: \d+ tokens per second", line)


def test_tokens_are_those_without_a_cache():
    example = runpy.run_path(str(SCRIPT))
    torch.manual_seed(0)
    model = example["Decoder"]().eval()
    multihead.reset_stats()
    tokens = example["generate"](model, example["caches_of_multihead"](), 20)
    # A chunk and 19 tokens, two layers.
    assert multihead.stats().calls("fused", "module") == multihead.stats().calls() == 40
    for count in range(20):
        seen = torch.tensor([example["PROMPT"] + tokens[:count]])
        with torch.no_grad():
            logits = model(seen, 0, example["caches_of_multihead"]())
        assert int(logits.argmax()) == tokens[count]


def test_the_numbers_of_a_seed():
    """SplitMix64's first words for the seed 0, as its authors' code prints them."""
    numbers = runpy.run_path(str(SCRIPT))["uniform_numbers"](0)
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [next(numbers) for _ in words] == [(x >> 11) / 2**53 for x in words]
