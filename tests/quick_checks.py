"""What decides between nearly equal errors: operands whose scales quick errors choose, beside the reference."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import reference
from halfbyte.kernels.quantize import one, route
from halfbyte.sides import Side

FOUR = 0.875, 1.0, 1.25, 1.5
SPECS = {
    f"{name}-{error}": hb.NVFP4(scaling=hb.FourOverSix(candidates=candidates, error=error), **options)
    for error in ("mae", "mse")
    for name, candidates, options in (
        ("four", FOUR, {}),
        ("two", (1.0, 1.5), {"e4m3_max": 256.0}),
        ("three", (0.75, 1.0, 1.5), {"e4m3_max": 256.0}),
        ("above", (1.0, 1.25, 1.5), {"outer": "row"}),
        ("rotated", FOUR, {"rotation": hb.Hadamard()}),
        ("tiles", FOUR, {"block": (16, 16)}),
    )
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def inputs(shape: tuple[int, int], device: torch.device) -> dict[str, tuple[Tensor, float | None]]:
    """Return fp32 matrices by what is hard about them, and what their amax is said to be in place of the true one."""
    generator = torch.Generator(device).manual_seed(shape[0])

    def normal() -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator).float()

    blocks = torch.exp2(whole(-24, 1)[:, ::16]).repeat_interleave(16, 1)[:, : shape[1]]
    special = torch.where(whole(0, 500) == 0, float("nan"), torch.where(whole(0, 500) == 0, float("inf"), normal()))
    return {
        "normal": (normal(), None),
        "heavy tails": (normal() * torch.exp(2 * normal()), None),
        "exact ties": (whole(-8, 9), None),
        "powers of two": (whole(0, 2) * torch.exp2(whole(-6, 3)), None),
        "scales down to 0": (normal() * blocks, None),
        "mostly zeros": (torch.where(whole(0, 10) > 0, 0.0, normal()), None),
        "values beyond the amax": (normal(), 0.25),
        "an amax far away": (normal(), 3e4),
        "squares underflow": (normal() * 2.0**-70, None),
        "no simple division": (normal(), 3e38),
        "no power of two moves them": (normal() * 2.0**104, None),
        "NaN and Inf": (special, None),
        "zeros": (whole(0, 1), None),
    }


def check_bytes(name: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = (48, 1072)) -> None:
    """Check the operands of all `inputs`, be they as small as they may."""
    with patch.dict(route.QUICK_BLOCKS, {2: 0}), patch.dict(route.QUICK_TILE_BLOCKS, {4: 0}):
        _check_bytes(name, dtype, device, shape)


def _check_bytes(name: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]) -> None:
    spec = SPECS[name]
    for what, (x, amax) in inputs(shape, device).items():
        values = x.to(dtype)
        rows = torch.full((shape[0],) if spec.has_row_amax else (), amax, device=device) if amax else None
        want = reference.quantize(values, spec, amax=rows)
        choice = route.choose_one_side(route.OneSide(values, Side(spec, amax=want.amax), route.ALONE))
        assert choice.constants["RULE"].errors == "quick", "another way was taken"
        got = one.quantize_side(values, Side(spec, amax=want.amax))
        for field in ("qdata", "block_scale"):
            a, b = (getattr(blocks, field).view(torch.uint8).cpu() for blocks in (got, want))
            assert torch.equal(a, b), f"{what}: {int((a != b).sum())} bytes of {field} differ"
