# SPDX-License-Identifier: MIT
"""torch.ao.quantization.prepare on a model that holds our MultiheadAttention."""

from torch.ao.nn import quantizable, quantized
from torch.ao.quantization import get_default_custom_config_dict

from .modules import MultiheadAttention


class QuantizableMultiheadAttention(quantizable.MultiheadAttention):
    """PyTorch's quantizable attention, made from_float of multihead's module."""

    _FLOAT_MODULE = MultiheadAttention


# Adds ours to the tables that torch.ao.quantization.prepare and convert read.
_classes = get_default_custom_config_dict()  # type: ignore[no-untyped-call]
_classes["float_to_observed_custom_module_class"][MultiheadAttention] = (
    QuantizableMultiheadAttention
)
_classes["observed_to_quantized_custom_module_class"][QuantizableMultiheadAttention] = (
    quantized.MultiheadAttention
)
