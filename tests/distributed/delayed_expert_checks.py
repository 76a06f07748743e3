"""Experts that ranks share whose x and dy are quantized with amaxes of earlier steps, beside those of one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from expert_parallel_checks import Case, Tokens, by_expert, operands_of, recorded, same, tokens_of
from grouped_cases import ends
from torch.distributed.device_mesh import init_device_mesh

import halfbyte as hb

SIZES = (
    ((5, 0, 0), (3, 0, 0)),
    ((2, 9, 0), (0, 4, 0)),
    ((0, 3, 1), (0, 0, 17)),
    ((0, 0, 2), (0, 4, 0)),
    ((1, 1, 1), (2, 2, 2)),
)
"""Of the groups of both ranks, step by step: the last expert has tokens late, the first has none for a while."""
RECIPE = hb.recipes.delayed_amax(every=2, margin=1.25)


def batch(step: int, rank: int | None) -> Tokens:
    """Return the tokens of a rank, or of both sorted by expert, whose size goes up and down."""
    case = Case("", SIZES[step], padding=0)
    every = [tokens_of(case, each) for each in range(2)]
    if rank is None:
        x, dy = (by_expert(case, [getattr(one, name) for one in every]) for name in ("x", "dy"))
        offsets = ends(tuple(map(sum, zip(*SIZES[step], strict=True))))
    else:
        x, dy, offsets = every[rank]
    size = (1.0, 4.0, 0.3, 9.0, 2.0)[step]
    return Tokens(x * size, dy * size, offsets)


def trained(mesh, dispatch: str, rank: int | None) -> tuple[list[dict], dict]:
    """Return what every expert that is here multiplied in each step, and the state in the end.

    Args:
        rank: whose tokens come, None for those of both.
    """
    torch.manual_seed(5)
    layer = hb.nn.GroupedLinear(3, 40, 24, recipe=RECIPE, state=hb.RunState(7, rank=rank or 0))
    exchange = hb.distributed.shard_experts_(torch.nn.ModuleDict({"up": layer}), mesh, "up", dispatch=dispatch)
    made = []
    for step in range(len(SIZES)):
        if step in (2, 3):
            layer.run_state.load_state_dict(copy.deepcopy(layer.run_state.state_dict()))
        layer.run_state.begin_step(layer)
        tokens = batch(step, rank)
        with recorded() as found:
            arrived = exchange.send(tokens.x.requires_grad_(), tokens.offsets)
            exchange.back(layer(arrived.x, arrived.offsets), arrived).backward(tokens.dy)
        layer.run_state.advance()
        made.append(operands_of(found, exchange.ranks.first, exchange.ranks.here))
    return made, layer.run_state.state_dict()


def operands(rank: int, world: int) -> list[str]:
    """Return what differs between experts of two ranks and those of one process, on rank 0."""
    lines = []
    alone_mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("other", "ep"))["ep"]
    for dispatch in ("plain", "nvfp4"):
        mine = trained(init_device_mesh("cpu", (world,)), dispatch, rank)
        alone, state = trained(alone_mesh, dispatch, None)  # on both ranks, which begin a step together
        every = [None] * world
        dist.all_gather_object(every, mine)
        for step, expected in enumerate(alone):
            found = every[0][0][step] | every[1][0][step]
            for g, gemms in expected.items():
                pairs = zip(
                    [t for gemm in found[g] for side in gemm for t in side],
                    [t for gemm in gemms for side in gemm for t in side],
                    strict=True,
                )
                if not all(same(a, b) for a, b in pairs):
                    lines.append(f"{dispatch}, step {step}: expert {g} multiplies other bytes")
        if any(one[1] != state for one in every):
            lines.append(f"{dispatch}: {[one[1] for one in every]}, {state} in one process")
        (numbers,) = state["amaxes"].values()
        if not all(numbers["held"][3 * (dispatch == "nvfp4") :]):
            lines.append(f"{dispatch}: an expert holds nothing, {numbers['held']}")
        lines += [] if dispatch == "plain" or not any(numbers["held"][:3]) else ["codes have amaxes of their own"]
    return lines
