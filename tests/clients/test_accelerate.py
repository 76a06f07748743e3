"""accelerate's own prepare, backward and checkpoints around a converted model: bit for bit a plain loop."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
import plain_loop
import ranks
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

import halfbyte as hb

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train(accelerator: Accelerator, data: torch.Tensor, folder: Path, *, first: int = 0, last: int = plain_loop.STEPS):
    """Convert, prepare, follow, register; go on from what `folder` holds, train some steps and save there."""
    model = plain_loop.layers()
    run = hb.quantize_(model, "nvfp4", keep=plain_loop.ALL).state
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.num_processes > 1:
        hb.distributed.place_ranks_(model)
    run.follow(model)
    accelerator.register_for_checkpointing(run)
    if first:
        accelerator.load_state(str(folder))
    for x in data[first * accelerator.gradient_accumulation_steps : last * accelerator.gradient_accumulation_steps]:
        with accelerator.accumulate(model):
            accelerator.backward(plain_loop.loss_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
    position = run.state_dict()["position"]  # where the next micro-batch draws
    accelerator.save_state(str(folder))
    is_sharded = all(isinstance(p, DTensor) for p in model.parameters())
    assert is_sharded is (accelerator.distributed_type == "FSDP"), accelerator.distributed_type
    return run, position, [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def fresh(**options) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


def same(parameters, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def test_one_process_with_accumulation_goes_on_from_its_checkpoint(tmp_path):
    expected, data = plain_loop.expected(), plain_loop.batches()
    accumulate = {"gradient_accumulation_steps": plain_loop.ACCUMULATE}
    _, position, whole = train(fresh(**accumulate), data, tmp_path / "whole")
    assert position == plain_loop.STEPS * plain_loop.ACCUMULATE and same(whole, expected)
    train(fresh(**accumulate), data, tmp_path / "part", last=2)
    _, position, rest = train(fresh(**accumulate), data, tmp_path / "part", first=2)
    assert position == plain_loop.STEPS * plain_loop.ACCUMULATE and same(rest, expected)


def on_a_rank(rank: int, world: int, folder: str, sharded: bool, efficient: bool):
    """Train as `accelerate launch` would start it, and again in two pieces; return what both end with."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29997", ACCELERATE_USE_CPU="true")
    data, ends = plain_loop.batches(seed=5 + rank), []

    def make() -> Accelerator:
        if not sharded:
            return fresh()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=efficient, state_dict_type="SHARDED_STATE_DICT"
        )
        # What a CPU lacks: accelerate shards on GPUs alone, so it is told that these ranks are of that kind.
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return Accelerator(cpu=True, fsdp_plugin=plugin)

    assert (make().distributed_type == "FSDP") is sharded
    for first, last in ((0, 3), (0, 2), (2, 3)):
        place = Path(folder, "whole" if last - first == 3 else "part")
        run, position, parameters = train(make(), data, place, first=first, last=last)
        ends.append((run.rank, position, [p.detach().tolist() for p in parameters]))
    return ends[0], ends[2]


@pytest.mark.parametrize("sharded, efficient", [(False, False), (True, False), (True, True)], ids=str)
def test_two_ranks_are_one_process_that_takes_them_in_turn(sharded, efficient, tmp_path):
    """DDP; FSDP2; FSDP2 through the meta device, from which accelerate gives the parameters new tensors."""
    expected = plain_loop.expected(ranks=2, accumulate=1)
    for rank, ends in enumerate(ranks.run(2, on_a_rank, str(tmp_path), sharded, efficient, seconds=240)):
        for found_rank, position, parameters in ends:
            assert (found_rank, position) == (rank, plain_loop.STEPS)
            assert same([torch.tensor(p) for p in parameters], expected)
