"""The grouped operations on plain tensors: tokens in groups and the weights of experts (docs/moe.md).

`offsets` is an integer tensor [E] on x's device with the cumulative ends of the groups, as torch's grouped GEMM takes
it; 3-D data [E, rows, cols] is one matrix per group and takes None. The shape of every output follows from the shapes
of the inputs, never from the sizes of the groups, so no op has to read `offsets` on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.layout import LINEAR, Blocks, EndsOfGroups, GroupEnds, Operand, as_offsets, grouped_shapes, stored_shapes
from halfbyte.ops.backends import NATIVE, REFERENCE, TRITON, choose, stored_spec, warn_once
from halfbyte.ops.define import OPERANDS, draw_of, empty_like, implementation, nothing, op, place_arguments, spec_of
from halfbyte.ops.gemm import Rows, check_operands, operand, pair_arguments
from halfbyte.ops.quantization import QUANTIZABLE, both_blocks, both_fake, check_sides, op_arguments, outputs
from halfbyte.ops.repeat import call_op, is_past_ops
from halfbyte.rng import Draw
from halfbyte.sides import Side, both_sides, share_tiles, shared_draws
from halfbyte.spec import NVFP4, Spec


def check_offsets(offsets: object, x: Tensor) -> None:
    """Raise unless `offsets` can name groups of x; reads no value."""
    if not isinstance(offsets, Tensor):
        raise TypeError(f"offsets={offsets!r}: give an int32 tensor with the cumulative ends of the groups")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets.dtype={offsets.dtype}: give int32 (or int64)")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"offsets.shape={tuple(offsets.shape)}: give one cumulative end per group, shape [E], E >= 1")
    if offsets.device != x.device:
        raise ValueError(f"offsets.device={offsets.device}: the tokens are on {x.device}; make offsets there")


def _check_groups(x: Tensor, offsets: Tensor | None) -> None:
    if x.dtype not in QUANTIZABLE:
        raise TypeError(f"x.dtype={x.dtype}: quantization takes bfloat16, float16 or float32; cast x first")
    if x.dim() != (3 if offsets is None else 2):
        raise ValueError(f"x.shape={tuple(x.shape)}: give tokens [M, C] with offsets, or weights [E, N, K] without")
    if offsets is not None:
        check_offsets(offsets, x)
    elif x.shape[0] == 0:
        raise ValueError(f"x.shape={tuple(x.shape)}: give the weights of at least one expert")


def in_one_pass(offsets: Tensor, base: Tensor | None = None) -> EndsOfGroups:
    """Return the ends of groups for operations of a pass that `run` records: kernels then plan these groups once.

    Args:
        offsets: integer [E].
        base: int64 [2] that the pass wants copied, see `copied_base`; None for none.
    """
    return GroupEnds(offsets, base) if is_past_ops() and emulates(offsets.device) else offsets


def copied_base(groups: EndsOfGroups, base: Tensor) -> Tensor:
    """Return a copy of a base: that which a plan of the pass has brought, where one has."""
    brought = groups.copied if isinstance(groups, GroupEnds) else None
    return base.clone() if brought is None else brought


def emulates(device: torch.device) -> bool:
    """Whether GEMMs on `device` multiply decoded values by Triton kernels."""
    return choose(device, None) == TRITON


# What torch.compiler.assume_constant_result sets, without importing the compiler: tracing cannot follow the answer.
emulates._dynamo_marked_constant = True  # type: ignore[attr-defined]


def grouped_quantize_row_col(
    x: Tensor, offsets: EndsOfGroups | None, row: Side | None, col: Side | None, backend: str | None = None
) -> tuple[Blocks | None, Blocks | None]:
    """Return (quantize(x_g), quantize(x_g.T)) of every group, joined; None where nothing is asked for.

    Args:
        x: tokens [M, C] with offsets, or expert weights [E, N, K] without.
        row, col: of `both_sides`, as in `quantize_row_col`; amaxes are fp32 [E].

    Raises:
        TypeError: x is not bf16, fp16 or fp32, or offsets no integer tensor.
        ValueError: x or offsets have the wrong shape, or a draw is missing or names a shard.
    """
    _check_groups(x, None if offsets is None else as_offsets(offsets))
    check_sides((row, col), x.device, backend)
    draw, sign_draw = shared_draws((row, col))
    for place in (draw, sign_draw):
        if place is not None and (place.first_block or place.blocks_per_row is not None):
            raise ValueError(f"rng.first_block={place.first_block}: a grouped operand is whole; quantize shards apart")
    places = (*place_arguments(draw), *place_arguments(sign_draw))
    keys, amaxes, rest = op_arguments((row, col))
    out = call_op(
        torch.ops.halfbyte.grouped_quantize_row_col, x, offsets, *keys, *places, *amaxes, *rest, backend or ""
    )
    return both_blocks(out, (row, col))


def _grouped_quantize_row_col(
    x, offsets, row_key, col_key, rng, stream, sign_rng, sign_stream, row_amax, col_amax, scale_layout, row_transient,
    col_transient, backend,
) -> tuple[Tensor, ...]:  # fmt: skip
    specs = spec_of(row_key), spec_of(col_key)
    decodes = choose(x.device, backend or None) == TRITON  # native GEMMs read codes
    asked = both_sides(
        *specs,
        draw=draw_of(rng, stream),
        sign_draw=draw_of(sign_rng, sign_stream),
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
        transient=(decodes and row_transient, decodes and col_transient),
    )
    both = implementation(x.device, backend).grouped_quantize_row_col(x, offsets, *asked)
    return outputs(x, both, (row_amax, col_amax), share_tiles(*specs))


def grouped_row_col_amax(
    x: Tensor,
    offsets: Tensor,
    row_spec: Spec | None,
    col_spec: Spec | None,
    sign_draw: Draw | None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the amaxes of every group of tokens along rows and along columns, fp32 [E], empty where there is none.

    It quantizes in the cheapest way and keeps no code: kernels find the amaxes of groups only on their way to codes.

    Args:
        x: tokens [M, C].
        offsets: integer [E], as for `grouped_quantize_row_col`.
        row_spec, col_spec: NVFP4 with one amax per tensor, or None.
        sign_draw: the place of fresh signs.

    Raises:
        TypeError: x is not bf16, fp16 or fp32, or offsets no integer tensor.
        ValueError: x or offsets have the wrong shape.
    """
    _check_groups(x, offsets)
    keys = ["" if spec is None else spec.key for spec in (row_spec, col_spec)]
    arguments = x, offsets, *keys, *place_arguments(sign_draw), backend or ""
    return call_op(torch.ops.halfbyte.grouped_row_col_amax, *arguments)


