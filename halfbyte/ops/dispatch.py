"""The operations on plain tensors that everything above builds on, each sent to the backend that runs it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.layout import LINEAR, Blocks, matrix_shape
from halfbyte.ops.backends import choose
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
    _check_draws((spec,), draw, sign_draw)
    backend = choose(x.device, backend)
    assert backend == reference.NAME
    return reference.quantize(x, spec, draw=draw, sign_draw=sign_draw, amax=amax, scale_layout=scale_layout)


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
    backend: str | None = None,
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x), quantize(x.T)) of a tensor flattened to a matrix; None where the spec is None.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: x is 0-D, a draw is missing, or it names a shard (whose two orientations differ in origin).
    """
    _check_input(x)
    _check_draws((row_spec, col_spec), draw, sign_draw)
    if draw is not None and col_spec is not None and (draw.first_block or draw.blocks_per_row is not None):
        raise ValueError(
            f"rng.first_block={draw.first_block}: a shard starts elsewhere in each orientation; quantize x and x.T apart"
        )
    backend = choose(x.device, backend)
    assert backend == reference.NAME
    return reference.quantize_row_col(
        x,
        row_spec,
        col_spec,
        draw=draw,
        sign_draw=sign_draw,
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
    )


def _check_draws(specs: tuple[Spec | None, ...], draw: Draw | None, sign_draw: Draw | None) -> None:
    for spec in specs:
        if spec is not None and spec.needs_rng and draw is None:
            raise ValueError(f"rng=None: {spec.rounding} rounding draws random bits; pass rng=hb.Philox(seed, offset)")
        if spec is not None and spec.needs_sign_rng and sign_draw is None:
            raise ValueError("sign_rng=None: fresh Hadamard signs are drawn; pass sign_rng=hb.Philox(seed, offset)")


def amax(x: Tensor, backend: str | None = None) -> Tensor:
    """Return max |x| over the finite elements, fp32 [] on x's device."""
    _check_input(x)
    assert choose(x.device, backend) == reference.NAME
    return reference.finite_amax(x)


def dequantize(
    blocks: Blocks,
    spec: Spec,
    cols: int,
    dtype: torch.dtype = torch.float32,
    scale_layout: str = LINEAR,
    backend: str | None = None,
) -> Tensor:
    """Return the values that the bytes stand for, dtype [rows, cols]."""
    assert choose(blocks.qdata.device, backend) == reference.NAME
    return reference.dequantize(blocks, spec, cols, dtype, scale_layout)


def transpose(qdata: Tensor, block_scale: Tensor, rows: int, cols: int, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Transpose packed 16x16 tiles and their LINEAR scales without rounding."""
    assert choose(qdata.device, backend) == reference.NAME
    return reference.transpose(qdata, block_scale, rows, cols)


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
    device = (a.blocks.qdata if isinstance(a, Operand) else a).device
    assert choose(device, backend) == reference.NAME
    cols = a.cols if isinstance(a, Operand) else a.shape[1]
    padded = isinstance(a, Operand) and isinstance(b, Operand)
    with torch.autocast(device.type, enabled=False):
        return reference.gemm_nt(
            _decode(a, cols, padded), _decode(b, cols, padded), out_dtype=out_dtype, bias=bias, out=out, accumulate=accumulate
        )


def _decode(operand: Operand | Tensor, cols: int, padded: bool) -> reference.Decoded:
    if isinstance(operand, Tensor):
        return reference.Decoded(operand.float(), None)
    decoded = reference.decode(*operand)
    return decoded if padded else decoded._replace(values=decoded.values[:, :cols])
