"""Transient operands and whole layers on a GPU: decoded values, and every recipe against the reference."""

import kernel_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte.kernels import backend
from halfbyte.layout import Operand
from halfbyte.sides import both_sides

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SR, RHT, SIX = {"rounding": "stochastic"}, {"rotation": hb.Hadamard()}, {"scaling": hb.FourOverSix(), "e4m3_max": 256.0}
PAIRS = {
    "activation": (hb.NVFP4(), hb.NVFP4(**RHT)),
    "gradient": (hb.NVFP4(**SR), hb.NVFP4(**SR, **RHT)),
    "weight": (checks.TILE, checks.TILE),
    "four_over_six": (hb.NVFP4(**SIX), hb.NVFP4(**SIX, **RHT)),
    "mixed": (hb.NVFP4(), hb.MXFP8()),
    "eden": (hb.recipes.quartet2().fprop.a, hb.recipes.quartet2().wgrad.b),
    "eden_gradient": (hb.recipes.quartet2().dgrad.a, hb.recipes.quartet2().wgrad.a),
    "mxfp8": (hb.MXFP8(), hb.MXFP8(element="e5m2")),
}


@pytest.mark.parametrize("shape", [(1000, 2000), (257, 96), (33, 4100), (16, 16)])
@pytest.mark.parametrize("name", PAIRS)
def test_values_are_the_decoded_codes(name, shape):
    specs = PAIRS[name]
    x = torch.randn(shape, device="cuda").bfloat16()
    x[0, 0] = float("nan")
    draws = {"draw": hb.Philox(7, 3).on(x.device), "sign_draw": hb.Philox(8, 3).on(x.device)}
    codes = backend.quantize_row_col(x, *both_sides(*specs, **draws))
    values = backend.quantize_row_col(x, *both_sides(*specs, **draws, transient=(True, True)))
    for side, (stored, transient, spec) in enumerate(zip(codes, values, specs, strict=True)):
        checks.same(transient.qdata, backend.decode(Operand(stored, spec, shape[1 - side])).values)


@pytest.mark.parametrize("size", [1.0, 1e-25])
def test_values_of_programs_with_several_tiles(size):
    """One decision about divisions and one seed for two tiles, whichever way the decision falls."""
    specs, shape = PAIRS["gradient"], (4096, 4608)
    x = (torch.randn(shape, device="cuda") * size).bfloat16()
    draw = hb.Philox(7, 3).on(x.device)
    codes = backend.quantize_row_col(x, *both_sides(*specs, draw=draw))
    values = backend.quantize_row_col(x, *both_sides(*specs, draw=draw, transient=(True, True)))
    for side, (stored, transient, spec) in enumerate(zip(codes, values, specs, strict=True)):
        checks.same(transient.qdata, backend.decode(Operand(stored, spec, shape[1 - side])).values)


@pytest.mark.parametrize("recipe", [name for name in hb.recipes.PRESETS if name != "bf16"])
def test_layer_follows_the_reference(recipe):
    torch.manual_seed(0)
    x, w = (torch.randn(shape).bfloat16() for shape in ((264, 200), (136, 200)))
    dy = torch.randn(264, 136).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        inputs, weight = (t.detach().to(device).requires_grad_() for t in (x, w))
        y = hb.linear(inputs, weight, None, hb.recipes.get(recipe), rng=hb.Philox(5, 8), out_dtype=torch.float32)
        y.backward(dy.to(device).float())
        results.append([y.detach().cpu(), inputs.grad.cpu(), weight.grad.cpu()])
    for name, ours, theirs in zip(("y", "dx", "dw"), results[1], results[0], strict=True):
        bound = 1e-5 if name == "y" else 5e-3  # gradients are rounded to bf16
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < bound, f"{name}: relative error {error:.2e}"
