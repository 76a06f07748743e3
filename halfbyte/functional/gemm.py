"""gemm_nt on QuantTensors and plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.functional.checks import refuse_overlap
from halfbyte.spec import GemmSpec
from halfbyte.tensor import QuantTensor
from halfbyte.tensor.quant_tensor import blocks_of, check_value_dtype


def gemm_nt(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return a @ b.T: block-scaled products summed in fp32, factors and bias in fp32, one rounding at the end.

    No gradient flows through it, plain operands' neither: `hb.linear` and the layers have one.

    Args:
        a: QuantTensor or plain [M, K]; blocks run along K.
        b: QuantTensor or plain [N, K].
        out_dtype: bf16 (default), fp16 or fp32; `out` decides if given.
        bias: [N] or None.
        out: [M, N] to write into.
        accumulate: add to what `out` holds.
        backend: "reference", "triton", "native", "portable" on an AMD GPU, or None to choose.

    Returns:
        [M, N].

    Raises:
        TypeError: an operand or the output has another dtype than bf16, fp16 or fp32.
        ValueError: shapes, rotations or block lengths of the operands do not meet.
    """
    for name, operand in (("a", a), ("b", b)):
        check_operand(name, operand)
        if operand.dim() != 2:
            raise ValueError(f"{name}.shape={tuple(operand.shape)}: give a matrix; flatten the leading dimensions")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}: the last dimensions must be equal")
    check_output((a.shape[0], b.shape[0]), out_dtype, out, accumulate)
    _check_with(a, b, bias, out)
    # Refuses NVFP4 against MXFP8 and unequal rotations, naming the remedy.
    GemmSpec(a=getattr(a, "spec", None), b=getattr(b, "spec", None))
    options = {"out_dtype": out_dtype or torch.bfloat16, "bias": bias, "out": out, "accumulate": accumulate}
    with torch.no_grad():
        return ops.gemm_nt(_operand(a), _operand(b), **options, backend=backend)


def check_operand(name: str, operand: object) -> None:
    """Raise TypeError unless `operand` is a tensor that a GEMM reads, quantized or not."""
    if not isinstance(operand, Tensor):
        raise TypeError(f"{name}={type(operand).__name__}: give a QuantTensor or a plain tensor")
    check_value_dtype(f"{name}.dtype", operand.dtype, f"cast {name} first")


def check_output(shape: tuple[int, ...], out_dtype: torch.dtype | None, out: object, accumulate: bool) -> None:
    """Raise unless a product of this shape can be returned in `out_dtype`, or written into `out`."""
    if accumulate and out is None:
        raise ValueError("accumulate=True: there is nothing to add to; pass out")
    if out is None:
        if out_dtype is not None:
            check_value_dtype("out_dtype", out_dtype, "name one of these and convert the result")
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"out={out!r}: give a tensor to write into")
    check_value_dtype("out.dtype", out.dtype, "give an output of one of these")
    if tuple(out.shape) != shape:
        raise ValueError(f"out.shape={tuple(out.shape)}: the product has shape {shape}")
    refuse_overlap("out", out)


def _check_with(a: Tensor, b: Tensor, bias: object, out: Tensor | None) -> None:
    """Raise unless what is added or written fits the product of a and b, and all are on one device."""
    if bias is not None and (not isinstance(bias, Tensor) or not bias.is_floating_point()):
        raise TypeError(f"bias={getattr(bias, 'dtype', bias)}: give a tensor of a float dtype, such as torch.float32")
    for name, other in (("b", b), ("bias", bias), ("out", out)):
        if isinstance(other, Tensor) and other.device != a.device:
            raise ValueError(f"{name}.device={other.device}, a.device={a.device}: move one of them")
    if isinstance(bias, Tensor) and tuple(bias.shape) != (b.shape[0],):
        raise ValueError(f"bias.shape={tuple(bias.shape)}: give one value per row of b, shape ({b.shape[0]},)")


def _operand(x: Tensor) -> Tensor | ops.Operand:
    return ops.Operand(blocks_of(x), x.spec, x.shape[-1], x.scale_layout) if isinstance(x, QuantTensor) else x
