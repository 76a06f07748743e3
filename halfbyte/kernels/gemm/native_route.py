"""Which products go to torch: those of FP4 and FP8 tensor cores, and plain ones of groups; else why not.

`WAYS` is the table of one product, `GROUPED_WAYS` that of groups. What torch does not take is decoded (`route`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from halfbyte.formats import E5M2
from halfbyte.kernels.route import Candidate, Choice, Reason, choose_from, fits_all
from halfbyte.kernels.target import Target, target_of
from halfbyte.layout import Operand
from halfbyte.spec import Spec

NATIVE, DECODED = "scaled_mm", "a product of decoded operands"
GROUPED_NATIVE, GROUPED_TORCH, GROUPED_DECODED = "scaled_grouped_mm", "_grouped_mm", "products of decoded operands"
NATIVE_ALIGNMENT = 16  # bytes along the contraction, and rows of each operand
FAMILY = (100, 103)  # capabilities: what scaled_grouped_mm was written for
FIRST_TORCH = {True: (2, 13), False: (2, 11)}  # with an amax (NVFP4), without (MXFP8)
MIN_TORCH_CAPABILITY = 90  # below, torch's grouped GEMM reads the offsets on the host


def unsupported(a: Spec | None, b: Spec | None, target: Target) -> str | None:
    """Say why a GEMM of operands quantized with `a` and `b` does not run natively on a GPU, or None if it does."""
    if not target.fp4_products:
        return f"{target.name} has no FP4 tensor cores; they came with sm_100"
    if a is None or b is None:
        return "one operand is not quantized"
    if a.format.scale != b.format.scale:
        return "the tensor cores do not mix NVFP4 with MXFP8"
    if a.format.element.name == b.format.element.name == "e5m2":
        return "the tensor cores do not multiply e5m2 by e5m2"
    return None


ORDER = Reason("its order of summation may depend on how many rows there are, and batch_invariant=True is asked for")


class Way(NamedTuple):
    """Multiply operands of these specs; None is plain."""

    a: Spec | None
    b: Spec | None
    device: torch.device
    batch_invariant: bool = False


def _native_problem(way: Way) -> Reason | None:
    if way.batch_invariant and target_of(way.device).fp4_products:
        return ORDER
    reason = unsupported(way.a, way.b, target_of(way.device))
    return None if reason is None else Reason("{}", (reason,))


WAYS = (
    Candidate(NATIVE, _native_problem, lambda _: Choice(NATIVE), "FP4 and FP8 tensor cores multiply the stored bytes"),
    Candidate(DECODED, fits_all, lambda _: Choice(DECODED), "element * block_scale is exact in bf16"),
)


def choose_way(a: Spec | None, b: Spec | None, device: torch.device, batch_invariant: bool = False) -> Choice:
    """Choose between tensor cores that read codes and the product of decoded operands."""
    return choose_from(WAYS, Way(a, b, device, batch_invariant))


def grouped_unsupported(
    a: Operand | Tensor, b: Operand | Tensor, out_dtype: torch.dtype, accumulate: bool, target: Target
) -> str | None:
    """Say why a grouped GEMM does not run natively on a GPU, or None if it does."""
    if not isinstance(a, Operand) or not isinstance(b, Operand):
        return unsupported(None, None, target)
    reason = unsupported(a.spec, b.spec, target)
    if reason is not None:
        return reason
    if target.capability not in FAMILY:
        return f"torch's grouped GEMM has no kernel for {target.name}"
    if TorchVersion(torch.__version__) < FIRST_TORCH[a.spec.format.has_amax]:
        return f"torch {torch.__version__} has no grouped GEMM of this format"
    if out_dtype != torch.bfloat16 or accumulate:
        return "torch's grouped GEMM rounds to bf16 and accumulates nothing"
    for side in (a, b):
        if side.blocks.qdata.is_floating_point():
            return "an operand holds no codes"
        if side.spec.has_row_amax:
            return "torch's grouped GEMM has one factor per group"
        if side.spec.format.element is E5M2:
            return "torch's grouped GEMM of MXFP8 takes e4m3"
    rows = b.blocks.qdata.shape[-2]
    width = a.blocks.qdata.shape[-1] % NATIVE_ALIGNMENT
    if width or rows % NATIVE_ALIGNMENT:
        unit = NATIVE_ALIGNMENT
        return f"torch's grouped GEMM takes rows of whole {unit} bytes, and multiples of {unit} rows"
    if not a.blocks.qdata.shape[-1]:
        return "there is nothing to sum"
    return None


class GroupedWay(NamedTuple):
    """Multiply groups of operands."""

    a: Operand | Tensor
    b: Operand | Tensor
    offsets: Tensor
    out_dtype: torch.dtype
    batch_invariant: bool = False


def _grouped_native_problem(way: GroupedWay) -> Reason | None:
    if way.batch_invariant and target_of(way.offsets.device).fp4_products:
        return ORDER
    reason = grouped_unsupported(way.a, way.b, way.out_dtype, False, target_of(way.offsets.device))
    return None if reason is None else Reason("{}", (reason,))


def _torch_problem(way: GroupedWay) -> Reason | None:
    """Say where torch's grouped GEMM computes something else, or reads something on the host."""
    a, b = way.a, way.b
    target = target_of(way.offsets.device)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return Reason("an operand is quantized")
    if target.capability < MIN_TORCH_CAPABILITY:
        return Reason("on {} it reads the offsets on the host", (target.name,))
    if way.out_dtype != torch.bfloat16 or any(t.dtype != torch.bfloat16 or t.numel() == 0 for t in (a, b)):
        return Reason("it multiplies bf16 with values to bf16")
    if b.shape[-2] % 8:
        return Reason("{} rows of b are no multiple of 8", (b.shape[-2],))
    if b.dim() == 2 and 1 in (a.stride(1), b.stride(1)):
        return Reason("groups would have to start at multiples of 16 bytes")
    return None if _torch_describes(a) and _torch_describes(b) else Reason("strides are no multiples of 16 bytes")


def _torch_describes(t: Tensor) -> bool:
    """Whether one of the last two dimensions is contiguous and every other stride is a multiple of 16 bytes."""
    rows, cols = t.stride()[-2:]
    other = rows if cols == 1 else cols
    outer = t.stride(0) if t.dim() == 3 else 0
    return 1 in (rows, cols) and other * 2 % 16 == outer * 2 % 16 == t.data_ptr() % 16 == 0


GROUPED_WAYS = (
    Candidate(GROUPED_NATIVE, _grouped_native_problem, lambda _: Choice(GROUPED_NATIVE), "tensor cores read codes"),
    Candidate(GROUPED_TORCH, _torch_problem, lambda _: Choice(GROUPED_TORCH), "plain bf16 is rounded once there too"),
    Candidate(GROUPED_DECODED, fits_all, lambda _: Choice(GROUPED_DECODED), "element * block_scale is exact in bf16"),
)


def choose_grouped_way(
    a: Operand | Tensor, b: Operand | Tensor, offsets: Tensor, out_dtype: torch.dtype, batch_invariant: bool = False
) -> Choice:
    """Choose between torch's grouped GEMMs and that of decoded operands."""
    return choose_from(GROUPED_WAYS, GroupedWay(a, b, offsets, out_dtype, batch_invariant))
