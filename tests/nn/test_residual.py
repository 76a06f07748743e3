"""Norms that add a residual: bits and gradients of torch's sum before them, whoever asks and however it is run."""

import norm_calls
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte.nn import LayerNorm, LayerNormLinear, LayerNormMLP, RMSNorm
from halfbyte.nn.norm import add_then_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = ((BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32), (FP32, BF16))
WIDTH = 48


def values(i: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 19, WIDTH)) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(i)) * (1 + 10 * i)).to(dtype)


def summed(module: nn.Module):
    """Return what `module` computes with a residual, as two steps: torch adds, and the module sees no residual."""

    def forward(x, residual):
        total = x + residual
        return module(total), total

    return forward


def added(module: nn.Module):
    return lambda x, residual: module(x, residual=residual)


def run(function, module: nn.Module, dtypes: tuple[torch.dtype, torch.dtype], uses=("norm", "sum")) -> list:
    """Return outputs and all gradients of two layers that share one stream."""
    module.zero_grad()
    x, residual = (values(i, dtype).requires_grad_() for i, dtype in enumerate(dtypes))
    y, total = function(x, residual)
    y = y if isinstance(y, tuple) else (y,)
    loss = torch.zeros(())
    for i, t in enumerate(y if "norm" in uses else ()):
        loss = loss + (t.float() * values(3 + i, FP32, t.shape)).sum()
    if "sum" in uses:  # twice, as where more than the next norm reads the stream
        loss = loss + (total.float() * values(7, FP32)).sum() + total.float().square().sum() * 1e-3
    loss.backward()
    gradients = [x.grad, residual.grad, *(p.grad for p in module.parameters())]
    return [*(t.detach() for t in y), total.detach(), *(None if g is None else g.clone() for g in gradients)]


def assert_same(given: list, wanted: list) -> None:
    assert len(given) == len(wanted)
    for a, b in zip(given, wanted, strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


def norms(dtype: torch.dtype) -> list[nn.Module]:
    made: list[nn.Module] = [RMSNorm(WIDTH), LayerNorm(WIDTH), LayerNorm(WIDTH, bias=False)]
    for norm in made:
        for i, parameter in enumerate(norm.parameters()):
            parameter.data = values(20 + i, FP32, (WIDTH,)) / 100
    return [norm.to(dtype) for norm in made]


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: "+".join(str(d).removeprefix("torch.") for d in pair))
def test_norms_are_those_of_the_sum(dtypes):
    for norm in norms(dtypes[0]):
        assert_same(run(added(norm), norm, dtypes), run(summed(norm), norm, dtypes))


@pytest.mark.parametrize("uses", [("norm",), ("sum",)])
def test_an_output_that_nobody_uses(uses):
    for norm in norms(BF16):
        assert_same(run(added(norm), norm, (BF16, BF16), uses), run(summed(norm), norm, (BF16, BF16), uses))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd", "mxfp8", "nvfp4_forward", "bf16"])
def test_layers_are_those_of_the_sum(recipe):
    state = hb.RunState(1)
    for module in (
        LayerNormLinear(WIDTH, {"q_proj": 32, "k_proj": 16}, norm="layer", recipe=recipe, state=state),
        LayerNormLinear(WIDTH, 32, recipe=recipe, state=state),
        LayerNormMLP(WIDTH, 40, recipe=recipe, state=state),
    ):
        module.to(BF16)
        assert_same(run(added(module), module, (BF16, BF16)), run(summed(module), module, (BF16, BF16)))


def test_calls_draw_as_without_a_residual():
    m = LayerNormMLP(WIDTH, 40, state=hb.RunState(3)).to(BF16)
    one, other = (run(lambda x, r, c=call: m(x, c, r), m, (BF16, BF16)) for call in (0, 1))
    assert torch.equal(one[0], other[0]) and not torch.equal(one[2], other[2])


