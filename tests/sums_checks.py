"""What the tests of statistics' sums share, on the CPU (interpreter) and on a GPU alike: figures by numpy, in fp64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import reference
from halfbyte.arithmetic import ERROR_SUMS, OPERAND_SUMS
from halfbyte.formats import f32
from halfbyte.kernels.sums import error_sums as kernels
from halfbyte.kernels.sums import operand_sums as operand_kernels
from halfbyte.layout import Blocks, Operand, round_up

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NVFP4, ROWS, MXFP8, MXFP8_E5M2 = hb.NVFP4(), hb.NVFP4(outer="row"), hb.MXFP8(), hb.MXFP8(element="e5m2")
TILE_OF_16 = hb.NVFP4(block=(16, 16), e4m3_max=256.0)
CASES = (
    # rows, columns, size of the rotation, spec, dtype, whether x is a transpose
    (40, 512, 0, NVFP4, BF16, False),
    (37, 600, 16, NVFP4, BF16, False),
    (37, 83, 128, NVFP4, FP32, True),
    (70, 300, 64, ROWS, FP16, True),
    (300, 83, 16, ROWS, BF16, True),
    (16, 128, 0, MXFP8, BF16, True),
    (37, 83, 0, MXFP8_E5M2, FP32, False),
    (3, 40, 0, TILE_OF_16, BF16, True),
    (261, 37, 16, NVFP4, FP32, True),
    (18, 70, 32, ROWS, FP32, False),
    (1, 1, 16, NVFP4, BF16, False),
)


def hadamard(size: int) -> np.ndarray:
    """Return Sylvester's matrix."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def values(rows: int, cols: int, dtype: torch.dtype, turned: bool) -> Tensor:
    """Return small multiples of 1/4, a fifth of them 0: their rotations by 4, 16, 64 round nothing in fp32."""
    g = torch.Generator().manual_seed(rows + cols)
    x = torch.randint(-12, 13, (cols, rows) if turned else (rows, cols), generator=g).float() / 4
    return torch.where(torch.rand(x.shape, generator=g) < 0.2, 0.0, x).to(dtype).T if turned else x.to(dtype)


