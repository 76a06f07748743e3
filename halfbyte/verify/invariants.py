"""What must hold of the reference on this machine, without any other implementation to compare with.

The reference is plain torch, so a torch build whose casts, divisions or fused operations round differently would change
bytes. These checks and the fingerprint notice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte import layout, ops, reference
from halfbyte.formats import E2M1, E4M3, NVFP4_BLOCK
from halfbyte.reference.cast import e2m1_nearest, e2m1_stochastic, e4m3
from halfbyte.reference.philox import philox4x32
from halfbyte.sides import Side, both_sides
from halfbyte.spec import MXFP8, NVFP4, Hadamard
from halfbyte.verify.compare import difference
from halfbyte.verify.fingerprint import EXPECTED, fingerprint
from halfbyte.verify.kernels import CPU, same_blocks
from halfbyte.verify.matrix import MAIN_SPECS, draws, inputs
from halfbyte.verify.record import Finding

GROUP = "reference"

PHILOX_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key and output of Philox4x32-10: the known answers of Random123 (Salmon et al. 2011)."""


def invariants() -> Iterator[Finding]:
    """The reference on the CPU: casts against the formats' definitions, exact identities, and the fingerprint."""
    yield GROUP, "E2M1 cast is nearest, ties to even", _e2m1
    yield GROUP, "E2M1 stochastic cast is the mean over all bytes", _e2m1_stochastic
    yield GROUP, "E4M3 cast is nearest, ties to even", _e4m3
    yield GROUP, "Philox known answers", _philox
    yield GROUP, "rotation twice is the identity", _rotation
    for name in ("regular", "ragged", "non-finite"):
        yield GROUP, f"16x16: quantize(x.T) is the transpose, {name}", lambda name=name: _transpose(inputs()[name])
        yield GROUP, f"swizzle and back, {name}", lambda name=name: _swizzle(inputs()[name])
        yield GROUP, f"NaN stays in its block, {name}", lambda name=name: _poison(inputs()[name])
    for name, spec in MAIN_SPECS.items():
        yield GROUP, f"the same bytes from a swizzled tensor, {name}", lambda spec=spec: _layouts(spec)
    yield GROUP, "fingerprint", _fingerprint


def _all_values(element) -> Tensor:
    """Return the finite values of the format's non-negative codes; the index is the code."""
    values = [element.decode(code) for code in range(1 << (element.bits - 1))]
    return torch.tensor([v for v in values if v == v], dtype=torch.float64)


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """Return the code of the value nearest to each |x|, of two the even one."""
    distance = (x.double().abs()[:, None] - values).abs()
    best = distance.amin(1, keepdim=True)
    ties = distance == best
    code = torch.arange(len(values)).expand_as(ties)
    # Of two nearest codes one is even; +1 makes any odd one lose.
    return torch.where(ties, code + (code % 2) * 1000, 10_000).argmin(1)


def _samples(values: Tensor) -> Tensor:
    """Return every value, every midpoint, and their neighbours in fp32, with both signs."""
    points = torch.cat((values, (values[1:] + values[:-1]) / 2)).float()
    points = torch.cat(
        (
            points,
            points.nextafter(torch.tensor(0.0, dtype=torch.float32)),
            points.nextafter(torch.tensor(1e9, dtype=torch.float32)),
        )
    )
    points = points[points <= values[-1]]
    return torch.cat((points, -points))


def _e2m1() -> str | None:
    values = _all_values(E2M1)
    x = _samples(values)
    codes, magnitude = e2m1_nearest(x.contiguous())
    expected = _nearest(x, values)
    problem = difference((codes & 7).long(), expected)
    return problem or difference(magnitude.double(), values[expected])


