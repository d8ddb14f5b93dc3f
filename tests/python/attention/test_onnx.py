# SPDX-License-Identifier: MIT
"""ONNX's operator Attention: its own test cases, through our function.

The adapter renames arguments and cuts heads; every mask stays what the case has.
"""

import importlib

import numpy as np
import pytest
import torch
from torch import Tensor

import multihead

pytest.importorskip("onnx", reason="needs the package onnx (requirements/test.txt)")


def load() -> dict:
    """The operator's test cases by name, without those of its decomposition."""
    from onnx.backend.test.case import node

    # Its public functions collect the cases of all operators, for some seconds.
    importlib.import_module("onnx.backend.test.case.node.attention")
    named = {case.name: case for case in node._NodeTestCases}
    return {
        name: case
        for name, case in named.items()
        if name.startswith("test_attention_") and not name.endswith("_expanded")
    }


def tensor(array: np.ndarray) -> Tensor:
    """bfloat16 too, which NumPy has from elsewhere."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def named(names, arrays) -> dict[str, Tensor]:
    """Absent arguments have no name and no array."""
    return dict(zip(filter(None, names), map(tensor, arrays), strict=True))


def heads(x: Tensor, count: int) -> Tensor:
    """(B, L, heads·D) → (B, heads, L, D)"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def run(inputs: dict[str, Tensor], node: dict) -> dict[str, Tensor]:
    """The operator: what it returns, by name, as far as our function has it."""
    q, k, v = (inputs[name] for name in "QKV")
    flat = q.dim() == 3
    if flat:
        q = heads(q, node["q_num_heads"])
        k, v = (heads(x, node["kv_num_heads"]) for x in (k, v))
    mask, lengths = inputs.get("attn_mask"), inputs.get("nonpad_kv_seqlen")
    rules = dict(
        is_causal=bool(node.get("is_causal", 0)),
        scale=node.get("scale"),
        enable_gqa=True,
        window=(node.get("left_window_size", -1), node.get("right_window_size", -1)),
        softcap=node.get("softcap", 0.0),
        key_lengths=lengths,
    )
    if "past_key" in inputs:  # queries stand behind it, however many keys are new
        rules["query_offset"] = torch.tensor(inputs["past_key"].size(2))
        k = torch.cat([inputs["past_key"], k], 2)
        v = torch.cat([inputs["past_value"], v], 2)
    elif lengths is not None:
        rules["causal_alignment"] = "bottom_right"
        if mask is not None:  # a mask may end where the longest row does
            k, v = (x[:, :, : mask.size(-1)] for x in (k, v))
    out, lse = multihead.scaled_dot_product_attention(
        q, k, v, mask, **rules, return_lse=True
    )
    results = {"present_key": k, "present_value": v}
    results["Y"] = out.transpose(1, 2).flatten(2) if flat else out
    if node.get("qk_matmul_output_mode") == 3:
        results["qk_matmul_output"] = torch.ops.multihead.attention_weights(
            q, k, lse, False, mask, **rules
        )
    return results


CASES = load()
# The scores themselves (qk_matmul_output in the modes 0, before softcap, 1, before
# the mask, and 2, before the softmax) are no result of ours: nothing forms them. Of
# these cases the other results are compared.
WITH_SCORES = {
    "test_attention_3d_with_past_and_present_qk_matmul",
    "test_attention_3d_with_past_and_present_qk_matmul_bias",
    "test_attention_3d_with_past_and_present_qk_matmul_softcap",
    "test_attention_4d_with_past_and_present_qk_matmul",
    "test_attention_4d_with_past_and_present_qk_matmul_bias",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "test_attention_4d_with_qk_matmul",
    "test_attention_4d_with_qk_matmul_bias",
    "test_attention_4d_with_qk_matmul_softcap",
}


@pytest.mark.parametrize("mode", ["auto", "fused", "exact"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_case(name, mode):
    import onnx

    case = CASES[name]
    (node,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    ((given, returned),) = case.data_sets
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    inputs = named([n and names[i] for i, n in enumerate(node.input)], given)
    names = ("Y", "present_key", "present_value", "qk_matmul_output")
    expected = named([n and names[i] for i, n in enumerate(node.output)], returned)
    with multihead.backend(mode):
        results = run(inputs, attributes)
    missing = ["qk_matmul_output"] if name in WITH_SCORES else []
    assert [n for n in expected if n not in results] == missing
    for n in expected.keys() & results.keys():
        # In bfloat16 theirs is rounded at each of three steps, ours at the end.
        rtol, eps = case.rtol, torch.finfo(expected[n].dtype).eps
        rtol = 2 * eps if expected[n].dtype == torch.bfloat16 else rtol
        torch.testing.assert_close(results[n], expected[n], rtol=rtol, atol=case.atol)


def test_there_are_as_many_cases_as_were_known():
    assert len(CASES) >= 93 and CASES.keys() >= WITH_SCORES
