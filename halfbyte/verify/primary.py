"""Checks of the kernels that cast primary weights against the reference on the CPU: every stage, every byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte.distributed.partial_cast import cast_target_of
from halfbyte.layout import LINEAR, SWIZZLED_32_4_4
from halfbyte.ops.primary import primary_stages
from halfbyte.pieces import Piece
from halfbyte.spec import NVFP4, FourOverSix
from halfbyte.tensor import PrimaryWeight
from halfbyte.verify.compare import difference
from halfbyte.verify.kernels import CPU
from halfbyte.verify.matrix import SEED
from halfbyte.verify.record import Finding

GROUP = "casts of primary weights"
SPECS = {
    "standard": NVFP4(block=(16, 16)),
    "headroom": NVFP4(block=(16, 16), fp4_max=5.5, e4m3_max=300.0),
    "4over6": NVFP4(block=(16, 16), e4m3_max=256.0, scaling=FourOverSix()),
}
SHAPES = ((256, 512), (33, 48), (7, 300), (1, 1), (1040, 80))
WHOLE = ((0.0, 1.0),) * 5
PARTS = ((0.0, 0.5), (0.3, 0.9), (0.0, 1.0), (0.0, 0.0), (0.21, 0.97))
"""Which part of its weight a rank holds, as fractions; an empty one too."""


def primary(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """Amaxes, scales, codes and transposes of five weights in one list, from whole masters and from parts."""
    for name, spec in SPECS.items():
        for part, cuts in (("whole", WHOLE), ("parts", PARTS)):
            for dtype in (torch.float32, torch.bfloat16):
                for layout in (LINEAR, SWIZZLED_32_4_4):
                    what = f"{name}, {part} of {str(dtype).removeprefix('torch.')} masters, {layout}"
                    arguments = spec, cuts, dtype, layout
                    yield GROUP, what, lambda a=arguments: _compare(device, backend, *a)


def _compare(device, backend, *arguments) -> str | None:
    actual, expected = _states(device, backend, *arguments), _states(CPU, "reference", *arguments)
    for name, value in expected.items():
        problem = difference(actual[name], value)
        if problem:
            return f"{name}: {problem}"
    return None


def _states(device, backend, spec: NVFP4, cuts, dtype: torch.dtype, layout: str) -> dict[str, Tensor]:
    """Return every buffer after all stages; the tensors that nobody wrote hold what was there before."""
    generator = torch.Generator().manual_seed(SEED)
    pieces, weights, tiles = [], [], 0
    # A tile whose scale is chosen among candidates needs all its elements: cut ones are left to another rank.
    broken = spec.scaling == NVFP4().scaling or cuts == WHOLE
    for slot, ((rows, cols), (low, high)) in enumerate(zip(SHAPES, cuts, strict=True)):
        weight = PrimaryWeight.empty((rows, cols), spec, dtype=torch.bfloat16, device=device, scale_layout=layout)
        before = torch.randint(0, 256, weight.qdata.shape, generator=generator, dtype=torch.uint8)
        weight.qdata.copy_(before)
        weight.block_scale.zero_()
        target = cast_target_of(weight, tiles, slot, turned=weight.allocate_turned())
        tiles += target.tile_count
        numel = rows * cols
        master = torch.randn(numel, generator=generator, dtype=torch.float32) * 10.0 ** (slot - 2)
        if broken and numel > 40:
            master[numel // 2], master[numel // 3] = float("nan"), -float("inf")
        start, stop = round(low * numel), round(high * numel)
        values = master.to(dtype)[start:stop].to(device)
        pieces.append(Piece(target, values, start, cols, weight.qdata.view(-1)))
        weights.append(weight)
    amaxes = torch.zeros(tiles + len(SHAPES), device=device, dtype=torch.float32)
    scales = torch.zeros(tiles, dtype=torch.uint8, device=device)
    caster, finisher = primary_stages(pieces, [piece.target for piece in pieces], tiles, device, backend)
    caster.amax(amaxes)
    caster.choose(amaxes, scales)
    finisher.scale(amaxes, scales)
    caster.cast(amaxes, scales)
    finisher.expand(amaxes, scales)
    finisher.transpose()
    state = {"amaxes": amaxes, "scales": scales}
    for i, weight in enumerate(weights):
        state |= {f"weight {i} {name}": tensor for name, tensor in weight.blocks._asdict().items()}
        turned = weight.turned
        assert turned is not None
        state |= {f"weight {i}.T codes": turned.qdata, f"weight {i}.T scales": turned.block_scale}
    return state
