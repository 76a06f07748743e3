"""hb.linear bit for bit: the bf16 recipe is nn.Linear, shared is separate, only what is needed is computed and kept."""

import itertools

import linear_cases as cases
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import halfbyte as hb
from halfbyte import recipes

RNG = hb.Philox(11, 5 << 32)
DTYPES = [torch.float32, torch.bfloat16]
NVFP4 = recipes.nvfp4()
every_recipe = pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=cases.RECIPES.keys())


def run(x, w, bias, dy, recipe, needs=(True, True, True), rng=RNG):
    """Return y and the gradients of x, w, bias; None where not needed."""
    leaves = [
        None if t is None else t.clone().requires_grad_(need) for t, need in zip((x, w, bias), needs, strict=True)
    ]
    y = hb.linear(*leaves, recipe, rng=rng)
    if any(needs):
        y.backward(dy)
    return (y.detach(), *(None if t is None else t.grad for t in leaves))


def equal(a, b) -> bool:
    return a is None and b is None if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


# The bf16 recipe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(18, 37), (2, 3, 5, 37), (37,)])
def test_the_bf16_recipe_is_linear(dtype, with_bias, shape):
    x, w, bias, _ = cases.tensors(dtype=dtype)
    x = cases.tensors(m=30, dtype=dtype)[0][: max(1, torch.Size(shape[:-1]).numel())].reshape(shape)
    bias = bias if with_bias else None
    dy = torch.randn(*shape[:-1], 21, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = run(x, w, bias, dy, hb.Recipe())
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, w, bias)]
    y = nn.functional.linear(*leaves)
    y.backward(dy)
    theirs = (y.detach(), *(None if t is None else t.grad for t in leaves))
    assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bf16_module_is_linear(dtype):
    torch.manual_seed(0)
    plain = nn.Linear(37, 21, dtype=dtype)
    ours = hb.nn.Linear.from_linear(plain, "bf16")
    x = torch.randn(4, 6, 37).to(dtype)
    results = []
    for module in (plain, ours):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        y = module(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, module.weight.grad.clone(), module.bias.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_linear_shared_in_bf16_is_linear():
    x, w, bias, _ = cases.tensors(dtype=torch.bfloat16)
    ys = hb.linear_shared(x, [w, 2 * w], [bias, None])
    assert torch.equal(ys[0], nn.functional.linear(x, w, bias)) and torch.equal(ys[1], nn.functional.linear(x, 2 * w))


# What is needed


@every_recipe
def test_each_subset_of_gradients_is_that_of_all(recipe):
    x, w, bias, dy = cases.tensors(dtype=torch.bfloat16)
    everything = run(x, w, bias, dy, recipe)
    for needs in itertools.product((True, False), repeat=3):
        some = run(x, w, bias, dy, recipe, needs)
        assert torch.equal(some[0], everything[0])
        for need, grad, want in zip(needs, some[1:], everything[1:], strict=True):
            assert equal(grad, want) if need else grad is None


def saved_by(recipe, x, w, bias=None, **options) -> list[torch.Tensor]:
    kept = []
    with saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        hb.linear(x, w, bias, recipe, rng=RNG, **options)
    return kept


def nbytes(tensors, shape_free: int = 16) -> int:
    """Bytes of what is saved; amaxes and the random position are a few bytes each."""
    return sum(t.numel() * t.element_size() for t in tensors if t.numel() * t.element_size() > shape_free)


@pytest.mark.parametrize(
    "name, x_bytes, w_bytes",
    [
        ("nvfp4", 0.5625, 0.5625),
        ("four_over_six", 0.5625, 0.5625),
        ("row_scaled", 0.5625, 0.5625),
        ("mxfp8", 1.03125, 1.03125),
        ("nvfp4_mxfp8_bwd", 1.03125, 1.03125),
        ("nvfp4_forward", 2, 2),
        ("dequantized", 0.5625, 0.5625),
        ("bf16", 2, 2),
    ],
)
def test_saved_bytes_per_element(name, x_bytes, w_bytes):
    """What the docstring of functional/linear.py claims, for x [256, 128] and w [64, 128] in bf16."""
    x, w, _, _ = cases.tensors(256, 128, 64, dtype=torch.bfloat16)
    recipe = cases.RECIPES[name]
    x.requires_grad_()
    w.requires_grad_()
    assert nbytes(saved_by(recipe, x, w)) == x_bytes * x.numel() + w_bytes * w.numel()
    assert nbytes(saved_by(recipe, x.detach(), w)) == x_bytes * x.numel()
    assert nbytes(saved_by(recipe, x, w.detach())) == w_bytes * w.numel()
    assert not saved_by(recipe, x.detach(), w.detach())


@every_recipe
def test_only_plain_tensors_are_saved(recipe):
    x, w, bias, _ = cases.tensors(dtype=torch.bfloat16)
    kept = saved_by(recipe, x.requires_grad_(), w.requires_grad_(), bias.requires_grad_())
    assert kept and all(type(t) in (torch.Tensor, nn.Parameter) for t in kept)


@every_recipe
def test_no_grad_saves_nothing(recipe):
    x, w, bias, dy = cases.tensors(dtype=torch.bfloat16)
    for t in (x, w, bias):
        t.requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert saved_by(recipe, x, w, bias) == []
            y = hb.linear(x, w, bias, recipe, rng=RNG)
        assert not y.requires_grad
        assert torch.equal(y, run(x.detach(), w.detach(), bias.detach(), dy, recipe)[0])


@pytest.mark.parametrize("recipe", [NVFP4, recipes.nvfp4_forward(), recipes.nvfp4_forward(backward="dequantized")])
def test_offloaded_tensors_come_back(recipe):
    x, w, bias, dy = cases.tensors(dtype=torch.bfloat16)
    want = run(x, w, bias, dy, recipe)
    with saved_tensors_hooks(lambda t: (t.shape, t.dtype, t.flatten().tolist()), _rebuild):
        got = run(x, w, bias, dy, recipe)
    assert all(equal(a, b) for a, b in zip(want, got, strict=True))


def _rebuild(packed):
    shape, dtype, values = packed
    return torch.tensor(values, dtype=dtype).view(shape)


# How it is called


def test_an_expanded_gradient():
    """y.sum() sends a gradient without memory of its own."""
    x, w, _, _ = cases.tensors()
    leaf = x.clone().requires_grad_()
    hb.linear(leaf, w, None, NVFP4, rng=RNG).sum().backward()
    assert torch.equal(leaf.grad, run(x, w, None, torch.ones(18, 21), NVFP4)[1])


@pytest.mark.parametrize("name", ["nvfp4", "dequantized"])
def test_compiled_without_a_graph_break(name):
    layer = hb.nn.Linear(37, 21, recipe=cases.RECIPES[name], state=hb.RunState(1))
    x, _, _, dy = cases.tensors()
    results = []
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_compiled_layer_follows_the_position_without_recompiling():
    state = hb.RunState(1)
    layer = hb.nn.Linear(37, 21, recipe="nvfp4", state=state)
    x, _, _, dy = cases.tensors()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=count, fullgraph=True)
    grads = []
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        compiled(leaf).backward(dy)
        grads.append(leaf.grad)
        state.advance()
    assert len(graphs) == 1
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(grads, 2))


