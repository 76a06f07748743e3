"""A small model, its data, and the plain loop that trainers of others are compared with bit for bit."""

from __future__ import annotations

import torch
from torch import nn

import halfbyte as hb

ALL = hb.Keep(names=(), last_fraction=0)
STEPS, ACCUMULATE, BATCH, WIDTH = 3, 2, 8, 32


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))


def batches(count: int = STEPS * ACCUMULATE, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def by_hand(model: nn.Module, state: hb.RunState, data: list[torch.Tensor], accumulate: int = ACCUMULATE):
    """Train a converted model in a plain loop, on the ranks' data one after the other, and return its parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for micro in range(accumulate):
            for rank, own in enumerate(data):
                state.set_rank(rank)
                (loss_of(model, own[step * accumulate + micro]) / (accumulate * len(data))).backward()
            state.advance()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def expected(recipe="nvfp4", ranks: int = 1, accumulate: int = ACCUMULATE) -> list[torch.Tensor]:
    model = layers()
    state = hb.quantize_(model, recipe, keep=ALL).state
    data = [batches(seed=5 + rank) for rank in range(ranks)]
    return by_hand(model, state, data, accumulate)
