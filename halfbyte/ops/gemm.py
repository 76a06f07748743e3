"""GEMMs of plain tensors and quantized operands: on the tensor cores' own formats, or on decoded values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.layout import LINEAR, Blocks, Operand
from halfbyte.ops.backends import NATIVE, check_readers, choose, warn_once
from halfbyte.ops.define import OPERANDS, implementation, nothing, op, uncast
from halfbyte.ops.repeat import call_op
from halfbyte.sides import Epilogue
from halfbyte.spec import Spec, parse

Rows = Operand | Tensor
"""What a GEMM multiplies by rows: quantized, or a plain float matrix."""


def gemm_nt(
    a: Rows,
    b: Rows,
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
    operands = pair_arguments(a, b)
    if out is None:
        return call_op(torch.ops.halfbyte.gemm_nt, *operands, out_dtype, bias, backend or "")
    call_op(torch.ops.halfbyte.gemm_nt_out, *operands, bias, out, accumulate, backend or "")
    return out


def gemm_nt_batch_invariant(
    a: Rows, b: Rows, *, out_dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """Return a @ b.T of quantized operands, every row summed in an order that depends on b alone, see `GemmSpec`.

    Args:
        a, b: quantized, [M, K] and [N, K].
        out_dtype: of the result.
        bias: [N] or None, added in fp32.
    """
    return call_op(torch.ops.halfbyte.gemm_nt_batch_invariant, *pair_arguments(a, b), out_dtype, bias, backend or "")


def gemm_nt_add(
    a: Rows, b: Rows, addend: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> Tensor:
    """Return a @ b.T + addend [M, N], added in fp32 and rounded once to `out_dtype`; a and b as for `gemm_nt`."""
    return call_op(torch.ops.halfbyte.gemm_nt_add, *pair_arguments(a, b), addend, out_dtype, backend or "")


def gemm_nt_outer(
    a: Rows,
    b: Rows,
    outer: tuple[Tensor, Tensor],
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return a @ b.T + left[:, None] * right [M, N], all in fp32 before the only rounding.

    Args:
        a, b: as for `gemm_nt`.
        outer: left [M] and right [N], of any float dtype.
        out_dtype: of the result if `out` is None.
        out: [M, N] to add it to.
    """
    operands = pair_arguments(a, b)
    if out is None:
        return call_op(torch.ops.halfbyte.gemm_nt_outer, *operands, *outer, out_dtype, backend or "")
    call_op(torch.ops.halfbyte.gemm_nt_outer_add, *operands, *outer, out, backend or "")
    return out


def operand_arguments(operand: Rows) -> tuple:
    """Return an operand as the ops take it: data, block_scale, amax, key, scale layout."""
    if isinstance(operand, Operand):
        blocks = operand.blocks
        return blocks.qdata, blocks.block_scale, blocks.amax, operand.spec.key, operand.scale_layout
    return operand, None, None, "", LINEAR


def pair_arguments(a: Rows, b: Rows) -> tuple:
    """Return both operands of a product as the ops take them, and K, along which they are multiplied."""
    return *operand_arguments(a), *operand_arguments(b), a.cols if isinstance(a, Operand) else a.shape[1]


def operand(data: Tensor, scale: Tensor | None, amax: Tensor | None, key: str, scale_layout: str, cols: int):
    """Return an operand from what `operand_arguments` says of it: an Operand, or the plain tensor."""
    if not key:
        return data
    scale, amax = (data.new_empty(0, dtype=torch.uint8) if t is None else t for t in (scale, amax))
    return Operand(Blocks(data, scale, amax), parse(key), cols, scale_layout)


def _gemm(a: Rows, b: Rows, K: int, backend: str, epilogue: Epilogue) -> Tensor:
    """Run gemm_nt on the backend of the operands; a GEMM that does not run natively is emulated, and says so once."""
    device = _data(a).device
    check_operands((a, b), device, backend)
    with uncast(device):
        if choose(device, backend or None) == NATIVE and _runs_natively(a, b, epilogue.batch_invariant):
            from halfbyte.kernels.gemm import native

            assert isinstance(a, Operand) and isinstance(b, Operand), "tensor cores multiply codes"
            return native.native_gemm_nt(a, b, epilogue)
        module = implementation(device, backend)
        decoded = (_decode(module, side, K, isinstance(other, Operand)) for side, other in ((a, b), (b, a)))
        return module.gemm_nt(*decoded, epilogue)