@every_recipe
def test_leading_dimensions_and_strides(recipe):
    x, w, bias, dy = cases.tensors(dtype=torch.bfloat16)
    y, dx, dw, db = run(x, w, bias, dy, recipe)
    y3, dx3, dw3, db3 = run(x.view(2, 3, 3, 37), w, bias, dy.view(2, 3, 3, 21), recipe)
    assert torch.equal(y3.view(18, 21), y) and torch.equal(dx3.view(18, 37), dx)
    assert torch.equal(dw3, dw) and torch.equal(db3, db)
    strided = run(x.T.contiguous().T, w.T.contiguous().T, bias, dy.T.contiguous().T, recipe)
    assert all(torch.equal(a, b) for a, b in zip(strided, (y, dx, dw, db), strict=True))


@pytest.mark.parametrize("name", ["nvfp4", "bf16", "mxfp8", "dequantized"])
def test_one_dimensional_input(name):
    x, w, bias, dy = cases.tensors(m=1, dtype=torch.bfloat16)
    flat, matrix = (run(a, w, bias, b, cases.RECIPES[name]) for a, b in ((x[0], dy[0]), (x, dy)))
    assert flat[0].shape == (21,) and flat[1].shape == (37,)
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(flat, matrix, strict=True))


@pytest.mark.parametrize("name", ["nvfp4", "fresh64", "mxfp8", "dequantized", "forward_row", "bf16", "four_over_six"])
@pytest.mark.parametrize("m, k, n", [(0, 37, 21), (18, 0, 21), (18, 37, 0), (0, 0, 0), (0, 0, 5)])
def test_empty(name, m, k, n):
    x, w, bias, dy = cases.tensors(m, k, n)
    y, dx, dw, db = run(x, w, bias, dy, cases.RECIPES[name])
    assert y.shape == (m, n) and dx.shape == x.shape and dw.shape == w.shape and db.shape == (n,)
    assert not dw.any() if m == 0 else torch.equal(dw, torch.zeros(n, k)) if k == 0 or n == 0 else True
    if k == 0:
        assert torch.equal(y, bias.expand(m, n))
    if n == 0:
        assert not dx.any()


