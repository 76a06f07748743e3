"""Quantize, dequantize, transpose and the amax of plain tensors, each sent to the backend that runs it.

A transient operand is used by one GEMM and not kept: a backend that multiplies decoded operands returns its values
(bf16, from the reference fp32; no block scales) instead of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfbyte.layout import LINEAR, Blocks, Operand, ceil_div, check_scale_layout, matrix_shape, round_up, stored_shapes
from halfbyte.ops.backends import NATIVE, REFERENCE, check_kernels, choose, stored_spec
from halfbyte.ops.checkpointing import outputs_are_kept
from halfbyte.ops.define import DRAW, draw_of, empty_like, implementation, nothing, op, place_arguments, spec_of
from halfbyte.ops.repeat import call_op
from halfbyte.rng import Draw
from halfbyte.sides import Side, Sides, both_sides, share_tiles, shared_draws
from halfbyte.spec import Spec, parse

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def _check_input(x: Tensor) -> None:
    if x.dtype not in QUANTIZABLE:
        raise TypeError(f"x.dtype={x.dtype}: quantization takes bfloat16, float16 or float32; cast x first")
    matrix_shape(x.shape)


def quantize(x: Tensor, side: Side, backend: str | None = None) -> Blocks:
    """Quantize along the last dimension as it is asked for; see `halfbyte.reference.quantize`. Codes, never values.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: x is 0-D, or a draw that the spec needs is missing.
    """
    _check_input(x)
    check_sides((side, None), x.device, backend)
    spec, draw, sign_draw, amax, scale_layout, _ = side
    places = *((None, 0, 0, None) if draw is None else draw), *place_arguments(sign_draw)
    out = call_op(torch.ops.halfbyte.quantize, x, spec.key, *places, amax, scale_layout, backend or "")
    return Blocks(out[0], out[1], out[2] if amax is None else amax)


def quantize_row_col(
    x: Tensor, row: Side | None, col: Side | None, backend: str | None = None
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x), quantize(x.T)) of a tensor flattened to a matrix; None where nothing is asked for.

    Args:
        x: any strides.
        row, col: of `both_sides`, whose orientations share a draw. A transient one is meant for one GEMM at once: its
            Blocks may hold decoded values instead of codes, which only `gemm_nt` reads.

    Raises:
        TypeError: x is not bf16, fp16 or fp32.
        ValueError: x is 0-D, a draw is missing, or it names a shard (whose two orientations differ in origin).
    """
    arguments = checked_arguments(x, (row, col), backend)
    return both_blocks(call_op(torch.ops.halfbyte.quantize_row_col, x, *arguments), (row, col))


def checked_arguments(x: Tensor, sides: Sides, backend: str | None) -> tuple:
    """Return what an op of both orientations takes after its tensors, checked as `quantize_row_col` says."""
    _check_input(x)
    check_sides(sides, x.device, backend)
    draw, sign_draw = shared_draws(sides)
    if draw is not None and sides[1] is not None and (draw.first_block or draw.blocks_per_row is not None):
        raise ValueError(
            f"rng.first_block={draw.first_block}: a shard starts elsewhere in x.T; quantize x and x.T apart"
        )
    places = *((None, 0, 0, None) if draw is None else draw), *place_arguments(sign_draw)
    specs, amaxes, rest = op_arguments(sides)
    return *specs, *places, *amaxes, *rest, backend or ""


def op_arguments(sides: Sides) -> tuple[tuple[str, str], tuple[Tensor | None, Tensor | None], tuple]:
    """Return keys, amaxes and (scale layout, transient of each) with which ops of both orientations are called."""
    row, col = sides
    first, decodes = row or col, not outputs_are_kept()
    keys = "" if row is None else row.spec.key, "" if col is None else col.spec.key
    amaxes = None if row is None else row.amax, None if col is None else col.amax
    transient = row is not None and row.transient and decodes, col is not None and col.transient and decodes
    return keys, amaxes, (LINEAR if first is None else first.scale_layout, *transient)


def both_blocks(out: tuple[Tensor, ...], sides: Sides) -> tuple[Blocks | None, Blocks | None]:
    """Return both orientations from what an op returns, with the amaxes that it did not: given or shared."""
    row = col = None
    asked_row, asked_col = sides
    if asked_row is not None:
        row = Blocks(out[0], out[1], out[2] if asked_row.amax is None else asked_row.amax)
    if asked_col is not None:
        amax = out[5] if asked_col.amax is None else asked_col.amax
        if row is not None and asked_row is not None and share_tiles(asked_row.spec, asked_col.spec):
            amax = row.amax
        col = Blocks(out[3], out[4], amax)
    return row, col


