"""A run: the same numbers again, in pieces or whole, and clear words when it cannot go on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import losses, stop_after, weights

import halfbyte as hb
from halfbyte.train import log, loop, measure
from halfbyte.train.data import load_data


def changes(config):
    return [(line["step"], line["recipe"]) for line in log.read_log(config.run.out) if line["kind"] == "recipe"]


def test_it_learns_and_writes_what_it_promises(run):
    config, data = run(steps=40, lr=5e-3)
    result = loop.train(config, "bf16", data)
    steps, values = log.curve(config.run.out, "step")
    assert steps == list(range(1, 41))
    assert values[-1] < values[0] - 1.5
    assert result["held_out_loss"] == log.curve(config.run.out, "eval")[1][-1]
    assert result["tokens"] == 40 * 32 * 4
    assert result == json.loads((config.run.out / "result.json").read_text())
    facts = json.loads((config.run.out / "config.json").read_text())
    assert facts["data"]["sha256"] == data.summary["sha256"] and facts["data"]["bytes"] > 0
    assert "lm_head" in (config.run.out / "layers.txt").read_text()


@pytest.mark.parametrize("recipe", ["nvfp4", "four_over_six@all"])
def test_the_same_command_twice_gives_the_same_bits(run, recipe):
    config, data = run(steps=3)
    loop.train(config, recipe, data)
    first, first_weights = losses(config), weights(config)
    loop.train(replace(config, run=replace(config.run, overwrite=True)), recipe, data)
    assert losses(config) == first
    assert all(torch.equal(first_weights[name], weight) for name, weight in weights(config).items())


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "nvfp4_mxfp8_bwd"])
def test_a_run_in_two_pieces_gives_the_same_bits(run, folder, recipe):
    config, data = run(accumulate=2, steps=4, checkpoint_every=2, eval_every=2)
    whole = replace(config, run=replace(config.run, out=folder / "whole"))
    loop.train(whole, recipe, data)
    stopped = loop.Trainer(config, recipe, data)
    stop_after(stopped, 2)
    resumed = loop.Trainer(config, recipe, data)
    assert (resumed.step, resumed.position, resumed.run_state.position) == (2, 4, 4)
    assert resumed.seconds == stopped.seconds > 0  # else the result's tokens/s are those of the last piece
    resumed.train()
    assert losses(config) == losses(whole)
    expected = weights(whole)
    assert all(torch.equal(expected[name], weight) for name, weight in weights(config).items())


def test_a_schedule_is_followed_logged_and_resumed(run, folder):
    config, data = run(steps=6, checkpoint_every=4, eval_every=6, recipe_schedule="0.34:bf16/nvfp4,5:bf16")
    whole = replace(config, run=replace(config.run, out=folder / "whole"))
    loop.train(whole, "nvfp4", data)
    assert changes(whole) == [(3, "bf16/nvfp4"), (6, "bf16")]
    plain = replace(config, recipe_schedule="", run=replace(config.run, out=folder / "plain"))
    loop.train(plain, "nvfp4", data)
    steps = [log.curve(one.run.out, "step")[1] for one in (plain, whole)]
    assert steps[0][:2] == steps[1][:2] and steps[0][2] != steps[1][2]
    stop_after(loop.Trainer(config, "nvfp4", data), 4)
    loop.Trainer(config, "nvfp4", data).train()
    assert losses(config) == losses(whole) and changes(config) == changes(whole)
    with pytest.raises(ValueError, match="recipe_schedule"):
        loop.train(replace(config, recipe_schedule="0.5:bf16"), "nvfp4", data)


def test_stochastic_rounding_draws_new_bits_every_micro_batch(run):
    config, data = run(accumulate=3, steps=2)
    trainer = loop.Trainer(config, "nvfp4", data)
    trainer.train()
    assert trainer.run_state.position == trainer.position == 6


def test_every_recipe_starts_alike_on_the_same_data(run, folder):
    config, data = run()
    first = loop.Trainer(config, "bf16", data)
    second = loop.Trainer(replace(config, run=replace(config.run, out=folder / "second")), "nvfp4@all", data)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name])
    assert all(torch.equal(first.batches[i][0], second.batches[i][0]) for i in range(5))
    assert first.evaluate() == second.evaluate()  # in high precision


def test_accumulation_is_a_larger_batch(run, folder):
    one, data = run(batch=8, accumulate=1, steps=3)
    two = replace(
        one, data=replace(one.data, batch=4, accumulate=2), run=replace(one.run, out=folder / "two"), eval_batches=4
    )
    first, second = (loop.Trainer(config, "bf16", data) for config in (one, two))
    first.train()
    second.train()
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=1e-3, atol=1e-4)


def test_gradients_are_clipped(run):
    config, data = run(steps=1, clip=1e-3)
    trainer = loop.Trainer(config, "bf16", data)
    trainer.optimizer.zero_grad = lambda: None
    trainer.train()
    norm = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_the_weight_averages_of_adam_are_fp32_under_bfloat16(run):
    config, data = run(steps=2, dtype="bfloat16")
    trainer = loop.Trainer(config, "bf16", data)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in trainer.optimizer.state.values()} == {torch.float32}


def test_a_finished_run_is_not_trained_again(run, monkeypatch):
    config, data = run(steps=2)
    result = loop.train(config, "bf16", data)
    monkeypatch.setattr(loop, "Trainer", None)
    assert loop.train(config, "bf16", data) == result


def test_files_that_a_run_that_ended_does_not_write_are_named(run, capsys):
    config, data = run(steps=2, stats_every=1)
    loop.train(config, "nvfp4@all", data)
    capsys.readouterr()
    loop.train(config, "nvfp4@all", data)
    assert "no step is left" not in capsys.readouterr().err, "its statistics are there"
    (config.run.out / "stats.jsonl").unlink()
    loop.train(replace(config, run=replace(config.run, tensorboard=True)), "nvfp4@all", data)
    said = (
        f"{config.run.out}: the run ended without --stats-every 1 and --tensorboard, and no step is left; --overwrite"
    )
    assert capsys.readouterr().err.count(said) == 1


def test_a_result_lost_after_the_last_step_is_measured_again(run):
    config, data = run(steps=4)
    result = loop.train(config, "bf16", data)
    (config.run.out / "result.json").unlink()
    assert loop.train(config, "bf16", data)["held_out_loss"] == result["held_out_loss"]


def test_a_text_is_what_it_holds_whatever_it_is_called(run, tmp_path, monkeypatch):
    """Also in a checkpoint, and not the share that is held out of no text; another text is named, its place too."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "part.txt").write_text("a scale for sixteen values " * 300)
    config, _ = run(steps=4, checkpoint_every=2, held_out_corpus=str(kept))
    data = load_data(config.data, config.run.cache)
    result = loop.train(config, "bf16", data)
    shutil.copytree(config.data.corpus, tmp_path / "again")
    shutil.copytree(config.data.held_out_corpus, tmp_path / "held")
    monkeypatch.chdir(tmp_path)
    again = replace(config, data=replace(config.data, corpus="./again/", held_out_corpus="held", held_out=0.3))
    copied = load_data(again.data, config.run.cache)
    with monkeypatch.context() as nothing:
        nothing.setattr(loop, "Trainer", None)
        assert loop.train(again, "bf16", copied) == result
    (config.run.out / "result.json").unlink()
    assert loop.train(again, "bf16", copied)["held_out_loss"] == result["held_out_loss"]
    (Path(config.data.corpus) / "more.txt").write_text("another text")
    other = load_data(config.data, config.run.cache)
    with pytest.raises(ValueError, match=r"corpus_sha256: '.*' here; data.corpus: './again/' there, '.*' here\)"):
        loop.train(config, "bf16", other)


