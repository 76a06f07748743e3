"""One process of `halfbyte train` is the plain loop that anybody would write, bit for bit."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import halfbyte as hb
from halfbyte.train import data as texts
from halfbyte.train import log, loop, optim
from halfbyte.train import model as models


def by_hand(config, data, recipe):
    """Return the losses of a run's steps, of a loop that knows nothing of ranks, folders and checkpoints."""
    model = models.Decoder(models.model_preset(config.model))
    models.initialise_(model, config.seed)
    state = hb.RunState(config.seed)
    hb.quantize_(model, recipe, state=state)
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == is_so] for is_so in (True, False))
    groups = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (config.optim.beta1, config.optim.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=betas, eps=config.optim.eps, fused=True)
    layout = {"sequence": config.data.sequence, "batch": config.data.batch, "device": torch.device("cpu")}
    batches = texts.Batches(data.train, seed=config.seed, **layout)
    losses = []
    for step in range(config.optim.steps):
        optimizer.zero_grad()
        count, total = config.data.accumulate, 0.0
        for i in range(count):
            inputs, targets = batches[step * count + i]
            logits, balance = model(inputs, balance=True)  # of experts, else 0; runs report the cross entropy alone
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            ((loss + balance) / count).backward()
            total = total + loss.detach() / count
            state.advance()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(config.optim, step)
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize(
    "name, recipe, accumulate",
    [("tiny", "bf16", 1), ("tiny", "nvfp4", 1), ("tiny", "nvfp4", 2), ("moe-tiny", "bf16", 1)],
)
def test_its_losses_are_those_of_a_loop_by_hand(run, name, recipe, accumulate):
    config, data = run(log_every=1, model=name)
    config = replace(config, data=replace(config.data, accumulate=accumulate))
    loop.train(config, recipe, data)
    steps, losses = log.curve(config.run.out, "step")
    assert steps == list(range(1, 13)) and losses == by_hand(config, data, recipe)


def test_a_small_held_out_text_is_read_once(run):
    """However many batches of it are asked for: no sequence counts twice, and the mean is over those that there are."""
    config, data = run(eval_batches=1000)
    trainer = loop.Trainer(config, "bf16", data)
    size, length = config.data.batch, config.data.sequence
    count = (len(data.held_out) - 1) // length // size
    layout = {"sequence": length, "batch": size, "device": torch.device("cpu")}
    batches = texts.Batches(data.held_out, seed=loop.HELD_OUT_SEED, **layout)
    with torch.no_grad():
        losses = [
            F.cross_entropy(trainer.model(inputs).flatten(0, 1), targets.flatten()).item()
            for inputs, targets in (batches[i] for i in range(count))
        ]
    assert 1 < count < 1000 and trainer.evaluate() == pytest.approx(sum(losses) / count, rel=1e-6)