def test_under_autocast_the_stream_stays_fp32():
    """As where an fp32 stream meets the bf16 output of a linear layer."""
    m = LayerNormMLP(WIDTH, 40, recipe="nvfp4", state=hb.RunState(1))
    results = []
    for function in (added(m), summed(m)):
        with torch.autocast("cpu", BF16):
            results.append(run(function, m, (BF16, FP32)))
    assert_same(*results)
    assert results[0][0].dtype == BF16 and results[0][1].dtype == FP32


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_compiled_and_recomputed(recipe):
    m = LayerNormMLP(WIDTH, 40, norm="layer", recipe=recipe, state=hb.RunState(2)).to(BF16)
    expected = run(summed(m), m, (BF16, BF16))
    torch._dynamo.reset()
    compiled = torch.compile(added(m), fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, m, (BF16, BF16)), expected)
    again = run(lambda x, r: checkpoint(added(m), x, r, use_reentrant=False), m, (BF16, BF16))
    assert_same(again, expected)
    ops = hb.selective_checkpoint_ops()

    def context():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(ops)

    selective = run(lambda x, r: checkpoint(added(m), x, r, use_reentrant=False, context_fn=context), m, (BF16, BF16))
    assert_same(selective, expected)


def test_one_kernel_adds_and_takes_the_norm(monkeypatch):
    seen = norm_calls.noted(monkeypatch)
    m = LayerNormLinear(WIDTH, 32, recipe="nvfp4")
    run(added(m), m, (FP32, FP32))
    assert seen == ["add_norm", "norm_backward of a sum"]


def test_gradients_of_x_and_residual_are_tensors_of_their_own():
    """An optimizer that changes one leaves the other alone."""
    norm = RMSNorm(WIDTH)
    x, residual = (values(i, FP32).requires_grad_() for i in range(2))
    y, total = norm(x, residual)
    (y.sum() + total.sum()).backward()
    assert torch.equal(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.any()


def test_a_norm_with_hooks_is_called():
    m = LayerNormLinear(WIDTH, 32, recipe="nvfp4", state=hb.RunState(1)).to(BF16)
    expected, seen = run(summed(m), m, (BF16, BF16)), []
    m.norm.register_forward_hook(lambda module, given, result: seen.append(len(result)))
    assert_same(run(added(m), m, (BF16, BF16)), expected)
    assert seen == [2]


def test_fuse_takes_norms_that_may_be_given_a_residual():
    """A norm of another library that may be given one is left alone: what it does with it nobody has tried."""
    block = nn.Module()
    block.input_layernorm, block.self_attn = RMSNorm(16), nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        block.self_attn.add_module(name, hb.nn.Linear(16, 16, recipe="nvfp4", state=hb.RunState(1)))
    norm = block.input_layernorm
    assert hb.nn.fuse_(block).fused == ("input_layernorm",) and block.input_layernorm is norm
    x, residual = values(0, FP32, (4, 16)), values(1, FP32, (4, 16))
    y, total = norm(x, residual)
    q, total = block.self_attn.q_proj(y), total + 0
    assert torch.equal(q, block.self_attn.q_proj(RMSNorm(16)(total)))

    class TheirRMSNorm(RMSNorm):
        pass

    block.input_layernorm = TheirRMSNorm(16)
    assert "takes other arguments" in hb.nn.fuse_(block).left["input_layernorm"]


def test_norms_that_add_nothing_get_the_sum():
    x, residual = values(0, FP32), values(1, FP32)
    for norm in (nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)):
        y, total = add_then_norm(norm, x, residual)
        assert torch.equal(total, x + residual) and torch.equal(y, norm(x + residual))
        y, total = add_then_norm(norm, x, None)
        assert total is x and torch.equal(y, norm(x))


def test_the_stream_may_not_change_before_the_backward():
    """It is what the norm keeps: torch says so, as it does of a sum that torch took."""
    x, residual = (values(i, FP32).requires_grad_() for i in range(2))
    y, total = RMSNorm(WIDTH)(x, residual)
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "residual,error,message",
    [
        (torch.zeros(WIDTH), ValueError, r"residual.shape=\(48,\): x.shape=\(2, 19, 48\).*residual.expand"),
        (torch.zeros(2, 19, WIDTH, dtype=torch.int32), TypeError, "residual.dtype=torch.int32.*cast residual first"),
        (torch.zeros(2, 19, WIDTH, dtype=torch.float64), TypeError, "residual.dtype=torch.float64"),
    ],
)
def test_wrong_residuals_are_named(residual, error, message):
    with pytest.raises(error, match=message):
        RMSNorm(WIDTH)(values(0, FP32), residual)


def test_no_second_derivative():
    x, residual = (values(i, FP32).requires_grad_() for i in range(2))
    y, total = RMSNorm(WIDTH)(x, residual)
    (dx,) = torch.autograd.grad((y * y).sum() + total.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice.*unfuse_"):
        dx.sum().backward()
