"""The largest finite magnitude: of an operand, of its rows, after its rotation, or of two operands in one pass.

NaN and Inf are left out (docs/numerics.md section 3). They are the largest magnitudes, so a program first takes plain
maxima, and only one whose maximum is not finite reads its part again and leaves them out. Programs that share a result
meet in a workspace of zeros that the last one restores (`running_max`): there is no launch but the kernel's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels import overlap
from halfbyte.kernels import primitives as pm
from halfbyte.kernels import rotate_wide as rw
from halfbyte.kernels import running_max as rm
from halfbyte.kernels import scaling as sc
from halfbyte.kernels.decode import INTERPRETED, cast
from halfbyte.kernels.targets import TARGETS, CompileCase
from halfbyte.layout import ceil_div
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Hadamard, Spec

INF_BITS = tl.constexpr(0x7F800000)
PLAIN = sc.rule_of(NVFP4(), hardware=0)

# What becomes of a row's maximum: it joins the tensor's, it is stored, or it joins those of other parts of the row.
OF_TENSOR, OF_ROW, OF_ROW_PARTS = (tl.constexpr(i) for i in range(3))

# The pair of maxima of a pair of magnitudes and of a pair of bf16 values.
RAISE_PAIR = tl.constexpr("{.reg .b32 b; and.b32 b, $2, 0x7FFF7FFF; max.NaN.bf16x2 $0, $1, b;}")


class Tile(NamedTuple):
    """What a program reads at once and how many programs there are.

    size: elements (plain), or bytes that a thread reads of each row of a group (rotated).
    per_sm: programs for each multiprocessor, if the tensor is large.
    """

    size: int
    num_warps: int
    per_sm: int


# Measured on an H200: about as many programs as run at once, so that few of them meet in the workspace.
PLAIN_TILE = Tile(8192, 8, 8)
ROTATED_TILES = {16: Tile(8, 4, 5), 32: Tile(4, 4, 5), 64: Tile(4, 4, 3), 128: Tile(2, 4, 3)}


class RotatedTile(NamedTuple):
    """What a program of a rotation's maximum reads at once.

    lines: columns, or words of two (packed); vec: how many of them a thread reads.
    num_warps, per_sm: as in `Tile`.
    """

    lines: int
    vec: int
    packed: bool
    num_warps: int
    per_sm: int


@triton.jit
def finite_max(xs):
    """Return max |x| over the finite elements of a group, as int32 bits."""
    m = tl.zeros_like(xs[0])
    for i in tl.static_range(len(xs)):
        a = tl.abs(xs[i])
        m = tl.maximum(m, tl.where(a < float("inf"), a, 0.0))
    return m.to(tl.int32, bitcast=True)


@triton.jit
def raised(m, words):
    """Raise pairs m of bf16 magnitudes by the magnitudes of pairs `words`; Inf and NaN are the largest."""
    if INTERPRETED:
        low, high = tl.maximum(m & 0xFFFF, words & 0x7FFF), tl.maximum(m >> 16, (words >> 16) & 0x7FFF)
        return low | (high << 16)
    return tl.inline_asm_elementwise(RAISE_PAIR, "=r,r,r", [m, words], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def largest_pair(words):
    """Return [T] pairs of the largest magnitudes in words [T, N]."""
    if INTERPRETED:  # slow in reductions by a function
        return tl.max(words & 0x7FFF, axis=1) | (tl.max((words >> 16) & 0x7FFF, axis=1) << 16)
    return tl.reduce(words & 0x7FFF7FFF, 1, raised)


@triton.jit
def larger_bits(m):
    """Return the larger magnitude of each pair as the int32 bits of its fp32 value."""
    return tl.maximum(m << 16, m & 0xFFFF0000).to(tl.int32)


@triton.jit
def magnitude_bits(x):
    """Return |x| as the int32 bits of its fp32 value."""
    return pm.to_fp32(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_bits(bits):
    return tl.where(bits < INF_BITS, bits, 0)


@triton.jit(do_not_specialize=("parts", "programs"))
def amax_rows_kernel(
    x_ptr, out_ptr, space_ptr, rows, cols, stride_r, stride_c, parts, programs,
    RESULT: tl.constexpr, PACKED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax of x, out fp32 []; or of its rows, out fp32 [rows], zero before where a row has parts.

    A program takes R rows, and of each C columns of every parts * C. PACKED: x is read in words of two bf16.
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
            m = raised(m, tl.load(word_ptr[:, None] + word[None, :], mask=inside, other=0))
        bits = tl.max(larger_bits(m), axis=1)
    else:
        m = tl.zeros((R, C), tl.int32)
        for c in range(first, end, step):
            col = c + tl.arange(0, C)
            inside = in_row[:, None] & (col < end)[None, :]
            m = tl.maximum(m, magnitude_bits(tl.load(row_ptr[:, None] + col[None, :] * stride_c, mask=inside, other=0)))
        bits = tl.max(m, axis=1)
    if tl.max(bits, axis=0) >= INF_BITS:
        bits = tl.zeros((R,), tl.int32)
        for c in range(first, end, step):
            col = c + tl.arange(0, C)
            inside = in_row[:, None] & (col < end)[None, :]
            x = tl.load(row_ptr[:, None] + col[None, :] * stride_c, mask=inside, other=0)
            bits = tl.maximum(bits, tl.max(finite_bits(magnitude_bits(x)), axis=1))
    if RESULT == OF_ROW:
        tl.store(out_ptr + row, bits.to(tl.float32, bitcast=True), mask=in_row)
    elif RESULT == OF_ROW_PARTS:
        tl.atomic_max(out_ptr.to(tl.pointer_type(tl.int32)) + row, bits, mask=in_row, sem="relaxed")
    else:
        rm.publish((tl.max(bits, axis=0),), (out_ptr,), space_ptr, programs)


@triton.jit
def load_groups(x_ptr, g, rows, line, lines, stride_r, stride_l, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Return [T, SIZE]: rows g to g + SIZE of lines `line` [T], 0 outside; FULL: nothing is."""
    row = g + tl.arange(0, SIZE)
    pointers = x_ptr + row[None, :] * stride_r + line[:, None] * stride_l
    if FULL:
        return tl.load(pointers)
    return tl.load(pointers, mask=(line < lines)[:, None] & (row < rows)[None, :], other=0)


