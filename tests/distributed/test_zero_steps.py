"""Steps of ZeroOptimizer by value; what a step is given, and what became of the model since the optimizer was built."""

import copy
import warnings
from functools import partial

import pytest
import ranks
import small_models
import step_checks as steps
import torch
import zero_checks as checks

import halfbyte as hb
from halfbyte.distributed import ZeroConfig, ZeroOptimizer


def test_two_ranks():
    ranks.run(2, steps.two_ranks)


@pytest.mark.parametrize("weights", ("nvfp4", "plain"))
def test_one_process(weights):
    steps.accumulated(0, 1, weights, torch.float32, 1e-6)
    steps.without_gradients(0, 1, weights)
    steps.clipped(0, 1, weights)
    steps.saved_at_once(0, weights)


def test_a_copy_made_at_once_holds_what_the_masters_stand_for():
    model, zero = steps.build(0, "nvfp4", partial(torch.optim.SGD, lr=4.0))
    steps.check_saved(zero, copy.deepcopy(model).state_dict())
    model(steps.batch(0, 0), "first second").square().mean().backward()
    zero.step()
    steps.check_saved(zero, dict(copy.deepcopy(model).named_parameters()))


SAVED = {
    "adamw": (
        partial(torch.optim.AdamW, lr=0.5, betas=(0.5, 0.5), eps=1e-2, weight_decay=0.25),
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.125, "amsgrad": False, "maximize": True},
    ),
    "sgd": (
        partial(torch.optim.SGD, lr=0.5, momentum=0.1),
        {"lr": 0.01, "momentum": 0.75, "dampening": 0.25, "weight_decay": 0.125, "nesterov": False},
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_options_are_those_of_the_checkpoint(name):
    """lr, betas and the others as a schedule or the user left them, not as the optimizer was built this time."""
    make, options = SAVED[name]

    def param_options(name, p):
        return {} if p.dim() > 1 else {"weight_decay": 0.0}

    _, zero = steps.build(0, "nvfp4", make, param_options)
    model, other = steps.build(0, "nvfp4", make, param_options)
    decays = {"first.weight": 0.125, "scale": 0.0}
    for group in zero.param_groups:
        group.update({**options, "weight_decay": next(decays[name] for name in group["names"] if name in decays)})
    other.load_state_dict(copy.deepcopy(zero.state_dict()))
    for group in other.param_groups:
        decay = next(decays[name] for name in group["names"] if name in decays)
        assert {key: group[key] for key in options} == {**options, "weight_decay": decay}
    if name == "sgd":  # and they are those that a step takes: v = g + w decay in the first, w -= lr v
        before = other.state_dict()["masters"]
        grads = steps.gradients(model, other, steps.batch(0, 0), "first")
        model(steps.batch(0, 0), "first").square().mean().backward()
        other.step()
        expected = {n: b - 0.01 * (grads[n] + (0.125 if b.dim() > 1 else 0.0) * b) for n, b in before.items()}
        steps.check_masters(other, expected, rtol=1e-6, atol=1e-7)


def test_a_closure_is_called_once_before_the_step():
    model, zero = steps.build(0, "nvfp4", partial(torch.optim.SGD, lr=0.5))
    before = zero.state_dict()["masters"]
    grads = steps.gradients(model, zero, steps.batch(0, 0), "first second")
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        zero.zero_grad()
        loss = model(steps.batch(0, 0), "first second").square().mean()
        loss.backward()
        calls.append(loss.detach())
        return loss

    for keyword in (False, True):
        loss = zero.step(closure=closure) if keyword else zero.step(closure)
        assert torch.equal(loss.detach(), calls[-1])
        if not keyword:
            steps.check_masters(zero, {n: before[n] - 0.5 * grads[n] for n in before}, rtol=0, atol=1e-6)
    assert len(calls) == 2 and calls[1] < calls[0]
    with pytest.raises(TypeError, match="^closure=Tensor: give a function that runs forward and backward"):
        zero.step(torch.ones(()))


def test_who_reads_a_gradient_that_was_taken_is_warned_once():
    """torch's clip_grad_norm_ finds no gradient, clips nothing and returns 0, whatever the gradients are."""
    model, zero = steps.build(0, "nvfp4", partial(torch.optim.SGD, lr=0.5))

    def backward():
        model(steps.batch(0, 0), "first second").square().mean().backward()

    with warnings.catch_warnings():  # where nothing was taken yet, nothing is wrong
        warnings.simplefilter("error")
        model.zero_grad()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0
        with zero.accumulate():
            backward()
        backward()
        zero.step()
        model.zero_grad()
        backward()
        zero.zero_grad()
        assert model.first.weight.grad is None
    backward()
    with pytest.warns(UserWarning, match=r"clips nothing.*give config=ZeroConfig\(max_norm=\.\.\.\), whose step\(\)"):
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()


def test_a_primary_weight_has_a_gradient_like_any_parameter():
    weight = hb.tensor.PrimaryWeight.empty((16, 32)).as_parameter()
    given = torch.ones(weight.shape, dtype=weight.dtype)
    weight.grad = given
    assert weight.grad is given
    del weight.grad
    assert weight.grad is None


def test_contexts_of_accumulation_within_each_other():
    model, zero = steps.build(0, "plain", partial(torch.optim.SGD, lr=0.5))
    before = zero.state_dict()["masters"]
    grads = [steps.gradients(model, zero, steps.batch(0, i), "first second") for i in range(3)]

    def backward(i):
        model(steps.batch(0, i), "first second").square().mean().backward()

    with zero.accumulate():
        with zero.accumulate():
            backward(0)
        backward(1)
    backward(2)
    zero.step()
    expected = {name: before[name] - 0.5 * sum(each[name] for each in grads) for name in before}
    steps.check_masters(zero, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weights", ("nvfp4", "plain"))
def test_parameters_added_after_the_optimizer_was_built_are_named(weights):
    def add_a_layer(model):
        model.adapter = torch.nn.Linear(4, 4)

    def add_within(model):
        model.mlp.down_proj.lora = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2))})

    def wrap(model):
        model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.LayerNorm(11))

    for change, name in (
        (add_a_layer, r"adapter.weight \(and 1 more\) was added"),
        (add_within, "mlp.down_proj.lora.a was added"),
        (lambda model: model.register_parameter("extra", torch.nn.Parameter(torch.ones(3))), "extra was added"),
        (wrap, r"lm_head.1.weight \(and 1 more\) was added"),
        (lambda model: setattr(model, "lm_head", torch.nn.Linear(16, 11)), "lm_head.weight was replaced or moved"),
    ):
        model, state, zero = checks.build(0, weights, blocks=0)
        checks.train(0, model, state, zero, range(1))
        change(model)
        for _ in range(2):  # it does not become right by being asked again
            with pytest.raises(RuntimeError, match=f"^{name}.*building|^{name}.*build the optimizer after"):
                zero.step()


