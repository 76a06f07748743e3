"""A model's way from bf16 training to nvfp4 and back through sharded checkpoints, each time over other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_checks import BF16, NOTHING_KEPT, two_layers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import halfbyte as hb


def build(recipe: str, world: int) -> nn.Module:
    """Return a model of its own values: fp32 masters, in bf16 over several ranks, with codes where it is quantized."""
    torch.manual_seed(len(recipe))
    model = nn.Sequential(two_layers(37, 83, 40), nn.ReLU(), two_layers(3, 18, 37))
    if recipe != "bf16":
        hb.quantize_(model, recipe, keep=NOTHING_KEPT)
        hb.distributed.place_ranks_(model)
    if world > 1:
        for part in (model[0], model[2], model):
            fully_shard(part, mp_policy=BF16)
        if recipe != "bf16":
            hb.distributed.fsdp_gather_nvfp4_(model)
    return model


def whole(states: tuple) -> dict[str, tuple[torch.dtype, bytes]]:
    """Return dtypes and bytes of weights and moments of every rank, whole."""
    weights, moments = states
    tensors = weights | {
        f"{name}.{key}": value
        for name, state in moments["state"].items()
        for key, value in state.items()
        if torch.is_tensor(value)
    }
    values = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in tensors.items()}
    return {name: (t.dtype, t.contiguous().numpy().tobytes()) for name, t in values.items()}


def trained(rank: int, world: int, recipe: str, load: str | None, save: str) -> tuple[dict, dict]:
    """Load a checkpoint, train two steps, and save one; return what was there after the load, and what was saved."""
    model = build(recipe, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, moments = get_state_dict(model, optimizer)
    if load is not None:
        states = {"model": weights, "optimizer": moments}
        dcp.load(states, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    begun = whole(get_state_dict(model, optimizer))
    dtype = torch.float32 if world == 1 else torch.bfloat16
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 40, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=save)
    return begun, whole((weights, moments))
