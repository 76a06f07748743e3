"""The functions through which Megatron-Core's distributed optimizer handles NVFP4 weights, for PrimaryWeight.

Names and arguments are those of `megatron.core.fp4_utils` and `megatron.core.fp8_utils`; docs/megatron.md says where
they are called. Nothing here imports Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed import cast_master_weights_to_nvfp4
from halfbyte.distributed import post_all_gather_processing as _post_all_gather_processing
from halfbyte.tensor import PrimaryWeight


def is_nvfp4tensor(tensor: Tensor) -> bool:
    """Say whether a parameter exists only in NVFP4."""
    return isinstance(tensor, PrimaryWeight)


def get_nvfp4_rowwise_packed_shape(shape: Sequence[int] | torch.Size) -> torch.Size:
    """Return the shape of the packed codes of a parameter [N, K]: [N, K / 2] for K a multiple of 16.

    Raises:
        ValueError: K is not a multiple of 16, so that element e of the gradient buffer is not byte e / 2.
    """
    *rows, cols = shape
    if cols % 16:
        raise ValueError(f"shape={list(shape)}: the parameter buffer has half a byte an element; K % 16 must be 0")
    return torch.Size((*rows, cols // 2))


def modify_nvfp4_rowwise_storage(fp4_tensor: PrimaryWeight, new_rowwise_data: Tensor) -> None:
    """Move the codes of a weight to `new_rowwise_data`, a part of the parameter buffer.

    Args:
        fp4_tensor: the weight.
        new_rowwise_data: uint8 of as many bytes, contiguous, at an address that is a multiple of 8.

    Raises:
        ValueError: it does not have the codes' size, dtype and device, or kernels cannot read words from it.
    """
    old, new = fp4_tensor.qdata, new_rowwise_data
    if new.dtype != torch.uint8 or new.numel() != old.numel() or not new.is_contiguous() or new.device != old.device:
        raise ValueError(
            f"new_rowwise_data is {new.dtype} {list(new.shape)} on {new.device}: "
            f"give contiguous uint8 of {old.numel()} bytes on {old.device}"
        )
    if new.data_ptr() % 8:
        raise ValueError(
            "new_rowwise_data starts at an address that is no multiple of 8: start weights at multiples of 16"
        )
    new = new.view(old.shape)
    new.copy_(old)
    fp4_tensor.qdata = new


def quantize_nvfp4_param_shard(
    model_params: Sequence[PrimaryWeight],
    main_params: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: dist.ProcessGroup | None,
    fsdp_shard_model_params: Sequence[Tensor | None] | None = None,
) -> None:
    """Cast this rank's shards of the fp32 main parameters, after the optimizer stepped them.

    Args:
        model_params, main_params, start_offsets, data_parallel_group, fsdp_shard_model_params: as for
            `hb.distributed.cast_master_weights_to_nvfp4`.
    """
    cast_master_weights_to_nvfp4(
        model_params, main_params, start_offsets, data_parallel_group, fsdp_shard_model_params, True
    )


modify_underlying_storage = modify_nvfp4_rowwise_storage
"""Its name in `fp8_utils`, for FP8 parameters."""

quantize_param_shard = quantize_nvfp4_param_shard
"""Its name in `fp8_utils`, for FP8 parameters."""


def post_all_gather_processing(model_params: Sequence[PrimaryWeight]) -> None:
    """Make the other orientation of weights whose codes have been gathered."""
    _post_all_gather_processing(model_params)
