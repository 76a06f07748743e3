"""Training steps without CUDA graphs, as a user's own loop runs them, and how much of them the GPU is busy.

Parameters are bf16, AdamW is torch's fused one. Dense models are compiled block by block, ours fused (`hb.nn.fuse_`);
mixtures of experts run eagerly, both, and are read in turn. The share that the GPU is busy is the union of its kernels'
times in one profiled step, of a step's median time over readings.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import halfbyte as hb
from bench.registry import Bar, Case, Outcome, Setting, Shape, Unequal
from halfbyte import recipes
from halfbyte.train import model as models

WARM_UP, READINGS, EVERY, LR = 5, 5, 6, 1e-4  # the loss is read once in EVERY steps, as a loop that logs does
LEAST_PROGRESS = 0.5  # of bf16's fall in loss: the recipe trains, it does not merely run


def steps(setting: Setting, shape: Shape, *, model: str) -> Outcome:
    """Time steps of `shape` = (sequences, tokens of one) under nvfp4 and in bf16."""
    model = model if setting.on_gpu else "moe-tiny" if model.startswith("moe") else "tiny"
    if models.model_preset(model).moe is None:  # compiled code of two models would look for its own in one cache
        (bf16,), (ours,) = (_measure(setting, shape, model, (recipe,)) for recipe in ("bf16", "nvfp4"))
    else:  # the host sets the pace of eager ones, and other programs that of the host
        bf16, ours = _measure(setting, shape, model, ("bf16", "nvfp4"))
    if not bf16["fall"] > 0:
        raise Unequal(f"bf16's loss did not fall: {bf16['fall']:+.4f}")
    progress = ours["fall"] / bf16["fall"]
    if not progress >= LEAST_PROGRESS:
        raise Unequal(f"the loss fell by {ours['fall']:.4f}, in bf16 by {bf16['fall']:.4f}")
    return Outcome(
        seconds=ours["seconds"],
        spread=ours["spread"],
        metric="x bf16",
        value=ours["seconds"] / bf16["seconds"],
        checked=(f"the loss falls by {progress:.0%} of bf16's fall",),
        facts={
            "bf16_us": bf16["seconds"] * 1e6,
            "busy": ours["busy"] / ours["seconds"],
            "bf16_busy": bf16["busy"] / bf16["seconds"],
            "first_step_s": ours["first"],
            "bf16_first_step_s": bf16["first"],
            "tokens_per_second": shape[0] * shape[1] / ours["seconds"],
            "parameters": float(models.model_preset(model).parameters),
        },
    )


def _measure(setting: Setting, shape: Shape, model: str, recipes: tuple[str, ...]) -> list[dict[str, float]]:
    """Return of each recipe seconds of a step, in turn, their spread, the first's, the GPU's, and the loss's fall."""
    steps = [_stepper(setting, shape, model, recipe) for recipe in recipes]
    firsts, losses, seconds = [], [], [[] for _ in steps]
    for step in steps:
        start = time.perf_counter()
        losses.append([float(step())])
        firsts.append(time.perf_counter() - start)
        losses[-1] += [float(step()) for _ in range(WARM_UP if setting.on_gpu else 1)]
    for _ in range(READINGS if setting.on_gpu else 2):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            some = [step() for _ in range(EVERY)]
            losses[i].append(float(some[-1]))  # waits for the device
            seconds[i].append((time.perf_counter() - start) / EVERY)
    busy = [_busy(step) if setting.on_gpu else 0.0 for step in steps]
    steps.clear()
    del step
    gc.collect()
    torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    found = []
    for i in range(len(recipes)):
        low, middle, high = statistics.quantiles(seconds[i], n=4)
        read = {"seconds": middle, "spread": (high - low) / middle, "first": firsts[i], "busy": busy[i]}
        found.append(read | {"fall": losses[i][0] - losses[i][-1]})
    return found


def _busy(step: Callable[[], object]) -> float:
    """Return for how many seconds of a step some kernel, copy or fill runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    events = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    total, end = 0.0, float("-inf")
    for begin, finish in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total / 1e6


def _stepper(setting: Setting, shape: Shape, model: str, recipe: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    config = models.model_preset(model)
    with setting.device:
        net = models.Decoder(config)
        for parameter in net.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(config.vocab_size, (shape[0], shape[1] + 1))
    net.to(torch.bfloat16)
    state = hb.RunState(0, rank=0).to(setting.device)
    hb.quantize_(net, recipes.get(recipe), state=state)
    if setting.on_gpu and config.moe is None:
        if recipe != "bf16":
            hb.nn.fuse_(net)
        for block in net.layers:  # one graph for all
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(net(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        state.advance()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


MODELS = (
    ("60m", (16, 2048), 1.30, 1.15),
    ("125m", (16, 2048), 1.22, 1.13),
    ("300m", (16, 2048), 1.27, 1.13),
    ("1b", (8, 2048), 1.10, 1.06),
    ("moe-60m", (8, 2048), 1.4, 1.2),
    ("moe-300m", (8, 2048), 1.35, 1.15),
)
CASES = tuple(
    Case(
        name=f"steps/{name}",
        about=f"a step of the {name} preset, recipe nvfp4, without a CUDA graph",
        shapes={shape: Bar(least=least, aim=aim)},
        small=(4, 32),
        run=partial(steps, model=name),
    )
    for name, shape, least, aim in MODELS
)
