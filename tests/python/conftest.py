# SPDX-License-Identifier: MIT
"""What all tests share: one thread, because the tensors are small, and no compiled
graphs from earlier runs: PyTorch keeps those on disk, and does not notice that an
operator has another schema since. To collect 8,000 tests makes much that stays and little
garbage, which Python would look through again and again."""

import gc
import os

os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import torch

torch.set_num_threads(1)
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
