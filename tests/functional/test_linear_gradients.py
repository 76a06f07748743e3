"""Output and gradients of hb.linear in every recipe against fp64 products of separately quantized operands."""

import linear_cases as cases
import pytest
import torch

import halfbyte as hb
from halfbyte.functional.activation import linear_activation
from halfbyte.functional.linear import Layers

SUM = 2e-6  # fp32 accumulation and factors, relative to the sum of absolute products
ROUND = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
RNG = hb.Philox(seed=2**63 + 5, offset=(7 << 32) + 48)
EVERY = cases.RECIPES | cases.VARIANTS
every_recipe = pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=cases.RECIPES.keys())


def assert_near(actual: torch.Tensor, product: cases.Product, what: str) -> None:
    allowed = SUM * product.bound + ROUND[actual.dtype] * product.value.abs() + 1e-30
    if actual.dtype == torch.float16:
        allowed = allowed + 2.0**-25  # half a subnormal step
    error = (actual.double() - product.value).abs()
    assert (error <= allowed).all(), f"{what}: {float((error / allowed).max()):.3g} times the allowed error"


def run(x, w, bias, dy, recipe, **options):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, w, bias)]
    y = hb.linear(*leaves, recipe, rng=RNG, **options)
    y.backward(dy.to(y.dtype))
    return (y.detach(), *(None if t is None else t.grad for t in leaves))


@pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients(recipe, dtype):
    x, w, bias, dy = cases.tensors(dtype=dtype)
    y, dx, dw, db = run(x, w, bias, dy, recipe)
    want = cases.expected(x, w, bias, dy, recipe, RNG)
    assert all(t.dtype == dtype for t in (y, dx, dw, db))
    assert_near(y, want.y, "y")
    assert_near(dx, want.dx, "dx")
    assert_near(dw, want.dw, "dw")
    assert_near(db, cases.Product(want.db, dy.double().abs().sum(0)), "db")


@pytest.mark.parametrize("recipe", ["nvfp4", "fresh64", "mxfp8", "four_over_six", "dequantized_row"])
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (16, 16, 16), (33, 128, 48), (5, 200, 130), (130, 3, 17)])
def test_shapes(recipe, m, k, n):
    x, w, bias, dy = cases.tensors(m, k, n)
    recipe = cases.RECIPES[recipe]
    y, dx, dw, _ = run(x, w, bias, dy, recipe)
    want = cases.expected(x, w, bias, dy, recipe, RNG)
    for name, actual, product in (("y", y, want.y), ("dx", dx, want.dx), ("dw", dw, want.dw)):
        assert_near(actual, product, name)


def test_fp16():
    x, w, bias, dy = (t.half() for t in cases.tensors())
    recipe = cases.RECIPES["nvfp4"]
    y, dx, dw, _ = run(x, w, bias, dy, recipe)
    want = cases.expected(x, w, bias, dy, recipe, RNG)
    for name, actual, product in (("y", y, want.y), ("dx", dx, want.dx), ("dw", dw, want.dw)):
        assert actual.dtype == torch.float16
        assert_near(actual, product, name)


@every_recipe
def test_the_recipe_makes_the_difference(recipe):
    """The tolerance bites: of a recipe that quantizes, some result is far from the unquantized one."""
    x, w, bias, dy = cases.tensors()
    results = run(x, w, bias, dy, recipe)
    exact = cases.expected(x, w, bias, dy, hb.Recipe(), RNG)
    errors = [((t.double() - p.value).abs() / p.bound).max() for t, p in zip(results, exact[:3], strict=False)]
    assert (max(errors) > 100 * SUM) == bool(recipe.specs)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "four_over_six", "nvfp4_mxfp8_bwd", "nvfp4_forward"])
def test_gradients_are_close_to_those_of_a_plain_linear(name):
    """The recipes do what they are for: all three results within quantization error of the true ones."""
    x, w, bias, dy = cases.tensors(256, 192, 128, seed=3)
    y, dx, dw, _ = run(x, w, bias, dy, cases.RECIPES[name])
    exact = cases.expected(x, w, bias, dy, hb.Recipe(), RNG)
    for actual, product in ((y, exact.y), (dx, exact.dx), (dw, exact.dw)):
        assert (actual.double() - product.value).norm() < 0.25 * product.value.norm()


