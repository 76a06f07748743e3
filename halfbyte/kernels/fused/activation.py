"""Activation functions with the amaxes of what they write, forward and backward: the roundings of arithmetic.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte import arithmetic
from halfbyte.kernels.device import casts as pm
from halfbyte.kernels.device import decode as dc
from halfbyte.kernels.device import overlap
from halfbyte.kernels.device import rows as pr
from halfbyte.kernels.device import running_max as rm
from halfbyte.kernels.device.loads import masked_store
from halfbyte.kernels.device.ptx import has_ptx
from halfbyte.kernels.device.running_max import AmaxPair, Wanted
from halfbyte.kernels.fused.collected import collected, with_column
from halfbyte.kernels.launch import jit
from halfbyte.layout import ceil_div
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits
LOG2_E = tl.constexpr(arithmetic.LOG2_E)
LEAST = tl.constexpr(arithmetic.EXPONENT_RANGE[0])
MOST = tl.constexpr(arithmetic.EXPONENT_RANGE[1])
EXP2_TERMS = tl.constexpr(arithmetic.EXP2_TERMS)
EXP2_COUNT = tl.constexpr(len(arithmetic.EXP2_TERMS))
TAIL_TERMS = tl.constexpr(arithmetic.TAIL_TERMS)
TAIL_COUNT = tl.constexpr(len(arithmetic.TAIL_TERMS))
TAIL_SLOPE = tl.constexpr(arithmetic.TAIL_SLOPE)
DENSITY = tl.constexpr(arithmetic.DENSITY)
LINEAR = tl.constexpr(arithmetic.TANH_TERMS[0])
CUBIC = tl.constexpr(arithmetic.TANH_TERMS[1])
CUBIC_SLOPE = tl.constexpr(3 * arithmetic.TANH_TERMS[1])

FURTHEST = tl.constexpr(arithmetic.FURTHEST)

# An approximation good to the last bit and one step of Newton's method with its error exact round as a division does.
RECIPROCAL = tl.constexpr(
    "{.reg .f32 r, e, n; rcp.approx.ftz.f32 r, $1; neg.f32 n, $1; fma.rn.f32 e, n, r, 0f3F800000; "
    "fma.rn.f32 $0, r, e, r;}"
)

NUM_WARPS = 4
TILE_ELEMENTS, ROTATED_TILE_ELEMENTS = 8192, 4096
TILES = 4  # column tiles of a program


@triton.jit
def horner(TERMS: tl.constexpr, COUNT: tl.constexpr, x):
    total = tl.full(x.shape, TERMS[0], tl.float32)
    for i in tl.static_range(1, COUNT):
        total = total * x + TERMS[i]
    return total


@triton.jit
def exponential(x):
    """Return e^x."""
    t = tl.minimum(tl.maximum(x * LOG2_E, LEAST), MOST)
    u = t + MAGIC
    value = horner(EXP2_TERMS, EXP2_COUNT, t - (u - MAGIC))
    return (value.to(tl.int32, bitcast=True) + (u.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def regular_inverse(d):
    """Return 1 / d rounded to nearest, for 1 <= d <= 2^125: without the branch of a division that takes any number."""
    if not has_ptx():
        return tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)
    return tl.inline_asm_elementwise(RECIPROCAL, "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    return regular_inverse(exponential(-x) + 1.0)


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr):
    """Return f(x) and f'(x); what is not used is not computed."""
    if FUNCTION == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s * (x * (1.0 - s) + 1.0)
    elif FUNCTION == "gelu_tanh":
        square = x * x
        s = sigmoid(x * (square * CUBIC + LINEAR))
        value = x * s
        slope = (value * (1.0 - s)) * (square * CUBIC_SLOPE + LINEAR) + s
    elif FUNCTION == "gelu":
        bell = exponential((x * x) * -0.5)
        t = regular_inverse(tl.minimum(tl.abs(x), FURTHEST) * TAIL_SLOPE + 1.0)
        tail = bell * horner(TAIL_TERMS, TAIL_COUNT, t)
        below = tl.where(x > 0, 1.0 - tail, tail)
        value = x * below
        slope = (x * bell) * DENSITY + below
    else:
        value = tl.where(x <= 0, 0.0, x * x)
        slope = tl.where(x <= 0, 0.0, x + x)
    return value, slope


@triton.jit
def own_part(cols, spans, SPAN, WANTED: tl.constexpr):
    """Return a program's first row and where it begins, int64, its first column and the one behind its last."""
    row0 = tl.program_id(0) // spans * WANTED.group
    first = row0.to(tl.int64) * cols
    col0 = tl.program_id(0) % spans * SPAN
    return row0, first, col0, tl.minimum(col0 + SPAN, cols)


