"""The custom ops `torch.ops.halfbyte.grouped_*`, defined like those of library.py.

The shape of every output follows from the shapes of the inputs, never from the sizes of the groups, so no op has to
read `offsets` on the host. 3-D data is one matrix per expert and needs no offsets. A transient operand may come back as
decoded values, as in library.py: bf16 in the place of qdata, no block scales.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from halfbyte import reference
from halfbyte.layout import LINEAR, Blocks, GroupedOperand, ceil_div, grouped_shapes, round_up, swizzled_numel
from halfbyte.ops.backends import NATIVE, REFERENCE, TRITON, choose, warn_once
from halfbyte.ops.repeat import define
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec, parse

_LIBRARY = torch.library.Library("halfbyte", "FRAGMENT")

_OPERANDS = (
    "Tensor a, Tensor? a_scale, Tensor? a_amax, str a_key, str a_layout, "
    "Tensor b, Tensor? b_scale, Tensor? b_amax, str b_key, str b_layout, SymInt K, Tensor offsets"
)

_SCHEMAS = (
    "grouped_quantize_row_col(Tensor x, Tensor? offsets, str row_key, str col_key, Tensor? rng, int stream, "
    "Tensor? sign_rng, int sign_stream, Tensor? row_amax, Tensor? col_amax, str scale_layout, bool row_transient, "
    "bool col_transient, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "grouped_dequantize(Tensor qdata, Tensor block_scale, Tensor amax, Tensor? offsets, str key, SymInt cols, "
    "ScalarType dtype, str scale_layout, str backend) -> Tensor",
    "grouped_decode(Tensor qdata, Tensor block_scale, Tensor amax, str key, SymInt cols, str backend) -> Tensor",
    f"grouped_gemm_nt({_OPERANDS}, ScalarType out_dtype, str backend) -> Tensor",
    f"grouped_gemm_nt_out({_OPERANDS}, Tensor(z!) out, bool accumulate, str backend) -> ()",
)

GROUPED_KERNELS = frozenset({"grouped_quantize_row_col", "grouped_dequantize", "grouped_gemm_nt"})
"""Ops of this file that `halfbyte.kernels.backend` has; the others run on the reference, which reads the offsets.

Quantization there may hand over decoded values only once the GEMM, which reads them, is there too.
"""


def _backend(name: str, device: torch.device, backend: str) -> ModuleType:
    chosen = choose(device, backend or None)
    if chosen == REFERENCE:
        return reference
    if name not in GROUPED_KERNELS:
        if backend:
            raise ValueError(f"backend={backend!r}: {name} has no kernel there; use backend=None or 'reference'")
        return reference
    from halfbyte.kernels import backend as kernels  # imports Triton, so only where it runs

    return kernels


def _draw(base: Tensor | None, stream: int) -> Draw | None:
    return None if base is None else Draw(base, stream)


def _outputs(blocks: Blocks | None, x: Tensor, given: Tensor | None, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the op returns of one orientation: empty tensors for none, and for an amax known to the caller."""
    if blocks is None:
        empty = x.new_empty(0, dtype=torch.uint8)
        return empty, empty.clone(), x.new_empty(0, dtype=torch.float32)
    amax = blocks.amax.new_empty(0) if given is not None or shared else blocks.amax
    return blocks.qdata, blocks.block_scale, amax


def _shares(row_key: str, col_key: str) -> bool:
    return bool(row_key) and row_key == col_key and parse(row_key).is_tile


def grouped_quantize_row_col(
    x, offsets, row_key, col_key, rng, stream, sign_rng, sign_stream, row_amax, col_amax, scale_layout, row_transient,
    col_transient, backend,
) -> tuple[Tensor, ...]:  # fmt: skip
    row_spec, col_spec = (parse(key) if key else None for key in (row_key, col_key))
    module = _backend("grouped_quantize_row_col", x.device, backend)
    # Native GEMMs read codes.
    decodes = choose(x.device, backend or None) == TRITON
    transient = {"transient": (row_transient, col_transient)} if decodes and module is not reference else {}
    row, col = module.grouped_quantize_row_col(
        x,
        offsets,
        row_spec,
        col_spec,
        draw=_draw(rng, stream),
        sign_draw=_draw(sign_rng, sign_stream),
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
        **transient,
    )
    shared = _shares(row_key, col_key)
    return *_outputs(row, x, row_amax, False), *_outputs(col, x, col_amax, shared)