def test_stochastic_gradients_are_right_on_average():
    """The error of dx's mean over 64 places is about 8 times smaller than that of one draw."""
    x, w, bias, dy = cases.tensors(32, 48, 64, seed=3)
    recipe = hb.recipes.nvfp4(fp4_max_gradient=6 * 16 / 17, hadamard=None)
    tiles = hb.quantize(w, hb.NVFP4(block=(16, 16))).dequantize(torch.float32)
    exact = dy.double() @ tiles.double()
    draws = []
    for position in range(64):
        leaf = x.clone().requires_grad_()
        hb.linear(leaf, w, bias, recipe, rng=hb.Philox(1, position << 32)).backward(dy)
        draws.append(leaf.grad.double())
    single = torch.stack([(d - exact).norm() for d in draws]).mean()
    assert 7 < single / (torch.stack(draws).mean(0) - exact).norm() < 10


@every_recipe
def test_out_dtype_is_fp32_before_rounding(recipe):
    """out_dtype changes the one rounding of y and nothing else."""
    x, w, bias, dy = cases.tensors(dtype=torch.bfloat16)
    wide = run(x, w, bias, dy, recipe, out_dtype=torch.float32)[0]
    narrow = run(x, w, bias, dy, recipe)[0]
    assert wide.dtype == torch.float32
    if recipe.specs:
        assert torch.equal(wide.bfloat16(), narrow)
    assert_near(wide, cases.expected(x, w, bias, dy, recipe, RNG).y, "y")


@every_recipe
def test_main_grad_accumulates_in_fp32(recipe):
    x, w, bias, dy = cases.tensors(dtype=torch.bfloat16)
    main_grad = torch.full(w.shape, 1e-3)
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    for step in range(2):
        y = hb.linear(x_leaf, w_leaf, bias, recipe, rng=RNG.at(step << 32), main_grad=main_grad)
        y.backward(dy)
    assert w_leaf.grad is None
    want = [cases.expected(x, w, bias, dy, recipe, RNG.at(step << 32)).dw for step in range(2)]
    total = cases.Product(want[0].value + want[1].value + 1e-3, want[0].bound + want[1].bound + 1e-3)
    assert_near(main_grad, total, "main_grad")


@pytest.mark.parametrize("name", ["nvfp4", "fresh64", "rotated_everywhere"])
def test_the_backward_draws_where_the_forward_did(name):
    """A pipeline advances before the backward; the position of the forward is that of all its gradients."""
    x, w, bias, dy = cases.tensors()
    recipe, state = cases.RECIPES[name], hb.RunState(9)
    want = cases.expected(x, w, bias, dy, recipe, hb.Philox(9, 48))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y, _ = hb.linear_shared(leaves[0], [leaves[1], w], None, recipe, rng=[state.philox(48), state.philox(80)])
    gated = x.clone().requires_grad_()
    layers = Layers([w], [None], [None], [None], [None], [state.philox(48)])
    h, _ = linear_activation(gated, layers, "relu2", recipe)
    state.advance()
    y.backward(dy)
    assert_near(leaves[0].grad, want.dx, "dx")
    assert_near(leaves[1].grad, want.dw, "dw")
    h.backward(dy)
    before = x.clone().requires_grad_()
    hb.functional.activation("relu2", hb.linear(before, w, None, recipe, rng=hb.Philox(9, 48))).backward(dy)
    assert torch.equal(gated.grad, before.grad)


@pytest.mark.parametrize("recipe", ["nvfp4_forward", "bare", "mxfp8"])
def test_gradients_of_a_shared_input_are_added_in_fp32(recipe):
    """What two layers send back cancels but for the third's: rounded before the sum, their rests would be left."""
    x, w, _, dy = cases.tensors(dtype=torch.bfloat16)
    recipe, small = cases.RECIPES[recipe], dy * 2.0**-12
    leaf = x.clone().requires_grad_()
    ys = hb.linear_shared(leaf, [w, w, w], None, recipe, rng=RNG)
    torch.autograd.backward(ys, [dy, -dy, small])
    want, large = (cases.expected(x, w, None, t, recipe, RNG).dx for t in (small, dy))
    assert leaf.grad.dtype == torch.bfloat16
    assert_near(leaf.grad, cases.Product(want.value, want.bound + large.bound), "dx")


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "nvfp4_forward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_bias_is_summed_in_fp32_and_rounded_to_its_own_dtype(dtype, recipe):
    """Two layers with biases of two dtypes; the sums of many tokens need more bits than x has."""
    x, w, bias, _ = cases.tensors(300, dtype=dtype)
    dy = (torch.rand(300, 21, generator=torch.Generator().manual_seed(5)) + 0.5).to(dtype)
    biases = [bias.float().requires_grad_(), bias.clone().requires_grad_()]
    first, second = hb.linear_shared(x, [w, w], biases, cases.RECIPES[recipe], rng=RNG)
    torch.autograd.backward([first, second], [dy, 2 * dy])
    exact = dy.double().sum(0)
    assert [b.grad.dtype for b in biases] == [torch.float32, dtype]
    assert ((biases[0].grad.double() - exact).abs() <= SUM * exact).all()
    assert torch.equal(biases[1].grad, (2 * exact).float().to(dtype))
    assert not torch.equal(biases[0].grad, biases[0].grad.to(dtype).float())


