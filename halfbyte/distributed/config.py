"""How a ZeroOptimizer stores and communicates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from halfbyte.tensor.quant_tensor import VALUE_DTYPES


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How a ZeroOptimizer stores and communicates.

    Args:
        weights: "nvfp4" stores the weights of hb.nn.Linear layers whose recipe has them in 16x16 tiles as
            PrimaryWeights; "plain" keeps all parameters in their dtype: the same training, bit for bit, with four times
            the memory and traffic for weights.
        weight_dtype: that masters of NVFP4 weights are rounded to before they are quantized, and of their gradients;
            None for the parameter's own, torch.bfloat16 where an fp32 model runs under autocast.
        grad_dtype: in which gradients are summed over micro-batches and ranks: torch.float32 or torch.bfloat16.
        bucket_numel: elements after which a bucket is closed.
        max_norm: gradients are scaled down to this global norm; None for never.
        timeout: how long a rank waits for the others where they compare notes.
    """

    weights: Literal["nvfp4", "plain"] = "nvfp4"
    weight_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype = torch.float32
    bucket_numel: int = 1 << 25
    max_norm: float | None = None
    timeout: timedelta = timedelta(seconds=60)

    def __post_init__(self) -> None:
        if self.weights not in ("nvfp4", "plain"):
            raise ValueError(f"weights={self.weights!r}: use 'nvfp4' or 'plain'")
        if self.weight_dtype not in (None, *VALUE_DTYPES):
            raise ValueError(f"weight_dtype={self.weight_dtype}: use torch.bfloat16, float16 or float32, or None")
        if self.grad_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"grad_dtype={self.grad_dtype}: use torch.float32 or torch.bfloat16")
        if isinstance(self.bucket_numel, bool) or not isinstance(self.bucket_numel, int) or self.bucket_numel < 1:
            raise ValueError(f"bucket_numel={self.bucket_numel}: give a positive number of elements")
        if not isinstance(self.timeout, timedelta):
            raise ValueError(f"timeout={self.timeout!r}: give a datetime.timedelta, such as timedelta(seconds=60)")
        is_number = isinstance(self.max_norm, int | float) and not isinstance(self.max_norm, bool)
        if self.max_norm is not None and not (is_number and self.max_norm > 0):
            raise ValueError(f"max_norm={self.max_norm}: give a positive norm, or None")