def test_frozen_parameters_may_be_added_and_are_named_once_they_thaw():
    model, state, zero = checks.build(0, "nvfp4", blocks=0)
    model.adapter = torch.nn.Linear(4, 4).requires_grad_(False)
    model.register_module("nothing", None)
    model.mlp.itself = model  # modules may meet again
    checks.train(0, model, state, zero, range(2))
    model.adapter.bias.requires_grad_(True)
    with pytest.warns(UserWarning, match="^adapter.bias required no gradient when ZeroOptimizer was built"):
        zero.step()


def test_masters_in_the_same_memory_but_another_dtype():
    """A buffer that is read as bf16 in the next call has another cast prepared: bytes are those of its values there."""
    memory = torch.zeros(512, dtype=torch.float32)
    weight = hb.tensor.PrimaryWeight.empty((16, 32))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for master in (memory, memory.view(torch.bfloat16)[:512], memory.view(torch.float16)[:512]):
            master.copy_(torch.randn(512, generator=generator))
            hb.distributed.cast_master_weights_to_nvfp4([weight], [master], [0], None)
            expected = hb.quantize(master.view(16, 32).bfloat16(), weight.spec)
            assert all(torch.equal(a, b) for a, b in zip(weight.blocks[:3], expected.blocks[:3], strict=True)), (
                master.dtype
            )


def test_weights_of_another_dtype_round_masters_in_it():
    """weight_dtype is that of the values that are quantized, whatever the parameters were."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    hb.quantize_(model, checks.LEAN, keep=small_models.NOTHING_KEPT, state=hb.RunState(0))
    values = model[0].weight.detach().clone()
    codes = {}
    for dtype in (None, torch.bfloat16, torch.float16):
        twin = copy.deepcopy(model)
        zero = ZeroOptimizer(twin, config=ZeroConfig(weight_dtype=dtype))
        zero.synchronize()
        assert twin[0].weight.dtype == (dtype or torch.float32)
        expected = hb.quantize(values.to(dtype or torch.float32), hb.NVFP4(block=(16, 16)))
        blocks = zip(twin[0].weight.blocks[:3], expected.blocks[:3], strict=True)
        assert all(torch.equal(a, b) for a, b in blocks), dtype
        codes[dtype] = twin[0].weight.blocks.amax
    assert codes[None] != codes[torch.bfloat16]
