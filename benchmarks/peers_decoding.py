# SPDX-License-Identifier: MIT
"""Attention of engines that generate text: vLLM's CPU kernel and ggml's.

Query (1, H, L, D) are the last of the tokens of key and value (1, G, Lk, D); query i
sees the keys up to its own. What an engine keeps, its cache above all, is made here,
outside the time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 128  # vLLM's on CPUs


def load_vllm() -> None:
    """Its operators alone: `import vllm` wants a hundred packages."""
    import torch

    if hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    (library,) = Path(spec.submodule_search_locations[0]).glob(f"{name}.*so")
    torch.ops.load_library(str(library))


def with_vllm(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """vLLM's kernel on one sequence in its cache, pages in order."""
    import torch

    load_vllm()
    operators = torch.ops._C
    _, H, L, D = q.shape
    G, Lk = k.shape[1:3]
    amx = q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    isa = "amx" if amx else "vec"

    def rows(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1).contiguous()

    pages = -(-Lk // PAGE)
    cache = torch.zeros(pages, G, 2 * PAGE, D, dtype=q.dtype)
    keys, values = cache.chunk(2, dim=2)
    operators.cpu_attn_reshape_and_cache(
        rows(k), rows(v), keys, values, torch.arange(Lk), isa, 1.0, 1.0, "auto"
    )
    query = rows(q)
    out = torch.empty_like(query)
    bounds = torch.tensor([0, L], dtype=torch.int32)
    lengths = torch.tensor([Lk], dtype=torch.int32)
    table = torch.arange(pages, dtype=torch.int32)[None]
    # vLLM makes it once for all layers of a step.
    schedule = operators.get_scheduler_metadata(
        1, H, G, D, lengths, q.dtype, bounds, True, -1, isa, True, None, "auto"
    )
    result = out[None].transpose(1, 2)

    def call() -> Tensor:
        operators.cpu_attention_with_kv_cache(
            query, keys, values, out, bounds, lengths, 1 / math.sqrt(D), True, None,
            -1, table, 0.0, schedule, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return result

    return call


def with_ggml(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """ggml_flash_attn_ext. Its queries and outputs are float32."""
    import ggml
    import torch

    kinds = {
        torch.float32: ggml.GGML_TYPE_F32,
        torch.bfloat16: ggml.GGML_TYPE_BF16,
        torch.float16: ggml.GGML_TYPE_F16,
    }
    _, H, L, D = q.shape
    Lk = k.shape[2]
    inputs = [q.float().contiguous(), k.contiguous(), v.contiguous()]
    if L > 1:  # rows in whole blocks
        mask = torch.full((1, 1, -(-L // 32) * 32, Lk), -math.inf, dtype=torch.float16)
        mask[:, :, :L] = mask[:, :, :L].triu(Lk - L + 1)
        inputs.append(mask)
    needed = sum(x.nbytes + 1024 for x in inputs) + inputs[0].nbytes
    context = ggml.ggml_init(
        ggml.ggml_init_params(needed + ggml.ggml_graph_overhead() + 65536, None, False)
    )

    def given(x: Tensor) -> object:
        tensor = ggml.ggml_new_tensor_4d(context, kinds[x.dtype], *reversed(x.shape))
        ctypes.memmove(ggml.ggml_get_data(tensor), x.data_ptr(), x.nbytes)
        return tensor

    tensors = [*map(given, inputs), None][:4]
    out = ggml.ggml_flash_attn_ext(context, *tensors, 1 / math.sqrt(D), 0.0, 0.0)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, out)
    plan = ggml.ggml_graph_plan(graph, 1, None)
    work = (ctypes.c_uint8 * max(1, plan.work_size))()
    plan.work_data = ctypes.cast(work, ctypes.POINTER(ctypes.c_uint8))
    memory = (ctypes.c_float * (L * H * D)).from_address(ggml.ggml_get_data(out))
    result = torch.frombuffer(memory, dtype=torch.float32)
    result = result.view(1, L, H, D).transpose(1, 2)

    def call(kept: object = work) -> Tensor:
        ggml.ggml_graph_compute(graph, ctypes.byref(plan))
        return result

    return call
