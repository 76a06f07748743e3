"""Quantized tensors: the class, how to make one, what torch does with it, how it is stored."""

import torch

from halfbyte.tensor import aten as _aten  # fills the table of torch functions
from halfbyte.tensor.create import quantize, quantize_row_col
from halfbyte.tensor.grouped import grouped_quantize_row_col
from halfbyte.tensor.primary import PrimaryWeight, rebuild_primary
from halfbyte.tensor.quant_tensor import QuantTensor, rebuild
from halfbyte.tensor.serialize import from_safetensors, to_safetensors

DequantizeWarning = _aten.DequantizeWarning

# torch.load(weights_only=True) may call these functions, which check all they are given.
torch.serialization.add_safe_globals([rebuild, rebuild_primary])

__all__ = [
    "DequantizeWarning",
    "PrimaryWeight",
    "QuantTensor",
    "from_safetensors",
    "grouped_quantize_row_col",
    "quantize",
    "quantize_row_col",
    "to_safetensors",
]
