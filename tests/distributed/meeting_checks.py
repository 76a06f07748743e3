"""How often ranks that share linear layers meet for amaxes, and whether what they find follows the weights."""

from __future__ import annotations

from collections import Counter

import ranks
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module
from torch.profiler import ProfilerActivity, profile

import halfbyte as hb

NAMES = ("q_proj", "k_proj", "v_proj")
LAYERS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
RECIPE = hb.recipes.nvfp4(stochastic_rounding=False, hadamard=None)


class Siblings(nn.Module):
    """Three layers that read one x."""

    def __init__(self) -> None:
        super().__init__()
        for i, (name, rows) in enumerate(LAYERS.items()):
            setattr(self, name, nn.Linear(32, rows, bias=False))
            getattr(self, name).weight.data *= 1 + i

    def forward(self, x):
        return torch.cat([getattr(self, name)(x) for name in NAMES], -1)


def siblings() -> Siblings:
    torch.manual_seed(0)
    model = Siblings()
    hb.quantize_(model, RECIPE, keep=hb.Keep(names=(), last_fraction=0))
    return model.to(ranks.device())


def parallel(mesh, way: str) -> Siblings:
    model = siblings()
    if way == "codes":
        plan = {"": hb.distributed.NVFP4Colwise(*NAMES)}
    else:
        prepare = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan = {"": prepare} | {name: ColwiseParallel() for name in NAMES}
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    return model


def met(call) -> tuple:
    """Return what `call` returns, and how often it reduces over ranks."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        found = call()
    return found, Counter(event.name for event in seen.events())["_c10d_functional::all_reduce"]


def here(t: torch.Tensor, mesh) -> torch.Tensor:
    """Return this rank's columns of every sibling's output, as it has them."""
    parts = t.split(list(LAYERS.values()), -1)
    return torch.cat([part.chunk(mesh.size(), -1)[mesh.get_local_rank()] for part in parts], -1)


def siblings_meet(rank: int, world: int, way: str, wanted: tuple[int, int]) -> list[str]:
    """Return what is wrong: how often siblings meet in forward and backward, and whether their outputs are one's."""
    mesh, problems = ranks.mesh(world), []
    model, alone = parallel(mesh, way), siblings()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 64, 32, generator=generator).to(ranks.device())
    shared = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    for step in range(3):
        y, forward = met(lambda: model(shared))
        if not torch.equal(y, here(alone(x), mesh)):
            problems.append(f"{way}, step {step}: other outputs than one process has")
        _, backward = met(y.sum().backward)
        if (forward, backward) != wanted:
            problems.append(f"{way}, step {step}: ranks met {forward} and {backward} times, not {wanted}")
        with torch.no_grad():
            for one in (model, alone):
                one.v_proj.weight.mul_(2)  # by the same DTensor or tensor, as optimizers do
    return [problem for one in ranks.gathered(problems) for problem in one]


def found_again(rank: int, world: int) -> list[str]:
    """Return what is wrong where siblings read one tensor and a weight changes between two of their calls."""
    mesh, problems = ranks.mesh(world), []
    model, alone = parallel(mesh, "values"), siblings()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(ranks.device())

    def both(name: str) -> None:
        found, wanted = model.get_submodule(name)(x), alone.get_submodule(name)(x)
        if not torch.equal(found, wanted.chunk(world, -1)[rank]):
            problems.append(f"{name}: the amax is not that of the weights")

    def each(change) -> None:
        with torch.no_grad():
            change(model.k_proj.weight), change(alone.k_proj.weight)

    both("q_proj")
    each(lambda w: w.mul_(5))
    both("v_proj")
    each(lambda w: (w._local_tensor if hasattr(w, "_local_tensor") else w).mul_(5))  # past the wrapper
    both("k_proj")

    def renewed(times: float) -> None:
        for one in (model, alone):  # new parameters, to which nobody has written
            one.k_proj.weight = nn.Parameter(one.k_proj.weight.detach() * times)

    renewed(1)
    both("q_proj")
    renewed(7)
    both("v_proj")
    both("v_proj")
    return [problem for one in ranks.gathered(problems) for problem in one]
