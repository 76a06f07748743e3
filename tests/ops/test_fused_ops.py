"""The ops of norms and activations: opcheck, and empty tensors."""

import pytest
import torch
from torch.library import opcheck

import halfbyte as hb
from halfbyte import ops
from halfbyte.arithmetic import Normed

HB = torch.ops.halfbyte
FRESH = hb.NVFP4(rotation=hb.Hadamard(size=32, signs="fresh")).key
WANTED = (("", ""), ("tensor", hb.NVFP4().key), ("row", FRESH))


@pytest.mark.parametrize("wanted", WANTED, ids=lambda w: w[0] or "nothing")
def test_opcheck(wanted):
    rest = (*wanted, hb.Philox(11, 5).on(torch.device("cpu")).base, 3, "")
    x, w = torch.randn(19, 40, dtype=torch.bfloat16), torch.randn(40)
    for centered in (False, True):
        opcheck(HB.norm, (x, w, w if centered else None, 1e-5, centered, torch.float32, *rest))
        y, mean, rstd, *_ = HB.norm(x, w, None, 1e-5, centered, torch.bfloat16, *rest)
        opcheck(HB.norm_backward, (y, x, w, mean, rstd, centered, centered, ""))
        opcheck(HB.add_norm, (x, x.float(), w, w if centered else None, 1e-5, centered, torch.bfloat16, *rest))
        opcheck(HB.add_norm_backward, (y, x, x, w, mean, rstd, centered, centered, ""))
    for up in (None, x.clone()):
        opcheck(HB.activation, (x, up, "relu2", *rest))
        opcheck(HB.activation_backward, (y, x, up, "relu2", *rest))


@pytest.mark.parametrize("centered", [False, True])
def test_outputs_of_strided_input_are_contiguous(centered):
    x, w, rest = torch.randn(40, 19).t(), torch.randn(40), ("", "", None, 0, "")
    y, mean, rstd, *_ = HB.norm(x, w, w, 1e-5, centered, torch.float32, *rest)
    back = HB.norm_backward(x, x, w, mean, rstd, centered, True, "")
    expected = HB.norm(x.contiguous(), w, w, 1e-5, centered, torch.float32, *rest)[0]
    assert torch.equal(y, expected) and all(t.is_contiguous() for t in (y, mean, rstd, *back))
    y, total, mean, rstd, *_ = HB.add_norm(x, x, w, w, 1e-5, centered, torch.float32, *rest)
    back = HB.add_norm_backward(x, x, total, w, mean, rstd, centered, True, "")
    assert torch.equal(total, 2 * x) and all(t.is_contiguous() for t in (y, total, mean, rstd, *back))


@pytest.mark.parametrize("shape", [(0, 40), (3, 0)])
def test_empty_tensors(shape):
    x, w = torch.randn(shape), torch.ones(shape[1])
    how = ops.Following(hb.NVFP4(), hb.NVFP4())
    for centered in (False, True):
        y, statistics, amaxes = ops.norm(x, w, w, ops.NormKind(1e-5, centered), torch.bfloat16, how)
        assert y.shape == shape and y.dtype == torch.bfloat16 and amaxes.row == amaxes.col == 0
        dx, dw, db = ops.norm_backward(y, Normed(x, w, statistics, centered, True))
        assert dx.shape == shape and not dw.any() and not db.any()
        y, total, statistics, amaxes = ops.add_norm(x, x, (w, w), ops.NormKind(1e-5, centered), torch.bfloat16, how)
        assert y.shape == total.shape == shape and total.dtype == x.dtype and amaxes.row == amaxes.col == 0
        dx, dw, db = ops.norm_backward(y, Normed(total, w, statistics, centered, True), total)
        assert dx.shape == shape and not dw.any() and not db.any()
    h, amaxes = ops.activation(x, x, "silu", how)
    assert h.shape == shape and amaxes.row == amaxes.col == 0