def _grouped_row_col_amax(x, offsets, row_key, col_key, sign_rng, sign_stream, backend) -> tuple[Tensor, Tensor]:
    bare = [spec and NVFP4(rotation=spec.rotation) for spec in (spec_of(row_key), spec_of(col_key))]
    sides = both_sides(bare[0], bare[1], sign_draw=draw_of(sign_rng, sign_stream))
    both = implementation(x.device, backend).grouped_quantize_row_col(x, offsets, *sides)
    none = x.new_empty(0, dtype=torch.float32)
    row, col = (none if blocks is None else blocks.amax for blocks in both)
    return row, col.clone() if col.data_ptr() == row.data_ptr() else col


def _grouped_row_col_amax_fake(x, offsets, row_key, col_key, *rest):
    return tuple([x.new_empty(offsets.shape[0] if key else 0, dtype=torch.float32) for key in (row_key, col_key)])


op(
    "grouped_row_col_amax(Tensor x, Tensor offsets, str row_key, str col_key, Tensor? sign_rng, int sign_stream, "
    "str backend) -> (Tensor, Tensor)",
    _grouped_row_col_amax,
    _grouped_row_col_amax_fake,
    takes_parameters=True,
)


def _shapes(x: Tensor, groups: int, spec: Spec, scale_layout: str, contraction: bool) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one orientation of x [M, C] or [E, N, K]."""
    rows, cols = (x.shape[-1], x.shape[-2]) if contraction else (x.shape[-2], x.shape[-1])
    if x.dim() == 2:
        return grouped_shapes((rows, cols), groups, spec, scale_layout, contraction=contraction)
    each = stored_shapes(rows, cols, spec, scale_layout)
    return (groups, *each.qdata), (groups, *each.block_scale), (groups, *each.amax) if spec.format.has_amax else (0,)


def _grouped_quantize_row_col_fake(x, offsets, row_key, col_key, *rest):
    row_amax, col_amax, scale_layout, *transient, backend = rest[-6:]
    decodes, specs = choose(x.device, backend or None) == TRITON, (spec_of(row_key), spec_of(col_key))
    groups = x.shape[0] if offsets is None else offsets.shape[0]

    def one(spec: Spec, given: Tensor | None, is_col: bool, is_transient: bool) -> list[Tensor]:
        blocks = empty_like(x, _shapes(x, groups, spec, scale_layout, is_col))
        if is_transient and decodes:
            columns = blocks[0].shape[-1] * spec.format.codes_per_byte
            values = x.new_empty((*blocks[0].shape[:-1], columns), dtype=torch.bfloat16)
            blocks[:2] = [values, x.new_empty(0, dtype=torch.uint8)]
        if given is not None:
            blocks[2] = x.new_empty(0, dtype=torch.float32)
        return blocks

    return both_fake(x, specs, (row_amax, col_amax), transient, one)


op(
    "grouped_quantize_row_col(Tensor x, Tensor? offsets, str row_key, str col_key, Tensor? rng, int stream, "
    "Tensor? sign_rng, int sign_stream, Tensor? row_amax, Tensor? col_amax, str scale_layout, bool row_transient, "
    "bool col_transient, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _grouped_quantize_row_col,
    _grouped_quantize_row_col_fake,
)


def grouped_dequantize(
    operand: Operand, offsets: Tensor | None, dtype: torch.dtype = torch.float32, backend: str | None = None
) -> Tensor:
    """Return the values of an operand with groups along its rows, [M, cols] or, without offsets, [E, rows, cols]."""
    return call_op(
        torch.ops.halfbyte.grouped_dequantize,
        *operand.blocks,
        offsets,
        operand.spec.key,
        operand.cols,
        dtype,
        operand.scale_layout,
        backend or "",
    )


def _grouped_dequantize(qdata, block_scale, amax, offsets, key, cols, dtype, scale_layout, backend) -> Tensor:
    spec = stored_spec(key, qdata.device, backend)
    quantized = Operand(Blocks(qdata, block_scale, amax), spec, cols, scale_layout)
    return implementation(qdata.device, backend).grouped_dequantize(quantized, offsets, dtype)


def _grouped_dequantize_fake(qdata, block_scale, amax, offsets, key, cols, dtype, scale_layout, backend):
    return qdata.new_empty((*qdata.shape[:-1], cols), dtype=dtype)


op(
    "grouped_dequantize(Tensor qdata, Tensor block_scale, Tensor amax, Tensor? offsets, str key, SymInt cols, "
    "ScalarType dtype, str scale_layout, str backend) -> Tensor",
    _grouped_dequantize,
    _grouped_dequantize_fake,
)


def grouped_decode(operand: Operand, backend: str | None = None) -> Operand:
    """Return experts' codes [E, rows, bytes] as a transient operand: bf16 element * block_scale, without padding.

    Only the kernels' `grouped_gemm_nt` reads it.
    """
    blocks, spec, cols, scale_layout = operand
    assert scale_layout == LINEAR, "experts that are kept for the backward have LINEAR scales"
    values = call_op(torch.ops.halfbyte.grouped_decode, *blocks, spec.key, cols, backend or "")
    return Operand(blocks.decoded(values), spec, cols)


def _grouped_decode(qdata, block_scale, amax, key, cols, backend) -> Tensor:
    assert choose(qdata.device, backend or None) != REFERENCE, "only kernels take decoded values"
    module = implementation(qdata.device, backend)
    spec = stored_spec(key, qdata.device, backend)
    values = module.grouped_values(Blocks(qdata, block_scale, amax), spec, None, cols)
    return values[..., :cols].contiguous() if values.shape[-1] > cols else values


def _grouped_decode_fake(qdata, block_scale, amax, key, cols, backend):
    return qdata.new_empty((*qdata.shape[:-1], cols), dtype=torch.bfloat16)


op(
    "grouped_decode(Tensor qdata, Tensor block_scale, Tensor amax, str key, SymInt cols, str backend) -> Tensor",
    _grouped_decode,
    _grouped_decode_fake,
)


def grouped_gemm_nt(
    a: Rows,
    b: Rows,
    offsets: EndsOfGroups,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return a_g @ b_g.T of every group, each rounded once to the output dtype.

    Args:
        a: tokens [M, K]; or [R, K] with the groups along K.
        b: experts [E, N, K]; or [C, K] with the groups along K.
        out: [M, N] or [E, R, C] to write into.
        accumulate: add to what `out` holds.

    Returns:
        [M, N], rows behind the last group zero; or [E, R, C], zero for an empty group.
    """
    operands = (*pair_arguments(a, b), offsets)
    if out is None:
        return call_op(torch.ops.halfbyte.grouped_gemm_nt, *operands, out_dtype, backend or "")
    call_op(torch.ops.halfbyte.grouped_gemm_nt_out, *operands, out, accumulate, backend or "")
    return out


