"""What hypothesis draws in several test files: specs that are allowed, and matrices that are hard."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from linear_cases import HEADROOM
from torch import Tensor

import halfbyte as hb

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEEDS = st.integers(0, 2**64 - 1)
OFFSETS = st.integers(0, 2**63 - 2) | st.integers(0, 3)

STANDARD = hb.NVFP4()
TILE = hb.NVFP4(block=(16, 16))
ROW = hb.NVFP4(outer="row")
SR = hb.NVFP4(rounding="stochastic")
SR_TILE = hb.NVFP4(rounding="stochastic", block=(16, 16))
TOWARD_ZERO = hb.NVFP4(rounding="toward_zero")
RHT = hb.NVFP4(rotation=hb.Hadamard())
FRESH = hb.NVFP4(rotation=hb.Hadamard(size=64, signs="fresh"))
MAE = hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0)
MSE_TILE = hb.NVFP4(block=(16, 16), scaling=hb.FourOverSix(error="mse"), e4m3_max=256.0)
EDEN = hb.NVFP4(scaling=hb.Eden(), fp4_max=6 / (17 / 16 * 0.93), e4m3_max=255.99)
MX = hb.MXFP8()
MX5 = hb.MXFP8(element="e5m2")

SPECS = {
    "standard": STANDARD,
    "tile": TILE,
    "row": ROW,
    "sr": SR,
    "sr_tile": SR_TILE,
    "sr_rht": hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(), fp4_max=HEADROOM),
    "toward_zero": TOWARD_ZERO,
    "rht": RHT,
    "rht128": hb.NVFP4(rotation=hb.Hadamard(size=128), outer="row"),
    "fresh": FRESH,
    "mae": MAE,
    "mse_tile": MSE_TILE,
    "eden": EDEN,
    "mxfp8": MX,
    "mxfp8_e5m2": MX5,
}
"""One spec of every kind, by name: `parametrize` over it where hypothesis is more than needed."""

NAN_SCALE = {"e4m3": 0x7F, "e8m0": 0xFF}
"""The scale of a poisoned block, by the format of scales."""

fourosix = st.builds(
    hb.FourOverSix,
    error=st.sampled_from(("mae", "mse")),
    error_math=st.sampled_from(("exact", "scaled")),
    candidates=st.sets(st.sampled_from((0.5, 0.875, 1.25, 1.5, 2.0)), max_size=2).map(lambda more: (1.0, *more)),
)


SIGNS = ("fixed", "fresh", "none", "+-", "-+++--+-+-++-+--")
hadamards = st.builds(hb.Hadamard, size=st.sampled_from((16, 32, 64, 128)), signs=st.sampled_from(SIGNS))


@st.composite
def nvfp4_specs(draw) -> hb.NVFP4:
    scaling = draw(st.just(hb.BlockMax()) | fourosix | st.just(hb.Eden()))
    if scaling == hb.Eden():
        return draw(eden_specs())
    chosen = not isinstance(scaling, hb.BlockMax)
    block = draw(st.sampled_from(((1, 16), (16, 16))))
    tile = block == (16, 16)
    return hb.NVFP4(
        block=block,
        rounding="nearest" if chosen else draw(st.sampled_from(("nearest", "stochastic", "toward_zero"))),
        outer="tensor" if tile else draw(st.sampled_from(("tensor", "row"))),
        rotation=None if tile else draw(st.none() | hadamards),
        scaling=scaling,
        fp4_max=6.0 if chosen else draw(st.sampled_from((6.0, HEADROOM, 4.0, 0.7))),
        e4m3_max=draw(st.sampled_from((448.0, 256.0, 100.0, 0.3))),
    )


def eden_specs() -> st.SearchStrategy[hb.NVFP4]:
    return st.builds(
        hb.NVFP4,
        scaling=st.just(hb.Eden()),
        outer=st.sampled_from(("tensor", "row")),
        rotation=st.none() | hadamards,
        fp4_max=st.sampled_from((EDEN.fp4_max, 6.0, HEADROOM, 8.0, 0.7)),
        e4m3_max=st.sampled_from((EDEN.e4m3_max, 448.0, 0.3)),
    )


specs = nvfp4_specs() | st.sampled_from((MX, MX5))

PATTERNS = ("normal", "heavy", "ties", "sparse", "spread", "tiny", "huge", "poisoned")


def make(pattern: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a tensor of a named kind; the same arguments give the same values."""
    g = torch.Generator().manual_seed(seed % 2**63)
    x = torch.randn(shape, generator=g)
    top = float(torch.finfo(dtype).max)
    if pattern == "heavy":
        x = x.sign() * (x.abs() * 2.5).exp()
    elif pattern == "ties":  # halfway between FP4 values once the amax is 6 or 2688
        grid = torch.tensor((0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0))
        x = grid[torch.randint(15, shape, generator=g)] * x.sign()
    elif pattern == "sparse":
        x = torch.where(torch.rand(shape, generator=g) < 0.15, x, x.sign() * 0.0)
    elif pattern == "spread":
        x = x * torch.exp2(torch.randint(-14, 15, shape, generator=g).float())
    elif pattern == "tiny":
        x = x * float(torch.finfo(dtype).smallest_normal) * torch.exp2(torch.randint(-6, 3, shape, generator=g).float())
    elif pattern == "huge":
        x = (x / 3).clamp(-1, 1) * top
    elif pattern == "poisoned":
        bad = torch.tensor((math.nan, math.inf, -math.inf))[torch.randint(3, shape, generator=g)]
        x = torch.where(torch.rand(shape, generator=g) < 0.03, bad, x)
    return x.to(dtype)


@st.composite
def matrices(draw, max_rows: int = 18, max_cols: int = 40, patterns=PATTERNS) -> Tensor:
    shape = draw(st.tuples(st.integers(0, max_rows), st.integers(0, max_cols)))
    return make(draw(st.sampled_from(patterns)), shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32)))


def same_bytes(a: hb.QuantTensor, b: hb.QuantTensor) -> bool:
    """Whether codes, LINEAR scales and amax are equal bit for bit."""
    pairs = ((a.qdata, b.qdata), (a.linear_scale(), b.linear_scale()))
    amaxes = a.amax is None or torch.equal(a.amax.view(torch.int32), b.amax.view(torch.int32))
    return amaxes and all(torch.equal(s.view(torch.uint8), t.view(torch.uint8)) for s, t in pairs)


def assert_same_bytes(a: hb.QuantTensor, b: hb.QuantTensor) -> None:
    assert a.shape == b.shape and a.spec == b.spec
    for name, s, t in (("qdata", a.qdata, b.qdata), ("block_scale", a.linear_scale(), b.linear_scale())):
        s, t = s.view(torch.uint8), t.view(torch.uint8)
        assert torch.equal(s, t), f"{name} differs at {(s != t).nonzero()[:5].tolist()} in {a.spec}"
    assert same_bytes(a, b), f"amax {a.amax} is not {b.amax}"
