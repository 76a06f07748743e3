"""Pipelines of torchtitan: where its stages draw, and the layers of a run of which a rank holds some."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halfbyte.nn.streams import FollowsRecipe, name_layers
from halfbyte.policy import plain_name
from halfbyte.position import Interleaved
from halfbyte.state import RunState


def data_rank(parallel_dims: Any) -> int:
    """Return this process's rank among those that see other data: of torchtitan's meshes pp is first, tp last."""
    return dist.get_rank() % (dist.get_world_size() // parallel_dims.pp) // parallel_dims.tp


def layers_of_run(parts: Sequence[nn.Module], model_config: Any, degree: int) -> dict[str, Any]:
    """Return every layer of a run that follows a recipe, by name, in the order of the whole model.

    Of layers that other ranks of a pipeline hold, twins on the meta device: they take the same streams, follow the same
    schedule and hold the same amaxes, so that the RunState and what a checkpoint says of it are one process's.

    Args:
        parts: of the model that this rank holds.
        model_config: builds the whole model.
        degree: how many ranks the pipeline has.

    Raises:
        ValueError: a part calls a layer otherwise than the whole model.
    """
    own = {plain_name(n): m for part in parts for n, m in part.named_modules() if isinstance(m, FollowsRecipe)}
    if degree == 1:
        return own
    with torch.device("meta"):
        whole: nn.Module = model_config.build()
    for part in parts:
        _refuse_other_names(part, whole, degree)
    name_layers(whole)
    return {n: own.get(n, m) for n, m in whole.named_modules() if isinstance(m, FollowsRecipe)}


def _refuse_other_names(part: nn.Module, whole: nn.Module, degree: int) -> None:
    """Raise ValueError where torchtitan's cut has numbered the layers of a list again."""
    lengths = {name: len(module) for name, module in whole.named_modules() if isinstance(module, nn.ModuleList)}
    for name, module in part.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) not in (0, lengths[plain_name(name)]):
            raise ValueError(
                f"parallelism.pipeline_parallel_degree={degree}: {name} is an nn.ModuleList, of which a stage numbers "
                "its layers from 0, so that nobody knows which of the model's they are; hold them in an nn.ModuleDict, "
                "or set it to 1"
            )


def follow_pipeline(schedule: Any, state: RunState, count: int) -> None:
    """Let every micro-batch of a pipeline draw where it would if all were run one after the other.

    Args:
        schedule: of torch.distributed.pipelining; its stages run forwards and backwards of one micro-batch each.
        state: of all layers of these stages.
        count: micro-batches that one `step` of the schedule runs.

    Raises:
        ValueError: the schedule calls other functions than those of its stages.
    """
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if None in stages or getattr(schedule, "_comp_type_to_function_map", None):
        raise ValueError(
            f"pipeline_parallel_schedule: {type(schedule).__name__} runs other functions than forward_one_chunk and "
            "backward_one_chunk of its stages, so that nobody knows which micro-batch draws; use a schedule of "
            "torch's as it is, such as '1F1B' or 'Interleaved1F1B'"
        )
    turns = _Turns(state, count)
    schedule.step = turns.of_all()(schedule.step)
    for stage in stages:
        turns.of_stage(stage)


class _Turns:
    """Puts a RunState where the micro-batch draws that a stage is about to run.

    It stays there until the next one, because the loss is computed behind the forward of the last stage.
    """

    def __init__(self, state: RunState, count: int) -> None:
        self._state, self._count = state, count
        self._present: Interleaved | None = None

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """Let the micro-batches of a `step` of the schedule be the next ones; validation moves nothing."""
        if not torch.is_grad_enabled():
            yield
            return
        present = self._present = self._state.interleave(self._count)
        try:
            yield
        finally:
            self._present = None
            present.end()

    def of_stage(self, stage: Any) -> None:
        """Let every function of a stage that runs a micro-batch say whose turn it is."""
        forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

        @functools.wraps(forward)
        def forward_one_chunk(index: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
            self._turn(index)
            return forward(index, args, kwargs, save_forward_output=save_forward_output)

        @functools.wraps(backward)
        def backward_one_chunk(
            index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> Any:
            self._turn(index)
            return backward(index, loss=loss, full_backward=full_backward, last_backward=last_backward)

        @functools.wraps(weights)
        def backward_weight_one_chunk(index: int, last_backward: bool = False) -> Any:
            self._turn(index)
            return weights(index, last_backward=last_backward)

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk

    def _turn(self, index: int) -> None:
        if self._present is not None:
            self._present.turn(index)
