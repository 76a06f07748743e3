"""The custom ops `torch.ops.halfbyte.*`: plain tensors, numbers and spec keys, so that compilers can look past them.

Each op has one implementation, which asks `choose` for a backend, and a fake that only computes shapes. A transient
operand is used by one GEMM and not kept: a backend that multiplies decoded operands returns its values (bf16, from the
reference fp32; no block scales) instead of codes. Outputs never
alias inputs or each other, as torch.library demands: an amax that the caller handed in, or that both orientations
share, comes back empty and dispatch.py puts the known one in its place. Defined with torch.library.Library, which costs
a third of what torch.library.custom_op costs per call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from halfbyte import reference
from halfbyte.layout import LINEAR, Blocks, ceil_div, matrix_shape, round_up, swizzled_numel
from halfbyte.ops.backends import NATIVE, REFERENCE, choose, warn_once
from halfbyte.ops.repeat import define
from halfbyte.rng import Draw
from halfbyte.spec import NVFP4, Spec, parse

_LIBRARY = torch.library.Library("halfbyte", "DEF")

_DRAW = "Tensor? rng, int stream, SymInt first_block, SymInt? blocks_per_row, Tensor? sign_rng, int sign_stream"
_OPERANDS = (
    "Tensor a, Tensor? a_scale, Tensor? a_amax, str a_key, str a_layout, "
    "Tensor b, Tensor? b_scale, Tensor? b_amax, str b_key, str b_layout, SymInt K"
)

_SCHEMAS = (
    f"quantize(Tensor x, str key, {_DRAW}, Tensor? amax, str scale_layout, str backend) -> (Tensor, Tensor, Tensor)",
    f"quantize_row_col(Tensor x, str row_key, str col_key, {_DRAW}, Tensor? row_amax, Tensor? col_amax, "
    "str scale_layout, bool row_transient, bool col_transient, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "amax(Tensor x, str backend) -> Tensor",
    "dequantize(Tensor qdata, Tensor block_scale, Tensor amax, str key, SymInt cols, ScalarType dtype, "
    "str scale_layout, str backend) -> Tensor",
    "transpose(Tensor qdata, Tensor block_scale, SymInt rows, SymInt cols, str backend) -> (Tensor, Tensor)",
    f"gemm_nt({_OPERANDS}, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor",
    f"gemm_nt_out({_OPERANDS}, Tensor? bias, Tensor(z!) out, bool accumulate, str backend) -> ()",
    f"gemm_nt_add({_OPERANDS}, Tensor addend, ScalarType out_dtype, str backend) -> Tensor",
    "decode(Tensor qdata, Tensor block_scale, Tensor amax, str key, SymInt cols, str scale_layout, str backend) "
    "-> Tensor",
)


def _backend(device: torch.device, backend: str) -> ModuleType:
    """Return the module that runs on `device`; both have the same functions."""
    if choose(device, backend or None) == REFERENCE:
        return reference
    from halfbyte.kernels import backend as kernels  # imports Triton, so only where it runs

    return kernels


def _fresh(amax: Tensor, given: Tensor | None) -> Tensor:
    return amax if given is None else amax.new_empty(0)


def quantize(
    x, key, rng, stream, first_block, blocks_per_row, sign_rng, sign_stream, amax, scale_layout, backend
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _backend(x.device, backend).quantize(
        x,
        parse(key),
        draw=_draw(rng, stream, first_block, blocks_per_row),
        sign_draw=_draw(sign_rng, sign_stream),
        amax=amax,
        scale_layout=scale_layout,
    )
    return blocks.qdata, blocks.block_scale, _fresh(blocks.amax, amax)


def quantize_row_col(
    x, row_key, col_key, rng, stream, first_block, blocks_per_row, sign_rng, sign_stream, row_amax, col_amax,
    scale_layout, row_transient, col_transient, backend,
) -> tuple[Tensor, ...]:  # fmt: skip
    row_spec, col_spec = (parse(key) if key else None for key in (row_key, col_key))
    decodes = choose(x.device, backend or None) != NATIVE
    transient = {"transient": (row_transient, col_transient)} if decodes else {}
    row, col = _backend(x.device, backend).quantize_row_col(
        x,
        row_spec,
        col_spec,
        draw=_draw(rng, stream, first_block, blocks_per_row),
        sign_draw=_draw(sign_rng, sign_stream),
        row_amax=row_amax,
        col_amax=col_amax,
        scale_layout=scale_layout,
        **transient,
    )
    empty = x.new_empty(0, dtype=torch.uint8)
    row_out = (empty, empty.clone(), x.new_empty(0, dtype=torch.float32)) if row is None else tuple(row)
    col_out = (empty.clone(), empty.clone(), x.new_empty(0, dtype=torch.float32)) if col is None else tuple(col)
    row_out = (*row_out[:2], _fresh(row_out[2], row_amax))
    shares = row_spec == col_spec and isinstance(row_spec, NVFP4) and row_spec.is_tile
    col_out = (*col_out[:2], col_out[2].new_empty(0) if shares else _fresh(col_out[2], col_amax))
    if col_out[2].numel() and col_out[2].data_ptr() == row_out[2].data_ptr():  # both unrotated: one amax
        col_out = (*col_out[:2], col_out[2].clone())
    return *row_out, *col_out


def amax(x: Tensor, backend: str) -> Tensor:
    return _backend(x.device, backend).finite_amax(x)


def dequantize(qdata, block_scale, amax, key, cols, dtype, scale_layout, backend) -> Tensor:
    blocks = Blocks(qdata, block_scale, amax)
    return _backend(qdata.device, backend).dequantize(blocks, parse(key), cols, dtype, scale_layout)


def transpose(qdata, block_scale, rows, cols, backend) -> tuple[Tensor, Tensor]:
    return _backend(qdata.device, backend).transpose(qdata, block_scale, rows, cols)


def gemm_nt(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, out_dtype, bias, backend
) -> Tensor:
    sides = _Side(a, a_scale, a_amax, a_key, a_layout), _Side(b, b_scale, b_amax, b_key, b_layout)
    return _gemm(*sides, K, backend, out_dtype, bias)


def gemm_nt_out(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, bias, out, accumulate, backend
) -> None:
    sides = _Side(a, a_scale, a_amax, a_key, a_layout), _Side(b, b_scale, b_amax, b_key, b_layout)
    _gemm(*sides, K, backend, out.dtype, bias, out, accumulate)


def gemm_nt_add(
    a, a_scale, a_amax, a_key, a_layout, b, b_scale, b_amax, b_key, b_layout, K, addend, out_dtype, backend
) -> Tensor:
    sides = _Side(a, a_scale, a_amax, a_key, a_layout), _Side(b, b_scale, b_amax, b_key, b_layout)
    return _gemm(*sides, K, backend, out_dtype, None, addend=addend)


def decode(qdata, block_scale, amax, key, cols, scale_layout, backend) -> Tensor:
    module = _backend(qdata.device, backend)
    return module.decode(Blocks(qdata, block_scale, amax), parse(key), cols, scale_layout).values


class _Side(NamedTuple):
    """One operand as the ops take it: codes, transient values (no scale), or plain (no key)."""

    data: Tensor
    scale: Tensor | None
    amax: Tensor | None
    key: str
    scale_layout: str

    @property
    def spec(self) -> Spec | None:
        """The spec of operands that hold codes."""
        return parse(self.key) if self.key and not self.data.is_floating_point() else None

    @property
    def blocks(self) -> Blocks:
        """Codes, scales and amax of operands that hold codes."""
        assert self.scale is not None and self.amax is not None, "only transient and plain operands lack scales"
        return Blocks(self.data, self.scale, self.amax)


def _gemm(a: _Side, b: _Side, K: int, backend: str, out_dtype, bias, out=None, accumulate=False, addend=None) -> Tensor:
    """Run gemm_nt on the backend of the operands; a GEMM that does not run natively is emulated, and says so once."""
    options: Any = {"out_dtype": out_dtype, "bias": bias, "out": out, "accumulate": accumulate}
    with torch.autocast(a.data.device.type, enabled=False):
        if choose(a.data.device, backend or None) == NATIVE and _runs_natively(a, b):
            from halfbyte.kernels.gemm import native

            packed = [native.Packed(side.blocks, parse(side.key), K, side.scale_layout) for side in (a, b)]
            if addend is not None:
                return native.gemm_nt(*packed, out=addend.float().clone(), accumulate=True).to(out_dtype)
            return native.gemm_nt(*packed, **options)
        module = _backend(a.data.device, backend)
        decoded = (_decode(module, side, K, bool(other.key)) for side, other in ((a, b), (b, a)))
        if addend is not None:
            return module.gemm_nt_add(*decoded, addend, out_dtype=out_dtype)
        return module.gemm_nt(*decoded, **options)


def _runs_natively(a: _Side, b: _Side) -> bool:
    from halfbyte.kernels.gemm import native_route

    way = native_route.ways(a.spec, b.spec, a.data.device)
    for _, reason in way.instead:
        warn_once(f"a GEMM is emulated in bf16: {reason}")
    return way.kernel == native_route.NATIVE


def _decode(module: ModuleType, side: _Side, K: int, padded: bool) -> Any:
    """Return one operand as the backend's GEMM reads it; padding takes part only if both operands have it."""
    if not side.key:
        return module.plain(side.data)
    if side.data.is_floating_point():
        decoded = module.from_values(side.data, side.amax, parse(side.key))
    else:
        decoded = module.decode(side.blocks, parse(side.key), K, side.scale_layout)
    return decoded if padded else decoded._replace(values=decoded.values[:, :K])


