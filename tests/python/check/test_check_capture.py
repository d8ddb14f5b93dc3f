# SPDX-License-Identifier: MIT
"""What `check` observes of code: enough to compute again what the code returned."""

import math
import os
import subprocess
import sys

import check_samples as samples
import pytest
import torch
from torch import nn

import multihead
from multihead.check.reading import observation as engine

_TINY = 1e-12


@pytest.fixture
def observed(monkeypatch):
    """Runs a check; the observations that went to the engine, by name of the case."""

    def run(target, **stated):
        kept = []

        def explain(observations):
            kept.extend(observations)
            lists = {"faults": [], "assumptions": [], "cases": []}
            return {"verdict": "bits", "effort": 0.0, **lists}

        monkeypatch.setattr(engine, "explain", explain)
        report = multihead.check(target, **stated)
        assert kept, report.findings
        return {o.metadata["name"]: o for o in kept}

    return run


def matrix(seen, name):
    """A weight as (in, out), by what its metadata or its style says."""
    tensor = seen.tensors[name]
    if tensor.dim() == 3:  # (H, E, D), and back (H, D, E)
        back = tensor.shape[1] < tensor.shape[2]
        return tensor.flatten(0, 1) if back else tensor.transpose(0, 1).flatten(1)
    return tensor.T if seen.metadata.get(f"layout:{name}") == "out_in" else tensor


def parts(seen, names):
    """Projections of query, key, value and the output: (matrix, bias) each."""
    if len(names) == 2:
        weight, bias = (
            matrix(seen, f"{names[0]}.weight"),
            seen.tensors[f"{names[0]}.bias"],
        )
        found = list(zip(weight.chunk(3, dim=1), bias.chunk(3)))
        names = names[1:]
    else:
        found = []
    for name in names:
        whole = f"{name}.weight" if f"{name}.weight" in seen.tensors else name
        of_module, beside = f"{name}.bias", name.replace("W_", "b_")
        bias = seen.tensors.get(of_module, torch.tensor(0.0))
        if beside != name:
            bias = seen.tensors.get(beside, bias)
        found.append((matrix(seen, whole), bias.flatten()))
    return found


