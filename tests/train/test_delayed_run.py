"""`--recipe 'nvfp4(amax=delayed)'`: what a run computes, goes on with, counts, and where it is refused."""

import json
from dataclasses import replace

import pytest
import torch
from runs import losses, stop_after, weights

import halfbyte as hb
from halfbyte import cli
from halfbyte.train import graphs, loop
from halfbyte.train.treatment import applied

DELAYED = "nvfp4(amax=delayed)@all"


@pytest.mark.parametrize("name, fuse", [(DELAYED, "on"), ("nvfp4(amax=delayed:3:1.2)@all", "off")])
def test_a_stopped_run_goes_on_bit_for_bit(run, folder, name, fuse):
    """With two micro-batches a step, and a checkpoint in the middle of a period."""
    config, data = run(steps=7, accumulate=2, batch=2, checkpoint_every=2, eval_every=7, fuse=fuse)
    whole = replace(config, run=replace(config.run, out=folder / "whole"))
    result = loop.train(whole, name, data)
    for step in (2, 4):
        stop_after(loop.Trainer(config, name, data), step)
    assert loop.Trainer(config, name, data).train()["amaxes_exceeded"] == result["amaxes_exceeded"] > 0
    assert losses(config) == losses(whole)
    assert all(torch.equal(a, b) for a, b in zip(weights(config).values(), weights(whole).values(), strict=True))
    plain = replace(config, run=replace(config.run, out=folder / "plain"))
    assert "amaxes_exceeded" not in loop.train(plain, "nvfp4@all", data)
    one, other = (losses(each)[0][1] for each in (plain, whole))
    assert one[:2] == other[:2] and one[2:] != other[2:], "the first two steps take their own amax"


def test_the_command_trains_and_goes_on(folder, capsys):
    words = ["train", "--preset", "tiny", "--corpus", str(folder / "corpus"), "--out", str(folder / "run")]
    words += ["--cache", str(folder / "cache"), "--recipe", "nvfp4(amax=delayed:2)", "--checkpoint-every", "2"]
    words += ["--decay", "0", "--warmup", "0"]
    assert cli.main([*words, "--steps", "4"]) == 0
    assert cli.main([*words, "--steps", "6"]) == 0
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["steps"] == 6 and result["recipe"] == "nvfp4(amax=delayed:2)"
    saved = torch.load(folder / "run" / "checkpoints" / "step-00000006.pt", weights_only=True)["run_state"]["amaxes"]
    assert saved and any(values["held"][0] > 0 for values in saved.values())


def test_a_run_compares_its_noise_and_is_the_run_without(run, folder):
    """Two more steps of every look leave the amaxes as they were."""
    config, data = run(steps=6, eval_every=2, checkpoint_every=6)
    looking = replace(config, recipe_schedule="auto:bf16/nvfp4(amax=delayed)")
    looking = replace(looking, run=replace(config.run, out=folder / "looking"))
    assert loop.train(config, DELAYED, data)["held_out_loss"] == loop.train(looking, DELAYED, data)["held_out_loss"]
    assert losses(config) == losses(looking)


def test_a_late_forward_in_high_precision(run):
    config, data = run(steps=6, eval_every=6)
    name = "nvfp4(amax=delayed)@all+late(0.5)"
    assert loop.train(applied(config, name), name, data)["amaxes_exceeded"] > 0


def test_a_run_of_experts_keeps_amaxes_of_each(run):
    config, data = run(model="moe-tiny", steps=4, batch=1, sequence=8, checkpoint_every=4, eval_every=4)
    trainer = loop.Trainer(config, DELAYED, data)
    assert trainer.train()["amaxes_exceeded"] > 0
    path = config.run.out / "checkpoints" / "step-00000004.pt"
    saved = torch.load(path, weights_only=True)["run_state"]["amaxes"]
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, hb.nn.GroupedLinear)]
    assert layers
    for layer in layers:
        numbers = saved[str(layer.stream)]
        assert numbers["held"] == torch.cat(layer.amaxes.held).tolist() and len(numbers["held"]) == 4 * 8
        assert any(numbers["held"]) and any(numbers["seen"])


def test_what_a_graph_has_recorded_is_forgotten_once_amaxes_are_used(run, monkeypatch):
    """And a step that measures for several runs beside it."""
    config, data = run(steps=8, eval_every=8, graph="on")
    resets, aside, own = [], [], graphs.GraphedStep.reset
    trainer = loop.Trainer(config, "nvfp4(amax=delayed:4)@all", data)
    monkeypatch.setattr(graphs.GraphedStep, "reset", lambda self: (resets.append(trainer.step), own(self)))
    eagerly = graphs.GraphedStep.eagerly
    monkeypatch.setattr(graphs.GraphedStep, "eagerly", lambda self, *t: aside.append(trainer.step) or eagerly(self, *t))
    trainer.train()
    assert aside == [0, 4] and resets[0] == 2 and set(resets[1:]) <= {8}
