"""Models that train in threads which begin every step at once, and what they are compared with."""

from __future__ import annotations

import threading

import torch
from torch import nn

import halfbyte as hb

STEPS = 6


class Block(nn.Module):
    """A norm, an MLP and a residual sum."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(seed: int, recipe: str, device: str, meet=lambda: None, width: int = 256) -> list[torch.Tensor]:
    """Return the loss of every step and the parameters after the last."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*(Block(width) for _ in range(3)), nn.Linear(width, 32))
    for parameter in model.parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.to(device, torch.bfloat16)
    state = hb.quantize_(model, recipe, state=hb.RunState(seed, rank=0).to(device)).state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        rows = width * 3 // 4 + width // 4 * (step % 2)  # another record every other step
        x = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
        meet()
        loss = model(x).float().square().mean()
        loss.backward()
        state.advance()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [t.detach().cpu() for t in (*found, *model.parameters())]


def together(jobs: list) -> list:
    """Run the jobs in threads that begin every step at once; return what they return."""
    barrier, results, errors = threading.Barrier(len(jobs), timeout=120), [None] * len(jobs), []

    def run(i: int, job) -> None:
        try:
            results[i] = job(barrier.wait)
        except BaseException as error:  # a test reports it
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i, job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def assert_equal(actual: list, expected: list) -> None:
    for ours, alone in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
