"""Runs that begin with another's weights and learn from another's logits: QAT and QAD."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from runs import losses, weights

import halfbyte as hb
from halfbyte.train import config as configs
from halfbyte.train import data as texts
from halfbyte.train import loop, recorded, sharded, tune
from halfbyte.train import model as models
from halfbyte.train.ranks import World


@pytest.fixture
def base(run):
    """A run of two steps in high precision, and its text."""
    config, data = run(steps=2, decay=0.0)
    loop.train(config, "bf16", data)
    return config, data


def tuned(config, name, *, teaches=False, temperature=1.0, **optim):
    """Return the config of a run that begins where `config`'s ended."""
    folder = config.run.out
    source = configs.TuneConfig(begin=folder, teacher=folder if teaches else None, temperature=temperature)
    optim = replace(config.optim, **{"steps": 2, "lr": 1e-3, **optim})
    return replace(config, tune=source, optim=optim, run=replace(config.run, out=folder.with_name(name)))


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def decoder(state):
    model = models.Decoder(models.model_preset("tiny"))
    model.load_state_dict(state)
    return model


def test_a_run_begins_with_the_weights_of_another(base):
    config, data = base
    trainer = loop.Trainer(tuned(config, "qat"), "qat@all", data)
    assert same(trainer.model.state_dict(), weights(config)) and trainer.teacher is None
    result = trainer.train()
    served = decoder(weights(tuned(config, "qat")))
    hb.quantize_(served, "qat", keep=hb.Keep(names=(), last_fraction=0))
    layout = {"sequence": 32, "batch": 4, "device": torch.device("cpu")}
    batches = texts.Batches(data.held_out, seed=loop.HELD_OUT_SEED, **layout)
    found = []
    for model in (served, decoder(weights(tuned(config, "qat")))):
        with torch.no_grad():
            each = [
                torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                for x, y in map(batches.__getitem__, (0, 1))
            ]
        found.append(torch.stack(each).mean().item())
    assert (result["held_out_loss_as_trained"], result["held_out_loss"]) == pytest.approx(tuple(found), rel=1e-6)
    assert result["held_out_loss_as_trained"] != result["held_out_loss"]


def test_distillation_follows_the_teachers_logits(base):
    config, data = base
    run = tuned(config, "qad", teaches=True, temperature=2.0, steps=1, warmup=0.0)
    loop.train(run, "qat@all", data)
    student, teacher = decoder(weights(config)), decoder(weights(config))
    hb.quantize_(student, "qat", keep=hb.Keep(names=(), last_fraction=0))
    x, _ = texts.Batches(data.train, seed=run.seed, sequence=32, batch=4, device=torch.device("cpu"))[0]
    s, t = student(x).double() / 2, teacher(x).detach().double() / 2
    loss = 4 * (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()
    assert losses(run)[0][1][0] == pytest.approx(loss.item(), abs=1e-6) and loss > 1e-4
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm().item()
    lines = [json.loads(line) for line in (run.run.out / "log.jsonl").read_text().splitlines()]
    assert next(line["grad_norm"] for line in lines if line["kind"] == "step") == pytest.approx(norm, rel=1e-4)


def test_a_distilled_run_goes_on_with_the_same_bits(base):
    config, data = base
    whole = tuned(config, "whole", teaches=True, steps=4, decay=0.0, warmup=0.0)
    loop.train(whole, "qat", data)
    half = tuned(config, "half", teaches=True, steps=2, decay=0.0, warmup=0.0)
    loop.train(half, "qat", data)
    longer = replace(half, optim=whole.optim)
    loop.train(longer, "qat", data)
    assert losses(longer)[0] == losses(whole)[0] and same(weights(longer), weights(whole))


def test_where_weights_came_from_belongs_to_the_identity(base):
    config, data = base
    run = tuned(config, "qad", teaches=True)
    loop.train(run, "qat", data)
    other = replace(run, tune=replace(run.tune, temperature=3.0))
    with pytest.raises(ValueError, match=r"holds another run \(tune.teacher.temperature: 1.0 there, 3.0 here\)"):
        loop.train(other, "qat", data)
    loop.train(replace(config, optim=replace(config.optim, steps=3)), "bf16", data)
    with pytest.raises(ValueError, match="tune.begin.run: .*; tune.begin.step: 2 there, 3 here"):
        loop.train(run, "qat", data)
    assert "tune" not in recorded.recorded_config(config.run.out)["identity"]


def test_a_checkpoint_of_several_ranks_is_read_too(base, tmp_path):
    config, data = base
    trainer = loop.Trainer(config, "bf16", data)
    content = {"identity": trainer.identity, "step": 2, "position": 2, "seconds": 1.0, "format": "halfbyte-checkpoint"}
    content |= {"version": 1, "model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    content |= {"run_state": trainer.run_state.state_dict()}
    folder = config.run.out / "checkpoints"
    (folder / "step-00000002.pt").unlink()
    sharded.save_sharded(folder / "step-00000002", content, World())
    model = models.Decoder(models.model_preset("tiny"))
    tune.begin_(model, tuned(config, "qat"), data)
    assert same(model.state_dict(), trainer.model.state_dict())


def test_a_tokenizer_that_was_trained_on_another_text_is_refused(base):
    """Its numbers mean other tokens; bytes mean the same in every text."""
    config, data = base
    path = config.run.out / "config.json"
    facts = json.loads(path.read_text())
    facts["identity"] |= {"corpus_sha256": "0" * 64}
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="checkpoint"):  # of another identity than this config.json
        loop.train(tuned(config, "of bytes"), "qat", data)
    facts["identity"]["data"]["tokenizer"] = "bpe:300"
    path.write_text(json.dumps(facts))
    bpe = replace(tuned(config, "of bpe"), data=replace(config.data, tokenizer="bpe:300"))
    with pytest.raises(ValueError, match=r"its bpe:300 tokenizer was trained on another text \(corpus_sha256\)"):
        loop.train(bpe, "qat", data)


def test_refusals(base, run, tmp_path):
    config, data = base
    for option in ("begin", "teacher"):
        wrong = replace(config, tune=configs.TuneConfig(**{option: tmp_path / "none"}))
        with pytest.raises(ValueError, match=rf"{option}='\S+none': no config.json there; give the --out of a run"):
            loop.train(wrong, "qat", data)
    with pytest.raises(
        ValueError, match=r"begin='\S+': does not fit this run \(model: 'layers.2.input_layernorm.weight' is on"
    ):
        loop.train(replace(tuned(config, "other"), model="nano"), "qat", data)
    bpe = replace(tuned(config, "other"), data=replace(config.data, tokenizer="bpe:300"))
    with pytest.raises(ValueError, match="its tokenizer is 'bytes', this run's 'bpe:300'"):
        loop.train(bpe, "qat", data)
    with pytest.raises(ValueError, match="temperature=2.0: it is the teacher's; give --teacher FOLDER too"):
        configs.TuneConfig(temperature=2.0)
    with pytest.raises(ValueError, match="temperature=-1: give a number above 0"):
        configs.TuneConfig(temperature=-1, teacher=tmp_path)
    for path in (config.run.out / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no checkpoint there; let that run reach one"):
        loop.train(tuned(config, "late"), "qat", data)
