"""What a call costs the host: layers beside their bf16 counterparts, timed until the calls return, not the GPU.

Small layers, so that the GPU is done long before the host has issued the next call. Each call is checked by a case of
bench/cases/layer.py, fused.py or grouped.py; here only its time counts. Without a GPU ops run on the reference, and the
figures mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte as hb
from bench.registry import Bar, Case, Outcome, Setting, Shape

WARM_UP, ROUNDS, CALLS = 20, 15, 20
EXPERTS = 8
Step = Callable[[], object]


def host(setting: Setting, shape: Shape, *, layer: str, recipe: str, forward: bool = False) -> Outcome:
    """Time calls of `shape` = (tokens, width, hidden or outputs) in turn with those of bf16."""
    torch.manual_seed(0)
    state = hb.RunState(0, rank=0).to(setting.device)
    ours_made, bf16_made = LAYERS[layer]
    steps = [ours_made((recipe, state), setting.device, shape, forward), bf16_made(setting.device, shape, forward)]
    rounds, calls = (ROUNDS, CALLS) if setting.on_gpu else (3, 2)
    for step in steps:
        for _ in range(WARM_UP if setting.on_gpu else 1):
            step()
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for step, seconds in zip(steps, times, strict=True):
            seconds.append(_seconds(step, calls, setting))
        state.advance()
    ours, bf16 = (statistics.median(seconds) for seconds in times)
    low, _, high = statistics.quantiles(times[0], n=4)
    return Outcome(
        seconds=ours,
        spread=(high - low) / ours,
        metric="x bf16",
        value=statistics.median(a / b for a, b in zip(*times, strict=True)),
        facts={"bf16_us": bf16 * 1e6},
    )


def _seconds(step: Step, calls: int, setting: Setting) -> float:
    """Return what one call takes the host, the GPU idle before the first."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    seconds = (time.perf_counter() - start) / calls
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)
    return seconds


def _step(module: nn.Module, x: Tensor, *others: Tensor, forward: bool) -> Step:
    if forward:

        def run() -> object:
            with torch.no_grad():
                return module(x, *others)

        return run
    x = x.requires_grad_()
    dy, parameters = torch.ones_like(module(x, *others)), list(module.parameters())

    def both() -> None:
        module(x, *others).backward(dy)
        for tensor in (x, *parameters):
            tensor.grad = None

    return both


def _x(device: torch.device, shape: Shape) -> Tensor:
    return torch.randn(shape[:2], dtype=torch.bfloat16, device=device)


How = tuple[str, hb.RunState]
"""Recipe, and where it draws."""


def _linear(how: How, device: torch.device, shape: Shape, forward: bool) -> Step:
    options = {"bias": False, "device": device, "dtype": torch.bfloat16}
    layer = hb.nn.Linear(*shape[1:], recipe=how[0], state=how[1], **options)
    return _step(layer, _x(device, shape), forward=forward)


def _bf16_linear(device: torch.device, shape: Shape, forward: bool) -> Step:
    layer = nn.Linear(*shape[1:], bias=False, device=device, dtype=torch.bfloat16)
    return _step(layer, _x(device, shape), forward=forward)


def _mlp(how: How, device: torch.device, shape: Shape, forward: bool) -> Step:
    layer = hb.nn.LayerNormMLP(*shape[1:], recipe=how[0], state=how[1]).to(device, torch.bfloat16)
    return _step(layer, _x(device, shape), forward=forward)


class _TorchMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y))


def _bf16_mlp(device: torch.device, shape: Shape, forward: bool) -> Step:
    return _step(_TorchMLP(*shape[1:]).to(device, torch.bfloat16), _x(device, shape), forward=forward)


def _ends(device: torch.device, tokens: int) -> Tensor:
    return torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=device) * (tokens // EXPERTS)


def _grouped(how: How, device: torch.device, shape: Shape, forward: bool) -> Step:
    layer = hb.nn.GroupedLinear(EXPERTS, *shape[1:], recipe=how[0], state=how[1]).to(device, torch.bfloat16)
    return _step(layer, _x(device, shape), _ends(device, shape[0]), forward=forward)


class _TorchExperts(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, out, width) * width**-0.5)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        if not x.is_cuda:
            return torch.cat([x_g @ w.T for x_g, w in zip(x.chunk(EXPERTS), self.weight, strict=True)])
        return F.grouped_mm(x, self.weight.mT, offs=offsets)


def _bf16_grouped(device: torch.device, shape: Shape, forward: bool) -> Step:
    experts = _TorchExperts(*shape[1:]).to(device, torch.bfloat16)
    return _step(experts, _x(device, shape), _ends(device, shape[0]), forward=forward)


LAYERS: dict[str, tuple[Callable[..., Step], Callable[..., Step]]] = {
    "linear": (_linear, _bf16_linear),
    "mlp": (_mlp, _bf16_mlp),
    "grouped": (_grouped, _bf16_grouped),
}
"""By name: what makes our call and bf16's."""


def _case(name: str, about: str, shape: Shape, bar: Bar, layer: str, recipe: str, *, forward: bool = False) -> Case:
    run = partial(host, layer=layer, recipe=recipe, forward=forward)
    return Case(name=f"host/{name}", about=about, shapes={shape: bar}, small=(16, 64, 64), run=run)


SMALL: Shape = (512, 768, 768)
CASES = (
    _case("linear-nvfp4", "host time of forward + backward", SMALL, Bar(least=4, aim=2.5), "linear", "nvfp4"),
    _case("eval-nvfp4", "host time of forward", SMALL, Bar(least=6, aim=4), "linear", "nvfp4", forward=True),
    *(
        _case(f"linear-{name}", "the same, forward + backward", SMALL, Bar(least=5, aim=3), "linear", name)
        for name in ("four_over_six", "nvfp4_mxfp8_bwd")
    ),
    _case("mlp-nvfp4", "the same, LayerNormMLP", (512, 768, 2048), Bar(least=5, aim=3), "mlp", "nvfp4"),
    _case("grouped-nvfp4", f"the same, {EXPERTS} experts", SMALL, Bar(least=5, aim=3), "grouped", "nvfp4"),
)
