"""Pipelines of torchtitan 0.3.0 on two gloo ranks beside one process that takes their micro-batches in turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
from test_torchtitan import _one_process, ours, runs, shallow, whole  # noqa: F401
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import halfbyte as hb
from halfbyte.policy import plain_name

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
MICRO_BATCHES = 4
LAYERS = 4


def config_of(folder: str, schedule: str = "", *, steps: int = 2, degree: int = 2):
    """Return the config of a llama of four blocks that takes four sequences a step, one after the other or in a pipeline."""
    accumulate = 1 if schedule else MICRO_BATCHES
    config = shallow(runs.small(llama3_debugmodel(), folder, steps=steps), LAYERS)
    config.training.local_batch_size, config.training.global_batch_size = MICRO_BATCHES // accumulate, MICRO_BATCHES
    config.training.max_norm = 1e9  # norms of stages add in another order
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    if schedule:
        config.parallelism.pipeline_parallel_degree = degree
        config.parallelism.pipeline_parallel_schedule = schedule
        config.parallelism.pipeline_parallel_microbatch_size = 1
    return config


def trained(config, recipe, **options):
    """Train, and return what a run ends with: losses, weights and gradients by name, places that calls drew at."""
    places, place = [], ours.RecipeLinear.place

    def noted(self, call=0, device=None):
        found = place(self, call, device)
        if found is not None and torch.is_grad_enabled() and self.run_state._present:
            places.append((*found.base.tolist(), found.stream))
        return found

    options = {"keep": hb.Keep(last_fraction=0)} | options
    trainer, losses = runs.run(ours.quantize_config_(config, recipe, **options), weights=True)
    tensors = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            for kind, tensor in (("weight", parameter), ("gradient", parameter.grad)):
                tensors[f"{plain_name(name)} {kind}"] = whole([tensor])[0].float().numpy()
    return trainer, losses, tensors


def on_a_rank(rank: int, world: int, folder: str, schedule: str, recipe: str):
    runs.alone(rank, world)
    trainer, losses, tensors = trained(config_of(folder, schedule), recipe)
    state = trainer.checkpointer.run_state
    return losses, tensors, (state.rank, state.next_position, state.state_dict())


@pytest.mark.parametrize("recipe", ["naive_fp4", "nvfp4"])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_a_pipeline_is_one_process_that_takes_its_micro_batches_in_turn(tmp_path, schedule, recipe):
    first, last = ranks.run(2, on_a_rank, str(tmp_path), schedule, recipe, seconds=200)
    trainer, losses, tensors = trained(config_of(str(tmp_path)), recipe)
    print(losses, last[0])
    both = first[1] | last[1]
    assert len(both) == len(first[1]) + len(last[1]) and set(both) == set(tensors)
    bad = [name for name in tensors if not (both[name] == tensors[name]).all()]
    print(bad, len(tensors))
    state = trainer.checkpointer.run_state
    assert first[2] == last[2] == (state.rank, state.next_position, state.state_dict())
    assert not bad
    assert last[0] == losses
