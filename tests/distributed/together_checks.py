"""`hb.nn.forward_shared` of layers that ranks share under torch's styles: one run, with the bits of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ranks
import torch
from meeting_checks import met
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

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


def one_by_one(model: Projections, x: Any) -> tuple[Tensor, ...]:
    return tuple(layer(x) for layer in model.layers)


def replicated(mesh: Any) -> Any:
    return in_parts(tokens(0, torch.float32), mesh).redistribute(placements=(Replicate(),)).detach().requires_grad_()


def meetings_of(mesh: Any, run: Callable[[Projections, Any], Any], model: Projections) -> tuple[int, int]:
    """Return how often ranks meet in a forward and in a backward."""
    x = replicated(mesh)
    ys, forward = met(lambda: run(model, x))
    _, backward = met(sum(y.sum() for y in ys).backward)
    return forward, backward


class OwnStyle(ColwiseParallel):
    @staticmethod
    def _prepare_input_fn(given: Any, wanted: Any, layer: Any, inputs: Any, mesh: Any) -> Any:
        return ColwiseParallel._prepare_input_fn(given, wanted, layer, inputs, mesh)


def other_recipe(mesh: Any) -> Projections:
    model = shared(mesh, "nvfp4")
    model.k_proj.recipe = hb.recipes.get("nvfp4_mxfp8_bwd")
    return model


def hooked(mesh: Any) -> Projections:
    model = shared(mesh, "nvfp4")
    model.k_proj.register_forward_hook(lambda layer, x, y: None)
    return model


def hooked_behind(mesh: Any) -> Projections:
    model = shared(mesh, "nvfp4")
    model.k_proj.register_full_backward_hook(lambda layer, dx, dy: None)
    return model


def compiled_alone(mesh: Any) -> Projections:
    model = shared(mesh, "nvfp4")
    model.k_proj.compile(backend="eager")
    return model


def own_style(mesh: Any) -> Projections:
    model = projections("nvfp4")
    for name in ROWS:
        parallelize_module(model.get_submodule(name), mesh, OwnStyle(), src_data_rank=None)
    return model


def other_placement(mesh: Any) -> Projections:
    model = projections("nvfp4")
    for name in ROWS:
        style = ColwiseParallel() if name != "v_proj" else RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    return model


def meetings(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Return how often ranks meet in a forward and in a backward, of layers together and of layers one by one."""
    mesh = ranks.mesh(world)
    together = {"together": Projections.forward, "one by one": one_by_one, "twice": twice}
    found = {name: meetings_of(mesh, run, shared(mesh, "nvfp4")) for name, run in together.items()}
    apart = (other_recipe, hooked, hooked_behind, compiled_alone, own_style, other_placement)
    return found | {make.__name__: meetings_of(mesh, Projections.forward, make(mesh)) for make in apart}


def twice(model: Projections, x: Any) -> tuple[Tensor, ...]:
    return hb.nn.forward_shared(x, (model.q_proj, model.k_proj, model.q_proj))


def stepped(mesh: Any, model: Projections, run: Callable[[Projections, Any], Any]) -> list[Tensor]:
    """Return the outputs and gradients of a step."""
    x = replicated(mesh)
    ys = run(model, x)
    torch.autograd.backward([(y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum() for y in ys])
    return [*ys, x.grad.to_local(), *[p.grad.to_local() for p in model.parameters()]]


def checkpointed(model: Projections, x: Any) -> tuple[Tensor, ...]:
    return checkpoint(model.forward, x, use_reentrant=False)


def ways(rank: int, world: int) -> list[str]:
    """Return what differs from `forward_shared`: compiled, recomputed, in threads, and behind torch's checkpoints."""
    mesh, problems = ranks.mesh(world), []
    for recipe in ("nvfp4", "quartet2"):
        wanted = stepped(mesh, shared(mesh, recipe, True), Projections.forward)
        compiled = torch.compile(Projections.forward, backend="eager")
        for name, run in (("compiled", compiled), ("checkpoint", checkpointed)):
            found = stepped(mesh, shared(mesh, recipe, True), run)
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                problems.append(f"{recipe}, {name}")
    model = shared(mesh, "mxfp8", True)
    for layer in model.layers:
        checkpoint_module(layer)
    found, alone = (stepped(mesh, m, Projections.forward) for m in (model, shared(mesh, "mxfp8", True)))
    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, alone, strict=True)):
        problems.append("layers behind a checkpoint each")
    x, kept = replicated(mesh).detach(), [None, None]
    models = [shared(mesh, "nvfp4"), shared(mesh, "mxfp8")]
    with torch.no_grad():
        expected = [model.forward(x) for model in models]
        barrier = threading.Barrier(2, timeout=30)

    def run_on_x(index: int) -> None:
        with torch.no_grad():
            barrier.wait()
            kept[index] = [models[index].forward(x) for _ in range(5)]

    threads = [threading.Thread(target=run_on_x, args=(index,)) for index in range(2 if world == 1 else 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(len(threads)):
        for ys in kept[index] or [()]:
            if not all(torch.equal(a, b) for a, b in zip(ys, expected[index], strict=True)):
                problems.append("threads")
    return [problem for one in ranks.gathered(problems) for problem in one]


def hooks(rank: int, world: int) -> list[str]:
    """Return what is wrong where hooks of k change x, its parameters or how it computes, beside layers one by one."""
    mesh, problems = ranks.mesh(world), []

    def other_x(layer: Any, inputs: tuple) -> tuple:
        return (inputs[0] * 3,)

    def same_memory(layer: Any, inputs: tuple) -> None:
        inputs[0]._local_tensor.mul_(3)

    def same_tensor(layer: Any, inputs: tuple) -> None:
        inputs[0].mul_(3)

    def writes(layer: Any, inputs: tuple) -> None:
        layer.weight.mul_(3)

    def adds_to_bias(layer: Any, inputs: tuple) -> None:
        layer.bias._local_tensor.add_(3)

    def swaps(layer: Any, inputs: tuple) -> None:
        layer.weight._local_tensor.data = layer.weight._local_tensor.clone() * 3

    def follows(layer: Any, inputs: tuple) -> None:
        layer.recipe = hb.recipes.get("mxfp8")

    def nests(layer: Any, inputs: tuple) -> None:
        hb.nn.forward_shared(inputs[0], model.layers[:1])

    for change in (other_x, same_memory, same_tensor, writes, adds_to_bias, swaps, follows, nests):
        found = []
        for run in (Projections.forward, one_by_one):
            model = shared(mesh, "nvfp4", True)
            model.k_proj.register_forward_pre_hook(change)
            with torch.no_grad():
                found.append(run(model, replicated(mesh).detach().clone()))
        if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            problems.append(f"{change.__name__}: not seen")
    seen: list[str] = []
    model = shared(mesh, "nvfp4")
    for name, layer in zip(ROWS, model.layers, strict=True):
        layer.register_forward_hook(lambda layer, x, y, name=name: seen.append(name))
    model(in_parts(tokens(0, torch.float32), mesh))
    if seen != list(ROWS):
        problems.append(f"hooks ran for {seen}")
    titles = {layer: name for name, layer in zip(ROWS, model.layers, strict=True)}
    everywhere: list[str] = []
    note = lambda layer, *_: everywhere.extend([titles[layer]] if layer in titles else [])  # noqa: E731
    hook = nn.modules.module.register_module_forward_pre_hook(note)
    model(in_parts(tokens(0, torch.float32), mesh))
    hook.remove()
    if everywhere != list(ROWS):
        problems.append(f"hooks of all modules ran for {everywhere}")
    return [problem for one in ranks.gathered(problems) for problem in one]
