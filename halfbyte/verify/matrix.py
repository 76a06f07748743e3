"""What is verified: the specs, the pairs of them, and inputs that have broken kernels before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypedDict

import torch
from torch import Tensor

from halfbyte import recipes
from halfbyte.rng import Draw, Philox
from halfbyte.spec import MXFP8, NVFP4, Eden, FourOverSix, Hadamard, Spec

SCALED = FourOverSix(error_math="scaled")
FOUR_TILES = NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5)), block=(16, 16))
EDEN = NVFP4(scaling=Eden(), fp4_max=recipes.EDEN_FP4_MAX, e4m3_max=recipes.EDEN_E4M3_MAX)

MAIN_SPECS: dict[str, Spec] = {
    "1x16": NVFP4(),
    "16x16": NVFP4(block=(16, 16)),
    "1x16 SR": NVFP4(rounding="stochastic"),
    "1x16 row-scaled": NVFP4(outer="row"),
    "1x16 RHT16": NVFP4(rotation=Hadamard()),
    "1x16 4over6": NVFP4(scaling=FourOverSix(), e4m3_max=256.0),
    "MXFP8 e4m3": MXFP8(),
}
"""Run on the inputs of `MANY`."""

MORE_SPECS: dict[str, Spec] = {
    "1x16 SR RHT16": NVFP4(rounding="stochastic", rotation=Hadamard()),
    "1x16 SR RHT16 fresh": NVFP4(rounding="stochastic", rotation=Hadamard(signs="fresh")),
    "1x16 RHT32": NVFP4(rotation=Hadamard(size=32)),
    "1x16 RHT64 row-scaled": NVFP4(rotation=Hadamard(size=64), outer="row"),
    "16x16 SR": NVFP4(block=(16, 16), rounding="stochastic"),
    "1x16 SR headroom": NVFP4(rounding="stochastic", fp4_max=6 * 16 / 17),
    "1x16 toward zero": NVFP4(rounding="toward_zero"),
    "1x16 4over6 scaled": NVFP4(scaling=SCALED, e4m3_max=256.0),
    "1x16 4over6 MSE": NVFP4(scaling=FourOverSix(error="mse"), e4m3_max=256.0),
    "1x16 4over6 RHT16": NVFP4(scaling=FourOverSix(), e4m3_max=256.0, rotation=Hadamard()),
    "16x16 4over6": NVFP4(block=(16, 16), scaling=FourOverSix(), e4m3_max=256.0),
    "1x16 four candidates": NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5))),
    "MXFP8 e5m2": MXFP8(element="e5m2"),
}
"""Run on the inputs of `FEW`."""

LONG_SPECS: dict[str, Spec] = {
    "1x16 RHT128": NVFP4(rotation=Hadamard(size=128)),
    "1x16 SR RHT128 fresh": NVFP4(rounding="stochastic", rotation=Hadamard(size=128, signs="fresh")),
    "1x16 EDEN": EDEN,
    "1x16 RHT32 given signs": NVFP4(rotation=Hadamard(size=32, signs="-++-+---")),
    "1x16 RHT64 no signs": NVFP4(rotation=Hadamard(size=64, signs="none")),
    "1x16 EDEN RHT128 fresh": replace(EDEN, rotation=Hadamard(size=128, signs="fresh")),
}
"""Run on the inputs of `FEW`, and no part of the fingerprint."""

ALL_SPECS: dict[str, Spec] = MAIN_SPECS | MORE_SPECS | LONG_SPECS

PAIRS: dict[str, tuple[Spec | None, Spec | None]] = {
    "1x16 + RHT16": (NVFP4(), NVFP4(rotation=Hadamard())),
    "SR + SR RHT16": (NVFP4(rounding="stochastic"), NVFP4(rounding="stochastic", rotation=Hadamard())),
    "1x16 + 1x16": (NVFP4(), NVFP4()),
    "16x16 + 16x16": (NVFP4(block=(16, 16)), NVFP4(block=(16, 16))),
    "1x16 + MXFP8": (NVFP4(), MXFP8()),
    "MXFP8 + MXFP8": (MXFP8(), MXFP8()),
    "row-scaled + RHT16": (NVFP4(outer="row"), NVFP4(rotation=Hadamard())),
    "4over6 + 4over6 RHT16": (
        NVFP4(scaling=FourOverSix(), e4m3_max=256.0),
        NVFP4(scaling=FourOverSix(), e4m3_max=256.0, rotation=Hadamard()),
    ),
    "none + SR RHT32 fresh": (None, NVFP4(rounding="stochastic", rotation=Hadamard(size=32, signs="fresh"))),
    "e5m2 + none": (MXFP8(element="e5m2"), None),
}
"""(row, col) of quantize_row_col."""

LONG_PAIRS: dict[str, tuple[Spec | None, Spec | None]] = {
    "1x16 + SR RHT128 fresh": (NVFP4(), ALL_SPECS["1x16 SR RHT128 fresh"]),
    "EDEN + EDEN RHT16 fresh": (EDEN, replace(EDEN, rotation=Hadamard(signs="fresh"))),
    "EDEN RHT128 fresh, both": (ALL_SPECS["1x16 EDEN RHT128 fresh"],) * 2,
}

FEW = ("regular", "ragged", "non-finite")
MANY = (*FEW, "zeros", "4-D", "transposed view", "every second column", "fp32", "no rows", "no columns")
"""A new shape, dtype or stride costs a compilation of seconds, new values cost nothing: inputs share shapes, and only
the first spec runs on all of them unless a full verification is asked for."""

SEED = 20_260_101
SHAPE = (256, 512)


def named(
    shapes: Iterable[tuple[int, int]], dtypes: Iterable[torch.dtype]
) -> Iterator[tuple[str, tuple[int, int], torch.dtype]]:
    """Yield every shape with every dtype, and what the two are called."""
    for shape, dtype in product(shapes, dtypes):
        yield f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}", shape, dtype


def inputs() -> dict[str, Tensor]:
    """Return the CPU inputs by name; the same values on every call."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32)
        return (x * torch.exp(0.7 * torch.randn(shape, generator=generator, dtype=torch.float32))).to(dtype)

    poisoned = normal(*SHAPE)
    for index, value in ((7, float("nan")), (2000, float("inf")), (50_003, -float("inf")), (50_004, float("nan"))):
        poisoned.view(-1)[index] = value
    return {
        "regular": normal(*SHAPE),
        "ragged": normal(37, 83),
        "non-finite": poisoned,
        "1-D": normal(45),
        "4-D": normal(2, 3, 5, 48),
        "no rows": normal(0, 64),
        "no columns": normal(5, 0),
        "transposed view": normal(96, 130).T,
        "every second column": normal(24, 256)[:, ::2],
        "zeros": torch.zeros(SHAPE, dtype=torch.float32).bfloat16() * normal(*SHAPE).sign(),
        "fp16": normal(48, 112, dtype=torch.float16),
        "fp32": normal(48, 112, dtype=torch.float32),
        "subnormal": normal(48, 112, dtype=torch.float32) * 1e-39,
        "huge": normal(48, 112, dtype=torch.float32).clamp(-8, 8) * 4e37,
    }


class Draws(TypedDict):
    """Keyword arguments of quantize."""

    draw: Draw | None
    sign_draw: Draw | None


def draws(spec: Spec | None, other: Spec | None, device: torch.device) -> Draws:
    """Return the draws that two specs need."""
    specs = [s for s in (spec, other) if s is not None]
    drawing = any(s.needs_rng for s in specs)
    signing = any(s.needs_sign_rng for s in specs)
    return {
        "draw": Philox(SEED, (5 << 32) + 17).on(device) if drawing else None,
        "sign_draw": Philox(SEED + 1, 3).on(device) if signing else None,
    }
