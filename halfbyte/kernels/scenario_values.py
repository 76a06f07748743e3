"""Specs, tensors and operands of the calls that are recorded (`scenarios`).

Tensors lie on the device "meta": a launcher sees their shapes, strides, dtypes and alignment, and nobody their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfbyte import recipes
from halfbyte.layout import (
    LINEAR,
    SWIZZLED_32_4_4,
    Blocks,
    stored_shapes,
)
from halfbyte.rng import Draw
from halfbyte.spec import MXFP8, NVFP4, Eden, FourOverSix, Hadamard, Spec

META = torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PLAIN, TILE, SR, ROW = NVFP4(), NVFP4(block=(16, 16)), NVFP4(rounding="stochastic"), NVFP4(outer="row")
RHT, SR_RHT = NVFP4(rotation=Hadamard()), NVFP4(rounding="stochastic", rotation=Hadamard())
FRESH = NVFP4(rounding="stochastic", rotation=Hadamard(signs="fresh"))
FOUR = NVFP4(scaling=FourOverSix(), e4m3_max=256.0)
FOUR_RHT = NVFP4(scaling=FourOverSix(), e4m3_max=256.0, rotation=Hadamard())


def rotated_spec(
    size: int, rounding: Literal["nearest", "stochastic"] = "nearest", outer: Literal["tensor", "row"] = "tensor"
) -> NVFP4:
    """Return the spec of a rotation with fresh signs."""
    return NVFP4(rotation=Hadamard(size=size, signs="fresh"), rounding=rounding, outer=outer)


def eden_spec(size: int | None = None, outer: Literal["tensor", "row"] = "tensor") -> NVFP4:
    """Return MS-EDEN with the constants of `quartet2`, after a rotation with fresh signs or, with None, without one."""
    rotation = None if size is None else Hadamard(size=size, signs="fresh")
    maxima = {"fp4_max": recipes.EDEN_FP4_MAX, "e4m3_max": recipes.EDEN_E4M3_MAX}
    return NVFP4(scaling=Eden(), outer=outer, rotation=rotation, **maxima)


EDEN, EDEN_RHT, EDEN_RHT128 = eden_spec(), eden_spec(16), eden_spec(128)

TUNED = (PLAIN, TILE, SR, FOUR, RHT, SR_RHT, MXFP8(), rotated_spec(32, outer="row"), EDEN)
"""Specs of the presets, and what else must not spill on bf16 of whole blocks."""

OTHERS = (
    EDEN_RHT128,  # spills in groups on sm_80
    ROW,
    FRESH,
    NVFP4(rotation=Hadamard(size=32)),
    NVFP4(rotation=Hadamard(size=64), outer="row"),
    NVFP4(rotation=Hadamard(size=128)),
    *(rotated_spec(size, outer="row", rounding="stochastic") for size in (32, 64, 128)),
    rotated_spec(128, rounding="stochastic"),
    NVFP4(block=(16, 16), rounding="stochastic"),
    NVFP4(rounding="stochastic", fp4_max=6 * 16 / 17),
    NVFP4(rounding="toward_zero"),
    NVFP4(scaling=FourOverSix(error_math="scaled"), e4m3_max=256.0),
    NVFP4(scaling=FourOverSix(error="mse"), e4m3_max=256.0),
    FOUR_RHT,
    NVFP4(block=(16, 16), scaling=FourOverSix(), e4m3_max=256.0),
    NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5))),
    NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5)), block=(16, 16)),
    NVFP4(scaling=FourOverSix(candidates=(0.875, 1.0, 1.25, 1.5), error="mse"), block=(16, 16)),
    MXFP8(element="e5m2"),
    EDEN_RHT,
    NVFP4(rotation=Hadamard(size=32, signs="-++-+---")),
    NVFP4(rotation=Hadamard(size=64, signs="none")),
    eden_spec(32, outer="row"),
    eden_spec(64),
)

TUNED_PAIRS = ((PLAIN, RHT), (SR, SR_RHT), (PLAIN, MXFP8()), (TILE, TILE))
"""(row, col) of the presets' activations, gradients and weights."""

OTHER_PAIRS: tuple[tuple[Spec | None, Spec | None], ...] = (
    (EDEN_RHT128, EDEN_RHT128),
    (SR, FRESH),
    (PLAIN, PLAIN),
    (MXFP8(), MXFP8()),
    (ROW, RHT),
    (FOUR, FOUR_RHT),
    (None, rotated_spec(32, rounding="stochastic")),
    (MXFP8(element="e5m2"), None),
    (PLAIN, rotated_spec(128, rounding="stochastic")),
    (EDEN, EDEN_RHT),
)


@dataclass(frozen=True)
class Scenario:
    """One call.

    Args:
        name: what it is, for messages.
        call: makes the launches.
        tuned: whether none of its launches may spill: bf16 of whole blocks, as training has it.
    """

    name: str
    call: Callable[[], object]
    tuned: bool


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def misaligned(rows: int, cols: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a matrix that starts one element behind an aligned address."""
    return tensor(rows * cols + 1, dtype=dtype)[1:].view(rows, cols)


def places(*specs: Spec | None) -> dict[str, Draw | None]:
    """Return the random bits and fresh signs that a call needs."""
    known = [spec for spec in specs if spec is not None]
    drawing, signing = any(spec.needs_rng for spec in known), any(spec.needs_sign_rng for spec in known)
    return {
        "draw": Draw(tensor(2, dtype=torch.int64), 17) if drawing else None,
        "sign_draw": Draw(tensor(2, dtype=torch.int64), 3) if signing else None,
    }


WHOLE = {"8192x8192": (8192, 8192), "512x768": (512, 768), "2048x2880": (2048, 2880), "16x1024": (16, 1024)}
"""Shapes of bf16 inputs that training meets: two for kernels of small ones, one is no multiple of the largest tiles."""


def ragged() -> dict[str, Tensor]:
    """Return what nothing is tuned for: other dtypes, strides, alignments, and edges that cut blocks."""
    return {
        "300x83": tensor(300, 83),
        "300x4813": tensor(300, 4813),
        "300x88, rows of 88": tensor(300, 88),
        "a column of 83": tensor(300, 83).T,
        "misaligned": misaligned(256, 512),
        "every second column": tensor(256, 1024)[:, ::2],
        "fp16": tensor(256, 512, dtype=FP16),
        "fp32": tensor(256, 512, dtype=FP32),
        "fp32 ragged": tensor(300, 83, dtype=FP32),
        "4-D": tensor(2, 3, 5, 48),
        "1-D": tensor(45),
    }


EVERY_KIND = ("300x83", "fp32")
"""Of the ragged inputs those that are stored in every way; the others as codes with linear scales."""


KINDS = ((LINEAR, (False, False)), (LINEAR, (True, True)), (LINEAR, (True, False)), (SWIZZLED_32_4_4, (False, False)))
"""(layout of the scales, which orientations are transient) of two operands at once."""


def whole_and_ragged() -> Iterator[tuple[str, Tensor, bool]]:
    """Return (name, x, whether it is tuned for)."""
    for name, shape in WHOLE.items():
        yield name, tensor(*shape), True
        if name == "8192x8192":
            yield f"{name} by columns", tensor(*reversed(shape)).T, True
    for name, x in ragged().items():
        yield name, x, False


def blocks(rows: int, cols: int, spec: Spec, layout: str = LINEAR) -> Blocks:
    """Return a quantized matrix."""
    shapes, kinds = stored_shapes(rows, cols, spec, layout), (torch.uint8, torch.uint8, FP32)
    return Blocks(*(tensor(*shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)))
