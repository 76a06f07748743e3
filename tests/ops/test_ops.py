"""The custom ops: opcheck, flop formula, choice of backend, and torch.compile over a layer that uses them."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import halfbyte as hb
from halfbyte import ops
from halfbyte.ops.backends import choose

STANDARD, TILE = hb.NVFP4(), hb.NVFP4(block=(16, 16))
DRAWING = hb.NVFP4(rounding="stochastic", rotation=hb.Hadamard(size=32, signs="fresh"))
SPECS = (STANDARD, TILE, DRAWING, hb.NVFP4(outer="row"), hb.MXFP8())
HB = torch.ops.halfbyte


def _draws():
    base = hb.Philox(11, 5).on(torch.device("cpu")).base
    return base, 3, 0, None, base, 7


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_32_4_4"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key.replace("/", "-"))
def test_opcheck_quantize(spec, scale_layout):
    x = torch.randn(19, 40, generator=torch.Generator().manual_seed(0))
    opcheck(HB.quantize, (x, spec.key, *_draws(), None, scale_layout, ""))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key.replace("/", "-"))
def test_every_output_is_contiguous(spec):
    """As fakes and so compiled code take it for granted; of single blocks too."""
    for rows, cols in ((1, 32), (5, 7), (33, 20), (64, 1), (3, 70)):
        x = torch.randn(cols, rows).t()
        outputs = HB.quantize_row_col(x, spec.key, spec.key, *_draws(), None, None, "linear", False, False, "")
        blocks = HB.quantize(x, spec.key, *_draws(), None, "linear", "")
        outputs += (*blocks, HB.dequantize(*blocks, spec.key, cols, torch.float32, "linear", ""))
        assert all(t.is_contiguous() for t in outputs), (rows, cols)


@pytest.mark.parametrize("given", [False, True])
def test_opcheck_quantize_with_amax(given):
    amax = torch.tensor(3.0) if given else None
    opcheck(HB.quantize, (torch.randn(8, 16), STANDARD.key, *_draws(), amax, "linear", ""))


@pytest.mark.parametrize("row,col", [(STANDARD, DRAWING), (TILE, TILE), (None, hb.MXFP8()), (STANDARD, None)])
def test_opcheck_quantize_row_col(row, col):
    keys = (row.key if row else "", col.key if col else "")
    opcheck(HB.quantize_row_col, (torch.randn(33, 48), *keys, *_draws(), None, None, "linear", True, False, ""))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key.replace("/", "-"))
def test_opcheck_dequantize_amax_transpose(spec):
    x = torch.randn(20, 36)
    q = hb.quantize(x, spec, rng=hb.Philox(1), sign_rng=hb.Philox(2))
    opcheck(HB.dequantize, (*q.blocks, spec.key, 36, torch.bfloat16, "linear", ""))
    opcheck(HB.amax, (x, ""))
    opcheck(HB.amax_of_all, ([x, x[3:]], ""))
    opcheck(HB.row_col_amax, (x, spec.key, spec.key if spec.is_tile else "", *_draws()[4:], ""))
    if spec.is_tile:
        opcheck(HB.transpose, (q.blocks.qdata, q.blocks.block_scale, 20, 36, ""))


def test_opcheck_gemm():
    a, b = (hb.quantize(torch.randn(n, 40), STANDARD).blocks for n in (12, 20))
    sides = (*a, STANDARD.key, "linear", *b, STANDARD.key, "linear", 40)
    opcheck(HB.gemm_nt, (*sides, torch.float32, torch.randn(20), ""))
    opcheck(HB.gemm_nt_out, (*sides, None, torch.ones(12, 20), True, ""))
    plain = (torch.randn(12, 40), None, None, "", "linear", *b, STANDARD.key, "linear", 40)
    opcheck(HB.gemm_nt, (*plain, torch.bfloat16, None, ""))
    opcheck(HB.gemm_nt_add, (*sides, torch.ones(12, 20), torch.bfloat16, ""))
    opcheck(HB.decode, (*a, STANDARD.key, 40, "linear", ""))


def test_flop_counter_knows_the_gemm():
    a, b = hb.quantize(torch.randn(12, 40), STANDARD), hb.quantize(torch.randn(20, 40), STANDARD)
    with FlopCounterMode(display=False) as counter:
        hb.gemm_nt(a, b)
        hb.gemm_nt(a, b, out=torch.zeros(12, 20), accumulate=True)
        ops.gemm_nt_add(a.dequantize(), b.dequantize(), torch.zeros(12, 20))
    assert counter.get_total_flops() == 3 * (2 * 12 * 20 * 40)


def test_backend_is_chosen_with_a_reason():
    statuses = {status.name: status for status in hb.backends("cpu")}
    assert statuses["reference"].available
    assert not statuses["triton"].available and "CUDA" in statuses["triton"].reason
    assert choose(torch.device("cpu"), None) == "reference"
    with pytest.raises(ValueError, match="backend='cuda'.*reference"):
        hb.quantize(torch.randn(16), STANDARD, backend="cuda")
    with pytest.raises(ValueError, match="backend='triton'"):
        hb.quantize(torch.randn(16), STANDARD, backend="triton")


def test_of_no_tensors_there_is_no_amax():
    with pytest.raises(ValueError, match="xs=\\[\\]"):
        ops.amax_of_all([])


def test_layers_run_on_the_meta_device():
    """Shapes alone; torch has no autocast there and raises when asked for it."""
    layers = (
        hb.nn.Linear(40, 24, device="meta"),
        hb.nn.LayerNormMLP(40, 48).to("meta"),
        hb.nn.GroupedLinear(2, 40, 24, device="meta"),
    )
    for layer, more in zip(layers, ((), (), (torch.tensor([2, 3], device="meta"),)), strict=True):
        x = torch.randn(5, 40, device="meta", requires_grad=True)
        y = layer(x, *more)
        y.sum().backward()
        assert (y.device, y.dtype) == (x.device, x.dtype) and x.grad is not None and y.shape[0] == 5
        assert all(param.grad.shape == param.shape for param in layer.parameters())


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd", "four_over_six"])
def test_compiled_layer_equals_eager(recipe):
    torch.manual_seed(0)
    layer = hb.nn.Linear(64, 48, recipe=recipe, state=hb.RunState(3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(32, 64), torch.randn(32, 48)

    def gradients(module):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        y.backward(dy)
        return y.detach(), inputs.grad, layer.weight.grad.clone()

    first = gradients(compiled)
    for mine, expected in zip(first, gradients(layer), strict=True):
        assert torch.equal(mine, expected)
    layer.run_state.advance()
    second = gradients(compiled)
    for mine, expected in zip(second, gradients(layer), strict=True):
        assert torch.equal(mine, expected)
    draws = recipe != "nvfp4_mxfp8_bwd"
    assert torch.equal(first[2], second[2]) != draws, "advancing changes the random bits only"
