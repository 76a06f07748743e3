"""What every rank does in test_delayed_ranks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import halfbyte as hb

STEPS = 5
KEEP = hb.Keep(names=(), last_fraction=0)


def recipe() -> hb.Recipe:
    bare = hb.recipes.nvfp4(stochastic_rounding=False, hadamard=None)
    return hb.recipes.delayed_amax(every=2, margin=1.25, base=bare)


def converted(rank: int) -> tuple[nn.Module, hb.RunState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    state = hb.RunState(1, rank=rank)
    hb.quantize_(model, recipe(), keep=KEEP, state=state)
    return model, state


def batch(step: int, rank: int) -> torch.Tensor:
    """Return x of a rank, of which now one, now the other has the larger."""
    size = 1.0 + 3.0 * ((step + rank) % 2) + step
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank)) * size


def trained(rank: int, world: int, sharded: bool) -> tuple[dict, list]:
    """Return the state after several steps, resumed in the middle, and the outputs of all."""
    model, state = converted(rank)
    if sharded:
        fully_shard(model[0]), fully_shard(model[2]), fully_shard(model)
    outputs = []
    for step in range(STEPS):
        if step == 3:  # a checkpoint of a step that measured
            saved = state.state_dict()
            weights = [p.detach().clone() for p in model.parameters()] if not sharded else None
            if weights is not None:
                model, state = converted(rank)
                for mine, kept in zip(model.parameters(), weights, strict=True):
                    mine.data.copy_(kept)
            state.load_state_dict(saved)
        state.begin_step(model)
        y = model(batch(step, rank))
        y.square().mean().backward()
        state.advance()
        for p in model.parameters():
            if not sharded:
                dist.all_reduce(p.grad, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
                p.grad /= world
            p.data.add_(p.grad, alpha=-0.01)
            p.grad = None
        outputs.append(y.detach().tolist())
    return state.state_dict(), outputs


def written_by_one(rank: int, world: int) -> dict | None:
    """Return what the first rank writes down alone, after a step of both."""
    model, state = converted(rank)
    state.begin_step(model)
    model(batch(0, rank)).sum().backward()
    state.advance()
    state.settle_amaxes()
    return state.state_dict() if rank == 0 else None


def asked_before_and_after(rank: int, world: int) -> dict:
    """Return the state at a step's end, of which the state was asked for at its beginning too."""
    model, state = converted(rank)
    state.begin_step(model)
    state.state_dict()
    model(batch(0, rank)).sum().backward()
    state.advance()
    return state.state_dict()


def of_a_rank(rank: int, world: int) -> tuple:
    return trained(rank, world, sharded=False), trained(rank, world, sharded=True)
