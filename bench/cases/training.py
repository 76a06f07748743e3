"""A whole training step of a decoder under a recipe beside the same step in bf16, both compiled and replayed as
CUDA graphs: bf16's model compiled as a whole, ours fused (`hb.nn.fuse_`) and compiled block by block, as `halfbyte
train` does it. Mixtures of experts are compiled neither way.

Master weights and optimizer are fp32, GEMMs run under bf16 autocast, as `halfbyte train` does it. Both models' graphs
are replayed in turn, a step each, so that clocks and heat meet both; where the GPU has no room for both they are built
and timed one after the other, and the record says so. Peak memory is that of one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

import halfbyte as hb
from bench.registry import Bar, Case, Outcome, Setting, Shape, Unequal
from halfbyte import recipes
from halfbyte.train import graphs, optim
from halfbyte.train import model as models
from halfbyte.train.config import OptimConfig

STEPS = 24  # of each: where steps differ by 2 % their median is known to 0.3 %
LEAST_PROGRESS = 0.6  # of bf16's fall in loss over all these steps: the recipe trains, it does not merely run
MEMORY_TOLERANCE = 0.05
MOST_KEPT = 0.30  # of the bytes that bf16's linear layers keep per token, under the recipe


def training(setting: Setting, shape: Shape, *, model: str) -> Outcome:
    """Time steps of `shape` = (sequences, tokens of one) under nvfp4 and in bf16."""
    model = model if setting.on_gpu else "moe-tiny" if model.startswith("moe") else "tiny"
    config = models.model_preset(model)
    bf16 = _Stepped(setting, shape, config, "bf16")
    shortage = _shortage(setting, bf16)
    if shortage:
        _time(setting, bf16)
        bf16.release()
    ours = _Stepped(setting, shape, config, "nvfp4")
    _time(setting, *(ours,) if shortage else (bf16, ours))
    for stepped in (bf16, ours):
        stepped.release()
    if not bf16.fall > 0:
        raise Unequal(f"bf16's loss did not fall: {bf16.fall:+.4f}")
    progress = ours.fall / bf16.fall
    if not progress >= LEAST_PROGRESS:
        raise Unequal(f"the loss fell by {ours.fall:.4f}, in bf16 by {bf16.fall:.4f}")
    share, checked = _kept(setting, config, shape)
    if not share <= MOST_KEPT:
        raise Unequal(f"linear layers keep {share:.3f} of what bf16's keep, at most {MOST_KEPT}")
    tokens = shape[0] * shape[1]
    low, seconds, high = statistics.quantiles(ours.seconds, n=4)
    bf16_seconds = statistics.median(bf16.seconds)
    return Outcome(
        seconds=seconds,
        spread=(high - low) / seconds,
        metric="x bf16",
        value=seconds / bf16_seconds,
        checked=(
            f"the loss falls by {progress:.0%} of bf16's fall",
            f"one after the other: {shortage}" if shortage else f"{len(ours.seconds)} steps each, in turn",
            *checked,
        ),
        facts={
            "bf16_us": bf16_seconds * 1e6,
            "tokens_per_second": tokens / seconds,
            "peak_GiB": ours.peak / 2**30,
            "bf16_peak_GiB": bf16.peak / 2**30,
            "linears_kept_of_bf16": share,
            "parameters": float(config.parameters),
        },
    )


class _Stepped:
    """A model whose step is captured and has been replayed: its losses, and the seconds of steps that were timed.

    Attributes:
        peak: bytes in tensors beside what was there before.
        reserved: the most bytes that the allocator had of the GPU, beside what it had before.
    """

    def __init__(self, setting: Setting, shape: Shape, config: models.ModelConfig, recipe: str) -> None:
        self.seconds: list[float] = []
        held = had = self.peak = self.reserved = 0
        if setting.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(setting.device)
            held, had = torch.cuda.memory_allocated(setting.device), torch.cuda.memory_reserved(setting.device)
        self.step: Callable[[], torch.Tensor] | None = _stepper(setting, shape, config, recipe)
        # Eager steps; on a GPU then the capture and the first replay.
        self.losses = [float(self.step()) for _ in range(graphs.WARM_UP + 2 if setting.on_gpu else 1)]
        if setting.on_gpu:
            self.peak = torch.cuda.max_memory_allocated(setting.device) - held
            self.reserved = torch.cuda.max_memory_reserved(setting.device) - had

    @property
    def fall(self) -> float:
        """How far the loss fell, from the first step to the last."""
        return self.losses[0] - self.losses[-1]

    def once(self) -> None:
        """Time a step."""
        assert self.step is not None
        start = time.perf_counter()
        self.losses.append(float(self.step()))  # waits for the device, as a log line would
        self.seconds.append(time.perf_counter() - start)

    def release(self) -> None:
        """Give its memory back."""
        self.step = None
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _shortage(setting: Setting, first: _Stepped) -> str:
    """Say why there is no room for another like it, "" if there is."""
    if not setting.on_gpu:
        return ""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free >= first.reserved:
        return ""
    return f"{free / 2**30:.1f} GiB are free, and bf16 took {first.reserved / 2**30:.1f}"


def _time(setting: Setting, *some: _Stepped) -> None:
    """Time steps of all of them in turn, the last one first in every second turn."""
    for turn in range(STEPS if setting.on_gpu else 2):
        for stepped in some if turn % 2 == 0 else reversed(some):
            stepped.once()


def _kept(setting: Setting, config: models.ModelConfig, shape: Shape) -> tuple[float, list[str]]:
    """Compare what memory_report computes with what eager forwards leave allocated; return linears' share of bf16's."""
    inputs, checked = torch.zeros(2, shape[1], dtype=torch.int64, device=setting.device), []
    with setting.device:
        model = models.Decoder(config)
    hb.quantize_(model, "nvfp4", state=hb.RunState(0).to(setting.device))
    report = hb.memory_report(model, inputs)
    for row in report.rows if setting.on_gpu else ():
        hb.set_recipe_(model, row.recipe)
        for _ in range(2):  # the first compiles kernels and makes workspaces
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated(setting.device)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(inputs)
            measured = torch.cuda.memory_allocated(setting.device) - before - logits.nbytes
            del logits
        gap = row.bytes(inputs.numel()) / measured - 1
        checked.append(f"{row.recipe} keeps {measured / 2**30:.3f} GiB of {inputs.numel()} tokens, computed {gap:+.2%}")
        if not abs(gap) <= MEMORY_TOLERANCE:
            raise Unequal(checked[-1])
    return report.rows[1].linear_per_token / report.rows[0].linear_per_token, checked


def _stepper(setting: Setting, shape: Shape, config: models.ModelConfig, recipe: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    with setting.device:
        model = models.Decoder(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(config.vocab_size, (shape[0], shape[1] + 1))
    state = hb.RunState(0).to(setting.device)
    hb.quantize_(model, recipes.get(recipe), state=state)
    optimizer = optim.adamw(model, replace(OptimConfig(), lr=1e-4))
    forward = model
    compiles = setting.on_gpu and config.moe is None
    if compiles and recipe == "bf16":
        forward = torch.compile(model)  # the most that the baseline can get
    elif compiles:
        hb.nn.fuse_(model)
        for block in model.layers:  # one graph for all: minutes less to compile
            block.compile(fullgraph=True)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> torch.Tensor:
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.on_gpu):
            logits = forward(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        state.advance()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    replayed = graphs.GraphedStep(lambda: (step(),), setting.device)
    return lambda: replayed()[0]


MODELS = (
    ("60m", (16, 2048), 1.20, 1.12),
    ("125m", (16, 2048), 1.16, 1.11),
    ("300m", (16, 2048), 1.17, 1.12),
    ("300m", (8, 2048), 1.17, 1.12),
    ("1b", (8, 2048), 1.07, 1.05),
    ("moe-300m", (8, 2048), 1.35, 1.15),
)
CASES = tuple(
    Case(
        name=f"train/{name}",
        about=f"a step of the {name} preset, recipe nvfp4, fused, compiled, as a CUDA graph",
        shapes={shape: Bar(least=least, aim=aim) for model, shape, least, aim in MODELS if model == name},
        small=(4, 32),
        run=partial(training, model=name),
    )
    for name in dict.fromkeys(model for model, *_ in MODELS)
)
