"""The largest finite magnitude: of an operand, of its rows, after its rotation, or of two operands in one pass.

NaN and Inf are left out (docs/numerics.md section 3). They are the largest magnitudes, so a program first takes plain
maxima, and only one whose maximum is not finite reads its part again and leaves them out. Programs that share a result
meet in a workspace of zeros that the last one restores (`running_max`): there is no launch but the kernel's.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.amax import route
from halfbyte.kernels.amax.rotated import launch_rotated
from halfbyte.kernels.amax.rotated_rows import launch_rotated_rows
from halfbyte.kernels.device import magnitudes as mg
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.launch import jit
from halfbyte.kernels.route import Choice
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec

# What becomes of a row's maximum: it joins the tensor's, it is stored, or it joins those of other parts of the row.
OF_ROW, OF_ROW_PARTS = route.OF_ROW, route.OF_ROW_PARTS


@jit(do_not_specialize=("parts", "programs"))
def amax_rows_kernel(
    x_ptr, out_ptr, space_ptr, rows, cols, stride_r, stride_c, parts, programs,
    RESULT: tl.constexpr, PACKED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax of x, out fp32 []; or of its rows, out fp32 [rows].

    A program takes R rows, and of each C columns of every parts * C; one row where rows have parts, which meet in two
    numbers of the workspace. PACKED: x is read in words of two bf16.
    """
    overlap.begin(OVERLAP)
    tile = tl.program_id(0) // parts
    first = (tl.program_id(0) - tile * parts).to(tl.int64) * C
    step = tl.cast(parts, tl.int64) * C
    end = tl.cast(cols, tl.int64)
    row = tile.to(tl.int64) * R + tl.arange(0, R)
    in_row = row < rows
    row_ptr = x_ptr + row * stride_r
    if PACKED:
        m = tl.zeros((R, C // 2), tl.uint32)
        word_ptr = x_ptr.to(tl.pointer_type(tl.uint32)) + row * (stride_r // 2)
        for c in range(first, end, step):
            word = c // 2 + tl.arange(0, C // 2)
            inside = in_row[:, None] & (word * 2 < end)[None, :]
            m = mg.raised(m, tl.load(word_ptr[:, None] + word[None, :], mask=inside, other=0))
        bits = tl.max(mg.larger_bits(m), axis=1)
    else:
        m = tl.zeros((R, C), tl.int32)
        for c in range(first, end, step):
            col = c + tl.arange(0, C)
            inside = in_row[:, None] & (col < end)[None, :]
            m = tl.maximum(
                m, mg.magnitude_bits(tl.load(row_ptr[:, None] + col[None, :] * stride_c, mask=inside, other=0))
            )
        bits = tl.max(m, axis=1)
    if tl.max(bits, axis=0) >= mg.INF_BITS:
        bits = tl.zeros((R,), tl.int32)
        for c in range(first, end, step):
            col = c + tl.arange(0, C)
            inside = in_row[:, None] & (col < end)[None, :]
            x = tl.load(row_ptr[:, None] + col[None, :] * stride_c, mask=inside, other=0)
            bits = tl.maximum(bits, tl.max(mg.finite_bits(mg.magnitude_bits(x)), axis=1))
    if RESULT == OF_ROW:
        tl.store(out_ptr + row, bits.to(tl.float32, bitcast=True), mask=in_row)
    elif RESULT == OF_ROW_PARTS:
        rm.publish((tl.max(bits, axis=0),), (out_ptr + tile,), space_ptr + tile * rm.ROW_SLOTS, parts)
    else:
        rm.publish((tl.max(bits, axis=0),), (out_ptr,), space_ptr, programs)


def finite_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Return max |x| over the finite elements, fp32: [] or, with dim=-1, one per row; 0 for nothing.

    Args:
        x: bf16, fp16 or fp32, at most 2-D if dim is given.
        dim: None or -1.
    """
    x = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
    return operand_amax(x, NVFP4(outer="tensor" if dim is None else "row"), None)


def operand_amax(x: Tensor, spec: Spec, sign_draw: Draw | None) -> Tensor:
    """Return the amax that quantize(x, spec) uses: fp32 [] or [rows], after the spec's rotation.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], any strides.
        spec: its `outer` and `rotation` count.
        sign_draw: the place of fresh signs.
    """
    per_row = spec.has_row_amax
    if x.numel() == 0:
        return torch.zeros((x.shape[0],) if per_row else (), dtype=torch.float32, device=x.device)
    choice = route.choose_amax(route.AmaxOfOne(x, spec))
    if choice.kernel == "amax_rotated_rows_kernel":
        return launch_rotated_rows(choice, sign_draw)
    if choice.kernel == "amax_rotated_kernel":
        return launch_rotated(choice, sign_draw)[0]
    return _launch_rows(choice, per_row)


def row_col_amax(
    x: Tensor, row_spec: Spec | None, col_spec: Spec | None, sign_draw: Draw | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return operand_amax of (x, row_spec) and (x.T, col_spec) from one read of x where one read gives both.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        row_spec, col_spec: None and MXFP8 need no amax: None is returned.
        sign_draw: the place of fresh signs.
    """
    row, col = (spec if spec is not None and spec.format.has_amax else None for spec in (row_spec, col_spec))
    choice = route.choose_amaxes(route.AmaxesOfPair(x, row, col))
    if row is not None and choice.kernel == route.SAME:
        both = operand_amax(x, row, None)
        return both, both
    if choice.kernel == "amax_rotated_kernel":
        col_amax, row_amax = launch_rotated(choice, sign_draw)
        return row_amax, col_amax
    return (
        operand_amax(x, row, sign_draw) if row is not None else None,
        operand_amax(x.T, col, sign_draw) if col is not None else None,
    )


def _launch_rows(choice: Choice, per_row: bool) -> Tensor:
    """Return max |x| [], or of its rows."""
    x, parts = choice.facts
    rows, cols = x.shape
    result, space = choice.constants["RESULT"], None
    if result == route.OF_ROW_PARTS:
        space = rm.workspace_of_rows(rows, x.device)
    elif not per_row:
        space = rm.workspace(rm.Wanted("tensor"), x.device)
    out = torch.empty((rows,) if per_row else (), dtype=torch.float32, device=x.device)
    amax_rows_kernel[choice.grid](
        x,
        out,
        space,
        rows,
        cols,
        *x.stride(),
        parts,
        *choice.grid,
        **choice.constants,
        enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )
    return out
