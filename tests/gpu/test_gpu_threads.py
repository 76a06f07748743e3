"""Several threads, streams and devices in one process: each model gets the bytes that it gets alone."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import halfbyte as hb

STEPS = 6
RECIPES = ("nvfp4", "nvfp4_mxfp8_bwd")


class Block(nn.Module):
    """A norm, an MLP and a residual sum."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(seed: int, recipe: str, device: str, meet=lambda: None) -> list[torch.Tensor]:
    """Return the loss of every step and the parameters after the last."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*(Block(256) for _ in range(3)), nn.Linear(256, 32))
    for parameter in model.parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.to(device, torch.bfloat16)
    state = hb.quantize_(model, recipe, state=hb.RunState(seed, rank=0).to(device)).state
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        rows = 192 + 64 * (step % 2)  # another record every other step
        x = torch.randn(rows, 256, generator=generator).to(device, torch.bfloat16)
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


@pytest.mark.parametrize("own_streams", (False, True), ids=("one stream", "a stream each"))
def test_threads_get_the_bytes_of_one_after_the_other(own_streams):
    places = [(seed, recipe) for seed, recipe in enumerate(RECIPES * 2)]
    expected = [trained(*place, "cuda") for place in places]

    def job(place, meet):
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else torch.cuda.current_stream()):
            return trained(*place, "cuda", meet)

    actual = together([lambda meet, place=place: job(place, meet) for place in places])
    assert_equal(actual, expected)
    assert not torch.equal(expected[0][0], expected[2][0])  # other seeds, other runs


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_devices_get_the_bytes_of_one():
    places = [(0, recipe, device) for recipe in RECIPES for device in ("cuda:0", "cuda:1")]
    expected = [trained(seed, recipe, "cuda:0") for seed, recipe, _ in places]
    assert_equal([trained(*place) for place in places], expected)
    actual = together([lambda meet, place=place: trained(*place, meet) for place in places])
    assert_equal(actual, expected)
