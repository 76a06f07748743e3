"""Runs with nothing switched on or off: fused, compiled and replayed as a CUDA graph where it applies, and quiet."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from halfbyte.train import auto, compare, data, graphs, log, loop
from halfbyte.train import config as configs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STEPS = 12
NEAR = 0.02
"""Of the loss: fusing and compiling round elsewhere, which changes a code now and then and not the course."""
NO_EXPERTS = "compile: off, compiled mixtures of experts have not been timed on a GPU; --compile on overrides that"
OFF = {"fuse": "off", "compile": "off", "graph": "off"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function from a folder's name and options to a config of few steps, for which compiling is said to pay."""
    monkeypatch.setattr(auto, "STEPS_THAT_PAY", STEPS)
    (tmp_path / "text.txt").write_text("sixteen values share one scale and two share one byte " * 400)
    torch._dynamo.reset()

    def make(name, graph="auto", model="tiny", **changes):
        whole = configs.tiny()
        return replace(
            whole,
            model=model,
            data=replace(whole.data, corpus=str(tmp_path / "text.txt"), accumulate=2),
            optim=replace(whole.optim, steps=STEPS),
            run=replace(whole.run, out=tmp_path / name, cache=tmp_path, graph=graph),
            device="cuda",
            dtype="auto",
            **changes,
        )

    return make


@pytest.fixture
def captures(monkeypatch):
    """A list that grows with every capture."""
    found, capture = [], graphs.GraphedStep._capture
    monkeypatch.setattr(
        graphs.GraphedStep, "_capture", lambda step, inputs: (found.append(step), capture(step, inputs))
    )
    return found


def train(config, recipe="nvfp4"):
    """Return the losses of training steps and validations."""
    loop.train(config, recipe, data.load_data(config.data, config.run.cache))
    return [*log.curve(config.run.out, "step")[1], *log.curve(config.run.out, "eval")[1]]


def near(losses, others):
    assert len(losses) == len(others) == STEPS + 2
    return all(abs(a - b) < NEAR * b for a, b in zip(losses, others, strict=True))


def identity(config):
    return json.loads((config.run.out / "config.json").read_text())["identity"]


@pytest.mark.parametrize(
    ("model", "recipe", "compiles"),
    [("tiny", "nvfp4", True), ("tiny", "four_over_six", True), ("tiny", "bf16", True), ("moe-tiny", "nvfp4", False)],
)
def test_the_default_has_the_losses_of_its_parts(run, captures, capsys, model, recipe, compiles):
    default = run("default", model=model)
    losses = train(default, recipe)
    assert capsys.readouterr().err == ("" if compiles else f"{NO_EXPERTS}\n")
    assert len(captures) == 1
    assert identity(default)["fuse"] is True and identity(default)["compile"] is compiles
    parts = {"fuse": "on", "compile": "on" if compiles else "off", "graph": "off"}
    assert losses == train(run("parts", model=model, **parts), recipe)
    assert len(captures) == 1
    assert near(losses, train(run("off", model=model, **OFF), recipe))


def test_a_schedule_is_compiled_and_captured_again(run, captures, capsys, monkeypatch):
    monkeypatch.setattr(auto, "STEPS_THAT_PAY", STEPS // 2)
    losses = train(run("default", recipe_schedule="6:bf16/nvfp4"))
    assert len(captures) == 2 and not capsys.readouterr().err
    parts = {"fuse": "on", "compile": "on", "graph": "off"}
    assert losses == train(run("parts", recipe_schedule="6:bf16/nvfp4", **parts))
    assert losses != train(run("without", **parts))


def test_recomputing_everything_changes_no_loss(run, captures, capsys):
    expected = train(run("default"))
    config = run("full")
    assert train(replace(config, run=replace(config.run, recompute="full"))) == expected
    assert len(captures) == 2 and not capsys.readouterr().err


def test_a_graph_without_room_is_left_out_and_no_loss_changes(run, captures, capsys, monkeypatch):
    expected = train(run("graph", fuse="on", compile="off"))
    assert len(captures) == 1
    now = graphs.Memory.now(torch.device("cuda"))
    assert 0 < now.held <= now.peak <= now.available and not graphs.shortage(now)
    monkeypatch.setattr(graphs.Memory, "now", lambda device: now._replace(available=2 * now.peak - now.held - 1))
    capsys.readouterr()
    assert train(run("none", fuse="on", compile="off")) == expected
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(
        "graph: off, a captured step and a validation beside it may take"
    )
    assert len(captures) == 1
    assert train(run("asked", fuse="on", compile="off", graph="on")) == expected
    assert len(captures) == 2 and not capsys.readouterr().err


def test_a_stopped_run_goes_on_with_what_it_began_with(run, capsys):
    """The folder of a run with all off, as runs were by default, is not named another run."""
    expected = train(run("whole", **OFF))
    stopped = run("stopped", **OFF)
    text = data.load_data(stopped.data, stopped.run.cache)
    trainer = loop.Trainer(stopped, "nvfp4", text)
    save = trainer._save

    def save_and_stop():
        save()
        raise KeyboardInterrupt

    trainer._save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    capsys.readouterr()
    assert train(run("stopped")) == expected
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        f"{option}: off, as in the run that its folder holds" for option in ("fuse", "compile")
    ]


def test_compare_runs_its_recipes_alike(run, captures, capsys):
    pytest.importorskip("matplotlib")
    config = run("compare")
    results = compare.compare(config, ("bf16", "nvfp4"))
    said = capsys.readouterr()
    assert not said.err and "GEMMs in bfloat16, fused, compiled" in said.out.splitlines()[0]
    assert len(captures) == 2
    for result in results:
        assert result["identity"]["fuse"] is True and result["identity"]["compile"] is True
        alone = run(f"alone-{result['recipe']}", fuse="on", compile="on")
        train(alone, result["recipe"])
        last = log.curve(alone.run.out, "eval")[1][-1]
        assert abs(last - result["held_out_loss"]) < NEAR * last
