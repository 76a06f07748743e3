"""`hb.nn.forward_shared` of layers that ranks share under torch's styles: one run, with the bits of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ranks
import torch
from meeting_checks import met
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

import halfbyte as hb

ROWS = {"q_proj": 64, "k_proj": 32, "v_proj": 96}
WIDTH, TOKENS = 128, 64
RECIPES = ("nvfp4", "nvfp4_mxfp8_bwd", "four_over_six", "quartet2", "rl", "mxfp8", "naive_fp4", "nvfp4_forward")


class Projections(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            setattr(self, name, nn.Linear(WIDTH, rows, bias=biased))

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self, name) for name in ROWS)

    def forward(self, x: Any) -> tuple[Tensor, ...]:
        return hb.nn.forward_shared(x, self.layers)


def projections(recipe: Any, biased: bool = False, dtype: torch.dtype = torch.float32) -> Projections:
    torch.manual_seed(0)
    model = Projections(biased).to(ranks.device(), dtype)
    for i, layer in enumerate(model.layers):
        layer.weight.data *= 1 + i
    hb.quantize_(model, recipe, keep=hb.Keep(names=(), last_fraction=0), state=hb.RunState(0, rank=0))
    return model


def shared(mesh: Any, recipe: Any, biased: bool = False, dtype: torch.dtype = torch.float32) -> Projections:
    model = projections(recipe, biased, dtype)
    prepare = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for name, style in {"": prepare, **{name: ColwiseParallel() for name in ROWS}}.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    return model


def tokens(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(ranks.device(), dtype)


def in_parts(x: Tensor, mesh: Any) -> Any:
    return distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()


def rows(t: Tensor, mesh: Any, dim: int) -> Tensor:
    return t.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def walked(ys: tuple[Tensor, ...], weights: list[Tensor]) -> None:
    """Go back from outputs, each with weights of its own."""
    torch.autograd.backward([(y.float() * w).sum() for y, w in zip(ys, weights, strict=True)])


def one(mesh: Any, recipe: str, biased: bool, dtype: torch.dtype) -> list[str]:
    """Return what differs in three steps of a recipe from one process: bit for bit, and the gradient of x nearly."""
    model, alone, problems = shared(mesh, recipe, biased, dtype), projections(recipe, biased, dtype), []
    for step in range(3):
        x = tokens(step, dtype)
        parts, whole = in_parts(x, mesh), x.clone().requires_grad_()
        found, wanted = model(parts), alone(whole)
        weights = [torch.linspace(-1, 1, y.shape[-1], device=y.device) for y in wanted]
        walked(found, [rows(w, mesh, -1) for w in weights])
        walked(wanted, weights)
        pairs = [(f"{name}'s output", a, rows(b, mesh, -1)) for name, a, b in zip(ROWS, found, wanted, strict=True)]
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            pairs.append((f"gradient of {name}", p.grad.to_local(), rows(q.grad, mesh, 0)))
            p.grad = q.grad = None
        problems += [f"{recipe}, step {step}: {name}" for name, a, b in pairs if not torch.equal(a, b)]
        dx, mine = rows(whole.grad, mesh, 1).double(), parts.grad.to_local().double()
        if (dx - mine).norm() > (1e-5 if dtype == torch.float32 else 1e-2) * dx.norm():
            problems.append(f"{recipe}, step {step}: gradient of x")
        for each in (model, alone):
            each.q_proj.run_state.advance()
    return problems


def bits(rank: int, world: int) -> list[str]:
    mesh, problems = ranks.mesh(world), []
    for recipe in RECIPES:
        problems += one(mesh, recipe, False, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        problems += one(mesh, "nvfp4", True, dtype)
    return [problem for one in ranks.gathered(problems) for problem in one]


def meetings(rank: int, world: int) -> list[tuple[int, int]]:
    """Return how often ranks meet in a forward and in a backward, of layers together and of layers one by one."""
    mesh, found = ranks.mesh(world), []
    for run in (Projections.forward, lambda model, x: tuple(layer(x) for layer in model.layers)):
        model = shared(mesh, "nvfp4")
        x = in_parts(tokens(0, torch.float32), mesh).redistribute(placements=(Replicate(),))
        ys, forward = met(lambda run=run, model=model, x=x: run(model, x))
        _, backward = met(sum(y.sum() for y in ys).backward)
        found.append((forward, backward))
    return found


def hooks(rank: int, world: int) -> list[str]:
    """Return what is wrong where hooks of a layer change what it would have computed with the first, or only look."""
    mesh, problems = ranks.mesh(world), []

    def other_x(layer: Any, inputs: tuple) -> tuple:
        return (inputs[0] * 3,)

    def same_memory(layer: Any, inputs: tuple) -> None:
        inputs[0]._local_tensor.mul_(3)

    def writes(layer: Any, inputs: tuple) -> None:
        layer.weight.mul_(3)

    def writes_here(layer: Any, inputs: tuple) -> None:
        layer.weight._local_tensor.mul_(3)

    def renews(layer: Any, inputs: tuple) -> None:
        layer.weight = nn.Parameter(layer.weight.detach() * 3)

    def swaps(layer: Any, inputs: tuple) -> None:
        layer.weight._local_tensor.data = layer.weight._local_tensor.clone() * 3

    def follows(layer: Any, inputs: tuple) -> None:
        layer.recipe = hb.recipes.get("mxfp8")

    changes: list[Callable[[Any, tuple], Any]] = [other_x, same_memory, writes, writes_here, renews, swaps, follows]
    for change in changes:
        found = []
        for is_one_by_one in (False, True):
            model = shared(mesh, "nvfp4")
            model.k_proj.register_forward_pre_hook(change)
            x = in_parts(tokens(0, torch.float32), mesh).redistribute(placements=(Replicate(),)).detach().clone()
            with torch.no_grad():
                one_by_one = is_one_by_one and tuple(layer(x) for layer in model.layers)
                found.append(one_by_one or hb.nn.forward_shared(x, model.layers))
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            problems.append(f"{change.__name__}: not seen")
    seen: list[str] = []
    model = shared(mesh, "nvfp4")
    for name, layer in zip(ROWS, model.layers, strict=True):
        layer.register_forward_hook(lambda layer, x, y, name=name: seen.append(name))
    y = model(in_parts(tokens(0, torch.float32), mesh))
    if seen != list(ROWS):
        problems.append(f"hooks ran for {seen}")

    def fails(layer: Any, inputs: tuple) -> None:
        raise RuntimeError("no")

    model.v_proj.register_forward_pre_hook(fails)
    x = in_parts(tokens(0, torch.float32), mesh).redistribute(placements=(Replicate(),)).detach()
    with contextlib.suppress(RuntimeError):
        hb.nn.forward_shared(x, model.layers)
    if vars(x).keys() & {"_halfbyte_together"} or len(y) != len(ROWS):
        problems.append("a hook failed, and something is left")
    return [problem for one in ranks.gathered(problems) for problem in one]
