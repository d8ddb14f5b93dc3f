# SPDX-License-Identifier: MIT
"""torch.nn.attention.varlen on the CPU: this library as PyTorch's provider.

PyTorch has ``varlen_attn`` for GPUs alone; on the CPU it raises NotImplementedError.
Two ways to have it here, for CPU tensors; those of GPUs stay what they are::

    multihead.install(varlen=True)  # with the rest of install()

    multihead.integrations.varlen.register()  # by itself, in PyTorch's words
    torch.nn.attention.activate_flash_attention_impl("multihead")

Ragged batches, grouped heads, windows, causal from the bottom right, gradients, pages,
``out=``, the logsumexp, ``torch.compile``. ``num_splits`` changes nothing: the bits of a
sequence never depend on its batch. multihead.varlen_attention has more rules.
"""

import torch
from torch.nn.attention import register_flash_attention_impl

_ops = torch.ops.multihead


class _Active:
    """What activate_flash_attention_impl keeps until it is restored."""

    def __init__(self) -> None:
        self._holds = True
        _ops.enter_varlen.default()

    def remove(self) -> None:
        if self._holds:
            self._holds = False
            _ops.leave_varlen.default()


def register() -> None:
    """Makes the provider "multihead" known to torch.nn.attention; activates nothing.

    torch.nn.attention.activate_flash_attention_impl("multihead") activates it in place of
    another, restore_flash_attention_impl() takes it back.
    """
    register_flash_attention_impl("multihead", register_fn=_Active)