def _without_padding(values: Tensor, cols: int) -> Tensor:
    return values[..., :cols].contiguous() if values.shape[-1] > cols else values


def grouped_dequantize(qdata, block_scale, amax, offsets, key, cols, dtype, scale_layout, backend) -> Tensor:
    module = _backend("grouped_dequantize", qdata.device, backend)
    operand = module.GroupedOperand(Blocks(qdata, block_scale, amax), parse(key), scale_layout)
    return module.grouped_dequantize(operand, offsets, cols, dtype)


def grouped_decode(qdata, block_scale, amax, key, cols, backend) -> Tensor:
    module = _backend("grouped_gemm_nt", qdata.device, backend)
    assert module is not reference, "only kernels take decoded values"
    values = module.grouped_values(Blocks(qdata, block_scale, amax), parse(key), None, cols)
    return _without_padding(values, cols)


def _operand(module: ModuleType, data, scale, amax, key: str, scale_layout: str):
    if not key:
        return module.GroupedOperand(data)
    return module.GroupedOperand(Blocks(data, scale, amax), parse(key), scale_layout)


def _by_torch(
    a: GroupedOperand, b: GroupedOperand, offsets: Tensor, K: int, out_dtype: torch.dtype, backend: str
) -> Tensor | None:
    """Return the product where torch has it, or None where it is emulated; on FP4 tensor cores codes say why, once."""
    from halfbyte.kernels.gemm import grouped, grouped_native, native_route

    native, is_plain = choose(offsets.device, backend or None) == NATIVE, a.spec is None and b.spec is None
    if not native and not is_plain:
        return None
    way = native_route.grouped_ways(a, b, offsets, out_dtype)
    if way.kernel == native_route.GROUPED_NATIVE:
        return grouped_native.grouped_gemm_nt(a, b, offsets, K)
    if way.kernel == native_route.GROUPED_TORCH:
        assert isinstance(a.data, Tensor) and isinstance(b.data, Tensor), "plain operands are tensors"
        return grouped.plain_grouped_gemm(a.data, b.data, offsets)
    if not is_plain:
        warn_once(f"a grouped GEMM is emulated in bf16: {dict(way.instead)[native_route.GROUPED_NATIVE]}")
    return None


def grouped_gemm_nt(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, offsets, out_dtype, backend
) -> Tensor:
    module = _backend("grouped_gemm_nt", a.device, backend)
    if module is not reference:
        with torch.autocast(a.device.type, enabled=False):
            left = _operand(module, a, a_scale, a_amax, a_key, a_layout)
            right = _operand(module, b, b_scale, b_amax, b_key, b_layout)
            product = _by_torch(left, right, offsets, K, out_dtype, backend)
        if product is not None:
            return product
    out = a.new_empty(_product_shape(a, b, offsets), dtype=out_dtype)
    operands = (a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout)
    grouped_gemm_nt_out(*operands, K, offsets, out, False, backend)
    return out


def grouped_gemm_nt_out(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, offsets, out, accumulate, backend
) -> None:
    module = _backend("grouped_gemm_nt", a.device, backend)
    with torch.autocast(a.device.type, enabled=False):
        module.grouped_gemm_nt(
            _operand(module, a, a_scale, a_amax, a_key, a_layout),
            _operand(module, b, b_scale, b_amax, b_key, b_layout),
            offsets,
            K,
            out,
            accumulate=accumulate,
        )


def _product_shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """Return [M, N] of tokens and experts, or [E, R, C] of two operands with groups along the contraction."""
    return (a.shape[0], b.shape[1]) if b.dim() == 3 else (offsets.shape[0], a.shape[0], b.shape[0])


