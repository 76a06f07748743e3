"""Groups, specs and recipes that the tests of grouped operations share."""

from __future__ import annotations

import dataclasses

import torch

import halfbyte as hb
from halfbyte.spec import GemmSpec

RAGGED = (17, 1, 0, 30, 16)
GROUPS = {
    "ragged": (RAGGED, 6),
    "all_to_one": ((0, 0, 40, 0), 0),
    "all_to_first": ((33, 0), 0),
    "single_tokens": ((1, 1, 1), 0),
    "one_group": ((37,), 3),
    "nothing": ((0, 0, 0), 5),
}
"""Name: sizes of the groups and tokens of padding behind the last."""

FRESH = hb.Hadamard(size=32, signs="fresh")
EDEN = hb.NVFP4(scaling=hb.Eden(), fp4_max=hb.recipes.EDEN_FP4_MAX, e4m3_max=hb.recipes.EDEN_E4M3_MAX)
SPECS = {
    "standard": hb.NVFP4(),
    "tile": hb.NVFP4(block=(16, 16)),
    "tile_4over6": hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(), e4m3_max=256.0),
    "tile_stochastic": hb.NVFP4(block=(16, 16), rounding="stochastic"),
    "row": hb.NVFP4(outer="row"),
    "stochastic": hb.NVFP4(rounding="stochastic"),
    "rotated": hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(size=16)),
    "rotated_fresh": hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(size=128, signs="fresh")),
    "4over6": hb.NVFP4(scaling=hb.FourOverSix(error="mse"), e4m3_max=256.0),
    "mxfp8": hb.MXFP8(),
    "eden": dataclasses.replace(EDEN, rotation=hb.Hadamard(signs="fresh")),
    "eden_rotated_fresh": dataclasses.replace(EDEN, rotation=hb.Hadamard(size=128, signs="fresh")),
}


def fresh_everywhere() -> hb.Recipe:
    """Every GEMM with fresh signs, every operand with random bits: each uses streams of its own."""
    operand = hb.NVFP4(rounding="stochastic", rotation=FRESH)
    gemm = GemmSpec(a=operand, b=operand)
    return hb.Recipe(fprop=gemm, dgrad=gemm, wgrad=gemm)


def by_row() -> hb.Recipe:
    """An amax per row in every operand."""
    gemm = GemmSpec(a=hb.NVFP4(outer="row"), b=hb.NVFP4(outer="row"))
    return hb.Recipe(fprop=gemm, dgrad=gemm, wgrad=gemm)


RECIPES = {
    **{name: preset() for name, preset in hb.recipes.PRESETS.items()},
    "four_over_six_weights": hb.recipes.four_over_six(scope="weights"),
    "headroom": hb.recipes.nvfp4(fp4_max_gradient=6 * 16 / 17, hadamard=hb.Hadamard(size=128, signs="fresh")),
    "dequantized": hb.recipes.nvfp4_forward(backward="dequantized"),
    "fprop_only": dataclasses.replace(hb.recipes.nvfp4(), dgrad=None, wgrad=None),
    "fresh_everywhere": fresh_everywhere(),
    "by_row": by_row(),
}


def ends(sizes: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return the cumulative ends of groups of these sizes."""
    return torch.tensor(sizes, dtype=dtype).cumsum(0, dtype=dtype)


def slices(sizes: tuple[int, ...]) -> list[slice]:
    """Return the rows of each group."""
    stops = ends(sizes).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
