"""One process of `halfbyte train` is the plain loop that anybody would write, bit for bit."""

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
        inputs, targets = batches[step]
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        state.advance()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(config.optim, step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_its_losses_are_those_of_a_loop_by_hand(run, recipe):
    config, data = run(log_every=1)
    loop.train(config, recipe, data)
    steps, losses = log.curve(config.run.out, "step")
    assert steps == list(range(1, 13)) and losses == by_hand(config, data, recipe)
