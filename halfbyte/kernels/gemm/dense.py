"""gemm_nt on decoded operands: the launches of what `gemm.route` plans (docs/internals/gemm.md).

The operands hold element * block_scale exactly, so a bf16 GEMM with fp32 accumulation equals the block-scaled product
up to summation order. Nothing here looks at the operands' bytes: `unpack.dequantize.decode` makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.gemm.route import (
    MAX_CHAIN,
    TMA_ALIGNMENT,
    Ends,
    GemmPlan,
    Variant,
    all_describable,
    epilogue_parts,
    gemm_plan,
    is_turned,
    mapped,
)
from halfbyte.kernels.gemm.row import row_product
from halfbyte.kernels.gemm.row_route import RowTile
from halfbyte.kernels.gemm.tile import (
    Applied,
    Ending,
    FactorKinds,
    Products,
    ProductStrides,
    Rows,
    Turned,
    combine_kernel,
    divisors,
    gemm_pointer_kernel,
    gemm_tma_kernel,
)
from halfbyte.kernels.target import target_of
from halfbyte.kernels.unpack.dequantize import Decoded
from halfbyte.layout import ceil_div, round_up
from halfbyte.sides import Epilogue

COMBINE_TILE = (16, 128)


def gemm_nt(a: Decoded, b: Decoded, epilogue: Epilogue = Epilogue(), *, variant: Variant = "auto") -> Tensor:
    """Return a @ b.T [M, N], `epilogue.out` itself if given: factors, bias and addend in fp32 before the only rounding.

    Args:
        a: values [M, K], see Decoded; a plain operand is `Decoded(x)`. Of strides without a contiguous dimension, or
            columns that are contiguous where tensor maps do not serve, a copy is multiplied.
        b: values [N, K]. Columns beyond the narrower operand are padding and take no part.
        epilogue: bias, addend and output.
        variant: "tma" and "pointer" force a kernel, "auto" chooses from the device and the strides.

    Raises:
        ValueError: variant "tma" on strides that a tensor map cannot describe.
    """
    y = output(a.values, b.values, epilogue)
    a, b = (side if is_turned(side.values) else side._replace(values=row_major(side.values)) for side in (a, b))
    if y.numel() == 0:
        return y
    K = min(a.values.shape[1], b.values.shape[1])
    target, addend = ends(y, epilogue)
    if K == 0:
        return without_products(y, epilogue._replace(addend=addend))
    plan = gemm_plan(a.values, b.values, (target, addend), K, variant, epilogue.batch_invariant)
    epilogue = epilogue._replace(out=target, addend=addend)
    if plan is None:
        products = torch.mm(a.values[:, :K], b.values[:, :K].T, out_dtype=torch.float32)
        combine(products, 1, a, b, epilogue)
    elif isinstance(plan, RowTile):
        row_product(plan, row_major(a.values)[:, :K], b.values[:, :K], (target, addend), _ending(a, b, epilogue))
    else:
        if not plan.tma:
            a, b = (side._replace(values=row_major(side.values)) for side in (a, b))
        _run(plan, a, b, epilogue, K)
    return y if target is y else y.copy_(target)


def output(a: Tensor, b: Tensor, epilogue: Epilogue) -> Tensor:
    """Return what a product of a's and b's rows is written to: what was given, or new memory."""
    shape, dtype, out = (a.shape[0], b.shape[0]), epilogue.out_dtype, epilogue.out
    assert out is None or out.shape == shape, "out has another shape"
    return torch.empty(shape, dtype=dtype, device=a.device) if out is None else out


def ends(y: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """Return (target, addend) with contiguous rows for a result y, whose copies they may be; one tensor if they are."""
    target, addend = row_major(y), epilogue.addend
    return target, target if addend is y else None if addend is None else row_major(addend)


def _run(plan: GemmPlan, a: Decoded, b: Decoded, epilogue: Epilogue, K: int) -> None:
    out, addend = epilogue.out, epilogue.addend
    assert out is not None, "a product is written somewhere"
    M, N = out.shape
    if plan.splits == 1:
        chains = ceil_div(K, MAX_CHAIN) if out.dtype == torch.float32 else 1
        length = round_up(ceil_div(K, chains), plan.tile.bk)
        for start in range(0, K, length):
            columns = slice(start, min(start + length, K))
            ending = _ending(a, b, epilogue if start == 0 else Epilogue())
            sides = a.values[:, columns], b.values[:, columns]
            _multiply(plan, *sides, (out, out if start > 0 else addend), ending)
        return
    width = round_up(N, TMA_ALIGNMENT // 4)
    rows = plan.splits * round_up(M, plan.tile.bm)
    parts = torch.empty(rows, width, dtype=torch.float32, device=out.device)[:, :N]
    raw = _ending(Decoded(a.values), Decoded(b.values), Epilogue())
    _multiply(plan, a.values[:, :K], b.values[:, :K], (parts, None), raw)
    combine(parts, plan.splits, a, b, epilogue)


def combine(parts: Tensor, splits: int, a: Decoded, b: Decoded, epilogue: Epilogue) -> None:
    """Sum partial products and finish them as a GEMM would: factors, bias, outer product, addend, one rounding.

    Args:
        parts: fp32 [splits * rows, N], rows >= M: one product after another.
        a, b: whose amax and divisor give the factors; of their values only the number of rows counts.
        epilogue: its out and addend [M, N] with contiguous rows; the addend may be `out`.
    """
    out, addend = epilogue.out, epilogue.addend
    assert out is not None, "a product is written somewhere"
    (M, N), (bm, bn) = out.shape, COMBINE_TILE
    ending = _ending(a, b, epilogue)
    combine_kernel[(ceil_div(M, bm) * ceil_div(N, bn),)](
        parts,
        out,
        addend,
        parts.stride(0),
        out.stride(0),
        0 if addend is None else addend.stride(0),
        parts.shape[0] // splits,
        ending.applied,
        Products(M, N),
        ending.by,
        FACTORS=ending.kinds,
        SPLITS=splits,
        BM=bm,
        BN=bn,
        **overlap.launch_options(out.device),
    )


def _multiply(plan: GemmPlan, a: Tensor, b: Tensor, ends: Ends, ending: Ending) -> None:
    """Launch one kernel on a [M, K] and b [N, K]; ends [M, N], or out the partial sums if the plan splits."""
    (M, K), N, (out, addend) = a.shape, b.shape[0], ends
    tile, target = plan.tile, target_of(out.device)
    options = {"FACTORS": ending.kinds, **plan.constants, **overlap.launch_options(out.device)}
    programs, shape = plan.programs(M, N, target), Products(M, N, K)
    added = None if addend is None else Rows(addend, addend.stride(0))
    if not plan.tma:
        strides = ProductStrides(a.stride(0), b.stride(0), out.stride(0))
        gemm_pointer_kernel[(programs,)](a, b, out, strides, added, ending.applied, shape, ending.by, **options)
        return
    tma = all_describable(ends)
    parts = max(epilogue_parts(tile, end.dtype) for end in ends if end is not None)
    part = [tile.bm, tile.bn // parts]
    out_desc, addend_desc = (
        TensorDescriptor.from_tensor(end, part) if tma and end is not None else None for end in ends
    )
    gemm_tma_kernel[(programs,)](
        _operand_map(a, tile.bm, tile.bk),
        _operand_map(b, tile.bn, tile.bk),
        out_desc,
        Rows(out, out.stride(0)),
        addend_desc,
        added,
        ending.applied,
        shape,
        ending.by,
        TURNED=Turned(is_turned(a), is_turned(b)),
        PARTS=parts,
        PROGRAMS=programs,
        **options,
    )


def _operand_map(x: Tensor, rows: int, step: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(mapped(x), [step, rows] if is_turned(x) else [rows, step])


def _ending(a: Decoded, b: Decoded, epilogue: Epilogue) -> Ending:
    kinds = FactorKinds(_factor_kind(a), _factor_kind(b))
    outer = () if epilogue.outer is None else (vector.contiguous() for vector in epilogue.outer)
    return Ending(Applied(a.amax, b.amax, epilogue.bias, *outer), divisors(a.divisor, b.divisor), kinds)


def _factor_kind(side: Decoded) -> int:
    if side.amax is None:
        return dc.NO_FACTOR.value
    rows = side.values.shape[0]
    assert side.amax.dim() == 0 or side.amax.shape in ((rows,), (1,)), "amax is neither one number nor one per row"
    return dc.ROW_FACTOR.value if side.amax.dim() and side.amax.numel() == rows else dc.TENSOR_FACTOR.value


def without_products(y: Tensor, epilogue: Epilogue) -> Tensor:
    """K = 0: the product is zero."""
    total = torch.zeros(y.shape, device=y.device, dtype=torch.float32)
    if epilogue.bias is not None:
        total += epilogue.bias.float()
    if epilogue.outer is not None:
        left, right = epilogue.outer
        total += left.float()[:, None] * right.float()
    return y.copy_(total if epilogue.addend is None else total + epilogue.addend.float())


def row_major(x: Tensor) -> Tensor:
    """Return x with contiguous rows: itself, or a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 0 else x.contiguous()
