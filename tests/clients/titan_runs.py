"""torchtitan's Trainer on a CPU for test_torchtitan.py, importable on every rank: device, attention, tokenizer, text.

A CPU lacks what torchtitan asks of a device, and backward of compiled FlexAttention: `_Device` answers for it, and
attention is torch's own. gloo lacks a sum with a factor: FSDP2 divides beside it. Schedules of torch 2.13 take whole
batches: `_step` hands over the micro-batches that torchtitan has. Tokenizer, text and what torchtitan
wants of a later torch besides come from bench/titan.py. Everything else is torchtitan's: its configs, meta init,
parallelize functions, FSDP2, pipelines, optimizer, loss, checkpoints and loop.
"""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FOLDER = Path(sys.prefix) / "peers" / "torchtitan"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from torchtitan.tools import utils  # noqa: E402


class _Device:
    """What torchtitan asks torch.cuda for."""

    memory = torch.cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """There is one."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "CPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        """Nobody counts."""

    def empty_cache(self) -> None:
        """There is none."""


utils.device_type, utils.device_module = "cpu", _Device()

from bench.titan import Bytes, Windows  # noqa: E402 - first: it completes torch

TEXT = str(Path(torch.__file__).with_name("functional.py"))
"""What the debug models learn: Python that every machine with this torch has."""

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def _step(schedule: Any, *, return_outputs: bool = True, target: Any = None, **micro_batches: Any) -> None:
    """Be `step` of a schedule for torchtitan, which has cut its batch and wants no outputs."""
    assert target is None
    assert not return_outputs or not schedule._has_backward
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(return_outputs=return_outputs, **micro_batches)


for _schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
    if "arg_mbs" not in inspect.signature(_schedule.step).parameters:
        _schedule.step = _step


def small(config: Trainer.Config, folder: Path | str, *, steps: int = 20, accumulate: int = 1) -> Trainer.Config:
    """Let a config of a debug model run here: two sequences of 64 tokens, our text, a fixed seed."""
    for _, _, parent, attribute in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    config.dump_folder, config.hf_assets_path = str(folder), str(folder)
    config.tokenizer, config.dataloader = Bytes.Config(), Windows.Config(corpus=TEXT)
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, 64, steps
    world = int(os.environ.get("WORLD_SIZE", "1"))
    training.global_batch_size = 2 * accumulate * world
    config.debug = DebugConfig(seed=3)
    config.checkpoint = CheckpointManager.Config()
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    return config


def alone(rank: int = 0, world: int = 1, port: str = "") -> None:
    """Be one of torchrun's processes; alone, at a port that is free."""
    port = port or ("0" if world == 1 else "29761")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def _fill(model: torch.nn.Module) -> None:
    """Give every parameter values that depend on its name alone: torch draws others on several ranks than on one."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.replace("_checkpoint_wrapped_module.", "").encode()))
        full = torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.dim() == 1)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(full)


def run(config: Trainer.Config, *, weights: bool = False) -> tuple[Trainer, list[float]]:
    """Train, and return the trainer and the losses of all steps; weights: fill them by name."""
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        if weights:
            _fill(part)
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, *others: Any, **more: Any) -> None:
        losses.append(loss)
        log(step, loss, *others, **more)

    trainer.metrics_processor.log = note
    trainer.train()
    trainer.close()
    return trainer, losses