def _e2m1_stochastic() -> str | None:
    """The mean over the 256 random bytes is the value up to the truncation of 8 bits: steps / 512 below, on average."""
    values = _all_values(E2M1)
    x = torch.linspace(0, E2M1.max, 4097, dtype=torch.float32)
    step = torch.where(x >= 4, 2.0, torch.where(x >= 2, 1.0, 0.5))
    total = torch.zeros_like(x, dtype=torch.float64)
    for byte in range(256):
        random = torch.full(x.shape, byte, dtype=torch.uint8)
        total += values[(e2m1_stochastic(x, random) & 7).long()]
    error = ((total / 256 - x) / step).abs().max()
    # 6 saturates: near it rounding up would give 8.
    inside = ((total / 256 - x) / step).abs()[x <= 4].max()
    return None if inside <= 1 / 256 and error <= 1 else f"the mean is off by {float(inside):.4f} steps, at most 1/256"


def _e4m3() -> str | None:
    values = _all_values(E4M3)
    x = _samples(values)
    return difference((e4m3(x).view(torch.uint8) & 0x7F).long(), _nearest(x, values))


def _philox() -> str | None:
    for counter, key, expected in PHILOX_ANSWERS:
        k0, k1 = map(torch.tensor, key)
        words = philox4x32(tuple(map(torch.tensor, counter)), (k0, k1))
        if tuple(map(int, words)) != expected:
            return f"counter {counter}: {[hex(int(w)) for w in words]}, expected {[hex(w) for w in expected]}"
    return None


def _rotation() -> str | None:
    """H D x with H symmetric and orthogonal: |y| keeps the norm, and H (H D x) = D x; on small integers exactly."""
    for size in (16, 64):  # 1 / sqrt(size) is a power of two: every number below is exact in bf16
        x = torch.randint(-3, 4, (8, size), generator=torch.Generator().manual_seed(1)).bfloat16()
        y = reference.rotate(x, Hadamard(size=size)).double()
        if float((y * y).sum()) != float((x.double() ** 2).sum()):
            return f"size {size}: the norm changes"
    return None


def _transpose(x: Tensor) -> str | None:
    spec = NVFP4(block=(16, 16))
    _, col = ops.quantize_row_col(x, *both_sides(spec, spec), backend="reference")
    direct = ops.quantize(x.T, Side(spec), backend="reference")
    return same_blocks(col, direct)


def _swizzle(x: Tensor) -> str | None:
    scale = ops.quantize(x, Side(NVFP4()), backend="reference").block_scale
    return difference(layout.unswizzle(layout.swizzle(scale), *scale.shape), scale)


def _poison(x: Tensor) -> str | None:
    """A NaN scale marks exactly the blocks with a non-finite element; other blocks are what they are without it."""
    blocks = ops.quantize(x, Side(NVFP4()), backend="reference")
    count = blocks.block_scale.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, count * NVFP4_BLOCK - x.shape[1]))
    poisoned = ~padded.isfinite().unflatten(1, (count, NVFP4_BLOCK)).all(-1)
    nan = torch.tensor(E4M3.nan_code, dtype=torch.uint8)
    marked = torch.eq(blocks.block_scale & 0x7F, nan)
    clean = torch.where(poisoned.repeat_interleave(NVFP4_BLOCK, 1)[:, : x.shape[1]], 0.0, x.float()).to(x.dtype)
    expected = ops.quantize(clean, Side(NVFP4(), amax=blocks.amax), backend="reference")
    scale = torch.where(poisoned, nan, expected.block_scale)
    return (
        difference(marked, poisoned)
        or difference(blocks.block_scale, scale)
        or difference(blocks.qdata, expected.qdata)
    )


def _layouts(spec: NVFP4 | MXFP8) -> str | None:
    x = inputs()["ragged"]
    values = []
    for scale_layout in layout.SCALE_LAYOUTS:
        blocks = ops.quantize(x, Side(spec, **draws(spec, None, CPU), scale_layout=scale_layout), backend="reference")
        values.append(ops.dequantize(ops.Operand(blocks, spec, x.shape[1], scale_layout), backend="reference"))
    return difference(values[1], values[0])


def _fingerprint() -> str | None:
    found = fingerprint(CPU, "reference")
    return None if found == EXPECTED else f"{found}, expected {EXPECTED}: this torch rounds differently"
