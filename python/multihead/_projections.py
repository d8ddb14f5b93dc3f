# SPDX-License-Identifier: MIT
"""Which children of a module are to be called, and which may be read instead."""

from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from ._subclasses import has_own_rules

_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)


def is_plain(linear: nn.Module) -> bool:
    """Whether calling linear is to multiply by its weight and to add its bias.

    So that one operator may do it with others. Not so where it was replaced, also by
    a subclass (LoRA, quantized, parametrized), has hooks or a forward of its own, or
    has weights with rules of their own (DTensor).
    """
    return not (
        type(linear) not in _LINEAR
        or linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or "forward" in linear.__dict__
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
        or has_own_rules(linear._parameters["weight"])
    )


def check_readable(function: str, **linears: nn.Module) -> None:
    """TypeError where a weight is not all that a projection does: a LoRA, say.

    One that was parametrized is read as it is now.
    """
    for name, linear in linears.items():
        if parametrize.type_before_parametrizations(linear) not in _LINEAR:
            raise TypeError(
                f"{function}: {name} must be a torch.nn.Linear, got "
                f"{type(linear).__qualname__}: merge it into one"
            )
