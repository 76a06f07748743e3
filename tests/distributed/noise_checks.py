"""What every rank does in test_noise_ranks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import halfbyte as hb


def converted(rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    hb.quantize_(model, "nvfp4", keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(1, rank=rank))
    return model


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))).square().mean()


def of_a_rank(rank: int, world: int) -> tuple[float, float]:
    model = converted(rank)
    found = hb.stats.gradient_noise(model, [lambda: loss(model, rank)], group=dist.group.WORLD)
    return found.norm, found.noise