def grouped_gemm_nt_batch_invariant(
    a: Rows, b: Rows, offsets: EndsOfGroups, *, out_dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> Tensor:
    """Return a_g @ b_g.T of quantized tokens [M, K] and experts [E, N, K] as `gemm_nt_batch_invariant` multiplies."""
    operands = (*pair_arguments(a, b), offsets)
    return call_op(torch.ops.halfbyte.grouped_gemm_nt_batch_invariant, *operands, out_dtype, backend or "")


def _by_torch(
    a: Rows, b: Rows, offsets: Tensor, out_dtype: torch.dtype, backend: str, batch_invariant: bool
) -> Tensor | None:
    """Return the product where torch has it, or None where it is emulated; on FP4 tensor cores codes say why, once."""
    chosen, is_plain = choose(offsets.device, backend or None), isinstance(a, Tensor) and isinstance(b, Tensor)
    if chosen == REFERENCE or not (chosen == NATIVE or is_plain):
        return None
    from halfbyte.kernels.gemm import grouped, grouped_native, native_route

    way = native_route.choose_grouped_way(a, b, offsets, out_dtype, batch_invariant)
    if way.kernel == native_route.GROUPED_NATIVE:
        assert isinstance(a, Operand) and isinstance(b, Operand), "tensor cores multiply codes"
        return grouped_native.native_grouped_gemm_nt(a, b, offsets, a.cols)
    if way.kernel == native_route.GROUPED_TORCH:
        assert isinstance(a, Tensor) and isinstance(b, Tensor), "plain operands are tensors"
        return grouped.plain_grouped_gemm(a, b, offsets)
    if not is_plain:
        warn_once(f"a grouped GEMM is emulated in bf16: {dict(way.instead)[native_route.GROUPED_NATIVE]}")
    return None


def _grouped_gemm_nt(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, offsets, out_dtype, backend
) -> Tensor:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    return _grouped_product(left, right, offsets, K, out_dtype, backend, False)


def _grouped_gemm_nt_batch_invariant(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, offsets, out_dtype, backend
) -> Tensor:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    return _grouped_product(left, right, offsets, K, out_dtype, backend, True)


def _grouped_product(
    a: Rows, b: Rows, offsets: EndsOfGroups, K: int, out_dtype: torch.dtype, backend: str, batch_invariant: bool
) -> Tensor:
    ends = as_offsets(offsets)
    check_operands((a, b), ends.device, backend)
    with torch.autocast(ends.device.type, enabled=False):
        product = _by_torch(a, b, ends, out_dtype, backend, batch_invariant)
        if product is not None:
            return product
        left, right = (side.blocks.qdata if isinstance(side, Operand) else side for side in (a, b))
        out = left.new_empty(_product_shape(left, right, ends), dtype=out_dtype)
        module = implementation(ends.device, backend)
        run = module.grouped_gemm_nt_batch_invariant if batch_invariant else module.grouped_gemm_nt
        return run(a, b, offsets, K, out)


def _grouped_gemm_nt_out(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, offsets, out, accumulate, backend
) -> None:
    left, right = operand(a, a_scale, a_amax, a_key, a_layout, K), operand(b, b_scale, b_amax, b_key, b_layout, K)
    check_operands((left, right), a.device, backend)
    module = implementation(a.device, backend)
    with torch.autocast(a.device.type, enabled=False):
        module.grouped_gemm_nt(left, right, offsets, K, out, accumulate=accumulate)


def _product_shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """Return [M, N] of tokens and experts, or [E, R, C] of two operands with groups along the contraction."""
    return (a.shape[0], b.shape[1]) if b.dim() == 3 else (offsets.shape[0], a.shape[0], b.shape[0])


def _grouped_gemm_nt_fake(a, *rest):
    b, offsets, out_dtype = rest[4], rest[10], rest[11]
    return a.new_empty(_product_shape(a, b, offsets), dtype=out_dtype)


def _flops(a_shape, a_scale, a_amax, a_key, a_layout, b_shape, *rest, out_shape=None, **named) -> int:
    """Every token counts once; groups that split the contraction share its K tokens."""
    K = rest[4]
    return 2 * a_shape[0] * K * b_shape[1 if len(b_shape) == 3 else 0]


op(
    f"grouped_gemm_nt({OPERANDS}, Tensor offsets, ScalarType out_dtype, str backend) -> Tensor",
    _grouped_gemm_nt,
    _grouped_gemm_nt_fake,
    _flops,
)
op(
    f"grouped_gemm_nt_batch_invariant({OPERANDS}, Tensor offsets, ScalarType out_dtype, str backend) -> Tensor",
    _grouped_gemm_nt_batch_invariant,
    _grouped_gemm_nt_fake,
    _flops,
)
op(
    f"grouped_gemm_nt_out({OPERANDS}, Tensor offsets, Tensor(z!) out, bool accumulate, str backend) -> ()",
    _grouped_gemm_nt_out,
    nothing,
    _flops,
)
