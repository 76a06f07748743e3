"""The grouped operations on plain tensors: tokens in groups and the weights of experts (docs/moe.md).

`offsets` is an integer tensor [E] on x's device with the cumulative ends of the groups, as torch's grouped GEMM takes
it; 3-D data [E, rows, cols] is one matrix per group and takes None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.layout import LINEAR, Blocks, check_scale_layout
from halfbyte.ops import grouped_library as _library  # noqa: F401  defines torch.ops.halfbyte.grouped_*
from halfbyte.ops.backends import TRITON, check_kernels, choose
from halfbyte.ops.checkpointing import outputs_are_kept
from halfbyte.ops.dispatch import QUANTIZABLE, Operand, check_specs, operand_arguments
from halfbyte.ops.repeat import call_op
from halfbyte.rng import Draw
from halfbyte.spec import Spec


def check_offsets(offsets: object, x: Tensor) -> None:
    """Raise unless `offsets` can name groups of x; reads no value."""
    if not isinstance(offsets, Tensor):
        raise TypeError(f"offsets={offsets!r}: give an int32 tensor with the cumulative ends of the groups")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets.dtype={offsets.dtype}: give int32 (or int64)")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"offsets.shape={tuple(offsets.shape)}: give one cumulative end per group, shape [E], E >= 1")
    if offsets.device != x.device:
        raise ValueError(f"offsets.device={offsets.device}: the tokens are on {x.device}; make offsets there")


def emulates(device: torch.device) -> bool:
    """Whether GEMMs on `device` multiply decoded values by Triton kernels."""
    return choose(device, None) == TRITON


def grouped_quantize_row_col(
    x: Tensor,
    offsets: Tensor | None,
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    transient: tuple[bool, bool] = (False, False),
    backend: str | None = None,
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x_g), quantize(x_g.T)) of every group, joined; None where the spec is None.

    Args:
        x: tokens [M, C] with offsets, or expert weights [E, N, K] without.
        row_amax, col_amax: fp32 [E], used instead of the computed ones.
        transient: whether row and col are meant for one grouped GEMM at once, as in `quantize_row_col`.

    Raises:
        TypeError: x is not bf16, fp16 or fp32, or offsets no integer tensor.
        ValueError: x or offsets have the wrong shape, or a draw is missing or names a shard.
    """
    if x.dtype not in QUANTIZABLE:
        raise TypeError(f"x.dtype={x.dtype}: quantization takes bfloat16, float16 or float32; cast x first")
    if x.dim() != (3 if offsets is None else 2):
        raise ValueError(f"x.shape={tuple(x.shape)}: give tokens [M, C] with offsets, or weights [E, N, K] without")
    if offsets is not None:
        check_offsets(offsets, x)
    elif x.shape[0] == 0:
        raise ValueError(f"x.shape={tuple(x.shape)}: give the weights of at least one expert")
    check_specs((row_spec, col_spec), draw, sign_draw)
    check_kernels((row_spec, col_spec), x.device, backend)
    for place in (draw, sign_draw):
        if place is not None and (place.first_block or place.blocks_per_row is not None):
            raise ValueError(f"rng.first_block={place.first_block}: a grouped operand is whole; quantize shards apart")
    check_scale_layout(scale_layout)
    transient = (False, False) if outputs_are_kept() else transient
    keys = (row_spec.key if row_spec else "", col_spec.key if col_spec else "")
    own, signs = ((None, 0) if place is None else (place.base, place.stream) for place in (draw, sign_draw))
    given = (x, offsets, *keys, *own, *signs, row_amax, col_amax, scale_layout, *transient, backend or "")
    out = call_op(torch.ops.halfbyte.grouped_quantize_row_col, *given)
    row = col = None
    if row_spec is not None:
        row = Blocks(out[0], out[1], out[2] if row_amax is None else row_amax)
    if col_spec is not None:
        shared = row is not None and row_spec == col_spec and col_spec.is_tile
        col = Blocks(out[3], out[4], row.amax if shared else out[5] if col_amax is None else col_amax)
    return row, col


def grouped_dequantize(
    operand: Operand, offsets: Tensor | None, dtype: torch.dtype = torch.float32, backend: str | None = None
) -> Tensor:
    """Return the values of an operand with groups along its rows, [M, cols] or, without offsets, [E, rows, cols]."""
    return call_op(
        torch.ops.halfbyte.grouped_dequantize,
        *operand.blocks,
        offsets,
        operand.spec.key,
        operand.cols,
        dtype,
        operand.scale_layout,
        backend or "",
    )


def grouped_decode(operand: Operand, backend: str | None = None) -> Operand:
    """Return experts' codes [E, rows, bytes] as a transient operand: bf16 element * block_scale, without padding.

    Only the kernels' `grouped_gemm_nt` reads it.
    """
    blocks, spec, cols, scale_layout = operand
    assert scale_layout == LINEAR, "experts that are kept for the backward have LINEAR scales"
    values = call_op(torch.ops.halfbyte.grouped_decode, *blocks, spec.key, cols, backend or "")
    return Operand(Blocks(values, blocks.block_scale.new_empty(0), blocks.amax), spec, cols)


def grouped_gemm_nt(
    a: Operand | Tensor,
    b: Operand | Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return a_g @ b_g.T of every group, each rounded once to the output dtype.

    Args:
        a: tokens [M, K]; or [R, K] with the groups along K.
        b: experts [E, N, K]; or [C, K] with the groups along K.
        out: [M, N] or [E, R, C] to write into.
        accumulate: add to what `out` holds.

    Returns:
        [M, N], rows behind the last group zero; or [E, R, C], zero for an empty group.
    """
    K = a.cols if isinstance(a, Operand) else a.shape[1]
    operands = (*operand_arguments(a), *operand_arguments(b), K, offsets)
    if out is None:
        return call_op(torch.ops.halfbyte.grouped_gemm_nt, *operands, out_dtype, backend or "")
    call_op(torch.ops.halfbyte.grouped_gemm_nt_out, *operands, out, accumulate, backend or "")
    return out
