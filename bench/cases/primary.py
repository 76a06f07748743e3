"""The cast of a model's weights from fp32 masters, whole on one device: all stages but the exchange between ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import halfbyte as hb
from bench.measure import bandwidth, require_equal
from bench.registry import Bar, Case, Outcome, Setting, Shape
from halfbyte.distributed import cast_master_weights_to_nvfp4
from halfbyte.spec import NVFP4
from halfbyte.tensor import PrimaryWeight, QuantTensor

TILE = NVFP4(block=(16, 16))
CHECKED = 3
MANY = 1000
"""Weights of the call whose time on the host is measured."""


def cast(setting: Setting, shape: Shape) -> Outcome:
    """Cast shape[0] weights [shape[1], shape[2]], each with its master."""
    count, rows, cols = shape
    generator = torch.Generator(setting.device).manual_seed(0)
    masters = [torch.randn(rows * cols, generator=generator, device=setting.device) for _ in range(count)]
    weights: list[QuantTensor] = [PrimaryWeight.empty((rows, cols), TILE, device=setting.device) for _ in range(count)]
    starts = [0] * count

    def run() -> None:
        cast_master_weights_to_nvfp4(weights, masters, starts, None)

    run()
    for weight, master in list(zip(weights, masters, strict=True))[:CHECKED]:
        whole = hb.quantize(master.view(rows, cols).bfloat16(), TILE)
        require_equal(list(weight.blocks), list(whole.blocks), "cast against quantize of the whole weight")
    # The masters are read twice, for amaxes and for codes; codes and scales are written.
    moved = count * rows * cols * 8 + sum(weight.nbytes for weight in weights)
    facts = {"launches": float(_launches(setting, run)), "host_us_1000": _host_seconds(setting) * 1e6}
    outcome = bandwidth(setting, [run], moved, [f"bytes of {min(CHECKED, count)} weights equal to quantize"])
    return replace(outcome, facts=facts)


def _launches(setting: Setting, run: Callable[[], None]) -> int:
    """Return how many kernels and memory operations a call launches; 0 without a GPU."""
    if not setting.on_gpu:
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ())


def _host_seconds(setting: Setting) -> float:
    """Return the time until a call for many small weights returns, the device not waited for."""
    count = MANY if setting.on_gpu else 10
    masters = [torch.zeros(256, device=setting.device) for _ in range(count)]
    weights: list[QuantTensor] = [PrimaryWeight.empty((16, 16), TILE, device=setting.device) for _ in range(count)]
    starts, seconds = [0] * count, []
    for _ in range(6):
        start = time.perf_counter()
        cast_master_weights_to_nvfp4(weights, masters, starts, None)
        seconds.append(time.perf_counter() - start)
        if setting.on_gpu:
            torch.cuda.synchronize(setting.device)
    return statistics.median(seconds[1:])


CASES = (
    Case(
        name="primary/cast",
        about="1.07B parameters from fp32 masters to NVFP4",
        shapes={(64, 4096, 4096): Bar(least=0.60, aim=0.80)},
        small=(3, 32, 48),
        run=cast,
    ),
)