def check_sides(sides: Sides, device: torch.device, backend: str | None) -> None:
    """Raise ValueError if what is asked for lacks a draw that its spec needs, or cannot run on the device."""
    for side in sides:
        if side is None:
            continue
        if side.spec.needs_rng and side.draw is None:
            raise ValueError("rng=None: the spec draws random bits; pass rng=hb.Philox(seed, offset)")
        if side.spec.needs_sign_rng and side.sign_draw is None:
            raise ValueError("sign_rng=None: fresh Hadamard signs are drawn; pass sign_rng=hb.Philox(seed, offset)")
        check_scale_layout(side.scale_layout)
    check_kernels(tuple(None if side is None else side.spec for side in sides), device, backend)


def _quantize(
    x, key, rng, stream, first_block, blocks_per_row, sign_rng, sign_stream, amax, scale_layout, backend
) -> tuple[Tensor, Tensor, Tensor]:
    draw, sign_draw = draw_of(rng, stream, first_block, blocks_per_row), draw_of(sign_rng, sign_stream)
    side = Side(parse(key), draw, sign_draw, amax, scale_layout)
    blocks, _ = implementation(x.device, backend).quantize_row_col(x, side, None)
    return blocks.qdata, blocks.block_scale, _fresh(blocks.amax, amax)


def _fresh(amax: Tensor, given: Tensor | None) -> Tensor:
    return amax if given is None else amax.new_empty(0)


def _shapes(x: Tensor, spec: Spec, scale_layout: str, given: Tensor | None, turned: bool = False) -> list:
    """Return the shapes of what an op returns of x or, turned, of x.T."""
    rows, cols = matrix_shape(x.shape)
    shapes = stored_shapes(*((cols, rows) if turned else (rows, cols)), spec, scale_layout)
    return [*shapes[:2], shapes.amax if given is None else (0,)]


def _quantize_fake(x, key, *rest):
    amax, scale_layout, _ = rest[-3:]
    return tuple(empty_like(x, _shapes(x, parse(key), scale_layout, amax)))


