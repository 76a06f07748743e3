"""A mixture of experts over ranks that see other tokens: experts by rank, all else as FSDP2 shares it.

The ranks of `dp_shard` fall into groups of `ep` neighbours. Those of a group hold other experts; what an expert has is
shared once more by FSDP2 over the groups, and copied over `dp_replicate`. With `tp` ranks have shared every expert by
features before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from halfbyte.distributed import shard_experts_
from halfbyte.train.log import Log, Silent
from halfbyte.train.mesh_config import MeshConfig
from halfbyte.train.moe import MoE
from halfbyte.train.ranks import World

GROUPS, RANKS, TENSOR = "dp_shard_mod_ep", "ep", "tp"
"""Dimensions of the mesh, as torchtitan calls them: the first two make up dp_shard."""


def share_experts_(blocks: Iterable[nn.Module], config: MeshConfig, device: torch.device) -> None:
    """Let ranks share the experts of blocks, in place; `fully_shard` of the blocks leaves them as they are.

    Args:
        blocks: converted, with equal weights on all ranks.
        config: settled.
        device: of this rank.

    Raises:
        ValueError: the recipe's tokens cannot travel as codes.
    """
    mesh, ranks = _mesh(config, device), (RANKS, TENSOR) if config.tp > 1 else RANKS
    groups = mesh["dp_replicate", GROUPS] if config.dp_replicate != 1 else mesh[GROUPS]
    reads_codes = False
    for block in blocks:
        for module in block.modules():
            if not isinstance(module, MoE):
                continue
            fprop = module.gate_up_proj.recipe.fprop
            reads_codes |= fprop is not None and fprop.a is not None
            options: dict[str, Any] = {"dispatch": config.dispatch, "reduce": "mean", "src_data_rank": None}
            options["capacity"] = config.capacity
            module.exchange = shard_experts_(module, mesh[ranks], "gate_up_proj", **options)
            for layer in (module.gate_up_proj, module.down_proj):
                fully_shard(layer, mesh=groups, shard_placement_fn=lambda weight: _shard(weight, config))
    if config.dispatch != "plain" and not reads_codes and dist.get_rank() == 0:
        said = "tokens travel in their values; the recipe leaves what experts read in high precision"
        print(f"dispatch={config.dispatch!r}: {said}", file=sys.stderr, flush=True)


def log_dropped(model: nn.Module, log: Log | Silent, step: int, ranks: World, tp: int) -> None:
    """Log how many copies of tokens a capacity has left out since the last time, on all ranks; nothing without one.

    Args:
        tp: how many neighbours have the same tokens.
    """
    found = [module.dropped for module in model.modules() if isinstance(module, MoE) and module.dropped is not None]
    if found:
        dropped = ranks.mean(torch.stack(found).sum().double()) * (ranks.size / tp)
        log.write("dropped", step, {"copies": round(dropped.item())})
        for count in found:
            count.zero_()


def _mesh(config: MeshConfig, device: torch.device) -> DeviceMesh:
    assert config.dp_replicate is not None, "the config is settled"
    sizes = config.dp_replicate, config.dp_shard // config.ep, config.ep, config.tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", GROUPS, RANKS, TENSOR))
    summed = (GROUPS, RANKS) if config.tp == 1 else (GROUPS, RANKS, TENSOR)
    mesh[summed]._flatten()  # norms of gradients are summed over all of them at once
    return mesh


def _shard(weight: Tensor, config: MeshConfig) -> Shard:
    """Return along which dimension FSDP2 shares experts: not along theirs, of which a rank may hold a single one, nor
    along that which lies in parts already.
    """
    groups, placements = config.dp_shard // config.ep, weight.placements if isinstance(weight, DTensor) else ()
    dims = [dim for dim in (1, 2) if weight.shape[dim] % groups == 0 and Shard(dim) not in placements]
    return Shard(dims[0] if dims else 0)


def clip_by_mesh_(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Do what torch's `clip_grad_norm_` does, for parameters of several meshes; return the norm, a plain tensor."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in held]).full_tensor() for held in by_mesh.values()]  # type: ignore[attr-defined]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for mesh, held in by_mesh.items():
        everywhere: Any = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        nn.utils.clip_grads_with_norm_(held, limit, everywhere)
    return norm