@triton.jit
def column_halves(x, PACKED: tl.constexpr):
    """Return the fp32 values of what was loaded: of two columns from packed words, else of one."""
    if PACKED:
        return (x << 16).to(tl.float32, bitcast=True), (x & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return (pm.to_fp32(x),)


@triton.jit
def narrowed(x, NARROW: tl.constexpr):
    """Round fp32 values to bf16 unless they are (NARROW)."""
    if NARROW:
        return x
    return pm.to_fp32(cast(x, tl.bfloat16))


@triton.jit(do_not_specialize=("sign_stream", "strips", "parts", "programs"))
def amax_rotated_kernel(
    x_ptr, out_ptr, plain_ptr, space_ptr, sign_ptr, sign_stream, rows, cols, stride_r, stride_c, strips, parts,
    programs, RULE: tl.constexpr, BOTH: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr,
    T: tl.constexpr, VEC: tl.constexpr, PARTIAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """amax of x.T after a rotation along its rows, or of the rows of that (out zero before); with BOTH that of x too.

    A program takes a strip of T columns (PACKED: words of two) and every parts-th group of rows in it. PARTIAL: what
    each program finds is an output, out and plain [programs]; a program without a group finds 0. For a large x it is
    not placed while the kernel before it drains: that cost 7 %.
    """
    overlap.begin(OVERLAP)
    SIZE: tl.constexpr = RULE.group
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    SHARE: tl.constexpr = 2 if PACKED else 1
    strip = tl.program_id(0) % strips
    first = (tl.program_id(0) // strips).to(tl.int64) * SIZE
    step = tl.cast(parts, tl.int64) * SIZE
    end = tl.cast(rows, tl.int64)
    # The hint keeps a thread's share of a row at VEC lines, so that it holds all rows of a group.
    line = strip.to(tl.int64) * T + tl.max_contiguous(tl.arange(0, T), VEC)
    lines = tl.cast(cols, tl.int64) // SHARE
    if PACKED:
        src_ptr = x_ptr.to(tl.pointer_type(tl.uint32))
        stride = tl.cast(stride_r, tl.int64) // 2
    else:
        src_ptr = x_ptr
        stride = tl.cast(stride_r, tl.int64)
    flips = rw.sign_flips(sign_ptr, sign_stream, SIZE, RULE.fresh)
    plain = tl.zeros((T,), tl.uint32)
    top = tl.zeros((T,), tl.float32)
    second = tl.zeros((T,), tl.float32)
    for g in range(first, end, step):
        x = load_groups(src_ptr, g, end, line, lines, stride, stride_c, SIZE, FULL)
        halves = column_halves(x, PACKED)
        if BOTH:
            if PACKED:
                plain = raised(plain, largest_pair(x))
            else:
                plain = tl.maximum(plain, tl.max(magnitude_bits(x), axis=1).to(tl.uint32))
        top = rw.nan_max(top, rw.largest_rotated(narrowed(halves[0], NARROW), flips))
        if PACKED:
            second = rw.nan_max(second, rw.largest_rotated(narrowed(halves[1], NARROW), flips))
    # The factor and the rounding keep the order: they are applied to the maxima alone.
    bits = magnitude_bits(cast(tl.fma(top, RULE.norm, 0.0), tl.bfloat16))
    more = magnitude_bits(cast(tl.fma(second, RULE.norm, 0.0), tl.bfloat16))
    plain_bits = larger_bits(plain) if PACKED else plain.to(tl.int32)
    if tl.max(tl.maximum(tl.maximum(bits, more), plain_bits), axis=0) >= INF_BITS:
        bits = tl.zeros((T,), tl.int32)
        more = tl.zeros((T,), tl.int32)
        plain_bits = tl.zeros((T,), tl.int32)
        for g in range(first, end, step):
            halves = column_halves(load_groups(src_ptr, g, end, line, lines, stride, stride_c, SIZE, FULL), PACKED)
            for k in tl.static_range(SHARE):
                plain_bits = tl.maximum(plain_bits, tl.max(finite_bits(magnitude_bits(halves[k])), axis=1))
                y = rw.unpacked(rw.rotated(narrowed(halves[k], NARROW), flips, RULE.norm))
                found = tl.max(finite_bits(magnitude_bits(y)), axis=1)
                if k == 0:
                    bits = tl.maximum(bits, found)
                else:
                    more = tl.maximum(more, found)
    if RULE.row_amax:
        col_ptr = out_ptr.to(tl.pointer_type(tl.int32)) + line * SHARE
        tl.atomic_max(col_ptr, bits, mask=line < lines, sem="relaxed")
        if PACKED:
            tl.atomic_max(col_ptr + 1, more, mask=line < lines, sem="relaxed")
    maxima = ()
    outs = ()
    if not RULE.row_amax:
        maxima = maxima + (tl.max(tl.maximum(bits, more), axis=0),)
        outs = outs + (out_ptr,)
    if BOTH:
        maxima = maxima + (tl.max(plain_bits, axis=0),)
        outs = outs + (plain_ptr,)
    if PARTIAL:
        for i in tl.static_range(len(maxima)):
            tl.store(outs[i] + tl.program_id(0), maxima[i].to(tl.float32, bitcast=True))
    elif len(maxima) > 0:
        rm.publish(maxima, outs, space_ptr, programs)


def finite_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Return max |x| over the finite elements, fp32: [] or, with dim=-1, one per row; 0 for nothing.

    Args:
        x: bf16, fp16 or fp32, at most 2-D if dim is given.
        dim: None or -1.
    """
    x = x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)
    return operand_amax(x, NVFP4(outer="tensor" if dim is None else "row"), None)


def operand_amax(x: Tensor, spec: NVFP4, sign_draw: Draw | None) -> Tensor:
    """Return the amax that quantize(x, spec) uses: fp32 [] or [rows], after the spec's rotation.

    Args:
        x: bf16, fp16 or fp32 [rows, cols], any strides.
        spec: its `outer` and `rotation` count.
        sign_draw: the place of fresh signs.
    """
    per_row = spec.outer == "row"
    if x.numel() == 0:
        return torch.zeros((x.shape[0],) if per_row else (), dtype=torch.float32, device=x.device)
    if spec.rotation is not None:
        return _launch_rotated(x.T, amax_rule(spec), sign_draw, both=False)[0]
    if per_row:
        return _launch_rows(x, per_row=True)
    # Without rows to tell apart, a contiguous tensor is one long row, and rows may be columns.
    if x.is_contiguous():
        return _launch_rows(x.view(1, -1), per_row=False)
    return _launch_rows(x.T if x.stride(0) == 1 else x, per_row=False)


def row_col_amax(
    x: Tensor, row_spec: Spec | None, col_spec: Spec | None, sign_draw: Draw | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return operand_amax of (x, row_spec) and (x.T, col_spec) from one read of x where one read gives both.

    Args:
        x: bf16, fp16 or fp32 [rows, cols].
        row_spec, col_spec: None and MXFP8 need no amax: None is returned.
        sign_draw: the place of fresh signs.
    """
    row = row_spec if isinstance(row_spec, NVFP4) else None
    col = col_spec if isinstance(col_spec, NVFP4) else None
    if row is not None and col is not None and row.rotation is None and row.outer == "tensor" and x.numel():
        if col.rotation is None and col.outer == "tensor":
            both = operand_amax(x, row, None)
            return both, both
        if col.rotation is not None:
            col_amax, row_amax = _launch_rotated(x, amax_rule(col), sign_draw, both=True)
            return row_amax, col_amax
    return (
        operand_amax(x, row, sign_draw) if row is not None else None,
        operand_amax(x.T, col, sign_draw) if col is not None else None,
    )


def amax_rule(spec: NVFP4) -> sc.Rule:
    """Return what the amax kernels are compiled for: nothing of the spec counts but its rows and its rotation."""
    rule = sc.rule_of(spec, hardware=0)
    return PLAIN._replace(row_amax=rule.row_amax, group=rule.group, norm=rule.norm, fresh=rule.fresh)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def is_packed(x: Tensor) -> bool:
    """Say whether x is read in words of two bf16, 16 bytes at a time."""
    aligned = x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0 and (x.stride(0) % 8 == 0 or x.shape[0] == 1)
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and aligned


def _parts(units: int, beside: int, per_sm: int, device: torch.device) -> int:
    """Return how many programs share `units` of work where `beside` such runs of units lie beside each other."""
    wanted = max(1, _multiprocessors(device) * per_sm // beside)
    return ceil_div(units, ceil_div(units, min(units, wanted)))  # equal shares


def _launch_rows(x: Tensor, per_row: bool) -> Tensor:
    """Return max |x| [], or of its rows."""
    rows, cols = x.shape
    size = PLAIN_TILE.size
    c = min(size, max(16, triton.next_power_of_2(cols)))
    r = size // c
    tiles = ceil_div(rows, r)
    parts = _parts(ceil_div(cols, c), tiles, PLAIN_TILE.per_sm, x.device)
    result = OF_TENSOR if not per_row else OF_ROW if parts == 1 else OF_ROW_PARTS
    new = torch.zeros if result == OF_ROW_PARTS else torch.empty
    out = new((rows,) if per_row else (), dtype=torch.float32, device=x.device)
    amax_rows_kernel[(tiles * parts,)](
        x,
        out,
        None if per_row else rm.workspace(rm.Wanted("tensor"), x.device),
        rows,
        cols,
        *x.stride(),
        parts,
        tiles * parts,
        RESULT=result,
        PACKED=is_packed(x),
        R=r,
        C=c,
        num_warps=PLAIN_TILE.num_warps,
        enable_fp_fusion=False,
        **overlap.launch_options(x.device),
    )
    return out


def _launch_rotated(x: Tensor, rule: sc.Rule, sign_draw: Draw | None, both: bool) -> tuple[Tensor, Tensor]:
    """Return the amax of rotated x.T, [] or [cols], and with `both` that of x [], else nothing."""
    assert not rule.fresh or sign_draw is not None, "fresh signs need a draw"
    rows, cols = x.shape
    tile = rotated_tile(rule, is_packed(x), sc.hardware_of(x.device))
    tile_cols = tile.lines * (2 if tile.packed else 1)
    strips = ceil_div(cols, tile_cols)
    parts = _parts(ceil_div(rows, rule.group), strips, tile.per_sm, x.device)
    new = torch.zeros if rule.row_amax else torch.empty
    out = new((cols,) if rule.row_amax else (), dtype=torch.float32, device=x.device)
    plain = torch.empty((), dtype=torch.float32, device=x.device)
    amax_rotated_kernel[(strips * parts,)](
        x,
        out,
        plain if both else None,
        None if rule.row_amax and not both else rm.workspace(rm.Wanted("tensor"), x.device),
        sign_draw.base if rule.fresh else None,
        sign_draw.stream if rule.fresh else 0,
        rows,
        cols,
        *x.stride(),
        strips,
        parts,
        strips * parts,
        RULE=rule,
        BOTH=both,
        PACKED=tile.packed,
        FULL=cols % tile_cols == 0 and rows % rule.group == 0,
        T=tile.lines,
        VEC=tile.vec,
        PARTIAL=False,
        OVERLAP=False,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    return out, plain


def rotated_tile(rule: sc.Rule, packed: bool, hardware: int) -> RotatedTile:
    """Return the tile of a rotation's maximum.

    A thread holds whole groups, of as many columns as fit into its registers. Blackwell's assembler keeps fewer of
    them, and 128 fresh signs beside 128 values are too much for all but sm_90: there a thread reads one column or, of
    groups of 128, half of one. These tiles are compiled and compared, not measured.

    Args:
        rule: its group and fresh count.
        packed: whether x may be read in words.
        hardware: as `Rule.hardware`.
    """
    size, num_warps, per_sm = ROTATED_TILES[rule.group]
    if rule.group == 128 and (hardware >= 100 or (rule.fresh and hardware < 90)):
        return RotatedTile(32, 1, False, 2, 8)
    if rule.group >= 32 and hardware >= 100:
        return RotatedTile(128, 1, False, 4, per_sm)
    packed = packed and size >= 4
    vec = size // 4 if packed else 1
    return RotatedTile(32 * num_warps * vec, vec, packed, num_warps, per_sm)


def compile_cases() -> list[CompileCase]:
    """Return the tiles of both kernels; rotations with fresh signs on whole tiles, and with ragged edges."""
    plain = [_plain_case(result, packed) for result in (OF_TENSOR, OF_ROW, OF_ROW_PARTS) for packed in (True, False)]
    rotated = [
        rotated_case(rule, tile, full, capabilities)
        for size in ROTATED_TILES
        for signs in ("fresh", "fixed")
        for outer, full in (("tensor", True), ("row", False))
        for rule in (amax_rule(NVFP4(rotation=Hadamard(size=size, signs=signs), outer=outer)),)
        for tile, capabilities in tiles_of_targets(rule, True).items()
    ]
    return rotated + overlap.cases(plain)


def _plain_case(result: Any, packed: bool) -> CompileCase:
    arguments: dict[str, Any] = {
        "x_ptr": "*bf16:16" if packed else "*fp32:16",
        "out_ptr": "*fp32:16",
        "space_ptr": "*i32:16" if result == OF_TENSOR else None,
        "rows": 1 if result == OF_TENSOR else "i32:16",
        "cols": "i32:16",
        "stride_r": "i32:16",
        "stride_c": 1,
        **dict.fromkeys(("parts", "programs"), "i32"),
        "RESULT": result,
        "PACKED": packed,
        "R": 1,
        "C": PLAIN_TILE.size,
    }
    return CompileCase(amax_rows_kernel, arguments, num_warps=PLAIN_TILE.num_warps, fp_fusion=False)


def tiles_of_targets(rule: sc.Rule, packed: bool) -> dict[RotatedTile, tuple[int, ...]]:
    """Return the tiles of a rule and the compute capabilities that take each."""
    tiles: dict[RotatedTile, tuple[int, ...]] = {}
    for capability in TARGETS:
        tile = rotated_tile(rule, packed, sc.hardware_level(capability))
        tiles[tile] = (*tiles.get(tile, ()), capability)
    return tiles


def rotated_case(rule: sc.Rule, tile: RotatedTile, full: bool, capabilities: tuple[int, ...]) -> CompileCase:
    """Return the rotated kernel of packed bf16, with the amax of x too where it is one per tensor."""
    both = not rule.row_amax
    arguments: dict[str, Any] = {
        "x_ptr": "*bf16:16",
        "out_ptr": "*fp32:16",
        "plain_ptr": "*fp32:16" if both else None,
        "space_ptr": "*i32:16" if both else None,
        "sign_ptr": "*i64:16" if rule.fresh else None,
        **dict.fromkeys(("rows", "cols", "stride_r"), "i32:16"),
        "stride_c": 1,
        **dict.fromkeys(("sign_stream", "strips", "parts", "programs"), "i32"),
        "RULE": rule,
        "BOTH": both,
        "PACKED": tile.packed,
        "FULL": full,
        "T": tile.lines,
        "VEC": tile.vec,
        "PARTIAL": False,
        "OVERLAP": False,
    }
    return CompileCase(
        amax_rotated_kernel, arguments, num_warps=tile.num_warps, fp_fusion=False, capabilities=capabilities
    )
