# SPDX-License-Identifier: MIT
"""Any dump: `explain` refuses it in words or gives a verdict, and never a name for a
fault in numbers that have nothing to do with what went in.

For longer than the tests: MULTIHEAD_FUZZ_EXAMPLES=100000 ./run python -m pytest
tests/python/check/test_explain_fuzz.py.
"""

import json
import os
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead._library import diagnosis

fuzzed = settings(
    max_examples=int(os.environ.get("MULTIHEAD_FUZZ_EXAMPLES", "25")),
    deadline=None,
    derandomize="MULTIHEAD_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

STYLES = ("text", "ansi", "html", "svg")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Dump:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def explained(self) -> dict:
        tensors = [{n: t.contiguous() for n, t in self.tensors.items()}]
        verdict = diagnosis().explain(tensors, [self.metadata])
        assert diagnosis().fewest_faults(tensors, [self.metadata]) >= 0
        for style in STYLES:
            assert diagnosis().render_report(verdict, style)
        return json.loads(verdict)


@st.composite
def dumps(draw, dtypes=DTYPES) -> Dump:
    """What attention may have been given, and numbers of no meaning as its result."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(dtypes))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, width = draw(st.sampled_from([(1, 8), (2, 4), (4, 4), (6, 8), (3, 5)]))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, heads) if heads % g == 0]))
    batch, queries, keys = (draw(st.integers(1, 3)), *draw_lengths(draw))
    embed = heads * width
    dump = Dump(metadata={"num_heads": str(heads), "num_kv_heads": str(groups)})
    if draw(st.booleans()):
        inputs = [(batch, queries, embed), *[(batch, keys, embed)] * 2]
        out = inputs[0]
        shared = groups * width
        rows = (embed, shared, shared, embed)
        for name, many in zip(("q_proj", "k_proj", "v_proj", "out_proj"), rows):
            dump.tensors[f"{name}.weight"] = numbers(many, embed) / embed**0.5
            if draw(st.booleans()):
                dump.tensors[f"{name}.bias"] = numbers(many)
    else:
        inputs = [(batch, heads, queries, width), *[(batch, groups, keys, width)] * 2]
        out = inputs[0]
    for name, shape in zip(("query", "key", "value"), inputs):
        dump.tensors[name] = numbers(*shape)
    dump.tensors["out"] = numbers(*out) * draw(st.sampled_from([1e-3, 1.0, 30.0]))
    beside(draw, dump, numbers, (batch, heads, queries, keys))
    return dump


def draw_lengths(draw) -> tuple[int, int]:
    queries = draw(st.integers(1, 9))
    return queries, draw(st.sampled_from([queries, 1, 4, 7, 11]))


def beside(draw, dump: Dump, numbers, sizes: tuple[int, int, int, int]) -> None:
    """Masks, weights, gradients, draws of dropout, steps on the way and facts."""
    batch, heads, queries, keys = sizes
    if draw(st.booleans()):
        shapes = [
            (queries, keys),
            (batch, 1, queries, keys),
            sizes,
            (batch, 1, 1, keys),
        ]
        mask = numbers(*draw(st.sampled_from(shapes))) > -0.5
        mask[..., 0] = True
        dump.tensors["mask"] = mask if draw(st.booleans()) else mask.long()
        if meaning := draw(st.sampled_from([None, "keep", "blocked"])):
            dump.metadata["mask"] = meaning
    if draw(st.booleans()):
        dump.tensors["weights"] = numbers(*sizes).softmax(-1)
    if draw(st.booleans()):
        dump.tensors["dout"] = numbers(*dump.tensors["out"].shape)
        for name in ("query", "key", "value"):
            dump.tensors[f"d{name}"] = numbers(*dump.tensors[name].shape)
    if draw(st.booleans()):
        dump.metadata |= {"training": "true", "dropout_p": "0.5"}
        dump.tensors["dropout_keep.0"] = numbers(*sizes) > 0
    for index in range(draw(st.integers(0, 4))):
        shapes = [sizes, tuple(dump.tensors["query"].shape), (queries, keys)]
        dump.tensors[f"trace.{index}"] = numbers(*draw(st.sampled_from(shapes)))
    for name in ("norm.weight", "norm.bias"):
        if "q_proj.weight" in dump.tensors and draw(st.booleans()):
            dump.tensors[name] = numbers(dump.tensors["query"].shape[-1])
    if draw(st.booleans()):
        dump.metadata["is_causal"] = draw(st.sampled_from(["true", "false", "infer"]))


FACTS = (
    "name num_heads num_kv_heads is_causal scale mask padding batch_first training "
    "dropout_p dropout_p.0 window_size norm_eps block_size roles scale_argument "
    "eps:norm groups:norm layout:q_proj.weight gradient:q_proj.weight takes_only "
    "made_up settings causal_text mask_says mask_text order_guessed rounds_to"
).split()
VALUES = (
    "",
    "0",
    "-1",
    "1",
    "3",
    "nan",
    "inf",
    "1e-300",
    "99999999999999999999",
    "true",
    "infer",
    "by_order",
    "in_out",
    "none",
    "number,mask",
    "x" * 300,
    "ü\n\x00{}",
)
NAMES = (
    "query key value x out output weights mask key_padding_mask dout dquery dx scores "
    "context merged cos sin trace.0 trace.x dropout_keep.0 dropout_keep in_proj_weight "
    "in_proj_bias q_proj.weight out_proj.bias norm.weight W c_attn.weight ü 0"
).split()


def reshaped(draw, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor.reshape(1)
    axis = draw(st.integers(0, tensor.dim() - 1))
    kinds = [
        lambda: tensor.unsqueeze(axis),
        lambda: tensor.narrow(axis, 0, max(tensor.shape[axis] - 1, 0)),
        lambda: tensor.transpose(axis, -1),
        lambda: tensor.flatten(),
        lambda: tensor.select(axis, 0) if tensor.shape[axis] else tensor,
        lambda: torch.cat([tensor, tensor], axis),
        lambda: tensor.new_zeros(()),
        lambda: tensor.narrow(axis, 0, 0),
    ]
    return draw(st.sampled_from(kinds))()


def spoilt(draw, tensor: Tensor) -> Tensor:
    kinds = [torch.bool, torch.int64, torch.uint8, torch.complex64, *DTYPES]
    values = [0.0, 1.0, float("nan"), float("inf"), -float("inf"), 1e30]
    match draw(st.sampled_from(["type", "all", "one"])):
        case "type":
            return tensor.to(draw(st.sampled_from(kinds)))
        case "all":
            return torch.full_like(tensor, draw(st.sampled_from(values[:2])))
        case _ if tensor.is_floating_point() and tensor.numel():
            tensor = tensor.clone()
            tensor.view(-1)[0] = draw(st.sampled_from(values))
    return tensor


@st.composite
def damaged(draw) -> Dump:
    """A dump in which tensors are missing, of other shapes, types and values, or have
    other names, and facts say something else."""
    dump = draw(dumps())
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(dump.tensors) or ["query"]))
        tensor = dump.tensors.get(name, torch.zeros(2, 3, 4))
        match draw(st.sampled_from(["drop", "shape", "value", "name", "fact"])):
            case "drop":
                dump.tensors.pop(name, None)
            case "shape":
                dump.tensors[name] = reshaped(draw, tensor)
            case "value":
                dump.tensors[name] = spoilt(draw, tensor.contiguous())
            case "name":
                dump.tensors[draw(st.sampled_from(NAMES))] = tensor
            case "fact":
                fact = draw(st.sampled_from(FACTS))
                dump.metadata[fact] = draw(st.sampled_from(VALUES))
    return dump


@fuzzed
@given(dump=dumps())
def test_noise_has_no_fault(dump):
    if "MULTIHEAD_FUZZ_EXAMPLES" not in os.environ:
        dump.metadata["search_effort"] = "0.3"  # noise is searched to the end
    verdict = dump.explained()
    assert verdict["verdict"] == "unknown", verdict["faults"]
    assert verdict["assumptions"] == []


@fuzzed
@given(dump=damaged())
def test_any_dump_is_refused_in_words_or_judged(dump):
    try:
        verdict = dump.explained()
    except ValueError as error:
        assert str(error).startswith("explain: "), error
        return
    assert verdict["verdict"] in ("bits", "rounding", "fault", "unknown")


@pytest.mark.parametrize("style", STYLES)
def test_what_is_no_verdict_is_not_rendered(style):
    with pytest.raises(ValueError, match="render_report"):
        diagnosis().render_report("{}", style)