def _draw(base: Tensor | None, stream: int, first_block: int = 0, blocks_per_row: int | None = None) -> Draw | None:
    return None if base is None else Draw(base, stream, first_block, blocks_per_row)


def _blocks_like(x: Tensor, rows: int, cols: int, spec: Spec, scale_layout: str, given: Tensor | None):
    """Return empty (qdata, block_scale, amax) of a [rows, cols] operand."""
    padded = round_up(cols, spec.alignment)
    blocks = ceil_div(padded, spec.block_length)
    nvfp4 = isinstance(spec, NVFP4)
    qdata = x.new_empty(rows, padded // 2 if nvfp4 else padded, dtype=torch.uint8)
    shape = (rows, blocks) if scale_layout == LINEAR else (swizzled_numel(rows, blocks),)
    scale = x.new_empty(shape, dtype=torch.uint8)
    by_row = nvfp4 and spec.outer == "row"
    amax_shape = (0,) if given is not None or not nvfp4 else (rows,) if by_row else ()
    return qdata, scale, x.new_empty(amax_shape, dtype=torch.float32)


def _fake_quantize(x, key, *rest):
    amax, scale_layout, _ = rest[-3:]
    return _blocks_like(x, *matrix_shape(x.shape), parse(key), scale_layout, amax)


def _fake_quantize_row_col(x, row_key, col_key, *rest):
    row_amax, col_amax, scale_layout, *transient, backend = rest[-6:]
    rows, cols = matrix_shape(x.shape)
    out = []
    chosen = choose(x.device, backend or None)
    shares = bool(row_key) and row_key == col_key and parse(row_key).is_tile
    turned = chosen == REFERENCE and not shares  # whose values of x.T lie in memory as x does
    sides = ((row_key, (rows, cols), row_amax, False), (col_key, (cols, rows), col_amax, turned))
    for (key, shape, given, turn), is_transient in zip(sides, transient, strict=True):
        if not key:
            out += [x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.uint8)]
            out.append(x.new_empty(0, dtype=torch.float32))
        else:
            blocks = _blocks_like(x, *shape, parse(key), scale_layout, given)
            if is_transient and chosen != NATIVE:
                padded = shape[0], round_up(shape[1], parse(key).alignment)
                dtype = torch.float32 if chosen == REFERENCE else torch.bfloat16
                values = x.new_empty(padded[::-1] if turn else padded, dtype=dtype)
                blocks = (values.T if turn else values, x.new_empty(0, dtype=torch.uint8), blocks[2])
            out += blocks
    if shares:
        out[5] = x.new_empty(0, dtype=torch.float32)
    return tuple(out)