@every_recipe
def test_autocast_casts_as_linear_does(recipe):
    x, w, bias, dy = cases.tensors()
    with torch.autocast("cpu", torch.bfloat16):
        y = hb.linear(x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), recipe, rng=RNG)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    want = run(*(t.detach().bfloat16() for t in (x, w, bias, dy)), recipe)
    assert torch.equal(y, want[0])
    for leaf, grad in zip((x, w, bias), want[1:], strict=True):
        assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, grad.float())


def test_a_backward_inside_autocast_is_the_same():
    x, w, bias, dy = cases.tensors()
    grads = []
    for inside in (True, False):
        leaf = x.clone().requires_grad_()
        y = hb.linear(leaf, w, bias, NVFP4, rng=RNG)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y.backward(dy)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_a_weight_used_twice():
    x, w, bias, dy = cases.tensors()
    places = hb.Philox(1), hb.Philox(2)
    w_leaf, x_leaf = w.clone().requires_grad_(), x.clone().requires_grad_()
    y = hb.linear(x_leaf, w_leaf, None, NVFP4, rng=places[0])
    (y + hb.linear(2 * x_leaf, w_leaf, bias, NVFP4, rng=places[1])).backward(dy)
    first = run(x, w, None, dy, NVFP4, rng=places[0])
    second = run(2 * x, w, bias, dy, NVFP4, rng=places[1])
    assert torch.equal(w_leaf.grad, first[2] + second[2])
    assert torch.equal(x_leaf.grad, first[1] + 2 * second[1])


def test_a_weight_that_is_its_own_input():
    w = cases.tensors()[1][:, :21].contiguous()
    leaf = w.clone().requires_grad_()
    dy = torch.randn(21, 21, generator=torch.Generator().manual_seed(1))
    hb.linear(leaf, leaf, None, NVFP4, rng=RNG).backward(dy)
    _, dx, dw, _ = run(w, w, None, dy, NVFP4)
    assert torch.equal(leaf.grad, dx + dw)


@pytest.mark.parametrize("name", ["nvfp4", "fresh64", "mxfp8", "dequantized_row", "four_over_six", "bf16"])
def test_shared_is_separate(name):
    """Outputs, weight and bias gradients bit for bit; dx is the sum, which shared rounds once."""
    recipe = cases.RECIPES[name]
    x, _, _, _ = cases.tensors()
    sizes = (21, 16, 40)
    weights = [cases.tensors(n=n, seed=n)[1] for n in sizes]
    biases = [cases.tensors(n=n, seed=n)[2] for n in sizes[:2]] + [None]
    dys = [cases.tensors(n=n, seed=n)[3] for n in sizes]
    # Separate calls share x's bits and the signs only at one place: make the recipe draw from the first's.
    shared_x = x.clone().requires_grad_()
    leaves = [w.clone().requires_grad_() for w in weights]
    bias_leaves = [None if b is None else b.clone().requires_grad_() for b in biases]
    ys = hb.linear_shared(shared_x, leaves, bias_leaves, recipe, rng=[RNG] * 3)
    torch.autograd.backward(ys, dys)
    total = torch.zeros_like(x)
    for i in range(3):
        y, dx, dw, db = run(x, weights[i], biases[i], dys[i], recipe)
        assert torch.equal(ys[i], y) and torch.equal(leaves[i].grad, dw)
        assert db is None or torch.equal(bias_leaves[i].grad, db)
        total = total + dx
    torch.testing.assert_close(shared_x.grad, total, rtol=1e-5, atol=1e-6)


