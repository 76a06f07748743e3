"""gemm_nt beside torch's bf16 product of the decoded operands, timed in turn; errors against fp64 of the operands."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from bench.measure import against_bf16, random_matrix
from bench.registry import Bar, Case, Outcome, Setting, Shape, Unequal
from halfbyte import ops
from halfbyte.layout import Blocks
from halfbyte.sides import Epilogue, Side
from halfbyte.spec import NVFP4
from halfbyte.verify.compare import relative_error
from halfbyte.verify.kernels import TOLERANCE

SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (16384, 4096, 4096), (8192, 14336, 4096))
"""M, N, K."""

SMALL = (96, 128, 160)
MODULES = {"reference": "halfbyte.reference", "triton": "halfbyte.kernels.backend"}


def product(setting: Setting, shape: Shape, *, decode_included: bool) -> Outcome:
    """Check and time an activation (1x16) times a weight (16x16)."""
    M, N, K = shape
    x_MK, w_NK = (random_matrix((n, K), setting.device, seed) for seed, n in enumerate((M, N)))
    specs = NVFP4(), NVFP4(block=(16, 16))
    sides = [
        ops.Operand(ops.quantize(t, Side(s), backend="reference"), s, K)
        for t, s in zip((x_MK, w_NK), specs, strict=True)
    ]
    exact_MN = _exact(sides)
    checked = []
    for dtype, limit in TOLERANCE.items():
        run = _from_codes(sides, setting, dtype) if decode_included else _decoded(sides, setting, dtype)
        error = relative_error(run(), exact_MN)
        if not error <= limit:
            raise Unequal(f"relative error {error:.2e} to {dtype}, at most {limit:g}")
        checked.append(f"relative error {error:.1e} to {str(dtype).removeprefix('torch.')}, at most {limit:g}")
    del exact_MN
    run = (_from_codes if decode_included else _decoded)(sides, setting, torch.bfloat16)
    # The same values: numbers with short mantissas switch fewer gates, so a power-limited GPU multiplies them faster.
    a, b = (importlib.import_module("halfbyte.reference").decode(s).values.bfloat16() for s in sides)
    del x_MK, w_NK
    return against_bf16(setting, [run], [lambda: a @ b.T], 2.0 * M * N * K, checked, "of bf16")


def batch_invariant(setting: Setting, shape: Shape) -> Outcome:
    """Check that rows are those of another batch, then time the product beside the one that sums as it likes."""
    M, N, K = shape
    x_MK, w_NK = (random_matrix((n, K), setting.device, seed) for seed, n in enumerate((M + 1, N)))
    specs = NVFP4(outer="row"), NVFP4()
    x, w = (
        ops.Operand(ops.quantize(t, Side(s), backend="reference"), s, K)
        for t, s in zip((x_MK, w_NK), specs, strict=True)
    )
    few = x._replace(blocks=Blocks(*(part[1:] for part in x.blocks)))
    alone, free = (partial(_rows, setting, few, w, flag) for flag in (True, False))
    if not torch.equal(alone(), _rows(setting, x, w, True)[1:]):
        raise Unequal(f"{M} rows are not those of {M + 1}")
    error = relative_error(alone(), free().double())
    if not error <= TOLERANCE[torch.bfloat16]:
        raise Unequal(f"relative error {error:.2e} beside the free order, at most {TOLERANCE[torch.bfloat16]:g}")
    checked = [f"{M} rows bitwise those of {M + 1}", f"relative error {error:.1e} beside the free order"]
    module = _module(setting)
    a, b = module.decode(few), module.decode(w)
    ours, theirs = (partial(module.gemm_nt, a, b, Epilogue(batch_invariant=flag)) for flag in (True, False))
    outcome = against_bf16(setting, [ours], [theirs], 2.0 * M * N * K, checked, "of free", graph=True)
    return replace(outcome, facts={"free_us": outcome.facts["bf16_us"]})


def _rows(setting: Setting, x: ops.Operand, w: ops.Operand, batch_invariant: bool) -> Tensor:
    return (ops.gemm_nt_batch_invariant if batch_invariant else ops.gemm_nt)(x, w, backend=setting.backend)


def _from_codes(sides: list[ops.Operand], setting: Setting, dtype: torch.dtype):
    return partial(ops.gemm_nt, *sides, out_dtype=dtype, backend=setting.backend)


def _decoded(sides: list[ops.Operand], setting: Setting, dtype: torch.dtype):
    module = _module(setting)
    a, b = map(module.decode, sides)
    return partial(module.gemm_nt, a, b, Epilogue(dtype))


def _module(setting: Setting) -> ModuleType:
    if setting.backend not in MODULES:
        raise ValueError(f"backend={setting.backend!r}: operands are not decoded there; use --only 'gemm/from-codes'")
    return importlib.import_module(MODULES[setting.backend])


def _exact(sides: list[ops.Operand]) -> Tensor:
    """Return the product of the operands' decoded values in fp64 on their device."""
    reference = importlib.import_module("halfbyte.reference")
    factors, product_MN = [], []
    for side in sides:
        decoded = reference.decode(side)
        product_MN.append(decoded.values.double())
        factors.append(decoded.factor.double())
    y = product_MN[0] @ product_MN[1].T
    return y.mul_(factors[0] * factors[1])


FEW, MANY = Bar(least=0.5, aim=0.9), Bar(least=0.9, aim=0.97)
BATCHES = {16: FEW, 64: FEW, 128: FEW, 1024: MANY, 8192: MANY}

CASES = (
    Case(
        name="gemm/batch-invariant",
        about="rows summed alike in every batch, operands decoded before, beside the order that is fastest",
        shapes={(M, N, K): bar for N, K in ((4096, 4096), (14336, 4096)) for M, bar in BATCHES.items()},
        small=SMALL,
        run=batch_invariant,
    ),
    Case(
        name="gemm/decoded",
        about="operands decoded before: the cost of alpha and of emulation",
        shapes=dict.fromkeys(SHAPES, Bar(least=0.97, aim=1.0)),
        small=SMALL,
        run=partial(product, decode_included=False),
    ),
    Case(
        name="gemm/from-codes",
        about="decoding included",
        shapes={SHAPES[0]: Bar(least=0.90, aim=0.94), **dict.fromkeys(SHAPES[1:])},
        small=SMALL,
        run=partial(product, decode_included=True),
    ),
)