@jit(do_not_specialize=("sign_stream", "spans"))
def activation_kernel(
    x_ptr, up_ptr, out_ptr, amaxes, space_ptr, sign_ptr, sign_stream, rows, cols, spans, SPAN,
    FUNCTION: tl.constexpr, WANTED: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [rows, cols] = f(x) or f(x) * up, `group` rows and SPAN columns a program, and the wanted maxima.

    FULL: whole groups of rows, of a tile of C columns at least; the last tile may do columns again.
    """
    overlap.begin(OVERLAP)
    row0, first, col0, stop = own_part(cols, spans, SPAN, WANTED)
    GROUP: tl.constexpr = WANTED.group
    words = rm.wanted_sign_words(sign_ptr, sign_stream, WANTED)
    plain, rotated = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for c in range(col0, stop, C):
        col = rm.tile_at(c, cols, C, FULL)
        xs = rm.load_group(x_ptr + first, row0, rows, col, stop, cols, GROUP, FULL)
        if up_ptr is not None:
            ups = rm.load_group(up_ptr + first, row0, rows, col, stop, cols, GROUP, FULL)
        ys = ()
        for i in tl.static_range(GROUP):
            inside = (col < stop) & (row0 + i < rows)
            y, _slope = value_and_slope(pm.to_fp32(xs[i]), FUNCTION)
            if up_ptr is not None:
                y = y * pm.to_fp32(ups[i])
            y = dc.cast(y, out_ptr.dtype.element_ty)
            masked_store(out_ptr + first + (i * cols + col), y, inside, FULL)
            plain = rm.raise_plain(plain, pm.to_fp32(y), WANTED)
            ys = ys + (y,)
        rotated = rm.raise_rotated(rotated, ys, words, WANTED)
    rm.store_row_maxima(amaxes.row, out_ptr, row0, rows, cols, WANTED)
    if WANTED.row == "tensor" or WANTED.col != "":
        m_plain, m_rotated = rm.settle(plain, rotated, out_ptr, row0, rows, col0, stop, cols, words, WANTED, C)
        rm.publish_wanted(m_plain, m_rotated, amaxes, space_ptr, tl.num_programs(0), WANTED)


@jit(do_not_specialize=("sign_stream", "spans"))
def activation_backward_kernel(
    dh_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, amaxes, up_amaxes, space_ptr, up_space_ptr, sign_ptr, sign_stream,
    rows, cols, spans, SPAN,
    FUNCTION: tl.constexpr, WANTED: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dx, and dup if there is an `up`, and the wanted maxima of each."""
    overlap.begin(OVERLAP)
    row0, first, col0, stop = own_part(cols, spans, SPAN, WANTED)
    GROUP: tl.constexpr = WANTED.group
    words = rm.wanted_sign_words(sign_ptr, sign_stream, WANTED)
    PAIRED: tl.constexpr = dx_ptr.dtype.element_ty == tl.bfloat16
    plain, rotated = pr.no_maxima(C, PAIRED), tl.zeros((C,), tl.float32)
    up_plain, up_rotated = plain, rotated
    for c in range(col0, stop, C):
        col = rm.tile_at(c, cols, C, FULL)
        dhs = rm.load_group(dh_ptr + first, row0, rows, col, stop, cols, GROUP, FULL)
        xs = rm.load_group(x_ptr + first, row0, rows, col, stop, cols, GROUP, FULL)
        if up_ptr is not None:
            ups = rm.load_group(up_ptr + first, row0, rows, col, stop, cols, GROUP, FULL)
        dxs = ()
        dups = ()
        for i in tl.static_range(0, GROUP, 2):
            both = ()
            up_both = ()
            for j in tl.static_range(2):
                dh = pm.to_fp32(dhs[i + j])
                value, slope = value_and_slope(pm.to_fp32(xs[i + j]), FUNCTION)
                if up_ptr is not None:
                    up_both = up_both + (dh * value,)
                    dh = dh * pm.to_fp32(ups[i + j])
                both = both + (dh * slope,)
            both = pr.rounded_rows(both, dx_ptr.dtype.element_ty)
            pr.store_two(dx_ptr + first, both, i, row0, rows, cols, col, stop, PAIRED, FULL)
            plain = pr.raise_plain_rows(plain, both, PAIRED, WANTED)
            dxs = dxs + both
            if up_ptr is not None:
                up_both = pr.rounded_rows(up_both, dup_ptr.dtype.element_ty)
                pr.store_two(dup_ptr + first, up_both, i, row0, rows, cols, col, stop, PAIRED, FULL)
                up_plain = pr.raise_plain_rows(up_plain, up_both, PAIRED, WANTED)
                dups = dups + up_both
        rotated = pr.raise_rotated_rows(rotated, dxs, words, PAIRED, WANTED)
        if up_ptr is not None:
            up_rotated = pr.raise_rotated_rows(up_rotated, dups, words, PAIRED, WANTED)
    plain, up_plain = pr.plain_values(plain, PAIRED), pr.plain_values(up_plain, PAIRED)
    programs = tl.num_programs(0)
    rm.store_row_maxima(amaxes.row, dx_ptr, row0, rows, cols, WANTED)
    if up_ptr is not None:
        rm.store_row_maxima(up_amaxes.row, dup_ptr, row0, rows, cols, WANTED)
    if WANTED.row == "tensor" or WANTED.col != "":
        m_plain, m_rotated = rm.settle(plain, rotated, dx_ptr, row0, rows, col0, stop, cols, words, WANTED, C)
        rm.publish_wanted(m_plain, m_rotated, amaxes, space_ptr, programs, WANTED)
        if up_ptr is not None:
            m_plain, m_rotated = rm.settle(
                up_plain, up_rotated, dup_ptr, row0, rows, col0, stop, cols, words, WANTED, C
            )
            rm.publish_wanted(m_plain, m_rotated, up_amaxes, up_space_ptr, programs, WANTED)


def activation_with_amaxes(
    x: Tensor, up: Tensor | None, function: str, row: str, col: NVFP4 | None, sign_draw: Draw | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return h = f(x), or f(x) * up, and the amaxes with which h and h.T will be quantized, most from one launch.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], the gate if there is an `up`.
        up: as x, or None.
        function: one of halfbyte.arithmetic.FUNCTIONS.
        row, col, sign_draw: as for `halfbyte.reference.operand_amaxes`.
    """
    x, up = (None if t is None else t.contiguous() for t in (x, up))
    rows, cols = x.shape
    out = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    wanted = rm.wanted_of(row, collected(col))
    amaxes = rm.allocate_amaxes(wanted, rows, x.device)
    if not x.numel():
        return out, with_column(AmaxPair(amaxes.row.zero_(), amaxes.col.zero_()), out, col, sign_draw)
    grid, options = _launch_options(x, function, wanted)
    activation_kernel[grid](
        x,
        up,
        out,
        amaxes,
        rm.workspace(wanted, x.device),
        *rm.fresh_signs(wanted, sign_draw),
        rows,
        cols,
        **options,
    )
    return out, with_column(amaxes, out, col, sign_draw)


def activation_backward_with_amaxes(
    tensors: tuple[Tensor, Tensor, Tensor | None], function: str, row: str, col: NVFP4 | None, sign_draw: Draw | None
) -> tuple[tuple[Tensor, Tensor | None], tuple[tuple[Tensor, Tensor], ...]]:
    """Return the gradients of x and `up`, and of each the amaxes with which it and its transpose will be quantized.

    Args:
        tensors: dh, x and `up` (or None) [rows, cols].
        function: one of halfbyte.arithmetic.FUNCTIONS.
        row, col, sign_draw: as for `halfbyte.reference.operand_amaxes`.
    """
    dh, x, up = (None if t is None else t.contiguous() for t in tensors)
    rows, cols = x.shape
    dx = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    dup = None if up is None else torch.empty(rows, cols, dtype=up.dtype, device=x.device)
    wanted = rm.wanted_of(row, collected(col))
    made = [t for t in (dx, dup) if t is not None]
    amaxes = [rm.allocate_amaxes(wanted, rows, x.device) for _ in made]
    if not x.numel():
        amaxes = [AmaxPair(a.zero_(), b.zero_()) for a, b in amaxes]
        return (dx, dup), tuple(with_column(*pair, col, sign_draw) for pair in zip(amaxes, made, strict=True))
    grid, options = _launch_options(x, function, wanted)
    space = rm.workspace(wanted, x.device)
    activation_backward_kernel[grid](
        dh,
        x,
        up,
        dx,
        dup,
        amaxes[0],
        amaxes[1] if dup is not None else None,
        space,
        None if space is None else space[rm.SLOTS // 2 :],
        *rm.fresh_signs(wanted, sign_draw),
        rows,
        cols,
        **options,
    )
    return (dx, dup), tuple(with_column(*pair, col, sign_draw) for pair in zip(amaxes, made, strict=True))


def tile_columns(wanted: Wanted) -> int:
    """Return the columns of a tile of `group` rows: a rotation needs registers for all rows at once."""
    return (ROTATED_TILE_ELEMENTS if wanted.col == "rotated" else TILE_ELEMENTS) // wanted.group


def _launch_options(x: Tensor, function: str, wanted: Wanted) -> tuple[tuple[int], dict]:
    rows, cols = x.shape
    tile = tile_columns(wanted)
    # Row maxima are written by the program that owns the whole row.
    tiles = ceil_div(cols, tile)
    span = tile * (tiles if wanted.row == "row" else ceil_div(tiles, ceil_div(tiles, TILES)))
    spans = ceil_div(cols, span)
    options = {
        "spans": spans,
        "SPAN": span,
        "FUNCTION": function,
        "WANTED": wanted,
        "C": tile,
        "FULL": rows % wanted.group == 0 and cols >= tile,
        **overlap.launch_options(x.device),
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": False,
    }
    return (spans * ceil_div(rows, wanted.group),), options
