"""Pipelines of torchtitan 0.3.0 on gloo ranks beside one process that takes their micro-batches in turn."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import ranks
from test_torchtitan import _one_process, moe, ours, runs, shallow, whole  # noqa: F401
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import halfbyte as hb
from halfbyte.integrations import titan_pipeline
from halfbyte.policy import plain_name

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
MICRO_BATCHES, STEPS = 4, 2
DELAYED = hb.recipes.delayed_amax()
CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


class Case(NamedTuple):
    """A run. schedule: of a pipeline of two stages' ranks, "" for none; data, tensor: ranks of these parallelisms."""

    schedule: str = ""
    recipe: hb.Recipe | str = "nvfp4"
    checkpointing: str = "selective"
    backend: str = ""
    spmd: str = "partial_dtensor"
    steps: int = STEPS
    is_plain_loss: bool = False
    is_moe: bool = False
    data: int = 1
    tensor: int = 1

    @property
    def alone(self) -> Case:
        return Case(recipe=self.recipe, steps=self.steps, is_plain_loss=self.is_plain_loss, is_moe=self.is_moe)


class Run(NamedTuple):
    """What a run ends with. places: (seed, offset) of every layer's call; arrays: weights and gradients by name."""

    losses: list[float]
    arrays: dict[str, np.ndarray]
    places: set[tuple[int, int]]
    state: dict
    rank: int


def config_of(case: Case, folder: str):
    """Return the config of a model of four blocks, or of two with experts; a step takes four sequences a rank."""
    config = shallow(runs.small(llama3_debugmodel(), folder, steps=case.steps), 4)
    if case.is_moe:
        config = moe(case.steps)
        config.dump_folder = folder
    config.activation_checkpoint = CHECKPOINTING[case.checkpointing]
    config.training.max_norm = 1e9  # norms of stages add in another order
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size = MICRO_BATCHES if case.schedule else 1
    config.training.global_batch_size = MICRO_BATCHES * case.data
    parallelism = config.parallelism
    parallelism.spmd_backend, parallelism.tensor_parallel_degree = case.spmd, case.tensor
    if case.schedule:
        parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule = 2, case.schedule
        parallelism.pipeline_parallel_microbatch_size = 1
    if case.backend:
        config.compile = CompileConfig(enable=True, components=["model"], backend=case.backend)
    if case.is_plain_loss:
        config.loss = config.loss.loss_fn
    return config


def trained(config, recipe, **options) -> Run:
    places, place = set(), ours.RecipeLinear.place

    def noted(self, call=0, device=None):
        found = place(self, call, device)
        if found is not None and not torch.compiler.is_compiling():
            places.add((int(found.base[0]), int(found.base[1]) + found.stream))
        return found

    ours.RecipeLinear.place = noted
    try:
        config = ours.quantize_config_(config, recipe, **{"keep": hb.Keep(last_fraction=0)} | options)
        trainer, losses = runs.run(config, weights=True)
    finally:
        ours.RecipeLinear.place = place
    arrays = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            arrays[f"{plain_name(name)} weight"] = whole([parameter])[0].float().numpy()
            if parameter.grad is not None:
                arrays[f"{plain_name(name)} gradient"] = whole([parameter.grad])[0].float().numpy()
    state = trainer.checkpointer.run_state
    return Run(losses, arrays, places, state.state_dict(), state.rank)


def on_a_rank(rank: int, world: int, folder: str, cases: list[Case]) -> list[Run]:
    runs.alone(rank, world)
    return [trained(config_of(case, folder), case.recipe) for case in cases]


def in_one_process(folder: str, case: Case) -> Run:
    runs.alone()
    run = trained(config_of(case.alone, folder), case.recipe)
    dist.destroy_process_group()
    return run


