# SPDX-License-Identifier: MIT
"""What all tests share: one thread, because the tensors are small."""

import torch

torch.set_num_threads(1)