def check_operands(operands: tuple[Rows, Rows], device: torch.device, backend: str) -> None:
    """Raise ValueError if what runs on `device` cannot read the codes of an operand."""
    for side in operands:
        check_readers(_spec(side), device, backend or None)


def _data(operand: Rows) -> Tensor:
    return operand.blocks.qdata if isinstance(operand, Operand) else operand


def _spec(operand: Rows) -> Spec | None:
    """Return the spec of an operand that holds codes."""
    if isinstance(operand, Tensor) or operand.blocks.qdata.is_floating_point():
        return None
    return operand.spec


def _runs_natively(a: Rows, b: Rows, batch_invariant: bool) -> bool:
    from halfbyte.kernels.gemm import native_route

    way = native_route.choose_way(_spec(a), _spec(b), _data(a).device, batch_invariant)
    for _, reason in way.instead:
        warn_once(f"a GEMM is emulated in bf16: {reason}")
    return way.kernel == native_route.NATIVE


def _decode(module: Any, side: Rows, K: int, padded: bool) -> Any:
    """Return one operand as the backend's GEMM reads it; padding takes part only if both operands have it."""
    if isinstance(side, Tensor):
        return module.plain(side)
    if side.blocks.qdata.is_floating_point():
        decoded = module.from_values(side.blocks.qdata, side.blocks.amax, side.spec)
    else:
        decoded = module.decode(side)
    return decoded if padded else decoded._replace(values=decoded.values[:, :K])


def _gemm_nt(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, out_dtype, bias, backend
) -> Tensor:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    return _gemm(left, right, K, backend, Epilogue(out_dtype, bias))


def _gemm_nt_batch_invariant(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, out_dtype, bias, backend
) -> Tensor:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    return _gemm(left, right, K, backend, Epilogue(out_dtype, bias, batch_invariant=True))


def _gemm_nt_out(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, bias, out, accumulate, backend
) -> None:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    _gemm(left, right, K, backend, Epilogue(bias=bias, addend=out if accumulate else None, out=out))


def _gemm_nt_add(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, addend, out_dtype, backend
) -> Tensor:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    return _gemm(left, right, K, backend, Epilogue(out_dtype, addend=addend))


def _gemm_nt_outer(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, left, right, out_dtype, backend
) -> Tensor:
    mine, other = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    return _gemm(mine, other, K, backend, Epilogue(out_dtype, outer=(left, right)))


def _gemm_nt_outer_add(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, left, right, out, backend
) -> None:
    mine, other = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    _gemm(mine, other, K, backend, Epilogue(addend=out, out=out, outer=(left, right)))


def _gemm_nt_fake(a, *rest):
    b, out_dtype = rest[4], rest[10]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _gemm_nt_add_fake(a, *rest):
    b, out_dtype = rest[4], rest[11]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _gemm_nt_outer_fake(a, *rest):
    b, out_dtype = rest[4], rest[12]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _flops(a_shape, a_scale, a_amax, a_key, a_layout, b_shape, *rest, out_shape=None, **named) -> int:
    K = rest[4]
    return 2 * a_shape[0] * b_shape[0] * K


op(f"gemm_nt({OPERANDS}, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor", _gemm_nt, _gemm_nt_fake, _flops)
op(
    f"gemm_nt_batch_invariant({OPERANDS}, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor",
    _gemm_nt_batch_invariant,
    _gemm_nt_fake,
    _flops,
)
op(
    f"gemm_nt_out({OPERANDS}, Tensor? bias, Tensor(z!) out, bool accumulate, str backend) -> ()",
    _gemm_nt_out,
    nothing,
    _flops,
)
op(
    f"gemm_nt_add({OPERANDS}, Tensor addend, ScalarType out_dtype, str backend) -> Tensor",
    _gemm_nt_add,
    _gemm_nt_add_fake,
    _flops,
)
op(
    f"gemm_nt_outer({OPERANDS}, Tensor left, Tensor right, ScalarType out_dtype, str backend) -> Tensor",
    _gemm_nt_outer,
    _gemm_nt_outer_fake,
    _flops,
)
op(
    f"gemm_nt_outer_add({OPERANDS}, Tensor left, Tensor right, Tensor(z!) out, str backend) -> ()",
    _gemm_nt_outer_add,
    nothing,
    _flops,
)