def test_a_folder_with_another_run_is_refused(run):
    config, data = run(steps=2)
    loop.train(config, "bf16", data)
    with pytest.raises(ValueError, match=r"holds another run \(optim.lr: 0.005 there, 0.1 here\)"):
        loop.train(replace(config, optim=replace(config.optim, lr=0.1)), "bf16", data)
    with pytest.raises(ValueError, match="recipe: 'bf16' there, 'nvfp4' here"):
        loop.train(config, "nvfp4", data)


def test_a_corrupt_checkpoint_stops_the_run_by_name(run):
    config, data = run(steps=8, checkpoint_every=4)
    stop_after(loop.Trainer(config, "bf16", data), 4)
    (path,) = (config.run.out / "checkpoints").glob("*.pt")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-00000004\.pt: truncated"):
        loop.train(config, "bf16", data)


def test_a_diverged_run_says_so_and_stops(run):
    config, data = run(steps=30, lr=1e-2)
    trainer = loop.Trainer(config, "bf16", data)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("inf")
    result = trainer.train()
    assert result["is_diverged"] and result["held_out_loss"] is None and result["steps"] < 30
    assert not list((config.run.out / "checkpoints").glob("*.pt"))
    assert log.read_log(config.run.out)[-1]["loss"] is None


def test_no_gpu_here(run, monkeypatch):
    config, data = run(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda': torch sees no GPU"):
        loop.train(config, "bf16", data)


def test_saved_bytes_count_each_storage_once_and_no_parameters():
    layer = torch.nn.Linear(8, 16, bias=False)
    x = torch.ones(4, 8)

    def forward():
        y = layer(x)  # saves x; the weight is a parameter
        return (y[:2] * y).sum() if y.shape[0] == 2 else (y * y).sum()  # saves y, twice the same storage

    assert measure.saved_activation_bytes(layer, forward) == 4 * (4 * 8 + 4 * 16)
    layer.register_buffer("factor", torch.ones(4, 16))  # the model's, as a parameter is

    def with_buffer():
        return (forward() * layer.factor).sum()

    assert measure.saved_activation_bytes(layer, with_buffer) == 4 * (4 * 8 + 4 * 16)


def test_quantized_recipes_save_fewer_bytes_in_their_linear_layers():
    torch.manual_seed(0)
    x = torch.randn(256, 256, requires_grad=True)
    saved = {}
    for recipe in ("bf16", "nvfp4"):
        stack = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
        hb.quantize_(stack, recipe, keep=hb.Keep(names=(), last_fraction=0.0), state=hb.RunState(0))
        saved[recipe] = measure.saved_activation_bytes(stack, lambda model=stack: model(x).sum())
    assert saved["nvfp4"] < 0.5 * saved["bf16"]


@pytest.mark.parametrize("key", ["model", "optimizer", "run_state", "step"])
def test_a_checkpoint_with_other_content_is_named(run, key):
    """Its format and identity are right, what it holds is not."""
    config, data = run(steps=4, checkpoint_every=2)
    stop_after(loop.Trainer(config, "bf16", data), 2)
    path = next((config.run.out / loop.CHECKPOINTS).glob("*.pt"))
    content = torch.load(path, weights_only=True)
    content[key] = {}
    torch.save(content, path)
    with pytest.raises(ValueError, match="does not fit this run|is no number of steps") as error:
        loop.Trainer(config, "bf16", data)
    assert str(path) in str(error.value)