def _fake_amax(x, backend):
    return x.new_empty((), dtype=torch.float32)


def _fake_dequantize(qdata, block_scale, amax, key, cols, dtype, scale_layout, backend):
    return qdata.new_empty(qdata.shape[0], cols, dtype=dtype)


def _fake_transpose(qdata, block_scale, rows, cols, backend):
    blocks = ceil_div(rows, 16)
    return qdata.new_empty(cols, blocks * 8), block_scale.new_empty(cols, blocks)


def _fake_gemm_nt(a, *rest):
    b, out_dtype = rest[4], rest[10]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _fake_gemm_nt_out(*arguments):
    return None


def _fake_gemm_nt_add(a, *rest):
    b, out_dtype = rest[4], rest[11]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _fake_decode(qdata, block_scale, amax, key, cols, scale_layout, backend):
    padded = round_up(cols, parse(key).alignment)
    reference = choose(qdata.device, backend or None) == REFERENCE
    return qdata.new_empty(qdata.shape[0], padded, dtype=torch.float32 if reference else torch.bfloat16)


_FAKES = {
    quantize: _fake_quantize,
    quantize_row_col: _fake_quantize_row_col,
    amax: _fake_amax,
    dequantize: _fake_dequantize,
    transpose: _fake_transpose,
    gemm_nt: _fake_gemm_nt,
    gemm_nt_out: _fake_gemm_nt_out,
    gemm_nt_add: _fake_gemm_nt_add,
    decode: _fake_decode,
}

for _schema, (_function, _fake) in zip(_SCHEMAS, _FAKES.items(), strict=True):
    define(_LIBRARY, _schema, _function, _fake)


@register_flop_formula([torch.ops.halfbyte.gemm_nt, torch.ops.halfbyte.gemm_nt_out, torch.ops.halfbyte.gemm_nt_add])
def _gemm_flops(a_shape, a_scale, a_amax, a_key, a_layout, b_shape, *rest, out_shape=None, **named) -> int:
    K = rest[4]
    return 2 * a_shape[0] * b_shape[0] * K