@pytest.mark.parametrize("centered", [False, True])
def test_gradients_of_a_norm_in_fp32_keep_the_bits_that_x_has_not(centered):
    """Weight and bias in fp32 of an x in bf16: sums over many tokens, in fp64 here."""
    x, _, _, _ = cases.tensors(300, 24, dtype=torch.bfloat16)
    dy = torch.rand(300, 24, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight, bias = (torch.randn(24, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (6, 7))
    function = hb.functional.layer_norm if centered else hb.functional.rms_norm
    function(x, weight, *[bias][: int(centered)], eps=1e-5).backward(dy)
    wide = x.double() - (x.double().mean(1, keepdim=True) if centered else 0)
    products = dy.double() * wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    assert_near(weight.grad, cases.Product(products.sum(0), products.abs().sum(0)), "dw")
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
    if centered:
        assert_near(bias.grad, cases.Product(dy.double().sum(0), dy.double().sum(0)), "db")
        assert not torch.equal(bias.grad, bias.grad.bfloat16().float())


@pytest.mark.parametrize("shape", [(24,), (6, 24), (2, 3, 24)])
def test_outputs_may_be_changed_in_place(shape):
    """As by torch.nn.ReLU(inplace=True) behind a layer."""
    functions = {
        "linear": lambda x, w: hb.linear_shared(x, [w, w], None, hb.recipes.nvfp4(), rng=RNG)[1],
        "norm": lambda x, w: hb.functional.rms_norm(x, w[0]),
        "activation": lambda x, w: hb.functional.activation("silu", x) * w.sum(),
    }
    x, w = torch.randn(shape), torch.randn(40, 24)
    for name, function in functions.items():
        results = []
        for relu in (torch.relu, torch.relu_):
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            relu(function(*leaves)).square().sum().backward()
            results.append([leaf.grad for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_fp32_beside_weights_of_fewer_bits(recipe, dtype):
    x, w, bias, dy = cases.tensors(dtype=dtype)
    bias = bias.float() * 1.001
    y, _, _, db = run(x, w, bias, dy, hb.recipes.get(recipe))
    assert (y.dtype, db.dtype) == (dtype, torch.float32)
    rounded = run(x, w, None, dy, hb.recipes.get(recipe), out_dtype=torch.float32)[0] + bias
    assert recipe == "bf16" or torch.equal(y, rounded.to(dtype)), "rounded once"
    product = x.double() @ w.double().T
    twice = ROUND[dtype] * (product.abs() + y.double().abs())  # the product and the sum
    assert recipe != "bf16" or ((y.double() - product - bias).abs() <= 1.01 * twice + 1e-6).all()
    torch.testing.assert_close(db, dy.to(dtype).float().flatten(0, -2).sum(0), rtol=1e-5, atol=1e-5)
    activated = linear_activation(x, Layers([w], [bias], [None], [None], [None], [RNG]), "relu2", recipe)[0]
    torch.testing.assert_close(activated, y.relu().square(), rtol=2e-2, atol=1e-3)


def test_a_bias_of_another_dtype_in_high_precision_keeps_digits_and_composes_with_transforms():
    layer = hb.nn.Linear(32, 16, recipe="bf16", dtype=torch.float64)
    layer.bias.data = layer.bias.data.float()
    x = torch.randn(3, 8, 32, dtype=torch.float64, requires_grad=True)
    expected = x.detach().numpy() @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    torch.testing.assert_close(layer(x), torch.from_numpy(expected), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.from_numpy(expected), rtol=1e-14, atol=1e-14)
    (dx,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)  # of (w x + b)^3: 6 w (w x + b) sum of w
    w, y = layer.weight.detach(), torch.from_numpy(expected)
    torch.testing.assert_close(second, (6 * y * w.sum(1)) @ w)


@pytest.mark.parametrize("written", ["weight", "x"])
def test_a_write_to_what_a_backward_in_high_precision_reads_is_refused_in_torchs_words(written):
    """Values that turn for it are views made without gradients, of which torch says something else."""
    for layer in (
        hb.nn.Linear(32, 48, recipe="nvfp4_forward"),
        hb.nn.GroupedLinear(2, 32, 48, recipe="nvfp4_forward"),
    ):
        ends = () if isinstance(layer, hb.nn.Linear) else (torch.tensor([8, 16]),)
        inner = torch.randn(16, 32, requires_grad=True) * 1
        y = layer(inner, *ends)
        with torch.no_grad():
            (layer.weight if written == "weight" else inner).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