def again(seen, names):
    """Attention by plain operations from what was observed alone."""
    given = seen.tensors
    query = given["query"]
    key = given.get("key", query)
    value = given.get("value", key)
    heads = int(seen.metadata["num_heads"])
    groups = int(seen.metadata.get("num_kv_heads", heads))
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = parts(seen, names)
    q = samples.split(query @ wq + bq, heads)
    k = samples.split(key @ wk + bk, groups).repeat_interleave(heads // groups, 1)
    v = samples.split(value @ wv + bv, groups).repeat_interleave(heads // groups, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if "mask" in given:
        scores = scores.masked_fill(given["mask"] == 0, -1e9)
    weights = scores.softmax(-1)
    if "dropout_keep.0" in given:
        p = float(seen.metadata["dropout_p"])
        weights = weights * given["dropout_keep.0"] / (1 - p)
    return (weights @ v).transpose(1, 2).flatten(2) @ wo + bo


W = ("W_q", "W_k", "W_v", "W_o")
FLOW = ("query", "key", "value", "out")
STYLES = {
    samples.layers_inside: ("w_q", "w_k", "w_v", "w_o"),
    samples.matrices_inside: W,
    samples.made_by_a_helper: FLOW,
    samples.weights_passed: W,
    samples.in_numpy: W,
    samples.grouped: ("w_q", "w_k", "w_v", "w_o"),
    samples.Fused: ("c_attn", "c_proj"),
    samples.Numbered: FLOW,
    samples.HeadsInTheWeights: ("W_Q", "W_K", "W_V", "W_O"),
}


@pytest.mark.parametrize("target", STYLES, ids=lambda t: t.__name__)
def test_observations_give_the_output_again(observed, target):
    seen = observed(target)
    assert "float32" in seen
    for name, observation in seen.items():
        tiny = _TINY if observation.tensors["out"].dtype is torch.float64 else 1e-5
        difference = again(observation, STYLES[target]) - observation.tensors["out"]
        if name != "a row that sees nothing":
            assert difference.abs().max() < tiny, name


def test_heads_of_a_loop_are_numbered_in_order(observed):
    seen = observed(samples.loop_over_heads)["no mask"]
    joined = {
        role: (
            torch.cat([matrix(seen, f"{role}.{h}.weight") for h in range(8)], dim=1),
            torch.cat([seen.tensors[f"{role}.{h}.bias"] for h in range(8)]),
        )
        for role in FLOW[:3]
    }
    for role, (weight, bias) in joined.items():
        seen.tensors |= {f"{role}.weight": weight, f"{role}.bias": bias}
        seen.metadata.pop(f"layout:{role}.weight", None)
    assert (again(seen, FLOW) - seen.tensors["out"]).abs().max() < _TINY


def test_sizes_tell_every_axis_apart(observed):
    seen = observed(samples.layers_inside)["no mask"]
    query, key = seen.tensors["query"], seen.tensors["key"]
    heads = int(seen.metadata["num_heads"])
    sizes = (*query.shape, key.shape[1], heads, query.shape[-1] // heads)
    assert len(set(sizes)) == len(sizes)


def test_masks_are_passed_on_as_the_code_got_them(observed):
    seen = observed(samples.layers_inside)
    shapes = {o.tensors["mask"].shape for o in seen.values() if "mask" in o.tensors}
    assert {(5, 7), (3, 1, 5, 7), (3, 1, 1, 7), (3, 8, 5, 7)} <= shapes
    for name, observation in seen.items():
        mask = observation.tensors.get("mask")
        if mask is not None and name not in ("causal mask", "a row that sees nothing"):
            assert mask.dtype is torch.bool
            assert mask.any(-1).all() and not mask.all(-1).any(), name
    assert "mask" not in seen["no mask"].metadata


@pytest.mark.parametrize("target", [samples.layers_inside, samples.Fused])
def test_gradients_are_those_of_the_output(observed, target):
    seen = observed(target)["no mask"]
    names = [n for n in ("query", "key", "value") if n in seen.tensors]
    leaves = [seen.tensors[n].clone().requires_grad_() for n in names]
    seen.tensors |= dict(zip(names, leaves))
    out = again(seen, STYLES[target])
    wanted = torch.autograd.grad(out, leaves, seen.tensors["dout"])
    for name, gradient in zip(names, wanted):
        assert (seen.tensors[f"d{name}"] - gradient).abs().max() < _TINY


def test_draws_of_dropout_are_known(observed):
    seen = observed(samples.Fused)["training"]
    assert seen.metadata["training"] == "true"
    assert seen.tensors["dropout_keep.0"].shape == (3, 8, 5, 5)
    assert not seen.tensors["dropout_keep.0"].all()
    difference = again(seen, STYLES[samples.Fused]) - seen.tensors["out"]
    assert difference.abs().max() < _TINY


def test_zero_biases_do_not_hide_what_is_done_with_them(observed):
    seen = observed(samples.Fused)["no mask"]
    assert seen.tensors["c_attn.bias"].abs().min() > 0
    inside = observed(lambda x: nn.MultiheadAttention(48, 8)(x, x, x)[0])["no mask"]
    assert inside.tensors["qkv.weight"].shape == (48, 144)
    assert inside.tensors["qkv.bias"].abs().min() > 0


def test_the_users_module_stays_as_it_is(observed):
    module = nn.MultiheadAttention(32, 4, dropout=0.1)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    seen = observed(module)
    assert module.training and module.in_proj_weight.grad is None
    for name, tensor in module.state_dict().items():
        assert tensor.dtype is torch.float32 and torch.equal(tensor, before[name])
    assert seen["no mask"].metadata["batch_first"] == "false"
    assert seen["no mask"].tensors["query"].shape == (5, 3, 32)
    assert seen["no mask"].metadata["num_heads"] == "4"


def test_a_layer_around_pytorchs(observed):
    seen = observed(samples.Wraps)["no mask"]
    assert seen.tensors["attn.in_proj_weight"].shape == (144, 48)
    assert seen.metadata["layout:attn.in_proj_weight"] == "out_in"
    assert {"query", "key", "weights"} <= set(seen.tensors)
    assert "value" not in seen.tensors


def test_attention_without_weights(observed):
    seen = observed(samples.core)["no mask"]
    assert seen.tensors["query"].shape == (3, 8, 5, 6)
    one = observed(samples.core_of_one_head)["no mask"]
    assert one.tensors["query"].shape == (3, 5, 6)
    assert one.tensors["weights"].shape == (3, 5, 7)
    assert one.metadata["num_heads"] == "1"


def test_intermediates_are_kept_as_they_were(observed):
    seen = observed(samples.core_of_one_head)["no mask"]
    query, key = seen.tensors["query"], seen.tensors["key"]
    scores = query @ key.mT
    traced = [t for n, t in seen.tensors.items() if n.startswith("trace.")]
    for wanted in (scores, scores / math.sqrt(6), (scores / math.sqrt(6)).softmax(-1)):
        same = [t for t in traced if t.shape == wanted.shape]
        assert any((t - wanted).abs().max() < _TINY for t in same)


def test_softmax_is_neither_flat_nor_saturated(observed):
    seen = observed(samples.matrices_inside)["no mask"]
    q, k = (
        samples.split(seen.tensors[n] @ seen.tensors[w], 8)
        for n, w in (("query", "W_q"), ("key", "W_k"))
    )
    assert 0.5 < float((q @ k.mT / math.sqrt(6)).std()) < 3


def test_the_users_own_inputs_are_a_case(observed):
    q, k = torch.randn(2, 3, 8), torch.randn(2, 9, 8)
    seen = observed(samples.layers_inside, inputs=(q, k, k, 2, 8))["your inputs"]
    assert torch.equal(seen.tensors["query"], q)
    assert seen.metadata["num_heads"] == "2"
    difference = again(seen, STYLES[samples.layers_inside]) - seen.tensors["out"]
    assert difference.abs().max() < 1e-5


def printed(code: str) -> str:
    """By a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


def test_nothing_large_is_imported_for_it():
    code = (
        "import sys, check_samples, multihead; multihead.check(check_samples.Fused);"
        "print([m for m in ('sympy', 'torch._dynamo') if m in sys.modules])"
    )
    assert printed(code) == "[]"


def test_who_never_checks_does_not_load_its_library():
    loaded = "print('libmultihead_diagnosis' in open('/proc/self/maps').read());"
    check = "import check_samples; multihead.check(check_samples.Fused);"
    assert printed(f"import multihead; {loaded} {check} {loaded}") == "False\nTrue"


class DropsHalf(nn.Module):
    """p = 0.5, which is PyTorch's default, whatever it is built with."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout()

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        weights = self.drop((q @ k.mT / q.size(-1) ** 0.5).softmax(-1))
        return self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))


def test_dropout_of_half_is_read_though_pytorch_leaves_its_default_out():
    report = multihead.check(DropsHalf)
    assert report.passed, str(report)
    assert "training" in [case["name"] for case in report.verdict["cases"]]


class KeysAndValuesOfOneConvolution(nn.Module):
    """Names that say nothing; one convolution is twice as wide as its input."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads, self.width = num_heads, d_model
        self.memory = nn.Conv1d(d_model, 2 * d_model, 1)
        self.asking = nn.Conv1d(d_model, d_model, 1)

    def forward(self, x):
        k, v = self.memory(x).split(self.width, dim=1)
        q, k, v = (t.unflatten(1, (self.heads, -1)).mT for t in (self.asking(x), k, v))
        out = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        return out.mT.flatten(1, 2)


def test_one_convolution_of_keys_and_values_is_found_by_its_way():
    report = multihead.check(KeysAndValuesOfOneConvolution)
    assert report.cause is None and report.verdict is not None, str(report)
    assert [c["name"] for c in report.conditions] == ["no_output_projection"]