def test_shared_draws_apart_for_each_weight():
    """One place for all means 16 offsets apart: equal weights and gradients, different bits."""
    x, w, _, dy = cases.tensors()
    leaves = [w.clone().requires_grad_() for _ in range(3)]
    torch.autograd.backward(hb.linear_shared(x, leaves, None, NVFP4, rng=RNG), [dy] * 3)
    assert torch.equal(leaves[0].grad, run(x, w, None, dy, NVFP4)[2])
    for i, j in itertools.combinations(range(3), 2):
        assert not torch.equal(leaves[i].grad, leaves[j].grad)
    again = [w.clone().requires_grad_() for _ in range(3)]
    places = [RNG.at(16 * i) for i in range(3)]
    torch.autograd.backward(hb.linear_shared(x, again, None, NVFP4, rng=places), [dy] * 3)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, again, strict=True))


def test_shared_saves_x_once():
    x, w, _, _ = cases.tensors(64, 64, 32, dtype=torch.bfloat16)
    kept = []
    with saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        hb.linear_shared(x.requires_grad_(), [w.clone().requires_grad_() for _ in range(3)], None, NVFP4, rng=RNG)
    assert nbytes(kept) == 0.5625 * (x.numel() + 3 * w.numel())


def test_an_unused_output_of_shared():
    x, w, _, dy = cases.tensors()
    leaves = [w.clone().requires_grad_() for _ in range(2)]
    used, _ = hb.linear_shared(x, leaves, None, NVFP4, rng=RNG)
    used.backward(dy)
    assert torch.equal(leaves[0].grad, run(x, w, None, dy, NVFP4)[2])
    assert leaves[1].grad is None


def test_weight_amax_replaces_the_own_one():
    x, w, bias, _ = cases.tensors()
    recipe = recipes.nvfp4_forward()
    amax = 3 * w.abs().max()
    y = hb.linear(x, w, bias, recipe, weight_amax=amax)
    q = hb.quantize(w, hb.NVFP4(), amax=amax)
    assert torch.equal(y, hb.gemm_nt(hb.quantize(x, hb.NVFP4()), q, torch.float32, bias=bias))
    assert not torch.equal(y, hb.linear(x, w, bias, recipe))


