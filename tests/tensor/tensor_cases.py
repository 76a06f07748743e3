"""Specs, values and comparisons that the tests of QuantTensor share."""

import pickle

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.layout import LINEAR, SWIZZLED_32_4_4
from halfbyte.tensor import QuantTensor

ROW, TILE, MX = hb.NVFP4(), hb.NVFP4(block=(16, 16)), hb.MXFP8()
SPECS = {
    "1x16": ROW,
    "16x16": TILE,
    "row": hb.NVFP4(outer="row"),
    "4over6": hb.NVFP4(scaling=hb.FourOverSix(), e4m3_max=256.0),
    "rotated": hb.NVFP4(rotation=hb.Hadamard(size=32)),
    "stochastic": hb.NVFP4(rounding="stochastic", fp4_max=6 * 16 / 17),
    "fresh": hb.NVFP4(rotation=hb.Hadamard(size=16, signs="fresh")),
    "mxfp8": MX,
    "e5m2": hb.MXFP8(element="e5m2"),
}
PLAIN_SPECS = {name: SPECS[name] for name in ("1x16", "16x16", "row", "4over6", "mxfp8", "e5m2")}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
plain_spec = pytest.mark.parametrize("spec", PLAIN_SPECS.values(), ids=PLAIN_SPECS)
every_layout = pytest.mark.parametrize("scale_layout", (LINEAR, SWIZZLED_32_4_4))


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(spec, *shape: int, seed: int = 0, **options) -> QuantTensor:
    rng, sign_rng = hb.Philox(seed, 1), hb.Philox(seed, 2)
    return hb.quantize(values(*(shape or (40, 72)), seed=seed), spec, rng=rng, sign_rng=sign_rng, **options)


def inner(q: QuantTensor) -> dict[str, Tensor]:
    names, _ = q.__tensor_flatten__()
    return {name: getattr(q, name) for name in names}


def raw(tensor: Tensor) -> Tensor:
    """The bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: QuantTensor, b: QuantTensor) -> None:
    assert type(a) is QuantTensor and type(b) is QuantTensor
    assert a.header[:3] == b.header[:3] and a.shape == b.shape and a.stride() == b.stride()
    ours, theirs = inner(a), inner(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        assert torch.equal(raw(tensor), raw(theirs[name])), name


def shares(a: QuantTensor, b: QuantTensor) -> list[str]:
    theirs = inner(b)
    return [n for n, t in inner(a).items() if t.untyped_storage().data_ptr() == theirs[n].untyped_storage().data_ptr()]


def pickled(value):
    return pickle.loads(pickle.dumps(value))
