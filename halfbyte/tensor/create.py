"""quantize and quantize_row_col: check what the user gave, call the op, wrap its tensors.

No check reads a value, so nothing here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.layout import LINEAR, Blocks, amax_shape, check_scale_layout, matrix_shape
from halfbyte.rng import AnyPhilox, Draw
from halfbyte.sides import Side, Sides, both_sides
from halfbyte.spec import Spec
from halfbyte.tensor.quant_tensor import VALUE_DTYPES, QuantTensor, check_spec, describe


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    rng: AnyPhilox | None = None,
    sign_rng: AnyPhilox | None = None,
    amax: Tensor | None = None,
    scale_layout: str = LINEAR,
    backend: str | None = None,
) -> QuantTensor:
    """Quantize `x` in blocks along its last dimension (docs/numerics.md sections 2 to 7).

    It has no gradient: the result is a constant for autograd. `rng` and `sign_rng` are only read where the spec
    draws, so one call serves every spec.

    Args:
        x: bfloat16, float16 or float32 [..., K], any strides, at least 1-D.
        spec: NVFP4 or MXFP8.
        rng: the bits of stochastic rounding or Eden.
        sign_rng: the bits of fresh Hadamard signs, shared by both operands of a GEMM.
        amax: replaces the computed one: fp32 [], or [M] if spec.outer == "row" (M = product of the leading sizes).
        scale_layout: "linear" or "swizzled_32_4_4".
        backend: None chooses one.

    Returns:
        QuantTensor of x's shape and nominal dtype.

    Raises:
        TypeError: wrong type or dtype of x, spec, rng, sign_rng or amax.
        ValueError: x is 0-D, random bits are missing, amax or scale_layout do not fit the spec.
    """
    rows = _check_input(x)
    check_spec("spec", spec)
    check_scale_layout(scale_layout)
    _check_amax(amax, spec, x, rows)
    draw = _draw("rng", rng, x, spec if spec.needs_rng else None)
    sign_draw = _draw("sign_rng", sign_rng, x, spec if spec.needs_sign_rng else None)
    own = None if amax is None else amax.clone()  # what is written to the result is not written to the caller's
    blocks = ops.quantize(
        x.detach(), Side(spec, draw=draw, sign_draw=sign_draw, amax=own, scale_layout=scale_layout), backend=backend
    )
    return _wrap(blocks, spec, tuple(x.shape), x.dtype, scale_layout)


def quantize_row_col(
    x: Tensor,
    row_spec: Spec | None,
    col_spec: Spec | None,
    *,
    rng: AnyPhilox | None = None,
    sign_rng: AnyPhilox | None = None,
    scale_layout: str = LINEAR,
    backend: str | None = None,
) -> tuple[QuantTensor | None, QuantTensor | None]:
    """Quantize `x` and `x.T` in one pass over `x`: the operands of two GEMMs.

    Equal 16x16 specs share their codes: col is row.transpose(). Otherwise row draws at rng's offset and col at the
    next one. For a given amax call `quantize` on `x` and on its transpose.

    Args:
        x: bfloat16, float16 or float32 [..., K]; for col the leading dimensions are flattened to M.
        row_spec, col_spec: NVFP4, MXFP8, or None to leave that orientation out.
        rng, sign_rng, scale_layout, backend: as for `quantize`.

    Returns:
        (row, col): QuantTensors of x's shape and of [K, M], or None.

    Raises:
        TypeError, ValueError: as for `quantize`.
    """
    rows = _check_input(x)
    check_scale_layout(scale_layout)
    sides = sides_of(x, (row_spec, col_spec), rng, sign_rng, scale_layout)
    row, col = with_amaxes_apart(*ops.quantize_row_col(x.detach().reshape(rows, x.shape[-1]), *sides, backend=backend))
    return (
        None if row is None or row_spec is None else _wrap(row, row_spec, tuple(x.shape), x.dtype, scale_layout),
        None if col is None or col_spec is None else _wrap(col, col_spec, (x.shape[-1], rows), x.dtype, scale_layout),
    )


def with_amaxes_apart(row: Blocks | None, col: Blocks | None) -> tuple[Blocks | None, Blocks | None]:
    """Return both orientations with an amax of their own: one can be written to without the other."""
    if row is None or col is None or col.amax is None or col.amax is not row.amax:
        return row, col
    return row, col._replace(amax=col.amax.clone())


def _wrap(blocks: Blocks, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, scale_layout: str) -> QuantTensor:
    # The key stands for the spec because a traced constructor takes strings, not dataclasses.
    return QuantTensor(blocks, spec.key, shape=shape, dtype=dtype, scale_layout=scale_layout)


def _check_input(x: Tensor) -> int:
    """Return the rows of x as a matrix, or raise."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x={type(x).__name__}: give a torch.Tensor")
    if isinstance(x, QuantTensor):
        raise TypeError(f"x={x!r} is quantized already; quantize x.dequantize() if you mean to round twice")
    if x.dtype not in VALUE_DTYPES:
        raise TypeError(f"x.dtype={x.dtype}: only bfloat16, float16 and float32 are quantized; use x.float()")
    return matrix_shape(x.shape)[0]


def _check_amax(amax: Tensor | None, spec: Spec, x: Tensor, rows: int) -> None:
    if amax is None:
        return
    if not spec.format.has_amax:
        raise ValueError(f"amax is given, but {describe(spec)} has block scales only; leave amax out")
    if not isinstance(amax, Tensor) or amax.dtype != torch.float32:
        kind = amax.dtype if isinstance(amax, Tensor) else type(amax).__name__
        raise TypeError(f"amax is {kind}: give a float32 tensor, such as torch.tensor(value, device=x.device)")
    expected = amax_shape(rows, spec)
    if tuple(amax.shape) != expected:
        raise ValueError(f"amax.shape={tuple(amax.shape)}: outer={spec.outer!r} needs {expected}; use amax.reshape")
    if amax.device != x.device:
        raise ValueError(f"amax.device={amax.device}: x is on {x.device}; use amax.to(x.device)")


def sides_of(
    x: Tensor,
    specs: tuple[Spec | None, Spec | None],
    rng: AnyPhilox | None,
    sign_rng: AnyPhilox | None,
    scale_layout: str,
) -> Sides:
    """Return what a user asks for of x and x.T, its arguments checked."""
    given = [(name, spec) for name, spec in zip(("row_spec", "col_spec"), specs, strict=True) if spec is not None]
    for name, spec in given:
        check_spec(name, spec)
    draw = _draw("rng", rng, x, next((spec for _, spec in given if spec.needs_rng), None))
    sign_draw = _draw("sign_rng", sign_rng, x, next((spec for _, spec in given if spec.needs_sign_rng), None))
    return both_sides(*specs, draw=draw, sign_draw=sign_draw, scale_layout=scale_layout)


def _draw(name: str, rng: AnyPhilox | None, x: Tensor, needed_by: Spec | None) -> Draw | None:
    """Return the draw on x's device if the spec `needed_by` uses one."""
    if rng is not None and not isinstance(rng, AnyPhilox):
        raise TypeError(f"{name}={rng!r}: give halfbyte.Philox(seed, offset)")
    if needed_by is None:
        return None
    if rng is None:
        raise ValueError(
            f"{name}=None: {describe(needed_by)} draws random bits; give {name}=halfbyte.Philox(seed, offset)"
        )
    return rng.signs_on(x.device) if name == "sign_rng" else rng.on(x.device)
