"""The functions through which Megatron-Core's distributed optimizer handles NVFP4 weights, for PrimaryWeight.

Names and arguments are those of `megatron.core.fp4_utils` and `megatron.core.fp8_utils`; docs/megatron.md says where
they are called. Nothing here imports Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.distributed import cast_master_weights_to_nvfp4
from halfbyte.distributed import post_all_gather_processing as _post_all_gather_processing
from halfbyte.layout import Blocks
from halfbyte.tensor import PrimaryWeight


def is_nvfp4tensor(tensor: Tensor) -> TypeGuard[PrimaryWeight]:
    """Say whether a parameter is a matrix that exists only in NVFP4; of experts `is_grouped_nvfp4tensor` does."""
    return isinstance(tensor, PrimaryWeight) and tensor.dim() == 2


def is_grouped_nvfp4tensor(tensor: Tensor) -> TypeGuard[PrimaryWeight]:
    """Say whether a parameter is of experts [E, N, K] that exist only in NVFP4."""
    return isinstance(tensor, PrimaryWeight) and tensor.dim() == 3


def get_nvfp4_rowwise_packed_shape(shape: Sequence[int] | torch.Size) -> torch.Size:
    """Return the shape of the packed codes of a parameter [N, K] or [E, N, K]: K / 2 last, for K a multiple of 16.

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
        ValueError: the weight is no matrix in NVFP4, the memory does not have the codes' size, dtype and device, or
            kernels cannot read words from it.
    """
    if not is_nvfp4tensor(fp4_tensor):
        raise ValueError(
            f"fp4_tensor is {_described(fp4_tensor)}: give a PrimaryWeight [N, K]; experts have a call of "
            "their own, modify_grouped_nvfp4_rowwise_storage"
        )
    _move_codes(fp4_tensor, new_rowwise_data)


def modify_grouped_nvfp4_rowwise_storage(grouped_tensor: PrimaryWeight, new_rowwise_data: Tensor) -> None:
    """Move the codes of experts to `new_rowwise_data`, a part of the parameter buffer; scales and amaxes stay.

    Args:
        grouped_tensor: the weight [E, N, K]; its members' codes move with it.
        new_rowwise_data: as for `modify_nvfp4_rowwise_storage`.

    Raises:
        ValueError: it is no such weight, or the new memory does not fit, as there.
    """
    if not is_grouped_nvfp4tensor(grouped_tensor):
        raise ValueError(
            f"grouped_tensor is {_described(grouped_tensor)}: give a PrimaryWeight [E, N, K]; a matrix has "
            "a call of its own, modify_nvfp4_rowwise_storage"
        )
    _move_codes(grouped_tensor, new_rowwise_data)
    known = _known_members(grouped_tensor)
    for member, codes in zip(known, grouped_tensor.qdata.chunk(max(1, len(known))), strict=False):
        member.qdata = codes


def get_grouped_quantized_members(tensor: PrimaryWeight, *, create_if_missing: bool = False) -> list[PrimaryWeight]:
    """Return the experts of a weight one by one: matrices [N, K] whose codes, scales and amaxes are the weight's own.

    Args:
        tensor: the weight [E, N, K].
        create_if_missing: False raises if no call before has made them. The same objects are returned from then on.

    Raises:
        ValueError: it is no such weight.
        RuntimeError: they were never made.
    """
    if not is_grouped_nvfp4tensor(tensor):
        raise ValueError(f"tensor is {_described(tensor)}: give a PrimaryWeight [E, N, K]")
    if not _known_members(tensor):
        if not create_if_missing:
            raise RuntimeError("tensor: nobody asked for its members yet; pass create_if_missing=True, before training")
        experts, *matrix = tensor.shape
        parts = zip(*(t.unflatten(0, (experts, -1)) for t in tensor.blocks[:2]), tensor.blocks.amax, strict=True)
        options = {"shape": tuple(matrix), "dtype": tensor.dtype}
        vars(tensor)[_MEMBERS] = _Members([PrimaryWeight(Blocks(*own), tensor.spec, **options) for own in parts])
    return list(_known_members(tensor))


_MEMBERS = "_megatron_members"


class _Members(NamedTuple):
    """Experts as matrices, kept with their weight."""

    weights: list[PrimaryWeight]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied weight makes its own: these have the codes of the first."""


def _known_members(tensor: PrimaryWeight) -> list[PrimaryWeight]:
    known: _Members | None = getattr(tensor, _MEMBERS, None)
    return [] if known is None else known.weights


def _described(tensor: object) -> str:
    return f"{type(tensor).__name__} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__


def _move_codes(weight: PrimaryWeight, new: Tensor) -> None:
    old = weight.qdata
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
    weight.qdata = new


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
            `hb.distributed.cast_master_weights_to_nvfp4`. Experts are given one by one, as
            `get_grouped_quantized_members` returns them, with the parts of a shard that are theirs.
    """
    cast_master_weights_to_nvfp4(
        model_params, main_params, start_offsets, data_parallel_group, fsdp_shard_model_params, True
    )


modify_underlying_storage = modify_nvfp4_rowwise_storage
"""Its name in `fp8_utils`, for FP8 parameters."""

quantize_param_shard = quantize_nvfp4_param_shard
"""Its name in `fp8_utils`, for FP8 parameters."""


is_grouped_tensor = is_grouped_nvfp4tensor
"""Its name in `fp8_utils`, for experts in one parameter, whatever they are stored as: here those in NVFP4 alone."""

is_grouped_tensor_with_quantized_storage = is_grouped_nvfp4tensor
"""Its name in `fp8_utils`, for all formats."""


def post_all_gather_processing(model_params: Sequence[PrimaryWeight]) -> None:
    """Make the other orientation of matrices whose codes have been gathered; a backward turns experts itself."""
    _post_all_gather_processing([weight for weight in model_params if not is_grouped_nvfp4tensor(weight)])