op(
    f"quantize(Tensor x, str key, {DRAW}, Tensor? amax, str scale_layout, str backend) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)


def _quantize_row_col(x, *arguments) -> tuple[Tensor, ...]:
    asked, given, shared = asked_of(x, arguments)
    return outputs(x, implementation(x.device, arguments[-1]).quantize_row_col(x, *asked), given, shared)


def asked_of(x: Tensor, arguments: tuple) -> tuple[Sides, tuple[Tensor | None, Tensor | None], bool]:
    """Return both sides, the amaxes that were given, and whether the sides share tiles, of `checked_arguments`."""
    row_key, col_key, rng, stream, first_block, blocks_per_row, sign_rng, sign_stream, *rest = arguments
    row_amax, col_amax, scale_layout, row_transient, col_transient, backend = rest
    specs = spec_of(row_key), spec_of(col_key)
    decodes = choose(x.device, backend or None) != NATIVE
    asked = both_sides(
        *specs,
        draw=draw_of(rng, stream, first_block, blocks_per_row),
        sign_draw=draw_of(sign_rng, sign_stream),
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
        transient=(decodes and row_transient, decodes and col_transient),
    )
    return asked, (row_amax, col_amax), share_tiles(*specs)


def outputs(x: Tensor, both: tuple, given: tuple, shared: bool) -> tuple[Tensor, ...]:
    """Return what an op returns of two orientations.

    Empty tensors stand for None, and for an amax that the caller knows or, of columns, that is `shared` with the rows.
    """
    out: list[Tensor] = []
    for blocks, known in zip(both, given, strict=True):
        out += empty_like(x, ((0,),) * 3) if blocks is None else (*blocks[:2], _fresh(blocks.amax, known))
    if shared:
        out[5] = out[5].new_empty(0)
    elif out[5].numel() and out[5].data_ptr() == out[2].data_ptr():  # both unrotated: one amax
        out[5] = out[5].clone()
    return tuple(out)


def row_col_fake(x, row_key, col_key, *rest):
    """Return outputs of the shapes and dtypes of those of both orientations; arguments as of the op."""
    row_amax, col_amax, scale_layout, *transient, backend = rest[-6:]
    chosen, specs = choose(x.device, backend or None), (spec_of(row_key), spec_of(col_key))
    shared = share_tiles(*specs)

    def one(spec: Spec, given: Tensor | None, is_col: bool, is_transient: bool) -> list[Tensor]:
        blocks = empty_like(x, _shapes(x, spec, scale_layout, given, is_col))
        if is_transient and chosen != NATIVE:
            size = _padded(x, spec, is_col)
            turned = is_col and not shared and (chosen == REFERENCE or _lies_as_x(x, *specs, scale_layout))
            values = x.new_empty(size[::-1] if turned else size, dtype=_VALUES.get(chosen, torch.bfloat16))
            blocks[:2] = [values.T if turned else values, x.new_empty(0, dtype=torch.uint8)]
        return blocks

    return both_fake(x, specs, (row_amax, col_amax), transient, one)


def both_fake(x: Tensor, specs: tuple, given: tuple, transient: Sequence[bool], one: Callable) -> tuple[Tensor, ...]:
    """Return fakes of what `outputs` returns: of a side that is asked for, `one(spec, amax, is_col, is_transient)`."""
    out: list[Tensor] = []
    for spec, *side in zip(specs, given, (False, True), transient, strict=True):
        out += empty_like(x, ((0,),) * 3) if spec is None else one(spec, *side)
    if share_tiles(*specs):
        out[5] = x.new_empty(0, dtype=torch.float32)
    return tuple(out)


def _lies_as_x(x: Tensor, row: Spec | None, col: Spec | None, scale_layout: str) -> bool:
    from halfbyte.kernels.quantize.both_route import lies_as_x

    return lies_as_x(x, row, col, scale_layout)


_VALUES = {REFERENCE: torch.float32}
"""The dtype of decoded values, where it is not bf16."""


def _padded(x: Tensor, spec: Spec, turned: bool) -> tuple[int, int]:
    rows, cols = matrix_shape(x.shape)
    rows, cols = (cols, rows) if turned else (rows, cols)
    return rows, round_up(cols, spec.alignment)


op(
    f"quantize_row_col(Tensor x, str row_key, str col_key, {DRAW}, Tensor? row_amax, Tensor? col_amax, "
    "str scale_layout, bool row_transient, bool col_transient, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_row_col,
    row_col_fake,
)


def amax(x: Tensor, backend: str | None = None) -> Tensor:
    """Return max |x| over the finite elements, fp32 [] on x's device."""
    _check_input(x)
    return call_op(torch.ops.halfbyte.amax, x, backend or "")


def _amax(x: Tensor, backend: str) -> Tensor:
    return implementation(x.device, backend).finite_amax(x)


def _amax_fake(x: Tensor, backend: str) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


op("amax(Tensor x, str backend) -> Tensor", _amax, _amax_fake, takes_parameters=True)


def amax_of_all(xs: Sequence[Tensor], backend: str | None = None) -> Tensor:
    """Return the largest `amax` of tensors on one device: fp32 [].

    Raises:
        ValueError: xs is empty.
    """
    if not xs:
        raise ValueError("xs=[]: of no tensors there is no amax; give at least one")
    for x in xs:
        _check_input(x)
    return call_op(torch.ops.halfbyte.amax_of_all, list(xs), backend or "")


def _amax_of_all(xs: Sequence[Tensor], backend: str) -> Tensor:
    return implementation(xs[0].device, backend).greatest_amax(xs)


def _amax_of_all_fake(xs: Sequence[Tensor], backend: str) -> Tensor:
    return xs[0].new_empty((), dtype=torch.float32)


op("amax_of_all(Tensor[] xs, str backend) -> Tensor", _amax_of_all, _amax_of_all_fake, takes_parameters=True)


def row_col_amax(
    x: Tensor, row_spec: Spec | None, col_spec: Spec | None, sign_draw: Draw | None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the amaxes that x [rows, cols] and x.T are quantized with: fp32 [] or [rows], empty where there is none.

    Args:
        x: a matrix, any strides.
        row_spec, col_spec: of both orientations; None and formats without an amax have none.
        sign_draw: the place of fresh signs.
    """
    _check_input(x)
    keys = [spec.key if spec is not None and spec.format.has_amax else "" for spec in (row_spec, col_spec)]
    return call_op(torch.ops.halfbyte.row_col_amax, x, *keys, *place_arguments(sign_draw), backend or "")


def _row_col_amax(x, row_key, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, Tensor]:
    specs, sign_draw = (spec_of(row_key), spec_of(col_key)), draw_of(sign_rng, sign_stream)
    row, col = implementation(x.device, backend).row_col_amax(x, *specs, sign_draw)
    none = x.new_empty(0, dtype=torch.float32)
    return none if row is None else row, none if col is None else col.clone() if col is row else col


def _row_col_amax_fake(x, row_key, col_key, *rest):
    amaxes = []
    for key, rows in zip((row_key, col_key), x.shape, strict=True):
        spec = spec_of(key)
        shape = (0,) if spec is None else (rows,) if spec.has_row_amax else ()
        amaxes.append(x.new_empty(shape, dtype=torch.float32))
    return tuple(amaxes)


op(
    "row_col_amax(Tensor x, str row_key, str col_key, Tensor? sign_rng, int sign_stream, str backend) "
    "-> (Tensor, Tensor)",
    _row_col_amax,
    _row_col_amax_fake,
    takes_parameters=True,
)


def dequantize(operand: Operand, dtype: torch.dtype = torch.float32, backend: str | None = None) -> Tensor:
    """Return the values that the bytes stand for, dtype [rows, cols]."""
    blocks, spec, cols, scale_layout = operand
    return call_op(torch.ops.halfbyte.dequantize, *blocks, spec.key, cols, dtype, scale_layout, backend or "")


def _dequantize(qdata, block_scale, amax, key, cols, dtype, scale_layout, backend) -> Tensor:
    spec = stored_spec(key, qdata.device, backend)
    stored = Operand(Blocks(qdata, block_scale, amax), spec, cols, scale_layout)
    return implementation(qdata.device, backend).dequantize(stored, dtype)


def _dequantize_fake(qdata, block_scale, amax, key, cols, dtype, scale_layout, backend):
    return qdata.new_empty(qdata.shape[0], cols, dtype=dtype)


op(
    "dequantize(Tensor qdata, Tensor block_scale, Tensor amax, str key, SymInt cols, ScalarType dtype, "
    "str scale_layout, str backend) -> Tensor",
    _dequantize,
    _dequantize_fake,
)


def transpose(
    qdata: Tensor,
    block_scale: Tensor,
    rows: int,
    cols: int,
    backend: str | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Transpose packed 16x16 tiles and their LINEAR scales without rounding.

    Args:
        qdata: uint8 [rows, ceil(cols/16) * 8].
        block_scale: uint8 [rows, ceil(cols/16)], equal in the rows of a tile.
        rows, cols: the logical shape.
        into: contiguous memory for what is returned; None: new memory.

    Returns:
        qdata uint8 [cols, ceil(rows/16) * 8] and block_scale [cols, ceil(rows/16)].

    Raises:
        ValueError: `into` does not have these shapes and dtypes, or is not contiguous.
    """
    if into is not None:
        shapes = (cols, ceil_div(rows, 16) * 8), (cols, ceil_div(rows, 16))
        for tensor, shape, like in zip(into, shapes, (qdata, block_scale), strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != like.dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"into holds {tensor.dtype} {list(tensor.shape)}: give contiguous {like.dtype} {list(shape)}"
                )
        call_op(torch.ops.halfbyte.transpose_out, qdata, block_scale, rows, cols, *into, backend or "")
        return into
    return call_op(torch.ops.halfbyte.transpose, qdata, block_scale, rows, cols, backend or "")


def decode(operand: Operand, backend: str | None = None) -> Operand:
    """Return codes as a transient operand, which several GEMMs read at no further cost; where FP4 runs natively, codes.

    Only `gemm_nt` reads it.
    """
    blocks, spec, cols, scale_layout = operand
    if choose(blocks.qdata.device, backend) == NATIVE:
        return operand
    values = call_op(torch.ops.halfbyte.decode, *blocks, spec.key, cols, scale_layout, backend or "")
    return Operand(blocks.decoded(values), spec, cols)


def _decode(qdata, block_scale, amax, key, cols, scale_layout, backend) -> Tensor:
    spec = stored_spec(key, qdata.device, backend)
    stored = Operand(Blocks(qdata, block_scale, amax), spec, cols, scale_layout)
    return implementation(qdata.device, backend).decode(stored).values


def _decode_fake(qdata, block_scale, amax, key, cols, scale_layout, backend):
    dtype = _VALUES.get(choose(qdata.device, backend or None), torch.bfloat16)
    return qdata.new_empty(qdata.shape[0], round_up(cols, parse(key).alignment), dtype=dtype)


op(
    "decode(Tensor qdata, Tensor block_scale, Tensor amax, str key, SymInt cols, str scale_layout, str backend) "
    "-> Tensor",
    _decode,
    _decode_fake,
)


def _transpose(qdata, block_scale, rows, cols, backend) -> tuple[Tensor, Tensor]:
    return implementation(qdata.device, backend).transpose(qdata, block_scale, rows, cols)


def _transpose_fake(qdata, block_scale, rows, cols, backend):
    blocks = ceil_div(rows, 16)
    return qdata.new_empty(cols, blocks * 8), block_scale.new_empty(cols, blocks)


op(
    "transpose(Tensor qdata, Tensor block_scale, SymInt rows, SymInt cols, str backend) -> (Tensor, Tensor)",
    _transpose,
    _transpose_fake,
)


def _transpose_out(qdata, block_scale, rows, cols, out, out_scale, backend) -> None:
    implementation(qdata.device, backend).transpose(qdata, block_scale, rows, cols, (out, out_scale))


op(
    "transpose_out(Tensor qdata, Tensor block_scale, SymInt rows, SymInt cols, Tensor(a!) out, Tensor(b!) out_scale, "
    "str backend) -> ()",
    _transpose_out,
    nothing,
)
