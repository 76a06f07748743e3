"""Norm and activation kernels on a GPU: the bytes of the reference on the CPU, and of the unfused operations there."""

import fused_checks as checks
import pytest
import torch

import halfbyte as hb
from halfbyte import functional as HF
from halfbyte import ops
from halfbyte.arithmetic import FUNCTIONS
from halfbyte.kernels.fused import activation, norm
from halfbyte.nn import LayerNormMLP, forward_shared
from halfbyte.sides import both_sides

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
RAGGED, WHOLE = (333, 1001), (64, 4096)  # every other shape is another compilation
NARROW = (64, 512), (64, 768), (48, 3000)  # tiles for narrow rows; a last tile that does columns again
RECIPES = {name: name for name in ("nvfp4", "quartet2", "nvfp4_mxfp8_bwd", "mxfp8", "nvfp4_forward", "bf16")}
RECIPES["nvfp4, a rotation of 64"] = hb.recipes.nvfp4(hadamard=hb.Hadamard(size=64))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm(centered):
    for shape in (RAGGED, WHOLE):
        for bad in (False, True):
            checks.check_norm(shape, "cuda", checks.ROTATED, centered, (BF16, BF16), bad)
    checks.check_norm(RAGGED, "cuda", checks.PLAIN, centered, (FP32, BF16))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm_of_a_sum(centered):
    """torch's sums before and after the kernels without a residual: on the CPU, bit for bit."""
    for shape in (RAGGED, WHOLE, *NARROW):
        for bad in (False, True):
            checks.check_residual(shape, "cuda", checks.ROTATED, centered, (BF16, BF16, BF16), bad)
    checks.check_residual(RAGGED, "cuda", checks.PLAIN, centered, (BF16, FP32, BF16))
    checks.check_residual(RAGGED, "cuda", checks.BY_ROW, centered, (FP16, FP16, FP16))
    checks.check_residual((64, 768), "cuda", checks.ROTATED, centered, (BF16, FP32, BF16))


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_gradients_of_rows_of_every_width(centered):
    """What the tests above leave out: few tiles of lanes and many, whole and not, streams of fp32."""
    checks.check_residual((1000, 1536), "cuda", checks.NOTHING, centered, (BF16, BF16, BF16))
    for cols in (40, 2048, 2880, 4608):
        checks.check_residual((1000, cols), "cuda", checks.NOTHING, centered, (BF16, FP32, BF16))


def test_a_layer_with_a_residual_is_a_sum_and_a_layer():
    torch.manual_seed(0)
    m = LayerNormMLP(512, 768, recipe="nvfp4", state=hb.RunState(1)).to("cuda", BF16)
    x, residual = (torch.randn(300, 512, device="cuda", dtype=BF16, requires_grad=True) for _ in range(2))
    leaves, (dy, dtotal) = [x, residual, *m.parameters()], torch.randn(2, 300, 512, device="cuda", dtype=BF16)
    total = x + residual
    results = [
        (y, s, *torch.autograd.grad((y, s), leaves, (dy, dtotal)))
        for y, s in (m(x, residual=residual), (m(total), total))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("wish", ["nothing", "plain", "by_row", "wide"])
def test_other_amaxes(wish):
    checks.check_norm(RAGGED, "cuda", checks.WISHES[wish], False, (FP16, FP16))
    checks.check_activation(RAGGED, "cuda", checks.WISHES[wish], "relu2", False, FP16)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation(function):
    for bad in (False, True):
        checks.check_activation(WHOLE, "cuda", checks.ROTATED, function, True, BF16, bad)
        checks.check_activation((64, 1408), "cuda", checks.ROTATED, function, True, BF16, bad)
    checks.check_activation(RAGGED, "cuda", checks.PLAIN, function, True, BF16)


def test_signs_that_are_given():
    checks.check_norm((257, 1032), "cuda", checks.GIVEN, False, (torch.bfloat16, torch.bfloat16), bad=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_is_unfused(recipe):
    """Output and every gradient of an MLP, stochastic rounding included."""
    torch.manual_seed(0)
    m = LayerNormMLP(512, 768, recipe=RECIPES[recipe], state=hb.RunState(1)).to("cuda", BF16)

    def parts(x):
        h = HF.activation("swiglu", *forward_shared(HF.rms_norm(x, m.norm.weight), (m.gate_proj, m.up_proj)))
        return m.down_proj(h)

    x = torch.randn(300, 512, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn_like(x)
    leaves = [x, *m.parameters()]
    results = [(y, *torch.autograd.grad(y, leaves, dy)) for y in (m(x), parts(x))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_launches():
    """Norm and amaxes, then both quantizations: two kernels. An activation likewise."""
    x = torch.randn(256, 512, device="cuda", dtype=BF16)
    weight = torch.ones(512, device="cuda", dtype=BF16)

    def norm_and_quantize():
        how = following()
        y, _, amaxes = ops.norm(x, weight, None, ops.NormKind(1e-5, False), BF16, how)
        return ops.quantize_row_col(y, *both_sides(how.row, how.col, row_amax=amaxes.row, col_amax=amaxes.col))

    def activate_and_quantize():
        how = following()
        h, amaxes = ops.activation(x, x, "silu", how)
        return ops.quantize_row_col(h, *both_sides(how.row, how.col, row_amax=amaxes.row, col_amax=amaxes.col))

    for function in (norm_and_quantize, activate_and_quantize):
        function()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            function()
            torch.cuda.synchronize()
        kernels = [e.name for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) <= 2, kernels


def following():
    return ops.Following(hb.NVFP4(), checks.RHT)


def test_a_captured_graph_replays_new_amaxes():
    x = torch.randn(64, 512, device="cuda", dtype=BF16)
    activation.activation_with_amaxes(x, None, "silu", *checks.ROTATED, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, amaxes = activation.activation_with_amaxes(x, None, "silu", *checks.ROTATED, None)
    for scale in (4.0, 0.5):
        x.copy_(torch.randn_like(x) * scale)
        graph.replay()
        expected = activation.activation_with_amaxes(x, None, "silu", *checks.ROTATED, None)[1]
        assert torch.equal(amaxes[0], expected[0]) and torch.equal(amaxes[1], expected[1])


def test_streams_do_not_meet_in_one_workspace():
    x = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    weight = torch.ones(2048, device="cuda", dtype=BF16)
    inputs = [x, x * 3]
    expected = [norm.norm_with_amaxes(t, (weight, None), (1e-5, False, FP32), *checks.PLAIN, None)[2] for t in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, t in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(norm.norm_with_amaxes(t, (weight, None), (1e-5, False, FP32), *checks.PLAIN, None)[2])
        torch.cuda.synchronize()
        assert all(torch.equal(a[0], b[0]) for a, b in zip(got, expected, strict=True))


def test_more_than_2_to_the_31_elements():
    rows, cols = 70_000, 32_768
    x = torch.randn(rows, cols, device="cuda", dtype=BF16)
    h, amaxes = activation.activation_with_amaxes(x, None, "relu2", *checks.PLAIN, None)
    assert amaxes[0] == h.abs().max()
    for part in (slice(0, 16), slice(rows - 16, rows)):
        checks.same(h[part], activation.activation_with_amaxes(x[part], None, "relu2", *checks.NOTHING, None)[0])
