"""The switch that a run makes itself: the measured noise, when it switches, what it logs, what a stopped run does."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from runs import losses, stop_after

import halfbyte as hb
from halfbyte import recipes
from halfbyte.stats import GradientNoise, gradient_noise
from halfbyte.train import config as configs
from halfbyte.train import loop, switch


def linear_model(recipe="nvfp4"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 8, bias=False))
    state = hb.RunState(1)
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=state)
    return model, state


def test_noise_is_the_difference_to_the_gradient_in_high_precision():
    model, state = linear_model()
    data = [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def grads():
        model.zero_grad()
        for x in data:
            (model(x).square().mean() / 2).backward()
            state.advance()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    begun = state.state_dict()
    quantized = grads()
    with hb.high_precision(model):
        exact = grads()
    model.zero_grad()
    state.load_state_dict(begun)
    steps = [lambda x=x: model(x).square().mean() for x in data]
    found = gradient_noise(model, steps, between=state.advance, again=lambda: state.load_state_dict(begun))
    assert found.norm == pytest.approx(float(exact.norm()), rel=1e-5)
    assert found.noise == pytest.approx(float((quantized - exact).norm()), rel=1e-4) and found.noise > 0
    assert found.ratio == pytest.approx(found.norm / found.noise) and not found.is_drowned
    assert all(p.grad is None for p in model.parameters())
    assert [layer.recipe for layer in model] == [recipes.nvfp4()] * 2


def test_both_passes_begin_at_the_same_micro_batch():
    """A model in high precision, whose losses depend on what `between` moves, has no noise then."""
    model, at = torch.nn.Linear(64, 8), [0]

    def loss():
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(at[0]))
        return model(x).square().mean()

    def between():
        at[0] += 1

    def again():
        at[0] = 5

    found = gradient_noise(model, [loss, loss], between=between, again=again)
    assert found.noise == 0 < found.norm and at == [7]


@pytest.mark.parametrize(
    "norm, noise, is_drowned",
    [
        (1.73, 1.0, True),
        (1.74, 1.0, False),
        (1.0, 0.0, False),
        (0.0, 1.0, True),
        (math.nan, 1.0, False),
        (1.0, math.inf, False),
    ],
)
def test_below_root_three_it_is_drowned(norm, noise, is_drowned):
    assert GradientNoise(norm=norm, noise=noise).is_drowned is is_drowned


def test_nothing_to_measure():
    with pytest.raises(ValueError, match=r"steps=\[\]"):
        gradient_noise(linear_model()[0], [])


def test_frozen_codes_before_a_layer_that_trains_are_no_obstacle():
    """They have the same values in high precision: a frozen first layer, an input that needs no gradient."""
    model, _ = linear_model("rl")
    hb.freeze_(model[0])
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found = gradient_noise(model, [lambda: model(x).square().mean()])
    values = model[0].weight.dequantize(torch.float32).double(), model[1].weight.detach().double().requires_grad_()
    exact = (x.double() @ values[0].T @ values[1].T).square().mean()
    assert found.norm == pytest.approx(torch.autograd.grad(exact, values[1])[0].norm().item(), rel=1e-5)
    assert 0 < found.noise < found.norm


def lines(config, *kinds):
    records = map(json.loads, (config.run.out / "log.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] in kinds]


def trainer_of(run, **changes):
    config, data = run(recipe_schedule="auto:bf16/nvfp4", steps=8, eval_every=2, checkpoint_every=2, **changes)
    return loop.Trainer(config, "nvfp4", data)


def test_a_run_that_is_not_drowned_is_the_run_without(run, folder):
    """Measuring costs time and changes nothing."""
    trainer = trainer_of(run)
    measured = trainer.train()
    found = lines(trainer.config, "noise", "switch", "recipe")
    assert [(line["kind"], line["step"]) for line in found] == [("noise", 3), ("noise", 5), ("noise", 7)]
    assert all(line["norm"] > line["noise"] > 0 for line in found)
    plain, data = run(steps=8, eval_every=2, checkpoint_every=2)
    plain = replace(plain, run=replace(plain.run, out=folder / "plain"))
    assert loop.train(plain, "nvfp4", data)["held_out_loss"] == measured["held_out_loss"]
    assert losses(plain) == losses(trainer.config)


@pytest.fixture
def drowned_at_4(monkeypatch):
    measure = switch._measure
    monkeypatch.setattr(switch, "_measure", lambda t: GradientNoise(norm=1.0, noise=2.0) if t.step == 4 else measure(t))


def test_a_drowned_run_follows_the_schedule_that_it_writes(run, folder, drowned_at_4):
    trainer = trainer_of(run)
    switched = trainer.train()
    (line,) = lines(trainer.config, "switch")
    assert (line["step"], line["recipe"], line["noise"]) == (5, "bf16/nvfp4", 2.0)
    assert [record["step"] for record in lines(trainer.config, "recipe")] == [5]
    assert [record["step"] for record in lines(trainer.config, "noise")] == [3, 5]  # then nothing is left to decide
    same, data = run(recipe_schedule="4:bf16/nvfp4", steps=8, eval_every=2, checkpoint_every=2)
    same = replace(same, run=replace(same.run, out=folder / "same"))
    assert loop.train(same, "nvfp4", data)["held_out_loss"] == switched["held_out_loss"]


@pytest.mark.parametrize("stop", [4, 6])
def test_a_stopped_run_goes_on_as_it_would_have(run, folder, drowned_at_4, stop):
    """Stopped before the switch it is measured again; after it the checkpoint says what was decided."""
    config, data = run(recipe_schedule="auto:bf16/nvfp4", steps=8, eval_every=2, checkpoint_every=2)
    whole = replace(config, run=replace(config.run, out=folder / "whole"))
    wanted = loop.train(whole, "nvfp4", data)
    stop_after(loop.Trainer(config, "nvfp4", data), stop)
    assert loop.train(config, "nvfp4", data)["held_out_loss"] == wanted["held_out_loss"]
    assert lines(config, "switch") == lines(whole, "switch") and losses(config) == losses(whole)


def test_identity_and_refusals():
    config = replace(configs.tiny(), recipe_schedule="auto:bf16/nvfp4(rht=none)")
    expected = recipes.mixed("bf16", recipes.nvfp4(hadamard=None))
    assert config.switch() == expected and config.schedule() is None
    assert config.identity("nvfp4")["switch"] == expected.key and "switch" not in configs.tiny().identity("nvfp4")
    with pytest.raises(ValueError, match="is not a preset"):
        replace(config, recipe_schedule="auto:bf17")
    with pytest.raises(ValueError, match="name the step instead of auto"):
        replace(config, mesh=configs.MeshConfig(dp_shard=2))
    with pytest.raises(ValueError, match="weights='nvfp4': .* name the step instead of auto"):
        replace(config, mesh=configs.MeshConfig(weights="nvfp4"))


def test_weights_that_are_codes_alone_are_not_measured():
    model, _ = linear_model()
    hb.distributed.primary_weights_(model)
    x = torch.randn(16, 64)
    with pytest.raises(ValueError, match=r"0\.weight exists in NVFP4 alone"):
        gradient_noise(model, [lambda: model(x).square().mean()])


def test_a_switch_says_to_which_recipe():
    with pytest.raises(ValueError, match=r"recipe_schedule='auto': say to which recipe, as in 'auto:nvfp4_forward'"):
        replace(configs.tiny(), recipe_schedule="auto").switch()