def _empty_blocks(x: Tensor, groups: int, spec: Spec, scale_layout: str, contraction: bool) -> list[Tensor]:
    """Return empty (qdata, block_scale, amax) of one orientation of x [M, C] or [E, N, K]."""
    rows, cols = (x.shape[-1], x.shape[-2]) if contraction else (x.shape[-2], x.shape[-1])
    dtypes = (torch.uint8, torch.uint8, torch.float32)
    if x.dim() == 2:
        shapes = tuple(grouped_shapes((rows, cols), groups, spec, scale_layout, contraction=contraction))
    else:
        padded = round_up(cols, spec.alignment)
        blocks, nvfp4 = ceil_div(padded, spec.block_length), isinstance(spec, NVFP4)
        scale = (rows, blocks) if scale_layout == LINEAR else (swizzled_numel(rows, blocks),)
        by_row = isinstance(spec, NVFP4) and spec.outer == "row"
        amax = ((groups, rows) if by_row else (groups,)) if nvfp4 else (0,)
        shapes = ((groups, rows, padded // 2 if nvfp4 else padded), (groups, *scale), amax)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _fake_grouped_quantize_row_col(x, offsets, row_key, col_key, *rest):
    row_amax, col_amax, scale_layout, *transient, backend = rest[-6:]
    decodes = choose(x.device, backend or None) == TRITON
    groups = x.shape[0] if offsets is None else offsets.shape[0]
    out: list[Tensor] = []
    sides = ((row_key, row_amax, False), (col_key, col_amax, True))
    for (key, given, contraction), is_transient in zip(sides, transient, strict=True):
        if not key:
            out += [x.new_empty(0, dtype=dtype) for dtype in (torch.uint8, torch.uint8, torch.float32)]
            continue
        blocks = _empty_blocks(x, groups, parse(key), scale_layout, contraction)
        if is_transient and decodes:
            columns = blocks[0].shape[-1] * (2 if isinstance(parse(key), NVFP4) else 1)
            values = x.new_empty((*blocks[0].shape[:-1], columns), dtype=torch.bfloat16)
            blocks[:2] = [values, x.new_empty(0, dtype=torch.uint8)]
        out += blocks
        if given is not None or (contraction and _shares(row_key, col_key)):
            out[-1] = x.new_empty(0, dtype=torch.float32)
    return tuple(out)


def _fake_grouped_dequantize(qdata, block_scale, amax, offsets, key, cols, dtype, scale_layout, backend):
    return qdata.new_empty((*qdata.shape[:-1], cols), dtype=dtype)


def _fake_grouped_decode(qdata, block_scale, amax, key, cols, backend):
    return qdata.new_empty((*qdata.shape[:-1], cols), dtype=torch.bfloat16)


def _fake_grouped_gemm_nt(a, *rest):
    b, offsets, out_dtype = rest[4], rest[10], rest[11]
    return a.new_empty(_product_shape(a, b, offsets), dtype=out_dtype)


def _fake_grouped_gemm_nt_out(*arguments):
    return None


_FAKES = {
    grouped_quantize_row_col: _fake_grouped_quantize_row_col,
    grouped_dequantize: _fake_grouped_dequantize,
    grouped_decode: _fake_grouped_decode,
    grouped_gemm_nt: _fake_grouped_gemm_nt,
    grouped_gemm_nt_out: _fake_grouped_gemm_nt_out,
}

for _schema, (_function, _fake) in zip(_SCHEMAS, _FAKES.items(), strict=True):
    define(_LIBRARY, _schema, _function, _fake)


@register_flop_formula([torch.ops.halfbyte.grouped_gemm_nt, torch.ops.halfbyte.grouped_gemm_nt_out])
def _grouped_gemm_flops(a_shape, a_scale, a_amax, a_key, a_layout, b_shape, *rest, out_shape=None, **named) -> int:
    """Every token counts once; groups that split the contraction share its K tokens."""
    K = rest[4]
    return 2 * a_shape[0] * K * b_shape[1 if len(b_shape) == 3 else 0]