def different(run: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    return [name for name in sorted(run.keys() | other.keys()) if not np.array_equal(run.get(name), other.get(name))]


def check_same(first: Run, last: Run, alone: Run) -> None:
    """Fail unless two stages' ranks have the losses, weights, gradients, places and RunState of one process."""
    assert last.losses == alone.losses and len(set(first.losses)) == 1  # only the last stage knows it
    assert not first.arrays.keys() & last.arrays.keys() and not different(first.arrays | last.arrays, alone.arrays)
    compiled = not first.places | last.places
    assert compiled or (not first.places & last.places and first.places | last.places == alone.places)
    assert first.state == last.state == alone.state and first.rank == last.rank == alone.rank == 0


SHORT = [
    Case("1F1B", checkpointing="full"),
    Case("GPipe", "naive_fp4", steps=1),
    Case("Interleaved1F1B"),
    Case("1F1B", DELAYED),
]


def test_a_pipeline_is_one_process_that_takes_its_micro_batches_in_turn(tmp_path):
    """Every bit of losses, gradients and weights, and no two micro-batches, stages or ranks draw at one place."""
    left, right = ranks.run(2, on_a_rank, str(tmp_path), SHORT, seconds=280)
    alone: dict[Case, Run] = {}
    for case, first, last in zip(SHORT, left, right, strict=True):
        if case.alone not in alone:
            alone[case.alone] = in_one_process(str(tmp_path), case)
        check_same(first, last, alone[case.alone])
    drawn = alone[SHORT[0].alone]
    assert len(drawn.places) == 20 * MICRO_BATCHES * STEPS and drawn.state["position"] == MICRO_BATCHES * STEPS
    assert len(alone[SHORT[3].alone].state["amaxes"]) == 20


LONG = [
    Case("GPipe"),
    Case("1F1B", "naive_fp4"),
    Case("Interleaved1F1B", "naive_fp4", checkpointing="none"),
    Case("Interleaved1F1B", checkpointing="full"),
    Case("1F1B", spmd="spmd_types"),
    Case("1F1B", backend="aot_eager"),
    Case("Interleaved1F1B", checkpointing="none", backend="aot_eager"),
    Case("Interleaved1F1B", hb.recipes.delayed_amax(every=2), steps=3, checkpointing="full"),
    Case("1F1B", "naive_fp4", steps=1, is_moe=True),  # later routers balance what shape inference counted, in bf16 too
    Case("1F1B", steps=1, is_moe=True),
]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_more_pipelines_are_one_process(tmp_path):
    left, right = ranks.run(2, on_a_rank, str(tmp_path), LONG, seconds=580)
    for case, first, last in zip(LONG, left, right, strict=True):
        print(case)
        check_same(first, last, in_one_process(str(tmp_path), case))


OTHER_SUMS = [
    Case("LoopedBFS"),
    Case("InterleavedZeroBubble", checkpointing="none", steps=1, is_plain_loss=True),
    Case("ZBVZeroBubble", checkpointing="full", steps=1, is_plain_loss=True),
    Case("DualPipeV", checkpointing="full", steps=1, is_plain_loss=True),
]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_schedules_that_add_gradients_otherwise_draw_the_same_bits(tmp_path):
    """LoopedBFS runs backwards in the reverse order; where a backward is split, torch adds weight gradients in bf16."""
    left, right = ranks.run(2, on_a_rank, str(tmp_path), OTHER_SUMS, seconds=580)
    for case, first, last in zip(OTHER_SUMS, left, right, strict=True):
        alone, both = in_one_process(str(tmp_path), case), first.arrays | last.arrays
        assert max(first.losses, last.losses) == pytest.approx(alone.losses, rel=1e-6)
        assert not first.places & last.places and first.places | last.places == alone.places
        bound = 1e-7 if case.schedule == "LoopedBFS" else 4e-3  # other bits: 5e-2 to 2e-1
        gaps = {n: np.linalg.norm(both[n] - a) / np.linalg.norm(a) for n, a in alone.arrays.items() if "grad" in n}
        print(case, max(gaps.values()))
        assert len(gaps) == 31 and max(gaps.values()) < bound, gaps


FOUR = [Case("1F1B", data=2), Case("1F1B", tensor=2, steps=1), Case("Interleaved1F1B", data=2, checkpointing="full")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_pipelines_of_ranks_that_share_data_or_layers(tmp_path):
    """Two stages of two ranks each are the two ranks without a pipeline; FSDP2 reduces in another order."""
    every = ranks.run(4, on_a_rank, str(tmp_path), FOUR, seconds=580)
    alone = ranks.run(2, on_a_rank, str(tmp_path), [case._replace(schedule="") for case in FOUR], seconds=580)
    for i, case in enumerate(FOUR):
        found, wanted = [run[i] for run in every], [run[i] for run in alone]
        assert [run.rank for run in found] == ([0, 1, 0, 1] if case.data == 2 else [0] * 4)
        assert [run.rank for run in wanted] == ([0, 1] if case.data == 2 else [0, 0])
        for rank in (0, 1):
            both = found[rank].arrays | found[2 + rank].arrays
            assert not found[rank].places & found[2 + rank].places
            assert found[rank].places | found[2 + rank].places == wanted[rank].places
            assert found[2 + rank].losses == pytest.approx(wanted[rank].losses, rel=1e-6)
            gaps = {n: np.linalg.norm(both[n] - a) / np.linalg.norm(a) for n, a in wanted[rank].arrays.items()}
            norms = {n: gaps.pop(n) for n in list(gaps) if "norm" in n}
            print(case, max(gaps.values()), max(norms.values()))
            assert max(gaps.values()) <= (1e-8 if case.data == 2 else 0)
            assert max(norms.values()) < (1e-8 if case.data == 2 else 4e-3)  # parts of norms' gradients, in bf16
        assert case.data == 1 or not found[0].places & found[1].places


def checkpointed(folder: str, schedule: str) -> Run:
    """Train to the fourth step from the last checkpoint of a folder on, by amaxes of earlier steps, then in others."""
    config = config_of(Case(schedule, steps=4), folder)
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.last_save_model_only = True, 2, False
    return trained(config, DELAYED, seed=5, schedule="3:bf16/nvfp4", keep=hb.Keep())


def forget_the_end(folder: str) -> None:
    kept = Path(folder, "checkpoint", "step-2")
    assert kept.is_dir()
    for path in kept.parent.iterdir():
        if path != kept:
            shutil.rmtree(path)


def checkpointed_on_a_rank(rank: int, world: int, folder: str) -> tuple[Run, Run]:
    runs.alone(rank, world)
    at_once = checkpointed(folder, "Interleaved1F1B")
    dist.barrier()
    if rank == 0:
        forget_the_end(folder)
    dist.barrier()
    return at_once, checkpointed(folder, "Interleaved1F1B")


def test_a_checkpoint_of_a_pipeline_goes_on_with_the_same_bits(tmp_path):
    """In a pipeline and in one process: it holds the RunState and the recipes of the whole model."""
    (first, early), (last, late) = ranks.run(2, checkpointed_on_a_rank, str(tmp_path), seconds=200)
    assert len(last.losses) == 4 and late.losses == last.losses[2:]
    assert not different(early.arrays | late.arrays, first.arrays | last.arrays)
    assert early.state == late.state == last.state and last.state["position"] == 4 * MICRO_BATCHES
    assert len(last.state["amaxes"]) == 15, "the last of four blocks is kept"
    forget_the_end(str(tmp_path))
    runs.alone()
    resumed = checkpointed(str(tmp_path), "")
    assert resumed.losses == late.losses and resumed.state == late.state
    assert not different(resumed.arrays, early.arrays | late.arrays)


class Endless(runs.Windows):
    """The text as torchtitan's Validator asks for it."""

    @dataclass(kw_only=True, slots=True)
    class Config(runs.Windows.Config):
        infinite: bool = True


def validated(case: Case, folder: str, evaluation: str) -> tuple[Run, list[float]]:
    """Train, validate after every step."""
    config = config_of(case, folder)
    steps = 1 if case.schedule else MICRO_BATCHES
    config.validator = Validator.Config(enable=True, freq=1, steps=steps, dataloader=Endless.Config(corpus=runs.TEXT))
    found, log = [], MetricsProcessor.log_validation
    MetricsProcessor.log_validation = lambda self, loss, step: found.append(loss)
    try:
        run = trained(config, case.recipe, evaluation=evaluation)
    finally:
        MetricsProcessor.log_validation = log
    # A pipeline frees gradients in validation: the optimizer has had them.
    return run._replace(arrays={name: a for name, a in run.arrays.items() if "gradient" not in name}), found


def validated_on_a_rank(rank: int, world: int, folder: str) -> list[tuple[Run, list[float]]]:
    runs.alone(rank, world)
    return [validated(Case("Interleaved1F1B"), folder, evaluation) for evaluation in ours.EVALUATIONS]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_validation_of_a_pipeline_moves_nothing(tmp_path):
    left, right = ranks.run(2, validated_on_a_rank, str(tmp_path), seconds=200)
    alone = []
    for evaluation in ours.EVALUATIONS:
        runs.alone()
        alone.append(validated(Case(), str(tmp_path), evaluation))
        dist.destroy_process_group()
    for (first, _), (last, found), (run, wanted) in zip(left, right, alone, strict=True):
        check_same(first, last, run)
        assert len(found) == STEPS and found == pytest.approx(wanted, rel=1e-6)
    assert right[0][1] != pytest.approx(right[1][1], rel=1e-4), "as trained is not high precision"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_steps_of_a_pipeline_beside_its_bf16(tmp_path):
    left, right = ranks.run(2, twenty_on_a_rank, str(tmp_path), seconds=600)
    assert set(left[0]) == set(left[1]) == {-1.0}
    plain, losses = right
    gaps = [abs(a - b) / b for a, b in zip(losses, plain, strict=True)]
    print(plain[-1], losses[-1], max(gaps))
    assert len(losses) == 20 and losses[-1] < 0.6 * losses[0] and 0 < max(gaps) < 0.02, gaps


def twenty_on_a_rank(rank: int, world: int, folder: str) -> list[list[float]]:
    """Return the losses of bf16, then of nvfp4, by torchtitan's policy of layers."""
    runs.alone(rank, world)
    plain, case = runs.run(config_of(Case("1F1B", steps=20), folder), weights=True)[1], Case("1F1B", steps=20)
    return [plain, trained(config_of(case, folder), case.recipe, keep=hb.Keep()).losses]


class Lists(nn.Module):
    """A model whose blocks are in a list."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))


def test_refusals(monkeypatch):
    state = hb.RunState(1)
    stage = SimpleNamespace(forward_one_chunk=len, backward_one_chunk=len, backward_weight_one_chunk=len)
    for other in (
        SimpleNamespace(step=len),
        SimpleNamespace(step=len, _stages=[stage], _comp_type_to_function_map={"F": len}),
    ):
        with pytest.raises(
            ValueError, match="SimpleNamespace runs other functions than forward_one_chunk .*use a sche"
        ):
            titan_pipeline.follow_pipeline(other, state, 2)
    whole_model = SimpleNamespace(build=lambda: Lists(3))
    with pytest.raises(ValueError, match="pipeline_parallel_degree=2: blocks is an nn.ModuleList, .*nn.ModuleDict, or"):
        titan_pipeline.layers_of_run([Lists(2)], whole_model, 2)
    assert titan_pipeline.layers_of_run([Lists(3), Lists(0)], whole_model, 2) == {}
    monkeypatch.setenv("NGPU", "2")
    config = ours.quantize_config_(config_of(Case("1F1B"), "."))
    config.comm.mode, config.training.disable_cuda_graphs = "fake_backend", False
    with pytest.raises(ValueError, match="CUDA graphs do not support pipeline parallelism yet"):  # torchtitan's words
        config.build()
