"""Checkpoint: what a folder of quantized weights holds, as QuantTensors and plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.export.contract import Contract
from halfbyte.export.masters import decoded_values, quantizable_values
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.quant_tensor import check_value_dtype


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What `hb.export.load` read.

    Args:
        folder: where from.
        format: "modelopt" or "compressed-tensors".
        config: of config.json, without `quantization_config`.
        tensors: {key: tensor} as the architecture's checkpoints call them; a weight in NVFP4 is a QuantTensor, one in
            FP8 has its values.
        input_amaxes: {module: greatest magnitude of its input}, where engines were told one.
        fp8: keys of weights that lie in FP8.
        transposed: keys of experts that the architecture holds as [E, K, N]; their QuantTensors are [E, N, K].
        cache_scales: {key: tensor} of scales for the keys and values of attention.
        contract: of training, if halfbyte wrote the folder.
    """

    folder: Path
    format: str
    config: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    input_amaxes: Mapping[str, float] = field(repr=False)
    fp8: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    cache_scales: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    contract: Contract | None = field(repr=False, default=None)

    @property
    def quantized(self) -> dict[str, QuantTensor]:
        """The weights in NVFP4."""
        return {key: tensor for key, tensor in self.tensors.items() if isinstance(tensor, QuantTensor)}

    def masters(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return plain tensors to train from: the values that the codes stand for, and the others as they are.

        The greatest value of a weight is its amax itself. Where the contract of training names the spec, values are
        those that quantize to the bytes again (export/masters.py): few differ, all within what rounds to their code.

        Args:
            dtype: of all floating point tensors; None leaves every one's own, for codes what they were rounded to.

        Raises:
            TypeError: dtype is none that layers compute in.
        """
        if dtype is not None:
            check_value_dtype("dtype", dtype, "take float32 and convert from there")
        result = {}
        for key, tensor in self.tensors.items():
            value = self._value(key, tensor, dtype) if isinstance(tensor, QuantTensor) else tensor
            value = value.mT.contiguous() if key in self.transposed else value
            result[key] = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        return result

    def _value(self, key: str, quant: QuantTensor, dtype: torch.dtype | None) -> Tensor:
        is_ours = self.contract is not None and key in self.contract.layers
        return (quantizable_values(quant) if is_ours else decoded_values(quant)).to(dtype or quant.dtype)