def rotated(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return groups of x times signs times H over the square root of the size, rounded to bf16."""
    size = len(signs)
    y = (x.reshape(len(x), -1, size) * signs @ hadamard(size)) * np.float64(np.float32(size**-0.5))
    return torch.from_numpy(y).to(FP32).to(BF16).double().numpy().reshape(len(x), -1)


def stored(spec, rows: int, wide: int, g: torch.Generator) -> tuple[Operand, np.ndarray]:
    """Return an operand of any codes, a fifth of its scales 0, and what its codes stand for, fp64 but exact in fp32."""
    blocks = wide // spec.block_length
    qdata = torch.randint(0, 256, (rows, blocks * spec.format.block_bytes), generator=g, dtype=torch.uint8)
    if spec.format.has_amax:
        scale = torch.randint(1, 127, (rows, blocks), generator=g, dtype=torch.uint8)
        amax = torch.rand((rows,) if spec.has_row_amax else (), generator=g) * 900
    else:
        qdata = torch.where(qdata & 0x7F >= 0x7B, 0x38, qdata)  # codes that are no numbers
        scale, amax = torch.randint(125, 130, (rows, blocks), generator=g, dtype=torch.uint8), torch.zeros(0)
    scale = torch.where(torch.rand(scale.shape, generator=g) < 0.2, 0, scale).to(torch.uint8)
    operand = Operand(Blocks(qdata, scale, amax), spec, wide)
    return operand, reference.dequantize(operand, FP32).double().numpy()


def scale_values(scale: np.ndarray, spec) -> np.ndarray:
    """Return the fp32 numbers of scale bytes."""
    if not spec.format.has_amax:
        return np.exp2(scale.astype(np.float32) - 127)
    return np.vectorize(spec.format.scale.decode)(scale.astype(int)).astype(np.float32)


def bounds_of(operand: Operand) -> np.ndarray:
    """Return the magnitude that each block's values exceed which are saturated: fp32, computed in fp32."""
    blocks, spec = operand.blocks, operand.spec
    scale, most = blocks.block_scale.numpy(), np.float32(1.001 * spec.format.element.max)
    value = scale_values(scale, spec)
    if spec.format.has_amax:
        most = blocks.amax.numpy() * np.float32(f32(1 / spec.divisor)) * most
        most = most[:, None] if spec.has_row_amax else most
    return np.where(scale == 0, np.float32(np.inf), value * most)


def check_operand_sums(case: tuple, device: str) -> None:
    """Every sum and every maximum is numpy's; the counts exactly, the others up to the order of fp64."""
    rows, cols, size, spec, dtype, turned = case
    g = torch.Generator().manual_seed(7)
    x = values(rows, cols, dtype, turned)
    signs = torch.where(torch.rand(size, generator=g) < 0.5, -1.0, 1.0) if size else None
    wide = round_up(cols, max(spec.block_length, size))
    operand, q = stored(spec, rows, wide, g)
    bounds = bounds_of(operand)
    if dtype == FP32 and not size:  # at its bound, not beyond it
        x[1, 0], x[2, 0] = float(bounds[1, 0]), float(np.nextafter(bounds[2, 0], np.float32(np.inf)))
        x[1:3, 0] = torch.where(x[1:3, 0].isfinite(), x[1:3, 0], 0.0)
    v = np.pad(x.double().numpy(), ((0, 0), (0, wide - cols)))
    if signs is not None:
        v = rotated(v, signs.double().numpy())
        x = x * (1 + 2**-12) if dtype == FP32 else x  # what is rotated is rounded to bf16 first
    d = (q.astype(np.float32) - v.astype(np.float32)).astype(np.float64)
    magnitude, empty = np.abs(v).reshape(rows, -1, spec.block_length), operand.blocks.block_scale.numpy() == 0
    maxima = magnitude.max(2)
    wanted = {
        "signal": (v * v).sum(),
        "noise": (d * d).sum(),
        "magnitude": np.abs(v).sum(),
        "deviation": np.abs(d).sum(),
        "nonzero": (v != 0).sum(),
        "underflow": ((v != 0) & (q == 0)).sum(),
        "saturated": (magnitude > bounds[..., None]).sum(),
        "blocks": (maxima > 0).sum(),
        "scale_underflow": ((maxima > 0) & empty).sum(),
    }
    moved = operand._replace(blocks=Blocks(*(t.to(device) for t in operand.blocks)))
    given = x.to(device), moved, None if signs is None else signs.to(device)
    with_maxima = rows % 2 == 1
    found, largest, of_blocks = operand_kernels.operand_sums(*given, with_maxima)
    found = dict(zip(OPERAND_SUMS, found.tolist(), strict=True))
    for name, value in wanted.items():
        assert np.isclose(found[name], value, rtol=1e-12, atol=0), (name, found[name], value)
    assert largest.item() == maxima.max()
    assert (of_blocks is not None) == with_maxima
    if with_maxima:
        np.testing.assert_array_equal(of_blocks.cpu().double().numpy(), maxima)
    alone = operand_kernels.operand_noise(*given).item()
    assert np.isclose(alone, wanted["noise"], rtol=1e-12, atol=0), ("noise alone", alone, wanted["noise"])


def check_error_sums(shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    """What a product lost is numpy's, up to the order of fp64, whatever the strides."""
    rows, cols = shape
    for turned in (False, True):
        v = values(rows, cols, dtypes[0], False) * 1.375
        q = values(rows, cols, dtypes[1], turned) * 1.125
        d = (q.float() - v.float()).double().numpy()
        v_, q_ = v.double().numpy(), q.double().numpy()
        wanted = {"signal": (v_ * v_).sum(), "restored": (q_ * q_).sum(), "noise": (d * d).sum()}
        found = dict(zip(ERROR_SUMS, kernels.error_sums(v.to(device), q.to(device)).tolist(), strict=True))
        for name, value in wanted.items():
            assert np.isclose(found[name], value, rtol=1e-12, atol=0), (name, found[name], value)


def check_not_finite(device: str) -> None:
    """NaN is a block's largest magnitude, beyond Inf, and no sum hides it; counts go on, and its block is not one."""
    x = torch.ones(2, 64, dtype=BF16)
    x[0, 3], x[0, 20], x[0, 21], x[1, 5] = torch.nan, torch.inf, torch.nan, -torch.inf
    scale = torch.full((2, 4), 0x38, dtype=torch.uint8)  # 1
    scale[:, 2] = 0
    amax = torch.tensor(448.0 * 1.5)  # 1.5 and 9.009 are the factor and, times it, the bound: 2 beyond it are Inf
    operand = Operand(Blocks(torch.full((2, 32), 0x22, dtype=torch.uint8), scale, amax), NVFP4, 64)
    moved = operand._replace(blocks=Blocks(*(t.to(device) for t in operand.blocks)))
    found, largest, maxima = operand_kernels.operand_sums(x.to(device), moved, None, True)
    found = dict(zip(OPERAND_SUMS, found.tolist(), strict=True))
    assert np.isnan([found[name] for name in ("signal", "noise", "magnitude", "deviation")]).all()
    assert np.isnan([largest.item(), operand_kernels.operand_noise(x.to(device), moved).item()]).all()
    assert [found[name] for name in OPERAND_SUMS[4:]] == [128, 32, 2, 6, 2]
    wanted = torch.tensor([[torch.nan, torch.nan, 1, 1], [torch.inf, 1, 1, 1]])
    torch.testing.assert_close(maxima.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    squares, largest = kernels.square_sum(x.to(device))
    assert np.isnan([squares.item(), largest.item()]).all()
    assert kernels.square_sum(x[1].to(device)[None])[1].item() == np.inf
    sums = kernels.error_sums(x.to(device), torch.ones(2, 64).to(device)).tolist()
    assert np.isnan([sums[0], sums[2]]).all() and np.isclose(sums[1], 128, rtol=1e-14)


def check_columns(shape: tuple[int, int], device: str) -> None:
    """Outliers of every column and the sum of squares are numpy's, whatever the strides."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=g).to(BF16)
    for t in (x, x.T, x[:, ::2], x[1::3]):
        for limit in (1.7, float(x[0, 0].abs())):  # an outlier is beyond the limit, not at it
            got = kernels.column_outliers(t.to(device), torch.tensor(limit, dtype=torch.float64, device=device))
            wanted = (np.abs(t.double().numpy()) > limit).sum(0)
            np.testing.assert_array_equal(got.cpu().numpy(), wanted)
        total, largest = kernels.square_sum(t.to(device))
        assert np.isclose(total.item(), (t.double().numpy() ** 2).sum(), rtol=1e-13, atol=0)
        assert largest.item() == t.abs().max().item()
