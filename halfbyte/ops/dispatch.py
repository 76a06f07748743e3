"""The operations on plain tensors that everything above builds on, each sent to the backend that runs it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.layout import LINEAR, Blocks, check_scale_layout, matrix_shape
from halfbyte.ops import library as _library  # noqa: F401  defines torch.ops.halfbyte
from halfbyte.ops.backends import NATIVE, check_kernels, choose
from halfbyte.ops.checkpointing import outputs_are_kept
from halfbyte.ops.repeat import call_op
from halfbyte.rng import Draw
from halfbyte.spec import Spec

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


class Operand(NamedTuple):
    """A quantized GEMM operand: its bytes, spec, logical columns and scale layout."""

    blocks: Blocks
    spec: Spec
    cols: int
    scale_layout: str = LINEAR


def _check_input(x: Tensor) -> None:
    if x.dtype not in QUANTIZABLE:
        raise TypeError(f"x.dtype={x.dtype}: quantization takes bfloat16, float16 or float32; cast x first")
    matrix_shape(x.shape)


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    draw: Draw | None = None,
    sign_draw: Draw | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    backend: str | None = None,
) -> Blocks:
    """Quantize along the last dimension; see `halfbyte.reference.quantize`.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: x is 0-D, or a draw that the spec needs is missing.
    """
    _check_input(x)
    check_specs((spec,), draw, sign_draw)
    check_kernels((spec,), x.device, backend)
    check_scale_layout(scale_layout)
    out = call_op(
        torch.ops.halfbyte.quantize, x, spec.key, *_draw_arguments(draw, sign_draw), amax, scale_layout, backend or ""
    )
    return Blocks(out[0], out[1], out[2] if amax is None else amax)


def quantize_row_col(
    x: Tensor,
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
    """Return (quantize(x), quantize(x.T)) of a tensor flattened to a matrix; None where the spec is None.

    A transient operand is meant for one GEMM at once: its Blocks may hold decoded values instead of codes, which only
    `gemm_nt` reads.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: x is 0-D, a draw is missing, or it names a shard (whose two orientations differ in origin).
    """
    _check_input(x)
    check_specs((row_spec, col_spec), draw, sign_draw)
    check_kernels((row_spec, col_spec), x.device, backend)
    if draw is not None and col_spec is not None and (draw.first_block or draw.blocks_per_row is not None):
        raise ValueError(
            f"rng.first_block={draw.first_block}: a shard starts elsewhere in x.T; quantize x and x.T apart"
        )
    check_scale_layout(scale_layout)
    transient = (False, False) if outputs_are_kept() else transient
    out = call_op(
        torch.ops.halfbyte.quantize_row_col,
        x,
        row_spec.key if row_spec else "",
        col_spec.key if col_spec else "",
        *_draw_arguments(draw, sign_draw),
        row_amax,
        col_amax,
        scale_layout,
        *transient,
        backend or "",
    )
    row = col = None
    if row_spec is not None:
        row = Blocks(out[0], out[1], out[2] if row_amax is None else row_amax)
    if col_spec is not None:
        shared = row is not None and row_spec == col_spec and col_spec.is_tile
        col = Blocks(out[3], out[4], row.amax if shared else out[5] if col_amax is None else col_amax)
    return row, col


def _draw_arguments(draw: Draw | None, sign_draw: Draw | None) -> tuple:
    own = (None, 0, 0, None) if draw is None else tuple(draw)
    return *own, *((None, 0) if sign_draw is None else (sign_draw.base, sign_draw.stream))


def check_specs(specs: tuple[Spec | None, ...], draw: Draw | None, sign_draw: Draw | None) -> None:
    """Raise ValueError if a spec needs a draw that is missing."""
    for spec in specs:
        if spec is not None and spec.needs_rng and draw is None:
            raise ValueError("rng=None: the spec draws random bits; pass rng=hb.Philox(seed, offset)")
        if spec is not None and spec.needs_sign_rng and sign_draw is None:
            raise ValueError("sign_rng=None: fresh Hadamard signs are drawn; pass sign_rng=hb.Philox(seed, offset)")


def amax(x: Tensor, backend: str | None = None) -> Tensor:
    """Return max |x| over the finite elements, fp32 [] on x's device."""
    _check_input(x)
    return call_op(torch.ops.halfbyte.amax, x, backend or "")


def dequantize(
    blocks: Blocks,
    spec: Spec,
    cols: int,
    dtype: torch.dtype = torch.float32,
    scale_layout: str = LINEAR,
    backend: str | None = None,
) -> Tensor:
    """Return the values that the bytes stand for, dtype [rows, cols]."""
    return call_op(torch.ops.halfbyte.dequantize, *blocks, spec.key, cols, dtype, scale_layout, backend or "")


def decode(operand: Operand, backend: str | None = None) -> Operand:
    """Return codes as a transient operand, which several GEMMs read at no further cost; where FP4 runs natively, codes.

    Only `gemm_nt` reads it.
    """
    blocks, spec, cols, scale_layout = operand
    if choose(blocks.qdata.device, backend) == NATIVE:
        return operand
    values = call_op(torch.ops.halfbyte.decode, *blocks, spec.key, cols, scale_layout, backend or "")
    return Operand(Blocks(values, blocks.block_scale.new_empty(0), blocks.amax), spec, cols)


def transpose(
    qdata: Tensor, block_scale: Tensor, rows: int, cols: int, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Transpose packed 16x16 tiles and their LINEAR scales without rounding."""
    return call_op(torch.ops.halfbyte.transpose, qdata, block_scale, rows, cols, backend or "")


def gemm_nt(
    a: Operand | Tensor,
    b: Operand | Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return a @ b.T for a [M, K] and b [N, K], each quantized or plain, rounded once to the output dtype.

    Args:
        a, b: Operand or plain float matrix.
        out_dtype: of the result if `out` is None.
        bias: [N] or None, added in fp32.
        out: [M, N] to write into.
        accumulate: add to what `out` holds.
    """
    K = a.cols if isinstance(a, Operand) else a.shape[1]
    operands = (*operand_arguments(a), *operand_arguments(b), K)
    if out is None:
        return call_op(torch.ops.halfbyte.gemm_nt, *operands, out_dtype, bias, backend or "")
    call_op(torch.ops.halfbyte.gemm_nt_out, *operands, bias, out, accumulate, backend or "")
    return out


def gemm_nt_add(
    a: Operand | Tensor,
    b: Operand | Tensor,
    addend: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor:
    """Return a @ b.T + addend [M, N], added in fp32 and rounded once to `out_dtype`; a and b as for `gemm_nt`."""
    K = a.cols if isinstance(a, Operand) else a.shape[1]
    operands = (*operand_arguments(a), *operand_arguments(b), K)
    return call_op(torch.ops.halfbyte.gemm_nt_add, *operands, addend, out_dtype, backend or "")


def operand_arguments(operand: Operand | Tensor) -> tuple:
    """Return an operand as the ops take it: data, block_scale, amax, key, scale layout."""
    if isinstance(operand, Operand):
        blocks = operand.blocks
        return blocks.qdata, blocks.block_scale, blocks.amax, operand.spec.key, operand.scale_layout
    return operand, None, None, "", LINEAR