def test_the_same_place_draws_the_same_and_no_other_does():
    x, w, bias, dy = cases.tensors()
    assert torch.equal(run(x, w, bias, dy, NVFP4)[1], run(x, w, bias, dy, NVFP4)[1])
    for place in (RNG.at(1), RNG.at(1 << 32), hb.Philox(12, 5 << 32)):
        assert not torch.equal(run(x, w, bias, dy, NVFP4)[1], run(x, w, bias, dy, NVFP4, rng=place)[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_input_reaches_exactly_its_row_of_y_and_all_that_read_it(bad):
    x, w, bias, dy = cases.tensors()
    x[5, 3] = bad
    y, dx, dw, _ = run(x, w, bias, dy, NVFP4)
    assert y[5].isnan().all() and not y[torch.arange(18) != 5].isnan().any()
    assert not dx.isnan().any()  # dx = dy @ w
    assert dw[:, 3].isnan().all() and not dw[:, torch.arange(37) != 3].isnan().any()


# What is refused


@pytest.mark.parametrize(
    "change, error, names",
    [
        (lambda a: a.update(w=torch.zeros(21, 36)), ValueError, ["w.shape", "36", "37"]),
        (lambda a: a.update(w=torch.zeros(37)), ValueError, ["w.shape"]),
        (lambda a: a.update(w=torch.zeros(21, 37, dtype=torch.bfloat16)), TypeError, ["w.dtype", "autocast"]),
        (lambda a: a.update(x=torch.zeros(4, 37).double(), w=torch.zeros(21, 37).double()), TypeError, ["float64"]),
        (lambda a: a.update(w=torch.zeros(21, 37, device="meta")), ValueError, ["w.device=meta", "x.device=cpu"]),
        (lambda a: a.update(x=torch.tensor(1.0)), ValueError, ["x.shape"]),
        (lambda a: a.update(bias=torch.zeros(20)), ValueError, ["bias.shape", "20", "21"]),
        (lambda a: a.update(recipe="nvfp5"), ValueError, ["recipe", "nvfp5", "nvfp4_forward"]),
        (lambda a: a.update(x=None), TypeError, ["x=None", "tensor"]),
        (lambda a: a.update(w=None), TypeError, ["w=None", "[out_features, in_features]"]),
        (lambda a: a.update(recipe=4), TypeError, ["recipe=4", "Recipe"]),
        (lambda a: a.update(rng=None), ValueError, ["rng", "Philox"]),
        (lambda a: a.update(rng=5), TypeError, ["rng=", "5", "Philox"]),
        (lambda a: a.update(out_dtype=torch.float64), TypeError, ["out_dtype", "float64"]),
        (lambda a: a.update(weight_amax=1.0), TypeError, ["weight_amax=1.0", "float32"]),
        (lambda a: a.update(weight_amax=torch.ones(1)), TypeError, ["weight_amax", "[]"]),
        (lambda a: a.update(main_grad=torch.zeros(21, 37).bfloat16()), ValueError, ["main_grad", "float32"]),
        (lambda a: a.update(main_grad=torch.zeros(37, 21)), ValueError, ["main_grad", "21, 37"]),
    ],
)
def test_mistakes_are_named(change, error, names):
    x, w, bias, _ = cases.tensors()
    arguments = {"x": x, "w": w, "bias": bias, "recipe": NVFP4, "rng": RNG}
    change(arguments)
    with pytest.raises(error) as caught:
        hb.linear(**arguments)
    assert all(name in str(caught.value) for name in names), str(caught.value)


def test_a_second_derivative_is_refused():
    x, w, bias, _ = cases.tensors()
    y = hb.linear(x.requires_grad_(), w, bias, NVFP4, rng=RNG)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dx.sum().backward()


def test_quantized_input_and_integer_bias_are_refused():
    x, w = torch.randn(16, 32), torch.randn(16, 32)
    with pytest.raises(TypeError, match="x is a QuantTensor.*dequantize"):
        hb.linear(hb.quantize(x, hb.NVFP4()), w, None, hb.recipes.nvfp4_forward())
    with pytest.raises(TypeError, match=r"bias.dtype=torch.int64"):
        hb.linear(x, w, torch.ones(16, dtype=torch.int64), hb.recipes.nvfp4_forward())


def test_the_module_takes_its_input_by_torch_s_name():
    layer = hb.nn.Linear(32, 16, recipe="nvfp4_forward")
    x = torch.randn(4, 32)
    assert torch.equal(layer(input=x), layer(x))


# Outputs without a gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [(0, 1), (0, 2), (2,), (1,)])
@every_recipe
def test_an_output_that_nobody_used_leaves_no_gradient_and_changes_no_other(recipe, used, dtype):
    """All others are as if its gradient were zero; in plain torch a weight that was not used has none either."""
    x, w, bias, dy = cases.tensors(dtype=dtype)

    def gradients(dys):
        leaves = [t.clone().requires_grad_() for t in (x, w, w * 2, w * 3, bias, bias, bias)]
        outputs = hb.linear_shared(leaves[0], leaves[1:4], leaves[4:], recipe, rng=RNG)
        outputs = [y * 1 for y in outputs]
        torch.autograd.backward([outputs[i] for i in dys], list(dys.values()))
        return [t.grad for t in leaves]

    found = gradients({i: dy * (i + 1) for i in used})
    zeros = gradients({i: dy * (i + 1) if i in used else torch.zeros_like(dy) for i in range(3)})
    for i, (ours, expected) in enumerate(zip(found, zeros, strict=True)):
        assert equal(ours, expected if i == 0 or (i - 1) % 3 in used else None)


def test_layers_before_outputs_without_any_gradient_have_none():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x, w, bias, _ = cases.tensors()
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    Nothing.apply(hb.linear(*leaves, NVFP4, rng=RNG)).sum().backward()
    assert [t.grad for t in leaves] == [None, None, None]


def test_main_grads_of_outputs_that_nobody_used_stay():
    x, w, _, dy = cases.tensors()
    main_grads = [torch.full_like(w, -0.0) for _ in range(2)]
    leaf = w.clone().requires_grad_()
    hb.linear_shared(x, [leaf, w.clone().requires_grad_()], None, NVFP4, rng=RNG, main_grads=main_grads)[0].backward(dy)
    assert main_grads[0].abs().sum() > 0
    assert torch.signbit(main_grads[1]).all()  # not so much as a zero was added
