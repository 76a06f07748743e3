"""What of CUDA graphs can be seen without a GPU: a step reads nothing on the host, and GraphedStep runs it as it is."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte as hb
from halfbyte.train import log, loop
from halfbyte.train import model as models
from halfbyte.train.graphs import GraphedStep


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_mxfp8_bwd", "four_over_six"])
def test_no_step_reads_a_tensor_on_the_host(name, recipe):
    """Fake tensors have no data: whatever asks for a value of one raises."""
    with FakeTensorMode():
        model = models.Decoder(models.model_preset(name))
        state = hb.RunState(0)
        hb.quantize_(model, recipe, state=state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.empty(2, 32, dtype=torch.int64)
        with hb.cache_weights(model, optimizer):
            for _ in range(2):
                logits, balance = model(tokens, balance=True)
                (logits.square().mean() + balance).backward()
                state.advance()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            logits.sum().item()


def test_on_a_cpu_a_graphed_step_is_the_step():
    step = GraphedStep(lambda x: (x + 1,), torch.device("cpu"))
    assert [float(step(torch.tensor(float(i)))[0]) for i in range(6)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("options", [{"graph": "on"}, {"cache_weights": True}, {"recompute": "selective"}])
def test_options_that_change_no_bit(run, folder, options):
    config, data = run(steps=4, accumulate=2, recipe_schedule="3:bf16/nvfp4")
    loop.train(config, "nvfp4", data)
    other, _ = run(steps=4, accumulate=2, recipe_schedule="3:bf16/nvfp4", out=folder / "other", **options)
    loop.train(other, "nvfp4", data)
    for kind in ("step", "eval"):
        assert log.curve(other.run.out, kind) == log.curve(config.run.out, kind)


def test_a_graph_is_forgotten_where_the_recipe_changes(run, monkeypatch):
    """It would go on replaying the kernels of the recipe before."""
    config, data = run(recipe_schedule="4:bf16,8:mxfp8", graph="on")
    trainer, forgotten = loop.Trainer(config, "nvfp4", data), []
    monkeypatch.setattr(trainer.compute, "reset", lambda: forgotten.append(trainer.step))
    trainer.train()
    assert forgotten == [4, 8, 12]  # after the last step for its memory
